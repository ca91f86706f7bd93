# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused with one line that says what to do."""

import logging
import types
from typing import Any

import pytest

from umbp.connector.support import check_supported, warn_of_policy
from umbp.errors import ConfigError


def ns(**fields: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**fields)


class FullAttentionSpec:
    """Named as vLLM's class, which is all that is looked at."""


class MLAAttentionSpec(FullAttentionSpec): ...


class SlidingWindowSpec: ...


class MambaSpec: ...


class RSWASpec(FullAttentionSpec): ...


def engine(*specs: Any, pipeline: int = 1, sleep: bool = False, policy: str = "recompute") -> Any:
    vllm_config = ns(
        parallel_config=ns(pipeline_parallel_size=pipeline),
        model_config=ns(enable_sleep_mode=sleep),
        kv_transfer_config=ns(kv_load_failure_policy=policy),
    )
    groups = [ns(kv_cache_spec=spec, layer_names=["l"]) for spec in specs]
    return vllm_config, ns(kv_cache_groups=groups)


@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(),
        MLAAttentionSpec(),
        ns(kv_cache_specs={"a": FullAttentionSpec(), "b": MLAAttentionSpec()}),
    ],
)
def test_one_group_of_full_attention_is_supported(spec: Any) -> None:
    check_supported(*engine(spec))


@pytest.mark.parametrize(
    ("arguments", "fields", "words"),
    [
        ([FullAttentionSpec()], {"pipeline": 2}, "pipeline_parallel_size is 2.*--pipeline-p"),
        ([FullAttentionSpec()], {"sleep": True}, "enable_sleep_mode"),
        ([FullAttentionSpec(), MambaSpec()], {}, "2 KV cache groups.*--kv-transfer-config"),
        ([], {}, "0 KV cache groups"),
        ([SlidingWindowSpec()], {}, "of kind SlidingWindowSpec"),
        ([MambaSpec()], {}, "of kind MambaSpec"),
        # A subclass of full attention that drops blocks is no full attention.
        ([RSWASpec()], {}, "of kind RSWASpec"),
        ([ns(kv_cache_specs={"a": FullAttentionSpec(), "b": RSWASpec()})], {}, "RSWASpec"),
    ],
)
def test_refusals_name_the_condition_and_the_flag(
    arguments: list[Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        check_supported(*engine(*arguments, **fields))
    assert "\n" not in str(refusal.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_supported(*engine(MambaSpec(), pipeline=4, sleep=True))
    for word in ("pipeline_parallel_size", "enable_sleep_mode", "MambaSpec"):
        assert word in str(refusal.value)


def test_policy_fail_warns_and_names_the_option(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_policy(engine(FullAttentionSpec(), policy="fail")[0])
    (record,) = caplog.records
    assert '"kv_load_failure_policy": "recompute"' in record.getMessage()


def test_policy_recompute_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_policy(engine(FullAttentionSpec())[0])
    assert not caplog.records

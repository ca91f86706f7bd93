# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused with one line that says what to do."""

import logging
import types
from typing import Any

import pytest

from umbp.connector.setup import load_async
from umbp.connector.support import (
    check_supported,
    loads_may_arrive,
    sparse_groups,
    warn_of_policy,
    why_load_async,
)
from umbp.errors import ConfigError


def ns(**fields: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**fields)


class Spec:
    """Named as vLLM's classes below, which is all that is looked at beside a few fields."""

    prefix_cacheable = True


class FullAttentionSpec(Spec): ...


class MLAAttentionSpec(FullAttentionSpec):
    def __init__(self, role: str = "sparse", tokens_per_state: int = 1) -> None:
        self.cache_role = types.SimpleNamespace(value=role)
        self.tokens_per_state = tokens_per_state


class SlidingWindowSpec(Spec): ...


class ChunkedLocalAttentionSpec(Spec): ...


class RSWASpec(FullAttentionSpec): ...


class CircularBufferSpec(Spec):
    prefix_cacheable = False


class MambaSpec(Spec):
    tokens_per_state = -1

    def __init__(self, mode: str = "align") -> None:
        self.mamba_cache_mode = mode


def mixed(*specs: Any) -> Any:
    """A group whose layers have unequal specs."""
    return ns(
        prefix_cacheable=True,
        kv_cache_specs={f"l{index}": spec for index, spec in enumerate(specs)},
    )


def engine(*specs: Any, **fields: Any) -> Any:
    vllm_config = ns(
        parallel_config=ns(
            pipeline_parallel_size=fields.get("pipeline", 1),
            decode_context_parallel_size=fields.get("context", 1),
            prefill_context_parallel_size=1,
            use_ubatching=fields.get("ubatching", False),
            data_parallel_size=fields.get("data", 1),
        ),
        cache_config=ns(enable_prefix_caching=fields.get("caching", True)),
        scheduler_config=ns(async_scheduling=fields.get("async_scheduling", False)),
        kv_transfer_config=ns(kv_load_failure_policy=fields.get("policy", "recompute")),
    )
    groups = [ns(kv_cache_spec=spec, layer_names=["l"]) for spec in specs]
    return vllm_config, ns(kv_cache_groups=groups)


FULL = FullAttentionSpec()


@pytest.mark.parametrize(
    "specs",
    [
        [FULL],
        [MLAAttentionSpec()],
        [mixed(FULL, MLAAttentionSpec())],
        [FULL, SlidingWindowSpec()],
        [MambaSpec(), MambaSpec(), FULL],
        [MambaSpec()],
        # Scratch space is left alone, whatever it is.
        [FULL, CircularBufferSpec()],
    ],
)
def test_supported_models(specs: list[Any]) -> None:
    check_supported(*engine(*specs))


@pytest.mark.parametrize(
    ("specs", "fields", "words"),
    [
        ([FULL], {"pipeline": 2}, "pipeline_parallel_size is 2.*--pipeline-p"),
        ([], {}, "no KV cache"),
        ([ChunkedLocalAttentionSpec()], {}, "of kind ChunkedLocalAttentionSpec"),
        # A subclass of full attention that drops blocks is no full attention.
        ([RSWASpec()], {}, "of kind RSWASpec"),
        ([mixed(FULL, RSWASpec())], {}, "RSWASpec"),
        ([FULL, MambaSpec("none")], {}, "mamba_cache_mode is none.*--mamba-cache-mode align"),
        ([FULL, SlidingWindowSpec()], {"caching": False}, "--enable-prefix-caching"),
        ([FULL, SlidingWindowSpec()], {"context": 2}, "--decode-context-parallel-size 1"),
    ],
)
def test_refusals_name_the_condition_and_the_flag(
    specs: list[Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        check_supported(*engine(*specs, **fields))
    assert "\n" not in str(refusal.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_supported(*engine(RSWASpec(), MambaSpec("none"), pipeline=4, caching=False))
    words = (
        "pipeline_parallel_size",
        "RSWASpec",
        "mamba_cache_mode",
        "--enable-p",
    )
    for word in words:
        assert word in str(refusal.value)


def test_models_that_must_load_between_steps() -> None:
    assert why_load_async(*engine(FULL)) is None
    assert "several KV cache groups" in str(why_load_async(*engine(FULL, SlidingWindowSpec())))
    assert "recurrent state" in str(why_load_async(*engine(MambaSpec())))


def test_asynchronous_scheduling_must_load_between_steps() -> None:
    """vLLM takes the token of a step that was planned before a load within a step failed."""
    reason = why_load_async(*engine(FULL, async_scheduling=True))
    assert "--no-async-scheduling" in str(reason)


@pytest.mark.parametrize(
    ("specs", "fields", "may"),
    [
        ([FULL], {}, True),
        ([FULL, SlidingWindowSpec()], {"async_scheduling": True}, True),
        ([FULL, MambaSpec()], {}, False),
        ([mixed(FULL, MambaSpec())], {}, False),
        ([FULL], {"ubatching": True}, False),
        ([FULL], {"data": 2}, False),
    ],
)
def test_where_a_step_may_be_submitted_before_its_load_has_ended(
    specs: list[Any], fields: dict[str, Any], may: bool
) -> None:
    assert loads_may_arrive(*engine(*specs, **fields)) is may


def test_option_load_async_is_overruled_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    hybrid = engine(FULL, MambaSpec())
    assert load_async(True, *hybrid)
    assert not load_async(False, *engine(FULL))
    assert not caplog.records
    assert load_async(False, *hybrid)
    (record,) = caplog.records
    assert "load_async is false and is ignored" in record.getMessage()


def test_sparse_groups_are_those_whose_blocks_mean_nothing_before_they_are_full() -> None:
    groups = engine(FULL, MLAAttentionSpec(), MLAAttentionSpec("indexer"), MambaSpec(),
                    MLAAttentionSpec(tokens_per_state=4))[1]  # fmt: skip
    assert sparse_groups(groups) == {2, 4}


def test_policy_fail_warns_and_names_the_option(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_policy(engine(FULL, policy="fail")[0])
    (record,) = caplog.records
    assert '"kv_load_failure_policy": "recompute"' in record.getMessage()


def test_policy_recompute_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_policy(engine(FULL)[0])
    assert not caplog.records

# SPDX-License-Identifier: Apache-2.0
"""A configuration that cannot work ends the start of vLLM with one line that says what to do."""

from pathlib import Path
from typing import Any

import pytest
from engine import EngineSettings, prompt
from engine_process import EngineError, Engines

OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown": ({"total_capacity": 1 << 26}, ("total_capacity", "did you mean")),
    "of_another_backend": ({"high_watermark": 0.5}, ("high_watermark",)),
    "wrong_type": ({"lookup_timeout_ms": "soon"}, ("lookup_timeout_ms", "soon")),
    "negative": ({"total_capacity_bytes": -1}, ("total_capacity_bytes", "-1")),
    "more_than_there_is": (
        {"total_capacity_bytes": 1 << 50},
        ("total_capacity_bytes", str(1 << 50), "at most"),
    ),
    "no_such_directory": ({"socket_dir": "/nowhere/at/all"}, ("socket_dir", "/nowhere/at/all")),
    "no_such_backend": ({"backend": "memroy"}, ("memroy", "installed", "memory")),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_that_cannot_work(engines: Engines, case: str) -> None:
    options, named = OPTIONS[case]
    assert_refused(engines, EngineSettings(options=options), *named)


def test_a_model_whose_state_is_never_handed_off(engines: Engines) -> None:
    settings = EngineSettings(
        model="qwen_next",
        arguments={
            "block_size": None,
            "dtype": "bfloat16",
            "enable_prefix_caching": False,
            "mamba_cache_mode": "none",
            "max_num_batched_tokens": 2048,
        },
    )
    assert_refused(engines, settings, "mamba_cache_mode", "--mamba-cache-mode align")


def test_pipeline_stages(engines: Engines, tmp_path: Path) -> None:
    process = engines.process()
    with pytest.raises(EngineError, match="pipeline") as refused:
        process.run(construct_with_two_stages, tmp_path)
    assert refused.value.kind == "ConfigError"
    assert "--pipeline-parallel-size 1" in refused.value.message
    assert "\n" not in refused.value.message
    process.close()


def test_policy_fail_is_warned_of(engines: Engines) -> None:
    engine = engines.start(EngineSettings(transfer={"kv_load_failure_policy": "fail"}))
    assert 'set "kv_load_failure_policy": "recompute"' in engine.log()
    engine.answer(prompt(40, seed=220))
    engine.close()


def test_policy_recompute_is_not(engines: Engines) -> None:
    engine = engines.start(EngineSettings())
    assert "kv_load_failure_policy" not in engine.log()
    engine.close()


def test_the_embedded_backend_where_mori_is_missing(
    engines: Engines, mori_problem: str | None
) -> None:
    if mori_problem is None:
        pytest.skip("MORI can be loaded here")
    settings = EngineSettings(backend="embedded")
    assert_refused(engines, settings, "MORI", kind="BackendUnavailable")


def assert_refused(
    engines: Engines, settings: EngineSettings, *named: str, kind: str = "ConfigError"
) -> None:
    """Checks that an engine does not start, and that one line names all of ``named``."""
    with pytest.raises(EngineError) as refused:
        engines.start(settings)
    assert refused.value.kind == kind, refused.value
    message = refused.value.message
    assert "\n" not in message
    assert all(word in message for word in named), message


# ---------------------------------------------------------------- in the process


def construct_with_two_stages(_: Any, models: Path) -> None:
    """Makes a connector as the scheduler of an engine with two pipeline stages would."""
    import torch
    from tiny_models import LLAMA
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from umbp.cli.random_model import make_model
    from umbp.connector import UMBPStoreConnector

    vllm_config = EngineArgs(
        model=str(make_model(models / "llama", LLAMA)),
        skip_tokenizer_init=True,
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
        kv_transfer_config=KVTransferConfig(**EngineSettings().transfer_config()),
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec)])
    UMBPStoreConnector(vllm_config, KVConnectorRole.SCHEDULER, cache)

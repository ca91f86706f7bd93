# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: tensor parallelism over NCCL, and two engines on one server.

Engines run in processes of their own (``tests/e2e/engine_process.py``), with captured decode
graphs. What is restored is compared with a GPU prefix hit, which goes through the same kernels.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

import engine_process
from engine import ENVIRONMENT, EngineSettings, full_blocks, prompt
from engine_process import EngineProcess, Engines
from hybrids import ALIGNED

from umbp.backends.mori_library import MoriLibrary
from umbp.backends.mori_server import ServerProcess, ServerSettings, wait_until_listening
from umbp.backends.server_address import parse_address

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PATIENCE_S: Final = 60.0
TOKENS: Final = prompt(517, seed=700)
COVERED: Final = full_blocks(517)
_ON_A_GPU: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "gpu_memory_utilization": 0.2,
    "num_gpu_blocks_override": 256,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
}
_ENVIRONMENT: Final = {
    # Multicast over NVLink needs rights that containers seldom have.
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, spawned_engines: None) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="module", autouse=True)
def spawned_engines() -> Iterator[None]:
    """Engines are spawned: a process that was forked from one that knows of CUDA cannot use it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr(engine_process, "_context", multiprocessing.get_context("spawn"))
        patch.setattr(engine_process, "_start_fork_server", lambda: None)
        # Graphs are captured and kernels compiled.
        patch.setattr(engine_process, "_CALL_TIMEOUT_S", 4 * engine_process._CALL_TIMEOUT_S)
        yield


def on_a_gpu(backend: str, **changes: Any) -> EngineSettings:
    """Settings of an engine on one GPU."""
    arguments = _ON_A_GPU | changes.pop("arguments", {})
    environment = _ENVIRONMENT | changes.pop("environment", {})
    return EngineSettings(
        model=changes.pop("model", "llama_wide"),
        backend=backend,
        arguments=arguments,
        environment=environment,
        **changes,
    )


def on_two(backend: str, **changes: Any) -> EngineSettings:
    """Settings of an engine with a rank on each of two GPUs."""
    two = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "disable_custom_all_reduce": True,
    }
    return on_a_gpu(backend, arguments=two | changes.pop("arguments", {}), **changes)


# ``faulty`` is ``memory`` until faults are set.
@pytest.mark.parametrize("backend", ["faulty", "embedded"])
def test_what_two_ranks_restore_gives_the_tokens_of_a_prefix_hit(
    engines: Engines, request: pytest.FixtureRequest, backend: str
) -> None:
    if backend == "embedded":
        request.getfixturevalue("mori")
    settings = on_two(backend)
    engine = engines.shared(settings)
    for token_count in (95, 96, 97, 517, 1500):
        tokens = prompt(token_count, seed=701 + token_count)
        cold = engine.answer(tokens)
        hit = engine.answer(tokens)
        assert engine.reset_local()
        restored = engine.answer(tokens)
        assert (cold.local_tokens, cold.external_tokens) == (0, 0)
        assert hit.local_tokens == restored.external_tokens == full_blocks(token_count)
        assert restored.tokens == hit.tokens
        assert len(set(hit.tokens)) > 5, "output does not vary, so it proves nothing"
    assert engines.release(settings) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_does_not_have_is_a_miss(engines: Engines, rank: int) -> None:
    settings = on_two("faulty")
    engine = engines.shared(settings)
    engine.set_faults(rank=rank, failing_stores=True)
    engine.answer(TOKENS)
    engine.set_faults()
    assert engine.reset_local()
    missed = engine.answer(TOKENS)
    assert (missed.local_tokens, missed.external_tokens) == (0, 0)
    assert [faults["loads"] for faults in engine.faults()] == [0, 0]
    hit = engine.answer(TOKENS)
    assert engine.reset_local()
    restored = engine.answer(TOKENS)
    assert (restored.external_tokens, restored.tokens) == (COVERED, hit.tokens)
    assert engines.release(settings) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_is_computed_once(engines: Engines, rank: int) -> None:
    settings = on_two("faulty")
    engine = engines.shared(settings)
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    engine.set_faults(rank=rank, failing_loads=None, failure="part")
    computed = engine.answer(TOKENS)
    assert (computed.external_tokens, computed.tokens) == (0, cold.tokens)
    assert [faults["loads"] for faults in engine.faults()] == [1, 1]
    assert engines.release(settings) == []


def test_two_ranks_restore_the_state_of_a_hybrid(engines: Engines) -> None:
    aligned = {name: value for name, value in ALIGNED.items() if name != "block_size"}
    settings = on_two(
        "memory",
        model="qwen_next",
        arguments=aligned | {"block_size": None, "num_gpu_blocks_override": 64},
    )
    engine = engines.shared(settings)
    for token_count in (305, 1281):
        tokens = prompt(token_count, seed=703)
        engine.answer(tokens)
        engine.answer(tokens)
        hit = engine.answer(tokens)
        assert engine.reset_local()
        restored = engine.answer(tokens)
        assert restored.external_tokens == hit.local_tokens > 0
        assert restored.tokens == hit.tokens
    assert engines.release(settings) == []


@pytest.fixture
def server(mori: MoriLibrary) -> Iterator[tuple[ServerProcess, dict[str, Any]]]:
    """MORI's server, and the options of its clients."""
    with tempfile.TemporaryDirectory(prefix="umbp-") as folder:
        address = parse_address(f"unix://{folder}/s.grpc.sock")
        address.make_private()
        settings = ServerSettings(address=address, capacity_bytes=2 << 30, read_lease_ms=5000)
        process = ServerProcess(settings, Path(folder) / "server.log")
        try:
            wait_until_listening(address, time.monotonic() + PATIENCE_S, process.require_running)
            options = {
                "address": str(address),
                "read_lease_ms": 5000,
                "total_capacity_bytes": None,
                "timeout_ms": 5000,
            }
            yield process, options
        finally:
            process.stop()


def test_engines_on_two_gpus_share_a_server_and_outlive_it(
    engines: Engines, server: tuple[ServerProcess, dict[str, Any]]
) -> None:
    process, options = server
    first, second = (
        engines.start(
            on_a_gpu(
                "standalone",
                options=options,
                environment={"CUDA_VISIBLE_DEVICES": str(index)},
            )
        )
        for index in range(2)
    )
    cold = first.answer(TOKENS)
    hit = first.answer(TOKENS)
    restored = _until_restored(second, hit.tokens)
    assert restored == COVERED

    # Killed while one loads and the other stores.
    assert second.reset_local()
    loading = second.submit(TOKENS)
    storing = first.submit(prompt(1500, seed=704))
    os.kill(process.process_id, signal.SIGKILL)
    (after,) = second.finish(loading)
    first.finish(storing)
    assert after.tokens in (cold.tokens, hit.tokens)
    assert first.reset_local()
    assert first.answer(TOKENS).tokens == cold.tokens


def _until_restored(engine: EngineProcess, tokens: tuple[int, ...]) -> int:
    """Asks until the other engine's stores have been seen, and returns what was restored."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        answer = engine.answer(TOKENS)
        if answer.external_tokens:
            assert answer.tokens == tokens
            return answer.external_tokens
        assert time.monotonic() < until_s, "never restored"
        assert engine.reset_local()

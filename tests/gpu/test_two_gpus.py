# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: tensor parallelism over NCCL, and two engines on one server.

Engines run in processes of their own (``tests/e2e/engine_process.py``), with captured decode
graphs. What is restored is compared with a GPU prefix hit, which goes through the same kernels.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from engine import full_blocks, prompt
from engine_process import EngineProcess, Engines
from gpu_engines import HYBRIDS, on_a_gpu
from tiny_models import CONFIGS

from umbp.backends.mori_library import MoriLibrary
from umbp.backends.mori_server import ServerProcess, ServerSettings, wait_until_listening
from umbp.backends.server_address import parse_address
from umbp.cli.random_model import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PATIENCE_S: Final = 60.0
TOKENS: Final = prompt(517, seed=700)
COVERED: Final = full_blocks(517)


# ``faulty`` is ``memory`` until faults are set.
@pytest.mark.parametrize("backend", ["faulty", "embedded"])
def test_what_two_ranks_restore_gives_the_tokens_of_a_prefix_hit(
    engines: Engines, request: pytest.FixtureRequest, backend: str
) -> None:
    if backend == "embedded":
        request.getfixturevalue("mori")
    settings = on_a_gpu(backend, ranks=2)
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
    settings = on_a_gpu("faulty", ranks=2)
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
    settings = on_a_gpu("faulty", ranks=2)
    engine = engines.shared(settings)
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    engine.set_faults(rank=rank, failing_loads=None, failure="part")
    computed = engine.answer(TOKENS)
    assert computed.tokens == cold.tokens
    assert [faults["loads"] for faults in engine.faults()] == [1, 1]
    assert engines.release(settings) == []


@pytest.fixture(scope="module")
def llama_8b(engines: Engines) -> None:
    """Writes a model of Llama-3.1-8B's shape."""
    make_model(engines.models / "llama_8b", CONFIGS["llama_8b"], device="cuda")
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("llama_8b")
@pytest.mark.parametrize("backend", ["memory", "embedded"])
def test_two_ranks_restore_a_model_of_eight_billion_parameters(
    engines: Engines, request: pytest.FixtureRequest, backend: str
) -> None:
    if backend == "embedded":
        request.getfixturevalue("mori")
    settings = on_a_gpu(
        backend, "llama_8b", ranks=2, options={"total_capacity_bytes": 4 << 30, "timeout_ms": 10000}
    )
    engine = engines.shared(settings)
    for token_count in (1000, 8209):
        tokens = prompt(token_count, seed=705 + token_count)
        cold = engine.answer(tokens)
        hit = engine.answer(tokens)
        assert engine.reset_local()
        before = engine.counters()
        restored = engine.answer(tokens)
        after = engine.counters()
        assert (cold.local_tokens, cold.external_tokens) == (0, 0)
        assert hit.local_tokens == restored.external_tokens == full_blocks(token_count)
        assert restored.tokens == hit.tokens
        assert len(set(hit.tokens)) > 5, "output does not vary, so it proves nothing"
        assert after["loads_failed"] == before["loads_failed"]
        if backend == "memory":
            # Both ranks computed what was still on its way.
            assert after["loads_arriving"] == before["loads_arriving"] + 1
    assert engines.release(settings) == []


@pytest.mark.parametrize("backend", ["memory", "embedded"])
@pytest.mark.parametrize("model", HYBRIDS)
def test_two_ranks_restore_the_state_of_a_hybrid(
    engines: Engines, request: pytest.FixtureRequest, model: str, backend: str
) -> None:
    if backend == "embedded":
        request.getfixturevalue("mori")
    settings = on_a_gpu(backend, model, ranks=2)
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

# SPDX-License-Identifier: Apache-2.0
"""Two engines and MORI's standalone server: they share KV, and go on without the server."""

import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final

import attrs
import pytest
from engine import Engine, EngineSettings, full_blocks, prompt
from engine_process import EngineProcess, Engines
from hybrids import ALIGNED

from umbp.backends.server_address import ServerAddress, parse_address

pytestmark = pytest.mark.mori

CAPACITY_BYTES: Final = 64 << 20
SHARING: Final = {"UMBP_HIP_HOST_DEVICES": "1", "UMBP_HIP_HOST_REMAP": "1"}
"""Lets the stand-in HIP runtime pass KV memory for a device's."""

_M_MMAP_THRESHOLD: Final = -3
_MMAP_BYTES: Final = 128 * 1024
_TIMEOUT_MS: Final = 500
_PATIENCE_S: Final = 60.0


def give_large_tensors_mappings_of_their_own(_: Engine | None) -> None:
    """Only such memory can be shared; the C library would take some of it from its heap."""
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) == 1


@pytest.fixture(scope="module")
def address() -> Iterator[ServerAddress]:
    with tempfile.TemporaryDirectory(prefix="umbp-") as folder:
        address = parse_address(f"unix://{folder}/own/s.grpc.sock")
        yield address
        process_id = address.listener()
        if process_id:
            os.kill(process_id, signal.SIGKILL)


def settings(address: ServerAddress, model: str, **options: Any) -> EngineSettings:
    return EngineSettings(
        model=model,
        backend="standalone",
        options={
            "address": str(address),
            "auto_start": True,
            "capacity_bytes": CAPACITY_BYTES,
            "read_lease_ms": 10_000,
            "startup_timeout_ms": 60_000,
            "total_capacity_bytes": None,
            **options,
        },
        environment=SHARING,
    )


def start(engines: Engines, chosen: EngineSettings) -> EngineProcess:
    process = engines.process()
    process.run(give_large_tensors_mappings_of_their_own)
    process.start(chosen, engines.models)
    return process


@pytest.fixture(scope="module")
def pair(
    engines: Engines, address: ServerAddress, mori_problem: str | None
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Two engines of one model on one server."""
    if mori_problem is not None and os.environ.get("UMBP_REQUIRE_MORI") != "1":
        pytest.skip(mori_problem)
    chosen = settings(address, "llama", timeout_ms=_TIMEOUT_MS, lookup_timeout_ms=3000)
    first, second = start(engines, chosen), start(engines, chosen)
    yield first, second
    first.close()
    second.close()


def test_what_one_engine_stores_another_restores(
    pair: tuple[EngineProcess, EngineProcess],
) -> None:
    first, second = pair
    tokens = prompt(205, seed=900)
    cold = first.answer(tokens)
    local = first.answer(tokens)
    restored = second.answer(tokens)
    assert (cold.external_tokens, local.external_tokens) == (0, 0)
    assert restored.external_tokens == local.local_tokens == full_blocks(205)
    assert cold.tokens == local.tokens == restored.tokens
    assert second.unrest() == []


def test_a_hybrid_model_s_state_is_shared_too(
    engines: Engines, address: ServerAddress, pair: tuple[EngineProcess, EngineProcess]
) -> None:
    chosen = attrs.evolve(settings(address, "qwen_next"), arguments=ALIGNED)
    first, second = start(engines, chosen), start(engines, chosen)
    tokens = prompt(1281, seed=904)
    cold = first.answer(tokens)
    local = first.answer(tokens)
    restored = second.answer(tokens)
    first.close()
    second.close()
    assert (cold.external_tokens, restored.local_tokens) == (0, 0)
    assert restored.external_tokens == local.local_tokens == 1280
    assert cold.tokens == local.tokens == restored.tokens


def test_a_reset_of_one_engine_reaches_the_other(pair: tuple[EngineProcess, EngineProcess]) -> None:
    first, second = pair
    tokens = prompt(205, seed=901)
    cold = first.answer(tokens)
    assert second.answer(tokens).external_tokens == full_blocks(205)
    assert first.reset_all()
    assert second.reset_local()
    again = second.answer(tokens)
    assert (again.external_tokens, again.tokens) == (0, cold.tokens)
    restored = first.answer(tokens)
    assert (restored.external_tokens, restored.tokens) == (full_blocks(205), cold.tokens)


def test_a_stopped_server_costs_no_answer(
    pair: tuple[EngineProcess, EngineProcess], address: ServerAddress
) -> None:
    tokens = prompt(205, seed=902)
    cold = pair[0].answer(tokens)
    server = address.listener()
    assert server
    os.kill(server, signal.SIGSTOP)
    try:
        for engine in pair:
            assert engine.reset_local()
            (answer,) = engine.finish(engine.submit(tokens))
            assert (answer.external_tokens, answer.tokens) == (0, cold.tokens)
    finally:
        os.kill(server, signal.SIGCONT)
    for engine in pair:
        engine.settle()
        assert engine.unrest() == []
        assert engine.reset_local()
        assert engine.answer(tokens).external_tokens == full_blocks(205)


def test_a_killed_server_costs_no_answer_and_a_new_one_is_used(
    pair: tuple[EngineProcess, EngineProcess], address: ServerAddress
) -> None:
    first, second = pair
    tokens = prompt(205, seed=903)
    cold = first.answer(tokens)
    server = address.listener()
    assert server
    os.kill(server, signal.SIGKILL)
    for engine in pair:
        assert engine.reset_local()
        answer = engine.answer(tokens)
        assert (answer.external_tokens, answer.tokens) == (0, cold.tokens)
        assert engine.unrest() == []

    first.run(start_server_again)
    # Before the engine's own cache is emptied, nothing would be stored.
    assert first.reset_local()
    assert first.answer(tokens).tokens == cold.tokens
    give_up_s = time.monotonic() + _PATIENCE_S
    restored = None
    while restored is None or restored.external_tokens == 0:
        assert time.monotonic() < give_up_s, "nothing is restored again"
        assert second.reset_local()
        restored = second.answer(tokens)
    assert (restored.external_tokens, restored.tokens) == (full_blocks(205), cold.tokens)


def start_server_again(engine: Engine) -> None:
    """Starts a server as an engine does that comes later."""
    from umbp.backends.standalone import _find_server
    from umbp.backends.standalone_options import StandaloneOptions

    options = engine.settings.options
    names = ("address", "auto_start", "capacity_bytes", "read_lease_ms", "startup_timeout_ms")
    _find_server(StandaloneOptions(**{name: options[name] for name in names}))

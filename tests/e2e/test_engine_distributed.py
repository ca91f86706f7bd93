# SPDX-License-Identifier: Apache-2.0
"""Engines that join MORI's master: each restores its own KV, and none waits for the master.

There is no RDMA here, so that an engine finds what another has stored, and cannot load it.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
from engine import EngineSettings, full_blocks, prompt
from engine_process import EngineProcess, Engines
from hybrids import ALIGNED
from masters import Master

pytestmark = pytest.mark.mori

CAPACITY_BYTES: Final = 64 << 20
_TIMEOUT_MS: Final = 2000
_PATIENCE_S: Final = 60.0


@pytest.fixture(scope="module")
def master(mori_problem: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    if mori_problem is not None and os.environ.get("UMBP_REQUIRE_MORI") != "1":
        pytest.skip(mori_problem)
    folder: Path = tmp_path_factory.mktemp("master")
    master = Master(folder / "master.log")
    master.start()
    yield master
    master.end()


@pytest.fixture(scope="module")
def settings(master: Master) -> EngineSettings:
    options: dict[str, Any] = {
        "master_address": str(master.address),
        "trust_network": True,
        "total_capacity_bytes": CAPACITY_BYTES,
        "timeout_ms": _TIMEOUT_MS,
        "lookup_timeout_ms": 3000,
    }
    return EngineSettings(model="llama", backend="distributed", options=options)


@pytest.fixture(scope="module")
def first(engines: Engines, settings: EngineSettings) -> Iterator[EngineProcess]:
    engine = engines.start(settings)
    yield engine
    engine.close()


def test_an_engine_restores_what_it_stored(first: EngineProcess) -> None:
    tokens = prompt(205, seed=910)
    cold = first.answer(tokens)
    local = first.answer(tokens)
    assert (cold.external_tokens, local.external_tokens) == (0, 0)
    assert local.local_tokens == full_blocks(205)
    assert cold.tokens == local.tokens
    _until_restored(first, tokens, cold.tokens, local.local_tokens)
    assert first.unrest() == []


def test_without_rdma_another_engine_fails_to_load_once_and_computes(
    engines: Engines, settings: EngineSettings, first: EngineProcess
) -> None:
    tokens = prompt(205, seed=911)
    cold = first.answer(tokens)
    second = engines.start(settings)
    try:
        answers = [second.answer(tokens)]
        for _ in range(2):
            assert second.reset_local()
            answers.append(second.answer(tokens))
        counters = second.counters()
        assert second.unrest() == []
    finally:
        second.close()
    assert [(answer.external_tokens, answer.tokens) for answer in answers] == [(0, cold.tokens)] * 3
    # The first request asked, and failed; for the others the keys are in quarantine.
    assert (counters["loads_started"], counters["loads_failed"]) == (1, 1)
    assert counters["lookup_hits"] == 1


def test_a_reset_concerns_the_engine_that_was_told(first: EngineProcess) -> None:
    tokens = prompt(205, seed=912)
    cold = first.answer(tokens)
    assert first.reset_all()
    again = first.answer(tokens)
    assert (again.external_tokens, again.tokens) == (0, cold.tokens)
    _until_restored(first, tokens, cold.tokens, full_blocks(205))


def test_a_stopped_master_costs_no_answer(first: EngineProcess, master: Master) -> None:
    tokens, other = prompt(205, seed=913), prompt(205, seed=914)
    cold = first.answer(tokens)
    master.stop()
    try:
        assert first.reset_local()
        computed, fresh = first.finish(first.submit(tokens), first.submit(other))
        assert (computed.external_tokens, computed.tokens) == (0, cold.tokens)
        assert fresh.external_tokens == 0
        assert first.counters()["lookup_breaker_open"] == 1
    finally:
        master.go_on()
    first.settle()
    assert first.unrest() == []
    _until_restored(first, tokens, cold.tokens, full_blocks(205))
    counters = first.counters()
    assert (counters["lookup_breaker_open"], counters["lookup_breaker_opened"]) == (0, 1)


def test_a_killed_master_costs_no_answer_and_a_new_one_is_used(
    first: EngineProcess, master: Master
) -> None:
    tokens = prompt(205, seed=915)
    cold = first.answer(tokens)
    master.kill()
    for _ in range(2):
        assert first.reset_local()
        answer = first.answer(tokens)
        assert (answer.external_tokens, answer.tokens) == (0, cold.tokens)
    assert first.unrest() == []
    master.start()
    _until_restored(first, tokens, cold.tokens, full_blocks(205))


def test_a_hybrid_model_s_state_is_restored_too(engines: Engines, settings: EngineSettings) -> None:
    engine = engines.start(attrs.evolve(settings, model="qwen_next", arguments=ALIGNED))
    tokens = prompt(1281, seed=916)
    try:
        cold = engine.answer(tokens)
        local = engine.answer(tokens)
        assert (local.local_tokens, local.tokens) == (1280, cold.tokens)
        _until_restored(engine, tokens, cold.tokens, 1280)
    finally:
        engine.close()


def _until_restored(
    engine: EngineProcess, tokens: list[int], expected: tuple[int, ...], restored_tokens: int
) -> None:
    """Asks again until all is restored; each answer must be right.

    The master hears of objects a moment after they were stored, or when a node joins it again.
    """
    give_up_s = time.monotonic() + _PATIENCE_S
    found = -1
    while found != restored_tokens:
        assert time.monotonic() < give_up_s, f"{found} tokens are restored, not {restored_tokens}"
        assert engine.reset_local()
        answer = engine.answer(tokens)
        assert answer.tokens == expected
        found = answer.external_tokens

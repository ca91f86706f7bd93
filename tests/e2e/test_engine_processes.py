# SPDX-License-Identifier: Apache-2.0
"""The usual arrangement: frontend, scheduler and worker are processes of their own."""

import json
import time
from pathlib import Path

import pytest
import spy_connector
from engine import Engine, EngineSettings, full_blocks, prompt
from engine_process import EngineProcess, Engines

TOKENS = prompt(205, seed=210)
COVERED = full_blocks(205)
DRAIN_TIMEOUT_S = 60.0


@pytest.fixture
def report_path(tmp_path: Path) -> Path:
    """Where the scheduler's process writes about itself."""
    return tmp_path / "report.json"


@pytest.fixture
def settings(backend: str, report_path: Path) -> EngineSettings:
    """An engine in three processes."""
    return EngineSettings(
        backend=backend,
        in_process=False,
        arguments={"distributed_executor_backend": "mp"},
        transfer={"kv_connector": "SpyConnector", "kv_connector_module_path": "spy_connector"},
        environment={spy_connector.REPORT_VARIABLE: str(report_path)},
    )


def drain(engine: EngineProcess) -> None:
    """Empties vLLM's prefix cache as soon as no store holds a block any more."""
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while not engine.reset_local():
        assert time.monotonic() < deadline, "stores were never answered"
        time.sleep(0.01)


def test_scheduler_and_worker_in_processes_of_their_own(
    engines: Engines, settings: EngineSettings, report_path: Path, backend: str
) -> None:
    engine = engines.start(settings)
    cold = engine.answer(TOKENS)
    cached = engine.answer(TOKENS)
    drain(engine)
    restored = engine.answer(TOKENS)
    assert cold.external_tokens == 0
    assert cached.local_tokens == restored.external_tokens == COVERED
    assert cold.tokens == cached.tokens == restored.tokens

    drain(engine)
    assert engine.reset_all()
    missed = engine.answer(TOKENS)
    assert (missed.external_tokens, missed.tokens) == (0, cold.tokens)

    scheduler = json.loads(report_path.read_text())
    (worker,) = engine.run(Engine.workers, spy_connector.report)
    assert len({scheduler["process_id"], worker["process_id"], engine.process_id}) == 3
    assert (scheduler["imported_mori"], scheduler["pools"]) == (False, 0)
    assert worker["imported_mori"] == (backend == "embedded")
    assert worker["pools"] == 1
    for name in ("leases_open", "blocks_pinned", "requests_live", "events_refused"):
        assert scheduler["counters"][name] == 0, name
    engine.close()


def test_an_idle_scheduler_fetches_what_the_worker_answers(engines: Engines) -> None:
    settings = EngineSettings(
        backend="faulty", in_process=False, arguments={"distributed_executor_backend": "mp"}
    )
    engine = engines.start(settings)
    engine.set_faults(hold_stores=True)
    cold = engine.answer(TOKENS)
    assert not engine.reset_local()
    engine.set_faults()
    # No request comes: the scheduler steps because the connector says that it must.
    drain(engine)
    restored = engine.answer(TOKENS)
    assert (restored.external_tokens, restored.tokens) == (COVERED, cold.tokens)

    # Nor does a request wait for another one when its load has failed.
    drain(engine)
    engine.set_faults(failing_loads=1)
    assert engine.answer(TOKENS).tokens == cold.tokens
    assert [faults["loads"] for faults in engine.faults()] == [1]
    engine.close()


def test_the_name_of_the_connector_is_enough(engines: Engines) -> None:
    engine = engines.start(EngineSettings(transfer={"kv_connector_module_path": None}))
    engine.answer(TOKENS)
    assert engine.reset_local()
    assert engine.answer(TOKENS).external_tokens == COVERED
    engine.close()

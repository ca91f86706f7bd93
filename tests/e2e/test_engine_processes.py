# SPDX-License-Identifier: Apache-2.0
"""The usual arrangement: frontend, scheduler and worker are processes of their own."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import Engine, EngineSettings, full_blocks, prompt
from engine_process import EngineProcess, Engines
from engine_worker import REPORT_VARIABLE, describe_process

TOKENS = prompt(205, seed=210)
COVERED = full_blocks(205)
DRAIN_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def report_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scheduler's process writes about itself."""
    return tmp_path_factory.mktemp("report") / "report.json"


@pytest.fixture(scope="module")
def engine(engines: Engines, backend: str, report_path: Path) -> Iterator[EngineProcess]:
    """An engine in three processes; they start slowly, since vLLM does not fork them here."""
    settings = EngineSettings(
        backend=backend,
        in_process=False,
        arguments={"distributed_executor_backend": "mp"},
        transfer={"kv_connector": "SpyConnector", "kv_connector_module_path": "spy_connector"},
        environment={REPORT_VARIABLE: str(report_path)},
    )
    engine = engines.start(settings)
    yield engine
    engine.close()


def drain(engine: EngineProcess) -> None:
    """Empties vLLM's prefix cache as soon as no store holds a block any more."""
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while not engine.reset_local():
        assert time.monotonic() < deadline, "stores were never answered"
        time.sleep(0.01)


# ``faulty`` is ``memory`` until faults are set, and saves the start of one more engine.
@pytest.mark.parametrize(
    "backend",
    ["faulty", pytest.param("embedded", marks=pytest.mark.mori)],
    indirect=True,
    scope="module",
)
def test_scheduler_and_worker_in_processes_of_their_own(
    engine: EngineProcess, backend: str, report_path: Path
) -> None:
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
    (worker,) = engine.run(Engine.workers, describe_process)
    assert len({scheduler["process_id"], worker["process_id"], engine.process_id}) == 3
    assert (scheduler["imported_mori"], scheduler["pools"]) == (False, 0)
    assert worker["imported_mori"] == (backend == "embedded")
    assert worker["pools"] == 1
    for name in ("leases_open", "blocks_pinned", "requests_live", "events_refused"):
        assert scheduler["counters"][name] == 0, name


@pytest.mark.parametrize("backend", ["faulty"], indirect=True, scope="module")
def test_an_idle_scheduler_fetches_what_the_worker_answers(engine: EngineProcess) -> None:
    drain(engine)
    assert engine.reset_all()
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

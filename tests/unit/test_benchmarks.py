# SPDX-License-Identifier: Apache-2.0
"""The benchmarks measure what they say, and their bounds can be broken."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from umbp.fsm import Core, CoreLimits, LeaseState, RequestState

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def lifecycle(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("lifecycle")


def test_the_lifecycle_that_is_timed_is_a_whole_one(lifecycle: ModuleType) -> None:
    core = Core(CoreLimits(unit_tokens=lifecycle.UNIT_TOKENS))
    lifecycle.live_through(core, "request", 0.0)
    counted = {name: n for name, n in core.counters.as_dict().items() if n}
    assert counted == {
        "lookups": 1,
        "lookup_hits": 1,
        "loads_started": 1,
        "loads_settled": 1,
        "tokens_restored": lifecycle.LOADED,
        "stores_started": 1,
        "stores_settled": 1,
        "tokens_stored": lifecycle.PROMPT - lifecycle.LOADED,
    }
    assert not core.requests
    assert not core.leases


def test_what_it_is_compared_with_goes_the_same_way(
    lifecycle: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = []
    fire = Core._fire

    def watch(core: Core, subject: object, event: object) -> None:
        fired.append(type(event).__name__)
        fire(core, subject, event)

    monkeypatch.setattr(Core, "_fire", watch)
    lifecycle.live_through(Core(CoreLimits(unit_tokens=lifecycle.UNIT_TOKENS)), "request", 0.0)
    assert sorted(fired) == sorted(sum(lifecycle.TRANSITIONS, ()))


@pytest.mark.parametrize("run", ["stock_transitions", "dictionary_transitions"])
def test_what_it_is_compared_with_reaches_the_end(
    lifecycle: ModuleType, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    models = []

    class Watched(lifecycle.Model):
        def __init__(self, state: object) -> None:
            super().__init__(state)
            models.append(self)

    monkeypatch.setattr(lifecycle, "Model", Watched)
    getattr(lifecycle, run)()(1)
    assert [model.state for model in models] == [
        RequestState.FINISHED,
        LeaseState.RELEASED,
        LeaseState.RELEASED,
    ]


@pytest.mark.parametrize(
    ("lifecycle_us", "live_bytes", "broken"),
    [(24.9, 399.0, []), (25.0, 399.0, ["25.00 µs"]), (24.9, 400.0, ["400 B"])],
)
def test_bounds_can_be_broken(
    lifecycle: ModuleType, lifecycle_us: float, live_bytes: float, broken: list[str]
) -> None:
    disturbed = [[lifecycle_us + 40.0] * 3, [lifecycle_us] * 3]
    timings = {lifecycle.LIFECYCLE: lifecycle.Timing(disturbed)}
    timings[lifecycle.CROWDED] = lifecycle.Timing([[1.0]])
    lines = lifecycle.broken_bounds(timings, {"live request": live_bytes})
    assert len(lines) == len(broken)
    assert all(part in line for part, line in zip(broken, lines, strict=True))


def test_a_bound_that_is_not_kept_is_measured_again(
    lifecycle: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [90.0, 60.0, 20.0, 10.0]
    names = (lifecycle.LIFECYCLE, lifecycle.CROWDED)

    def measure() -> dict[str, object]:
        return dict.fromkeys(names, lifecycle.Timing([[taken.pop(0)]]))

    monkeypatch.setattr(lifecycle, "measure", measure)
    monkeypatch.setattr(lifecycle, "PAUSE_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["lifecycle.py", "--check"])
    assert lifecycle.main() == 0
    assert taken == [10.0]
    taken[:] = [90.0] * lifecycle.ATTEMPTS
    assert lifecycle.main() == 1
    assert taken == []


def test_results_say_where_they_come_from(
    lifecycle: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    short = {"rounds": 2, "samples": 3, "batch": 2}
    measure = lifecycle.time_operations
    monkeypatch.setattr(lifecycle, "time_operations", lambda named: measure(named, **short))
    monkeypatch.setattr(lifecycle, "LIVE_REQUESTS", 100)
    monkeypatch.setattr(sys, "argv", ["lifecycle.py", "--json", str(path)])
    assert lifecycle.main() == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert set(result["origin"]["packages"]) == {"umbp", "attrs", "transitions"}
    for rounds_us in result["rounds_us"].values():
        assert [len(samples) for samples in rounds_us] == [3, 3]


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("planning")


def test_all_of_the_prompt_is_planned(planning: ModuleType) -> None:
    for rules, loaded in ((planning.one_group(), 511), (planning.four_groups(), 16)):
        request = planning.Request(rules, 8192)
        assert request.found.end_tokens == 8176
        assert sum(len(part.block_ids) // 4 for part in request.load()) == loaded
        assert sum(len(part.block_ids) // 4 for part in request.store()) == 8192 // (
            rules.groups[-1].block_tokens
        )


def test_what_grows_faster_than_the_prompt_is_seen(
    planning: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timings(last_us: float) -> dict[str, object]:
        return {
            f"{name}, {part}, {tokens}": importlib.import_module("_measure").Timing([[cost]])
            for name in ("one group", "four groups")
            for part in ("ask", "hit", "load", "store")
            for tokens, cost in zip(planning.PROMPTS, (1.0, 4.0, last_us), strict=True)
        }

    monkeypatch.setattr(sys, "argv", ["planning.py", "--check"])
    monkeypatch.setattr(planning, "measure", lambda: timings(17.9))
    assert planning.main() == 0
    monkeypatch.setattr(planning, "measure", lambda: timings(18.1))
    assert planning.main() == 1
    assert "one group, hit costs 18.1 times as much" in capsys.readouterr().err


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("spans")


def test_what_is_sent_is_a_whole_lifecycle(spans: ModuleType) -> None:
    core, last = spans.spanned()
    spans.lifecycles(core)(3)
    assert [span.name for span in last.lifecycle.spans] == [
        "umbp.lookup", "umbp.load", "umbp.loading", "umbp.running", "umbp.store", "umbp.storing",
    ]  # fmt: skip
    spans.sending()(2)


def test_the_bound_of_spans_can_be_broken(
    spans: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times_us = dict.fromkeys((spans.OFF, spans.AGAIN, spans.CHECKED, spans.SENT), 10.0)
    monkeypatch.setattr(sys, "argv", ["spans.py", "--check"])
    for noted_us, status in ((59.0, 0), (60.0, 1)):
        timings = {n: spans.Timing([[t]]) for n, t in {**times_us, spans.NOTED: noted_us}.items()}
        monkeypatch.setattr(spans, "time_operations", lambda _, found=timings: found)
        assert spans.main() == status
    assert "bound: lifecycle, spans noted: 6.00x" in capsys.readouterr().err


@pytest.fixture
def free_queue(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("free_queue")


def test_as_many_blocks_are_stored_as_are_reused(free_queue: ModuleType) -> None:
    memory = free_queue.Memory()
    before = memory.core.counters.lazy_blocks_stored
    for _ in range(80):
        memory.step(64, lazy=True)
    stored = memory.core.counters.lazy_blocks_stored - before
    assert abs(stored - 80 * 64) <= 2 * free_queue.STEP_BLOCKS
    seen = memory.lazy.counters.lazy_blocks_seen
    memory.store()
    assert memory.lazy.counters.lazy_blocks_seen == seen, "and nothing is looked at in between"


def test_bounds_of_the_free_queue_can_be_broken(
    free_queue: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timings(quiet_us: float) -> dict[str, object]:
        rows = {"nothing is reused": quiet_us}
        for blocks in free_queue.SIZES:
            rows |= {
                f"{blocks} blocks, vLLM alone": 1.0,
                f"{blocks} blocks, with lazy offload": 9.0,
            }
        return {name: free_queue.Timing([[us]]) for name, us in rows.items()}

    monkeypatch.setattr(sys, "argv", ["free_queue.py", "--check"])
    monkeypatch.setattr(free_queue, "measure", lambda: timings(2.0))
    assert free_queue.main() == 0
    monkeypatch.setattr(free_queue, "measure", lambda: timings(4.0))
    assert free_queue.main() == 1
    assert "NOT KEPT: a step that reuses nothing" in capsys.readouterr().out

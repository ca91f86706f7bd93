# SPDX-License-Identifier: Apache-2.0
"""The benchmark of metrics and traces: its verdict, and that its kinds are what they say."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def observing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("observing")


@pytest.mark.parametrize(
    ("count", "expected"), [(1, (0, 0)), (2, (0, 1)), (6, (0, 5)), (9, (1, 7)), (41, (13, 27))]
)
def test_the_median_lies_between_these_samples(
    observing: ModuleType, count: int, expected: tuple[int, int]
) -> None:
    """Source: tables of the sign test."""
    assert observing.interval_of_median(count) == expected


@pytest.mark.parametrize(
    ("ratios", "limit", "verdict"),
    [
        ([1.0] * 20, 1.02, "kept"),
        ([1.03] * 20, 1.02, "MISSED"),
        ([0.9] * 9 + [1.1] * 11, 1.02, "unclear"),
        ([1.5] * 20, None, ""),
        ([1.5] * 6, 1.02, "MISSED"),
        ([1.5] * 5, 1.02, ""),
    ],
)
def test_a_limit_is_missed_only_where_the_spread_leaves_no_doubt(
    observing: ModuleType, ratios: list[float], limit: float | None, verdict: str
) -> None:
    compared = observing.compare("name", ratios, [1.0] * len(ratios), limit)
    assert compared.verdict == verdict
    assert compared.line().startswith(verdict)


def test_samples_are_compared_in_pairs(observing: ModuleType) -> None:
    compared = observing.compare("name", [2.0, 20.0, 200.0], [1.0, 10.0, 100.0], None)
    assert (compared.low, compared.ratio, compared.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(("check", "status"), [(["--check"], 1), ([], 0), (["--quick"], 0)])
def test_the_exit_status_is_1_for_a_check_alone(
    observing: ModuleType, monkeypatch: pytest.MonkeyPatch, check: list[str], status: int
) -> None:
    slow = {name: [1.0] * 20 for name in observing.KINDS} | {
        observing.observed.METRICS_ON: [2.0] * 20
    }
    monkeypatch.setattr(observing, "measure", lambda *_: {observing.DECODE: slow})
    monkeypatch.setattr(sys, "argv", ["observing.py", *check])
    assert observing.main() == status


def test_the_quick_mode_measures_every_kind(
    observing: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name, value in (("DECODING", 4), ("STEPS", 2), ("PROMPT_TOKENS", 256), ("PROMPTS", 1)):
        monkeypatch.setattr(observing, name, value)
    path = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["observing.py", "--quick", "--json", str(path)])
    assert observing.main() == 0
    samples = json.loads(path.read_text(encoding="utf-8"))["samples_us"]
    for case in (observing.DECODE, observing.REQUEST):
        names = [*observing.KINDS, observing.ASKED]
        assert {name: len(values) for name, values in samples[case].items()} == dict.fromkeys(
            names, 2
        )
        asked, whole = samples[case][observing.ASKED], samples[case][observing.observed.METRICS_ON]
        assert all(0 < one < two for one, two in zip(asked, whole, strict=True))
    made, taken = (
        samples[observing.REPORT][observing.MADE],
        samples[observing.REPORT][observing.TAKEN],
    )
    assert made
    assert taken
    assert "umbp's metrics" in capsys.readouterr().out


def test_kinds_differ_in_what_they_say(observing: ModuleType, tmp_path: Path) -> None:
    observed = observing.observed
    engine = observed.ObservedEngine(observing.Shape(tokens=256), None, with_workers=True)
    found = {}
    for name, kind in observed.KINDS.items():
        engine.observe(kind)
        engine.reports.clear()
        engine.engine.add(256)
        while engine.engine.scheduler.has_requests():
            engine.step()
        found[name] = bool(engine.reports)
    engine.close()
    assert found == {
        observed.METRICS_ON: True,
        observed.AGAIN: True,
        observed.VLLM_ALONE: False,
        observed.METRICS_OFF: False,
        observed.TRACE_ON: True,
    }


@pytest.mark.parametrize("traced", [False, True])
def test_a_trace_that_is_off_leaves_nothing_behind(
    observing: ModuleType, tmp_path: Path, *, traced: bool
) -> None:
    """The core is the one of an engine without traces: nothing of it needs to be measured."""
    from umbp.fsm import Core
    from umbp.trace.recorder import TracedCore

    trace = tmp_path if traced else None
    engine = observing.ObservedEngine(observing.Shape(tokens=256), trace, with_workers=False)
    core = engine.engine.connector._scheduler_side.core
    engine.close()
    assert type(core) is (TracedCore if traced else Core)

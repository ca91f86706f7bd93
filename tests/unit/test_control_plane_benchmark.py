# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the control plane: its arithmetic, its verdict, and that it runs."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("control_plane")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_plane_report")


@pytest.fixture
def cases(plane: ModuleType) -> ModuleType:
    return importlib.import_module("_plane_cases")


# Numbers and words.


def test_a_ratio_is_that_of_the_medians(report: ModuleType) -> None:
    judged = report.ratio("name", 0.5, [1.0, 2.0, 30.0], [4.0, 4.0, 4.0])
    assert judged.value == 0.5
    assert judged.is_kept
    assert not report.ratio("name", 0.49, [1.0, 2.0, 30.0], [4.0, 4.0, 4.0]).is_kept


def test_a_ratio_of_sums_is_that_of_sums_of_medians(report: ModuleType) -> None:
    judged = report.ratio_of_sums("name", 1.0, [[1.0, 1.0, 9.0], [3.0, 9.0, 3.0]], [[2.0] * 3] * 2)
    assert judged.value == 1.0
    assert judged.spread == pytest.approx((1.3, 2.9))


def test_the_spread_of_pairs_is_that_of_their_ratios(report: ModuleType) -> None:
    slow_machine = [1.0] * 10 + [7.0] * 10
    twice = [2 * value for value in slow_machine]
    assert report.ratio("name", 1.0, slow_machine, twice).spread == (0.5, 0.5)
    apart = report.ratio("name", 1.0, [1.0, 7.0], [2.0], paired=False)
    assert apart.spread == pytest.approx((0.8, 3.2))


def test_a_line_says_value_limit_spread_and_verdict(report: ModuleType) -> None:
    kept = report.bound("metadata", 40.0, [36.0, 36.5, 37.0], "bytes")
    assert kept.line() == "kept     36.5 bytes (from 36.1 to 36.9), at most 40.0: metadata"
    assert report.bound("metadata", 36.0, [36.5], "bytes").line().startswith("MISSED   36.5")


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.0, "0"), (0.012345, "0.0123"), (1.5, "1.50"), (312.4, "312"), (12345.6, "12,346")],
)
def test_numbers_have_three_digits_that_count(
    report: ModuleType, value: float, written: str
) -> None:
    assert report.format_number(value) == written


def test_bars_are_as_long_as_their_values(report: ModuleType) -> None:
    title, full, half = report.bars("title", {"a": 8.0, "bb": 4.0}, "µs")
    assert title == "title"
    assert full.count("█") == 2 * half.count("█") == 40


def test_what_was_not_measured_is_left_empty(report: ModuleType) -> None:
    lines = report.table("title", {"row": {"b": 2.0}}, ["a", "b"])
    assert lines[-1] == "  row" + " " * 18 + f"{'2.00':>18}"


# The verdict.


def made_up(plane: ModuleType, cases: ModuleType, long_us: float = 170.0) -> Any:
    """Results in which every target is kept, unless 16 times the tokens cost too much."""
    own = {name: [10.0] for name in cases.GROWING} | {
        cases.AGAIN: [4.0],
        cases.PER_BLOCK_BYTES: [36.5],
    }
    others = {
        "SimpleCPUOffload": {part: [20.0] for part in cases.REQUEST_PARTS},
        "v1/umbp": {part: [40.0] for part in cases.REQUEST_PARTS},
        "Offloading": {part: [1.0] for part in cases.REQUEST_PARTS},
    }
    requests = {(1, 1, plane.SHORT): {"umbp": own, **others}}
    requests[1, 1, plane.SHORT]["umbp, sockets"] = own
    grown = {name: [long_us] for name in cases.GROWING}
    requests[1, 1, plane.LONG] = {"umbp": grown, "umbp, sockets": grown}
    decode = {"umbp": {cases.DECODE: [9.0]}, "Offloading": {cases.DECODE: [100.0]}}
    store = {cases.SUBMIT: [1.0], cases.REFERENCE: [20.0]}
    return plane.Results(requests, decode, {cases.WAITING: [3.0]}, store, ["v0: not here"])


def missed(plane: ModuleType, results: Any) -> list[str]:
    return [one.name for one in plane.judge(results, plane.USUAL) if not one.is_kept]


def test_every_target_can_be_kept(plane: ModuleType, cases: ModuleType) -> None:
    results = made_up(plane, cases)
    assert missed(plane, results) == []
    # Two peers, one decode, a question, metadata, the hand-over; each hook's growth, and that of
    # two more on sockets.
    assert len(plane.judge(results, plane.USUAL)) == 6 + len(cases.GROWING) + 2


def test_every_target_can_be_missed(plane: ModuleType, cases: ModuleType) -> None:
    results = made_up(plane, cases, long_us=181.0)
    results.requests[1, 1, plane.SHORT]["v1/umbp"][cases.HIT] = [39.0]
    results.requests[1, 1, plane.SHORT]["SimpleCPUOffload"][cases.STORE] = [19.0]
    results.decode["umbp"][cases.DECODE] = [11.0]
    results.requests[1, 1, plane.SHORT]["umbp"][cases.AGAIN] = [5.1]
    results.requests[1, 1, plane.SHORT]["umbp"][cases.PER_BLOCK_BYTES] = [40.1]
    results.store[cases.SUBMIT] = [1.1]
    assert len(missed(plane, results)) == 6 + len(cases.GROWING) + 2


def test_a_connector_that_is_not_there_is_not_judged(plane: ModuleType, cases: ModuleType) -> None:
    results = made_up(plane, cases)
    del results.requests[1, 1, plane.SHORT]["v1/umbp"]
    assert not any("v1/umbp" in one.name for one in plane.judge(results, plane.USUAL))


@pytest.mark.parametrize(("long_us", "status"), [(170.0, 0), (181.0, 1)])
def test_the_exit_status_says_whether_a_target_was_missed(
    plane: ModuleType,
    cases: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    long_us: float,
    status: int,
) -> None:
    monkeypatch.setattr(plane, "measure", lambda _: made_up(plane, cases, long_us))
    monkeypatch.setattr(plane, "report", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["control_plane.py"])
    assert plane.main() == status
    out = capsys.readouterr().out
    assert "skipped v0: not here" in out
    assert ("MISSED" in out) is bool(status)


# What is measured.


def test_plans_per_block_name_every_range(cases: ModuleType) -> None:
    first, second = cases.plans_per_block([b"a", b"b"], [3, 5], [1000, 2000])
    assert (first.key, second.key) == (b"a", b"b")
    page = cases._PAGE_BYTES
    assert [piece.address for piece in second.ranges] == [1000 + 5 * page, 2000 + 5 * page]


def test_the_quick_mode_measures_everything(
    plane: ModuleType,
    cases: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "result.json"
    for name, value in (("DECODING", 8), ("WAITING_REQUESTS", 140), ("STORE_BLOCKS", 32)):
        monkeypatch.setattr(cases, name, value)
    monkeypatch.setattr(sys, "argv", ["control_plane.py", "--quick", "--json", str(path)])
    assert plane.main() == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    (requests,) = result["requests"]
    names = {"umbp", "umbp, sockets", "umbp, in process", "SimpleCPUOffload", "Offloading"}
    assert names <= set(requests["samples"])
    for samples in requests["samples"].values():
        assert {len(values) for values in samples.values()} == {plane.QUICK.rounds}
    assert {"SimpleCPUOffload", "Offloading"} <= set(result["decode"])
    assert len(result["waiting"][cases.WAITING]) == plane.QUICK.rounds
    assert set(result["packages"]) == {"umbp", "vllm", "numpy", "pyzmq"}
    assert cases.REQUEST in capsys.readouterr().out

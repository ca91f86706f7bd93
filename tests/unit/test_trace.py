# SPDX-License-Identifier: Apache-2.0
"""Traces: what is written can be played to the same end, stays within its bound, and is shown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from test_cli import usage_error

from umbp.cli.main import main
from umbp.errors import IllegalTransition
from umbp.fsm import (
    BlocksDeferred,
    BlocksFilled,
    BoundaryOffered,
    ComputeAdmitted,
    CoreLimits,
    EpochRaised,
    LeasePart,
    LeaseSent,
    LoadAdmitted,
    LookupAnswered,
    LookupAsked,
    LookupSkipped,
    Preempted,
    RankArriving,
    RankFailed,
    RankStalled,
    RankSucceeded,
    RequestFinished,
    ReuseNeared,
)
from umbp.trace.codec import EVENTS, decode_event, encode_event
from umbp.trace.perfetto import as_perfetto
from umbp.trace.recorder import TracedCore, TraceFile
from umbp.trace.replay import Played, play
from umbp.trace.story import tell

PARTS = (LeasePart(0, (b"",) * 4, (4, 5, 6, 9)),)
LARGE = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.trace.jsonl"


def traced(path: Path, bytes_max: int = LARGE, epoch: int = 0) -> TracedCore:
    core = TracedCore(
        CoreLimits(
            unit_tokens=16,
            rank_count=2,
            lookup_timeout_s=1.0,
            transfer_timeout_s=5.0,
            lazy_blocks_max=8,
        ),
        epoch,
    )
    core.trace_to(TraceFile(path, bytes_max))
    return core


def played(path: Path) -> list[Played]:
    return list(play(path.read_text().splitlines(), str(path)))


def store(core: TracedCore, request_id: str, now_s: float) -> int:
    """Lets a request miss, run and store; returns the job."""
    core.step(LookupAsked(request_id, object(), 0, 64, 64), now_s)
    question_id = core.requests[request_id].question_id
    assert question_id is not None
    core.step(LookupAnswered(request_id, question_id, 0, hit=object()), now_s + 0.1)
    core.step(ComputeAdmitted(request_id, 0), now_s + 0.2)
    (command,) = core.step(BlocksFilled(request_id, 0, 64, PARTS), now_s + 0.3)
    job_id: int = command.lease.job_id  # type: ignore[union-attr]
    core.step(LeaseSent(job_id), now_s + 0.4)
    return job_id


def whole_life(core: TracedCore, request_id: str, now_s: float) -> None:
    job_id = store(core, request_id, now_s)
    core.step(RequestFinished(request_id), now_s + 0.5)
    core.step(RankSucceeded(job_id, 0), now_s + 0.6)
    core.step(RankSucceeded(job_id, 1), now_s + 0.7)


# ---------------------------------------------------------------- playing


def test_a_trace_plays_to_the_same_end(path: Path) -> None:
    """Deadlines, a refused event, a number taken from outside and a reset are all among it."""
    core = traced(path, epoch=5)
    job_id = store(core, "a", 1.0)
    with pytest.raises(IllegalTransition):
        core.step(ComputeAdmitted("nobody", 0), 1.5)
    assert core.next_id() == job_id + 1
    core.step(RankFailed(job_id, 0, True, (b"\x01\x02",)), 2.0)
    assert core.tick(2.5) == []
    assert [type(command).__name__ for command in core.tick(7.0)] == ["CancelTransfer"]
    core.step(EpochRaised(local_cache_kept=True), 7.5)
    core.step(RankSucceeded(job_id, 1), 8.0)
    core.step(LookupAsked("b", object(), 0, 64, 64), 9.0)
    core.tick(10.5)
    lines = played(path)
    assert [one.difference for one in lines] == [""] * len(lines)
    ticks = [one for one in lines if one.line["event"] == "tick"]
    assert [one.now_s for one in ticks] == [7.0, 10.5], "a tick that moves nothing is no line"
    assert [move.event for move in ticks[1].transitions] == ["LookupExpired"]
    assert sum(one.line.get("error") == "IllegalTransition" for one in lines) == 1


def change(line: dict[str, Any], **fields: Any) -> str:
    return json.dumps(line | fields)


@pytest.mark.parametrize(
    ("event", "fields", "word"),
    [
        ("BlocksFilled", {"commands": []}, "recorded []"),
        ("BlocksFilled", {"error": "UsageError"}, "no error, recorded UsageError"),
        ("LeaseSent", {"job_id": 99}, "UsageError (transfer 99 is not open), recorded commands"),
    ],
)
def test_a_core_that_behaves_otherwise_is_found(
    path: Path, event: str, fields: dict[str, Any], word: str
) -> None:
    whole_life(traced(path), "a", 1.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    texts = [
        change(line, **fields) if line.get("event") == event else change(line) for line in lines
    ]
    found = [one for one in play(texts, "trace") if one.difference]
    assert found[0].line["event"] == event
    assert word in found[0].difference


EXAMPLES = (
    LookupAsked("a", None, 0, 63, 64),
    LookupSkipped("a", None, 0, 63, 64),
    LookupAnswered("a", 7, 32),
    LoadAdmitted("a", 0, 64, PARTS, False),
    ComputeAdmitted("a", 16),
    BlocksFilled("a", 0, 64, PARTS),
    BlocksDeferred("a", 0, 64),
    ReuseNeared(PARTS),
    BoundaryOffered("a", 64, 64, (LeasePart(2, (), ()),)),
    Preempted("a"),
    RequestFinished("a"),
    LeaseSent(3),
    RankSucceeded(3, 1),
    RankFailed(3, 1, False, (b"\x00\xff",)),
    RankStalled(3, 1),
    RankArriving(3, 1),
    EpochRaised(True, 4),
)


def test_there_is_an_example_of_every_event() -> None:
    assert {type(example).__name__ for example in EXAMPLES} == EVENTS.keys()


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_an_event_survives_being_written(event: Any) -> None:
    line = json.loads(json.dumps(encode_event(event)))
    again = decode_event(line)
    assert type(again) is type(event)
    assert attrs.asdict(again) == attrs.asdict(event)


def test_block_ids_are_written_as_ranges() -> None:
    assert encode_event(BlocksFilled("a", 0, 64, PARTS))["parts"] == [[0, "4-6,9"]]


# ---------------------------------------------------------------- files


def test_an_idle_core_begins_the_file_anew_and_both_parts_play(path: Path) -> None:
    core = traced(path, bytes_max=12_000)
    for number in range(8):
        whole_life(core, f"request-{number}", float(number))
    before = path.with_name(path.name + ".1")
    assert before.exists()
    assert path.stat().st_size + before.stat().st_size <= 12_000
    for part in (before, path):
        assert all(not one.difference for one in played(part))
    first, second = (json.loads(part.read_text().splitlines()[0]) for part in (before, path))
    assert second["last_id"] > first["last_id"]


def test_a_busy_core_ends_its_trace_within_the_bound(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core = traced(path, bytes_max=12_000)
    for number in range(20):
        store(core, f"request-{number}", float(number))
    assert path.stat().st_size <= 6_000
    assert [record.getMessage() for record in caplog.records] == [
        f"trace {path} is full: the trace ends here; raise trace_bytes"
    ]
    assert all(not one.difference for one in played(path))


def test_a_trace_that_cannot_be_written_disturbs_nothing(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_life(traced(path.parent / "gone" / "file"), "a", 1.0)
    assert "cannot be written: No such file" in caplog.text
    core = traced(path)

    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("umbp.trace.recorder.os.write", refuse)
    whole_life(core, "a", 1.0)
    assert caplog.text.count("cannot be written any more: No space left") == 1


def test_a_file_is_private_and_replaces_that_of_an_earlier_run(path: Path) -> None:
    before = path.with_name(path.name + ".1")
    for old in (path, before):
        old.write_text("old\n")
        old.chmod(0o600)
    whole_life(traced(path), "a", 1.0)
    assert path.stat().st_mode & 0o777 == 0o600
    assert played(path)
    assert not before.exists()


# ---------------------------------------------------------------- shown


def test_a_story_tells_of_one_request_and_its_transfers(path: Path) -> None:
    core = traced(path)
    whole_life(core, "a", 1.0)
    whole_life(core, "b", 2.0)
    text = "\n".join(tell(played(path), "a"))
    for words in (
        "0.0000 s  LookupAsked  local_tokens=0, limit_tokens=64, store_end_tokens=64",
        "-> StartLookup  question_id=2, begin_tokens=0, end_tokens=64",
        "life 1: ComputeAdmitted, LOOKUP to RUNNING",
        "BlocksFilled  begin_tokens=0, end_tokens=64, group 0: blocks 4-6,9",
        "store 3: AllRanksSucceeded, IN_FLIGHT to SETTLED",
        "life 1: LeasesDrained, STORING to FINISHED",
    ):
        assert words in text
    assert "life 4" not in text
    assert list(tell(played(path), "c")) == []


def spans(path: Path, process: int) -> list[tuple[str, float]]:
    events = as_perfetto(played(path))["traceEvents"]
    return [
        (event["name"], round(event["dur"] / 1e6, 6))
        for event in events
        if event["ph"] == "X" and event["pid"] == process
    ]


def test_perfetto_gets_a_span_for_each_state(path: Path) -> None:
    whole_life(traced(path), "a", 1.0)
    assert spans(path, 1) == [("LOOKUP", 0.2), ("RUNNING", 0.3), ("STORING", 0.2)]
    assert spans(path, 2) == [("SUBMITTED", 0.1), ("IN_FLIGHT", 0.3), ("SETTLED", 0.0)]
    events = as_perfetto(played(path))["traceEvents"]
    answers = [event for event in events if event["ph"] == "i"]
    assert [(answer["name"], answer["tid"]) for answer in answers] == [
        ("RankSucceeded 0", 3),
        ("RankSucceeded 1", 3),
    ]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["a", "store 3 of a"]


def test_a_store_of_no_request_has_a_track_of_its_own(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = traced(path)
    whole_life(core, "a", 1.0)
    core.step(ReuseNeared(PARTS), 2.0)
    (job_id,) = core.leases
    core.step(LeaseSent(job_id), 2.1)
    core.step(RankSucceeded(job_id, 0), 2.2)
    core.step(RankSucceeded(job_id, 1), 2.3)
    events = as_perfetto(played(path))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["a", "store 3 of a", f"store {job_id} of free blocks"]
    assert spans(path, 2)[3:] == [("SUBMITTED", 0.1), ("IN_FLIGHT", 0.2), ("SETTLED", 0.0)]
    assert main(["trace", str(path)]) == 0
    assert "of 1 requests" in capsys.readouterr().out


def test_what_is_open_at_the_end_of_a_trace_ends_there(path: Path) -> None:
    store(traced(path), "a", 1.0)
    assert spans(path, 1) == [("LOOKUP", 0.2), ("RUNNING", 0.2)]
    assert spans(path, 2) == [("SUBMITTED", 0.1), ("IN_FLIGHT", 0.0)]


# ---------------------------------------------------------------- the command


def test_the_command_plays_tells_and_exports(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole_life(traced(path), "a", 1.0)
    # The engine died while it wrote a line.
    path.write_text(path.read_text() + '{"now_s":3')
    assert main(["trace", str(path)]) == 0
    assert capsys.readouterr().out == ("8 events of 1 requests in 0.700 s: all played the same\n")
    assert main(["trace", str(path), "--request", "a"]) == 0
    assert "RUNNING to STORING" in capsys.readouterr().out
    out = tmp_path / "out.json"
    assert main(["trace", str(path), "--perfetto", str(out)]) == 0
    assert json.loads(out.read_text())["displayTimeUnit"] == "ms"


def test_the_command_shows_differences(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole_life(traced(path), "a", 1.0)
    path.write_text(path.read_text().replace('"command":"StartLookup"', '"command":"Other"'))
    assert main(["trace", str(path), "--replay"]) == 1
    first, summary = capsys.readouterr().out.splitlines()
    assert first.startswith("line 2, LookupAsked: [")
    assert summary.endswith("1 of them played otherwise")


def of_format(path: Path) -> None:
    path.write_text('{"umbp_trace": 9, "umbp": "7.0"}\n')


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: None, "cannot be read: No such file"),
        (lambda path: path.write_bytes(b"\xff"), "cannot be read: no text"),
        (lambda path: path.write_text(""), "is empty"),
        (lambda path: path.write_text("{"), "is empty"),
        (lambda path: path.write_text("[1]\n{}"), "line 1: no line of a trace"),
        (of_format, "the trace has format 9, and this umbp plays 1; use umbp 7.0"),
    ],
)
def test_wrong_files_are_one_line(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], object],
    expected: str,
) -> None:
    make(path)
    assert expected in usage_error(capsys, "trace", str(path))


def test_an_unknown_request_is_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole_life(traced(path), "a", 1.0)
    line = usage_error(capsys, "trace", str(path), "--request", "z")
    assert line.endswith("--request z: there is no such request; the most eventful are a")
    line = usage_error(capsys, "trace", str(path), "--perfetto", "/not/there")
    assert "--perfetto /not/there: cannot be written (No such file" in line
    with path.open("a") as stream:
        stream.write('{"now_s":3,"event":"Unknown","commands":[]}\n')
    assert "line 10: no line of a trace" in usage_error(capsys, "trace", str(path))

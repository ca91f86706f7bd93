# SPDX-License-Identifier: Apache-2.0
"""Lifecycles as spans: each state and each transfer is one, with its times and its outcome."""

from typing import Any

import attrs

from umbp.fsm import (
    BlocksFilled,
    ComputeAdmitted,
    Core,
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
    RequestState,
    ReuseNeared,
)
from umbp.trace.recorder import TracedCore, TraceFile
from umbp.trace.spans import NOTES_MAX, SPANS_MAX, Lifecycle, Span, SpannedCore

PARTS = (LeasePart(0, (b"",) * 2, (4, 5)),)
LIMITS = CoreLimits(
    unit_tokens=16,
    rank_count=2,
    lookup_timeout_s=1.0,
    transfer_timeout_s=5.0,
    lazy_blocks_max=8,
)


@attrs.define
class Kept:
    """A sink that keeps everything."""

    lifecycles: list[Lifecycle] = attrs.field(factory=list)
    closed_s: list[float] = attrs.field(factory=list)

    def put(self, lifecycle: Lifecycle) -> None:
        self.lifecycles.append(lifecycle)

    def close(self, timeout_s: float) -> None:
        self.closed_s.append(timeout_s)


@attrs.frozen
class Answer:
    job_id: int
    rank: int
    succeeded: bool = True
    bytes_moved: int = 0
    reason: str = ""
    stalled: bool = False
    arriving: bool = False


@attrs.frozen(eq=False)
class Source:
    """The engine's request."""

    trace_headers: dict[str, str] | None = None


def spanned() -> tuple[SpannedCore, Kept]:
    core, kept = SpannedCore(LIMITS), Kept()
    core.span_to(kept)
    return core, kept


def ask(core: Core, now_s: float, *, found: int | None, source: Any = None) -> None:
    """Asks for request ``a``, and answers."""
    core.step(LookupAsked("a", source or Source(), 0, 64, 64), now_s)
    question_id = core.requests["a"].question_id
    assert question_id is not None
    if found is not None:
        core.step(LookupAnswered("a", question_id, found, hit=object()), now_s + 0.25)


def answer(core: SpannedCore, event: Any, now_s: float, **fields: Any) -> None:
    """Gives the core an answer as the connector does: the log hears of it first."""
    core.spans.note_answers(
        [
            Answer(
                event.job_id, event.rank, not isinstance(event, RankFailed | RankStalled), **fields
            )
        ]
    )
    core.step(event, now_s)


def load(core: Core, now_s: float) -> int:
    (command,) = core.step(LoadAdmitted("a", 0, 32, PARTS, False), now_s)
    job_id: int = command.lease.job_id  # type: ignore[union-attr]
    core.step(LeaseSent(job_id), now_s + 0.25)
    return job_id


def shown(span: Span) -> tuple[str, float, float]:
    return span.name, span.begin_s, span.end_s


def test_a_store_of_free_blocks_is_in_no_lifecycle() -> None:
    core, kept = spanned()
    core.step(ReuseNeared(PARTS), 1.0)
    (job_id,) = core.leases
    core.step(LeaseSent(job_id), 1.0)
    for rank in (0, 1):
        answer(core, RankSucceeded(job_id, rank), 2.0, bytes_moved=7)
    ask(core, 3.0, found=0)
    core.step(RequestFinished("a"), 4.0)
    (lifecycle,) = kept.lifecycles
    assert [span.name for span in lifecycle.spans] == ["umbp.lookup", "umbp.storing"]
    assert not core.spans._answers


def test_every_state_and_transfer_of_a_request_is_a_span() -> None:
    core, kept = spanned()
    headers = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    ask(core, 1.0, found=32, source=Source(headers))
    job_id = load(core, 2.0)
    answer(core, RankSucceeded(job_id, 0), 3.0, bytes_moved=100)
    answer(core, RankSucceeded(job_id, 1), 4.0, bytes_moved=11)
    core.step(ComputeAdmitted("a", 32), 4.5)
    (command,) = core.step(BlocksFilled("a", 32, 64, PARTS), 5.0)
    store: int = command.lease.job_id  # type: ignore[union-attr]
    core.step(LeaseSent(store), 5.0)
    core.step(RequestFinished("a"), 6.0)
    for rank in (0, 1):
        answer(core, RankSucceeded(store, rank), 7.0 + rank, bytes_moved=50)
    (lifecycle,) = kept.lifecycles
    assert lifecycle.headers == headers
    assert shown(lifecycle.whole) == ("umbp.request", 1.0, 8.0)
    assert lifecycle.whole.facts == {"umbp.request_id": "a", "umbp.lives": 1}
    assert [shown(span) for span in lifecycle.spans] == [
        ("umbp.lookup", 1.0, 2.0),
        ("umbp.load", 2.0, 4.0),
        ("umbp.loading", 2.0, 4.0),
        ("umbp.running", 4.0, 6.0),
        ("umbp.store", 5.0, 8.0),
        ("umbp.storing", 6.0, 8.0),
    ]
    assert lifecycle.spans[1].facts == {
        "umbp.job_id": job_id,
        "umbp.begin_tokens": 0,
        "umbp.end_tokens": 32,
        "umbp.blocks": 2,
        "umbp.bytes": 111,
        "umbp.epoch": 0,
        "umbp.life": 1,
        "umbp.outcome": "settled",
        "umbp.synchronous": False,
    }
    assert [(note.name, note.at_s) for note in lifecycle.spans[1].notes] == [
        ("LeaseSent", 2.25),
        ("RankAnswered", 3.0),
        ("RankAnswered", 4.0),
    ]
    assert [(note.name, note.facts) for note in lifecycle.spans[0].notes] == [
        ("LookupAsked", {"umbp.local_tokens": 0}),
        ("LookupAnswered", {"umbp.hit_end_tokens": 32}),
    ]
    assert lifecycle.spans[4].facts["umbp.bytes"] == 100
    assert not any(span.error for span in lifecycle.spans)
    assert [span.facts.get("umbp.ended_by") for span in lifecycle.spans] == [
        "LoadAdmitted", None, "LoadSettled", "RequestFinished", None, "LeasesDrained",
    ]  # fmt: skip


def test_a_load_that_failed_is_an_error_with_the_reason_of_the_rank() -> None:
    core, kept = spanned()
    ask(core, 1.0, found=32)
    job_id = load(core, 2.0)
    answer(core, RankFailed(job_id, 0), 3.0, reason="2 of 2 objects are missing")
    answer(core, RankFailed(job_id, 1, attempted=False), 3.0, reason="cancelled")
    core.step(RequestFinished("a"), 4.0)
    spans = {span.name: span for span in kept.lifecycles[0].spans}
    assert spans["umbp.load"].error == "2 of 2 objects are missing"
    assert spans["umbp.load"].facts["umbp.outcome"] == "failed"
    assert spans["umbp.loading"].facts["umbp.ended_by"] == "LoadFailed"


def test_a_transfer_that_no_rank_began_or_heard_of_is_told_from_one_that_failed() -> None:
    core, kept = spanned()
    ask(core, 1.0, found=32)
    job_id = load(core, 2.0)
    for rank in (0, 1):
        answer(core, RankFailed(job_id, rank, attempted=False), 3.0, reason="queue full")
    core.step(LookupSkipped("a", Source(), 0, 64, 64), 3.5)
    core.step(ComputeAdmitted("a", 0), 4.0)
    core.step(BlocksFilled("a", 0, 64, (LeasePart(0, (b"",) * 4, (1, 2, 3, 4)),)), 4.0)
    core.tick(100.0)
    core.step(RequestFinished("a"), 101.0)
    spans = {span.name: span for span in kept.lifecycles[0].spans}
    assert spans["umbp.load"].facts["umbp.outcome"] == "not attempted"
    assert spans["umbp.load"].error == "queue full"
    assert spans["umbp.store"].facts["umbp.outcome"] == "not attempted"
    assert spans["umbp.store"].error == "no rank ever heard of it"


def test_a_stall_is_a_note_and_no_answer() -> None:
    core, kept = spanned()
    ask(core, 1.0, found=32)
    job_id = load(core, 2.0)
    answer(core, RankStalled(job_id, 0), 3.0, stalled=True, reason="it hangs")
    answer(core, RankSucceeded(job_id, 1), 3.0)
    core.step(RequestFinished("a"), 4.0)
    answer(core, RankSucceeded(job_id, 0), 9.0)
    (loaded,) = (span for span in kept.lifecycles[0].spans if span.name == "umbp.load")
    names = [(note.name, note.facts.get("umbp.rank")) for note in loaded.notes]
    assert names == [
        ("LeaseSent", None),
        ("RankStalled", 0),
        ("RankAnswered", 1),
        ("RankAnswered", 0),
    ]
    assert (loaded.end_s, loaded.error) == (9.0, "it hangs")


def test_an_arrival_is_a_note_and_no_answer() -> None:
    core, kept = spanned()
    ask(core, 1.0, found=32)
    job_id = load(core, 2.0)
    answer(core, RankArriving(job_id, 0), 3.0, arriving=True)
    answer(core, RankSucceeded(job_id, 1), 3.0)
    assert core.requests["a"].state is RequestState.RUNNING
    answer(core, RankSucceeded(job_id, 0), 4.0)
    core.step(RequestFinished("a"), 5.0)
    (loaded,) = (span for span in kept.lifecycles[0].spans if span.name == "umbp.load")
    names = [(note.name, note.facts.get("umbp.rank")) for note in loaded.notes]
    assert names == [
        ("LeaseSent", None),
        ("RankArriving", 0),
        ("RankAnswered", 1),
        ("RankAnswered", 0),
    ]
    assert (loaded.end_s, loaded.error) == (4.0, "")


def test_each_life_has_its_number_and_a_late_transfer_that_of_its_own() -> None:
    core, kept = spanned()
    ask(core, 1.0, found=0)
    core.step(ComputeAdmitted("a", 0), 2.0)
    (command,) = core.step(BlocksFilled("a", 0, 32, PARTS), 2.0)
    store: int = command.lease.job_id  # type: ignore[union-attr]
    core.step(LeaseSent(store), 2.0)
    core.step(Preempted("a"), 3.0)
    ask(core, 4.0, found=0)
    core.step(ComputeAdmitted("a", 0), 5.0)
    for rank in (0, 1):
        answer(core, RankSucceeded(store, rank), 6.0)
    core.step(RequestFinished("a"), 7.0)
    (lifecycle,) = kept.lifecycles
    assert lifecycle.whole.facts["umbp.lives"] == 2
    assert [(span.name, span.facts["umbp.life"]) for span in lifecycle.spans] == [
        ("umbp.lookup", 1),
        ("umbp.running", 1),
        ("umbp.preempted", 1),
        ("umbp.lookup", 2),
        ("umbp.store", 1),
        ("umbp.running", 2),
        ("umbp.storing", 2),
    ]


def test_what_a_request_may_leave_is_bounded() -> None:
    core, kept = spanned()
    ask(core, 0.0, found=0)
    for round_index in range(SPANS_MAX):
        core.step(ComputeAdmitted("a", 0), 1.0)
        core.step(Preempted("a"), 2.0)
        core.step(LookupSkipped("a", Source(), 0, 64, 64), 3.0)
        if round_index == 0:
            for _ in range(2 * NOTES_MAX):
                core.step(EpochRaised(False), 3.0)
    core.step(RequestFinished("a"), 4.0)
    (lifecycle,) = kept.lifecycles
    assert len(lifecycle.spans) == SPANS_MAX
    assert lifecycle.whole.facts["umbp.spans_left_out"] == 3 * SPANS_MAX + 2 - SPANS_MAX
    assert max(len(span.notes) for span in lifecycle.spans) == NOTES_MAX


def test_nothing_is_kept_of_what_is_done_or_was_refused() -> None:
    core, kept = spanned()
    for index in range(3):
        ask(core, float(index), found=0)
        core.step(ComputeAdmitted("a", 0), index + 0.5)
        (command,) = core.step(BlocksFilled("a", 0, 32, PARTS), index + 0.5)
        store: int = command.lease.job_id  # type: ignore[union-attr]
        core.step(LeaseSent(store), index + 0.5)
        core.step(RequestFinished("a"), index + 0.75)
        for rank in (0, 1):
            answer(core, RankSucceeded(store, rank), index + 0.8)
    core.spans.note_answers([Answer(77, 0)])
    assert len(kept.lifecycles) == 3
    assert (core.spans._lifecycles, core.spans._transfers, core.spans._answers) == ({}, {}, {})


def test_a_core_writes_a_trace_and_makes_spans_at_the_same_time(tmp_path: Any) -> None:
    path = tmp_path / "t.jsonl"
    core, kept = spanned()
    core.trace_to(TraceFile(path, 1 << 20))
    ask(core, 1.0, found=0)
    core.step(ComputeAdmitted("a", 0), 2.0)
    core.step(RequestFinished("a"), 3.0)
    assert len(kept.lifecycles) == 1
    alone = TracedCore(LIMITS)
    alone.trace_to(TraceFile(tmp_path / "alone.jsonl", 1 << 20))
    ask(alone, 1.0, found=0)
    alone.step(ComputeAdmitted("a", 0), 2.0)
    alone.step(RequestFinished("a"), 3.0)
    lines = [p.read_text().splitlines()[1:] for p in (path, tmp_path / "alone.jsonl")]
    assert lines[0] == lines[1]

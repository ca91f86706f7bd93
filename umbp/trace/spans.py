# SPDX-License-Identifier: Apache-2.0
"""What every request did, as spans: stretches of time that a tracing system shows.

A span is a state that a request was in, or a transfer from its plan to its release. They are kept
as plain values until the request is done, and then handed on as one. An engine without tracing has
an ordinary ``Core`` and pays nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import attrs

from umbp.fsm import LeaseKind, LeaseState, RequestContext, RequestState, TransferLease, events
from umbp.trace.recorder import TracedCore

Facts: TypeAlias = dict[str, str | int | bool]

SPANS_MAX: Final = 128
"""Of one request; a request that is preempted again and again must not grow for ever."""

NOTES_MAX: Final = 32
"""Of one span."""


def _nothing(_: Any) -> Facts:
    return {}


_NOTED: Final[dict[type[Any], Callable[[Any], Facts]]] = {
    events.LookupAsked: lambda event: {"umbp.local_tokens": event.local_tokens},
    events.LookupSkipped: lambda event: {"umbp.local_tokens": event.local_tokens},
    events.LookupAnswered: lambda event: {"umbp.hit_end_tokens": event.hit_end_tokens},
    events.LookupExpired: _nothing,
    events.ComputeAdmitted: lambda event: {"umbp.computed_tokens": event.computed_tokens},
    events.EpochRaised: _nothing,
    events.LoadExpired: _nothing,
    events.StoreExpired: _nothing,
    events.LeaseSent: _nothing,
    events.LeaseExpired: _nothing,
}
"""Events that are worth a note in the span that they do not end, and what is noted of each."""


@attrs.frozen(eq=False)
class Note:
    """Something that happened at one moment of a span."""

    name: str
    at_s: float
    facts: Facts


@attrs.define(eq=False)
class Span:
    """A stretch of time.

    Attributes:
        name: What it was.
        begin_s: When it began, by the clock of the core.
        end_s: When it ended; what it began at, until then.
        facts: What is known of it.
        notes: What happened meanwhile.
        error: Why it failed; empty: it did not.
    """

    name: str
    begin_s: float
    end_s: float
    facts: Facts
    notes: list[Note] = attrs.field(factory=list)
    error: str = ""

    def note(self, name: str, at_s: float, facts: Facts) -> None:
        """Adds a note, if there is room."""
        if len(self.notes) < NOTES_MAX:
            self.notes.append(Note(name, at_s, facts))


@attrs.define(eq=False)
class Lifecycle:
    """Everything that one request did.

    Attributes:
        whole: From its first lookup until nothing was left of it.
        headers: What its client sent of the trace that it belongs to (``traceparent``).
        spans: Its parts that have ended.
        state: Its present state.
        lives: Lives that it has begun.
        left_out: Parts that were too many.
    """

    whole: Span
    headers: Mapping[str, str] | None
    spans: list[Span]
    state: Span
    lives: int = 1
    left_out: int = 0

    def add(self, span: Span) -> None:
        """Adds a part that has ended, if there is room."""
        if len(self.spans) < SPANS_MAX:
            self.spans.append(span)
        else:
            self.left_out += 1


class Answer(Protocol):
    """What a rank says of its part of a transfer; see ``umbp.connector.metadata.RankAnswer``."""

    job_id: int
    rank: int
    succeeded: bool
    bytes_moved: int
    reason: str
    stalled: bool
    arriving: bool


class Sink(Protocol):
    """Where lifecycles go. No method raises."""

    def put(self, lifecycle: Lifecycle) -> None:
        """Takes the lifecycle of a request that is done. Does not block."""

    def close(self, timeout_s: float) -> None:
        """Sends what waits, for at most ``timeout_s``."""


class SpanLog:
    """Makes lifecycles of transitions.

    Args:
        sink: Takes each when its request is done.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._lifecycles: dict[RequestContext, Lifecycle] = {}
        self._transfers: dict[int, Span] = {}
        self._answers: dict[int, list[Answer]] = {}

    def note_answers(self, answers: Iterable[Answer]) -> None:
        """Takes what ranks have answered, before the core does."""
        for answer in answers:
            if answer.job_id in self._transfers:
                self._answers.setdefault(answer.job_id, []).append(answer)

    def close(self, timeout_s: float) -> None:
        """Sends what waits, for at most ``timeout_s``; what has not ended is left out."""
        self._sink.close(timeout_s)

    def planned(self, lease: TransferLease, now_s: float) -> None:
        """Begins the span of a request's transfer."""
        facts: Facts = {
            "umbp.job_id": lease.job_id,
            "umbp.begin_tokens": lease.begin_tokens,
            "umbp.end_tokens": lease.end_tokens,
            "umbp.blocks": lease.block_count,
            "umbp.bytes": 0,
            "umbp.epoch": lease.epoch,
        }
        lifecycle = self._lifecycle_of(lease)
        if lifecycle is not None:
            facts["umbp.life"] = lifecycle.lives
        self._transfers[lease.job_id] = Span(f"umbp.{lease.kind.value}", now_s, now_s, facts)

    def lease_moved(self, lease: TransferLease, event: Any, now_s: float) -> None:
        """Follows a transfer that has taken an event."""
        span = self._transfers[lease.job_id]
        for answer in self._answers.pop(lease.job_id, ()):
            span.facts["umbp.bytes"] = int(span.facts["umbp.bytes"]) + answer.bytes_moved
            note: Facts = {"umbp.rank": answer.rank, "umbp.succeeded": answer.succeeded}
            span.note(_answer_name(answer), now_s, note)
            if not answer.succeeded:
                span.error = span.error or answer.reason or "failed"
        facts_of = _NOTED.get(type(event))
        if facts_of is not None:
            span.note(type(event).__name__, now_s, facts_of(event))
        if lease.state is not LeaseState.RELEASED:
            return
        del self._transfers[lease.job_id]
        span.end_s = now_s
        span.facts["umbp.outcome"] = _outcome(lease)
        if lease.kind is LeaseKind.LOAD:
            span.facts["umbp.synchronous"] = lease.synchronous
        if lease.failed:
            span.error = span.error or "no rank ever heard of it"
        lifecycle = self._lifecycle_of(lease)
        if lifecycle is not None:
            lifecycle.add(span)

    def _lifecycle_of(self, lease: TransferLease) -> Lifecycle | None:
        return self._lifecycles.get(lease.request) if lease.request is not None else None

    def request_moved(
        self, request: RequestContext, event: Any, source: RequestState, now_s: float
    ) -> None:
        """Follows a request that has taken an event in the state ``source``."""
        lifecycle = self._lifecycles.get(request)
        if lifecycle is None:
            lifecycle = self._lifecycles[request] = self._begin(request, now_s)
        elif request.state is not source:
            self._enter(lifecycle, request, event, now_s)
        facts_of = _NOTED.get(type(event))
        if facts_of is not None:
            lifecycle.state.note(type(event).__name__, now_s, facts_of(event))
        if request.state is RequestState.FINISHED:
            del self._lifecycles[request]
            self._finish(lifecycle, request, now_s)

    def _begin(self, request: RequestContext, now_s: float) -> Lifecycle:
        whole = Span("umbp.request", now_s, now_s, {"umbp.request_id": str(request.request_id)})
        headers = getattr(request.source, "trace_headers", None)
        return Lifecycle(whole, headers, [], _state_span(request, 1, now_s))

    def _enter(
        self, lifecycle: Lifecycle, request: RequestContext, event: Any, now_s: float
    ) -> None:
        """Ends the span of the state before, and begins that of the present one."""
        before = lifecycle.state
        before.end_s = now_s
        before.facts["umbp.ended_by"] = type(event).__name__
        lifecycle.add(before)
        if isinstance(event, events.LookupAsked):
            lifecycle.lives += 1
        lifecycle.state = _state_span(request, lifecycle.lives, now_s)

    def _finish(self, lifecycle: Lifecycle, request: RequestContext, now_s: float) -> None:
        whole = lifecycle.whole
        whole.end_s = now_s
        whole.facts["umbp.lives"] = lifecycle.lives
        if lifecycle.left_out:
            whole.facts["umbp.spans_left_out"] = lifecycle.left_out
        self._sink.put(lifecycle)


class SpannedCore(TracedCore):
    """A core whose lifecycles become spans; it may be traced to a file as well.

    Attributes:
        spans: Takes what moves.
    """

    spans: SpanLog

    def span_to(self, sink: Sink) -> None:
        """Begins to make spans; before the first event."""
        self.spans = SpanLog(sink)

    def open_lease(
        self, request: RequestContext, kind: LeaseKind, event: Any, block_count: int
    ) -> TransferLease:
        """Makes the lease of an event that moves ``block_count`` blocks."""
        lease = super().open_lease(request, kind, event, block_count)
        self.spans.planned(lease, self.now_s)
        return lease

    def _fire(self, subject: Any, event: Any) -> None:
        source = subject.state
        super()._fire(subject, event)
        if isinstance(subject, TransferLease):
            if subject.request is not None:
                # A store of free blocks is part of no request's trace.
                self.spans.lease_moved(subject, event, self.now_s)
        else:
            self.spans.request_moved(subject, event, source, self.now_s)


def _answer_name(answer: Answer) -> str:
    if answer.stalled:
        return "RankStalled"
    return "RankArriving" if answer.arriving else "RankAnswered"


def _state_span(request: RequestContext, life: int, now_s: float) -> Span:
    return Span(f"umbp.{request.state.value}", now_s, now_s, {"umbp.life": life})


def _outcome(lease: TransferLease) -> str:
    if not lease.failed:
        return "settled"
    return "failed" if lease.attempted else "not attempted"

# SPDX-License-Identifier: Apache-2.0
"""What surrounds the core in the exhaustive search: a small engine, its workers, a backend, time.

It says what may happen next, as actions that name requests and transfers by their place in
``names``, ``leases`` and ``storing``, and it does them. The workers answer in any order, the
backend answers or does not, and the engine does whatever the table does not forbid.

Without a clock every deadline may pass at any moment, in any order: that is more than any clock can
bring about, whatever the limits. With a clock time jumps to the next moment at which anything ends.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import attrs
from core_engine import UNIT, Engine, parts_of

from umbp.fsm import (
    BlocksDeferred,
    BlocksFilled,
    BoundaryOffered,
    ComputeAdmitted,
    Core,
    CoreLimits,
    EpochRaised,
    Event,
    LeaseKind,
    LeasePart,
    LeaseSent,
    LeaseState,
    LoadAdmitted,
    LookupAnswered,
    LookupAsked,
    LookupReply,
    LookupSkipped,
    Preempted,
    RankArriving,
    RankFailed,
    RankStalled,
    RankSucceeded,
    RequestContext,
    RequestFinished,
    RequestState,
    ReuseNeared,
    TransferLease,
)

NAMES = ("a", "b", "c")
HASHES = (b"first", b"second", b"third")

_BEGINS_ANEW = (RequestState.LOOKUP, RequestState.PREEMPTED)
_ADMITTED = (RequestState.LOADING, RequestState.RUNNING)

NOTHING, STALLED, ARRIVING = "nothing", "stalled", "arriving"
"""What a rank that has not answered has said so far of its part of a load."""


@attrs.frozen(kw_only=True)
class Bounds:
    """How large the world is. Lives, resets, ids and time are without bounds.

    Attributes:
        requests: Requests at a time. An id that has ended is used again.
        units: Units of tokens, and so blocks, in a prompt.
        leases: Transfers open at a time.
        ranks: Workers that answer for each transfer.
        local_units: What the engine may have by itself when it asks.
        loads: For each way to load, whether it is synchronous.
        stores: Whether blocks that fill are stored.
        boundaries: Whether boundaries are offered.
        lazy: Whether stores may be put off, and blocks that nobody uses are stored.
        pins: Blocks that stores may pin.
        stalls: Whether a rank may be unable to end its part of a load.
        arrivals: Whether a rank may say that its part of a load cannot fail any more. It may fail
            after all: the core relies on no rank's word.
        quarantine: Whether objects that failed to load are misses for a while; then a worker may
            also fail without having attempted anything.
        resets: Whether the store is reset.
        deadlines: Whether deadlines pass.
        clock: Whether they pass by a clock.
        orderly: Whether the engine preempts a request before it asks for it again, and uses an id
            again only when nothing is left of its last use. The core relies on neither.
        hand_over_at_once: Whether a transfer is handed over as soon as it is planned.
    """

    requests: int = 2
    units: int = 1
    leases: int = 2
    ranks: int = 2
    local_units: Sequence[int] = (0,)
    loads: Sequence[bool] = (False,)
    stores: bool = True
    boundaries: bool = False
    lazy: bool = False
    pins: int = 100
    stalls: bool = False
    arrivals: bool = False
    quarantine: bool = False
    resets: bool = True
    deadlines: bool = True
    clock: bool = False
    orderly: bool = False
    hand_over_at_once: bool = False

    def limits(self) -> CoreLimits:
        """Returns the core's limits; deadlines coincide in some states and not in others."""
        return CoreLimits(
            unit_tokens=UNIT,
            rank_count=self.ranks,
            lookup_timeout_s=1.0,
            answer_lifetime_s=1.0,
            transfer_timeout_s=2.0,
            idle_timeout_s=3.0,
            quarantine_s=2.0 if self.quarantine else 0.0,
            open_leases_max=self.leases,
            pinned_blocks_max=self.pins,
            lazy_blocks_max=self.pins if self.lazy else 0,
        )


Action = tuple  # (method of World, arguments ...)


class World(Engine):
    """A core and what surrounds it.

    Args:
        core: The core.
        bounds: How large the world is.

    Attributes:
        names: Ids of requests, in canonical order.
        leases: Open transfers, in canonical order.
        storing: Contexts of requests that the engine has ended and that have open transfers, in
            canonical order.
        choose_rank: Which of the ranks that have not answered answers next.
    """

    def __init__(self, core: Core, bounds: Bounds) -> None:
        blocks = bounds.units * (bounds.requests + bounds.leases)
        super().__init__(core, blocks, prompt_blocks=bounds.units)
        self.bounds = bounds
        self.names = list(NAMES[: bounds.requests])
        self.leases: list[TransferLease] = []
        self.storing: list[RequestContext] = []
        self.choose_rank: Callable[[Sequence[int]], int] = min

    # ------------------------------------------------------------ what may happen

    def actions(self) -> Iterator[Action]:
        """Yields everything that may happen next."""
        for slot, name in enumerate(self.names):
            request = self.core.requests.get(name)
            yield from self._asks(slot, request)
            if request is not None:
                yield ("finish", slot)
                yield from self._moves(slot, request)
        for index, lease in enumerate(self.leases):
            if lease.state is LeaseState.SUBMITTED:
                yield ("send", index)
                continue
            yield from self._answers(index, lease)
        if self.bounds.lazy and self.core.decline_lazy(1) is None:
            yield ("near_reuse",)
        if self.bounds.resets:
            yield ("reset", False)
            yield ("reset", True)
        if self.bounds.deadlines:
            yield from self.deadlines()

    def _answers(self, index: int, lease: TransferLease) -> Iterator[Action]:
        for said in (NOTHING, STALLED, ARRIVING):
            if self._ranks_left(lease, said):
                yield ("succeed", index, said)
                yield ("fail", index, said, True)
                if self.bounds.quarantine:
                    yield ("fail", index, said, False)
        if is_load(lease) and not lease.synchronous and self._ranks_left(lease, NOTHING):
            if self.bounds.stalls:
                yield ("stall", index)
            if self.bounds.arrivals:
                yield ("arrive", index)

    def _ranks_left(self, lease: TransferLease, said: str) -> list[int]:
        answered = self.transfers[lease.job_id].answered
        return [
            rank
            for rank in range(self.bounds.ranks)
            if rank not in answered and said_by(lease, rank) == said
        ]

    def deadlines(self) -> Iterator[Action]:
        """Yields the ways in which time may pass."""
        if self.bounds.clock:
            if self.next_moment_s() < math.inf:
                yield ("wait",)
            return
        for slot, name in enumerate(self.names):
            if name in self.core.requests:
                yield ("expire_request", slot)
        for index in range(len(self.leases)):
            yield ("expire_lease", index)
        for index in range(len(self.storing)):
            yield ("expire_storing", index)
        if self.bounds.quarantine and len(self.core.quarantine):
            yield ("end_quarantine",)

    def _asks(self, slot: int, request: RequestContext | None) -> Iterator[Action]:
        looks_up = request is not None and request.state is RequestState.LOOKUP
        if self.bounds.orderly:
            if request is not None and request.state in _ADMITTED:
                return
            if request is None and any(one.request_id == self.names[slot] for one in self.storing):
                return
        for local in self.bounds.local_units:
            if self.bounds.clock and looks_up:
                # An engine asks the core first whether it has to ask the backend.
                reply = self.core.lookup_reply(self.names[slot], local * UNIT, self.now_s)
                if reply is not LookupReply.ASK:
                    continue
            if request is None or not request.load_barred:
                yield ("ask", slot, local)
            yield ("skip", slot, local)

    def _moves(self, slot: int, request: RequestContext) -> Iterator[Action]:
        if request.state is RequestState.LOOKUP:
            if request.question_id is not None:
                found = self._units_that_may_be_found()
                low = min(request.local_tokens // UNIT, found)
                yield from (("answer", slot, hit) for hit in range(low, found + 1))
            yield from self._admissions(slot, request)
        if request.state in _ADMITTED:
            yield ("preempt", slot)
        if request.state is RequestState.RUNNING:
            yield ("compute", slot, request.planned_tokens // UNIT)
            for computed in range(1, self.bounds.units + 1):
                span = self.core.filled_span(request, computed * UNIT)
                if self.bounds.stores and span is not None and not self.core.decline(span):
                    yield ("fill", slot, computed)
                if self.core.may_defer() and span is not None:
                    yield ("defer", slot, computed)
            if self.bounds.boundaries and self.core.decline_boundary(request, 1) is None:
                yield ("offer_boundary", slot)

    def _units_that_may_be_found(self) -> int:
        """Counts the units before the first that is in quarantine."""
        hashes = HASHES[: self.bounds.units]
        listed = self.core.quarantine.listed(hashes, self.now_s)
        return next((i for i, block_hash in enumerate(hashes) if block_hash in listed), len(hashes))

    def _admissions(self, slot: int, request: RequestContext) -> Iterator[Action]:
        known = request.question_id is not None or request.hit_end_tokens is not None
        local = request.local_tokens // UNIT if known else 0
        for computed in sorted({local, *self.bounds.local_units}):
            if computed >= local:
                yield ("compute", slot, computed)
        if len(self.leases) == self.bounds.leases:
            return
        for begin in range(local, self.bounds.units):
            reply = self.core.lookup_reply(self.names[slot], begin * UNIT, self.now_s)
            if not isinstance(reply, LookupReply) and reply > 0:
                yield from (("load", slot, begin, sync) for sync in self.bounds.loads)

    # ------------------------------------------------------------ what happens

    def do(self, action: Action) -> None:
        """Lets an action happen; raises what the core raises."""
        kind, *arguments = action
        getattr(self, kind)(*arguments)
        if self.bounds.hand_over_at_once:
            for lease in self.core.leases.values():
                if lease.state is LeaseState.SUBMITTED:
                    self._hand_over(lease.job_id)
        for name in list(self.tables):
            request = self.core.requests.get(name)
            # A load that failed, or a request that was forgotten: the engine takes the blocks back.
            if request is None or request.state in _BEGINS_ANEW:
                del self.tables[name]

    def give(self, event: Event) -> bool:
        self.perform(self.core.step(event, self.now_s))
        return True

    def parts(self, table: Sequence[int], begin: int, end: int) -> tuple[LeasePart, ...]:
        first, last = begin // UNIT, end // UNIT
        return (LeasePart(0, HASHES[first:last], tuple(table[first:last])),)

    def ask(self, slot: int, local: int) -> None:
        self._begin(LookupAsked, slot, local)

    def skip(self, slot: int, local: int) -> None:
        self._begin(LookupSkipped, slot, local)

    def _begin(self, kind: type[LookupAsked], slot: int, local: int) -> None:
        prompt = self.bounds.units * UNIT
        self.give(kind(self.names[slot], None, local * UNIT, prompt, prompt))
        self.tables.pop(self.names[slot], None)

    def answer(self, slot: int, hit: int) -> None:
        request = self.core.requests[self.names[slot]]
        question_id = request.question_id
        del self.questions[question_id]
        what = ("hit", hit) if hit * UNIT > request.local_tokens else None
        self.give(LookupAnswered(self.names[slot], question_id, hit * UNIT, what))

    def load(self, slot: int, begin: int, synchronous: bool) -> None:
        name = self.names[slot]
        span = (begin * UNIT, self.core.requests[name].hit_end_tokens)
        self.tables[name] = self._blocks()
        self.give(LoadAdmitted(name, *span, self.parts(self.tables[name], *span), synchronous))

    def compute(self, slot: int, computed: int) -> None:
        name = self.names[slot]
        if name not in self.tables:
            self.tables[name] = self._blocks()
        self.give(ComputeAdmitted(name, computed * UNIT))

    def _blocks(self) -> list[int]:
        blocks = self.take_blocks()
        assert blocks is not None, "there are blocks for all that can be open"
        return blocks

    def fill(self, slot: int, computed: int) -> None:
        name = self.names[slot]
        span = self.core.storable(self.core.filling[name], computed * UNIT)
        assert span is not None, "what is storable is in ``filling``"
        self.give(BlocksFilled(name, *span, self.parts(self.tables[name], *span)))

    def defer(self, slot: int, computed: int) -> None:
        name = self.names[slot]
        span = self.core.filled_span(self.core.filling[name], computed * UNIT)
        assert span is not None, "what is storable is in ``filling``"
        self.give(BlocksDeferred(name, *span))

    def near_reuse(self) -> None:
        blocks = self._blocks()[:1]
        self.give(ReuseNeared((LeasePart(0, HASHES[:1], tuple(blocks)),)))

    def offer_boundary(self, slot: int) -> None:
        name = self.names[slot]
        assert self.core.may_store_boundary(self.core.requests[name], 1)
        end = self.bounds.units * UNIT
        self.give(BoundaryOffered(name, end, end, parts_of(self.tables[name][-1:])))

    def preempt(self, slot: int) -> None:
        self.give(Preempted(self.names[slot]))

    def finish(self, slot: int) -> None:
        self.give(RequestFinished(self.names[slot]))

    def send(self, index: int) -> None:
        self._hand_over(self.leases[index].job_id)

    def _hand_over(self, job_id: int) -> None:
        self.give(LeaseSent(job_id))
        self.transfers[job_id].sent = True

    def succeed(self, index: int, said: str) -> None:
        job_id, rank = self._next_rank(index, said)
        self.give(RankSucceeded(job_id, rank))

    def fail(self, index: int, said: str, attempted: bool) -> None:
        job_id, rank = self._next_rank(index, said)
        hashes = [h for part in self.leases[index].parts for h in part.block_hashes if h]
        self.give(RankFailed(job_id, rank, attempted, tuple(hashes) if attempted else ()))

    def _next_rank(self, index: int, said: str) -> tuple[int, int]:
        transfer = self.transfers[self.leases[index].job_id]
        rank = self.choose_rank(self._ranks_left(transfer.lease, said))
        transfer.answered.add(rank)
        return transfer.lease.job_id, rank

    def stall(self, index: int) -> None:
        self._report(RankStalled, index)

    def arrive(self, index: int) -> None:
        self._report(RankArriving, index)

    def _report(self, kind: type[RankStalled] | type[RankArriving], index: int) -> None:
        lease = self.leases[index]
        self.give(kind(lease.job_id, self.choose_rank(self._ranks_left(lease, NOTHING))))

    def reset(self, kept: bool) -> None:
        self.give(EpochRaised(kept))

    # ------------------------------------------------------------ time

    def expire_request(self, slot: int) -> None:
        self._expire(self.core.requests[self.names[slot]])

    def expire_lease(self, index: int) -> None:
        self._expire(self.leases[index])

    def expire_storing(self, index: int) -> None:
        self._expire(self.storing[index])

    def _expire(self, subject: RequestContext | TransferLease) -> None:
        self.core.deadlines.set(subject, self.now_s)
        self.wait(0.0)

    def end_quarantine(self) -> None:
        self.core.quarantine.clear()

    def wait(self, seconds: float | None = None) -> None:
        """Lets time pass; to the next moment if it is not said how much."""
        super().wait(self.next_moment_s() - self.now_s if seconds is None else seconds)

    def next_moment_s(self) -> float:
        """Returns when the next thing ends that has its time; infinity for never."""
        core = self.core
        subjects = [*core.requests.values(), *core.leases.values(), *self.storing]
        moments = [one.deadline_s for one in subjects]
        for request in core.requests.values():
            if request.state is RequestState.LOOKUP and request.hit_end_tokens is not None:
                # An answer is out of date after its time, not at its end; times are whole.
                moments.append(request.answered_s + core.limits.answer_lifetime_s + 1.0)
        moments += core.quarantine._until.values()
        return min((moment for moment in moments if moment > self.now_s), default=math.inf)


def is_load(lease: TransferLease) -> bool:
    return lease.kind is LeaseKind.LOAD


def said_by(lease: TransferLease, rank: int) -> str:
    """Says what a rank has said of its part before its answer."""
    if lease.ranks_stalled >> rank & 1:
        return STALLED
    return ARRIVING if lease.ranks_arriving >> rank & 1 else NOTHING


def reported(lease: TransferLease) -> int:
    """Returns a bit mask of the ranks by which the engine takes a load for ended, answers aside."""
    return lease.ranks_stalled | lease.ranks_arriving

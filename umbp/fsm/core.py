# SPDX-License-Identifier: Apache-2.0
"""The core: takes events, moves the machines of ``table``, returns commands.

It never blocks, reads no clock and draws no random number: time comes in with each call. One
``Core`` belongs to one engine and is used by one thread.
"""

import enum
import itertools
import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from umbp.errors import IllegalTransition, UsageError
from umbp.fsm import commands, events
from umbp.fsm.compile import build_machine, compile_dispatch, compile_steps
from umbp.fsm.counters import CoreCounters
from umbp.fsm.deadlines import DeadlineQueue
from umbp.fsm.lease import LeaseKind, LeaseState, TransferLease
from umbp.fsm.limits import CoreLimits
from umbp.fsm.quarantine import Quarantine
from umbp.fsm.request import RequestContext, RequestState
from umbp.fsm.store_rules import StoreRules
from umbp.fsm.table import (
    LEASE_DEADLINES,
    LEASE_TABLE,
    QUESTION_DEADLINE,
    REQUEST_DEADLINES,
    REQUEST_TABLE,
    Deadline,
)

REQUEST_MACHINE: Final = build_machine(RequestState, REQUEST_TABLE)
LEASE_MACHINE: Final = build_machine(LeaseState, LEASE_TABLE)
_DISPATCH: Final = {
    **compile_dispatch(REQUEST_MACHINE, RequestState),
    **compile_dispatch(LEASE_MACHINE, LeaseState),
}

# Members that every lifecycle asks for: before Python 3.12 each look-up in an enum is slow.
_LOOKUP: Final = RequestState.LOOKUP
_LOADING: Final = RequestState.LOADING
_RUNNING: Final = RequestState.RUNNING
_STORING: Final = RequestState.STORING
_SUBMITTED: Final = LeaseState.SUBMITTED
_FAILED: Final = LeaseState.FAILED

# Events without content, made once.
_LOAD_SETTLED: Final = events.LoadSettled()
_LOAD_FAILED: Final = events.LoadFailed()
_LOAD_STALLED: Final = events.LoadStalled()
_LOAD_ARRIVED: Final = events.LoadArrived()
_SYNC_LOAD_FAILED: Final = events.SyncLoadFailed()
_LEASE_CLOSED: Final = events.LeaseClosed()
_LEASES_DRAINED: Final = events.LeasesDrained()
_RANK_ANSWERED: Final = events.RankAnswered()
_ALL_RANKS_SUCCEEDED: Final = events.AllRanksSucceeded()
_SOME_RANK_FAILED: Final = events.SomeRankFailed()
_LEASE_RELEASED: Final = events.LeaseReleased()
_QUESTION_EXPIRED: Final = QUESTION_DEADLINE.event()
_DEADLINES: Final[dict[Any, Deadline]] = {**REQUEST_DEADLINES, **LEASE_DEADLINES}
_EXPIRED: Final = {state: deadline.event() for state, deadline in _DEADLINES.items()}

Commands: TypeAlias = list[commands.Command]


class LookupReply(enum.Enum):
    """What to tell an engine that asks again."""

    ASK = "ask"
    """Nothing is known: give ``LookupAsked`` or ``LookupSkipped``."""
    WAIT = "wait"
    """The backend has not answered yet."""


class Core(StoreRules):
    """The lifecycle of all requests and transfers of one engine.

    Attributes:
        limits: Every bound.
        epoch: Part of every key, another one after each reset: the number of resets so far, or
            what engines share.
        requests: The live context of each request id.
        leases: Open transfers by job id.
        filling: Contexts that may have blocks to store in a coming step, by request id. Kept so
            that a decode step costs nothing per request.
        counters: What happened so far.
        quarantine: Block hashes that failed to load a moment ago.
        deadlines: When each state is left.
        pinned_blocks: Blocks pinned by open leases, counted once for each lease.
        sync_loads: Synchronous loads that are open.
        local_cache_tainted: The engine's own cache may share KV from before the last reset.
        now_s: Time of the call in progress.
        emit: Adds a command to the answer of the call in progress.
        next_id: Returns a number that it never returned before.
    """

    def __init__(self, limits: CoreLimits, epoch: int = 0) -> None:
        self.limits = limits
        self.epoch = epoch
        self.requests: dict[str, RequestContext] = {}
        self.leases: dict[int, TransferLease] = {}
        self.filling: dict[str, RequestContext] = {}
        self.counters = CoreCounters()
        self.quarantine = Quarantine(limits.quarantine_s)
        self.deadlines: DeadlineQueue[RequestContext | TransferLease] = DeadlineQueue()
        self.pinned_blocks = 0
        self.sync_loads = 0
        self.local_cache_tainted = False
        self.now_s = 0.0
        self._all_ranks = (1 << limits.rank_count) - 1
        self._table = compile_steps(_DISPATCH, _DEADLINES, limits)
        # No row leads to the state in which a lease is made.
        self._submitted_s: float = getattr(limits, LEASE_DEADLINES[_SUBMITTED].limit)
        # Bound methods of C objects: these two are called most of all.
        self._out: Commands = []
        self.emit: Callable[[commands.Command], None] = self._out.append
        self.next_id: Callable[[], int] = itertools.count(1).__next__
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            events.LookupAsked: self._on_lookup_asked,
            events.LookupSkipped: self._on_lookup_asked,
            events.LookupAnswered: self._on_lookup_answered,
            events.LoadAdmitted: self._on_request_event,
            events.ComputeAdmitted: self._on_request_event,
            events.BlocksFilled: self._on_request_event,
            events.BlocksDeferred: self._on_request_event,
            events.BoundaryOffered: self._on_request_event,
            events.Preempted: self._on_request_event,
            events.RequestFinished: self._on_request_event,
            events.ReuseNeared: self._on_reuse_neared,
            events.LeaseSent: self._on_lease_sent,
            events.RankSucceeded: self._on_rank_answered,
            events.RankFailed: self._on_rank_answered,
            events.RankStalled: self._on_rank_reported,
            events.RankArriving: self._on_rank_reported,
            events.EpochRaised: self._on_epoch_raised,
        }

    # ------------------------------------------------------------ the two ways in

    def step(self, event: events.Event, now_s: float) -> Commands:
        """Takes one event.

        Args:
            event: What happened.
            now_s: Seconds on a clock that never goes back.

        Returns:
            What is to be done, in order.

        Raises:
            IllegalTransition: The event is illegal in its subject's state. Nothing was changed.
            UsageError: The event's content does not fit its subject. Nothing was changed.
        """
        self.now_s = now_s
        try:
            handler = self._handlers[type(event)]
        except KeyError:
            raise UsageError(f"{type(event).__name__} is not an event from outside") from None
        handler(event)
        if not self._out:
            return []
        out = self._out.copy()
        self._out.clear()
        return out

    def tick(self, now_s: float) -> Commands:
        """Brings in every deadline that has passed."""
        self.now_s = now_s
        while (subject := self.deadlines.due(now_s)) is not None:
            if isinstance(subject, TransferLease):
                self._fire(subject, _EXPIRED[subject.state])
                if subject.state is _FAILED:
                    self._close(subject)
            elif subject.question_id is not None:
                self._fire(subject, _QUESTION_EXPIRED)
            else:
                self._fire(subject, _EXPIRED[subject.state])
                self._drain(subject)
        out = self._out.copy()
        self._out.clear()
        return out

    # ------------------------------------------------------------ questions, which move nothing

    def lookup_reply(self, request_id: str, local_tokens: int, now_s: float) -> "int | LookupReply":
        """Says what an engine that asks for a request is to be told.

        Args:
            request_id: The request.
            local_tokens: Tokens that the engine has by itself now.
            now_s: The time.

        Returns:
            Tokens beyond ``local_tokens`` that can be loaded, or what to do instead.
        """
        request = self.requests.get(request_id)
        if request is None or request.state is not _LOOKUP:
            return LookupReply.ASK
        if request.question_id is not None:
            return LookupReply.WAIT if local_tokens >= request.local_tokens else LookupReply.ASK
        if request.hit_end_tokens is None or local_tokens < request.local_tokens:
            return LookupReply.ASK
        if now_s - request.answered_s > self.limits.answer_lifetime_s:
            return LookupReply.ASK
        return max(0, request.hit_end_tokens - local_tokens)

    def may_lookup(self, request_id: str) -> bool:
        """Says whether a lookup can be of any use for this request."""
        request = self.requests.get(request_id)
        return request is None or not request.load_barred

    # ------------------------------------------------------------ for the effects

    def open_lease(
        self,
        request: RequestContext,
        kind: LeaseKind,
        event: "events.LoadAdmitted | events.BlocksFilled | events.BoundaryOffered",
        block_count: int,
    ) -> TransferLease:
        """Makes the lease of an event that moves ``block_count`` blocks."""
        job_id = self.next_id()
        lease = TransferLease(
            job_id,
            request,
            request.generation,
            kind,
            request.epoch,
            event.parts,
            block_count,
            event.begin_tokens,
            event.end_tokens,
            self._all_ranks,
        )
        self.leases[job_id] = lease
        request.open_leases += 1
        self.deadlines.set(lease, self.now_s + self._submitted_s)
        return lease

    def note_filling(self, request: RequestContext) -> None:
        """Keeps ``filling`` to the contexts that can still have blocks to store."""
        if (
            not request.store_barred
            and request.epoch == self.epoch
            and request.planned_tokens + self.limits.unit_tokens <= request.store_end_tokens
        ):
            self.filling[request.request_id] = request
        else:
            self.filling.pop(request.request_id, None)

    def bar_all_stores(self) -> None:
        """Ends the stores of every life that is going on."""
        self.counters.declined_barred += len(self.filling)
        for request in self.requests.values():
            request.store_barred = True
        self.filling.clear()

    # ------------------------------------------------------------ classification

    def _fire(self, subject: "RequestContext | TransferLease", event: Any) -> None:
        try:
            dest, effect, period_s = self._table[subject.state][type(event)]
        except KeyError:
            raise IllegalTransition(
                subject.identity, subject.state.name, type(event).__name__
            ) from None
        if effect is not None:
            effect(self, subject, event)
        subject.state = dest
        if period_s is not None:
            deadline_s = self.now_s + period_s
            if deadline_s < subject.wake_s:
                self.deadlines.set(subject, deadline_s)
            else:
                # It moves later, as it nearly always does: the queue finds out by itself.
                subject.deadline_s = deadline_s

    def _on_lookup_asked(self, event: events.LookupAsked) -> None:
        request = self.requests.get(event.request_id)
        if request is None:
            # The context is kept only if the event is legal.
            request = RequestContext(event.request_id, event.source, self.next_id(), self.epoch)
            self._fire(request, event)
            self.requests[event.request_id] = request
        else:
            self._fire(request, event)

    def _on_lookup_answered(self, event: events.LookupAnswered) -> None:
        request = self.requests.get(event.request_id)
        if request is None or request.question_id != event.question_id:
            self.counters.answers_unknown += 1
            return
        self._fire(request, event)

    def _on_request_event(
        self,
        event: "events.LoadAdmitted | events.ComputeAdmitted | events.BlocksFilled"
        " | events.BlocksDeferred | events.BoundaryOffered | events.Preempted"
        " | events.RequestFinished",
    ) -> None:
        request = self.requests.get(event.request_id)
        if request is None:
            raise IllegalTransition(f"request {event.request_id}", "UNKNOWN", type(event).__name__)
        self._fire(request, event)
        if request.state is _STORING and not request.open_leases:
            self._drain(request)

    def _on_reuse_neared(self, event: events.ReuseNeared) -> None:
        # The lease is kept only if the event is legal.
        lease = TransferLease(
            self.next_id(),
            None,
            None,
            LeaseKind.STORE,
            self.epoch,
            event.parts,
            0,
            0,
            0,
            self._all_ranks,
        )
        self._fire(lease, event)
        self.leases[lease.job_id] = lease

    def _on_lease_sent(self, event: events.LeaseSent) -> None:
        lease = self.leases.get(event.job_id)
        if lease is None:
            raise UsageError(f"transfer {event.job_id} is not open")
        self._fire(lease, event)

    def _on_rank_answered(self, event: "events.RankSucceeded | events.RankFailed") -> None:
        lease = self.leases.get(event.job_id)
        bit = 1 << event.rank
        if lease is None or not lease.ranks_left & bit:
            self.counters.answers_unknown += 1
            return
        if lease.state is _SUBMITTED:
            raise IllegalTransition(lease.identity, lease.state.name, type(event).__name__)
        lease.ranks_left &= ~bit
        if isinstance(event, events.RankFailed):
            self._note_failure(lease, event)
        if lease.ranks_left:
            self._fire(lease, _RANK_ANSWERED)
            self._leave(lease)
        else:
            self._fire(lease, _SOME_RANK_FAILED if lease.failed else _ALL_RANKS_SUCCEEDED)
            self._close(lease)

    def _on_rank_reported(self, event: "events.RankStalled | events.RankArriving") -> None:
        lease = self.leases.get(event.job_id)
        if lease is None or not lease.ranks_silent >> event.rank & 1:
            self.counters.answers_unknown += 1
            return
        if lease.kind is not LeaseKind.LOAD or lease.synchronous:
            raise UsageError(f"{lease.identity} cannot be left to a rank that has not ended it")
        self._fire(lease, event)
        self._leave(lease)

    def _leave(self, lease: TransferLease) -> None:
        """Tells the request once the engine has heard from every rank that its load has ended."""
        if lease.ranks_silent:
            return
        request = lease.request
        if (
            request is not None
            and request.state is _LOADING
            and request.load_job_id == lease.job_id
        ):
            self._fire(request, _LOAD_STALLED if lease.failed else _LOAD_ARRIVED)

    def _note_failure(self, lease: TransferLease, event: events.RankFailed) -> None:
        lease.failed = True
        lease.attempted = lease.attempted or event.attempted
        lease.broken = lease.broken or bool(lease.ranks_arriving >> event.rank & 1)
        if event.attempted and lease.kind is LeaseKind.LOAD and lease.epoch == self.epoch:
            self.quarantine.add(event.failed_hashes, self.now_s)

    def _close(self, lease: TransferLease) -> None:
        """Releases a lease that has ended, and tells its request, if it has one."""
        del self.leases[lease.job_id]
        self._fire(lease, _LEASE_RELEASED)
        self.deadlines.set(lease, math.inf)
        request = lease.request
        if request is None:
            return
        if request.state is not _LOADING or request.load_job_id != lease.job_id:
            self._fire(request, _LEASE_CLOSED)
            self._drain(request)
        elif not lease.failed:
            self._fire(request, _LOAD_SETTLED)
        elif lease.synchronous:
            self._fire(request, _SYNC_LOAD_FAILED)
        else:
            self._fire(request, _LOAD_FAILED)

    def _drain(self, request: RequestContext) -> None:
        if request.state is _STORING and not request.open_leases:
            self._fire(request, _LEASES_DRAINED)
            self.deadlines.set(request, math.inf)

    def _on_epoch_raised(self, event: events.EpochRaised) -> None:
        if event.epoch == self.epoch:
            raise UsageError(f"a reset leads to another epoch, and {event.epoch} is the present")
        self.epoch = self.epoch + 1 if event.epoch is None else event.epoch
        self.local_cache_tainted = event.local_cache_kept
        self.counters.epochs_raised += 1
        self.counters.declined_stale_epoch += len(self.filling)
        self.filling.clear()
        self.quarantine.clear()
        for request in self.requests.values():
            self._fire(request, event)

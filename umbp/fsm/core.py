# SPDX-License-Identifier: Apache-2.0
"""The core: takes events, moves the machines of ``table``, returns commands.

It never blocks, reads no clock and draws no random number: time comes in with each call. One
``Core`` belongs to one engine and is used by one thread.
"""

import enum
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from umbp.errors import IllegalTransition, UsageError
from umbp.fsm import commands, events
from umbp.fsm.compile import build_machine, compile_dispatch
from umbp.fsm.counters import CoreCounters
from umbp.fsm.deadlines import DeadlineQueue
from umbp.fsm.lease import LeaseKind, LeasePart, LeaseState, TransferLease
from umbp.fsm.limits import CoreLimits
from umbp.fsm.quarantine import Quarantine
from umbp.fsm.request import RequestContext, RequestState
from umbp.fsm.table import LEASE_TABLE, REQUEST_TABLE

REQUEST_MACHINE: Final = build_machine(RequestState, REQUEST_TABLE)
LEASE_MACHINE: Final = build_machine(LeaseState, LEASE_TABLE)
_DISPATCH: Final = {
    **compile_dispatch(REQUEST_MACHINE, RequestState),
    **compile_dispatch(LEASE_MACHINE, LeaseState),
}

# Events without content, made once.
_LOOKUP_EXPIRED: Final = events.LookupExpired()
_LOAD_EXPIRED: Final = events.LoadExpired()
_LOAD_SETTLED: Final = events.LoadSettled()
_LOAD_FAILED: Final = events.LoadFailed()
_SYNC_LOAD_FAILED: Final = events.SyncLoadFailed()
_LEASE_CLOSED: Final = events.LeaseClosed()
_STORE_EXPIRED: Final = events.StoreExpired()
_LEASES_DRAINED: Final = events.LeasesDrained()
_FORGOTTEN: Final = events.Forgotten()
_RANK_ANSWERED: Final = events.RankAnswered()
_ALL_RANKS_SUCCEEDED: Final = events.AllRanksSucceeded()
_SOME_RANK_FAILED: Final = events.SomeRankFailed()
_LEASE_EXPIRED: Final = events.LeaseExpired()
_LEASE_RELEASED: Final = events.LeaseReleased()

Commands: TypeAlias = list[commands.Command]


class LookupReply(enum.Enum):
    """What to tell an engine that asks again."""

    ASK = "ask"
    """Nothing is known: give ``LookupAsked`` or ``LookupSkipped``."""
    WAIT = "wait"
    """The backend has not answered yet."""


class Core:
    """The lifecycle of all requests and transfers of one engine.

    Attributes:
        limits: Every bound.
        epoch: Number of resets so far; part of every key.
        requests: The live context of each request id.
        leases: Open transfers by job id.
        filling: Contexts that may have blocks to store in a coming step, by request id. Kept so
            that a decode step costs nothing per request.
        counters: What happened so far.
        quarantine: Block hashes that failed to load a moment ago.
        deadlines: When each state is left.
        pinned_blocks: Blocks pinned by open stores, counted once for each store.
        sync_loads: Synchronous loads that are open.
        local_cache_tainted: The engine's own cache may share KV from before the last reset.
        now_s: Time of the call in progress.
    """

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self.epoch = 0
        self.requests: dict[str, RequestContext] = {}
        self.leases: dict[int, TransferLease] = {}
        self.filling: dict[str, RequestContext] = {}
        self.counters = CoreCounters()
        self.quarantine = Quarantine(limits.quarantine_s)
        self.deadlines = DeadlineQueue()
        self.pinned_blocks = 0
        self.sync_loads = 0
        self.local_cache_tainted = False
        self.now_s = 0.0
        self._all_ranks = (1 << limits.rank_count) - 1
        self._last_id = 0
        self._out: Commands = []
        self._steps: dict[type[Any], Callable[[Any], None]] = {
            events.LookupAsked: self._on_lookup_asked,
            events.LookupSkipped: self._on_lookup_asked,
            events.LookupAnswered: self._on_lookup_answered,
            events.LoadAdmitted: self._on_request_event,
            events.ComputeAdmitted: self._on_request_event,
            events.BlocksFilled: self._on_request_event,
            events.Preempted: self._on_request_event,
            events.RequestFinished: self._on_request_finished,
            events.LeaseSent: self._on_lease_sent,
            events.RankSucceeded: self._on_rank_succeeded,
            events.RankFailed: self._on_rank_failed,
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
            self._steps[type(event)](event)
        except BaseException:
            self._out = []
            raise
        return self._take()

    def tick(self, now_s: float) -> Commands:
        """Brings in every deadline that has passed."""
        self.now_s = now_s
        while (subject := self.deadlines.due(now_s)) is not None:
            if isinstance(subject, TransferLease):
                self._fire(subject, _LEASE_EXPIRED)
                if subject.state is LeaseState.FAILED:
                    self._close(subject)
            elif isinstance(subject, RequestContext):
                self._expire(subject)
        return self._take()

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
        if request is None or request.state is not RequestState.LOOKUP:
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

    def storable(self, request: RequestContext, computed_tokens: int) -> tuple[int, int] | None:
        """Says which tokens of a request are to be stored now.

        Args:
            request: A context out of ``filling``.
            computed_tokens: Tokens whose KV is in its blocks once the step being planned has run.

        Returns:
            ``(begin, end)``, multiples of the unit, for ``BlocksFilled``; None for nothing now.
        """
        if request.state is not RequestState.RUNNING or request.epoch != self.epoch:
            return None
        end = min(computed_tokens, request.store_end_tokens)
        end -= end % self.limits.unit_tokens
        begin = request.planned_tokens
        if end <= begin or request.store_barred:
            return None
        if self.sync_loads:
            self.counters.declined_sync_load += 1
            return None
        if len(self.leases) >= self.limits.open_leases_max:
            self.counters.declined_lease_limit += 1
            return None
        blocks = (end - begin) // self.limits.unit_tokens
        if self.pinned_blocks + blocks > self.limits.pinned_blocks_max:
            self.counters.declined_pin_limit += 1
            return None
        return begin, end

    # ------------------------------------------------------------ for the effects

    def emit(self, command: commands.Command) -> None:
        """Adds a command to the answer of the call in progress."""
        self._out.append(command)

    def next_id(self) -> int:
        """Returns a number that was never returned before."""
        self._last_id += 1
        return self._last_id

    def open_lease(
        self,
        request: RequestContext,
        kind: LeaseKind,
        parts: tuple[LeasePart, ...],
        span: tuple[int, int],
    ) -> TransferLease:
        """Makes a lease for a span of tokens ``(begin, end)`` of a request."""
        job_id = self.next_id()
        lease = TransferLease(
            job_id,
            request,
            request.generation,
            kind,
            request.epoch,
            parts,
            span[0],
            span[1],
            self._all_ranks,
        )
        self.leases[job_id] = lease
        request.open_leases += 1
        self.deadlines.set(lease, self.now_s + self.limits.transfer_timeout_s)
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

    def drop_request(self, request: RequestContext) -> None:
        """Takes a context out of ``requests``; its leases still know it."""
        if self.requests.get(request.request_id) is request:
            del self.requests[request.request_id]

    # ------------------------------------------------------------ classification

    def _take(self) -> Commands:
        out, self._out = self._out, []
        return out

    def _fire(self, subject: "RequestContext | TransferLease", event: Any) -> None:
        row = _DISPATCH[subject.state].get(type(event))
        if row is None:
            raise IllegalTransition(subject.identity, subject.state.name, type(event).__name__)
        dest, effect = row
        if effect is not None:
            effect(self, subject, event)
        subject.state = dest

    def _live(self, request_id: str, event: Any) -> RequestContext:
        request = self.requests.get(request_id)
        if request is None:
            raise IllegalTransition(f"request {request_id}", "UNKNOWN", type(event).__name__)
        return request

    def _on_lookup_asked(self, event: events.LookupAsked) -> None:
        request = self.requests.get(event.request_id)
        if request is None:
            # The context is kept only if the event is legal.
            request = RequestContext(event.request_id, event.source, self.next_id(), self.epoch)
            self._fire(request, event)
            self.requests[event.request_id] = request
            return
        if request.state in (RequestState.LOADING, RequestState.RUNNING):
            # The engine starts a request over only after it took its blocks back.
            self._fire(request, events.Preempted(event.request_id))
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
        " | events.Preempted",
    ) -> None:
        self._fire(self._live(event.request_id, event), event)

    def _on_request_finished(self, event: events.RequestFinished) -> None:
        request = self._live(event.request_id, event)
        self._fire(request, event)
        self._drain(request)

    def _on_lease_sent(self, event: events.LeaseSent) -> None:
        lease = self.leases.get(event.job_id)
        if lease is None:
            raise UsageError(f"transfer {event.job_id} is not open")
        self._fire(lease, event)

    def _on_rank_succeeded(self, event: events.RankSucceeded) -> None:
        lease = self._answered(event.job_id, event.rank)
        if lease is None:
            return
        if lease.ranks_left:
            self._fire(lease, _RANK_ANSWERED)
        else:
            self._settle(lease)

    def _on_rank_failed(self, event: events.RankFailed) -> None:
        lease = self._answered(event.job_id, event.rank)
        if lease is None:
            return
        lease.failed = True
        lease.attempted = lease.attempted or event.attempted
        if event.attempted and lease.kind is LeaseKind.LOAD:
            self.quarantine.add(event.failed_hashes, self.now_s)
        if lease.ranks_left:
            self._fire(lease, _RANK_ANSWERED)
        else:
            self._settle(lease)

    def _answered(self, job_id: int, rank: int) -> TransferLease | None:
        lease = self.leases.get(job_id)
        bit = 1 << rank
        if lease is None or not lease.ranks_left & bit:
            self.counters.answers_unknown += 1
            return None
        if lease.state is LeaseState.SUBMITTED:
            raise IllegalTransition(lease.identity, lease.state.name, "RankAnswered")
        lease.ranks_left &= ~bit
        return lease

    def _settle(self, lease: TransferLease) -> None:
        self._fire(lease, _SOME_RANK_FAILED if lease.failed else _ALL_RANKS_SUCCEEDED)
        self._close(lease)

    def _close(self, lease: TransferLease) -> None:
        """Releases a lease that has ended, and tells its request."""
        del self.leases[lease.job_id]
        self._fire(lease, _LEASE_RELEASED)
        request = lease.request
        if request.state is not RequestState.LOADING or request.load_job_id != lease.job_id:
            self._fire(request, _LEASE_CLOSED)
            self._drain(request)
        elif not lease.failed:
            self._fire(request, _LOAD_SETTLED)
        elif lease.synchronous:
            self._fire(request, _SYNC_LOAD_FAILED)
        else:
            self._fire(request, _LOAD_FAILED)

    def _drain(self, request: RequestContext) -> None:
        if request.state is RequestState.STORING and not request.open_leases:
            self._fire(request, _LEASES_DRAINED)

    def _expire(self, request: RequestContext) -> None:
        state = request.state
        if state is RequestState.LOOKUP and request.question_id is not None:
            self._fire(request, _LOOKUP_EXPIRED)
        elif state is RequestState.LOADING:
            self._fire(request, _LOAD_EXPIRED)
        elif state is RequestState.STORING:
            self._fire(request, _STORE_EXPIRED)
        elif state is not RequestState.FINISHED:
            self._fire(request, _FORGOTTEN)
            self._drain(request)

    def _on_epoch_raised(self, event: events.EpochRaised) -> None:
        self.epoch += 1
        self.local_cache_tainted = event.local_cache_kept
        self.counters.epochs_raised += 1
        self.counters.declined_stale_epoch += len(self.filling)
        self.filling.clear()
        self.quarantine.clear()
        for request in self.requests.values():
            self._fire(request, event)

# SPDX-License-Identifier: Apache-2.0
"""Cores that are broken in one place each, for the search to find."""

from collections.abc import Callable
from typing import Any, Final

import attrs

from umbp.fsm import (
    Core,
    CoreLimits,
    LeaseState,
    ReleasePins,
    RequestContext,
    RequestState,
    effects,
    events,
)
from umbp.fsm.lease import TransferLease


def _with_effect(state: Any, event: type[Any], effect: Any) -> Callable[[CoreLimits], Core]:
    """Makes cores in which one row does something else."""

    def make(limits: CoreLimits) -> Core:
        core = Core(limits)
        dest, _, period_s = core._table[state][event]
        core._table[state][event] = (dest, effect, period_s)
        return core

    return make


def _preempt_frees_pins(core: Core, request: RequestContext, event: Any) -> None:
    effects.preempt(core, request, event)
    for lease in core.leases.values():
        if lease.request is request and lease.kind.value == "store":
            core.pinned_blocks -= lease.block_count
            core.emit(ReleasePins(lease))


def _deadline_ends_a_transfer(core: Core, lease: TransferLease, _: Any) -> None:
    lease.failed = True
    core.counters.leases_stalled += 1
    core.leases.pop(lease.job_id)
    core._fire(lease.request, events.LeaseClosed())
    effects.release_lease(core, lease, events.LeaseReleased())


def _reset_keeps_hits(core: Core, request: RequestContext, _: Any) -> None:
    request.epoch = core.epoch


def _failed_load_may_be_tried_again(core: Core, request: RequestContext, event: Any) -> None:
    effects.fail_load(core, request, event)
    request.load_barred = False


def _expiry_leaves_the_question(core: Core, request: RequestContext, _: Any) -> None:
    request.question_id = None
    request.hit_end_tokens = request.local_tokens


def _writes_before_it_checks(core: Core, request: RequestContext, event: Any) -> None:
    request.hit = None
    effects.start_load(core, request, event)


def _forgets_to_count(core: Core, request: RequestContext, event: Any) -> None:
    """Leaves the number of open transfers as it is."""


def _stalled_load_holds_nothing(core: Core, lease: TransferLease, event: Any) -> None:
    lease.failed = lease.attempted = True
    lease.ranks_stalled |= 1 << event.rank


def _arriving_load_holds_nothing(core: Core, lease: TransferLease, event: Any) -> None:
    lease.ranks_arriving |= 1 << event.rank


class _ArrivedIsReleased(Core):
    """Gives blocks back when the request goes on, and not when the last bytes have come."""

    def _leave(self, lease: TransferLease) -> None:
        super()._leave(lease)
        if lease.request.state is RequestState.RUNNING and lease.ranks_arriving:
            self.pinned_blocks -= lease.block_count
            self.emit(ReleasePins(lease))


class _ArrivingOutweighsFailed(Core):
    """Lets the request go on from what one rank has restored and another has not."""

    def _leave(self, lease: TransferLease) -> None:
        failed, lease.failed = lease.failed, lease.failed and not lease.ranks_arriving
        super()._leave(lease)
        lease.failed = failed


class _BrokenPromiseIsForgotten(Core):
    """Takes a load that fails after all for one that was never read."""

    def _note_failure(self, lease: TransferLease, event: Any) -> None:
        super()._note_failure(lease, event)
        lease.broken = False


class _AnyLeaseEndsTheWait(Core):
    """Takes the answer to a load of an earlier life for that of the present one."""

    def _close(self, lease: TransferLease) -> None:
        request = lease.request
        if request.state is RequestState.LOADING and lease.kind.value == "load":
            request.load_job_id = lease.job_id
        super()._close(lease)


class _FirstAnswerEndsALease(Core):
    """Does not wait for the other ranks."""

    def _on_rank_answered(self, event: Any) -> None:
        lease = self.leases.get(event.job_id)
        bit = 1 << event.rank
        if lease is not None and lease.state is not LeaseState.SUBMITTED and lease.ranks_left & bit:
            lease.ranks_left = bit
        super()._on_rank_answered(event)


class _NoDeadlineOnceHandedOver(Core):
    """Lets a transfer wait for ever once the workers have it."""

    def _on_lease_sent(self, event: Any) -> None:
        super()._on_lease_sent(event)
        self.deadlines.set(self.leases[event.job_id], float("inf"))


class _FreeBlocksGoBackWhenSent(Core):
    """Takes free blocks for stored once the workers have heard of them."""

    def _on_lease_sent(self, event: Any) -> None:
        super()._on_lease_sent(event)
        lease = self.leases[event.job_id]
        if lease.request is None:
            self.pinned_blocks -= lease.block_count
            self.emit(ReleasePins(lease))


class _StoresFreeBlocksFromBeforeAReset(Core):
    """Forgets that the engine's own cache outlived a reset."""

    def decline_lazy(self, block_count: int) -> Any:
        tainted, self.local_cache_tainted = self.local_cache_tainted, False
        decline = super().decline_lazy(block_count)
        self.local_cache_tainted = tainted
        return decline


@attrs.frozen
class Broken:
    """A broken core and what the search says of it.

    Attributes:
        make_core: Makes it.
        says: A part of what is said.
        steps: Steps of the shortest way to it.
    """

    make_core: Callable[[CoreLimits], Core]
    says: str
    steps: int


_P = RequestState
BROKEN: Final = {
    "preemption frees pins": Broken(
        _with_effect(_P.RUNNING, events.Preempted, _preempt_frees_pins),
        "pins_are_those_of_stores_and_held_loads does not hold",
        4,
    ),
    "a deadline ends a transfer": Broken(
        _with_effect(LeaseState.IN_FLIGHT, events.LeaseExpired, _deadline_ends_a_transfer),
        "blocks_under_a_transfer_are_held does not hold",
        5,
    ),
    "a reset keeps hits": Broken(
        _with_effect(_P.LOOKUP, events.EpochRaised, _reset_keeps_hits),
        "a_reset_forgets_what_was_found does not hold",
        2,
    ),
    "a failed load may be tried again": Broken(
        _with_effect(_P.LOADING, events.LoadFailed, _failed_load_may_be_tried_again),
        "a_wait_for_a_load_ends_as_the_load_did does not hold",
        4,
    ),
    "an expired question stays open": Broken(
        _with_effect(_P.LOOKUP, events.LookupExpired, _expiry_leaves_the_question),
        "questions_are_those_that_are_open does not hold",
        2,
    ),
    "a refused event writes": Broken(
        _with_effect(_P.LOOKUP, events.LoadAdmitted, _writes_before_it_checks),
        "an event that is refused changed something",
        3,
    ),
    "a lease of an ended request is not counted off": Broken(
        _with_effect(_P.STORING, events.LeaseClosed, _forgets_to_count),
        "open_leases_are_counted does not hold",
        5,
    ),
    "a stalled load holds nothing": Broken(
        _with_effect(LeaseState.IN_FLIGHT, events.RankStalled, _stalled_load_holds_nothing),
        "pins_are_those_of_stores_and_held_loads does not hold",
        5,
    ),
    "an arriving load holds nothing": Broken(
        _with_effect(LeaseState.IN_FLIGHT, events.RankArriving, _arriving_load_holds_nothing),
        "pins_are_those_of_stores_and_held_loads does not hold",
        5,
    ),
    "an arriving load is released when the request goes on": Broken(
        _ArrivedIsReleased, "a command does not fit", 6
    ),
    "an arriving rank outweighs one that failed": Broken(
        _ArrivingOutweighsFailed, "a_wait_for_a_load_ends_as_the_load_did does not hold", 6
    ),
    "an arriving load that fails after all is forgotten": Broken(
        _BrokenPromiseIsForgotten, "only_ranks_that_fail_break_what_they_said does not hold", 6
    ),
    "any lease ends the wait": Broken(
        _AnyLeaseEndsTheWait, "a_wait_for_a_load_ends_as_the_load_did does not hold", 7
    ),
    "the first answer ends a lease": Broken(
        _FirstAnswerEndsALease, "blocks_under_a_transfer_are_held does not hold", 5
    ),
    "no deadline once handed over": Broken(
        _NoDeadlineOnceHandedOver, "all_that_lasts_has_a_deadline does not hold", 4
    ),
    "free blocks go back when they are sent": Broken(
        _FreeBlocksGoBackWhenSent, "blocks_under_a_transfer_are_held does not hold", 2
    ),
    "free blocks from before a reset are stored": Broken(
        _StoresFreeBlocksFromBeforeAReset, "a command does not fit", 2
    ),
}

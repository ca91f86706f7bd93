# SPDX-License-Identifier: Apache-2.0
"""What a transition writes and commands. The table names these; nothing else calls them.

Every effect checks first and writes after, so that a refused event changes nothing. No effect
writes a state or a deadline: ``Core`` does that, from the table, when the effect has returned.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from umbp.errors import UsageError
from umbp.fsm import commands, events
from umbp.fsm.lease import LeaseKind, LeasePart, TransferLease
from umbp.fsm.request import RequestContext, RequestState

if TYPE_CHECKING:
    from umbp.fsm.core import Core

# Members that every lifecycle asks for: before Python 3.12 each look-up in an enum is slow.
_LOOKUP: Final = RequestState.LOOKUP
_PREEMPTED: Final = RequestState.PREEMPTED
_LOAD: Final = LeaseKind.LOAD
_STORE: Final = LeaseKind.STORE

# ---------------------------------------------------------------- requests


def ask_lookup(core: "Core", request: RequestContext, event: events.LookupAsked) -> None:
    """Opens a question for what lies beyond the engine's own tokens."""
    unit = core.limits.unit_tokens
    end = event.limit_tokens - event.limit_tokens % unit
    if event.local_tokens % unit or end <= event.local_tokens:
        raise UsageError(
            f"{request.identity}: nothing to look up from {event.local_tokens} to "
            f"{event.limit_tokens} in units of {unit}"
        )
    if request.load_barred:
        raise UsageError(f"{request.identity}: a load failed; give LookupSkipped")
    _begin_question(core, request, event)
    request.question_id = core.next_id()
    request.hit_end_tokens = None
    core.counters.lookups += 1
    core.emit(commands.StartLookup(request, event.local_tokens, end))


def skip_lookup(core: "Core", request: RequestContext, event: events.LookupSkipped) -> None:
    """Answers a question at once: there is nothing beyond the engine's own tokens."""
    _begin_question(core, request, event)
    request.hit_end_tokens = event.local_tokens
    request.answered_s = math.inf


def _begin_question(core: "Core", request: RequestContext, event: events.LookupAsked) -> None:
    if request.state is _LOOKUP:
        _drop_question(core, request)
    else:
        if request.state is not _PREEMPTED:
            preempt(core, request, event)
        # A new life: what is in flight for the old one must not be taken for its own.
        request.generation = core.next_id()
        request.store_barred = False
        request.planned_tokens = 0
    request.hit = None
    request.epoch = core.epoch
    request.source = event.source
    request.local_tokens = event.local_tokens
    request.store_end_tokens = event.store_end_tokens


def _drop_question(core: "Core", request: RequestContext) -> None:
    if request.question_id is not None:
        core.emit(commands.DropLookup(request.question_id))
        request.question_id = None


def take_answer(core: "Core", request: RequestContext, event: events.LookupAnswered) -> None:
    """Writes down how far the KV exists."""
    request.question_id = None
    request.hit_end_tokens = event.hit_end_tokens
    request.hit = event.hit
    request.answered_s = core.now_s
    if event.hit_end_tokens > request.local_tokens:
        core.counters.lookup_hits += 1
    else:
        core.counters.lookup_misses += 1


def expire_lookup(core: "Core", request: RequestContext, _: events.LookupExpired) -> None:
    """Takes silence for a miss, for as long as an answer would be used."""
    _drop_question(core, request)
    request.hit_end_tokens = request.local_tokens
    request.answered_s = core.now_s
    core.counters.lookups_expired += 1


def restart_lookup(core: "Core", request: RequestContext, _: events.EpochRaised) -> None:
    """Forgets what was found before the reset; the engine asks again."""
    _drop_question(core, request)
    request.hit_end_tokens = None
    request.hit = None
    request.epoch = core.epoch


def start_load(core: "Core", request: RequestContext, event: events.LoadAdmitted) -> None:
    """Opens the load lease of this life."""
    found_tokens = request.hit_end_tokens or 0
    if not request.local_tokens <= event.begin_tokens < event.end_tokens <= found_tokens:
        raise UsageError(
            f"{request.identity}: load of tokens {event.begin_tokens} to {event.end_tokens}, but "
            f"{request.local_tokens} to {found_tokens} were found"
        )
    block_count = _count_blocks(core, request, event)
    lease = core.open_lease(request, _LOAD, event, block_count)
    lease.synchronous = event.synchronous
    request.load_job_id = lease.job_id
    request.hit = None
    request.planned_tokens = event.end_tokens
    _bar_if_tainted(core, request, event.begin_tokens)
    core.counters.loads_started += 1
    core.emit(commands.StartLoad(lease))
    if event.synchronous:
        core.sync_loads += 1
        core.note_filling(request)


def _count_blocks(
    core: "Core",
    request: RequestContext,
    event: "events.LoadAdmitted | events.BlocksFilled | events.BoundaryOffered",
) -> int:
    span = f"tokens {event.begin_tokens} to {event.end_tokens}"
    if (event.end_tokens - event.begin_tokens) % core.limits.unit_tokens:
        raise UsageError(
            f"{request.identity}: {span} are no whole number of units of {core.limits.unit_tokens}"
        )
    return _count_parts(event.parts, request.identity, f" for {span}")


def _count_parts(parts: Sequence[LeasePart], owner: str, what: str = "") -> int:
    count = 0
    for part in parts:
        blocks = len(part.block_ids)
        if not blocks or blocks != len(part.block_hashes):
            raise UsageError(
                f"{owner}: {blocks} blocks and {len(part.block_hashes)} hashes of group "
                f"{part.group_index}{what}"
            )
        count += blocks
    if not count:
        raise UsageError(f"{owner}: no blocks{what}")
    return count


def start_compute(core: "Core", request: RequestContext, event: events.ComputeAdmitted) -> None:
    """Lets the life begin without a load."""
    _drop_question(core, request)
    request.hit = None
    # A block that this life begins in the middle of is its own to store: it completes it.
    known_tokens = event.computed_tokens - event.computed_tokens % core.limits.unit_tokens
    request.planned_tokens = max(request.planned_tokens, known_tokens)
    if request.state is _LOOKUP:
        # While it runs, what it has is what its load has restored.
        _bar_if_tainted(core, request, event.computed_tokens)
    core.note_filling(request)


def _bar_if_tainted(core: "Core", request: RequestContext, local_tokens: int) -> None:
    if local_tokens and core.local_cache_tainted and not request.store_barred:
        # Shared through the engine's own cache from before a reset that could not empty it.
        request.store_barred = True
        core.counters.declined_barred += 1


def start_store(core: "Core", request: RequestContext, event: events.BlocksFilled) -> None:
    """Opens a store lease for blocks that this step fills."""
    span = (event.begin_tokens, event.end_tokens)
    if span != core.filled_span(request, event.end_tokens) or core.decline(span):
        raise UsageError(
            f"{request.identity}: tokens {event.begin_tokens} to {event.end_tokens} are not "
            f"storable now"
        )
    block_count = _count_blocks(core, request, event)
    lease = core.open_lease(request, _STORE, event, block_count)
    request.planned_tokens = event.end_tokens
    _pin(core, lease)
    core.counters.stores_started += 1
    core.note_filling(request)
    core.emit(commands.StartStore(lease))


def defer_store(core: "Core", request: RequestContext, event: events.BlocksDeferred) -> None:
    """Leaves blocks that this step fills in KV memory, for as long as it keeps them."""
    span = (event.begin_tokens, event.end_tokens)
    if span != core.filled_span(request, event.end_tokens) or not core.may_defer():
        raise UsageError(
            f"{request.identity}: the store of tokens {event.begin_tokens} to {event.end_tokens} "
            "cannot wait"
        )
    request.planned_tokens = event.end_tokens
    core.counters.tokens_deferred += event.end_tokens - event.begin_tokens
    core.note_filling(request)


def store_boundary(core: "Core", request: RequestContext, event: events.BoundaryOffered) -> None:
    """Opens a store lease for the blocks of a boundary."""
    block_count = _count_blocks(core, request, event)
    decline = core.decline_boundary(request, block_count)
    if decline:
        raise UsageError(f"{request.identity}: boundary {event.end_tokens} is {decline}")
    lease = core.open_lease(request, _STORE, event, block_count)
    _pin(core, lease)
    core.counters.stores_started += 1
    core.emit(commands.StartStore(lease))


def _pin(core: "Core", lease: TransferLease) -> None:
    lease.pinned = True
    core.pinned_blocks += lease.block_count


def finish_load(core: "Core", request: RequestContext, event: events.LoadSettled) -> None:
    """Lets the life go on from the restored tokens."""
    request.open_leases -= 1
    run_ahead(core, request, event)


def run_ahead(core: "Core", request: RequestContext, _: Any) -> None:
    """Lets the life go on from the restored tokens, of which the last are still on their way."""
    request.load_job_id = None
    core.note_filling(request)


def fail_load(core: "Core", request: RequestContext, event: events.LoadFailed) -> None:
    """Sends the request back to be computed, and never tries again for it."""
    request.open_leases -= 1
    leave_load(core, request, event)


def leave_load(_core: "Core", request: RequestContext, _: Any) -> None:
    """Sends the request back to be computed, whatever becomes of its load."""
    request.load_job_id = None
    request.load_barred = True
    request.hit_end_tokens = None
    request.planned_tokens = 0


def fail_sync_load(_core: "Core", request: RequestContext, _: events.SyncLoadFailed) -> None:
    """Lets the engine compute the step again, and never tries again for this request."""
    request.load_barred = True
    request.load_job_id = None
    request.open_leases -= 1


def preempt(core: "Core", request: RequestContext, _: Any) -> None:
    """Ends a life. Its open transfers go on and release their own pins."""
    request.load_job_id = None
    request.hit_end_tokens = None
    core.filling.pop(request.request_id, None)
    core.counters.preemptions += 1


def close_lease(_core: "Core", request: RequestContext, _: events.LeaseClosed) -> None:
    """Counts off a transfer that nobody waits for."""
    request.open_leases -= 1


def finish_request(core: "Core", request: RequestContext, _: Any) -> None:
    """Lets go of a request; its open transfers keep the context alive."""
    _drop_question(core, request)
    core.filling.pop(request.request_id, None)
    del core.requests[request.request_id]


def forget_request(core: "Core", request: RequestContext, event: events.Forgotten) -> None:
    """Lets go of a request whose end was never reported."""
    finish_request(core, request, event)
    core.counters.requests_forgotten += 1


# ---------------------------------------------------------------- leases


def store_free_blocks(core: "Core", lease: TransferLease, event: events.ReuseNeared) -> None:
    """Holds blocks that no request uses, and stores them."""
    block_count = _count_parts(event.parts, lease.identity)
    decline = core.decline_lazy(block_count)
    if decline:
        raise UsageError(f"{lease.identity}: {block_count} blocks are {decline}")
    lease.block_count = block_count
    _pin(core, lease)
    core.counters.stores_started += 1
    core.counters.lazy_stores_started += 1
    core.emit(commands.StartStore(lease))


def stall_lease(core: "Core", lease: TransferLease, _: events.LeaseExpired) -> None:
    """Asks for the end of a transfer. Its blocks stay held: only answers release them."""
    core.counters.leases_stalled += 1
    core.emit(commands.CancelTransfer(lease))


def hold_stalled(core: "Core", lease: TransferLease, event: events.RankStalled) -> None:
    """Holds the blocks of a load that the engine believes to have failed."""
    lease.failed = True
    lease.attempted = True
    core.counters.loads_stalled += not lease.ranks_stalled
    lease.ranks_stalled |= 1 << event.rank
    _hold(core, lease)


def hold_arriving(core: "Core", lease: TransferLease, event: events.RankArriving) -> None:
    """Holds the blocks of a load that the engine believes to have ended well."""
    core.counters.loads_arriving += not lease.ranks_arriving
    lease.ranks_arriving |= 1 << event.rank
    _hold(core, lease)


def _hold(core: "Core", lease: TransferLease) -> None:
    """Pins the blocks of a load, once."""
    if not lease.pinned:
        _pin(core, lease)
        core.emit(commands.PinBlocks(lease))


def abandon_lease(core: "Core", lease: TransferLease, _: events.LeaseExpired) -> None:
    """Gives up a transfer that no worker ever heard of."""
    lease.failed = True
    core.counters.leases_stalled += 1


def settle_lease(core: "Core", lease: TransferLease, _: events.AllRanksSucceeded) -> None:
    """Counts what every rank has done."""
    tokens = lease.end_tokens - lease.begin_tokens
    if lease.kind is _LOAD:
        core.counters.loads_settled += 1
        core.counters.tokens_restored += tokens
    else:
        core.counters.stores_settled += 1
        core.counters.tokens_stored += tokens
        if lease.request is None:
            core.counters.lazy_blocks_stored += lease.block_count


def fail_lease(core: "Core", lease: TransferLease, _: events.SomeRankFailed) -> None:
    """Counts what some rank could not do."""
    if lease.kind is _LOAD:
        core.counters.loads_failed += 1
        core.counters.loads_not_attempted += not lease.attempted
    else:
        core.counters.stores_failed += 1


def release_lease(core: "Core", lease: TransferLease, _: events.LeaseReleased) -> None:
    """Gives the blocks back.

    The engine puts the blocks of a synchronous load into its own prefix cache before the load has
    ended, so that any life may share them, whatever became of the request. When such a load fails,
    no life that is going on may store. Nor when one fails that was said to have ended well.
    """
    if lease.pinned:
        core.pinned_blocks -= lease.block_count
        core.emit(commands.ReleasePins(lease))
    if lease.synchronous:
        core.sync_loads -= 1
    if lease.broken or (lease.synchronous and lease.failed):
        core.bar_all_stores()

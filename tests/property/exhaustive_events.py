# SPDX-License-Identifier: Apache-2.0
"""Events that a core must not take in the state that it is in: by the table, or by what they say.

Answers that nobody waits for are among them: late ones, double ones, and some for what never was.
"""

from collections.abc import Iterator
from typing import TypeAlias

from core_engine import UNIT, parts_of
from exhaustive_world import NAMES, World, is_load, reported

from umbp.errors import IllegalTransition, UsageError
from umbp.fsm import (
    BlocksDeferred,
    BlocksFilled,
    BoundaryOffered,
    ComputeAdmitted,
    EpochRaised,
    Event,
    LeaseSent,
    LeaseState,
    LoadAdmitted,
    LookupAnswered,
    LookupAsked,
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
from umbp.fsm.table import REQUEST_TABLE

Unfit: TypeAlias = tuple[Event, "type[Exception] | None"]
"""``(event, error)``; None where it is counted in ``answers_unknown`` and otherwise ignored."""

_NOBODY = "nobody"
_NEVER_GIVEN = 1_000_000
_ONE_BLOCK = parts_of([0])


def _events_of(name: str) -> tuple[Event, ...]:
    return (
        LoadAdmitted(name, 0, UNIT, _ONE_BLOCK, False),
        ComputeAdmitted(name, 0),
        BlocksFilled(name, 0, UNIT, _ONE_BLOCK),
        BlocksDeferred(name, 0, UNIT),
        BoundaryOffered(name, UNIT, UNIT, _ONE_BLOCK),
        Preempted(name),
        RequestFinished(name),
    )


def _illegal_in(name: str, state: RequestState | None) -> tuple[Unfit, ...]:
    """Returns what has no row in a state, or, without a state, what needs a request."""
    legal = {row.event for row in REQUEST_TABLE if state in row.sources}
    events = [event for event in _events_of(name) if type(event) not in legal]
    return tuple((event, IllegalTransition) for event in events)


def _always_unfit(name: str) -> tuple[Unfit, ...]:
    return (
        (LookupAsked(name, None, 1, 2 * UNIT, UNIT), UsageError),
        (LookupAsked(name, None, UNIT, 2 * UNIT - 1, UNIT), UsageError),
        (LookupAnswered(name, _NEVER_GIVEN, UNIT, ("hit", UNIT)), None),
    )


_BY_STATE = {
    (name, state): (*_illegal_in(name, state), *_always_unfit(name))
    for name in (*NAMES, _NOBODY)
    for state in (*RequestState, None)
}
_UNKNOWN_JOB: tuple[Unfit, ...] = (
    (LeaseSent(_NEVER_GIVEN), UsageError),
    (RankSucceeded(_NEVER_GIVEN, 0), None),
    (RankFailed(_NEVER_GIVEN, 0, True, (b"first",)), None),
    (RankStalled(_NEVER_GIVEN, 0), None),
    (RankArriving(_NEVER_GIVEN, 0), None),
)


def unfit_events(world: World) -> Iterator[Unfit]:
    """Yields what the core must refuse or ignore now."""
    yield from _BY_STATE[_NOBODY, None]
    yield from _UNKNOWN_JOB
    yield EpochRaised(False, world.core.epoch), UsageError
    yield ReuseNeared(()), UsageError
    if world.core.decline_lazy(1) is not None:
        yield ReuseNeared(_ONE_BLOCK), UsageError
    for name in world.names:
        request = world.core.requests.get(name)
        yield from _BY_STATE[name, request.state if request is not None else None]
        if request is not None:
            yield from _unfit_for(world, request)
    for lease in world.leases:
        yield from _unfit_for_lease(world, lease)


def _unfit_for(world: World, request: RequestContext) -> Iterator[Unfit]:
    name = request.request_id
    if request.load_barred:
        yield LookupAsked(name, None, 0, UNIT, UNIT), UsageError
    if request.state is RequestState.LOOKUP:
        begin, found = request.local_tokens, request.hit_end_tokens or 0
        beyond = max(begin, found) + UNIT
        yield LoadAdmitted(name, begin, beyond, _ONE_BLOCK, False), UsageError
        yield LoadAdmitted(name, begin, begin, _ONE_BLOCK, True), UsageError
        yield LoadAdmitted(name, begin, max(begin + UNIT, found), (), False), UsageError
    elif request.state is RequestState.RUNNING:
        planned = request.planned_tokens
        yield BlocksFilled(name, planned, planned, _ONE_BLOCK), UsageError
        yield BlocksDeferred(name, planned, planned), UsageError
        if not world.core.may_defer():
            yield BlocksDeferred(name, planned, planned + UNIT), UsageError
        yield BlocksFilled(name, planned + UNIT, planned + 2 * UNIT, _ONE_BLOCK), UsageError
        yield BlocksFilled(name, planned, planned + UNIT, ()), UsageError
        yield BoundaryOffered(name, UNIT, UNIT, ()), UsageError
        if world.core.decline_boundary(request, 1) is not None:
            yield BoundaryOffered(name, UNIT, UNIT, _ONE_BLOCK), UsageError


def _unfit_for_lease(world: World, lease: TransferLease) -> Iterator[Unfit]:
    job_id, ranks = lease.job_id, world.bounds.ranks
    yield RankSucceeded(job_id, ranks), None
    first = next(rank for rank in range(ranks) if lease.ranks_left >> rank & 1)
    for report in (RankStalled, RankArriving):
        yield report(job_id, ranks), None
        if not is_load(lease) or lease.synchronous:
            yield report(job_id, first), UsageError
        elif lease.state is LeaseState.SUBMITTED:
            yield report(job_id, first), IllegalTransition
        elif reported(lease) >> first & 1:
            # What a rank has said once, it can only answer for.
            yield report(job_id, first), None
    if lease.state is LeaseState.SUBMITTED:
        yield RankSucceeded(job_id, 0), IllegalTransition
        yield RankFailed(job_id, ranks - 1, True, (b"first",)), IllegalTransition
        return
    yield LeaseSent(job_id), IllegalTransition
    for rank in world.transfers[job_id].answered:
        yield RankSucceeded(job_id, rank), None
        yield RankStalled(job_id, rank), None
        yield RankArriving(job_id, rank), None
        yield RankFailed(job_id, rank, True, (b"first",)), None

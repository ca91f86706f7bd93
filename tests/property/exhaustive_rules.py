# SPDX-License-Identifier: Apache-2.0
"""What must hold in every state and over every step of the exhaustive search.

Each rule is a function with its reason in one line; it says whether it holds. Commands are checked
as they are performed, by ``core_engine.Engine``: a pin is released once, a dropped question was
open, and a store is of the present epoch, of blocks of its own request, and not planned twice.
"""

import math
from typing import Any

import attrs
from core_engine import UNIT, fields_of
from exhaustive_world import ARRIVING, Action, World, is_load, reported

from umbp.fsm import LeaseState, RequestContext, RequestState, TransferLease
from umbp.fsm.counters import CoreCounters

_COUNTERS = [field.name for field in attrs.fields(CoreCounters)]
_ADMITTED = (RequestState.LOADING, RequestState.RUNNING)

# ---------------------------------------------------------------- of a state


def blocks_under_a_transfer_are_held(world: World) -> bool:
    """A worker may touch them until it has answered: they are neither free nor another's."""
    ranks = world.bounds.ranks
    for transfer in world.transfers.values():
        lease = transfer.lease
        if transfer.sent and len(transfer.answered) < ranks:
            if lease.job_id not in world.core.leases or lease.state is LeaseState.RELEASED:
                return False
            if not _is_kept(lease) and lease.job_id not in world.pinning:
                return False
            for name, table in world.tables.items():
                if not set(table).isdisjoint(transfer.blocks) and not _is_of(lease, name, world):
                    return False
    return True


def _is_kept(lease: TransferLease) -> bool:
    """Says whether the engine believes that a load goes on, and so keeps its blocks."""
    return is_load(lease) and bool(lease.ranks_left & ~reported(lease))


def _is_of(lease: TransferLease, name: str, world: World) -> bool:
    request = world.core.requests.get(name)
    return lease.request is request and lease.generation == request.generation


def blocks_have_one_owner(world: World) -> bool:
    """Two requests that write one block corrupt each other."""
    owned = [block for table in world.tables.values() for block in table]
    return len(owned) == len(set(owned))


def pins_are_those_of_stores_and_held_loads(world: World) -> bool:
    """A pin too many is memory lost; a pin too few is a block reused while it is read."""
    leases = world.core.leases.values()
    pinning = [lease for lease in leases if not is_load(lease) or reported(lease)]
    pinned_blocks = sum(lease.block_count for lease in pinning)
    # What a load holds is held whatever the limit.
    loads = any(map(is_load, pinning))
    return (
        {lease.job_id for lease in pinning} == world.pinning
        and world.core.pinned_blocks == pinned_blocks
        and (loads or pinned_blocks <= world.core.limits.pinned_blocks_max)
        and all(lease.pinned == (lease.job_id in world.pinning) for lease in leases)
    )


def open_leases_are_counted(world: World) -> bool:
    """A request is finished by this number: it must be that of its leases, of all its lives."""
    left: dict[int, int] = {}
    sync_loads = 0
    for lease in world.core.leases.values():
        left[id(lease.request)] = left.get(id(lease.request), 0) + 1
        sync_loads += lease.synchronous
        if lease.state not in (LeaseState.SUBMITTED, LeaseState.IN_FLIGHT, LeaseState.STALLED):
            return False
    return sync_loads == world.core.sync_loads and all(
        context.open_leases == left.get(id(context), 0) for context in world.contexts
    )


def leases_know_who_has_answered(world: World) -> bool:
    """A lease ends with the last answer: it must miss exactly those that are missing."""
    for job_id, lease in world.core.leases.items():
        transfer = world.transfers[job_id]
        answered = sum(1 << rank for rank in transfer.answered)
        if lease.ranks_left != (1 << world.bounds.ranks) - 1 & ~answered or not lease.ranks_left:
            return False
        if transfer.sent != (lease.state is not LeaseState.SUBMITTED):
            return False
    return True


def ended_requests_have_open_leases_or_are_finished(world: World) -> bool:
    """Nothing of a request may be left once its last transfer has ended."""
    for context in world.contexts:
        alive = world.core.requests.get(context.request_id) is context
        if not alive:
            wanted = RequestState.STORING if context.open_leases else RequestState.FINISHED
            if context.state is not wanted:
                return False
        elif context.state in (RequestState.STORING, RequestState.FINISHED):
            return False
    return True


def a_load_that_is_waited_for_is_open(world: World) -> bool:
    """The engine waits for exactly one end of a load: LOADING begins with it and ends with it.

    That is the answer of each rank, or its word that it has stalled or cannot fail any more.
    """
    for request in world.core.requests.values():
        load = world.core.leases.get(request.load_job_id) if request.load_job_id else None
        if (request.state is RequestState.LOADING) != (load is not None):
            return False
        if load is not None and (
            load.request is not request
            or load.generation != request.generation
            or not _is_kept(load)
            or request.load_barred
        ):
            return False
    return True


def questions_are_those_that_are_open(world: World) -> bool:
    """An answer finds its request by its question; a question too many is never asked again."""
    return world.questions == {
        request.question_id: request
        for request in world.core.requests.values()
        if request.question_id is not None
    } and all(
        request.state is RequestState.LOOKUP and not request.load_barred
        for request in world.questions.values()
    )


def nothing_of_an_old_epoch_waits_to_be_served(world: World) -> bool:
    """After a reset nothing that was found before it may be loaded."""
    for request in world.core.requests.values():
        if request.state is RequestState.LOOKUP:
            hit_end = request.hit_end_tokens
            if request.epoch != world.core.epoch and (request.question_id or hit_end is not None):
                return False
            if request.planned_tokens or world.stored_until[request.generation]:
                return False
            found = hit_end is not None and hit_end > request.local_tokens
            if (request.hit is not None) > found or (request.question_id and hit_end is not None):
                return False
        elif request.hit is not None:
            return False
    return True


def filling_is_what_can_still_store(world: World) -> bool:
    """What is missing there is never stored; what is there too much costs every step."""
    core = world.core
    for name, request in core.requests.items():
        load = core.leases.get(request.load_job_id) if request.load_job_id else None
        runs = request.state is RequestState.RUNNING or (load is not None and load.synchronous)
        can_store = (
            runs
            and not request.store_barred
            and request.epoch == core.epoch
            and request.planned_tokens + UNIT <= request.store_end_tokens
        )
        if (core.filling.get(name) is request) != can_store:
            return False
    return len(core.filling) <= len(core.requests) and all(map(core.requests.get, core.filling))


def replies_fit_what_is_known(world: World) -> bool:
    """The engine loads what it is told: a number only while an answer of this life is good."""
    core = world.core
    for name, request in core.requests.items():
        reply = core.lookup_reply(name, request.local_tokens, world.now_s)
        known = request.state is RequestState.LOOKUP and request.hit_end_tokens is not None
        fresh = world.now_s - request.answered_s <= core.limits.answer_lifetime_s
        if isinstance(reply, int):
            if not (known and fresh) or reply != max(
                0, request.hit_end_tokens - request.local_tokens
            ):
                return False
        elif (reply.value == "wait") != (request.question_id is not None) or (known and fresh):
            return False
    return True


def all_that_lasts_has_a_deadline(world: World) -> bool:
    """What has no deadline may wait for ever; what is not queued is not looked at."""
    queued = {(wake_s, id(subject)) for wake_s, _, subject in world.core.deadlines._entries}
    for subject in (*world.contexts, *world.core.leases.values()):
        if subject.state is not RequestState.FINISHED and not (
            subject.wake_s <= subject.deadline_s < math.inf
            and subject.deadline_s > world.now_s
            and (subject.wake_s, id(subject)) in queued
        ):
            return False
    return True


STATE_RULES = (
    blocks_under_a_transfer_are_held,
    blocks_have_one_owner,
    pins_are_those_of_stores_and_held_loads,
    open_leases_are_counted,
    leases_know_who_has_answered,
    ended_requests_have_open_leases_or_are_finished,
    a_load_that_is_waited_for_is_open,
    questions_are_those_that_are_open,
    nothing_of_an_old_epoch_waits_to_be_served,
    filling_is_what_can_still_store,
    replies_fit_what_is_known,
    all_that_lasts_has_a_deadline,
)


# ---------------------------------------------------------------- of a step


class Step:
    """What was before a step; rules of steps hold it against what is after.

    Attributes:
        world: The world, before and after.
        action: What happens.
        before: For each request that lives, its context and what the fields hold.
        lease: The transfer that it is about; None if it is about none.
        waited_for: Whether a request waits for that transfer.
        was_broken: Whether a rank had failed of which the engine was told that it could not.
    """

    def __init__(self, world: World, action: Action) -> None:
        self.world = world
        self.action = action
        self.before: list[tuple[RequestContext, tuple[Any, ...]]] = [
            (request, fields_of(request)) for request in world.core.requests.values()
        ]
        self.open_before = list(world.core.leases.values())
        self.counted = fields_of(world.core.counters)
        about_lease = action[0] in ("send", "succeed", "fail", "stall", "arrive")
        self.lease = world.leases[action[1]] if about_lease else None
        self.was_broken = self.lease is not None and self.lease.broken
        owner = self.lease.request if self.lease is not None else None
        self.waited_for = owner is not None and (
            owner.state is RequestState.LOADING and owner.load_job_id == self.lease.job_id
        )


_ENDS_OF_LIVES = ("preempt", "finish", "ask", "skip")
_FIELDS = {name: place for place, name in enumerate(RequestContext.__match_args__)}


def _was(fields: tuple[Any, ...], name: str) -> Any:
    return fields[_FIELDS[name]]


def counters_only_rise(step: Step) -> bool:
    """They are rates and sums to those who read them."""
    now = fields_of(step.world.core.counters)
    return all(map(int.__le__, step.counted, now))


def leases_end_once_and_by_answers_alone(step: Step) -> bool:
    """No deadline, preemption, abort or reset releases what a worker may still touch."""
    for lease in step.open_before:
        if lease.job_id in step.world.core.leases:
            continue
        transfer = step.world.transfers[lease.job_id]
        if lease.state is not LeaseState.RELEASED:
            return False
        if transfer.sent and len(transfer.answered) < step.world.bounds.ranks:
            return False
        if not transfer.sent and not step.action[0].startswith(("expire", "wait")):
            return False
    return True


def answers_for_others_touch_no_life(step: Step) -> bool:
    """A late answer for an earlier life, or for a store, changes no life that goes on."""
    if step.lease is None or step.waited_for:
        return True
    bars = _spoils_all_lives(step.lease)
    for request, fields in step.before:
        after = fields_of(request)
        if after != fields and not all(
            was == now
            or (name == "open_leases" and step.lease.request is request and now == was - 1)
            or (name == "store_barred" and bars)
            for name, was, now in zip(_FIELDS, fields, after, strict=True)
        ):
            return False
    return True


def a_wait_for_a_load_ends_as_the_load_did(step: Step) -> bool:
    """The engine must neither compute on what was not loaded nor load again what failed."""
    for request, fields in step.before:
        job_id = _was(fields, "load_job_id")
        if _was(fields, "state") is not RequestState.LOADING:
            continue
        lease = step.world.transfers[job_id].lease
        ended = job_id not in step.world.core.leases
        same_life = request.generation == _was(fields, "generation")
        if not ended:
            gone = request.state is not RequestState.LOADING
            heard_of_all = not lease.ranks_left & ~reported(lease)
            ahead = RequestState.LOOKUP if lease.failed else RequestState.RUNNING
            if heard_of_all and not (
                request.state is ahead and request.load_barred == lease.failed and same_life
            ):
                return False
            if gone and not heard_of_all and step.action[0] not in _ENDS_OF_LIVES:
                return False
        elif same_life:
            back = RequestState.RUNNING
            if lease.failed and not lease.synchronous:
                back = RequestState.LOOKUP
            if request.state is not back or request.load_barred != lease.failed:
                return False
    return True


def a_bar_stays(step: Step) -> bool:
    """A request whose load failed is never looked up again; KV that must not be stored never is."""
    for request, fields in step.before:
        if _was(fields, "load_barred") and not request.load_barred:
            return False
        same_life = request.generation == _was(fields, "generation")
        if same_life and _was(fields, "store_barred") and not request.store_barred:
            return False
    return True


def a_load_that_fails_when_it_may_have_been_read_bars_all_stores(step: Step) -> bool:
    """Any life may have shared its blocks before it failed."""
    lease = step.lease
    if lease is None or not _spoils_all_lives(lease) or lease.ranks_left:
        return True
    return all(request.store_barred for request, _ in step.before) and not step.world.core.filling


def _spoils_all_lives(lease: TransferLease) -> bool:
    """Says whether lives that go on may have read what a load that failed left behind."""
    return lease.broken or (lease.synchronous and lease.failed)


def only_ranks_that_fail_break_what_they_said(step: Step) -> bool:
    """Lives compute on a load that cannot fail: when it does, that is no failure like others."""
    if step.lease is None:
        return True
    breaks = step.action[0] == "fail" and step.action[2] == ARRIVING
    return (
        step.lease.broken == (step.was_broken or breaks) and step.lease.broken <= step.lease.failed
    )


def a_life_never_plans_backwards(step: Step) -> bool:
    """What is planned twice is stored twice, from blocks that may be another's by now."""
    for request, fields in step.before:
        if request.generation != _was(fields, "generation"):
            continue
        was = _was(fields, "state"), request.state
        failed = was == (RequestState.LOADING, RequestState.LOOKUP)
        if request.planned_tokens < _was(fields, "planned_tokens") and not failed:
            return False
    return True


def a_new_life_has_a_new_number(step: Step) -> bool:
    """It is by that number that an earlier life's transfers are told apart."""
    used = {lease.generation for lease in step.open_before}
    used |= {lease.job_id for lease in step.open_before}
    for request, fields in step.before:
        admitted = _was(fields, "state") is not RequestState.LOOKUP
        begun = step.action[0] in ("ask", "skip") and admitted
        begun = begun and step.world.names[step.action[1]] == request.request_id
        if begun != (request.generation != _was(fields, "generation")):
            return False
        if begun and request.generation in used:
            return False
    return True


def a_reset_forgets_what_was_found(step: Step) -> bool:
    """What was found before it carries the old epoch in its keys."""
    if step.action[0] != "reset":
        return True
    requests = step.world.core.requests.values()
    return not step.world.questions and all(
        request.hit is None
        and (request.state is not RequestState.LOOKUP or request.hit_end_tokens is None)
        for request in requests
    )


def new_loads_are_of_the_present_epoch(step: Step) -> bool:
    """The keys of a load come from its epoch."""
    core = step.world.core
    open_before = set(map(id, step.open_before))
    return all(
        lease.epoch == core.epoch
        for lease in core.leases.values()
        if is_load(lease) and id(lease) not in open_before
    )


def free_blocks_are_stored_of_the_present_epoch(step: Step) -> bool:
    """What lies in the engine's own cache from before a reset looks like what came after it."""
    core = step.world.core
    open_before = set(map(id, step.open_before))
    return all(
        lease.epoch == core.epoch and not core.local_cache_tainted
        for lease in core.leases.values()
        if lease.request is None and id(lease) not in open_before
    )


STEP_RULES = (
    counters_only_rise,
    leases_end_once_and_by_answers_alone,
    answers_for_others_touch_no_life,
    a_wait_for_a_load_ends_as_the_load_did,
    a_bar_stays,
    a_load_that_fails_when_it_may_have_been_read_bars_all_stores,
    only_ranks_that_fail_break_what_they_said,
    a_life_never_plans_backwards,
    a_new_life_has_a_new_number,
    a_reset_forgets_what_was_found,
    new_loads_are_of_the_present_epoch,
    free_blocks_are_stored_of_the_present_epoch,
)

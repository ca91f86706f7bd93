# SPDX-License-Identifier: Apache-2.0
"""A world as a small value, and back: what two worlds must agree in to have the same future.

What is left out, and why nothing is lost:

* Numbers of lives, questions and jobs are only compared for equality; who belongs to whom is kept.
* Of epochs only whether they are the present one is ever asked, and an old one stays old.
* Requests have the same prompt, and nothing depends on their ids; so the two are put in order of
  what is known of them. The same goes for the ranks of a transfer, and for transfers of a context.
* A block is whatever its holder holds: the core never looks at its number.
* Fields that are written before they are read again in a state, such as ``planned_tokens`` of a
  request that is preempted, and sums of what is kept, such as ``pinned_blocks``. The rules check
  the sums on every step, before they are left out.
* Without a clock, times: each deadline may pass at any moment.

``test_exhaustive`` holds this claim against cores that were never taken apart.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from core_engine import UNIT, Transfer
from exhaustive_world import HASHES, NAMES, Bounds, World, is_load

from umbp.fsm import Core, CoreLimits, LeaseKind, LeaseState, RequestState, TransferLease
from umbp.fsm.counters import CoreCounters
from umbp.fsm.deadlines import DeadlineQueue
from umbp.fsm.quarantine import Quarantine
from umbp.fsm.request import RequestContext

State: TypeAlias = tuple[Any, ...]
"""``(numbers of the parts of the requests, local_cache_tainted, quarantine)``

With lazy offload one more number: that of the part that no request has, its stores of free blocks.
"""

_REQUEST_STATES = tuple(RequestState)
_LEASE_STATES = tuple(LeaseState)
_REQUEST_NUMBERS = {state: number for number, state in enumerate(RequestState)}
_LEASE_NUMBERS = {state: number for number, state in enumerate(LeaseState)}
_OPEN, _UNKNOWN = -1, -2
_OLD_EPOCH, _EPOCH = 1, 2


class Codec:
    """Turns worlds into values and back.

    Args:
        bounds: How large the worlds are.
        make_core: Makes their cores.
    """

    def __init__(self, bounds: Bounds, make_core: Callable[[CoreLimits], Core]) -> None:
        self.bounds = bounds
        self._core = make_core(bounds.limits())
        self._parts: list[tuple[Any, ...]] = []
        self._part_numbers: dict[tuple[Any, ...], int] = {}

    # ------------------------------------------------------------ to a value

    def encode(self, world: World) -> State:
        """Returns the value of a world, and puts the world's lists in canonical order."""
        leases_of: dict[int, list[TransferLease]] = {}
        contexts: dict[int, RequestContext] = {}
        free: list[TransferLease] = []
        for lease in world.core.leases.values():
            if lease.request is None:
                free.append(lease)
                continue
            contexts[id(lease.request)] = lease.request
            leases_of.setdefault(id(lease.request), []).append(lease)
        coded = []
        for name in NAMES[: self.bounds.requests]:
            part, leases, storing = self._part(world, name, leases_of, contexts)
            coded.append((self._number(part), name, leases, storing))
        coded.sort(key=_first)
        world.names = [name for _, name, _, _ in coded]
        world.leases = [lease for _, _, leases, _ in coded for lease in leases]
        world.storing = [context for _, _, _, storing in coded for context in storing]
        numbers = tuple(map(_first, coded))
        if self.bounds.lazy:
            codes, free = self._lease_codes(world, free)
            world.leases += free
            numbers = (*numbers, self._number((None, codes, ())))
        core = world.core
        quarantine = ()
        if self.bounds.quarantine:
            quarantine = self._quarantine(core, world.now_s)
        return (numbers, core.local_cache_tainted, quarantine)

    def _part(
        self,
        world: World,
        name: str,
        leases_of: dict[int, list[TransferLease]],
        contexts: dict[int, RequestContext],
    ) -> tuple[tuple[Any, ...], list[TransferLease], list[RequestContext]]:
        """Returns what is known of an id: its request, its transfers, contexts that have ended."""
        request = world.core.requests.get(name)
        code, codes, leases = None, (), []
        if request is not None:
            code = self._request_code(world, request)
            codes, leases = self._lease_codes(world, leases_of.get(id(request), ()))
        ended = [
            (self._times(world, context), *self._lease_codes(world, leases_of[key]), context)
            for key, context in contexts.items()
            if context is not request and context.request_id == name
        ]
        ended.sort(key=lambda one: one[:2])
        for _, _, more, _ in ended:
            leases = leases + more
        part = (code, codes, tuple((times, theirs) for times, theirs, _, _ in ended))
        return part, leases, [context for _, _, _, context in ended]

    def _request_code(self, world: World, request: RequestContext) -> tuple[Any, ...]:
        state = request.state
        local = answer = planned = stored = old = barred = age = 0
        if state is RequestState.LOOKUP:
            if request.question_id is not None:
                answer, local = _OPEN, request.local_tokens
            elif request.hit_end_tokens is None:
                answer = _UNKNOWN
            else:
                answer, local = request.hit_end_tokens, request.local_tokens
                age = self._age(world, request)
        elif state is not RequestState.PREEMPTED:
            planned = request.planned_tokens
            stored = world.stored_until[request.generation] > 0
        if state is not RequestState.PREEMPTED:
            old = request.epoch != world.core.epoch
            barred = request.store_barred
        times = self._times(world, request)
        flags = (request.load_barred, bool(barred), bool(stored), bool(old))
        return (_REQUEST_NUMBERS[state], local, answer, planned, flags, age, times)

    def _lease_codes(
        self, world: World, leases: Sequence[TransferLease]
    ) -> tuple[tuple[Any, ...], list[TransferLease]]:
        pairs = [(self._lease_code(world, lease), lease) for lease in leases]
        if len(pairs) > 1:
            pairs.sort(key=_first)
        return tuple(map(_first, pairs)), [lease for _, lease in pairs]

    def _lease_code(self, world: World, lease: TransferLease) -> tuple[Any, ...]:
        request = lease.request
        load = is_load(lease)
        waited_for = (
            request is not None
            and request.state is RequestState.LOADING
            and request.load_job_id == lease.job_id
        )
        left = lease.ranks_left.bit_count()
        stalled = (lease.ranks_left & lease.ranks_stalled).bit_count()
        arriving = (lease.ranks_left & lease.ranks_arriving).bit_count()
        first: Any = 0
        old = attempted = False
        if self.bounds.quarantine and load:
            old = lease.epoch != world.core.epoch
            attempted = lease.attempted
            first = lease.begin_tokens
        return (
            waited_for,
            load + lease.synchronous,
            _LEASE_NUMBERS[lease.state],
            left,
            (lease.failed, attempted, old, stalled, arriving, lease.pinned, lease.broken),
            first,
            lease.block_count,
            self._times(world, lease),
        )

    def _times(self, world: World, subject: RequestContext | TransferLease) -> Any:
        if not self.bounds.clock:
            return 0
        return (subject.deadline_s - world.now_s, subject.wake_s - world.now_s)

    def _age(self, world: World, request: RequestContext) -> Any:
        if not self.bounds.clock or request.answered_s == math.inf:
            return -1
        # Once it is out of date it is never used again.
        return min(world.now_s - request.answered_s, self._core.limits.answer_lifetime_s + 1.0)

    def _quarantine(self, core: Core, now_s: float) -> Any:
        listed = core.quarantine.listed(HASHES, now_s)
        until = core.quarantine._until
        return tuple(
            (key, until[key] - now_s if self.bounds.clock else 0) for key in until if key in listed
        )

    def _number(self, part: tuple[Any, ...]) -> int:
        number = self._part_numbers.setdefault(part, len(self._parts))
        if number == len(self._parts):
            self._parts.append(part)
        return number

    # ------------------------------------------------------------ and back

    def parts(self, state: State) -> list[tuple[Any, ...]]:
        """Returns what a state says of each id."""
        return [self._parts[number] for number in state[0]]

    def decode(self, state: State) -> World:
        """Makes a world out of its value. It holds until the next is made."""
        core = self._core
        _empty(core, state)
        world = World(core, self.bounds)
        free = iter(range(world.block_count))
        subjects: list[Any] = []
        for name, number in zip(NAMES[: self.bounds.requests], state[0], strict=False):
            code, codes, ended = self._parts[number]
            if code is not None:
                request = self._decode_request(world, name, code, free)
                subjects.append(request)
                self._decode_leases(world, request, codes, free)
            for times, theirs in ended:
                context = RequestContext(name, None, core.next_id(), _EPOCH)
                context.state = RequestState.STORING
                _set_times(context, times)
                world.contexts.append(context)
                world.storing.append(context)
                subjects.append(context)
                self._decode_leases(world, context, theirs, free)
        if self.bounds.lazy:
            self._decode_leases(world, None, self._parts[state[0][-1]][1], free)
        subjects += world.leases
        queue = [(subject.wake_s, subject.number, subject) for subject in subjects]
        core.deadlines._entries = sorted(queue)
        return world

    def _decode_request(
        self, world: World, name: str, code: tuple[Any, ...], free: Any
    ) -> RequestContext:
        core = world.core
        state_number, local, answer, planned, flags, age, times = code
        request = RequestContext(name, None, core.next_id(), _OLD_EPOCH if flags[3] else _EPOCH)
        request.state = _REQUEST_STATES[state_number]
        request.load_barred, request.store_barred = flags[0], flags[1]
        request.planned_tokens = planned
        request.store_end_tokens = self.bounds.units * UNIT
        request.local_tokens = local
        if request.state is RequestState.LOOKUP:
            if answer == _OPEN:
                request.question_id = core.next_id()
                world.questions[request.question_id] = request
            elif answer != _UNKNOWN:
                request.hit_end_tokens = answer
                request.hit = ("hit", answer // UNIT) if answer > local else None
                request.answered_s = math.inf if age == -1 else -age
        elif request.state in (RequestState.LOADING, RequestState.RUNNING):
            world.tables[name] = list(itertools.islice(free, self.bounds.units))
            if flags[2]:
                world.stored_until[request.generation] = planned
        _set_times(request, times)
        core.requests[name] = request
        world.contexts.append(request)
        if request.state is RequestState.RUNNING:
            core.note_filling(request)
        return request

    def _decode_leases(
        self, world: World, request: RequestContext | None, codes: Sequence[Any], free: Any
    ) -> None:
        core = world.core
        for waited_for, kind, state_number, left, flags, first, count, times in codes:
            table = world.tables[request.request_id] if waited_for else None
            # A load ends where its life plans its first store.
            begin = request.planned_tokens - count * UNIT if waited_for else first
            end = begin + count * UNIT
            blocks = table or [None] * (begin // UNIT) + list(itertools.islice(free, count))
            lease = TransferLease(
                core.next_id(),
                request,
                request.generation if waited_for else request and -1,
                LeaseKind.LOAD if kind else LeaseKind.STORE,
                _OLD_EPOCH if flags[2] else _EPOCH,
                world.parts(blocks, begin, end),
                count,
                begin,
                end,
                (1 << left) - 1,
                pinned=flags[5],
                synchronous=kind == 2,
                failed=flags[0],
                attempted=flags[1],
                broken=flags[6],
                state=_LEASE_STATES[state_number],
            )
            if kind and lease.pinned:
                lease.ranks_stalled = (1 << flags[3]) - 1
                # Some rank has said something; if none of those that are left, one that has
                # answered since.
                lease.ranks_arriving = (1 << flags[4]) - 1 << flags[3]
                if not lease.ranks_stalled | lease.ranks_arriving:
                    lease.ranks_arriving = 1 << left
            _set_times(lease, times)
            core.leases[lease.job_id] = lease
            world.leases.append(lease)
            if request is not None:
                request.open_leases += 1
            sent = lease.state is not LeaseState.SUBMITTED
            answered = set(range(left, self.bounds.ranks))
            world.transfers[lease.job_id] = Transfer(lease, sent, answered)
            if lease.pinned:
                core.pinned_blocks += count
                world.pinning.add(lease.job_id)
            if kind == 2:
                core.sync_loads += 1
            if waited_for:
                request.load_job_id = lease.job_id
                if kind == 2:
                    core.note_filling(request)


def work_of(part: tuple[Any, ...]) -> int:
    """Counts what has to happen before nothing of an id is left."""
    code, codes, ended = part
    left = 0
    if code is not None:
        left += 1 + (code[2] == _OPEN)
    for _, _, state_number, ranks, *_ in (*codes, *(one for _, theirs in ended for one in theirs)):
        left += ranks + (_LEASE_STATES[state_number] is LeaseState.SUBMITTED)
    return left


def _first(pair: Sequence[Any]) -> Any:
    return pair[0]


def _empty(core: Core, state: State) -> None:
    """Makes a used core into one in which nothing is open."""
    _, tainted, quarantine = state
    core.epoch = _EPOCH
    core.requests = {}
    core.leases = {}
    core.filling = {}
    core.counters = CoreCounters()
    if quarantine or len(core.quarantine):
        core.quarantine = Quarantine(core.limits.quarantine_s)
        for block_hash, left_s in quarantine:
            core.quarantine._until[block_hash] = left_s or core.limits.quarantine_s
    core.deadlines = DeadlineQueue()
    core.pinned_blocks = core.sync_loads = 0
    core.local_cache_tainted = tainted
    core.now_s = 0.0
    core._out.clear()
    core.next_id = itertools.count(1).__next__


def _set_times(subject: RequestContext | TransferLease, times: Any) -> None:
    # Without a clock it is any time to come.
    subject.deadline_s, subject.wake_s = times or (1.0, 1.0)

# SPDX-License-Identifier: Apache-2.0
"""The lifecycle core as a space for ``exhaustive`` to search.

Beside what ``exhaustive_rules`` says it checks in every state that

* events that the table or their content forbids are refused and change nothing; nor do answers
  that are late, double or for what never was;
* all ends in whatever order: each end of a request, hand-over and answer leaves less work than
  there was, and while there is work left one of them can happen;
* all ends, too, when the engine never says another word: then answers and deadlines leave less
  work, one after the other. So no more than ``work_of`` steps lead from a state to the empty one.
"""

import linecache
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from core_engine import state_of
from exhaustive import Action, Violation
from exhaustive_codec import Codec, State, work_of
from exhaustive_events import unfit_events
from exhaustive_rules import STATE_RULES, STEP_RULES, Step
from exhaustive_story import Story
from exhaustive_world import Bounds, World, said_by

from umbp.errors import IllegalTransition, UsageError
from umbp.fsm import Core, CoreLimits, Event, LeaseState

_ENDING = ("finish", "send", "succeed", "fail")
_PASSING = ("expire_request", "expire_lease")
_QUIET_STEPS_MAX = 64


class _Noted(dict):
    """Rows of one state; notes each that is used."""

    def __init__(self, rows: dict[Any, Any], state: Any, seen: set[Any]) -> None:
        super().__init__(rows)
        self._state = state
        self._seen = seen

    def __getitem__(self, event: Any) -> Any:
        row = super().__getitem__(event)
        self._seen.add((self._state, event, row[0]))
        return row


class Lifecycle:
    """All that can happen to a core within bounds.

    Args:
        bounds: How large the world around it is.
        make_core: Makes the core; another one than ``Core`` shows what the search can find.

    Attributes:
        rows: ``(state, event class, next state)`` of every transition that was taken.
    """

    def __init__(self, bounds: Bounds, make_core: Callable[[CoreLimits], Core] = Core) -> None:
        self.bounds = bounds
        self.rows: set[tuple[Any, type[Any], Any]] = set()
        self.codec = Codec(bounds, self._noting(make_core))
        self._make_core = make_core
        self._work: dict[tuple[int, ...], int] = {}

    def _noting(self, make_core: Callable[[CoreLimits], Core]) -> Callable[[CoreLimits], Core]:
        def make(limits: CoreLimits) -> Core:
            core = make_core(limits)
            core._table = {
                state: _Noted(rows, state, self.rows) for state, rows in core._table.items()
            }
            return core

        return make

    # ------------------------------------------------------------ to be searched

    def new_world(self) -> World:
        """Makes the world in which nothing has happened, with a core of its own."""
        return World(self._make_core(self.bounds.limits()), self.bounds)

    def first(self) -> State:
        return self.codec.encode(self.new_world())

    def visit(self, state: State) -> Sequence[Action]:
        world = self.codec.decode(state)
        actions = list(world.actions())
        self._check_refusals(state, world)
        if self._work_left(state):
            if not any(action[0] in _ENDING for action in actions):
                raise Violation("nothing is nearer to its end, and not all has ended")
            if self.bounds.deadlines and _next_in_silence(world) not in actions:
                raise Violation("the engine falls silent, and not all ends")
        if self.bounds.clock:
            self._check_silence(state)
        return actions

    def follow(self, state: State, action: Action) -> State:
        world = self.codec.decode(state)
        ending = action[0] in _ENDING or (
            action[0] in _PASSING and action == _next_in_silence(world)
        )
        step = Step(world, action)
        _guarded(world, action)
        world.note_contexts()
        for rule in STATE_RULES:
            if not rule(world):
                raise _broken(rule)
        for step_rule in STEP_RULES:
            if not step_rule(step):
                raise _broken(step_rule)
        after = self.codec.encode(world)
        if ending and self._work_left(after) >= self._work_left(state):
            raise Violation("an end, an answer or a deadline left as much to be done as there was")
        return after

    def tell(self, path: Sequence[Action]) -> Sequence[str]:
        return Story(self.new_world(), self.codec).lines(path)

    # ------------------------------------------------------------ all ends

    def _work_left(self, state: State) -> int:
        """Counts requests that live, open questions, transfers to be sent, and missing answers."""
        left = self._work.get(state[0])
        if left is None:
            left = sum(map(work_of, self.codec.parts(state)))
            self._work[state[0]] = left
        return left

    def _check_silence(self, state: State) -> None:
        """Lets workers answer and the clock run until nothing is left."""
        world = self.codec.decode(state)
        for _ in range(_QUIET_STEPS_MAX):
            action = _next_in_silence(world)
            if action is None:
                core = world.core
                if core.requests or core.leases or core.filling or core.pinned_blocks:
                    raise Violation("time has passed, and something is left for ever")
                return
            _guarded(world, action)
        raise Violation("the engine falls silent, and not all ends")

    # ------------------------------------------------------------ what must be refused

    def _check_refusals(self, state: State, world: World) -> None:
        before = state_of(world.core, world.contexts)
        ignored = 0
        for number, (event, expected) in enumerate(unfit_events(world)):
            ignored += expected is None
            if not _is_refused(world, event, expected):
                what = expected.__name__ if expected else "ignored"
                raise Violation(f"this event must be {what}, and nothing else", ("give", number))
        world.core.counters.answers_unknown -= ignored
        if state_of(world.core, world.contexts) == before:
            return
        for number, (event, _) in enumerate(list(unfit_events(world))):
            world = self.codec.decode(state)
            before = state_of(world.core, world.contexts)
            _is_refused(world, event, None)
            world.core.counters.answers_unknown = 0
            if state_of(world.core, world.contexts) != before:
                raise Violation("an event that is refused changed something", ("give", number))
        raise Violation("events that were refused changed something together")


def _broken(rule: Callable[..., bool]) -> Violation:
    reason = (rule.__doc__ or "").strip()
    return Violation(f"{rule.__name__} does not hold. {reason}")


def _guarded(world: World, action: Action) -> None:
    """Does an action, which the core must take and of which every command must fit."""
    try:
        world.do(action)
    except (IllegalTransition, UsageError) as error:
        raise Violation(f"refused what it must take: {error}") from error
    except (AssertionError, LookupError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        raise Violation(f"a command does not fit: {type(error).__name__}: {line}") from error


def _next_in_silence(world: World) -> Action | None:
    """Says what ends next if the engine never says another word; None if nothing is left."""
    core = world.core
    for index, lease in enumerate(world.leases):
        if lease.job_id in core.leases and lease.state is not LeaseState.SUBMITTED:
            first = (lease.ranks_left & -lease.ranks_left).bit_length() - 1
            return ("fail", index, said_by(lease, first), True)
    if world.bounds.clock:
        return ("wait",) if core.leases or core.requests else None
    # The time of a request that waits for a transfer does nothing: the transfer's own does.
    if core.leases:
        return ("expire_lease", 0)
    for slot, name in enumerate(world.names):
        if name in core.requests:
            return ("expire_request", slot)
    return None


def _is_refused(world: World, event: Event, expected: type[Exception] | None) -> bool:
    try:
        commands = world.core.step(event, world.now_s)
    except (IllegalTransition, UsageError) as error:
        return not world.core._out and (expected is None or type(error) is expected)
    return expected is None and not commands

# SPDX-License-Identifier: Apache-2.0
"""Everything that can be done to an engine, as data: a course is a list of actions.

An action has a number that fills in its details (which request, which prompt, which fault), so that
any list of kinds and numbers is a course, and a shorter list is one, too.
"""

import enum
import random
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from umbp.sim.engine import SimEngine
from umbp.sim.faults import LookupFault, TransferFault
from umbp.sim.models import SimModel


class ActionKind(enum.Enum):
    """What is done."""

    ADD = "add"
    """A client sends a prompt of a small family, or two."""
    REUSE_ID = "reuse_id"
    """A client sends a prompt under the id of a request that is over."""
    ABORT = "abort"
    """A client goes away."""
    STEP = "step"
    """The engine does a few steps."""
    SCHEDULE = "schedule"
    """The engine plans a step, and leaves it there."""
    EXECUTE = "execute"
    """The workers do a planned step."""
    COMPLETE = "complete"
    """The scheduler takes the results of a step."""
    FORGET = "forget"
    """vLLM's own prefix cache loses what no request uses; the store stays. Or, under lazy offload,
    requests that share nothing need the blocks."""
    RESTORE = "restore"
    """The engine comes to rest if it can, vLLM's cache loses what no request uses, and a client
    sends an old prompt again: a load with nothing beside it. Meanwhile the client may go away, the
    store be reset, or some rank have a fault."""
    RESET = "reset"
    """vLLM's cache and the store are emptied."""
    RESET_RUNNING = "reset_running"
    """The same, and all running requests start over."""
    LOADS = "loads"
    """From now on loads have a fault."""
    STORES = "stores"
    """From now on stores have a fault."""
    LOOKUPS = "lookups"
    """From now on lookups have a fault."""
    EVICTIONS = "evictions"
    """From now on objects of a hit may be gone before they are loaded."""
    EVICT = "evict"
    """Some objects of one rank, or of all, are evicted."""
    REVIVE = "revive"
    """What was held on one rank goes on."""
    WAIT = "wait"
    """Time passes."""


@attrs.frozen
class Action:
    """One thing that is done.

    Attributes:
        kind: What.
        number: Its details.
    """

    kind: ActionKind
    number: int = 0


_WEIGHTS: Final = {
    ActionKind.ADD: 12,
    ActionKind.REUSE_ID: 2,
    ActionKind.ABORT: 3,
    ActionKind.STEP: 20,
    ActionKind.SCHEDULE: 4,
    ActionKind.EXECUTE: 3,
    ActionKind.COMPLETE: 4,
    ActionKind.FORGET: 10,
    ActionKind.RESTORE: 6,
    ActionKind.RESET: 1,
    ActionKind.RESET_RUNNING: 1,
    ActionKind.LOADS: 3,
    ActionKind.STORES: 3,
    ActionKind.LOOKUPS: 2,
    ActionKind.EVICTIONS: 1,
    ActionKind.EVICT: 2,
    ActionKind.REVIVE: 2,
    ActionKind.WAIT: 3,
}
_WAITS_S: Final = (0.005, 0.03, 0.06, 0.45, 1.0)
_FAMILIES: Final = 2
_CROWD: Final = 3
_CROWD_TOKENS: Final = 44
"""As long as the longest prompt of a family."""
_NUMBERS: Final = 1 << 20
_REST_STEPS: Final = 12
_LOAD_STEPS: Final = 8


def random_actions(source: random.Random, count: int) -> list[Action]:
    """Draws a course."""
    kinds = source.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=count)
    return [Action(kind, source.randrange(_NUMBERS)) for kind in kinds]


def apply(engine: SimEngine, action: Action) -> None:
    """Does one thing; what cannot be done now is skipped."""
    if not engine.stopped:
        _ACTIONS[action.kind](engine, action.number)


# ---------------------------------------------------------------- clients


def _prompt(model: SimModel, number: int) -> tuple[list[int], int]:
    """Returns a prompt that begins as many others do, and the length of its answer.

    Lengths lie around the ends of units and blocks: that is where rules change.
    """
    number, family = divmod(number, _FAMILIES)
    number, units = divmod(number, 44 // model.unit_tokens)
    number, offset = divmod(number, 3)
    length = max(1, (units + 1) * model.unit_tokens + offset - 1)
    number, answer = divmod(number, 10)
    _, fork = divmod(number, 6)
    prompt = [family * 100 + place for place in range(length)]
    if fork == 0:
        # Leaves the family in its last quarter.
        prompt[length * 3 // 4] += 50
    return prompt, 1 + answer


def _add(engine: SimEngine, number: int) -> None:
    prompt, answer = _prompt(engine.world.model, number)
    engine.add(prompt, answer)
    if number % 5 == 0:
        # Two at once that share all but their ends.
        engine.add([*prompt[:-1], 7], answer)


def _reuse_id(engine: SimEngine, number: int) -> None:
    over = [one for one in engine.requests if one.finished and engine.may_add(one.request_id)]
    if over:
        prompt, answer = _prompt(engine.world.model, number)
        engine.add(prompt, answer, request_id=over[-1 - number % len(over)].request_id)


def _abort(engine: SimEngine, number: int) -> None:
    live = engine.live()
    if live:
        engine.abort(live[number % len(live)].request_id)


# ---------------------------------------------------------------- the engine


def _step(engine: SimEngine, number: int) -> None:
    _step_while(engine, 1 + number % 4, engine.has_work)


def _schedule(engine: SimEngine, _: int) -> None:
    if engine.pending < engine.depth and engine.scheduler.has_requests():
        engine.schedule()


def _execute(engine: SimEngine, _: int) -> None:
    engine.execute()


def _complete(engine: SimEngine, _: int) -> None:
    if engine.pending:
        engine.complete()


def _forget(engine: SimEngine, number: int) -> None:
    if not engine.options.lazy_offload or number % 8 == 0:
        engine.forget()
        return
    # Under lazy offload nothing is stored but what other requests need the blocks of.
    for crowd in range(_CROWD):
        begin = number + 29 * crowd
        engine.add([300 + (begin + place * (crowd + 1)) % 197 for place in range(_CROWD_TOKENS)], 1)


def _restore(engine: SimEngine, number: int) -> None:
    over = [one for one in engine.requests if one.finished]
    if not over:
        return
    _step_while(engine, _REST_STEPS, engine.has_work)
    engine.forget()
    number, what = divmod(number, 8)
    if what == 5:
        _loads(engine, number)
    number, which = divmod(number, len(over))
    request = engine.add(over[-1 - which].source.prompt_token_ids, 1 + number % 3)
    if what < 2:
        # Before it is known that the load cannot fail.
        _step_while(engine, 2, engine.has_work)
        engine.reset(running=what == 1)
    _step_while(engine, _LOAD_STEPS, lambda: not (engine.loads_arriving or request.finished))
    if what in (2, 3):
        engine.abort(request.request_id)
    elif what == 4:
        engine.reset(running=True)


def _step_while(engine: SimEngine, count: int, condition: Callable[[], bool]) -> None:
    for _ in range(count):
        if engine.stopped or not engine.has_work() or not condition():
            return
        engine.step()


def _reset(engine: SimEngine, _: int) -> None:
    engine.reset()


def _reset_running(engine: SimEngine, _: int) -> None:
    engine.reset(running=True)


# ---------------------------------------------------------------- the world


def _faults(number: int) -> Sequence[TransferFault]:
    kinds = list(TransferFault)
    number, index = divmod(number, len(kinds))
    # Every time, or about every third time.
    return (kinds[index],) if number % 2 else (kinds[index], TransferFault.NONE, TransferFault.NONE)


def _loads(engine: SimEngine, number: int) -> None:
    faults = engine.world.faults
    faults.plan = attrs.evolve(faults.plan, loads=_faults(number))


def _stores(engine: SimEngine, number: int) -> None:
    faults = engine.world.faults
    faults.plan = attrs.evolve(faults.plan, stores=_faults(number))


def _lookups(engine: SimEngine, number: int) -> None:
    faults = engine.world.faults
    kinds = list(LookupFault)
    faults.plan = attrs.evolve(faults.plan, lookups=(kinds[number % len(kinds)], LookupFault.NONE))


def _evictions(engine: SimEngine, number: int) -> None:
    faults = engine.world.faults
    faults.plan = attrs.evolve(faults.plan, evict_percent=(0, 30, 100)[number % 3])


def _evict(engine: SimEngine, number: int) -> None:
    stores = engine.world.stores
    number, which = divmod(number, len(stores) + 1)
    for store in stores if which == len(stores) else [stores[which]]:
        store.evict_oldest(1 + number % 16)


def _revive(engine: SimEngine, number: int) -> None:
    pools = engine.site.pools
    pools[number % len(pools)].revive()


def _wait(engine: SimEngine, number: int) -> None:
    engine.world.clock.advance(_WAITS_S[number % len(_WAITS_S)])


_ACTIONS: Final[dict[ActionKind, Callable[[SimEngine, int], None]]] = {
    ActionKind.ADD: _add,
    ActionKind.REUSE_ID: _reuse_id,
    ActionKind.ABORT: _abort,
    ActionKind.STEP: _step,
    ActionKind.SCHEDULE: _schedule,
    ActionKind.EXECUTE: _execute,
    ActionKind.COMPLETE: _complete,
    ActionKind.FORGET: _forget,
    ActionKind.RESTORE: _restore,
    ActionKind.RESET: _reset,
    ActionKind.RESET_RUNNING: _reset_running,
    ActionKind.LOADS: _loads,
    ActionKind.STORES: _stores,
    ActionKind.LOOKUPS: _lookups,
    ActionKind.EVICTIONS: _evictions,
    ActionKind.EVICT: _evict,
    ActionKind.REVIVE: _revive,
    ActionKind.WAIT: _wait,
}

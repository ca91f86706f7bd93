# SPDX-License-Identifier: Apache-2.0
"""Runs a course from its first action to rest, and says what happened.

outcome = run_random(seed=1)
outcome = run(random_options(random.Random(1)), [Action(ActionKind.ADD, 7)], seed=1)
"""

import logging
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import attrs

from umbp.sim.actions import Action, apply, random_actions
from umbp.sim.engine import SimEngine
from umbp.sim.faults import CALM, LATE_ARRIVALS
from umbp.sim.models import (
    MAX_TOKENS,
    EngineOptions,
    ModelKind,
    hybrid_may_run_ahead,
    sim_model,
)
from umbp.sim.site import SimWorld

_BLOCKS: Final = {
    # As few as let the longest request run alone, and more.
    ModelKind.DENSE: (17, 22, 40),
    ModelKind.HYBRID: (18, 24, 40),
    ModelKind.WINDOW: (30, 36, 44),
}
_RANKS: Final = (1, 1, 2, 4)
LAZY_MAX_TOKENS: Final = 64
"""Longest request under lazy offload, which pins what no such request needs."""
_CAPACITIES: Final = (24, 256)


@attrs.frozen(kw_only=True)
class Outcome:
    """How a course went; that it returned at all means that every check held.

    Attributes:
        steps: Engine steps.
        requests: Requests that clients sent.
        stopped: The engine ended early, because a pool stalled.
        counters: What umbp counted.
        time_s: Virtual time that passed.
        digest: Fingerprint of the whole course; equal for equal seeds in any process.
    """

    steps: int
    requests: int
    stopped: bool
    counters: Mapping[str, int]
    time_s: float
    digest: int


def quiet() -> None:
    """Silences vLLM, which has something to say about every engine, and umbp's warnings."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.getLogger("umbp").setLevel(logging.CRITICAL)


def random_options(source: random.Random) -> EngineOptions:
    """Draws what an engine is started with."""
    kind = source.choice(list(ModelKind))
    load_async = kind is not ModelKind.DENSE or source.random() < 0.5
    lazy_offload = load_async and source.random() < 0.4
    async_scheduling = source.random() < 0.5
    if kind is ModelKind.HYBRID and not hybrid_may_run_ahead():
        async_scheduling = False
    return EngineOptions(
        kind=kind,
        ranks=source.choice(_RANKS),
        async_scheduling=async_scheduling,
        num_blocks=source.choice(_BLOCKS[kind]),
        load_async=load_async,
        lookup_async=source.random() < 0.5,
        save_decode_cache=source.random() < 0.5,
        lazy_offload=lazy_offload,
        max_tokens=LAZY_MAX_TOKENS if lazy_offload else MAX_TOKENS,
        load_failure_quarantine_ms=source.choice((0, 3000)),
        max_pinned_percent=source.choice((50, 100)),
        serialize=source.random() < 0.2,
    )


def run(
    options: EngineOptions,
    actions: Iterable[Action],
    *,
    seed: int,
    on_action: Callable[[SimEngine, Action], None] | None = None,
) -> Outcome:
    """Runs a course.

    Args:
        options: What the engine is started with.
        actions: What is done to it.
        seed: Decides what faults hit, and how long things take.
        on_action: Called after each action.

    Raises:
        OracleError: A check of the simulation failed.
        Exception: Whatever vLLM or umbp raises, which they must not.
    """
    world = SimWorld(
        sim_model(options), seed=seed, capacity_objects=_CAPACITIES[seed % len(_CAPACITIES)]
    )
    world.faults.plan = LATE_ARRIVALS
    engine = SimEngine(world)
    for action in actions:
        apply(engine, action)
        if on_action is not None:
            on_action(engine, action)
    settle(engine)
    return Outcome(
        steps=engine.steps,
        requests=len(engine.requests),
        stopped=engine.stopped,
        counters=engine.counters(),
        time_s=world.clock.now(),
        digest=_digest(engine),
    )


def settle(engine: SimEngine) -> None:
    """Ends all faults, lets the engine come to rest, checks that nothing is left, and closes it."""
    engine.world.faults.plan = CALM
    for pool in engine.site.pools:
        pool.revive(for_good=True)
    engine.drain()
    engine.close()


def run_random(seed: int, *, actions: int = 24, options: EngineOptions | None = None) -> Outcome:
    """Runs a course that one number decides.

    Args:
        seed: The number.
        actions: Length of the course.
        options: What the engine is started with; None: drawn.
    """
    source = random.Random(seed)
    drawn = random_options(source)
    return run(options or drawn, random_actions(source, actions), seed=seed)


def _digest(engine: SimEngine) -> int:
    facts = (
        engine.steps,
        sorted(engine.counters().items()),
        round(engine.world.clock.now(), 9),
        [(one.request_id, one.received, one.aborted) for one in engine.requests],
        engine.trace,
    )
    return zlib.crc32(repr(facts).encode())

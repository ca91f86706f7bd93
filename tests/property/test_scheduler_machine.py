# SPDX-License-Identifier: Apache-2.0
"""Engines under any course of clients, steps, resets and faults.

What must hold is checked inside the simulation (``umbp.sim``), in every step: whatever a forward
pass reads is what would have been computed, and each stored object is what its key says; pins hold;
each load and each job is answered once; nothing from before a reset comes back; vLLM's own
assertions hold; and once faults stop everything ends and nothing is left.
"""

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from umbp.sim.actions import Action, ActionKind, apply
from umbp.sim.driver import LAZY_MAX_TOKENS, run, run_random, settle
from umbp.sim.engine import SimEngine
from umbp.sim.faults import LATE_ARRIVALS
from umbp.sim.models import (
    MAX_TOKENS,
    EngineOptions,
    ModelKind,
    hybrid_may_run_ahead,
    sim_model,
)
from umbp.sim.site import SimWorld

pytestmark = pytest.mark.usefixtures("quiet_simulation")

BLOCKS = {ModelKind.DENSE: (17, 40), ModelKind.HYBRID: (18, 40), ModelKind.WINDOW: (30, 44)}
EXAMPLES = settings.default.max_examples
# A course of one seed costs a few milliseconds: at night there is time for very many.
MANY_EXAMPLES = EXAMPLES * 5 if EXAMPLES >= 20_000 else EXAMPLES

numbers = st.integers(0, 1 << 20)
seeds = st.integers(0, (1 << 32) - 1)
actions = st.builds(Action, st.sampled_from(ActionKind), numbers)


@st.composite
def engine_options(draw: st.DrawFn) -> EngineOptions:
    """What an engine is started with; the simplest first, for shrinking."""
    kind = draw(st.sampled_from(ModelKind))
    runs_ahead = kind is not ModelKind.HYBRID or hybrid_may_run_ahead()
    load_async = kind is not ModelKind.DENSE or draw(st.booleans())
    lazy_offload = load_async and draw(st.booleans())
    return EngineOptions(
        kind=kind,
        ranks=draw(st.sampled_from((1, 2, 4))),
        async_scheduling=runs_ahead and draw(st.booleans()),
        num_blocks=draw(st.sampled_from(BLOCKS[kind])),
        load_async=load_async,
        lookup_async=draw(st.booleans()),
        save_decode_cache=draw(st.booleans()),
        lazy_offload=lazy_offload,
        max_tokens=LAZY_MAX_TOKENS if lazy_offload else MAX_TOKENS,
        load_failure_quarantine_ms=draw(st.sampled_from((0, 3000))),
        max_pinned_percent=draw(st.sampled_from((50, 100))),
        serialize=draw(st.booleans()),
    )


@settings(max_examples=MANY_EXAMPLES)
@given(seed=seeds)
def test_a_course_that_one_seed_decides(seed: int) -> None:
    """The fast one: replay a failure by ``run_random(seed)``."""
    run_random(seed)


@settings(max_examples=max(20, EXAMPLES // 2))
@given(engine_options(), st.lists(actions, min_size=8, max_size=40), seeds)
def test_a_course_of_drawn_actions(options: EngineOptions, course: list[Action], seed: int) -> None:
    """The one that shrinks to a short list."""
    run(options, course, seed=seed)


class EngineMachine(RuleBasedStateMachine):
    """The same actions as rules that know when they make sense."""

    engine: SimEngine

    @initialize(options=engine_options(), seed=seeds)
    def start(self, options: EngineOptions, seed: int) -> None:
        self.engine = SimEngine(SimWorld(sim_model(options), seed=seed, capacity_objects=64))
        self.engine.world.faults.plan = LATE_ARRIVALS

    def act(self, kind: ActionKind, number: int = 0) -> None:
        apply(self.engine, Action(kind, number))
        if self.engine.stopped:
            note("a pool has stalled: the engine is over")

    @rule(number=numbers)
    def add(self, number: int) -> None:
        self.act(ActionKind.ADD, number)

    @precondition(lambda self: any(one.finished for one in self.engine.requests))
    @rule(number=numbers)
    def reuse_id(self, number: int) -> None:
        self.act(ActionKind.REUSE_ID, number)

    @precondition(lambda self: self.engine.live())
    @rule(number=numbers)
    def abort(self, number: int) -> None:
        self.act(ActionKind.ABORT, number)

    @precondition(lambda self: self.engine.has_work())
    @rule(number=numbers)
    def step(self, number: int) -> None:
        self.act(ActionKind.STEP, number)

    @precondition(lambda self: self.engine.pending < self.engine.depth)
    @rule()
    def schedule(self) -> None:
        self.act(ActionKind.SCHEDULE)

    @precondition(lambda self: self.engine.pending)
    @rule(completes=st.booleans())
    def go_on(self, completes: bool) -> None:
        self.act(ActionKind.COMPLETE if completes else ActionKind.EXECUTE)

    @rule(kind=st.sampled_from((ActionKind.FORGET, ActionKind.RESET, ActionKind.RESET_RUNNING)))
    def empty(self, kind: ActionKind) -> None:
        self.act(kind)

    @precondition(lambda self: any(one.finished for one in self.engine.requests))
    @rule(number=numbers)
    def restore(self, number: int) -> None:
        self.act(ActionKind.RESTORE, number)

    @rule(
        kind=st.sampled_from(
            (ActionKind.LOADS, ActionKind.STORES, ActionKind.LOOKUPS, ActionKind.EVICTIONS)
        ),
        number=numbers,
    )
    def plan_faults(self, kind: ActionKind, number: int) -> None:
        self.act(kind, number)

    @rule(number=numbers)
    def evict(self, number: int) -> None:
        self.act(ActionKind.EVICT, number)

    @rule(number=numbers)
    def revive(self, number: int) -> None:
        self.act(ActionKind.REVIVE, number)

    @rule(number=numbers)
    def wait(self, number: int) -> None:
        self.act(ActionKind.WAIT, number)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            settle(self.engine)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=max(20, EXAMPLES // 5), stateful_step_count=30)

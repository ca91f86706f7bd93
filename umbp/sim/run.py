# SPDX-License-Identifier: Apache-2.0
"""A run of ``umbp sim``: engines, conversations and faults, from the first question to rest."""

import heapq
import itertools
import random
from pathlib import Path
from typing import Final

import attrs

from umbp.sim.cluster import ClusterWorld
from umbp.sim.engine import STEP_S
from umbp.sim.journal import Journal
from umbp.sim.memory import OracleError
from umbp.sim.meter import Account, MeteredEngine
from umbp.sim.models import sim_model
from umbp.sim.plan import SimPlan, check_plan
from umbp.sim.schedule import Effect, EffectKind, Fault, moments_of
from umbp.sim.traffic import Conversation, draw_conversations
from umbp.trace.recorder import TraceFile

_IDLE_ROUNDS_MAX: Final = 1000
"""Rounds in which nothing is computed, until faults end or, without any, the run has failed."""

_TRACE_BYTES_MAX: Final = 1 << 40
"""A run ends by itself, and is of use from its beginning only."""


class SimFailed(Exception):
    """A check failed, or vLLM or umbp raised; the cause is what was raised."""


@attrs.define(eq=False)
class _Talk:
    """A conversation under way: what was said, and what is waited for."""

    conversation: Conversation
    said: list[int]
    turn: int = 0
    engine: MeteredEngine | None = None
    account: Account | None = None


class SimRun:
    """One run.

    Args:
        plan: What is simulated.

    Raises:
        ConfigError: The plan cannot work.

    Attributes:
        plan: What is simulated.
        engines: The engines.
        journal: What happened to each request.
        rounds: Steps of the clock so far.
        talks_over: Conversations that have ended.
        ended: The engines that a stalled pool has ended, and when.
    """

    def __init__(self, plan: SimPlan) -> None:
        check_plan(plan)
        self.plan = plan
        self.journal = Journal()
        self.rounds = 0
        self.talks_over = 0
        self.ended: dict[int, float] = {}
        self.engines: list[MeteredEngine] = []
        self._worlds: list[ClusterWorld] = []
        known_hashes: set[bytes] = set()
        model = sim_model(plan.engine_options())
        for index in range(plan.engines):
            world = ClusterWorld(
                model,
                index=index,
                faults=plan.faults,
                journal=self.journal,
                seed=plan.seed,
                capacity_objects=plan.capacity_objects,
                beside=self._worlds[-1] if self._worlds else None,
                shared_store=plan.shared_store,
                trace=_trace_file(plan.trace_path, index),
            )
            self._worlds.append(world)
            self.engines.append(MeteredEngine(world, self.journal, known_hashes))
        self.clock = self._worlds[0].clock
        self.object_bytes = plan.token_bytes * model.groups[0].block_tokens // plan.ranks
        self._route = random.Random(plan.seed)
        self._moments = moments_of(plan.faults)
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, _Talk]] = []
        self._asking: list[_Talk] = []
        self._acting: MeteredEngine | None = None
        self._calm = False
        self._idle_rounds = 0
        for conversation in draw_conversations(plan.traffic, plan.seed):
            self._plan_turn(_Talk(conversation, list(conversation.system)), conversation.begin_s)

    # ------------------------------------------------------------ the course

    def advance(self) -> bool:
        """Goes one round on; says whether there is more to do.

        Raises:
            SimFailed: A check failed, or vLLM or umbp raised.
        """
        try:
            return self._advance()
        # Whatever vLLM or umbp raises is a fault of one of them, and found by the simulation.
        except Exception as error:
            raise SimFailed(f"seed {self.plan.seed}, {self._where()}: {_tell(error)}") from error

    def finish(self) -> None:
        """Goes on until everything is at rest."""
        while self.advance():
            pass

    def _advance(self) -> bool:
        over = self._is_over()
        if over and not self._calm:
            self._end_faults()
        if not over:
            self._ask()
            self._hit_moments()
        self._revive()
        worked = False
        for engine in self._running():
            self._acting = engine
            worked = engine.turn() or worked
        self._acting = None
        for index, engine in enumerate(self.engines):
            if engine.stopped:
                self.ended.setdefault(index, self.clock.now())
        self.clock.advance(STEP_S)
        self.rounds += 1
        self._hear()
        self._watch_idleness(worked)
        busy = any(engine.has_work() for engine in self._running())
        if not busy and self._is_over():
            self._come_to_rest()
            return False
        if not busy:
            self._skip_to_next()
        return True

    def _where(self) -> str:
        """Says where in the run this is."""
        at = f"{self.clock.now():.3f} s"
        if self._acting is None:
            return f"between steps at {at}"
        return f"engine {self.engines.index(self._acting)}, step {self._acting.steps}, at {at}"

    def _is_over(self) -> bool:
        """Says whether nobody asks any more; what was asked still gets its answer."""
        plan = self.plan
        return (
            (plan.steps is not None and self.rounds >= plan.steps)
            or (plan.seconds is not None and self.clock.now() >= plan.seconds)
            or not (self._due or self._asking)
            or not self._running()
        )

    def _running(self) -> list[MeteredEngine]:
        return [engine for engine in self.engines if not engine.stopped]

    def _skip_to_next(self) -> None:
        moments = [time_s for time_s, *_ in (*self._due[:1], *self._moments[:1])]
        if moments:
            self.clock.advance(min(moments) - self.clock.now())

    def _watch_idleness(self, worked: bool) -> None:
        self._idle_rounds = 0 if worked or not self._running() else self._idle_rounds + 1
        if self._idle_rounds >= _IDLE_ROUNDS_MAX:
            if self._calm:
                raise OracleError(f"nothing was computed for {self._idle_rounds} calm steps")
            self._end_faults()
            self._idle_rounds = 0

    def _come_to_rest(self) -> None:
        for engine in self._running():
            engine.drain()
        for engine in self.engines:
            engine.close()

    # ------------------------------------------------------------ clients

    def _plan_turn(self, talk: _Talk, time_s: float) -> None:
        heapq.heappush(self._due, (time_s, next(self._numbers), talk))

    def _ask(self) -> None:
        while self._due and self._due[0][0] <= self.clock.now():
            _, _, talk = heapq.heappop(self._due)
            turn = talk.conversation.turns[talk.turn]
            talk.said += turn.question
            talk.engine = self._choose(talk)
            request = talk.engine.add(talk.said, turn.answer_tokens)
            talk.account = talk.engine.accounts[str(request.request_id)]
            self._asking.append(talk)

    def _choose(self, talk: _Talk) -> MeteredEngine:
        running = self._running()
        if self.plan.sticky:
            return running[talk.conversation.number % len(running)]
        return self._route.choice(running)

    def _hear(self) -> None:
        """Lets clients read their answers, and think of what to ask next."""
        asking, self._asking = self._asking, []
        for talk in asking:
            assert talk.account is not None
            assert talk.engine is not None
            request = talk.account.request
            if not request.finished and not talk.engine.stopped:
                self._asking.append(talk)
                continue
            talk.turn += 1
            if not talk.account.answered or talk.turn == len(talk.conversation.turns):
                self.talks_over += 1
                continue
            talk.said += [
                request.text.token(request.prompt_tokens + index)
                for index in range(request.received)
            ]
            think_s = talk.conversation.turns[talk.turn].think_s
            self._plan_turn(talk, self.clock.now() + think_s)

    # ------------------------------------------------------------ faults

    def _hit_moments(self) -> None:
        while self._moments and self._moments[0][0] <= self.clock.now():
            _, fault, effect = self._moments.pop(0)
            for index, engine in enumerate(self.engines):
                if fault.concerns(index) and not engine.stopped:
                    _hit(engine, fault, effect)

    def _revive(self) -> None:
        """Lets jobs go on where nothing holds them any more."""
        for world, engine in zip(self._worlds, self.engines, strict=True):
            for source, pool in zip(world.rank_faults, engine.site.pools, strict=True):
                if not source.holds():
                    pool.revive(for_good=self._calm)

    def _end_faults(self) -> None:
        self._calm = True
        for world in self._worlds:
            world.end_faults()


def _trace_file(path: Path | None, engine: int) -> TraceFile | None:
    """Opens the trace of an engine, whose number goes into the name."""
    if path is None:
        return None
    return TraceFile(path.with_name(f"{path.stem}-{engine}{path.suffix}"), _TRACE_BYTES_MAX)


def _tell(error: Exception) -> str:
    """Says what was raised: checks explain themselves, anything else begins with its type."""
    return str(error) if isinstance(error, OracleError) else f"{type(error).__name__}: {error}"


def _hit(engine: MeteredEngine, fault: Fault, effect: Effect) -> None:
    stores = engine.world.stores
    if fault.rank is not None:
        stores = stores[fault.rank : fault.rank + 1]
    match effect.kind:
        case EffectKind.RESET:
            engine.reset()
        case EffectKind.FORGET:
            engine.forget()
        case EffectKind.EVICT:
            for store in stores:
                store.evict_oldest(effect.count)
        case EffectKind.SPOIL:
            for store in stores:
                store.spoil_newest(effect.count)

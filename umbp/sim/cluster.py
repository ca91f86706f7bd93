# SPDX-License-Identifier: Apache-2.0
"""Worlds of engines that run beside each other: one time, one store or several, planned faults."""

import random
from collections.abc import Sequence

from umbp.fsm import Core, CoreLimits
from umbp.sim.clock import VirtualClock
from umbp.sim.faults import FaultSource, LookupFault, TransferFault
from umbp.sim.journal import Journal, WatchedCore
from umbp.sim.models import SimModel
from umbp.sim.schedule import Effect, EffectKind, Fault
from umbp.sim.site import SimWorld
from umbp.trace.recorder import TracedCore, TraceFile


class ScheduledFaults(FaultSource):
    """Faults by the clock instead of a plan.

    Args:
        seed: Decides which jobs a share of less than all hits, and how long things take.
        clock: The time.
        faults: What may go wrong here.
    """

    def __init__(self, seed: int, clock: VirtualClock, faults: Sequence[Fault]) -> None:
        super().__init__(seed)
        self._clock = clock
        self._scheduled = faults
        self._share = random.Random(seed)
        self._over = False

    def end(self) -> None:
        """Ends all faults for good."""
        self._over = True

    def holds(self) -> bool:
        """Says whether jobs that are begun now may stay open for long."""
        return any(effect.holds for effect in self._effects())

    def load(self) -> TransferFault:
        """Draws the fault of a load."""
        return self._transfer(EffectKind.LOADS)

    def store(self) -> TransferFault:
        """Draws the fault of a store."""
        return self._transfer(EffectKind.STORES)

    def lookup(self) -> LookupFault:
        """Draws the fault of a lookup."""
        effect = self._draw(EffectKind.LOOKUPS)
        if effect is None:
            return LookupFault.NONE
        return effect.fault if isinstance(effect.fault, LookupFault) else LookupFault.SILENT

    def evicts(self) -> bool:
        """Draws whether an object of a hit is evicted."""
        return self._draw(EffectKind.VANISH, or_dead=False) is not None

    def _transfer(self, kind: EffectKind) -> TransferFault:
        effect = self._draw(kind)
        if effect is None:
            return TransferFault.NONE
        return effect.fault if isinstance(effect.fault, TransferFault) else TransferFault.HELD

    def _effects(self) -> list[Effect]:
        if self._over:
            return []
        now_s = self._clock.now()
        return [
            effect for fault in self._scheduled if fault.lasts_at(now_s) for effect in fault.effects
        ]

    def _draw(self, kind: EffectKind, *, or_dead: bool = True) -> Effect | None:
        for effect in self._effects():
            dead = or_dead and effect.kind is EffectKind.DEAD
            if (dead or effect.kind is kind) and self._share.random() < effect.share:
                return effect
        return None


class _TracedWatchedCore(TracedCore, WatchedCore):
    """Both watched and traced."""


class ClusterWorld(SimWorld):
    """The world of one engine among several.

    Args:
        model: The model of all engines.
        index: Index of the engine.
        faults: Everything that goes wrong anywhere.
        journal: Takes what happens to requests.
        seed: Decides what is drawn.
        capacity_objects: Objects that the store of one rank holds.
        beside: The world of the engine before; None: this is the first one.
        shared_store: Use the store of that one.
        trace: Takes the trace of the engine's core; None: nobody wants one.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        model: SimModel,
        *,
        index: int,
        faults: Sequence[Fault],
        journal: Journal,
        seed: int,
        capacity_objects: int,
        beside: "ClusterWorld | None",
        shared_store: bool,
        trace: TraceFile | None = None,
    ) -> None:
        super().__init__(model, capacity_objects=capacity_objects)
        if beside is not None:
            self.clock = beside.clock
            self.request_numbers = beside.request_numbers
            if shared_store:
                self.oracle, self.stores = beside.oracle, beside.stores
        self._journal = journal
        self._trace = trace
        own = [fault for fault in faults if fault.concerns(index)]
        # Numbers apart enough that no two sources draw alike.
        first = (seed * 1000 + index) * 100
        self.engine_faults = ScheduledFaults(first, self.clock, own)
        self.faults = self.engine_faults
        self.rank_faults = [
            ScheduledFaults(
                first + 1 + rank,
                self.clock,
                [fault for fault in own if fault.concerns(index, rank)],
            )
            for rank in range(model.options.ranks)
        ]

    def faults_of(self, rank: int) -> FaultSource:
        """Returns what goes wrong in the pool of a rank."""
        return self.rank_faults[rank]

    def make_core(self, limits: CoreLimits, epoch: int) -> Core:
        """Makes the core of the engine, under watch."""
        if self._trace is None:
            return WatchedCore(limits, epoch, self._journal)
        core = _TracedWatchedCore(limits, epoch, self._journal)
        core.trace_to(self._trace)
        return core

    def end_faults(self) -> None:
        """Ends all faults of the engine for good."""
        for source in (self.engine_faults, *self.rank_faults):
            source.end()

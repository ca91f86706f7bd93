# SPDX-License-Identifier: Apache-2.0
"""What engines share, and what one engine's connector objects find when vLLM makes them."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import attrs

from umbp.connector.support import why_load_async
from umbp.errors import UsageError
from umbp.fsm import Core, CoreLimits
from umbp.sim.clock import VirtualClock
from umbp.sim.faults import FaultSource
from umbp.sim.memory import RankMemory
from umbp.sim.models import SimModel
from umbp.sim.oracle import ObjectOracle
from umbp.sim.pool import SimPool
from umbp.sim.store import SimStore


class SimWorld:
    """Time, faults and objects. Engines of one world share them.

    Engines that share a store must not be reset: each counts its epochs by itself.

    Args:
        model: The model of all its engines.
        seed: Decides all faults.
        capacity_objects: Objects that the store of one rank holds.
    """

    def __init__(self, model: SimModel, *, seed: int = 0, capacity_objects: int = 256) -> None:
        self.model = model
        self.clock = VirtualClock()
        self.faults = FaultSource(seed)
        self.oracle = ObjectOracle(model)
        self.stores = [
            SimStore(capacity_objects, self.oracle.check) for _ in range(model.options.ranks)
        ]
        # Engines number their requests together, so that logs name each of them once.
        self.request_numbers = itertools.count()

    def faults_of(self, rank: int) -> FaultSource:
        """Returns what goes wrong in the pool of a rank."""
        return self.faults

    def make_core(self, limits: CoreLimits, epoch: int) -> Core:
        """Makes the core of an engine."""
        return Core(limits, epoch)


@attrs.frozen(eq=False)
class SimSite:
    """Where the connector objects of one engine are made.

    Attributes:
        world: Time, faults and objects.
        memories: KV memory of each rank.
        pools: The pool of each rank.
    """

    world: SimWorld
    memories: Sequence[RankMemory]
    pools: Sequence[SimPool]

    @classmethod
    def make(cls, world: SimWorld) -> "SimSite":
        """Makes the memory and the pools of one engine."""
        model, options = world.model, world.model.options
        reason = why_load_async(model.vllm_config, model.kv_cache_config)
        synchronous = not options.load_async and reason is None
        memories = [
            RankMemory(world.model.groups, options.num_blocks, rank)
            for rank in range(options.ranks)
        ]
        pools = [
            SimPool(
                memory=memory,
                store=store,
                clock=world.clock,
                faults=world.faults_of(rank),
                timeout_s=options.timeout_ms / 1000,
                synchronous=synchronous,
            )
            for rank, (memory, store) in enumerate(zip(memories, world.stores, strict=True))
        ]
        return cls(world, memories, pools)


_sites: list[SimSite] = []


@contextlib.contextmanager
def building_at(site: SimSite) -> Iterator[None]:
    """Gives the connector objects that vLLM makes in this block their site."""
    _sites.append(site)
    try:
        yield
    finally:
        _sites.pop()


def current_site() -> SimSite:
    """Returns the site at which an engine is being built.

    Raises:
        UsageError: None is.
    """
    if not _sites:
        raise UsageError("SimStoreConnector is made by SimEngine only")
    return _sites[-1]

# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, as data: same plan, same seed, same faults."""

import enum
import random
from collections.abc import Sequence

import attrs


class TransferFault(enum.Enum):
    """How a job ends on one rank."""

    NONE = "none"
    """As it should, soon."""
    LATE = "late"
    """As it should, after its deadline: it began before, and a native call takes its time."""
    LOST = "lost"
    """Nothing of it is done: no object can be read, or none can be stored."""
    PARTIAL = "partial"
    """One object fails, the others are done."""
    QUEUE_FULL = "queue_full"
    """It is never begun, and says so at once."""
    SILENT = "silent"
    """It is never begun, and says so only when it is cancelled or past its deadline."""
    HELD = "held"
    """It is begun, and ends only when ``SimPool.revive`` is called, whatever its deadline."""
    HUNG = "hung"
    """As ``HELD``; but once it has outlived the timeout, the pool says that it is stalled."""

    LEFT = "left"
    """As ``HELD``; but once it has outlived the timeout, the pool says so, and begins nothing until
    it has ended. The engine goes on without it."""


class LookupFault(enum.Enum):
    """How a lookup is answered."""

    NONE = "none"
    """As it should, soon."""
    SLOW = "slow"
    """As it should, about when nobody waits for it any more."""
    SILENT = "silent"
    """Never."""
    UNKNOWN = "unknown"
    """That nobody can say."""
    WRONG_SIZE = "wrong_size"
    """With too few or too many places."""
    RAISE = "raise"
    """With a ``BackendError`` from the client."""


@attrs.frozen
class FaultPlan:
    """Which faults there are, and how often.

    Attributes:
        loads: Faults of loads; each job on each rank draws one. One that should be frequent is
            listed more than once.
        stores: The same for stores.
        lookups: Faults of lookups.
        latency_s: Shortest and longest time that a job takes where nothing goes wrong.
        arrival_s: Shortest and longest time from the moment when a load can fail no more, and says
            so, to its end.
        evict_percent: How often an object of a hit is evicted before it can be loaded.
    """

    loads: Sequence[TransferFault] = (TransferFault.NONE,)
    stores: Sequence[TransferFault] = (TransferFault.NONE,)
    lookups: Sequence[LookupFault] = (LookupFault.NONE,)
    latency_s: tuple[float, float] = (0.0, 0.03)
    arrival_s: tuple[float, float] = (0.0, 0.01)
    evict_percent: int = 0


CALM = FaultPlan()
"""Nothing goes wrong."""

LATE_ARRIVALS = FaultPlan(arrival_s=(0.0, 0.12))
"""Nothing goes wrong, and the last bytes of a load come many steps after it was said that they
will: in that time everything else can happen to its request."""

TRANSFERS = {fault.value: fault for fault in TransferFault}
LOOKUPS = {fault.value: fault for fault in LookupFault}


class FaultSource:
    """Draws faults from a plan.

    Args:
        seed: Decides every draw.
    """

    def __init__(self, seed: int) -> None:
        self.plan = CALM
        self._random = random.Random(seed)

    def load(self) -> TransferFault:
        """Draws the fault of a load."""
        return self._random.choice(self.plan.loads)

    def store(self) -> TransferFault:
        """Draws the fault of a store."""
        return self._random.choice(self.plan.stores)

    def lookup(self) -> LookupFault:
        """Draws the fault of a lookup."""
        return self._random.choice(self.plan.lookups)

    def latency_s(self) -> float:
        """Draws how long something takes."""
        return self._random.uniform(*self.plan.latency_s)

    def arrival_s(self) -> float:
        """Draws how long the last bytes of a load take that can fail no more."""
        return self._random.uniform(*self.plan.arrival_s)

    def evicts(self) -> bool:
        """Draws whether an object of a hit is evicted."""
        return self._random.random() * 100 < self.plan.evict_percent

    def index(self, count: int) -> int:
        """Draws a number below ``count``."""
        return self._random.randrange(count)

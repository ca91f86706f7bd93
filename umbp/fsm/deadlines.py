# SPDX-License-Identifier: Apache-2.0
"""Which deadline is next, in O(log n) per change and O(1) per look.

A deadline that moves later costs nothing: the entry that is already queued finds out when its time
comes and queues itself again. So a subject has one entry that counts, at its ``wake_s``. Other
entries are dead; they are swept out when they are the greater part.
"""

import heapq
import math
from typing import Final, Generic, Protocol, TypeVar

_SWEEP_MIN: Final = 64


class Timed(Protocol):
    """A subject with a deadline: a request or a lease.

    Attributes:
        deadline_s: When it is due; infinity for never.
        wake_s: When the queue looks at it next; written by the queue only.
    """

    deadline_s: float
    wake_s: float

    @property
    def number(self) -> int:
        """No other subject ever has it, so that no two subjects are compared."""


TimedT = TypeVar("TimedT", bound=Timed)


class DeadlineQueue(Generic[TimedT]):
    """Deadlines of many subjects."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, TimedT]] = []
        self._dead = 0

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, subject: TimedT, deadline_s: float) -> None:
        """Sets the deadline of a subject; infinity for none."""
        subject.deadline_s = deadline_s
        wake_s = subject.wake_s
        if deadline_s < wake_s:
            subject.wake_s = deadline_s
            heapq.heappush(self._entries, (deadline_s, subject.number, subject))
        elif deadline_s == math.inf:
            subject.wake_s = math.inf
        else:
            return
        if wake_s != math.inf:
            self._dead += 1
            if self._dead > _SWEEP_MIN and 2 * self._dead > len(self._entries):
                self._sweep()

    def due(self, now_s: float) -> TimedT | None:
        """Returns one subject whose deadline has passed and clears its deadline; None if none."""
        entries = self._entries
        while entries and entries[0][0] <= now_s:
            wake_s, _, subject = heapq.heappop(entries)
            if wake_s != subject.wake_s:
                self._dead -= 1
                continue
            subject.wake_s = math.inf
            if subject.deadline_s <= now_s:
                subject.deadline_s = math.inf
                return subject
            self.set(subject, subject.deadline_s)
        return None

    def _sweep(self) -> None:
        # Ended subjects would otherwise stay in memory until their last deadline comes round.
        self._entries = [entry for entry in self._entries if entry[0] == entry[2].wake_s]
        heapq.heapify(self._entries)
        self._dead = 0

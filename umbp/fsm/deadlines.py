# SPDX-License-Identifier: Apache-2.0
"""Which deadline is next, in O(log n) per change and O(1) per look.

A deadline that moves later costs nothing: the entry that is already queued finds out when its time
comes and queues itself again. So a subject has one entry that counts, at its ``wake_s``.
"""

import heapq
import math
from typing import Final, Protocol

_SWEEP_MIN: Final = 64


class Timed(Protocol):
    """A subject with a deadline: a request or a lease."""

    deadline_s: float
    wake_s: float


class DeadlineQueue:
    """Deadlines of many subjects."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Timed]] = []
        self._sequence = 0
        self._cleared = 0

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, subject: Timed, deadline_s: float) -> None:
        """Sets the deadline of a subject; infinity for none."""
        subject.deadline_s = deadline_s
        if deadline_s < subject.wake_s:
            self._push(subject, deadline_s)
        elif deadline_s == math.inf:
            self._cleared += 1
            if self._cleared > _SWEEP_MIN and 2 * self._cleared > len(self._entries):
                self._sweep()

    def due(self, now_s: float) -> Timed | None:
        """Returns one subject whose deadline has passed and clears its deadline; None if none."""
        entries = self._entries
        while entries and entries[0][0] <= now_s:
            wake_s, _, subject = heapq.heappop(entries)
            if wake_s != subject.wake_s:
                continue  # An earlier entry was queued later and has taken over.
            subject.wake_s = math.inf
            if subject.deadline_s <= now_s:
                subject.deadline_s = math.inf
                return subject
            if subject.deadline_s != math.inf:
                self._push(subject, subject.deadline_s)
        return None

    def _push(self, subject: Timed, wake_s: float) -> None:
        subject.wake_s = wake_s
        self._sequence += 1
        heapq.heappush(self._entries, (wake_s, self._sequence, subject))

    def _sweep(self) -> None:
        # Ended subjects would otherwise stay in memory until their last deadline comes round.
        kept = []
        for entry in self._entries:
            wake_s, _, subject = entry
            if wake_s != subject.wake_s:
                continue
            if subject.deadline_s == math.inf:
                subject.wake_s = math.inf
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._entries = kept
        self._cleared = 0

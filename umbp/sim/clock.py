# SPDX-License-Identifier: Apache-2.0
"""Time that passes only when somebody says so, and what happens meanwhile."""

import heapq
import itertools
from collections.abc import Callable
from typing import Final

TICK_S: Final = 1e-6
"""Whoever waits, waits at least this long: a rest of zero would never end."""


class VirtualClock:
    """Seconds since the simulation began, and what is planned for later.

    Events of one moment happen in the order in which they were planned.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        """Returns the time."""
        return self._now_s

    def call_at(self, time_s: float, event: Callable[[], None]) -> None:
        """Plans an event; one that lies in the past happens with the next move of the clock."""
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def call_in(self, delay_s: float, event: Callable[[], None]) -> None:
        """Plans an event ``delay_s`` from now."""
        self.call_at(self._now_s + delay_s, event)

    def advance(self, seconds: float) -> None:
        """Lets time pass, and everything planned for it happen."""
        self._advance_to(self._now_s + max(seconds, TICK_S))

    def advance_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Lets time pass event by event until ``done()``, for at most ``seconds``."""
        limit_s = self._now_s + max(seconds, TICK_S)
        while not done():
            if not self._events or self._events[0][0] > limit_s:
                self._advance_to(limit_s)
                return
            self._advance_to(self._events[0][0])

    def rest(self, seconds: float) -> None:
        """Lets ``seconds`` pass, or more: until something happens, if anything is planned."""
        planned_s = self._events[0][0] if self._events else 0.0
        self._advance_to(max(planned_s, self._now_s + max(seconds, TICK_S)))

    def _advance_to(self, time_s: float) -> None:
        while self._events and self._events[0][0] <= time_s:
            due_s, _, event = heapq.heappop(self._events)
            self._now_s = max(self._now_s, due_s)
            event()
        self._now_s = max(self._now_s, time_s)

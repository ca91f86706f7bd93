# SPDX-License-Identifier: Apache-2.0
"""Durations that wait to be reported, in bounded number."""

from collections.abc import Callable
from typing import Final

SAMPLES_MAX: Final = 1024
"""Durations of one kind that one report carries: at one report per second, far more transfers than
an engine makes; each costs the frontend about a microsecond."""


class Samples:
    """Durations in seconds, taken out by whoever reports them.

    Attributes:
        dropped: Durations that found no room since the beginning.
    """

    __slots__ = ("_seconds", "dropped")

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, seconds: float) -> None:
        """Notes a duration, or counts that there is no room for it."""
        if len(self._seconds) < SAMPLES_MAX:
            self._seconds.append(seconds)
        else:
            self.dropped += 1

    def take(self) -> list[float]:
        """Returns all, oldest first, and forgets them."""
        seconds, self._seconds = self._seconds, []
        return seconds


class LookupMeter:
    """What is measured of lookups.

    Args:
        clock: Seconds, monotonic.

    Attributes:
        clock: The same.
        seconds: How long answers took.
        failed: Lookups of which nobody could say what exists.
    """

    __slots__ = ("clock", "failed", "seconds")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds = Samples()
        self.failed = 0

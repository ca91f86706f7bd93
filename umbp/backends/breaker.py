# SPDX-License-Identifier: Apache-2.0
"""Says when to stop asking somebody who has gone silent."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Breaker:
    """Open while one call has been silent for too long. Thread-safe.

    One thread makes calls, one at a time, and says so; others ask whether they should wait for it.

    Args:
        name: Who is called, for the log.
        timeout_s: How long a call may be silent.
        clock: Seconds, monotonic.

    Attributes:
        opened_count: How often it has opened.
    """

    def __init__(
        self, name: str, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.opened_count = 0
        self._name = name
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._begun_s: float | None = None
        self._is_open = False

    def begin(self) -> None:
        """Says that a call begins."""
        with self._lock:
            self._begun_s = self._clock()

    def end(self) -> None:
        """Says that the call has returned, however it did. Closes the breaker."""
        with self._lock:
            begun_s, self._begun_s = self._begun_s, None
            was_open, self._is_open = self._is_open, False
        if was_open and begun_s is not None:
            silent_s = self._clock() - begun_s
            logger.warning("%s answers again, after %.1f s", self._name, silent_s)

    def remaining_s(self) -> float | None:
        """Returns how long the present call may still be silent; None when there is no call."""
        with self._lock:
            if self._begun_s is None:
                return None
            return max(0.0, self._begun_s + self._timeout_s - self._clock())

    @property
    def is_open(self) -> bool:
        """Whether to go without; found out when it is asked."""
        with self._lock:
            if self._is_open:
                return True
            if self._begun_s is None or self._clock() - self._begun_s < self._timeout_s:
                return False
            self._is_open = True
            self.opened_count += 1
        logger.warning(
            "%s has been silent for %.0f ms; lookups miss until it answers",
            self._name,
            self._timeout_s * 1000,
        )
        return True

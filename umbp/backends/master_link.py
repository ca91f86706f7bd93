# SPDX-License-Identifier: Apache-2.0
"""A client of a master that may die, stop and come back.

MORI's client finds a master that was started anew by itself, and tells it again what its node
holds. What it does not do is say that there is none: without a master it answers False. So after a
call in which nothing succeeded, the user calls ``doubt``, and if there is no master, the link
refuses its client until there is one again. That costs a look now and then, and no call.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from umbp.backends.master_address import MasterAddress, Presence
from umbp.backends.mori_client import MoriClient
from umbp.backends.mori_link import LinkedClient
from umbp.errors import BackendUnavailable

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 1.0
"""Least time between two looks."""

LOOK_TIMEOUT_S: Final = 0.2
"""How long a master has to answer a greeting. On one host it takes 0.3 ms."""


class MasterLink:
    """Gives out one client while there is a master. Thread-safe.

    Args:
        address: The master.
        client: The client.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        address: MasterAddress,
        client: MoriClient,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._client: MoriClient | None = client
        self._clock = clock
        self._lock = threading.Lock()
        self._presence = Presence.ANSWERS
        self._next_look_s = 0.0
        self._return_count = 0

    def client(self) -> LinkedClient:
        """Returns the client. Takes up to twice ``LOOK_TIMEOUT_S`` when there was no master.

        Raises:
            BackendUnavailable: There is no master, or the link is closed.
        """
        with self._lock:
            if self._presence is not Presence.ANSWERS:
                self._look()
            if self._client is None:
                raise BackendUnavailable("the client is closed")
            if self._presence is not Presence.ANSWERS:
                raise BackendUnavailable(f"the master at {self._address} {self._presence.value}")
            return LinkedClient(self._client, self._return_count)

    def doubt(self, used: LinkedClient) -> bool:
        """Says that nothing succeeded with a client; returns whether another try may do better."""
        with self._lock:
            self._look()
            return self._presence is Presence.ANSWERS and used.generation != self._return_count

    def close(self, *, is_busy: bool = False) -> None:
        """Gives the client up. Its node leaves, unless the master is stopped or a call runs."""
        # Not under the lock: a look may take its time. It is wanted whatever the last one said.
        client, self._client = self._client, None
        if client is None:
            return
        if is_busy or self._address.presence(LOOK_TIMEOUT_S) is Presence.SILENT:
            client.abandon()
        else:
            client.close()

    def _look(self) -> None:
        if self._clock() < self._next_look_s:
            return
        before, self._presence = self._presence, self._address.presence(LOOK_TIMEOUT_S)
        self._next_look_s = self._clock() + LOOK_INTERVAL_S
        if before is self._presence:
            return
        if self._presence is Presence.ANSWERS:
            self._return_count += 1
            logger.warning("the master at %s answers again", self._address)
        elif before is Presence.ANSWERS:
            logger.warning(
                "the master at %s %s; KV is computed until it is back",
                self._address,
                self._presence.value,
            )

# SPDX-License-Identifier: Apache-2.0
"""A client of a standalone server that may die, stop and come back.

When MORI's server is gone, its client answers False to everything, at once and for ever: what was
registered with the old server is not known to the next. Nothing says so. The link looks at the
server's socket instead (``umbp.backends.server_address``):

* Before every use it looks whether the socket is still the same file. If not, there is another
  server: a new client is made, and what the client needs is prepared again.
* After a call in which nothing succeeded the user calls ``doubt``. If nobody listens, no further
  call is made until somebody does: each would make gRPC wait longer before it connects again. If
  the same server is there, everything is prepared again, at most every few seconds.

Every method but ``doubt`` may block for as long as a server is stopped: it is called on a thread
that something watches.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import attrs

from umbp.backends.mori_client import MoriClient
from umbp.backends.server_address import FileIdentity, ServerAddress
from umbp.errors import BackendError, BackendUnavailable

logger = logging.getLogger(__name__)

PREPARE_INTERVAL_S: Final = 5.0
"""Least time between two preparations with the same server. One of 64 regions takes 25 ms."""

BACKOFF_S_MIN: Final = 0.5
BACKOFF_S_MAX: Final = 10.0
"""Time between attempts to connect to a server that listens and does not answer."""


@attrs.define
class LinkCounters:
    """What a link has seen. Counters only rise.

    Attributes:
        connections: Clients that were made.
        preparations: Times that memory was registered.
        losses: Times that the server was found to be gone.
    """

    connections: int = 0
    preparations: int = 0
    losses: int = 0


@attrs.frozen
class LinkedClient:
    """A client, and which preparation it is good for.

    Attributes:
        client: The client.
        generation: Rises with every preparation.
    """

    client: MoriClient
    generation: int


class MoriLink:
    """Makes clients of one server, one at a time. Thread-safe.

    Args:
        address: The server.
        connect: Makes a client of an address, within a bounded time.
        prepare: Makes a client usable, for example by registering memory.
        clock: Seconds, monotonic.

    Attributes:
        counters: What the link has seen.
    """

    def __init__(
        self,
        address: ServerAddress,
        connect: Callable[[str], MoriClient],
        prepare: Callable[[MoriClient], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = LinkCounters()
        self._address = address
        self._connect = connect
        self._prepare = prepare
        self._clock = clock
        self._lock = threading.Lock()
        self._client: MoriClient | None = None
        self._identity: FileIdentity | None = None
        self._is_doubted = False
        self._prepared_s = 0.0
        self._retry_s = 0.0
        self._backoff_s = BACKOFF_S_MIN
        self._is_closed = False

    def client(self) -> LinkedClient:
        """Returns a client of the present server, prepared.

        Raises:
            BackendUnavailable: There is none, or the link is closed.
            BackendError: The server does not accept what must be prepared.
        """
        with self._lock:
            if self._is_closed:
                raise BackendUnavailable("the pool is closed")
            identity = self._address.identity()
            is_same = self._client is not None and identity == self._identity
            if not is_same or self._is_doubted:
                self._renew(identity, is_same=is_same)
            assert self._client is not None
            return LinkedClient(self._client, self.counters.preparations)

    def doubt(self, used: LinkedClient) -> bool:
        """Says that nothing succeeded with a client; returns whether another try may do better."""
        identity = self._address.identity()
        if self.counters.preparations != used.generation or identity != self._identity:
            return True
        is_there = self._address.listener() is not None
        is_due = self._clock() - self._prepared_s >= PREPARE_INTERVAL_S
        if not is_there or is_due:
            self._is_doubted = True
        return is_there and is_due

    def close(self) -> None:
        """Gives the client up. Never waits for a call that runs."""
        self._is_closed = True
        self._drop()

    def _renew(self, identity: FileIdentity | None, *, is_same: bool) -> None:
        now_s = self._clock()
        if identity is None or self._address.listener() is None:
            if self._client is not None:
                self.counters.losses += 1
                logger.warning(
                    "the server at %s is gone; KV is computed until it is back", self._address
                )
            self._drop()
            raise BackendUnavailable(f"no server listens at {self._address}")
        if now_s < self._retry_s:
            raise BackendUnavailable(f"the server at {self._address} does not answer")
        try:
            if not is_same:
                self._drop()
                self._client = self._connect(self._address.spelled(self.counters.connections))
                self.counters.connections += 1
                self._identity = identity
            assert self._client is not None
            self._prepare(self._client)
        except BackendError:
            self._drop()
            self._retry_s = self._clock() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_S_MAX)
            # A failed attempt leaves gRPC waiting as well.
            self.counters.connections += 1
            raise
        if not is_same and self.counters.preparations:
            logger.warning("connected to the server at %s again", self._address)
        self.counters.preparations += 1
        self._prepared_s = self._clock()
        self._backoff_s = BACKOFF_S_MIN
        self._is_doubted = False

    def _drop(self) -> None:
        client, self._client = self._client, None
        self._identity = None
        if client is not None:
            client.close()

# SPDX-License-Identifier: Apache-2.0
"""Lookup servers of this very process, so that a client beside them can ask by a call.

With one rank, vLLM runs the worker in the scheduler's process. A question over the socket then
goes to a thread of the same interpreter and back, and waits twice for the interpreter's lock. The
frames of a call are those of a socket: what is checked and what is counted is the same.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol


class LocalServer(Protocol):
    """A server that can be asked on the caller's thread."""

    def answer_here(self, frame: bytes) -> bytes | None:
        """Returns the reply to a question; None when that has to go over the socket."""


class LocalServers:
    """Servers by the path that they serve. Thread-safe.

    A server is here for as long as its thread serves, which keeps it alive as well.
    """

    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """Begins anew, as a forked child must: it has neither its parent's threads nor its pool."""
        # Another thread of the parent may have held the lock when it forked.
        self._lock = threading.Lock()
        self._servers: dict[Path, LocalServer] = {}

    def announce(self, path: Path, server: LocalServer) -> None:
        """Lets clients of this process ask a server, which owns the path."""
        with self._lock:
            self._servers[path] = server

    def withdraw(self, path: Path, server: LocalServer) -> None:
        """Ends that, unless somebody else owns the path by now. Idempotent."""
        with self._lock:
            if self._servers.get(path) is server:
                del self._servers[path]

    def ask(self, paths: Sequence[Path], frame: bytes) -> list[bytes] | None:
        """Asks the servers of all paths.

        Args:
            paths: Where the ranks serve.
            frame: The question.

        Returns:
            The reply of each; None unless every one of them is here and replies at once.
        """
        with self._lock:
            servers = [self._servers[path] for path in paths if path in self._servers]
        if len(servers) < len(paths):
            return None
        replies = []
        for server in servers:
            reply = server.answer_here(frame)
            if reply is None:
                return None
            replies.append(reply)
        return replies


LOCAL_SERVERS: Final = LocalServers()
"""Those of this process."""

os.register_at_fork(after_in_child=LOCAL_SERVERS.forget_all)

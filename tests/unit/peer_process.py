# SPDX-License-Identifier: Apache-2.0
"""Processes that tests send functions to, forked from one that has loaded MORI.

What MORI and the HIP runtime read from the environment, they read once in a process, and only when
they first need it. A process that is killed takes its pool with it, as an engine's does.
"""

import importlib.util
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest
from fork_server import start_fork_server

PATIENCE_S: Final = 60.0
_PRELOADED: Final = [
    "torch",
    "mori",
    "mori.cpp",
    "mori.umbp",
    "umbp.backends.distributed",
    "umbp.backends.standalone",
    "umbp.testing.conformance",
]

_context = multiprocessing.get_context("forkserver")


def require_mori(problem_of: Callable[[], str | None]) -> None:
    """Skips the tests of a folder that MORI cannot be loaded for, or fails where it must be.

    Args:
        problem_of: Says in a peer why MORI cannot be loaded; None if it can.
    """
    is_required = os.environ.get("UMBP_REQUIRE_MORI") == "1"
    if importlib.util.find_spec("mori") is None and not is_required:
        pytest.skip("MORI is not installed")
    peer = PeerProcess({})
    problem = peer.run(problem_of)
    peer.kill()
    if problem is not None and is_required:
        pytest.fail(f"UMBP_REQUIRE_MORI is 1, but {problem}", pytrace=False)
    if problem is not None:
        pytest.skip(problem)


class PeerError(AssertionError):
    """What a peer raised."""


class PeerProcess:
    """A process that calls the functions it is sent. It keeps what they put into globals.

    Args:
        environment: Variables that it has beside those of the tests.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        start_fork_server(_PRELOADED, {})
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(
            target=_serve, args=(theirs, dict(environment)), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def process_id(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls a function of a module in the process, and waits for it."""
        self.start(function, *arguments, **keywords)
        return self.result()

    def start(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """Calls a function; ``result`` waits for it."""
        self._connection.send((function, arguments, keywords))

    def result(self) -> Any:
        assert self._connection.poll(PATIENCE_S), "a peer does not answer"
        try:
            failure, result = self._connection.recv()
        except EOFError as error:
            raise PeerError("a peer died") from error
        if failure is not None:
            raise PeerError(failure)
        return result

    def end(self) -> float:
        """Lets the process end by itself, as an engine does, and returns how long that took."""
        begun_s = time.monotonic()
        self._connection.close()
        self._process.join(PATIENCE_S)
        assert self._process.exitcode == 0, self._process.exitcode
        return time.monotonic() - begun_s

    def kill(self) -> None:
        if self._process.is_alive():
            os.kill(self.process_id, signal.SIGKILL)
        self._process.join(PATIENCE_S)
        self._connection.close()


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    while True:
        try:
            function, arguments, keywords = connection.recv()
        except (EOFError, OSError):
            return
        try:
            reply: tuple[str | None, Any] = (None, function(*arguments, **keywords))
        except BaseException:
            reply = (traceback.format_exc(), None)
        connection.send(reply)

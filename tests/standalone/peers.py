# SPDX-License-Identifier: Apache-2.0
"""Processes that are clients of a server, and the servers.

A client's KV memory is shared with the server, and the stand-in HIP runtime learns only once in a
process that ordinary memory may be. So pools live in processes of their own, forked from one that
has loaded MORI, and tests send them functions.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import attrs

from umbp.backends.mori_server import ServerProcess, ServerSettings, wait_until_listening
from umbp.backends.server_address import ServerAddress, parse_address

PATIENCE_S: Final = 60.0
SHARING: Final = {"UMBP_HIP_HOST_DEVICES": "1", "UMBP_HIP_HOST_REMAP": "1"}
"""Lets the stand-in HIP runtime pass ordinary memory for a device's."""

_context = multiprocessing.get_context("forkserver")


def start_fork_server() -> None:
    """Starts the process that peers are forked from."""
    before = dict(os.environ)
    os.environ.update(SHARING)
    try:
        _context.set_forkserver_preload(["torch", "mori", "mori.cpp", "mori.umbp", "peer_pool"])
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


class PeerError(AssertionError):
    """What a peer raised."""


class Peer:
    """A process that calls the functions it is sent. It keeps what they put into ``STATE``."""

    def __init__(self) -> None:
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs,), daemon=True)
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


def _serve(connection: Connection) -> None:
    os.environ.update(SHARING)
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


def _state(task: Path) -> str:
    """Returns a thread's state; the name before it may contain anything."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@attrs.define(eq=False)
class Server:
    """A server that tests stop, kill and start again at one address."""

    folder: Path
    settings: dict[str, Any] = attrs.field(factory=dict)
    process: ServerProcess | None = None

    @property
    def address(self) -> ServerAddress:
        return parse_address(f"unix://{self.folder}/s.grpc.sock")

    @property
    def options(self) -> dict[str, Any]:
        """Options of an engine that uses this server."""
        return {"address": str(self.address)}

    def start(self) -> None:
        settings = {"capacity_bytes": 64 << 20, "read_lease_ms": 500, **self.settings}
        before = dict(os.environ)
        os.environ.update(SHARING)
        try:
            self.address.make_private()
            self.process = ServerProcess(
                ServerSettings(address=self.address, **settings), self.folder / "server.log"
            )
        finally:
            os.environ.clear()
            os.environ.update(before)
        wait_until_listening(
            self.address, time.monotonic() + PATIENCE_S, self.process.require_running
        )

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.process_id, number)

    def stop(self) -> None:
        """Stops the server, and waits until each of its threads has: one may be late."""
        self.signal(signal.SIGSTOP)
        assert self.process is not None
        tasks = Path(f"/proc/{self.process.process_id}/task")
        while any(_state(task) != "T" for task in tasks.iterdir()):
            time.sleep(0.001)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the server as a crash does; its socket files stay."""
        assert self.process is not None
        self.signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def end(self) -> None:
        if self.process is not None:
            self.process.stop()

# SPDX-License-Identifier: Apache-2.0
"""Processes that are clients of a server, and the servers.

A client's KV memory is shared with the server, and the stand-in HIP runtime learns only once in a
process that ordinary memory may be. So pools live in processes of their own, forked from one that
has loaded MORI, and tests send them functions.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any, Final

import attrs
from peer_process import PATIENCE_S, PeerProcess

from umbp.backends.mori_server import ServerProcess, ServerSettings, wait_until_listening
from umbp.backends.server_address import ServerAddress, parse_address

SHARING: Final = {"UMBP_HIP_HOST_DEVICES": "1", "UMBP_HIP_HOST_REMAP": "1"}
"""Lets the stand-in HIP runtime pass ordinary memory for a device's."""


class Peer(PeerProcess):
    """A process whose memory the stand-in HIP runtime may share."""

    def __init__(self) -> None:
        super().__init__(SHARING)


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

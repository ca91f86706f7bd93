# SPDX-License-Identifier: Apache-2.0
"""Masters that tests stop, kill and start again at one address."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import attrs
from peer_process import PATIENCE_S

from umbp.backends.child_process import ChildProcess
from umbp.backends.master_address import MasterAddress
from umbp.backends.mori_master import MasterSettings, start_master
from umbp.backends.mori_node import wait_for_master

HEARTBEAT_TTL_S = 2
CAPACITY_BYTES = 16 << 20


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _state(task: Path) -> str:
    """Returns a thread's state; the name before it may contain anything."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@attrs.define(eq=False)
class Master:
    """A master on this host that misses a dead node after four seconds."""

    log_path: Path
    settings: dict[str, Any] = attrs.field(factory=dict)
    address: MasterAddress = attrs.field(factory=lambda: MasterAddress("127.0.0.1", free_port()))
    process: ChildProcess | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of an engine that uses this master."""
        return {
            "master_address": str(self.address),
            "trust_network": True,
            "capacity_bytes": CAPACITY_BYTES,
        }

    def start(self) -> None:
        settings = {
            "heartbeat_ttl_s": HEARTBEAT_TTL_S,
            "missed_heartbeats": 2,
            "metrics_port": free_port(),
            **self.settings,
        }
        self.process = start_master(MasterSettings(address=self.address, **settings), self.log_path)
        wait_for_master(self.address, time.monotonic() + PATIENCE_S, self.process.require_running)

    def stop(self) -> None:
        """Stops the master, and waits until each of its threads has: one may be late."""
        assert self.process is not None
        os.kill(self.process.process_id, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.process_id}/task")
        while any(_state(task) != "T" for task in tasks.iterdir()):
            time.sleep(0.001)

    def go_on(self) -> None:
        assert self.process is not None
        os.kill(self.process.process_id, signal.SIGCONT)

    def kill(self) -> None:
        """Ends the master as a crash does."""
        assert self.process is not None
        os.kill(self.process.process_id, signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def end(self) -> None:
        if self.process is not None:
            self.process.stop()

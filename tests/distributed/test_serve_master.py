# SPDX-License-Identifier: Apache-2.0
"""``umbp serve master`` runs MORI's master until it is told to stop."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import node_calls
import peer_calls
import pytest
from masters import CAPACITY_BYTES, Master, free_port
from peer_process import PATIENCE_S, PeerProcess

from umbp.backends.base import TransferOutcome
from umbp.backends.master_address import MasterAddress, Presence

Serve = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Runs ``umbp serve master``."""
    started: list[subprocess.Popen[str]] = []

    def run(address: str, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "umbp.cli.main", "serve", "master", "--address", address]
        command += ["--metrics-port", str(free_port()), *arguments]
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield run
    for process in started:
        process.terminate()
        process.communicate()


def test_it_lists_objects_until_it_is_told_to_stop(
    serve: Serve, peer: PeerProcess, tmp_path: Path
) -> None:
    address = MasterAddress("127.0.0.1", free_port())
    log = tmp_path / "master.log"
    process = serve(str(address), "--log-file", str(log), "--log-level", "info")
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C ends it" in line:
            break
    found = re.search(rf"process (\d+) lists objects at {address}, metrics at port \d+", line)
    assert found is not None, line
    environment = Path(f"/proc/{found[1]}/environ").read_bytes().split(b"\0")
    assert b"UMBP_ROUTE_PUT_NODE_AFFINITY=local" in environment
    options = {
        "master_address": str(address),
        "trust_network": True,
        "capacity_bytes": CAPACITY_BYTES,
    }
    peer.run(node_calls.open_pool, options)
    peer.run(peer_calls.fill, {0: 1})
    assert peer.run(peer_calls.store, {"a": 0}).outcome is TransferOutcome.DONE

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert not Path(f"/proc/{found[1]}").exists()
    assert address.presence(1.0) is Presence.GONE
    assert log.stat().st_size > 0


def test_it_refuses_what_cannot_work_and_says_when_the_master_ends(
    serve: Serve, master: Master
) -> None:
    refusals = {
        str(master.address): f"address {master.address} is in use; end who listens there",
        f"0.0.0.0:{free_port()}": "add --trust-network if all who can reach it",
        "nowhere": "--address is 'nowhere', expected HOST:PORT",
    }
    for process, words in [(serve(address), words) for address, words in refusals.items()]:
        _, message = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, words in message) == (2, True), message
        assert message.count("\n") == 1

    process = serve(f"127.0.0.1:{free_port()}")
    assert process.stdout is not None
    line = next(line for line in process.stdout if "Ctrl-C ends it" in line)
    found = re.search(r"process (\d+) lists", line)
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    _, message = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "ended with status -9" in message) == (1, True)

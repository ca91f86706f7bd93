# SPDX-License-Identifier: Apache-2.0
"""Starting MORI's server: by ``umbp serve``, and by an engine with ``auto_start``."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peer_calls
import peer_pool
import pytest
from peers import PATIENCE_S, SHARING, Peer, Server

from umbp.backends.base import TransferOutcome
from umbp.backends.server_address import ServerAddress, parse_address

DONE = TransferOutcome.DONE
CAPACITY_BYTES = 32 << 20


@pytest.fixture
def address(folder: Path) -> Iterator[ServerAddress]:
    """An address at which nothing is left running."""
    address = parse_address(f"unix://{folder}/own/s.grpc.sock")
    yield address
    process_id = address.listener()
    if process_id:
        os.kill(process_id, signal.SIGKILL)


@pytest.fixture
def serve(address: ServerAddress) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Runs ``umbp serve standalone``."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "umbp.cli.main", "serve", "standalone"]
        command += ["--address", str(address), "--capacity-bytes", str(CAPACITY_BYTES)]
        started.append(
            subprocess.Popen(
                [*command, *arguments],
                env={**os.environ, **SHARING},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_until_gone(process_id: int) -> None:
    """Waits until a process is neither there nor a zombie that somebody should have waited for."""
    give_up_s = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{process_id}").exists():
        assert time.monotonic() < give_up_s, f"process {process_id} is still there"
        time.sleep(0.01)


def test_umbp_serve_serves_until_it_is_told_to_stop(
    serve: Callable[..., "subprocess.Popen[str]"], address: ServerAddress, peer: Peer
) -> None:
    process = serve("--read-lease-ms", "7000", "--log-level", "info")
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C ends it" in line:
            break
    found = re.search(r"process (\d+) serves 33554432 bytes, read lease 7000 ms", line)
    assert found is not None, line
    server_id = int(found[1])
    environment = Path(f"/proc/{server_id}/environ").read_bytes().split(b"\0")
    assert b"UMBP_DRAM_READ_LEASE_MS=7000" in environment
    assert address.path.parent.stat().st_mode & 0o777 == 0o700
    assert address.beside(".log").stat().st_size > 0

    peer.run(peer_pool.open_pool, {"address": str(address), "read_lease_ms": 7000})
    assert peer.run(peer_calls.store, {"a": 0}).outcome is DONE

    second = serve()
    _, message = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 2
    assert f"process {process.pid} has started or is starting the server at" in message

    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    wait_until_gone(server_id)
    assert not any(path.exists() for path in address.socket_files)


def test_umbp_serve_replaces_stale_sockets_and_refuses_live_ones(
    serve: Callable[..., "subprocess.Popen[str]"], server: Server, address: ServerAddress
) -> None:
    process = serve("--address", str(server.address))
    _, message = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert server.process is not None
    assert f"process {server.process.process_id} listens at {server.address}" in message
    server.kill()
    assert all(path.exists() for path in server.address.socket_files)

    process = serve("--address", str(server.address), "--log-file", "-")
    assert process.stdout is not None
    assert any("Ctrl-C ends it" in line for line in process.stdout)
    server_id = server.address.listener()
    assert server_id
    os.kill(server_id, signal.SIGKILL)
    _, message = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "ended with status -9" in message) == (1, True)


def auto_start(address: ServerAddress, **more: Any) -> dict[str, Any]:
    return {
        "address": str(address),
        "auto_start": True,
        "capacity_bytes": CAPACITY_BYTES,
        "read_lease_ms": 2000,
        "startup_timeout_ms": 30_000,
        **more,
    }


def test_the_first_engine_starts_the_server_and_it_outlives_all(
    address: ServerAddress, start_peer: Callable[[], Peer]
) -> None:
    engines = [start_peer(), start_peer()]
    for engine in engines:
        engine.start(peer_pool.open_pool, auto_start(address))
    for engine in engines:
        engine.result()
    server_id = address.listener()
    assert server_id
    environment = Path(f"/proc/{server_id}/environ").read_bytes().split(b"\0")
    assert b"UMBP_DRAM_READ_LEASE_MS=2000" in environment
    engines[0].run(peer_calls.fill, {0: 1})
    assert engines[0].run(peer_calls.store, {"a": 0}).outcome is DONE
    engines[0].end()
    engines[1].kill()

    third = start_peer()
    third.run(peer_pool.open_pool, auto_start(address))
    assert address.listener() == server_id
    assert third.run(peer_calls.load, {"a": 0}).outcome is DONE
    os.kill(server_id, signal.SIGKILL)
    wait_until_gone(server_id)


def test_a_file_of_another_kind_is_left_alone(address: ServerAddress, peer: Peer) -> None:
    address.make_private()
    address.path.mkdir()
    kind, message, _ = peer.run(peer_pool.opening_error, auto_start(address))
    assert kind == "ConfigError"
    assert message == f"server socket {address.path} is another kind of file; move it away"


def test_a_server_that_does_not_come_up_is_explained(address: ServerAddress, peer: Peer) -> None:
    address.make_private()
    peer.run(peer_pool.break_servers)
    kind, message, _ = peer.run(
        peer_pool.opening_error, auto_start(address, startup_timeout_ms=500)
    )
    assert kind == "BackendUnavailable"
    assert message.startswith(f"no server at {address}: ")
    assert f"{address.beside('.log')} ends with: " in message
    assert "\n" not in message


def test_a_directory_that_others_may_enter_is_refused(
    address: ServerAddress, peer: Peer, server: Server
) -> None:
    for options in (auto_start(address), server.options):
        directory = parse_address(options["address"]).path.parent
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)
        kind, message, _ = peer.run(peer_pool.opening_error, options)
        assert kind == "ConfigError"
        assert f"server socket directory {directory} has mode 0755 and must have 0700" in message
        directory.chmod(0o700)

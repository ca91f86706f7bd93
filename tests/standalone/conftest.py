# SPDX-License-Identifier: Apache-2.0
"""Tests on MORI's real standalone server. They need MORI and a HIP runtime, ROCm's or the stand-in.

Where ``UMBP_REQUIRE_MORI`` is 1 they fail when MORI cannot be loaded; elsewhere they are skipped.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peer_pool
import pytest
from peer_process import require_mori
from peers import Peer, Server

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.mori)


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    require_mori(peer_pool.mori_problem)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: a socket's path has few bytes."""
    with tempfile.TemporaryDirectory(prefix="umbp-") as name:
        yield Path(name)


@pytest.fixture
def start_server(folder: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(**settings: Any) -> Server:
        server = Server(folder / str(len(servers)), settings)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    return start_server()


@pytest.fixture
def start_peer() -> Iterator[Callable[[], Peer]]:
    peers: list[Peer] = []

    def start() -> Peer:
        peers.append(Peer())
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


@pytest.fixture
def peer(start_peer: Callable[[], Peer]) -> Peer:
    return start_peer()

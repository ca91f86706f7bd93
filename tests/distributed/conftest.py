# SPDX-License-Identifier: Apache-2.0
"""Tests on MORI's real master, with nodes in processes of their own. They need MORI and a HIP
runtime, ROCm's or the stand-in.

Where ``UMBP_REQUIRE_MORI`` is 1 they fail when MORI cannot be loaded; elsewhere they are skipped.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import node_calls
import pytest
from masters import Master
from peer_process import PeerProcess, require_mori

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.mori)


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    require_mori(node_calls.mori_problem)


@pytest.fixture
def start_master(tmp_path: Path) -> Iterator[Callable[..., Master]]:
    masters: list[Master] = []

    def start(**settings: Any) -> Master:
        masters.append(Master(tmp_path / f"master-{len(masters)}.log", settings))
        masters[-1].start()
        return masters[-1]

    yield start
    for master in masters:
        master.end()


@pytest.fixture
def master(start_master: Callable[..., Master]) -> Master:
    return start_master()


@pytest.fixture
def start_peer() -> Iterator[Callable[[], PeerProcess]]:
    peers: list[PeerProcess] = []

    def start() -> PeerProcess:
        peers.append(PeerProcess({}))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


@pytest.fixture
def peer(start_peer: Callable[[], PeerProcess]) -> PeerProcess:
    return start_peer()

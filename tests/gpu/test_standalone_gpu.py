# SPDX-License-Identifier: Apache-2.0
"""Two processes share objects on one GPU through MORI's real server, by memory handles."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import gpu_peer
import pytest
import torch
from device_kv import PATIENCE_S, Shape

from umbp.backends.mori_library import MoriLibrary
from umbp.backends.mori_server import ServerProcess, ServerSettings, wait_until_listening
from umbp.backends.server_address import parse_address
from umbp.backends.staged_transfers import SLOT_BYTES, SLOTS_PER_RING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

COUNT = 40
"""Objects of each group: 28 MiB in the larger, more than a slot."""


@pytest.fixture(scope="module")
def options(mori: MoriLibrary) -> Iterator[dict[str, Any]]:
    """A server, as the options of its clients."""
    with tempfile.TemporaryDirectory(prefix="umbp-") as folder:
        address = parse_address(f"unix://{folder}/s.grpc.sock")
        address.make_private()
        settings = ServerSettings(address=address, capacity_bytes=1 << 30, read_lease_ms=5000)
        server = ServerProcess(settings, Path(folder) / "server.log")
        try:
            wait_until_listening(address, time.monotonic() + PATIENCE_S, server.require_running)
            yield {"address": str(address), "read_lease_ms": 5000}
        finally:
            server.stop()


Call = Callable[..., Any]


@pytest.fixture
def start_peer() -> Iterator[Callable[[], Call]]:
    """Starts processes, and returns what calls a function of ``gpu_peer`` in one."""
    # Spawned: a process that was forked from one that has used the GPU cannot.
    context = multiprocessing.get_context("spawn")
    executors: list[ProcessPoolExecutor] = []

    def start() -> Call:
        executor = ProcessPoolExecutor(max_workers=1, mp_context=context)
        executors.append(executor)
        return lambda function, *arguments: executor.submit(function, *arguments).result(PATIENCE_S)

    yield start
    for executor in executors:
        executor.shutdown()


@pytest.mark.parametrize("shape", [Shape.PER_LAYER, Shape.GROUPS], ids=lambda shape: shape.name)
@pytest.mark.parametrize("device_staging", [None, False])
def test_what_one_process_stores_another_loads_and_back(
    options: dict[str, Any],
    mori: MoriLibrary,
    start_peer: Callable[[], Call],
    shape: Shape,
    device_staging: bool | None,
) -> None:
    first, second = start_peer(), start_peer()
    chosen = options | {"device_staging": device_staging}
    device = f"cuda:{torch.cuda.current_device()}"
    for peer in (first, second):
        shared = peer(gpu_peer.open_pool, chosen, device, shape)
        if mori.is_on_cuda and device_staging is None:
            assert shared == (SLOTS_PER_RING * SLOT_BYTES,)
    peer_seed = 10 * list(Shape).index(shape) + (device_staging is None)
    seeds = 100 + peer_seed, 200 + peer_seed
    blocks = list(range(COUNT, 0, -1))
    assert first(gpu_peer.store, seeds[0], COUNT) == "done"
    assert all(second(gpu_peer.contains, seeds[0], COUNT))
    assert second(gpu_peer.load, seeds[0], COUNT, blocks) == ("done", True)
    assert second(gpu_peer.store, seeds[1], COUNT) == "done"
    assert first(gpu_peer.load, seeds[1], COUNT, blocks) == ("done", True)
    first(gpu_peer.close)
    # What a process has stored stays when it ends.
    assert second(gpu_peer.load, seeds[0], COUNT, blocks) == ("done", True)
    second(gpu_peer.close)


def test_the_scheduler_side_connects_without_memory(
    options: dict[str, Any], start_peer: Callable[[], Call]
) -> None:
    start_peer()(gpu_peer.open_scheduler_side, options)

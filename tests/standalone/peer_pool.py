# SPDX-License-Identifier: Apache-2.0
"""What tests do in a peer: a pool of the standalone backend with KV memory, and a lookup client."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer_calls import NAMESPACE, keep_lookup, keep_pool, keys, kv, pool, site
from peer_process import PATIENCE_S
from peers import Server

from umbp.backends import mori_server, standalone
from umbp.backends.base import (
    KVMemory,
    MemoryRegion,
    ObjectLayout,
    SchedulerSite,
)
from umbp.backends.mori_client import shared_names
from umbp.backends.mori_link import PREPARE_INTERVAL_S
from umbp.backends.mori_lookup import MoriLookup
from umbp.backends.standalone import StandaloneBackend, StandalonePool
from umbp.backends.standalone_options import StandaloneOptions
from umbp.errors import BackendUnavailable
from umbp.testing.conformance import CHECKS, Harness, PoolCase
from umbp.testing.conformance_room import check_eviction_under_load


def mori_problem() -> str | None:
    """Says why MORI cannot be loaded."""
    try:
        StandaloneBackend.check_available()
    except BackendUnavailable as error:
        return str(error)
    return None


# ---------------------------------------------------------------- transfers


def open_pool(
    options: Mapping[str, Any], transfer_timeout_ms: int = int(PATIENCE_S * 1000)
) -> float:
    """Opens and registers this process's pool, and returns how long that took."""
    begun_s = time.monotonic()
    keep_pool(
        StandaloneBackend.open_worker(StandaloneOptions(**options), site(transfer_timeout_ms))
    )
    return time.monotonic() - begun_s


def opening_error(options: Mapping[str, Any]) -> tuple[str, str, float]:
    """Returns how opening a pool fails: the error's class and message, and after how long."""
    begun_s = time.monotonic()
    try:
        open_pool(options)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun_s
    raise AssertionError("the pool opened")


def lose_registrations() -> None:
    """Has the server forget this process's memory, and lets enough time pass to notice."""
    linked = pool()._link.client()
    linked.client._client().deregister_memory(kv().memory.regions[0].address)
    pool()._link._prepared_s -= PREPARE_INTERVAL_S


def slow_get(names: Mapping[str, int], takes_s: float) -> tuple[int, ...]:
    """Loads with a server that takes its time, and returns which objects failed."""
    client = pool()._link.client().client
    native = client._native

    class Slow:
        def batch_get_ranges_into_ptr(self, *arguments: Any) -> Any:
            time.sleep(takes_s)
            return native.batch_get_ranges_into_ptr(*arguments)

    client._native = Slow()
    try:
        blocks = np.array(list(names.values()), dtype=np.int64)
        moved = client.load(shared_names(keys(names)), pool()._columns[0], blocks)
    finally:
        client._native = native
    return moved.failed


def opening_error_of_small_memory(options: Mapping[str, Any]) -> tuple[str, str, float]:
    """Returns how registering memory from the C library's heap fails."""
    begun_s = time.monotonic()
    tensor = torch.zeros(4096, dtype=torch.int8)
    region = MemoryRegion(tensor, tensor.data_ptr(), 4096, "cpu", None)
    layout = ObjectLayout(0, 1, [region.address], [4096], [4096])
    opened = StandaloneBackend.open_worker(StandaloneOptions(**options), site())
    try:
        opened.register(KVMemory((region,), (layout,)))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun_s
    raise AssertionError("the memory was registered")


def break_servers() -> None:
    """Lets servers that this process starts lack the libraries that they need."""
    os.environ["LD_LIBRARY_PATH"] = ""
    mori_server.runtime_directories = list


# ---------------------------------------------------------------- lookups


def open_lookup(options: Mapping[str, Any], *, timeout_ms: int = 10_000, ranks: int = 1) -> None:
    keep_lookup(
        StandaloneBackend.open_lookup(
            StandaloneOptions(**options), SchedulerSite(NAMESPACE, ranks, "test", timeout_ms)
        )
    )


# ---------------------------------------------------------------- conformance


def conform(check: Callable[..., None], folder: str) -> None:
    """Runs a check of the conformance suite. Each pool of a rank 0 gets a server of its own."""
    servers: list[Server] = []
    # What is leased cannot be evicted, and a tiny pool would soon have nothing else. So the lease
    # is one that any load outlives, and the client is not told: in these checks nothing evicts
    # while a load runs, but for the one where that is the point.
    lease_ms, told_ms = (500, 500) if check is check_eviction_under_load else (1, 60_000)
    standalone.server_read_lease_ms = lambda _: None

    def open_pool(case: PoolCase) -> StandalonePool:
        if case.site.rank == 0:
            settings = {
                "capacity_bytes": case.capacity_bytes,
                "page_size_bytes": 512,
                "high_watermark": 0.85,
                "low_watermark": 0.8,
                "read_lease_ms": lease_ms,
            }
            servers.append(Server(Path(folder) / str(len(servers)), settings))
            servers[-1].start()
        options = StandaloneOptions(
            queue_limit=case.queue_limit,
            transfer_threads=case.transfer_threads,
            read_lease_ms=told_ms,
            **servers[-1].options,
        )
        return StandaloneBackend.open_worker(options, case.site)

    def open_lookup_client(where: SchedulerSite) -> MoriLookup:
        return StandaloneBackend.open_lookup(StandaloneOptions(**servers[-1].options), where)

    def kill() -> None:
        servers[-1].kill()

    def restart() -> None:
        servers[-1].start()

    harness = Harness(open_pool, open_lookup_client, kill, restart)
    try:
        check(open_pool if check in CHECKS else harness, PATIENCE_S)
    finally:
        for server in servers:
            server.end()

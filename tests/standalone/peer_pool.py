# SPDX-License-Identifier: Apache-2.0
"""What tests do in a peer: a pool of the standalone backend with KV memory, and a lookup client."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import Server

from umbp.backends import mori_server, standalone
from umbp.backends.base import (
    JobResult,
    KVMemory,
    LookupAnswer,
    LookupPart,
    LookupQuestion,
    MemoryRegion,
    ObjectLayout,
    SchedulerSite,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerSite,
)
from umbp.backends.mori_client import shared_names
from umbp.backends.mori_link import PREPARE_INTERVAL_S
from umbp.backends.mori_lookup import LookupStats, MoriLookup
from umbp.backends.standalone import StandaloneBackend, StandalonePool
from umbp.backends.standalone_options import StandaloneOptions
from umbp.errors import BackendUnavailable
from umbp.keys import KeySpace
from umbp.testing.conformance import CHECKS, Harness, PoolCase
from umbp.testing.conformance_room import check_eviction_under_load
from umbp.testing.kv_memory import GroupShape, HostKVMemory, KVShape, make_kv_memory

PATIENCE_S = 60.0
KIB = 1024
GROUP = GroupShape(head_count=2, plane_bytes=(4 * KIB,) * 8)
OBJECT_BYTES = GROUP.object_bytes
BLOCKS = 16
NAMESPACE = bytes(range(16))
HASH_BYTES = 8

STATE: dict[str, Any] = {}
"""What this process has."""


def site(transfer_timeout_ms: int = int(PATIENCE_S * 1000)) -> WorkerSite:
    return WorkerSite(
        rank=0,
        rank_count=1,
        device_type="cpu",
        device_index=None,
        instance="test",
        transfer_timeout_ms=transfer_timeout_ms,
    )


def mori_problem() -> str | None:
    """Says why MORI cannot be loaded."""
    try:
        StandaloneBackend.check_available()
    except BackendUnavailable as error:
        return str(error)
    return None


def pool() -> StandalonePool:
    opened: StandalonePool = STATE["pool"]
    return opened


def kv() -> HostKVMemory:
    memory: HostKVMemory = STATE["kv"]
    return memory


# ---------------------------------------------------------------- transfers


def open_pool(
    options: Mapping[str, Any], transfer_timeout_ms: int = int(PATIENCE_S * 1000)
) -> float:
    """Opens and registers this process's pool, and returns how long that took."""
    begun_s = time.monotonic()
    STATE["kv"] = make_kv_memory(KVShape.LBH, [GROUP], block_count=BLOCKS)
    STATE["pool"] = StandaloneBackend.open_worker(
        StandaloneOptions(**options), site(transfer_timeout_ms)
    )
    pool().register(kv().memory)
    return time.monotonic() - begun_s


def opening_error(options: Mapping[str, Any]) -> tuple[str, str, float]:
    """Returns how opening a pool fails: the error's class and message, and after how long."""
    begun_s = time.monotonic()
    try:
        open_pool(options)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun_s
    raise AssertionError("the pool opened")


def fill(blocks: Mapping[int, int]) -> dict[int, bytes]:
    """Fills blocks from seeds."""
    return {block: kv().fill(0, block, seed) for block, seed in blocks.items()}


def keys(names: Mapping[str, int], epoch: int = 0) -> list[bytes]:
    hashes = [name.encode().ljust(HASH_BYTES, b".") for name in names]
    return KeySpace(NAMESPACE).keys(hashes, epoch=epoch, group_index=0, rank=0)


def begin(kind: str, names: Mapping[str, int], deadline_s: float = PATIENCE_S) -> int:
    """Starts a job on this process's pool and returns its id."""
    job_id: int = STATE.setdefault("job_id", 0) + 1
    STATE["job_id"] = job_id
    blocks = np.array(list(names.values()), dtype=np.int64)
    part = TransferPart(0, keys(names), blocks)
    job = TransferJob(job_id, (part,), time.monotonic() + deadline_s)
    (pool().store if kind == "store" else pool().load)(job)
    return job_id


def results(count: int) -> list[JobResult]:
    """Waits for that many results."""
    found: list[JobResult] = []
    give_up_s = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < give_up_s, f"only {found}"
        found += pool().poll()
        time.sleep(0.0005)
    return found


def move(kind: str, names: Mapping[str, int]) -> JobResult:
    begin(kind, names)
    return results(1)[0]


def store(names: Mapping[str, int]) -> JobResult:
    return move("store", names)


def load(names: Mapping[str, int]) -> JobResult:
    return move("load", names)


def read(block: int) -> bytes:
    return kv().read(0, block)


def wipe() -> None:
    kv().wipe()


def close_pool(timeout_s: float) -> float:
    """Closes the pool and returns how long that took."""
    begun_s = time.monotonic()
    pool().close(timeout_s)
    return time.monotonic() - begun_s


def until_done(kind: str, names: Mapping[str, int]) -> float:
    """Tries a job until it is done, as requests that come one after the other do."""
    begun_s = time.monotonic()
    while move(kind, names).outcome is not TransferOutcome.DONE:
        assert time.monotonic() < begun_s + PATIENCE_S
        time.sleep(0.02)
    return time.monotonic() - begun_s


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


def lookup() -> MoriLookup:
    client: MoriLookup = STATE["lookup"]
    return client


def open_lookup(options: Mapping[str, Any], *, timeout_ms: int = 10_000, ranks: int = 1) -> None:
    logging.getLogger("umbp").addHandler(_Lines())
    STATE["lookup"] = StandaloneBackend.open_lookup(
        StandaloneOptions(**options), SchedulerSite(NAMESPACE, ranks, "test", timeout_ms)
    )


def ask(names: Mapping[str, int], epoch: int = 0) -> tuple[int, float]:
    """Asks, and returns the question's id and how long that took."""
    question_id: int = STATE.setdefault("question_id", 0) + 1
    STATE["question_id"] = question_id
    hashes = b"".join(name.encode().ljust(HASH_BYTES, b".") for name in names)
    begun_s = time.monotonic()
    lookup().ask(LookupQuestion(question_id, epoch, (LookupPart(0, HASH_BYTES, hashes),)))
    return question_id, time.monotonic() - begun_s


def answers(wait_s: float) -> tuple[list[LookupAnswer], float]:
    """Returns answers, and how long that took."""
    begun_s = time.monotonic()
    found = lookup().answers(wait_s)
    return found, time.monotonic() - begun_s


def look_up(names: Mapping[str, int], epoch: int = 0) -> list[bool] | str:
    """Asks and waits: which blocks there are, or why that is not known."""
    question_id, _ = ask(names, epoch)
    found, _ = answers(PATIENCE_S)
    (answer,) = found
    assert answer.question_id == question_id
    return answer.reason if answer.present is None else answer.present[0].tolist()


def until_found(names: Mapping[str, int]) -> float:
    """Asks until all blocks are there, and returns how long that took."""
    begun_s = time.monotonic()
    while look_up(names) != [True] * len(names):
        assert time.monotonic() < begun_s + PATIENCE_S
        time.sleep(0.02)
    return time.monotonic() - begun_s


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        STATE.setdefault("lines", []).append((record.name, record.getMessage()))


def log_lines(logger: str) -> list[str]:
    """Returns what was logged since a lookup was opened."""
    return [line for name, line in STATE.get("lines", []) if name == logger]


def lookup_stats() -> LookupStats:
    return lookup().stats()


def close_lookup() -> float:
    begun_s = time.monotonic()
    lookup().close()
    return time.monotonic() - begun_s


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

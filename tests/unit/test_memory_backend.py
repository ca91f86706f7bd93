# SPDX-License-Identifier: Apache-2.0
"""The memory backend: every rule of the contract, and what it does when things go wrong."""

import mmap
import threading
import time

import attrs
import pytest

from umbp.backends.base import (
    BACKEND_API,
    KVMemory,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerPool,
    WorkerSite,
)
from umbp.backends.memory import MemoryBackend, MemoryOptions, MemoryPool
from umbp.backends.registry import find_backend
from umbp.errors import BackendError, BackendStalled, ConfigError
from umbp.testing.conformance import CHECKS
from umbp.testing.kv_memory import GroupShape, KVShape, make_kv_memory

PATIENCE_S = 30.0
DONE = TransferOutcome.DONE
FAILED = TransferOutcome.FAILED
GROUP = GroupShape(head_count=2, plane_bytes=(192, 320))
SIZE = GROUP.object_bytes
SITE = WorkerSite(
    rank=0,
    rank_count=1,
    device_type="cpu",
    device_index=None,
    instance="test",
    transfer_timeout_ms=int(PATIENCE_S * 1000),
)


def make(case):
    options = MemoryOptions(
        capacity_bytes=case.capacity_bytes,
        queue_limit=case.queue_limit,
        transfer_threads=case.transfer_threads,
    )
    return MemoryBackend.open_worker(options, case.site)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check):
    check(make)


class Bench:
    """A registered pool with room for ``object_count`` objects, and its KV memory."""

    def __init__(self, object_count=8, site=SITE):
        self.kv = make_kv_memory(KVShape.LHB, [GROUP], block_count=16)
        self.pool = MemoryBackend.open_worker(
            MemoryOptions(capacity_bytes=SIZE * object_count), site
        )
        self.pool.register(self.kv.memory)
        self.job_count = 0

    def start(self, kind, keys, blocks, group_index=0):
        self.job_count += 1
        part = TransferPart(group_index, keys, blocks)
        getattr(self.pool, kind)(
            TransferJob(self.job_count, (part,), time.monotonic() + PATIENCE_S)
        )

    def answer(self):
        give_up_s = time.monotonic() + PATIENCE_S
        while not (results := self.pool.poll()):
            assert time.monotonic() < give_up_s
            time.sleep(0.001)
        (result,) = results
        return result

    def run(self, kind, keys, blocks, group_index=0):
        self.start(kind, keys, blocks, group_index)
        return self.answer()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.pool.close(PATIENCE_S)


class HeldCopier:
    """A copier that waits before every copy, or raises."""

    def __init__(self, copier, error=None):
        self.copier = copier
        self.error = error
        self.entered = threading.Event()
        self.leave = threading.Event()

    def store(self, *arguments):
        self.hold()
        self.copier.store(*arguments)

    def load(self, *arguments):
        self.hold()
        self.copier.load(*arguments)

    def hold(self):
        if self.error is not None:
            raise self.error
        self.entered.set()
        assert self.leave.wait(PATIENCE_S)


def test_it_is_found_by_name_and_is_a_backend():
    assert find_backend("memory") is MemoryBackend
    assert MemoryBackend.api == BACKEND_API
    assert MemoryBackend.pool_in_worker
    assert MemoryBackend.options_type is MemoryOptions
    assert isinstance(Bench().pool, WorkerPool)


def test_total_capacity_is_shared_by_the_ranks():
    site = attrs.evolve(SITE, rank_count=3)
    pool = MemoryBackend.open_worker(MemoryOptions(total_capacity_bytes=1 << 20), site)
    assert pool.stats().capacity_bytes == (1 << 20) // 3


def test_more_memory_than_there_is_is_refused_at_start():
    with pytest.raises(ConfigError, match="option capacity_bytes is 1152921504606846976"):
        MemoryBackend.open_worker(MemoryOptions(capacity_bytes=1 << 60), SITE)


def test_nearly_all_of_the_capacity_holds_objects(bench):
    capacity = bench.pool.stats().capacity_bytes
    for number in range(100):
        assert bench.run("store", [b"%d" % number], [0]).outcome is DONE
    stats = bench.pool.stats()
    assert stats.object_count * SIZE >= 0.95 * capacity
    assert stats.used_bytes <= capacity
    assert stats.evicted_count == 100 - stats.object_count


def test_a_store_longer_than_the_pool_keeps_its_first_objects(bench):
    keys = [b"%d" % number for number in range(12)]
    contents = [bench.kv.fill(0, block, block) for block in range(12)]
    result = bench.run("store", keys, range(12))
    assert result.outcome is FAILED
    assert result.failed_keys == tuple(keys[8:])
    assert result.bytes_moved == 8 * SIZE
    assert result.reason == "no room for 4 of 12 objects: all is in use"
    assert bench.pool.contains(keys) == [True] * 8 + [False] * 4
    bench.kv.wipe()
    assert bench.run("load", keys[:8], range(8)).outcome is DONE
    assert [bench.kv.read(0, block) for block in range(8)] == contents[:8]


def test_an_object_being_loaded_is_not_evicted(bench):
    keys = [b"%d" % number for number in range(8)]
    bench.run("store", keys, range(8))
    loaded = bench.pool._copier = HeldCopier(bench.pool._copier)
    bench.start("load", keys, range(8))
    assert loaded.entered.wait(PATIENCE_S)
    assert bench.pool._index.reserve([b"new"], SIZE).rejected_keys == (b"new",)
    loaded.leave.set()
    assert bench.answer().outcome is DONE
    assert bench.pool._index.reserve([b"new"], SIZE).keys == (b"new",)


def test_storing_existing_objects_copies_only_the_others(bench):
    contents = [bench.kv.fill(0, block, block) for block in range(3)]
    bench.run("store", [b"a"], [0])
    result = bench.run("store", [b"a", b"b"], [1, 2])
    assert (result.outcome, result.bytes_moved) == (DONE, SIZE)
    assert bench.run("load", [b"a", b"b"], [3, 4]).outcome is DONE
    assert [bench.kv.read(0, 3), bench.kv.read(0, 4)] == [contents[0], contents[2]]


@pytest.mark.parametrize("kind", ["load", "store"])
def test_an_empty_job_is_done(bench, kind):
    assert bench.run(kind, [], []).outcome is DONE


@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.parametrize("blocks", [[16], [-1], [0, 1]], ids=["behind", "before", "too many"])
def test_a_job_that_would_reach_outside_of_its_blocks_fails(bench, kind, blocks):
    bench.run("store", [b"here"], [0])
    key = b"here" if kind == "load" else b"new"
    before = bench.kv.snapshot()
    result = bench.run(kind, [key], blocks)
    assert (result.outcome, result.failed_keys) == (FAILED, (key,))
    assert result.reason.startswith("UsageError: ")
    assert bench.pool.contains([b"new"]) == [False]
    assert bench.kv.snapshot() == before


def test_a_copy_that_fails_leaves_no_object_no_pin_and_no_gap(bench):
    bench.run("store", [b"here"], [0])
    used = bench.pool.stats().used_bytes
    copier = bench.pool._copier
    bench.pool._copier = HeldCopier(copier, OSError("the device is gone"))
    for kind, key in (("store", b"new"), ("load", b"here")):
        result = bench.run(kind, [key], [0])
        assert (result.outcome, result.failed_keys) == (FAILED, (key,))
        assert result.reason == "OSError: the device is gone"
    assert bench.pool.stats().used_bytes == used
    bench.pool._copier = copier
    assert bench.run("store", [b"%d" % number for number in range(8)], range(8)).outcome is DONE
    assert bench.pool.take_evictions() == [b"here"]


def test_a_copy_that_hangs_is_a_stall_and_close_leaves_its_memory():
    bench = Bench(site=attrs.evolve(SITE, transfer_timeout_ms=1))
    held = bench.pool._copier = HeldCopier(bench.pool._copier)
    bench.start("store", [b"a"], [0])
    assert held.entered.wait(PATIENCE_S)
    time.sleep(0.01)
    with pytest.raises(BackendStalled, match="store job 1 "):
        bench.pool.poll()
    bench.pool.close(0.01)
    assert bench.pool._buffer.tensor is not None
    held.leave.set()
    bench.pool.close(PATIENCE_S)
    assert bench.pool._buffer.tensor is None
    assert bench.answer().outcome is DONE


def test_close_forgets_all_and_gives_the_memory_back(bench):
    def resident_bytes():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * mmap.PAGESIZE

    capacity = 32 << 20
    bench.pool = MemoryPool(MemoryOptions(capacity_bytes=capacity, prefault=True), SITE)
    bench.pool.register(bench.kv.memory)
    bench.run("store", [b"a"], [0])
    bench.run("load", [b"a"], [1])
    before = resident_bytes()
    bench.pool.close(PATIENCE_S)
    assert before - resident_bytes() > capacity * 0.9
    assert bench.pool.contains([b"a"]) == [False]
    assert bench.pool.stats().used_bytes == 0
    with pytest.raises(BackendError, match="closed"):
        bench.pool.register(bench.kv.memory)


def test_a_job_before_any_kv_memory_fails():
    pool = MemoryBackend.open_worker(MemoryOptions(capacity_bytes=4096), SITE)
    bench = Bench()
    bench.pool = pool
    result = bench.run("store", [b"a"], [0])
    assert (result.outcome, result.failed_keys) == (FAILED, (b"a",))


def test_kv_memory_is_registered_once(bench):
    with pytest.raises(BackendError, match="already"):
        bench.pool.register(bench.kv.memory)


def test_kv_memory_of_two_devices_is_refused(bench):
    regions = bench.kv.memory.regions
    mixed = (regions[0], attrs.evolve(regions[1], device_type="cuda", device_index=0))
    pool = MemoryBackend.open_worker(MemoryOptions(capacity_bytes=SIZE), SITE)
    with pytest.raises(BackendError, match=r"one device type, got \['cpu', 'cuda'\]"):
        pool.register(KVMemory(mixed, bench.kv.memory.layouts))


def test_a_pool_that_cannot_hold_one_object_is_refused_by_name(bench):
    pool = MemoryBackend.open_worker(MemoryOptions(capacity_bytes=SIZE - 1), SITE)
    with pytest.raises(BackendError) as caught:
        pool.register(bench.kv.memory)
    assert str(caught.value) == (
        f"a pool of {SIZE - 1} bytes per rank cannot hold one object of group 0, {SIZE} bytes; "
        "raise option total_capacity_bytes or capacity_bytes"
    )


def test_a_load_of_one_group_that_may_arrive_is_announced_by_its_copier(bench):
    """Those of several groups are not: the last may still fail when the first is queued."""
    announcing = []
    copier = bench.pool._copier

    class Announcing(HeldCopier):
        def load(self, group_index, block_ids, offsets, announce=None):
            announcing.append(announce is not None)
            if announce is not None:
                announce(self)
            super().load(group_index, block_ids, offsets)

    held = bench.pool._copier = Announcing(copier)
    held.leave.set()
    bench.run("store", [b"a"], [0])
    part = TransferPart(0, [b"a"], [1])
    far_s = time.monotonic() + PATIENCE_S
    bench.pool.load(TransferJob(77, (part,), far_s, may_arrive=True))
    results = bench.pool.poll()
    while len(results) < 2:
        results += bench.pool.poll()
    assert [result.outcome for result in results] == [TransferOutcome.ARRIVING, DONE]
    assert results[0].arrival is held
    bench.pool.load(TransferJob(78, (part, TransferPart(0, [b"a"], [2])), far_s, may_arrive=True))
    assert bench.answer().outcome is DONE
    assert bench.run("load", [b"a"], [3]).outcome is DONE
    assert announcing == [True, False, False, False]

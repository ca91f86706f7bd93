# SPDX-License-Identifier: Apache-2.0
"""The embedded backend on MORI's real client."""

import random
import threading
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from embedded_rig import (
    BLOCKS,
    DONE,
    FAILED,
    GROUP,
    KIB,
    NOT_ATTEMPTED,
    OBJECT_BYTES,
    PATIENCE_S,
    OpenRig,
    site,
)

from umbp.backends import embedded
from umbp.backends.base import PoolStats, TransferPart
from umbp.backends.embedded import EmbeddedBackend, EmbeddedOptions, EmbeddedPool
from umbp.backends.mori_client import PoolBacking, pool_config
from umbp.backends.mori_library import MoriLibrary
from umbp.backends.mori_pages import plan_pool
from umbp.errors import BackendError, ConfigError
from umbp.testing.conformance import CHECKS, LOOKUP_CHECKS, OTHER_SIDE_CHECKS, PoolCase
from umbp.testing.kv_memory import GroupShape, KVShape

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.mori


def keys(count: int, prefix: bytes = b"key", first: int = 0) -> list[bytes]:
    return [b"%s-%06d" % (prefix, index) for index in range(first, first + count)]


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_rules_of_a_backend(check: Callable[..., None]) -> None:
    def make(case: PoolCase) -> EmbeddedPool:
        options = EmbeddedOptions(
            capacity_bytes=case.capacity_bytes,
            queue_limit=case.queue_limit,
            transfer_threads=case.transfer_threads,
        )
        return EmbeddedBackend.open_worker(options, case.site)

    check(make, PATIENCE_S)


def test_the_checks_run_by_its_name(pytester: pytest.Pytester) -> None:
    options = ["-p", "umbp.testing.pytest_plugin", "--umbp-backend", "embedded"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-k", "round_trip or size"]
    result = pytester.runpytest_inprocess(*options, "--pyargs", "umbp.testing.checks")
    result.assert_outcomes(passed=2, deselected=len(CHECKS + LOOKUP_CHECKS + OTHER_SIDE_CHECKS) - 2)


@pytest.mark.parametrize("shape", KVShape)
@pytest.mark.parametrize("page_size_bytes", [None, 1000, 4096, 1 << 20])
def test_every_layout_comes_back_byte_for_byte(
    open_rig: OpenRig, shape: KVShape, page_size_bytes: int | None
) -> None:
    groups = [
        GroupShape(head_count=4, plane_bytes=(4096,) * 6),
        GroupShape(head_count=3, plane_bytes=(1000, 24, 1)),
        GroupShape(head_count=1, plane_bytes=(64 * KIB,)),
    ]
    rig = open_rig(
        groups=groups, shape=shape, capacity_bytes=128 << 20, page_size_bytes=page_size_bytes
    )
    kv = rig.kv
    content = {
        (group, block): kv.fill(group, block, 100 * group + block)
        for group in range(len(groups))
        for block in range(BLOCKS)
    }
    blocks = random.Random(1).sample(range(BLOCKS), 10)
    targets = random.Random(2).sample(range(BLOCKS), 10)

    def parts(block_ids: list[int]) -> tuple[TransferPart, ...]:
        return tuple(
            TransferPart(group, [b"%d/%d" % (group, block) for block in blocks], block_ids)
            for group in range(len(groups))
        )

    rig.pool.store(attrs.evolve(rig.job({}), parts=parts(blocks)))
    assert rig.results(1)[0].outcome is DONE
    kv.wipe()
    rig.pool.load(attrs.evolve(rig.job({}), parts=parts(targets)))
    assert rig.results(1)[0].outcome is DONE
    for group in range(len(groups)):
        for source, target in zip(blocks, targets, strict=True):
            assert kv.read(group, target) == content[group, source]
            kv.write(group, target, bytes(groups[group].object_bytes))
    assert not any(kv.snapshot())


def test_a_full_pool_takes_every_store_and_keeps_what_was_loaded_last(open_rig: OpenRig) -> None:
    rig = open_rig(object_count=40)
    content = rig.fill(range(BLOCKS))
    names = keys(400)
    for begin in range(0, len(names), 8):
        batch = {name: index % BLOCKS for index, name in enumerate(names[begin : begin + 8])}
        assert rig.store(batch).outcome is DONE
        # All of the batch is there: nothing new was evicted for the sake of something old.
        assert all(rig.pool.contains(list(batch)))
        assert rig.load({names[0]: 0}).outcome is DONE
        assert rig.kv.read(0, 0) == content[0]
    found = rig.pool.contains(names)
    assert found[0]
    assert not found[1]
    assert 34 <= sum(found) < 40


def test_a_job_larger_than_the_pool_is_stored_in_pieces(open_rig: OpenRig) -> None:
    rig = open_rig(object_count=8)
    rig.fill(range(BLOCKS))
    names = keys(100)
    result = rig.store({name: index % BLOCKS for index, name in enumerate(names)})
    assert (result.outcome, result.bytes_moved) == (DONE, 100 * OBJECT_BYTES)
    found = rig.pool.contains(names)
    assert found == sorted(found)
    assert 6 <= sum(found) < 8


def test_an_object_larger_than_the_free_share_still_finds_room(open_rig: OpenRig) -> None:
    # 5 % of this pool is a fifth of an object.
    rig = open_rig(object_count=4, page_size_bytes=4 * KIB)
    content = rig.fill(range(BLOCKS))
    for index, name in enumerate(keys(50)):
        assert rig.store({name: index % BLOCKS}).outcome is DONE
        assert rig.load({name: 0}).outcome is DONE
        assert rig.kv.read(0, 0) == content[index % BLOCKS]
        rig.fill([0])


def test_a_pool_smaller_than_two_objects_is_refused(open_rig: OpenRig) -> None:
    with pytest.raises(BackendError, match="no room for two objects of 65536 bytes"):
        open_rig(capacity_bytes=2 * OBJECT_BYTES - 1)


def test_a_capacity_over_memory_is_refused_at_open() -> None:
    with pytest.raises(ConfigError, match="option capacity_bytes is"):
        EmbeddedBackend.open_worker(EmbeddedOptions(capacity_bytes=1 << 50), site())


def test_memory_is_registered_once(open_rig: OpenRig) -> None:
    rig = open_rig()
    with pytest.raises(BackendError, match="already registered"):
        rig.pool.register(rig.kv.memory)


def test_a_pool_that_fails_the_probe_is_not_opened(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BackendError("nothing moved")

    monkeypatch.setattr(embedded, "prove_transfers", fail)
    with pytest.raises(BackendError, match="nothing moved"):
        open_rig()


def test_an_object_of_another_size_is_missing_and_not_read_in_part(open_rig: OpenRig) -> None:
    small = GroupShape(head_count=1, plane_bytes=(1 * KIB,))
    rig = open_rig(groups=[GROUP, small])
    assert rig.store({b"a": 0}).outcome is DONE
    part = TransferPart(1, [b"a"], [0])
    rig.pool.load(attrs.evolve(rig.job({}), parts=(part,)))
    assert rig.results(1)[0].outcome is FAILED


def test_missing_objects_are_named_and_the_rest_is_loaded(open_rig: OpenRig) -> None:
    rig = open_rig()
    content = rig.fill(range(4))
    rig.store({b"a": 0, b"c": 2})
    result = rig.load({b"a": 8, b"b": 9, b"c": 10, b"d": 11})
    assert (result.outcome, result.failed_keys) == (FAILED, (b"b", b"d"))
    assert result.reason == "2 of 4 objects are missing"
    assert rig.kv.read(0, 8) == content[0]
    assert rig.kv.read(0, 10) == content[2]


@pytest.mark.parametrize("block_id", [-1, BLOCKS, 1 << 40])
def test_a_block_outside_kv_memory_fails_the_job(open_rig: OpenRig, block_id: int) -> None:
    rig = open_rig()
    for result in (rig.store({b"a": 0, b"b": block_id}), rig.load({b"b": block_id})):
        assert result.outcome is FAILED
        assert f"block {block_id} of group 0 is outside 0..15" in result.reason
    assert rig.pool.contains([b"a", b"b"]) == [False, False]


def test_cancelled_jobs_store_nothing(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.fill(range(4))
    all_cancelled = threading.Event()
    jobs = [rig.job({name: 0}) for name in keys(20)]
    jobs[0] = attrs.evolve(jobs[0], fence=lambda: wait_for(all_cancelled))
    for job in jobs:
        rig.pool.store(job)
    for job in jobs[1:]:
        rig.pool.cancel(job.job_id)
    all_cancelled.set()
    outcomes = [result.outcome for result in rig.results(len(jobs))]
    assert outcomes == [DONE] + [NOT_ATTEMPTED] * 19
    assert rig.pool.contains(keys(20)) == [True] + [False] * 19


def test_two_pools_of_one_process_do_not_meet(open_rig: OpenRig) -> None:
    first, second = open_rig(), open_rig()
    content = first.fill([0], seed=1)
    second.fill([0], seed=2)
    assert first.store({b"a": 0}).outcome is DONE
    assert second.pool.contains([b"a"]) == [False]
    assert second.store({b"a": 0}).outcome is DONE
    first.kv.wipe()
    second.pool.close(PATIENCE_S)
    assert first.load({b"a": 0}).outcome is DONE
    assert first.kv.read(0, 0) == content[0]


def test_after_a_reset_by_epoch_the_pool_stores_and_loads_again(open_rig: OpenRig) -> None:
    rig = open_rig(object_count=12)
    for epoch in range(5):
        content = rig.fill(range(10), seed=100 * epoch)
        names = keys(10, prefix=b"epoch-%d" % epoch)
        assert not any(rig.pool.contains(names))
        assert rig.store({name: block for block, name in enumerate(names)}).outcome is DONE
        rig.kv.wipe()
        assert rig.load({name: block for block, name in enumerate(names)}).outcome is DONE
        assert all(rig.kv.read(0, block) == content[block] for block in range(10))


def test_clear_still_refuses_every_later_put(mori: MoriLibrary) -> None:
    """When this fails, MORI has mended ``clear()``: say so in ``umbp.backends.mori_client``."""
    plan = plan_pool(1 << 20, [4096], page_bytes=None, high_watermark=0.95, low_watermark=0.9)
    client = mori.client_type(pool_config(mori, plan, PoolBacking()))
    source = np.ones(4096, dtype=np.uint8)

    def put(name: str) -> list[bool]:
        columns = [[source.ctypes.data]], [[4096]], [[0]]
        answers: list[bool] = client.batch_put_ranges_from_ptr([name], [4096], *columns)
        return answers

    assert put("before") == [True]
    assert client.clear()
    assert put("before") == [False]
    assert put("after") == [False]


def test_loads_beside_evicting_stores_are_never_wrong(open_rig: OpenRig) -> None:
    """A load that is answered DONE holds its object, while other threads store and evict."""
    group = GroupShape(head_count=1, plane_bytes=(1 << 20,) * 4)
    rig = open_rig(object_count=6, groups=[group], transfer_threads=4, queue_limit=64)
    content = [rig.kv.fill(0, block, block) for block in range(4)]
    choose = random.Random(1)
    loaded = 0
    for round_index in range(30):
        for index in range(4):
            rig.pool.store(rig.job({b"%d/%d" % (round_index, index): index}))
        targets: dict[int, tuple[int, int]] = {}
        for target in range(4, 16):
            source = choose.randrange(4)
            job = rig.job({b"%d/%d" % (max(0, round_index - choose.randrange(2)), source): target})
            targets[job.job_id] = (target, source)
            rig.pool.load(job)
        for result in rig.results(4 + len(targets)):
            if result.outcome is DONE and result.job_id in targets:
                target, source = targets[result.job_id]
                assert rig.kv.read(0, target) == content[source]
                loaded += 1
    assert loaded


def test_lookups_during_stores_are_answered(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.fill(range(BLOCKS))
    for name in keys(200):
        rig.pool.store(rig.job({name: 0}))
        rig.pool.contains([name])
    assert all(result.outcome is DONE for result in rig.results(200))


def test_the_pool_says_how_large_it_is_and_no_more(open_rig: OpenRig) -> None:
    rig = open_rig(capacity_bytes=10 * OBJECT_BYTES + 1)
    assert rig.pool.stats() == PoolStats(10 * OBJECT_BYTES, None, None, None)
    assert rig.pool.take_evictions() == []


@pytest.mark.parametrize(
    "options",
    [
        {"prefault": True},
        {"use_hugepages": True},
        {"use_shared_memory": True},
        {"numa_node": 0},
        {"high_watermark": 1.0, "low_watermark": 0.1, "put_retries": 0},
    ],
    ids="+".join,
)
def test_every_kind_of_pool_works(open_rig: OpenRig, options: dict[str, Any]) -> None:
    rig = open_rig(**options)
    content = rig.fill(range(BLOCKS))
    for name in keys(100):
        assert rig.store({name: 3}).outcome is DONE
    rig.kv.wipe()
    assert rig.load({name: 3}).outcome is DONE
    assert rig.kv.read(0, 3) == content[3]


def test_a_closed_pool_refuses_and_gives_its_memory_back(open_rig: OpenRig) -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident_bytes()
    rig = open_rig(capacity_bytes=256 << 20, prefault=True)
    assert resident_bytes() - before > 200 << 20
    rig.pool.close(PATIENCE_S)
    rig.pool.close(PATIENCE_S)
    assert resident_bytes() - before < 100 << 20
    with pytest.raises(BackendError, match="closed"):
        rig.pool.contains([b"a"])
    assert rig.store({b"a": 0}).outcome is NOT_ATTEMPTED

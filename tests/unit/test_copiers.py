# SPDX-License-Identifier: Apache-2.0
"""Both copiers against a copy byte by byte, for any layout and any place in the pool."""

import os
import threading
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.backends import copiers, device_copier
from umbp.backends.base import KVMemory, ObjectLayout
from umbp.backends.copiers import HostCopier
from umbp.backends.device_copier import DeviceCopier
from umbp.errors import BackendError
from umbp.testing.kv_memory import GroupShape, HostKVMemory, KVShape, make_kv_memory

BLOCK_COUNT = 6
SLOT_COUNT = 8

groups = st.builds(
    GroupShape,
    head_count=st.integers(1, 3),
    plane_bytes=st.lists(st.sampled_from([1, 3, 8, 24, 96, 100]), min_size=1, max_size=4).map(
        tuple
    ),
)
block_lists = st.lists(st.integers(0, BLOCK_COUNT - 1), min_size=0, max_size=6, unique=True)


# A device's copies are queued on a stream; torch has one for the CPU too, so the same code runs.
@pytest.mark.parametrize("copier_type", [HostCopier, DeviceCopier])
@settings(deadline=None)
@given(data=st.data(), shape=st.sampled_from(KVShape), group=groups, blocks=block_lists)
def test_bytes_arrive_where_they_belong_and_nowhere_else(copier_type, data, shape, group, blocks):
    kv = make_kv_memory(shape, [group], block_count=BLOCK_COUNT)
    size = group.object_bytes
    slots = data.draw(st.permutations(range(SLOT_COUNT)).map(lambda order: order[: len(blocks)]))
    pool = torch.full((SLOT_COUNT * size,), 7, dtype=torch.uint8)
    copier = copier_type(kv.memory, pool)
    offsets = np.array(slots, dtype=np.int64) * size
    content = [kv.fill(0, block, block) for block in blocks]
    expected = bytearray(pool.numpy().tobytes())
    for offset, stored in zip(offsets.tolist(), content, strict=True):
        expected[offset : offset + size] = stored

    copier.store(0, np.array(blocks, dtype=np.int64), offsets)
    assert pool.numpy().tobytes() == expected

    targets = data.draw(st.permutations(range(BLOCK_COUNT)).map(lambda order: order[: len(blocks)]))
    kv.wipe()
    copier.load(0, np.array(targets, dtype=np.int64), offsets)
    for target, stored in zip(targets, content, strict=True):
        assert kv.read(0, target) == stored
        kv.write(0, target, bytes(size))
    assert not any(kv.snapshot())


@pytest.mark.parametrize(("limit", "most"), [("_CALL_ROWS_MAX", 13), ("_CALL_BYTES_MAX", 14)])
@pytest.mark.parametrize("gap", [0, 1], ids=["neighbours", "apart"])
def test_long_jobs_are_cut(monkeypatch, limit, most, gap):
    counts = []
    kv_numbers = HostCopier._kv_numbers

    def counted(self, layout, block_ids):
        numbers = kv_numbers(self, layout, block_ids)
        counts.append(len(numbers))
        return numbers

    monkeypatch.setattr(copiers, limit, most)
    monkeypatch.setattr(HostCopier, "_kv_numbers", counted)
    kv = make_kv_memory(KVShape.LBH, [GroupShape(1, (3, 2))], block_count=BLOCK_COUNT)
    pool = torch.zeros((5 + gap) * BLOCK_COUNT, dtype=torch.uint8)
    content = [kv.fill(0, block, block) for block in range(BLOCK_COUNT)]
    blocks = np.arange(BLOCK_COUNT)
    copier = HostCopier(kv.memory, pool)
    copier.store(0, blocks, blocks * (5 + gap))
    assert pool.view(BLOCK_COUNT, -1)[:, :5].numpy().tobytes() == b"".join(content)
    kv.wipe()
    copier.load(0, blocks, blocks * (5 + gap))
    assert [kv.read(0, block) for block in range(BLOCK_COUNT)] == content
    assert counts == [10, 10, 10] * 2


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch computes on one thread")
def test_copies_in_host_memory_leave_the_threads_alone_that_the_model_computes_with():
    """A team of OpenMP threads beside the model's slows the model down, even while it idles."""
    kv = make_kv_memory(KVShape.LBH, [GroupShape(8, (64 << 10,))], block_count=8)
    pool = torch.zeros(8 * (512 << 10), dtype=torch.uint8)
    copier = HostCopier(kv.memory, pool)
    offsets = np.arange(8) * (512 << 10)
    new = []

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def copy() -> None:
        before = threads()
        copier.store(0, np.arange(8), offsets)
        copier.load(0, np.arange(8), offsets)
        new.append(threads() - before)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert new == [set()]


@pytest.mark.parametrize("copier_type", [HostCopier, DeviceCopier])
def test_memory_that_was_allocated_in_inference_mode_is_written(copier_type):
    with torch.inference_mode():
        kv = make_kv_memory(KVShape.LBH, [GroupShape(1, (8,))], block_count=2)
        pool = torch.zeros(8, dtype=torch.uint8)
        copier = copier_type(kv.memory, pool)
    content = kv.fill(0, 0, 1)
    copier.store(0, np.array([0]), np.array([0]))
    copier.load(0, np.array([1]), np.array([0]))
    assert kv.read(0, 1) == content


@pytest.mark.parametrize(("base", "stride"), [(4, 16), (8, 12), (3, 16), (16, 17)])
@pytest.mark.parametrize("copier_type", [HostCopier, DeviceCopier])
def test_ranges_may_begin_at_any_address(copier_type, base, stride):
    region = make_kv_memory(KVShape.LBH, [GroupShape(1, (64,))], block_count=1).memory.regions[0]
    layout = ObjectLayout(0, 3, [region.address + base], [stride], [8])
    kv = HostKVMemory(KVMemory((region,), (layout,)))
    content = [kv.fill(0, block, block) for block in range(3)]
    pool = torch.zeros(24, dtype=torch.uint8)
    copier = copier_type(kv.memory, pool)
    copier.store(0, np.arange(3), np.arange(3) * 8)
    assert pool.numpy().tobytes() == b"".join(content)
    copier.load(0, np.array([2]), np.array([0]))
    assert kv.read(0, 2) == content[0]


@pytest.mark.parametrize("shape", KVShape)
def test_a_device_copies_through_a_bounded_buffer(monkeypatch, shape):
    """Objects of odd lengths, fewer of them in the buffer than in the job."""
    group = GroupShape(2, (24, 40, 17))
    monkeypatch.setattr(device_copier, "STAGING_BYTES", 2 * group.object_bytes + 1)
    kv = make_kv_memory(shape, [group], block_count=BLOCK_COUNT)
    pool = torch.zeros(BLOCK_COUNT * group.object_bytes, dtype=torch.uint8)
    copier = DeviceCopier(kv.memory, pool)
    content = [kv.fill(0, block, block) for block in range(BLOCK_COUNT)]
    blocks = np.arange(BLOCK_COUNT)
    copier.store(0, blocks, blocks * group.object_bytes)
    assert pool.numpy().tobytes() == b"".join(content)
    kv.wipe()
    copier.load(0, blocks, blocks * group.object_bytes)
    assert [kv.read(0, block) for block in range(BLOCK_COUNT)] == content


def test_an_object_longer_than_the_buffer_is_copied(monkeypatch):
    monkeypatch.setattr(device_copier, "STAGING_BYTES", 1)
    kv = make_kv_memory(KVShape.LBH, [GroupShape(1, (8,))], block_count=1)
    pool = torch.zeros(8, dtype=torch.uint8)
    content = kv.fill(0, 0, 1)
    DeviceCopier(kv.memory, pool).store(0, np.array([0]), np.array([0]))
    assert pool.numpy().tobytes() == content


class QueuedStream:
    """A stream of a device: what is done is written down, with the events behind it."""

    def __init__(self, log, name):
        self.log = log
        self.name = name

    def __enter__(self):
        self.log.append((self.name, "work"))

    def __exit__(self, *_):
        pass

    def record_event(self):
        self.log.append((self.name, "event"))
        return SimpleNamespace(synchronize=lambda: self.log.append((self.name, "reached")))

    def synchronize(self):
        self.log.append((self.name, "ended"))


@pytest.mark.parametrize(("tail_objects", "before_tail"), [(0, 6), (2, 4), (3, 3), (100, 1)])
def test_a_device_announces_a_load_when_its_tail_is_to_come(monkeypatch, tail_objects, before_tail):
    """Six chunks of one object, in turns on two streams."""
    group = GroupShape(2, (24, 40))
    monkeypatch.setattr(device_copier, "STAGING_BYTES", group.object_bytes)
    monkeypatch.setattr(device_copier, "ARRIVAL_BYTES", tail_objects * group.object_bytes)
    kv = make_kv_memory(KVShape.LBH, [group], block_count=BLOCK_COUNT)
    pool = torch.zeros(BLOCK_COUNT * group.object_bytes, dtype=torch.uint8)
    copier = DeviceCopier(kv.memory, pool)
    blocks = np.arange(BLOCK_COUNT)
    copier.store(0, blocks, blocks * group.object_bytes)
    log, arrivals = [], []
    lanes = tuple(
        attrs.evolve(lane, stream=QueuedStream(log, name))
        for lane, name in zip(copier._lanes(), ("a", "b"), strict=True)
    )
    copier._of_thread.lanes = lanes
    copier._device = SimpleNamespace(type="cuda")

    def announce(arrival):
        log.append(("", "announced"))
        arrivals.append(arrival)

    copier.load(0, blocks, blocks * group.object_bytes, announce)
    announced = log.index(("", "announced"))
    # The block ids are brought by the first piece of work.
    assert [what for _, what in log].count("work") == 1 + BLOCK_COUNT
    assert ("a", "work") not in log[announced:]
    assert ("b", "work") not in log[announced:]
    assert log[announced - 1][1] == "reached"
    first_event = next(place for place, (_, what) in enumerate(log) if what == "event")
    assert [what for _, what in log[:first_event]].count("work") == 1 + before_tail
    assert log[announced + 1 :] == [("a", "ended"), ("b", "ended")]
    (arrival,) = arrivals
    assert len(arrival.ends) == 2
    log.clear()
    copier.load(0, blocks, blocks * group.object_bytes)
    assert ("", "announced") not in log
    assert all(what != "event" for _, what in log)


@pytest.mark.parametrize("copier_type", [HostCopier, DeviceCopier])
def test_a_layout_outside_of_kv_memory_is_refused(copier_type):
    kv = make_kv_memory(KVShape.LBH, [GroupShape(1, (8,))], block_count=4)
    region = kv.memory.regions[0]
    beyond = ObjectLayout(0, 5, [region.address], [8], [8])
    with pytest.raises(BackendError, match="outside of KV memory"):
        copier_type(KVMemory(kv.memory.regions, (beyond,)), torch.zeros(8, dtype=torch.uint8))

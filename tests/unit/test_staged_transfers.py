# SPDX-License-Identifier: Apache-2.0
"""Objects that are gathered on the device before MORI moves them, and scattered after.

The device is the CPU, for which torch has streams, too. MORI is played by ``FakeClient``, which
copies through real addresses and says what it was asked when; ``tests/embedded`` has the real one.
"""

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.backends import mori_options, staged_transfers
from umbp.backends.base import KVMemory, TransferPart
from umbp.backends.device_gather import DeviceGather
from umbp.backends.mori_client import Moved
from umbp.backends.mori_columns import GroupColumns, group_columns
from umbp.backends.mori_library import MoriLibrary
from umbp.backends.mori_transfers import DirectTransfers, Transfers, open_transfers
from umbp.backends.staged_transfers import StagedTransfers
from umbp.errors import BackendError
from umbp.testing.kv_memory import GroupShape, HostKVMemory, KVShape, make_kv_memory

PATIENCE_S = 60.0
BLOCK_COUNT = 8
GROUP = GroupShape(head_count=2, plane_bytes=(24, 40, 17))


class FakeClient:
    """What a ``MoriClient`` does, with objects in a dict."""

    def __init__(self, room: Sequence[tuple[int, int]]) -> None:
        self.room = room
        self.objects: dict[str, bytes] = {}
        self.refused: set[str] = set()
        self.events: list[str] = []
        self.range_counts: set[int] = set()
        self.on_call: Callable[[int], None] = lambda _: None

    def store(
        self, names: Sequence[str], columns: GroupColumns, block_ids: Any, *, objects_per_put: int
    ) -> Moved:
        for pieces, name in zip(self._pieces("put", names, columns, block_ids), names, strict=True):
            if name not in self.refused:
                self.objects[name] = b"".join(ctypes.string_at(*piece) for piece in pieces)
        return self._moved(names)

    def load(self, names: Sequence[str], columns: GroupColumns, block_ids: Any) -> Moved:
        for pieces, name in zip(self._pieces("get", names, columns, block_ids), names, strict=True):
            at = 0
            for address, size in pieces if name not in self.refused else ():
                ctypes.memmove(address, self.objects[name][at : at + size], size)
                at += size
        return self._moved(names)

    def _pieces(
        self, call: str, names: Sequence[str], columns: GroupColumns, block_ids: Any
    ) -> list[list[tuple[int, int]]]:
        """Returns address and length of every range, [objects][ranges]."""
        pointers, lengths = columns.pointers(block_ids), columns.lengths(len(names))
        pieces = [list(zip(*ranges, strict=True)) for ranges in zip(pointers, lengths, strict=True)]
        for address, size in itertools.chain(*pieces):
            assert any(base <= address and address + size <= base + n for base, n in self.room)
        self.range_counts.update(map(len, pieces))
        self.events.append(f"{call} {names[0]}")
        self.on_call(pointers[0][0])
        return pieces

    def _moved(self, names: Sequence[str]) -> Moved:
        failed = tuple(index for index, name in enumerate(names) if name in self.refused)
        return Moved(len(names) - len(failed), failed)


@attrs.frozen
class Rig:
    kv: HostKVMemory
    transfers: Transfers
    client: Any

    def part(self, block_ids: Sequence[int], group: int = 0) -> TransferPart:
        return TransferPart(group, [b""] * len(block_ids), np.array(block_ids, dtype=np.int64))

    def store(self, names: Sequence[str], block_ids: Sequence[int], group: int = 0) -> Moved:
        part = self.part(block_ids, group)
        return self.transfers.store(self.client, names, part, objects_per_put=1000)

    def load(self, names: Sequence[str], block_ids: Sequence[int], group: int = 0) -> Moved:
        return self.transfers.load(self.client, names, self.part(block_ids, group))


def open_rig(
    shape: KVShape = KVShape.LBH, groups: Sequence[GroupShape] = (GROUP,), thread_count: int = 1
) -> Rig:
    kv = make_kv_memory(shape, groups, block_count=BLOCK_COUNT)
    transfers = open_transfers(
        kv.memory, group_columns(kv.memory), staged=True, thread_count=thread_count
    )
    assert isinstance(transfers, StagedTransfers)
    room = [(region.address, region.size_bytes) for region in transfers.regions]
    return Rig(kv, transfers, FakeClient(room))


@pytest.fixture
def two_in_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots hold two objects of ``GROUP``, which are not as long as a slot's alignment."""
    monkeypatch.setattr(staged_transfers, "SLOT_BYTES", 2 * GROUP.object_bytes)
    monkeypatch.setattr(staged_transfers, "_SLOT_ALIGNMENT", 8)


NAMES = [f"object-{index}" for index in range(BLOCK_COUNT)]

groups_of = st.lists(
    st.builds(
        GroupShape,
        head_count=st.integers(1, 3),
        plane_bytes=st.lists(st.sampled_from([1, 8, 24, 96, 100]), min_size=1, max_size=4).map(
            tuple
        ),
    ),
    min_size=1,
    max_size=2,
)
orders = st.permutations(range(BLOCK_COUNT))


@settings(deadline=None)
@given(
    shape=st.sampled_from(KVShape),
    groups=groups_of,
    slot_bytes=st.integers(1, 2000),
    count=st.integers(0, BLOCK_COUNT),
    sources=orders,
    targets=orders,
)
def test_bytes_arrive_where_they_belong_and_nowhere_else(
    shape: KVShape,
    groups: list[GroupShape],
    slot_bytes: int,
    count: int,
    sources: list[int],
    targets: list[int],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged_transfers, "SLOT_BYTES", slot_bytes)
        rig = open_rig(shape, groups)
    for group, _ in enumerate(groups):
        rig.kv.wipe()
        rig.client.objects.clear()
        names = NAMES[:count]
        content = [rig.kv.fill(group, block, block) for block in sources[:count]]
        assert rig.store(names, sources[:count], group) == Moved(count, ())
        assert list(rig.client.objects.values()) == content
        rig.kv.wipe()
        assert rig.load(names, targets[:count], group) == Moved(count, ())
        for block, stored in zip(targets, content, strict=False):
            assert rig.kv.read(group, block) == stored
            rig.kv.write(group, block, bytes(len(stored)))
        assert not any(rig.kv.snapshot())
    assert rig.client.range_counts <= {1}, "an object is one range"


def test_memory_that_is_taken_is_two_slots_a_thread(two_in_a_slot: None) -> None:
    transfers = open_rig(thread_count=3).transfers
    (region,) = transfers.regions
    assert region.size_bytes == 3 * 2 * 2 * GROUP.object_bytes + 3 * 2 * 4
    assert region.tensor.numel() == region.size_bytes


def test_an_object_longer_than_a_slot_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_transfers, "SLOT_BYTES", 1)
    rig = open_rig()
    content = [rig.kv.fill(0, block, block) for block in range(BLOCK_COUNT)]
    rig.store(NAMES, range(BLOCK_COUNT))
    assert list(rig.client.objects.values()) == content


# -- order -------------------------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, two_in_a_slot: None) -> Iterator[list[str]]:
    """What is queued and waited for, in order. A copy that is queued is made when waited for."""
    events: list[str] = []
    queued: list[Callable[[], None]] = []

    class Stream:
        def __init__(self, device: Any) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

        def synchronize(self) -> None:
            events.append("wait")
            while queued:
                queued.pop(0)()

    def later(call: str) -> Callable[..., None]:
        do = getattr(DeviceGather, call)

        def queue(self: DeviceGather, blocks: Any, part: slice, staging: Any) -> None:
            events.append(f"{call} {part.start}")
            queued.append(lambda: do(self, blocks, part, staging))

        return queue

    monkeypatch.setattr(staged_transfers.torch, "Stream", Stream)
    for call in ("gather", "scatter"):
        monkeypatch.setattr(DeviceGather, call, later(call))
    yield events
    assert not queued, "somebody still reads or writes KV memory"


def test_a_slot_is_stored_when_it_is_full_while_the_other_fills(events: list[str]) -> None:
    rig = open_rig()
    rig.client.events = events
    content = [rig.kv.fill(0, block, block) for block in range(7)]
    rig.store(NAMES[:7], range(7))
    assert list(rig.client.objects.values()) == content
    # Otherwise a slot was filled again while MORI read it: gather n + 2 comes after put n.
    stores = [event for event in events if event != "wait"]
    assert stores == [
        "gather 0",
        "gather 2",
        "put object-0",
        "gather 4",
        "put object-2",
        "gather 6",
        "put object-4",
        "put object-6",
    ]


def test_a_load_ends_when_the_last_bytes_have_arrived(events: list[str]) -> None:
    rig = open_rig()
    content = [rig.kv.fill(0, block, block) for block in range(7)]
    rig.store(NAMES[:7], range(7))
    rig.kv.wipe()
    events.clear()
    rig.client.events = events
    rig.load(NAMES[:7], range(7))
    assert [rig.kv.read(0, block) for block in range(7)] == content
    assert events == [
        *("get object-0", "wait", "scatter 0"),
        # The first slot is emptied while the second is filled.
        *("get object-2", "wait", "scatter 2"),
        *("get object-4", "wait", "scatter 4"),
        *("get object-6", "wait", "scatter 6"),
        "wait",
    ]


# -- failures ----------------------------------------------------------------------------------


def test_what_fails_is_named_and_leaves_its_block_alone(two_in_a_slot: None) -> None:
    rig = open_rig()
    content = [rig.kv.fill(0, block, block) for block in range(BLOCK_COUNT)]
    rig.store(NAMES, range(BLOCK_COUNT))
    rig.client.refused = {NAMES[0], NAMES[3], NAMES[4], NAMES[5]}
    assert rig.store(NAMES, range(BLOCK_COUNT)) == Moved(4, (0, 3, 4, 5))
    before = [rig.kv.fill(0, block, 100 + block) for block in range(BLOCK_COUNT)]
    assert rig.load(NAMES, range(BLOCK_COUNT)) == Moved(4, (0, 3, 4, 5))
    expected = [
        before[index] if name in rig.client.refused else content[index]
        for index, name in enumerate(NAMES)
    ]
    assert [rig.kv.read(0, block) for block in range(BLOCK_COUNT)] == expected


@pytest.mark.parametrize("kind", ["store", "load"])
def test_an_error_in_the_middle_waits_and_gives_the_ring_back(events: list[str], kind: str) -> None:
    rig = open_rig()
    content = [rig.kv.fill(0, block, block) for block in range(BLOCK_COUNT)]
    rig.store(NAMES, range(BLOCK_COUNT))
    calls: list[int] = []

    def fail_later(_: int) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise BackendError("the pool is closed")

    rig.client.on_call = fail_later
    with pytest.raises(BackendError, match="the pool is closed"):
        getattr(rig, kind)(NAMES, range(BLOCK_COUNT))
    assert events[-1] == "wait"
    rig.client.on_call = lambda _: None
    # There is one ring only, so this would wait for ever had it been lost.
    assert rig.store(NAMES, range(BLOCK_COUNT)).failed == ()
    assert list(rig.client.objects.values()) == content


def test_each_thread_has_a_ring_and_one_that_is_stuck_keeps_it(two_in_a_slot: None) -> None:
    rig = open_rig(thread_count=3)
    content = [rig.kv.fill(0, block, block) for block in range(BLOCK_COUNT)]
    addresses: dict[int, set[int]] = {}
    stuck, may_go = threading.Event(), threading.Event()

    def call(address: int) -> None:
        thread = threading.get_ident()
        if threading.current_thread().name == "stuck" and thread not in addresses:
            addresses[thread] = {address}
            stuck.set()
            assert may_go.wait(PATIENCE_S)
        addresses.setdefault(thread, set()).add(address)

    rig.client.on_call = call

    def work(prefix: str) -> None:
        for _ in range(5):
            rig.store([prefix + name for name in NAMES], range(BLOCK_COUNT))

    threads = [threading.Thread(target=work, args=("s",), name="stuck")]
    threads[0].start()
    assert stuck.wait(PATIENCE_S)
    threads += [threading.Thread(target=work, args=(prefix,)) for prefix in "ab"]
    for thread in threads[1:]:
        thread.start()
    for thread in threads[1:]:
        thread.join(PATIENCE_S)
    (kept,) = addresses.pop(threads[0].ident or 0)
    assert not any(kept in used for used in addresses.values())
    may_go.set()
    threads[0].join(PATIENCE_S)
    for prefix in "sab":
        assert [rig.client.objects[prefix + name] for name in NAMES] == content


def test_memory_of_two_devices_is_refused() -> None:
    memory = make_kv_memory(KVShape.LBH, [GROUP], block_count=1).memory
    first, *others = memory.regions
    elsewhere = attrs.evolve(first, device_type="cuda", device_index=1)
    mixed = KVMemory((elsewhere, *others), memory.layouts)
    with pytest.raises(BackendError, match=r"on 2 devices.* set option device_staging to false"):
        StagedTransfers(mixed, 1)


# -- who gathers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "is_on_cuda", "device_type", "expected"),
    [
        (None, True, "cuda", True),
        (None, False, "cuda", False),
        (None, True, "cpu", False),
        (True, False, "cpu", True),
        (False, True, "cuda", False),
    ],
)
def test_objects_are_gathered_where_mori_cannot_or_as_the_option_says(
    option: bool | None, is_on_cuda: bool, device_type: str, expected: bool
) -> None:
    library = MoriLibrary("1.2.4", *[None] * 6, is_on_cuda=is_on_cuda)
    memory = make_kv_memory(KVShape.LBH, [GROUP], block_count=1).memory
    regions = tuple(attrs.evolve(region, device_type=device_type) for region in memory.regions)
    staged = mori_options.stages(option, library, KVMemory(regions, memory.layouts))
    assert staged is expected


def test_without_gathering_mori_is_told_of_all_kv_memory() -> None:
    memory = make_kv_memory(KVShape.LBH, [GROUP], block_count=1).memory
    transfers = open_transfers(memory, group_columns(memory), staged=False, thread_count=1)
    assert isinstance(transfers, DirectTransfers)
    assert transfers.regions == memory.regions

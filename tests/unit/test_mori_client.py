# SPDX-License-Identifier: Apache-2.0
"""The client around MORI: what is sent, in which pieces, and what comes of each answer.

MORI is played by ``FakeMori``, which obeys the rules that MORI 1.2.4 was measured to have and fails
the test when a call breaks one. ``tests/embedded`` runs the same client on the real thing.
"""

import contextlib
import ctypes
import gc
import os
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from umbp.backends import mori_client, mori_probe
from umbp.backends.base import KVMemory, MemoryRegion, ObjectLayout
from umbp.backends.mori_client import MoriClient, Moved, PoolBacking, object_names, pool_config
from umbp.backends.mori_columns import GroupColumns
from umbp.backends.mori_library import MoriLibrary
from umbp.backends.mori_pages import PoolPlan
from umbp.errors import BackendError, BackendUnavailable

RANGE_BYTES = 8
RANGES = 3
OBJECT_BYTES = RANGES * RANGE_BYTES
BLOCKS = 64


class FakeMori:
    """A ``UMBPClient`` that keeps objects in a dict and copies through real addresses."""

    def __init__(self, config: Any) -> None:
        if config.dram.capacity_bytes > 1 << 40:
            raise RuntimeError("PoolClient::Init() failed")
        self.config = config
        self.objects: dict[str, bytes] = {}
        self.registered: list[tuple[int, int, str, int]] = []
        self.puts: list[list[str]] = []
        self.gets: list[list[str]] = []
        self.refusals: dict[str, int] = {}
        self.moves_bytes = True
        self.lock = threading.Lock()
        self.running: list[str] = []
        self.call_takes_s = 0.0

    @contextlib.contextmanager
    def call(self, kind: str) -> Iterator[None]:
        """A put alone, or gets together, as a pool that evicts inside puts needs it."""
        with self.lock:
            self.running.append(kind)
            assert kind == "get" or len(self.running) == 1, self.running
            assert "put" not in self.running[:-1], self.running
        time.sleep(self.call_takes_s)
        try:
            yield
        finally:
            with self.lock:
                self.running.remove(kind)

    def register_memory(self, address: int, size: int, location: str, device: int) -> bool:
        self.registered.append((address, size, location, device))
        return size > 0

    def batch_exists(self, names: Sequence[str]) -> list[bool]:
        return [name in self.objects for name in names]

    def batch_put_ranges_from_ptr(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        pointers: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[bool]:
        self.puts.append(list(names))
        assert len(set(names)) == len(names), "the same key twice in one call"
        with self.call("put"):
            return self._put(names, sizes, pointers, lengths, offsets)

    def _put(self, names: Any, sizes: Any, pointers: Any, lengths: Any, offsets: Any) -> list[bool]:
        answers = []
        for name, size, froms, counts, ats in zip(
            names, sizes, pointers, lengths, offsets, strict=True
        ):
            assert name not in self.objects, "a put of a key that exists"
            assert all(type(number) is int for number in (*froms, *counts, *ats))
            assert ats == np.cumsum([0, *counts[:-1]]).tolist()
            assert sum(counts) == size
            refused = self.refusals.get(name, 0)
            self.refusals[name] = max(0, refused - 1)
            if not refused:
                self.objects[name] = b"".join(map(ctypes.string_at, froms, counts))
            answers.append(not refused)
        return answers

    def batch_get_ranges_into_ptr(
        self,
        names: Sequence[str],
        pointers: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[bool]:
        self.gets.append(list(names))
        with self.call("get"):
            for name, tos, counts, ats in zip(names, pointers, lengths, offsets, strict=True):
                if name in self.objects and self.moves_bytes:
                    for to, count, at in zip(tos, counts, ats, strict=True):
                        ctypes.memmove(to, self.objects[name][at : at + count], count)
        return self.batch_exists(names)


def new_config() -> types.SimpleNamespace:
    return types.SimpleNamespace(dram=types.SimpleNamespace(), ssd=types.SimpleNamespace())


LIBRARY = MoriLibrary("1.2.4", FakeMori, new_config, *2 * (types.SimpleNamespace,), "CPU", "GPU")
PLAN = PoolPlan(page_bytes=1024, page_count=100, high_pages=90, low_pages=80)


@attrs.frozen
class Rig:
    """A client, the fake under it, and two arrays of KV memory."""

    client: MoriClient
    mori: FakeMori
    source: np.ndarray[Any, np.dtype[np.uint8]]
    target: np.ndarray[Any, np.dtype[np.uint8]]

    def store(self, block_ids: Sequence[int], objects_per_put: int = 1000) -> Moved:
        return self.client.store(
            names(block_ids), columns(self.source), ids(block_ids), objects_per_put=objects_per_put
        )

    def load(self, block_ids: Sequence[int]) -> Moved:
        return self.client.load(names(block_ids), columns(self.target), ids(block_ids))


def names(block_ids: Sequence[int]) -> list[str]:
    return object_names([bytes([block_id]) for block_id in block_ids], OBJECT_BYTES)


def ids(block_ids: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.array(block_ids, dtype=np.int64)


def columns(memory: "np.ndarray[Any, np.dtype[np.uint8]]") -> GroupColumns:
    bases = memory.ctypes.data + np.arange(RANGES) * BLOCKS * RANGE_BYTES
    ones = np.ones(RANGES, dtype=np.int64)
    return GroupColumns(ObjectLayout(0, BLOCKS, bases, ones * RANGE_BYTES, ones * RANGE_BYTES))


@pytest.fixture
def make_rig() -> Iterator[Callable[[int], Rig]]:
    def make(put_retries: int) -> Rig:
        client = MoriClient(
            LIBRARY, pool_config(LIBRARY, PLAN, PoolBacking()), put_retries=put_retries
        )
        shape = (RANGES, BLOCKS, RANGE_BYTES)
        source = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
        return Rig(client, client._client(), source, np.zeros(shape, dtype=np.uint8))

    return make


@pytest.fixture
def rig(make_rig: Callable[[int], Rig]) -> Rig:
    return make_rig(1)


def test_names_are_text_and_carry_the_size() -> None:
    assert object_names([b"\x00\xff/", b""], 24) == ["00ff2f.24", ".24"]


def test_the_configuration_says_pages_and_watermarks() -> None:
    config = pool_config(LIBRARY, PLAN, PoolBacking())
    assert config.page_size == 1024
    assert config.ssd.enabled is False
    assert config.dram == types.SimpleNamespace(
        capacity_bytes=102400,
        high_watermark=0.8975,
        low_watermark=0.8025,
        prefault=False,
        use_hugepages=False,
    )


def test_the_configuration_takes_every_kind_of_memory() -> None:
    backing = PoolBacking(
        numa_node=0, prefault=True, use_hugepages=True, shared_memory_name="/umbp-x"
    )
    dram = pool_config(LIBRARY, PLAN, backing).dram
    assert dram.numa_nodes == [0]
    assert (dram.prefault, dram.use_hugepages) == (True, True)
    assert (dram.use_shared_memory, dram.shm_name) == (True, "/umbp-x")


def test_a_pool_that_mori_cannot_open_is_an_error() -> None:
    plan = attrs.evolve(PLAN, page_bytes=1 << 40)
    with pytest.raises(BackendError, match=r"could not open a pool of 109951162777600 bytes"):
        MoriClient(LIBRARY, pool_config(LIBRARY, plan, PoolBacking()), put_retries=0)


@pytest.mark.parametrize(
    ("device_type", "device_index", "expected"),
    [("cpu", None, ("CPU", -1)), ("cuda", 3, ("GPU", 3))],
)
def test_memory_is_registered_where_it_is(
    rig: Rig, device_type: str, device_index: int | None, expected: tuple[str, int]
) -> None:
    rig.client.register(MemoryRegion(None, 4096, 512, device_type, device_index))
    assert rig.mori.registered == [(4096, 512, *expected)]


@pytest.mark.parametrize(
    ("size_bytes", "device_type", "message"),
    [(0, "cpu", "refused to register 0 bytes of cpu"), (8, "xpu", "does not move .* 'xpu'")],
)
def test_memory_that_cannot_be_registered_is_an_error(
    rig: Rig, size_bytes: int, device_type: str, message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        rig.client.register(MemoryRegion(None, 4096, size_bytes, device_type, None))


def test_blocks_come_back_byte_for_byte(rig: Rig) -> None:
    assert rig.store([5, 0, 63]) == Moved(3, ())
    assert rig.load([63, 5, 0]) == Moved(3, ())
    for block_id in (0, 5, 63):
        assert (rig.target[:, block_id] == rig.source[:, block_id]).all()
    assert not rig.target[:, 1].any()


def test_objects_that_exist_are_not_sent_again(rig: Rig) -> None:
    rig.store([1, 2])
    rig.source[:] = 0
    assert rig.store([1, 2, 3]) == Moved(1, ())
    assert rig.mori.puts[1:] == [names([3])]
    rig.load([1])
    assert rig.target[:, 1].any()


def test_puts_are_no_larger_than_the_room(rig: Rig) -> None:
    assert rig.store(range(10), objects_per_put=4) == Moved(10, ())
    assert [len(put) for put in rig.mori.puts] == [4, 4, 2]


def test_calls_are_no_longer_than_the_interpreter_lock_allows(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mori_client, "RANGES_PER_CALL", 2 * RANGES + 1)
    rig.store(range(5))
    rig.load(range(5))
    assert [len(put) for put in rig.mori.puts] == [2, 2, 1]
    assert [len(get) for get in rig.mori.gets] == [2, 2, 1]


def test_an_object_of_many_ranges_still_fits_a_call(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mori_client, "RANGES_PER_CALL", 1)
    assert rig.store([0, 1]) == Moved(2, ())


def test_a_put_that_failed_is_tried_again_alone(rig: Rig) -> None:
    rig.mori.refusals = dict.fromkeys(names([1, 3]), 1)
    assert rig.store([0, 1, 2, 3]) == Moved(4, ())
    assert rig.mori.puts == [names([0, 1, 2, 3]), names([1, 3])]
    rig.load([3])
    assert (rig.target[:, 3] == rig.source[:, 3]).all()


@pytest.mark.parametrize("put_retries", [0, 1, 3])
def test_a_put_that_keeps_failing_is_named(
    make_rig: Callable[[int], Rig], put_retries: int
) -> None:
    rig = make_rig(put_retries)
    rig.mori.refusals = dict.fromkeys(names([1, 4]), 99)
    assert rig.store(range(6), objects_per_put=3) == Moved(4, (1, 4))
    assert len(rig.mori.puts) == 2 * (1 + put_retries)
    assert len(rig.mori.objects) == 4


def test_missing_objects_are_named(rig: Rig) -> None:
    rig.store([0, 2])
    assert rig.load([0, 1, 2, 3]) == Moved(2, (1, 3))


def test_a_put_runs_alone_and_gets_run_together(rig: Rig) -> None:
    rig.store([0])
    rig.mori.call_takes_s = 0.001
    stores: list[Moved] = []
    loads: list[Moved] = []

    def store() -> None:
        stores.append(rig.store(range(BLOCKS), 8))

    def load() -> None:
        loads.extend(rig.load([0]) for _ in range(20))

    threads = [threading.Thread(target=target) for target in (store, load, store, load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A broken rule ends its thread, which pytest reports as well.
    assert sum(moved.object_count for moved in stores) == BLOCKS - 1
    assert loads == [Moved(1, ())] * 40


def test_what_mori_raises_at_a_lookup_is_a_backend_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(rig.mori, "batch_exists", fail)
    with pytest.raises(BackendError, match="could not look up 2 objects: boom"):
        rig.client.contains(names([0, 1]))


def test_a_closed_client_lets_go_of_the_pool_and_refuses() -> None:
    client = MoriClient(LIBRARY, pool_config(LIBRARY, PLAN, PoolBacking()), put_retries=0)
    pool = weakref.ref(client._client())
    client.close()
    client.close()
    gc.collect()
    assert pool() is None
    with pytest.raises(BackendError, match="closed"):
        client.contains(names([0]))


def test_an_abandoned_client_refuses_and_is_never_destroyed() -> None:
    client = MoriClient(LIBRARY, pool_config(LIBRARY, PLAN, PoolBacking()), put_retries=0)
    pool = weakref.ref(client._client())
    client.abandon()
    del client
    gc.collect()
    assert pool() is not None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_the_client(rig: Rig) -> None:
    child = os.fork()
    if child == 0:
        try:
            rig.client.contains([])
        except BackendError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert rig.client.contains([]) == []


def region(device_type: str) -> KVMemory:
    return KVMemory((MemoryRegion(None, 0, 0, device_type, None),), ())


def test_a_library_that_moves_bytes_passes_the_probe() -> None:
    mori_probe.prove_transfers(LIBRARY, region("cpu"))


def test_a_library_that_only_says_so_fails_the_probe() -> None:
    class Liar(FakeMori):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.moves_bytes = False

    with pytest.raises(BackendError, match=r"and did not: .* UMBP_DRAM_GATHER_KERNEL=0"):
        mori_probe.prove_transfers(attrs.evolve(LIBRARY, client_type=Liar), region("cpu"))


def test_a_library_that_refuses_the_pattern_fails_the_probe() -> None:
    class Full(FakeMori):
        def batch_put_ranges_from_ptr(self, names: Sequence[str], *_: object) -> list[bool]:
            return [False] * len(names)

    with pytest.raises(BackendError, match="could not move a test pattern of cpu memory"):
        mori_probe.prove_transfers(attrs.evolve(LIBRARY, client_type=Full), region("cpu"))


def test_device_memory_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mori_probe, "hip_device_count", lambda: 0)
    with pytest.raises(BackendUnavailable, match="on a cuda device, but the HIP runtime"):
        mori_probe.prove_transfers(LIBRARY, region("cuda"))


# ---------------------------------------------------------------- shared pools


class LeasedRig:
    """A client of a shared pool whose gets take a set time."""

    def __init__(self, get_takes_s: float = 0.0, blocks: int = BLOCKS) -> None:
        self.now_s = 0.0
        self.get_takes_s = get_takes_s
        config = pool_config(LIBRARY, PLAN, PoolBacking())
        self.client = MoriClient(
            LIBRARY, config, put_retries=1, read_lease_ms=500, clock=lambda: self.now_s
        )
        self.mori: FakeMori = self.client._native
        self.memory = np.zeros((RANGES, blocks, RANGE_BYTES), dtype=np.uint8)
        get = self.mori.batch_get_ranges_into_ptr

        def slow_get(*arguments: Any) -> list[bool]:
            self.now_s += self.get_takes_s
            return get(*arguments)

        self.mori.batch_get_ranges_into_ptr = slow_get  # type: ignore[method-assign]

    def store(self, block_ids: Sequence[int]) -> Moved:
        return self.client.store(
            names(block_ids), columns(self.memory), ids(block_ids), objects_per_put=100
        )

    def load(self, block_ids: Sequence[int]) -> Moved:
        return self.client.load(names(block_ids), columns(self.memory), ids(block_ids))


@pytest.mark.parametrize(("get_takes_s", "failed"), [(0.499, ()), (0.5, (0, 1))])
def test_a_get_that_takes_as_long_as_the_lease_has_failed(
    get_takes_s: float, failed: tuple[int, ...]
) -> None:
    rig = LeasedRig(get_takes_s)
    assert rig.store([0, 1]) == Moved(2, ())
    assert rig.load([0, 1]).failed == failed


def test_a_leased_get_is_cut_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mori_client, "LEASED_BYTES_PER_GET", 2 * OBJECT_BYTES + 1)
    rig = LeasedRig()
    rig.store(range(5))
    assert rig.load(range(5)) == Moved(5, ())
    assert [len(get) for get in rig.mori.gets] == [2, 2, 1]


def test_what_another_process_has_stored_meanwhile_is_stored() -> None:
    rig = LeasedRig()
    (theirs, ours) = names([0, 1])
    rig.mori.refusals = {theirs: 2, ours: 1}
    put = rig.mori._put

    def put_beside_another(names: Any, *columns: Any) -> list[bool]:
        answers = put(names, *columns)
        rig.mori.objects[theirs] = b"theirs"
        return answers

    rig.mori._put = put_beside_another  # type: ignore[method-assign]
    assert rig.store([0, 1]).failed == ()
    assert rig.mori.puts == [[theirs, ours], [ours]]


def test_a_client_of_a_server_is_never_destroyed() -> None:
    rig = LeasedRig()
    native = weakref.ref(rig.mori)
    rig.client.close()
    del rig
    gc.collect()
    assert native() is not None


def test_memory_is_shared_as_a_device_s() -> None:
    rig = LeasedRig()
    tensor = rig.memory
    for size_bytes in (tensor.nbytes, 0):
        region = MemoryRegion(tensor, tensor.ctypes.data, size_bytes, "cpu", None)
        assert rig.client.share(region) == (size_bytes > 0)
    assert rig.mori.registered[0][2:] == ("GPU", 0)


# ---------------------------------------------------------------- nodes


def test_a_node_s_client_is_destroyed_when_it_is_closed_and_not_when_it_is_abandoned() -> None:
    for is_kept in (False, True):
        config = pool_config(LIBRARY, PLAN, PoolBacking())
        client = MoriClient(LIBRARY, config, put_retries=1, read_lease_ms=500, master="m:1")
        native = weakref.ref(client._native)
        if is_kept:
            client.abandon()
        else:
            client.close()
        gc.collect()
        assert (native() is not None) == is_kept
        with pytest.raises(BackendError, match="the pool is closed"):
            client.publish()


def test_a_master_that_does_not_take_a_node_is_named() -> None:
    config = pool_config(LIBRARY, PLAN, PoolBacking())
    config.dram.capacity_bytes = 1 << 50
    with pytest.raises(BackendUnavailable, match="could not make a node of the master at m:1"):
        MoriClient(LIBRARY, config, put_retries=1, read_lease_ms=500, master="m:1")

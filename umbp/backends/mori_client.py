# SPDX-License-Identifier: Apache-2.0
"""A client of MORI's UMBP that is safe to use: the calls that umbp needs, with their traps closed.

What MORI 1.2.4 does, found by running its wheel, and what this module does about it:

* ``clear()`` on a client without a master makes every later put fail, for ever. It is never called;
  a reset is a new epoch in the keys, and old objects age out.
* A put of an existing key answers True and changes nothing, even when the size differs, and a
  ranged get reads any part of an object. The size is part of the name, so objects of another size
  are never met.
* A put never evicts to make room for itself. Puts are cut to the room that the watermarks keep free
  (``umbp.backends.mori_pages``), and what fails is tried again.
* A put of a key that another thread is writing answers False, and so does the second of two equal
  keys in a call. Puts go one call at a time, and only for keys that do not exist.
* A get protects its objects from eviction for a fixed time, ``UMBP_DRAM_READ_LEASE_MS``. A get that
  takes longer while puts evict answers True with the bytes of other objects. A pool of this process
  evicts only inside its own puts, so a put waits until no get runs, and gets wait for it.
* A process that was forked from one with a client hangs at its exit, in the client's destructor.
  In a child, clients are abandoned: unusable, and never destroyed.
* Calls have no deadline. Whoever calls does it on a thread that something watches.
"""

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Any, Final

import attrs

from umbp.backends.base import Int64Array, MemoryRegion
from umbp.backends.mori_columns import GroupColumns
from umbp.backends.mori_library import MoriLibrary
from umbp.backends.mori_pages import PoolPlan
from umbp.backends.shared_lock import SharedLock
from umbp.errors import BackendError

RANGES_PER_CALL: Final = 8192
"""Most ranges in one native call. The interpreter's lock is held while the lists are built and
read: about 1 ms for as many, during which vLLM's own thread waits."""


@attrs.frozen
class Moved:
    """What one call of ``store`` or ``load`` did.

    Attributes:
        object_count: Objects whose bytes were copied.
        failed: Indices of the objects that could not be stored or loaded, ascending.
    """

    object_count: int
    failed: tuple[int, ...]


def object_names(keys: Sequence[bytes], object_bytes: int) -> list[str]:
    """Names objects for MORI, which takes text: the key in hexadecimal, and the size."""
    suffix = f".{object_bytes}"
    return [key.hex() + suffix for key in keys]


@attrs.frozen(kw_only=True)
class PoolBacking:
    """What memory a pool is made of.

    Attributes:
        numa_node: Node that the pool is preferably taken from; None: where it is first touched.
        prefault: Whether to touch all of the pool at once.
        use_hugepages: Whether to ask for huge pages; MORI falls back when there are none.
        shared_memory_name: Name of a shared-memory backing; None for private memory.
    """

    numa_node: int | None = None
    prefault: bool = False
    use_hugepages: bool = False
    shared_memory_name: str | None = None


def pool_config(library: MoriLibrary, plan: PoolPlan, backing: PoolBacking) -> Any:
    """Makes the ``UMBPConfig`` of a client that owns a pool in host memory."""
    config = library.config_type()
    config.page_size = plan.page_bytes
    config.ssd.enabled = False
    dram = config.dram
    dram.capacity_bytes = plan.capacity_bytes
    dram.high_watermark = plan.high_watermark
    dram.low_watermark = plan.low_watermark
    dram.prefault = backing.prefault
    dram.use_hugepages = backing.use_hugepages
    if backing.shared_memory_name is not None:
        dram.use_shared_memory = True
        dram.shm_name = backing.shared_memory_name
    if backing.numa_node is not None:
        # Not strict: a pool that spills to another node is slow, a process without memory is dead.
        dram.numa_nodes = [backing.numa_node]
    return config


class MoriClient:
    """One ``UMBPClient``. Thread-safe.

    Args:
        library: MORI.
        config: A ``UMBPConfig``.
        put_retries: How often a put that failed is tried again.

    Raises:
        BackendError: MORI could not construct the client.
    """

    def __init__(self, library: MoriLibrary, config: Any, *, put_retries: int) -> None:
        self._library = library
        self._put_retries = put_retries
        self._turns = SharedLock()
        try:
            self._native: Any = library.client_type(config)
        except RuntimeError as error:
            raise BackendError(
                f"MORI {library.version} could not open a pool of {config.dram.capacity_bytes} "
                f"bytes ({error}); it logs the reason to standard output"
            ) from error
        _live_clients.add(self)

    def register(self, region: MemoryRegion) -> None:
        """Makes memory known, which makes small ranges in it several times cheaper.

        Raises:
            BackendError: MORI refuses it, or does not move memory of this kind.
        """
        locations = {"cpu": self._library.cpu_location, "cuda": self._library.gpu_location}
        if region.device_type not in locations:
            raise BackendError(f"MORI does not move memory of device type {region.device_type!r}")
        accepted = self._client().register_memory(
            region.address,
            region.size_bytes,
            locations[region.device_type],
            -1 if region.device_index is None else region.device_index,
        )
        if not accepted:
            raise BackendError(
                f"MORI refused to register {region.size_bytes} bytes of {region.device_type} memory"
            )

    def contains(self, names: Sequence[str]) -> list[bool]:
        """Says which objects exist. Does not count as a use.

        Raises:
            BackendError: The client is closed, or MORI raised.
        """
        try:
            found: list[bool] = self._client().batch_exists(names)
        except (RuntimeError, TypeError) as error:
            raise BackendError(f"MORI could not look up {len(names)} objects: {error}") from error
        return found

    def store(
        self,
        names: Sequence[str],
        columns: GroupColumns,
        block_ids: Int64Array,
        *,
        objects_per_put: int,
    ) -> Moved:
        """Copies blocks into the objects that do not exist yet.

        Args:
            names: One per block, no duplicates.
            columns: Layout of the blocks.
            block_ids: int64[objects].
            objects_per_put: Most objects that one put finds room for.
        """
        step = min(objects_per_put, _objects_per_call(columns))
        copied = 0
        failed: list[int] = []
        for begin in range(0, len(names), step):
            # For one call only, so that transfers on other threads take turns.
            with self._turns.owned():
                found = self.contains(names[begin : begin + step])
                absent = [begin + index for index, exists in enumerate(found) if not exists]
                refused = self._put(names, columns, block_ids, absent)
            copied += len(absent) - len(refused)
            failed.extend(refused)
        return Moved(copied, tuple(failed))

    def load(self, names: Sequence[str], columns: GroupColumns, block_ids: Int64Array) -> Moved:
        """Copies objects into blocks.

        Args:
            names: One per block.
            columns: Layout of the blocks.
            block_ids: int64[objects].
        """
        step = _objects_per_call(columns)
        failed: list[int] = []
        for begin in range(0, len(names), step):
            batch = names[begin : begin + step]
            pointers = columns.pointers(block_ids[begin : begin + step])
            with self._turns.shared():
                answers = self._client().batch_get_ranges_into_ptr(
                    batch, pointers, columns.lengths(len(batch)), columns.offsets(len(batch))
                )
            indices = range(begin, begin + len(batch))
            failed.extend(_refused(indices, answers))
        return Moved(len(names) - len(failed), tuple(failed))

    def close(self) -> None:
        """Refuses further calls, and gives the pool back when the last that runs has returned."""
        self._native = None

    def abandon(self) -> None:
        """Refuses further calls, and never runs the destructor, not even when Python ends."""
        native, self._native = self._native, None
        # A list of abandoned clients would not do: Python empties modules when it ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))

    def _put(
        self,
        names: Sequence[str],
        columns: GroupColumns,
        block_ids: Int64Array,
        indices: Sequence[int],
    ) -> Sequence[int]:
        """Puts some of the objects, and again what failed. Returns the indices that still fail."""
        for _ in range(1 + self._put_retries):
            if not indices:
                break
            # At once: what a call did store may have evicted enough for the rest.
            answers = self._client().batch_put_ranges_from_ptr(
                [names[index] for index in indices],
                [columns.object_bytes] * len(indices),
                columns.pointers(block_ids[list(indices)]),
                columns.lengths(len(indices)),
                columns.offsets(len(indices)),
            )
            indices = _refused(indices, answers)
        return indices

    def _client(self) -> Any:
        # A local reference keeps the native client alive until the call on it has returned.
        native = self._native
        if native is None:
            raise BackendError("the pool is closed")
        return native


def _objects_per_call(columns: GroupColumns) -> int:
    return max(1, RANGES_PER_CALL // columns.range_count)


def _refused(indices: Sequence[int], answers: Sequence[bool]) -> list[int]:
    return [index for index, done in zip(indices, answers, strict=True) if not done]


_live_clients: "weakref.WeakSet[MoriClient]" = weakref.WeakSet()


def _abandon_in_child() -> None:
    for client in list(_live_clients):
        client.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)

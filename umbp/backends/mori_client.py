# SPDX-License-Identifier: Apache-2.0
"""A client of MORI's UMBP that is safe to use: the calls that umbp needs, with their traps closed.

What MORI 1.2.4 does, found by running its wheel, and what this module does about it:

* ``clear()`` on a client without a master makes every later put fail, for ever. It is never called;
  a reset is a new epoch in the keys, and old objects age out.
* A put of an existing key answers True and changes nothing, even when the size differs, and a
  ranged get reads any part of an object. In a pool of this process the size is part of the name, so
  objects of another size are never met. In a shared pool the scheduler must know the names, and it
  does not know sizes; there the namespace and the group in the key imply the size.
* A put never evicts to make room for itself. Puts are cut to the room that the watermarks keep free
  (``umbp.backends.mori_pages``), and what fails is tried again.
* A put of a key that another thread is writing answers False, and so does the second of two equal
  keys in a call. Puts go one call at a time, and only for keys that do not exist.
* A get protects its objects from eviction for a fixed time, ``UMBP_DRAM_READ_LEASE_MS``. A get that
  takes longer while puts evict answers True with the bytes of other objects. A pool of this process
  evicts only inside its own puts, so a put waits until no get runs, and gets wait for it. In a
  shared pool other processes evict at any time: gets are small, and one that took as long as the
  lease has failed, whatever it answered.
* A put of a key that another process is writing answers False. What is refused is looked up again.
* The destructor of a client asks a shared pool's server for leave, with no deadline and while it
  holds the interpreter's lock. Such a client is abandoned and never destroyed (about 12 KiB).
* A process that was forked from one with a client hangs at its exit, in the client's destructor.
  In a child, clients are abandoned: unusable, and never destroyed.
* Calls have no deadline. Whoever calls does it on a thread that something watches.
"""

import contextlib
import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from umbp.backends.base import Int64Array, MemoryRegion
from umbp.backends.mori_columns import GroupColumns
from umbp.backends.mori_library import MoriLibrary
from umbp.backends.mori_pages import PoolPlan
from umbp.backends.shared_lock import SharedLock
from umbp.errors import BackendError, BackendUnavailable

RANGES_PER_CALL: Final = 8192
"""Most ranges in one native call. The interpreter's lock is held while the lists are built and
read: about 1 ms for as many, during which vLLM's own thread waits."""

LEASED_BYTES_PER_GET: Final = 32 << 20
"""Most bytes in one get under a read lease: about 10 ms of copying."""


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


def shared_names(keys: Sequence[bytes]) -> list[str]:
    """Names objects of a shared pool: the key in hexadecimal."""
    return [key.hex() for key in keys]


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


def server_config(library: MoriLibrary, address: str, *, timeout_ms: int) -> Any:
    """Makes the ``UMBPConfig`` of a client of a standalone server; it owns no pool.

    Args:
        library: MORI.
        address: ``unix://`` and an absolute path.
        timeout_ms: How long the constructor tries to reach the server.
    """
    config = library.config_type()
    config.ssd.enabled = False
    # Not used, and refused when it is 0.
    config.dram.capacity_bytes = 1 << 20
    server = library.server_config_type()
    server.address = address
    server.auto_start = False
    server.startup_timeout_ms = timeout_ms
    config.standalone_process = server
    return config


class MoriClient:
    """One ``UMBPClient``. Thread-safe.

    Args:
        library: MORI.
        config: A ``UMBPConfig``.
        put_retries: How often a put that failed is tried again.
        read_lease_ms: For how long a get of a shared pool protects its objects; None where only
            this client's puts evict.
        master: Address of the master when the client is a node; it must have answered a moment
            ago, because the constructor waits for it with no deadline and holds the lock of the
            interpreter. So does the destructor, that ``close`` runs and ``abandon`` does not.
        clock: Seconds, monotonic.

    Raises:
        BackendUnavailable: The server or the master of a shared pool does not answer.
        BackendError: MORI could not construct the client.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        library: MoriLibrary,
        config: Any,
        *,
        put_retries: int,
        read_lease_ms: int | None = None,
        master: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._library = library
        self._put_retries = put_retries
        self._read_lease_s = None if read_lease_ms is None else read_lease_ms / 1000
        self._clock = clock
        self._turns = SharedLock()
        try:
            self._native: Any = library.client_type(config)
        except RuntimeError as error:
            if master is not None:
                raise BackendUnavailable(
                    f"MORI could not make a node of the master at {master} ({error}); it logs why "
                    "to standard output"
                ) from error
            if read_lease_ms is not None:
                raise BackendUnavailable(
                    f"the server at {config.standalone_process.address} does not answer "
                    f"({error}): if it is stopped, let it go on, or end it and start it anew"
                ) from error
            raise BackendError(
                f"MORI {library.version} could not open a pool of {config.dram.capacity_bytes} "
                f"bytes ({error}); it logs the reason to standard output"
            ) from error
        if read_lease_ms is not None and master is None:
            _never_destroy(self._native)
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

    def deregister(self, region: MemoryRegion) -> None:
        """Makes MORI forget memory, while no transfer uses it."""
        self._client().deregister_memory(region.address)

    def share(self, region: MemoryRegion) -> bool:
        """Gives a server access to memory, by HIP's handles. Blocks while the server is stopped.

        Returns:
            Whether it was done. MORI logs why not: the memory is not a device's, or no server is
            there.
        """
        return bool(
            self._client().register_memory(
                region.address,
                region.size_bytes,
                self._library.gpu_location,
                region.device_index or 0,
            )
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
        if self._read_lease_s is not None:
            step = min(step, max(1, LEASED_BYTES_PER_GET // columns.object_bytes))
        failed: list[int] = []
        for begin in range(0, len(names), step):
            batch = names[begin : begin + step]
            answers = self._get(batch, columns, block_ids[begin : begin + step])
            indices = range(begin, begin + len(batch))
            failed.extend(_refused(indices, answers))
        return Moved(len(names) - len(failed), tuple(failed))

    def publish(self) -> None:
        """Has a node tell its master at once what it stored, and not with the next heartbeat."""
        self._client().flush()

    def close(self) -> None:
        """Refuses further calls, and gives the pool back when the last that runs has returned."""
        self._native = None

    def abandon(self) -> None:
        """Refuses further calls, and never runs the destructor, not even when Python ends."""
        native, self._native = self._native, None
        _never_destroy(native)

    def _get(
        self, names: Sequence[str], columns: GroupColumns, block_ids: Int64Array
    ) -> Sequence[bool]:
        pointers = columns.pointers(block_ids)
        columns_of_ranges = columns.lengths(len(names)), columns.offsets(len(names))
        is_leased = self._read_lease_s is not None
        with contextlib.nullcontext() if is_leased else self._turns.shared():
            begun_s = self._clock()
            answers: Sequence[bool] = self._client().batch_get_ranges_into_ptr(
                names, pointers, *columns_of_ranges
            )
            elapsed_s = self._clock() - begun_s
        if self._read_lease_s is not None and elapsed_s >= self._read_lease_s:
            return [False] * len(names)
        return answers

    def _put(
        self,
        names: Sequence[str],
        columns: GroupColumns,
        block_ids: Int64Array,
        indices: Sequence[int],
    ) -> Sequence[int]:
        """Puts some of the objects, and again what failed. Returns the indices that still fail."""
        for attempt in range(1 + self._put_retries):
            if attempt and indices and self._read_lease_s is not None:
                indices = self._absent(names, indices)
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
        if indices and self._read_lease_s is not None:
            indices = self._absent(names, indices)
        return indices

    def _absent(self, names: Sequence[str], indices: Sequence[int]) -> Sequence[int]:
        """Leaves out what another process has stored meanwhile."""
        return _refused(indices, self.contains([names[index] for index in indices]))

    def _client(self) -> Any:
        # A local reference keeps the native client alive until the call on it has returned.
        native = self._native
        if native is None:
            raise BackendError("the pool is closed")
        return native


def _never_destroy(native: Any) -> None:
    # A list of such clients would not do: Python empties modules when it ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


def _objects_per_call(columns: GroupColumns) -> int:
    return max(1, RANGES_PER_CALL // columns.range_count)


def _refused(indices: Sequence[int], answers: Sequence[bool]) -> list[int]:
    return [index for index, done in zip(indices, answers, strict=True) if not done]


_live_clients: "weakref.WeakSet[MoriClient]" = weakref.WeakSet()


def _abandon_in_child() -> None:
    for client in list(_live_clients):
        client.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)

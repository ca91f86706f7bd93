# SPDX-License-Identifier: Apache-2.0
"""The ``memory`` backend: objects in this process's own host memory.

It needs no library beyond torch and runs wherever vLLM does. It is also the reference: what the
contract in ``umbp.backends.base`` means is what this backend does.
"""

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs

from umbp.backends.arena import Arena
from umbp.backends.base import (
    BACKEND_API,
    JobResult,
    KVMemory,
    ObjectLayout,
    PoolStats,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerSite,
)
from umbp.backends.copiers import Announce, Copier, HostCopier
from umbp.backends.device_copier import DeviceCopier
from umbp.backends.host_buffer import open_buffer
from umbp.backends.job_runner import JobRunner, TransferKind
from umbp.backends.object_index import ObjectIndex
from umbp.backends.pool_options import PoolOptions
from umbp.errors import BackendError, UsageError

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class MemoryOptions(PoolOptions):
    """Options of the ``memory`` backend: those that every pool has."""


class MemoryPool:
    """A ``WorkerPool`` of objects in one allocation, least recently loaded evicted first.

    Args:
        options: Size and threads.
        site: The worker.

    Raises:
        ConfigError: The memory is not there, or cannot be had as the options want it.
    """

    def __init__(self, options: PoolOptions, site: WorkerSite) -> None:
        self._capacity_bytes = options.resolve_capacity_bytes(site.rank_count)
        self._buffer = open_buffer(
            self._capacity_bytes,
            numa_node=options.numa_node,
            prefault=options.prefault,
            device_type=site.device_type,
            device_index=site.device_index,
        )
        self._arena = Arena(self._capacity_bytes)
        self._index = ObjectIndex(self._arena)
        self._layouts: dict[int, ObjectLayout] = {}
        self._copier: Copier | None = None
        self._runner = JobRunner(
            self._run,
            thread_count=options.transfer_threads,
            queue_limit=options.queue_limit,
            timeout_ms=site.transfer_timeout_ms,
            name=f"umbp-memory-{site.rank}",
        )

    def register(self, memory: KVMemory) -> None:
        """See ``WorkerPool.register``."""
        if self._copier is not None:
            raise BackendError("KV memory is already registered")
        if self._buffer.tensor is None:
            raise BackendError("the pool is closed")
        device_types = {region.device_type for region in memory.regions}
        if len(device_types) != 1:
            raise BackendError(f"KV memory must be on one device type, got {sorted(device_types)}")
        for layout in memory.layouts:
            if self._arena.rounded(layout.object_bytes) > self._capacity_bytes:
                raise BackendError(
                    f"a pool of {self._capacity_bytes} bytes per rank cannot hold one object of "
                    f"group {layout.group_index}, {layout.object_bytes} bytes; raise option "
                    "total_capacity_bytes or capacity_bytes"
                )
        copier_type = HostCopier if device_types == {"cpu"} else DeviceCopier
        self._copier = copier_type(memory, self._buffer.tensor)
        self._layouts = {layout.group_index: layout for layout in memory.layouts}

    def unregister(self) -> None:
        """See ``MovablePool.unregister``."""
        self._copier = None

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``WorkerPool.contains``."""
        return self._index.contains(keys)

    def load(self, job: TransferJob) -> None:
        """See ``WorkerPool.load``."""
        self._runner.submit(TransferKind.LOAD, job)

    def store(self, job: TransferJob) -> None:
        """See ``WorkerPool.store``."""
        self._runner.submit(TransferKind.STORE, job)

    def poll(self) -> list[JobResult]:
        """See ``WorkerPool.poll``."""
        return self._runner.poll()

    def wait(self, timeout_s: float) -> None:
        """See ``WorkerPool``."""
        self._runner.wait(timeout_s)

    def cancel(self, job_id: int) -> None:
        """See ``WorkerPool.cancel``."""
        self._runner.cancel(job_id)

    def take_evictions(self) -> list[bytes]:
        """See ``WorkerPool.take_evictions``."""
        return self._index.take_evictions()

    def stats(self) -> PoolStats:
        """See ``WorkerPool.stats``."""
        return self._index.stats()

    def close(self, timeout_s: float) -> None:
        """See ``WorkerPool.close``."""
        if not self._runner.close(timeout_s):
            logger.warning("a transfer still runs; its pool memory stays allocated")
            return
        self._index.clear()
        self._copier = None
        self._buffer.close()

    def _run(self, kind: TransferKind, job: TransferJob) -> JobResult:
        """Executes one job; on a runner thread."""
        if self._copier is None:
            raise BackendError("no KV memory is registered")
        for part in job.parts:
            self._check(part)
        if kind is TransferKind.LOAD:
            return self._load(self._copier, job)
        return self._store(self._copier, job)

    def _check(self, part: TransferPart) -> None:
        """Refuses a part that would touch memory outside of its blocks."""
        layout = self._layouts.get(part.group_index)
        if layout is None:
            raise UsageError(f"group {part.group_index} has no layout")
        if len(part.keys) != len(part.block_ids):
            raise UsageError(f"{len(part.keys)} keys for {len(part.block_ids)} blocks")
        if len(part.keys) == 0:
            return
        least, most = int(part.block_ids.min()), int(part.block_ids.max())
        if least < 0 or most >= layout.block_count:
            raise UsageError(f"block ids {least} to {most} of {layout.block_count} blocks")

    def _load(self, copier: Copier, job: TransferJob) -> JobResult:
        keys = [key for part in job.parts for key in part.keys]
        sizes = [self._layouts[part.group_index].object_bytes for part in job.parts]
        counts = [len(part.keys) for part in job.parts]
        size_of_each = [
            size for size, count in zip(sizes, counts, strict=True) for _ in range(count)
        ]
        pins = self._index.pin(keys, size_of_each)
        if pins.missing_keys:
            return JobResult(
                job.job_id,
                TransferOutcome.FAILED,
                failed_keys=pins.missing_keys,
                reason=f"{len(pins.missing_keys)} of {len(keys)} objects are missing",
            )
        ends = itertools.accumulate(counts)
        try:
            for part, count, end in zip(job.parts, counts, ends, strict=True):
                offsets = pins.offsets[end - count : end]
                copier.load(part.group_index, part.block_ids, offsets, self._announce(job))
        finally:
            self._index.unpin(pins)
        return JobResult(job.job_id, TransferOutcome.DONE, bytes_moved=sum(size_of_each))

    def _announce(self, job: TransferJob) -> Announce | None:
        """Returns what to tell when a load can no longer fail; None where it is of no use."""
        if not job.may_arrive or len(job.parts) > 1:
            # Parts are copied one after the other, and the last may still fail.
            return None
        return functools.partial(self._runner.announce, job.job_id)

    def _store(self, copier: Copier, job: TransferJob) -> JobResult:
        rejected: list[bytes] = []
        bytes_moved = 0
        for part in job.parts:
            object_bytes = self._layouts[part.group_index].object_bytes
            room = self._index.reserve(part.keys, object_bytes)
            try:
                copier.store(part.group_index, part.block_ids[room.positions], room.offsets)
            except BaseException:
                self._index.abandon(room)
                raise
            self._index.publish(room)
            bytes_moved += object_bytes * len(room.keys)
            rejected.extend(room.rejected_keys)
        if not rejected:
            return JobResult(job.job_id, TransferOutcome.DONE, bytes_moved=bytes_moved)
        return JobResult(
            job.job_id,
            TransferOutcome.FAILED,
            bytes_moved=bytes_moved,
            failed_keys=tuple(rejected),
            reason=f"no room for {len(rejected)} of {job.object_count} objects: all is in use",
        )


class MemoryBackend:
    """The ``Backend`` named ``memory``."""

    api: ClassVar[int] = BACKEND_API
    options_type: ClassVar[type[Any]] = MemoryOptions
    pool_in_worker: ClassVar[bool] = True
    follows_sleep_mode: ClassVar[bool] = True
    # ``ObjectIndex.contains`` takes no lock: some 0.05 microseconds a key, whatever else runs.
    contains_is_local: ClassVar[bool] = True

    @classmethod
    def open_worker(cls, options: Any, site: WorkerSite) -> MemoryPool:
        """See ``Backend.open_worker``."""
        return MemoryPool(options, site)

# SPDX-License-Identifier: Apache-2.0
"""A minimal umbp backend: objects are tensors in a dict, least recently loaded evicted first."""

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch

from umbp.backends.base import (
    JobResult,
    KVMemory,
    PoolStats,
    TransferJob,
    TransferOutcome,
    WorkerSite,
)
from umbp.backends.job_runner import JobRunner, TransferKind
from umbp.errors import UsageError
from umbp.options import option

Blocks = list[tuple[bytes, list[torch.Tensor]]]
"""Key of each object, and views of the ranges of its block in KV memory."""


@attrs.frozen
class DictOptions:
    """What the user may write beside ``"backend": "dict"``."""

    capacity_bytes: int = option(
        1 << 30, help="Memory for objects on each rank.", unit="bytes", minimum=1
    )
    queue_limit: int = option(1024, help="Transfers that may wait on each rank.", minimum=1)


class DictPool:
    """The ``WorkerPool``. Transfers run one at a time on the job runner's thread."""

    def __init__(self, options: DictOptions, site: WorkerSite) -> None:
        self._capacity_bytes = options.capacity_bytes
        self._used_bytes = 0
        self._evicted_count = 0
        self._evicted: deque[bytes] = deque(maxlen=65536)
        self._objects: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()  # The runner changes what other threads ask about.
        self._memory = KVMemory((), ())
        self._runner = JobRunner(
            self._run,
            thread_count=1,
            queue_limit=options.queue_limit,
            timeout_ms=site.transfer_timeout_ms,
            name="dict-pool",
        )

    def register(self, memory: KVMemory) -> None:
        self._memory = memory

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._objects for key in keys]

    def load(self, job: TransferJob) -> None:
        self._runner.submit(TransferKind.LOAD, job)

    def store(self, job: TransferJob) -> None:
        self._runner.submit(TransferKind.STORE, job)

    def poll(self) -> list[JobResult]:
        return self._runner.poll()

    def cancel(self, job_id: int) -> None:
        self._runner.cancel(job_id)

    def wait(self, timeout_s: float) -> None:
        self._runner.wait(timeout_s)

    def take_evictions(self) -> list[bytes]:
        with self._lock:
            evicted = list(self._evicted)
            self._evicted.clear()
            return evicted

    def stats(self) -> PoolStats:
        with self._lock:
            return PoolStats(
                capacity_bytes=self._capacity_bytes,
                used_bytes=self._used_bytes,
                object_count=len(self._objects),
                evicted_count=self._evicted_count,
            )

    def close(self, timeout_s: float) -> None:
        if self._runner.close(timeout_s):  # Otherwise a transfer still uses the objects.
            with self._lock:
                self._objects.clear()
                self._used_bytes = 0

    def _run(self, kind: TransferKind, job: TransferJob) -> JobResult:
        blocks = [
            (key, self._ranges(part.group_index, block_id))
            for part in job.parts
            for key, block_id in zip(part.keys, part.block_ids.tolist(), strict=True)
        ]
        return self._load(job, blocks) if kind is TransferKind.LOAD else self._store(job, blocks)

    def _ranges(self, group_index: int, block_id: int) -> list[torch.Tensor]:
        """Views the bytes of one block, range by range; works on every device."""
        layout = self._memory.layout(group_index)
        if not 0 <= block_id < layout.block_count:
            raise UsageError(f"block {block_id} of {layout.block_count} blocks")
        begins = layout.base_addresses + block_id * layout.block_strides
        return [
            self._bytes_at(begin, size)
            for begin, size in zip(begins.tolist(), layout.range_bytes.tolist(), strict=True)
        ]

    def _bytes_at(self, address: int, size_bytes: int) -> torch.Tensor:
        for region in self._memory.regions:
            begin = address - region.address
            if begin >= 0 and begin + size_bytes <= region.size_bytes:
                view: torch.Tensor = region.tensor[begin : begin + size_bytes]
                return view
        raise UsageError(f"{size_bytes} bytes at {address:#x} are not in KV memory")

    def _load(self, job: TransferJob, blocks: Blocks) -> JobResult:
        with self._lock:
            missing = tuple(key for key, _ in blocks if key not in self._objects)
            if missing:  # A load that cannot fill every byte fails as a whole.
                return failed(job, missing, "missing")
            for key, _ in blocks:
                self._objects.move_to_end(key)
        bytes_moved = 0
        for key, ranges in blocks:
            stored = self._objects[key]
            if len(stored) != sum(len(target) for target in ranges):
                return failed(job, (key,), "of another size")
            begin = 0
            for target in ranges:
                target.copy_(stored[begin : begin + len(target)])
                begin += len(target)
            bytes_moved += begin
        return JobResult(job.job_id, TransferOutcome.DONE, bytes_moved)

    def _store(self, job: TransferJob, blocks: Blocks) -> JobResult:
        bytes_moved = 0
        refused = []
        for key, ranges in blocks:
            if key in self._objects:  # The first bytes under a key stay.
                continue
            size_bytes = sum(len(view) for view in ranges)
            if size_bytes > self._capacity_bytes:
                refused.append(key)
                continue
            stored = torch.cat([view.cpu() for view in ranges])
            with self._lock:
                self._make_room(size_bytes)
                self._objects[key] = stored  # Only now can it be found: all its bytes are there.
                self._used_bytes += size_bytes
            bytes_moved += size_bytes
        if refused:
            return failed(job, tuple(refused), "larger than the pool", bytes_moved)
        return JobResult(job.job_id, TransferOutcome.DONE, bytes_moved)

    def _make_room(self, size_bytes: int) -> None:
        while self._used_bytes + size_bytes > self._capacity_bytes:
            key, evicted = self._objects.popitem(last=False)
            self._used_bytes -= len(evicted)
            self._evicted.append(key)
            self._evicted_count += 1


def failed(job: TransferJob, keys: tuple[bytes, ...], what: str, bytes_moved: int = 0) -> JobResult:
    reason = f"{len(keys)} objects {what}"
    return JobResult(job.job_id, TransferOutcome.FAILED, bytes_moved, keys, reason)


class DictBackend:
    """What the entry point names."""

    api: ClassVar[int] = 1
    options_type: ClassVar[type[Any]] = DictOptions
    pool_in_worker: ClassVar[bool] = True

    @classmethod
    def open_worker(cls, options: DictOptions, site: WorkerSite) -> DictPool:
        return DictPool(options, site)

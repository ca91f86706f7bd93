# SPDX-License-Identifier: Apache-2.0
"""The memory backend's pool behind a gate: a test says when jobs run, and whether they can.

Whatever is not held has ended when ``poll`` is called, so that a test that counts steps always
counts the same.
"""

import time
from collections.abc import Sequence

from umbp.backends.base import (
    JobResult,
    KVMemory,
    PoolStats,
    TransferJob,
    TransferOutcome,
    WorkerPool,
    WorkerSite,
)
from umbp.backends.memory import MemoryOptions, MemoryPool

PATIENCE_S = 30.0
"""Far more than any copy takes."""


class HeldPool:
    """A ``WorkerPool`` that obeys a test.

    Attributes:
        holds_loads: Loads wait for ``release``.
        holds_stores: Stores wait for ``release``.
        failing_loads: How many of the loads to come fail, after spoiling what they would fill.
        failing_stores: How many of the stores to come fail, untried.
        is_mute: Nothing that has ended is answered.
        claims_all: Every lookup finds everything.
        loads: Every load that was asked for.
        stores: Every store that was asked for.
        stored_keys: Keys of the stores that have ended well.
    """

    def __init__(self, rank: int = 0, capacity_bytes: int = 1 << 20) -> None:
        site = WorkerSite(
            rank=rank,
            rank_count=1,
            device_type="cpu",
            device_index=None,
            instance="cases",
            transfer_timeout_ms=int(PATIENCE_S * 1000),
        )
        self._inner: WorkerPool = MemoryPool(MemoryOptions(capacity_bytes=capacity_bytes), site)
        self._held: list[tuple[str, TransferJob]] = []
        self._running: dict[int, tuple[str, TransferJob]] = {}
        self._results: list[JobResult] = []
        self._memory: KVMemory | None = None
        self.holds_loads = False
        self.holds_stores = False
        self.failing_loads = 0
        self.failing_stores = 0
        self.is_mute = False
        self.claims_all = False
        self.loads: list[TransferJob] = []
        self.stores: list[TransferJob] = []
        self.stored_keys: set[bytes] = set()

    def register(self, memory: KVMemory) -> None:
        self._memory = memory
        self._inner.register(memory)

    def unregister(self) -> None:
        assert isinstance(self._inner, MemoryPool)
        self._inner.unregister()

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [True] * len(keys) if self.claims_all else self._inner.contains(keys)

    def load(self, job: TransferJob) -> None:
        self.loads.append(job)
        if self.failing_loads:
            self.failing_loads -= 1
            self._spoil(job)
            keys = tuple(key for part in job.parts for key in part.keys)
            self._results.append(
                JobResult(job.job_id, TransferOutcome.FAILED, failed_keys=keys, reason="told to")
            )
        else:
            self._take("load", job, self.holds_loads)

    def store(self, job: TransferJob) -> None:
        self.stores.append(job)
        if self.failing_stores:
            self.failing_stores -= 1
            self._results.append(JobResult(job.job_id, TransferOutcome.NOT_ATTEMPTED))
        else:
            self._take("store", job, self.holds_stores)

    def _take(self, kind: str, job: TransferJob, is_held: bool) -> None:
        if is_held:
            self._held.append((kind, job))
        else:
            self._submit(kind, job)

    def _submit(self, kind: str, job: TransferJob) -> None:
        self._running[job.job_id] = (kind, job)
        (self._inner.load if kind == "load" else self._inner.store)(job)

    def _spoil(self, job: TransferJob) -> None:
        assert self._memory is not None
        for part in job.parts:
            layout = self._memory.layout(part.group_index)
            for address, size in zip(
                layout.addresses(part.block_ids).ravel(),
                list(layout.range_bytes) * len(part.block_ids),
                strict=True,
            ):
                region = next(r for r in self._memory.regions if address - r.address >= 0)
                at = int(address) - region.address
                region.tensor[at : at + int(size)] = 0x55

    def release(self) -> None:
        """Lets everything that is held run, and holds nothing more."""
        self.holds_loads = self.holds_stores = False
        held, self._held = self._held, []
        for kind, job in held:
            self._submit(kind, job)

    def poll(self) -> list[JobResult]:
        give_up_s = time.monotonic() + PATIENCE_S
        while self._running:
            assert time.monotonic() < give_up_s, "a copy does not end"
            for result in self._inner.poll():
                kind, job = self._running.pop(result.job_id)
                if kind == "store" and result.outcome is TransferOutcome.DONE:
                    self.stored_keys.update(key for part in job.parts for key in part.keys)
                self._results.append(result)
            time.sleep(0.0001)
        if self.is_mute:
            return []
        results, self._results = self._results, []
        return results

    def cancel(self, job_id: int) -> None:
        for kind, job in list(self._held):
            if job.job_id == job_id:
                self._held.remove((kind, job))
                self._results.append(JobResult(job_id, TransferOutcome.NOT_ATTEMPTED))
        self._inner.cancel(job_id)

    def evict_all(self) -> None:
        """Removes every object."""
        assert isinstance(self._inner, MemoryPool)
        self._inner._index.clear()

    def take_evictions(self) -> list[bytes]:
        return self._inner.take_evictions()

    def stats(self) -> PoolStats:
        return self._inner.stats()

    def close(self, timeout_s: float) -> None:
        self._inner.close(timeout_s)

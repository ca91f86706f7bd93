# SPDX-License-Identifier: Apache-2.0
"""A backend that goes wrong on demand: the ``memory`` backend behind a pool that obeys ``FAULTS``.

It keeps the contract of ``umbp.backends.base`` in all it does. ``FAULTS`` is one per worker process
and is set from a test with ``Engine.set_faults``. ``install`` makes the backend
known by an entry point, as any backend is.
"""

import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import attrs
import torch

from umbp.backends.base import (
    BACKEND_API,
    JobResult,
    KVMemory,
    PoolStats,
    TransferJob,
    TransferOutcome,
    WorkerPool,
    WorkerSite,
)
from umbp.backends.memory import MemoryBackend, MemoryOptions
from umbp.errors import BackendError

_POLL_S: Final = 0.001
_HELD_LOOKUP_S: Final = 60.0
_GARBAGE: Final = 0x40
"""Four of these bytes are 3.0 as float32: finite, and nothing that a model computes."""

Failure = Literal["whole", "part", "not_attempted", "raise"]


@attrs.define
class Faults:
    """What goes wrong, and what was asked.

    Attributes:
        failing_loads: How many of the loads to come fail; None for all.
        failure: How they fail. ``part`` fills the first half of the blocks and spoils the others.
        hold_loads: Loads wait before they move a byte.
        hold_stores: Stores wait before they move a byte.
        hold_lookups: Lookups wait.
        late_loads: Loads that may arrive are announced at once, and move no byte before somebody
            waits for them, or this is over.
        failing_stores: Stores fail.
        failing_lookups: Lookups raise.
        claim_all: Every lookup finds everything.
        loads: Loads asked for so far.
        stores: Stores asked for so far.
        lookups: Lookups asked for so far.
    """

    failing_loads: int | None = 0
    failure: Failure = "whole"
    hold_loads: bool = False
    hold_stores: bool = False
    hold_lookups: bool = False
    late_loads: bool = False
    failing_stores: bool = False
    failing_lookups: bool = False
    claim_all: bool = False
    loads: int = 0
    stores: int = 0
    lookups: int = 0

    def takes_load(self) -> Failure | None:
        """Counts a load; says how it is to fail, if it is."""
        self.loads += 1
        if self.failing_loads is None:
            return self.failure
        if self.failing_loads > 0:
            self.failing_loads -= 1
            return self.failure
        return None


FAULTS: Final = Faults()


@attrs.frozen(eq=False)
class _LateArrival:
    """An ``Arrival`` that moves every byte when it is waited for, as late as may be."""

    pool: "FaultyPool"
    job: TransferJob

    def wait(self) -> None:
        """See ``Arrival.wait``."""
        self.pool.bring(self.job)


class FaultyPool:
    """A ``WorkerPool`` in front of another."""

    def __init__(self, inner: WorkerPool) -> None:
        self._inner = inner
        self._memory: KVMemory | None = None
        self._held_loads: deque[TransferJob] = deque()
        self._held_stores: deque[TransferJob] = deque()
        self._late_loads: dict[int, TransferJob] = {}
        self._results: list[JobResult] = []
        self._spoiled: dict[int, TransferJob] = {}

    def register(self, memory: KVMemory) -> None:
        """See ``WorkerPool.register``."""
        self._memory = memory
        self._inner.register(memory)

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """See ``WorkerPool.contains``."""
        FAULTS.lookups += 1
        end_s = time.monotonic() + _HELD_LOOKUP_S
        while FAULTS.hold_lookups and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        if FAULTS.failing_lookups:
            raise BackendError("lookups fail on demand")
        return [True] * len(keys) if FAULTS.claim_all else self._inner.contains(keys)

    def load(self, job: TransferJob) -> None:
        """See ``WorkerPool.load``."""
        failure = FAULTS.takes_load()
        if failure == "raise":
            raise BackendError("loads fail on demand")
        if failure in ("whole", "not_attempted"):
            self._results.append(_failed(job, attempted=failure == "whole"))
            return
        if failure == "part":
            self._spoiled[job.job_id] = job
        if FAULTS.hold_loads:
            self._held_loads.append(job)
        elif FAULTS.late_loads and job.may_arrive and failure is None:
            self._late_loads[job.job_id] = job
            arrival = _LateArrival(self, job)
            self._results.append(JobResult(job.job_id, TransferOutcome.ARRIVING, arrival=arrival))
        else:
            self._inner.load(job)

    def store(self, job: TransferJob) -> None:
        """See ``WorkerPool.store``."""
        FAULTS.stores += 1
        if FAULTS.failing_stores:
            self._results.append(_failed(job, attempted=True))
        elif FAULTS.hold_stores:
            self._held_stores.append(job)
        else:
            self._inner.store(job)

    def poll(self) -> list[JobResult]:
        """See ``WorkerPool.poll``."""
        self._end_overdue()
        while self._held_loads and not FAULTS.hold_loads:
            self._inner.load(self._held_loads.popleft())
        while self._held_stores and not FAULTS.hold_stores:
            self._inner.store(self._held_stores.popleft())
        if not FAULTS.late_loads:
            for job in list(self._late_loads.values()):
                self.bring(job)
        self._take_results()
        results, self._results = self._results, []
        return results

    def cancel(self, job_id: int) -> None:
        """See ``WorkerPool.cancel``."""
        for held in (self._held_loads, self._held_stores):
            for job in [job for job in held if job.job_id == job_id]:
                held.remove(job)
                self._spoiled.pop(job_id, None)
                self._results.append(_failed(job, attempted=False))
        self._inner.cancel(job_id)

    def take_evictions(self) -> list[bytes]:
        """See ``WorkerPool.take_evictions``."""
        return self._inner.take_evictions()

    def stats(self) -> PoolStats:
        """See ``WorkerPool.stats``."""
        return self._inner.stats()

    def close(self, timeout_s: float) -> None:
        """See ``WorkerPool.close``."""
        FAULTS.hold_lookups = False
        self._inner.close(timeout_s)

    def bring(self, job: TransferJob) -> None:
        """Does a late load, and returns when it is done."""
        if self._late_loads.pop(job.job_id, None) is None:
            return
        self._inner.load(attrs.evolve(job, may_arrive=False, fence=None))
        while all(result.job_id != job.job_id for result in self._take_results()):
            time.sleep(_POLL_S)

    def _take_results(self) -> list[JobResult]:
        """Takes what the pool behind this one has to say, and returns it as it is to be said."""
        taken = []
        for result in self._inner.poll():
            if result.job_id not in self._spoiled:
                taken.append(result)
            elif result.outcome is not TransferOutcome.ARRIVING:
                # It is not to end well, and so must not be announced.
                taken.append(self._spoil(self._spoiled.pop(result.job_id)))
        self._results += taken
        return taken

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for job in (*self._held_loads, *self._held_stores):
            if now_s > job.deadline_s:
                self.cancel(job.job_id)

    def _spoil(self, job: TransferJob) -> JobResult:
        """Overwrites the second half of what a load has filled."""
        assert self._memory is not None
        failed: list[bytes] = []
        for part in job.parts:
            layout = self._memory.layout(part.group_index)
            half = len(part.keys) // 2
            for row in layout.addresses(part.block_ids[half:]).tolist():
                for address, size in zip(row, layout.range_bytes.tolist(), strict=True):
                    _overwrite(self._memory, address, size)
            failed.extend(part.keys[half:])
        return JobResult(
            job.job_id, TransferOutcome.FAILED, failed_keys=tuple(failed), reason="on demand"
        )


def _overwrite(memory: KVMemory, address: int, size: int) -> None:
    for region in memory.regions:
        begin = address - region.address
        if 0 <= begin < region.size_bytes:
            # vLLM may have allocated it in inference mode, outside of which it is not written.
            with torch.inference_mode():
                region.tensor[begin : begin + size].fill_(_GARBAGE)


def _failed(job: TransferJob, *, attempted: bool) -> JobResult:
    if not attempted:
        return JobResult(job.job_id, TransferOutcome.NOT_ATTEMPTED, reason="on demand")
    keys = tuple(key for part in job.parts for key in part.keys)
    return JobResult(job.job_id, TransferOutcome.FAILED, failed_keys=keys, reason="on demand")


class FaultyBackend:
    """What the entry point ``faulty`` names."""

    api: ClassVar[int] = BACKEND_API
    options_type: ClassVar[type[Any]] = MemoryOptions
    pool_in_worker: ClassVar[bool] = True

    @classmethod
    def open_worker(cls, options: Any, site: WorkerSite) -> FaultyPool:
        """See ``Backend.open_worker``."""
        return FaultyPool(MemoryBackend.open_worker(options, site))


def install(folder: Path) -> None:
    """Installs the backend for this process and those that it forks."""
    site = folder / "faulty-site"
    metadata = site / "umbp_faulty_backend-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: umbp-faulty-backend\nVersion: 1\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[umbp.backends]\nfaulty = faulty_backend:FaultyBackend\n"
    )
    sys.path.append(str(site))

# SPDX-License-Identifier: Apache-2.0
"""A backend's side in a worker, under a virtual clock and a fault plan.

Bytes move when a job ends, not when it is handed over: a store reads its source blocks as late as
it may, and a load writes its destination in two pieces with nonsense before. Whoever reuses a block
too early is found out by its content. A load that may arrive says so after its first piece; the
second comes when it ends, or when a step has it waited for.
"""

from collections.abc import Callable, Sequence

import attrs

from umbp.backends.base import (
    JobResult,
    KVMemory,
    PoolStats,
    TransferJob,
    TransferOutcome,
)
from umbp.errors import BackendStalled
from umbp.sim.clock import VirtualClock
from umbp.sim.faults import FaultSource, TransferFault
from umbp.sim.memory import RankMemory, StoredPage
from umbp.sim.store import SimStore

OBJECT_BYTES = 1
"""What an object counts for in ``bytes_moved``."""

_LEFT = "another transfer has stalled"


@attrs.define(eq=False)
class _Job:
    """A job that has not been answered.

    Attributes:
        job: What was asked for.
        fault: How it will end.
        contents: Of a load that has begun, what it writes; None for each object that is missing.
        begun: It touches its blocks.
        begun_s: Since when.
        whole: A load whose bytes are all there; only the end has still to be said.
    """

    job: TransferJob
    is_load: bool
    fault: TransferFault
    contents: list[StoredPage | None] = attrs.field(factory=list)
    begun: bool = False
    begun_s: float = 0.0
    whole: bool = False

    def pairs(self) -> list[tuple[bytes, int]]:
        """Returns (key, block id) of every object."""
        return [
            (key, int(block_id))
            for part in self.job.parts
            for key, block_id in zip(part.keys, part.block_ids, strict=True)
        ]


@attrs.frozen(eq=False)
class _SimArrival:
    """An ``Arrival``: in this memory, work that is submitted is done."""

    wait_for: Callable[[], None]

    def wait(self) -> None:
        """See ``Arrival.wait``."""
        self.wait_for()


class SimPool:
    """A ``WorkerPool`` whose faults are planned.

    Args:
        memory: KV memory of the rank.
        store: The objects.
        clock: The time.
        faults: What goes wrong.
        timeout_s: How long a native call may take before the pool counts as stalled.
        synchronous: Somebody waits for loads: none is held for ever without a word.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        *,
        memory: RankMemory,
        store: SimStore,
        clock: VirtualClock,
        faults: FaultSource,
        timeout_s: float,
        synchronous: bool,
    ) -> None:
        self._memory = memory
        self._store = store
        self._clock = clock
        self._faults = faults
        self._timeout_s = timeout_s
        self._jobs: dict[int, _Job] = {}
        self._results: list[JobResult] = []
        # Of held jobs, how each one would go on.
        self._held: dict[int, Callable[[], None]] = {}
        # Of these, those that were reported as stalled.
        self._left: set[int] = set()
        self._synchronous = synchronous
        self._stalled = False
        self._holding = True

    @property
    def open_jobs(self) -> int:
        """Jobs that have not been answered."""
        return len(self._jobs)

    # ------------------------------------------------------------ WorkerPool

    def register(self, memory: KVMemory) -> None:
        """Nothing to do: there is no memory to register."""

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Says which objects exist."""
        return [key in self._store for key in keys]

    def load(self, job: TransferJob) -> None:
        """Plans a load."""
        fault = self._faults.load()
        if fault in (TransferFault.HELD, TransferFault.LEFT) and self._synchronous:
            fault = TransferFault.HUNG
        self._submit(_Job(job, True, fault))

    def store(self, job: TransferJob) -> None:
        """Plans a store."""
        self._submit(_Job(job, False, self._faults.store()))

    def poll(self) -> list[JobResult]:
        """Returns the results that have come in.

        Raises:
            BackendStalled: A job hangs for longer than the timeout.
        """
        if self._stalled:
            raise BackendStalled("a simulated native call has outlived its timeout")
        results, self._results = self._results, []
        return results

    def cancel(self, job_id: int) -> None:
        """Ends a job that has not begun."""
        job = self._jobs.get(job_id)
        if job is not None and not job.begun:
            self._end(job, TransferOutcome.NOT_ATTEMPTED, "cancelled")

    def take_evictions(self) -> list[bytes]:
        """Returns nothing: evictions are not reported."""
        return []

    def stats(self) -> PoolStats:
        """Says how full the store is."""
        count = len(self._store)
        return PoolStats(count, count, count, self._store.evicted_count)

    def close(self, timeout_s: float) -> None:
        """Lets held jobs end."""
        self.revive(for_good=True)

    # ------------------------------------------------------------ for the simulation

    def revive(self, *, for_good: bool = False) -> None:
        """Lets every job that is held, or hangs, go on; ``for_good``: those still to begin, too."""
        self._stalled = False
        self._holding = not for_good
        held, self._held = self._held, {}
        for go_on in held.values():
            go_on()

    # ------------------------------------------------------------ jobs

    def _submit(self, job: _Job) -> None:
        self._jobs[job.job.job_id] = job
        if self._left:
            self._end(job, TransferOutcome.NOT_ATTEMPTED, _LEFT)
            return
        match job.fault:
            case TransferFault.QUEUE_FULL:
                self._end(job, TransferOutcome.NOT_ATTEMPTED, "queue full")
            case TransferFault.SILENT:
                self._clock.call_at(job.job.deadline_s, lambda: self._expire(job))
            case TransferFault.LATE:
                self._clock.call_in(self._timeout_s * 0.9, lambda: self._begin(job))
            case _:
                self._clock.call_in(self._faults.latency_s() / 2, lambda: self._begin(job))

    def _expire(self, job: _Job) -> None:
        if job.job.job_id in self._jobs and not job.begun:
            self._end(job, TransferOutcome.NOT_ATTEMPTED, "past its deadline")

    def _begin(self, job: _Job) -> None:
        if job.job.job_id not in self._jobs:
            return
        if self._clock.now() > job.job.deadline_s:
            self._expire(job)
            return
        job.begun, job.begun_s = True, self._clock.now()
        if job.job.fence is not None:
            job.job.fence()
        pairs = job.pairs()
        if job.is_load:
            job.contents = [self._store.get(key) for key, _ in pairs]
            for _, block_id in pairs:
                self._memory.begin_load(block_id)
        match job.fault:
            case TransferFault.HELD if self._holding:
                self._held[job.job.job_id] = lambda: self._half(job)
            case TransferFault.HUNG if self._holding:
                self._held[job.job.job_id] = lambda: self._half(job)
                self._clock.call_in(self._timeout_s, lambda: self._note_stalled(job))
            case TransferFault.LEFT if self._holding:
                self._held[job.job.job_id] = lambda: self._half(job)
                self._clock.call_in(self._timeout_s, lambda: self._leave(job))
            case TransferFault.LATE:
                self._clock.call_in(self._timeout_s * 0.4, lambda: self._half(job))
            case _:
                self._clock.call_in(self._faults.latency_s() / 4, lambda: self._half(job))

    def _note_stalled(self, job: _Job) -> None:
        if job.job.job_id in self._held:
            self._stalled = True

    def _leave(self, job: _Job) -> None:
        if job.job.job_id not in self._held:
            return
        self._left.add(job.job.job_id)
        self._results.append(JobResult(job.job.job_id, TransferOutcome.STALLED, reason="held up"))
        for other in list(self._jobs.values()):
            if not other.begun:
                self._end(other, TransferOutcome.NOT_ATTEMPTED, _LEFT)

    def _half(self, job: _Job) -> None:
        """Moves every second object; the others follow at the end."""
        delay_s = self._faults.latency_s() / 4
        if job.fault is TransferFault.LATE:
            delay_s = self._timeout_s * 0.4
        if job.is_load:
            self._write(job, slice(0, None, 2))
            if job.job.may_arrive and self._is_sure(job):
                delay_s = max(delay_s, self._faults.arrival_s())
                self._announce(job)
        self._clock.call_in(delay_s, lambda: self._finish(job))

    @staticmethod
    def _is_sure(job: _Job) -> bool:
        """Says whether a load, of which some has come, cannot fail any more."""
        is_spoilt = job.fault in (TransferFault.LOST, TransferFault.PARTIAL)
        return not is_spoilt and None not in job.contents

    def _announce(self, job: _Job) -> None:
        arrival = _SimArrival(lambda: self._arrive(job))
        outcome = TransferOutcome.ARRIVING
        self._results.append(JobResult(job.job.job_id, outcome, arrival=arrival))

    def _arrive(self, job: _Job) -> None:
        """Moves what is left of a load."""
        if not job.whole:
            job.whole = True
            self._write(job, slice(1, None, 2))
            for _, block_id in job.pairs():
                self._memory.end_load(block_id)

    def _write(self, job: _Job, which: slice) -> None:
        for (_, block_id), content in list(zip(job.pairs(), job.contents, strict=True))[which]:
            if content is not None:
                self._memory.write(block_id, content)

    def _finish(self, job: _Job) -> None:
        pairs = job.pairs()
        lost = self._lost(job, pairs)
        if job.is_load:
            self._arrive(job)
            for key, block_id in pairs:
                if key in lost:
                    self._memory.scribble(block_id)
        else:
            for key, block_id in pairs:
                if key not in lost:
                    self._store.put(key, self._memory.read(block_id))
        failed = tuple(key for key, _ in pairs if key in lost)
        outcome = TransferOutcome.FAILED if failed else TransferOutcome.DONE
        moved = OBJECT_BYTES * (len(pairs) - len(failed))
        self._end(job, outcome, "lost" if failed else "", moved=moved, failed=failed)

    def _lost(self, job: _Job, pairs: list[tuple[bytes, int]]) -> set[bytes]:
        """Returns the keys that fail."""
        lost = {
            key for (key, _), content in zip(pairs, job.contents, strict=False) if content is None
        }
        if job.fault is TransferFault.LOST:
            lost.update(key for key, _ in pairs)
        elif job.fault is TransferFault.PARTIAL:
            lost.add(pairs[self._faults.index(len(pairs))][0])
        return lost

    def _end(
        self,
        job: _Job,
        outcome: TransferOutcome,
        reason: str,
        *,
        moved: int = 0,
        failed: tuple[bytes, ...] = (),
    ) -> None:
        del self._jobs[job.job.job_id]
        self._left.discard(job.job.job_id)
        self._results.append(JobResult(job.job.job_id, outcome, moved, failed, reason))

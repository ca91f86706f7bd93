# SPDX-License-Identifier: Apache-2.0
"""A worker's side on a bench: a pool that is told what to answer, and steps in vLLM's order."""

from collections.abc import Sequence

from umbp.backends.base import JobResult, KVMemory, PoolStats, TransferJob, TransferOutcome
from umbp.connector.metadata import PlanPart, RankAnswer, StepMetadata, TransferPlan, pack_ids
from umbp.connector.worker import WorkerSide
from umbp.errors import BackendStalled, BackendUnavailable
from umbp.keys import KeySpace

from .fakes import FakeSharedEpoch, block_hash

KEYS = KeySpace(b"n" * 16)
RANK = 3


class FakeWorkerPool:
    """A ``WorkerPool`` that keeps jobs until it is told how they end."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.jobs: dict[int, TransferJob] = {}
        self.results: list[JobResult] = []
        self.ends_at_once: TransferOutcome | None = None
        self.refuses = False
        self.is_stalled = False

    def register(self, memory: KVMemory) -> None: ...

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [False] * len(keys)

    def load(self, job: TransferJob) -> None:
        self._take("load", job)

    def store(self, job: TransferJob) -> None:
        self._take("store", job)

    def _take(self, kind: str, job: TransferJob) -> None:
        if self.refuses:
            raise BackendUnavailable("gone")
        self.calls.append((kind, job.job_id))
        self.jobs[job.job_id] = job
        if self.ends_at_once is not None:
            self.end(job.job_id, self.ends_at_once)

    def end(self, job_id: int, outcome: TransferOutcome, failed_keys: Sequence[bytes] = ()) -> None:
        self.results.append(JobResult(job_id, outcome, 11, tuple(failed_keys), "why"))

    def poll(self) -> list[JobResult]:
        if self.is_stalled:
            raise BackendStalled("job 1 has run for 60 s")
        results, self.results = self.results, []
        return results

    def cancel(self, job_id: int) -> None:
        self.calls.append(("cancel", job_id))

    def take_evictions(self) -> list[bytes]:
        return []

    def stats(self) -> PoolStats:
        return PoolStats(0, None, None, None)

    def close(self, timeout_s: float) -> None:
        self.calls.append(("close", 0))


def plan(job_id: int, *, epoch: int = 0, synchronous: bool = False) -> TransferPlan:
    """A plan of two blocks."""
    part = PlanPart(0, 32, block_hash(0) + block_hash(1), pack_ids([job_id, job_id + 100]))
    return TransferPlan(job_id, f"request-{job_id}", epoch, [part], synchronous)


def make_side(
    shared_epoch: FakeSharedEpoch | None = None, *, rank: int = RANK
) -> tuple[WorkerSide, FakeWorkerPool]:
    pool = FakeWorkerPool()
    side = WorkerSide(pool, keyspace=KEYS, rank=rank, timeout_ms=5000, shared_epoch=shared_epoch)
    return side, pool


def step(side: WorkerSide, metadata: StepMetadata) -> tuple[set[str], set[str], list[RankAnswer]]:
    """One step in vLLM's order."""
    side.take_metadata(metadata)
    side.start_loads()
    side.start_stores()
    received, failed = side.poll()
    answers = side.take_answers()
    return received, failed, answers.answers if answers is not None else []

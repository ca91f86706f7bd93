# SPDX-License-Identifier: Apache-2.0
"""A worker's side: hands jobs to the backend's pool, and its results to the scheduler's side.

It decides nothing and keeps nothing of a request but the jobs that are open. Every job is answered
exactly once; every load that vLLM waits for is reported exactly once.
"""

import logging
import time
from collections.abc import Callable

import attrs

from umbp.backends.base import (
    Arrival,
    EpochSource,
    JobResult,
    PoolStats,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerPool,
)
from umbp.connector.metadata import (
    PlanPart,
    RankAnswer,
    RankEvictions,
    StepMetadata,
    TransferPlan,
    WorkerMetadata,
    unpack_ids,
)
from umbp.connector.samples import Samples
from umbp.errors import BackendError, BackendStalled
from umbp.keys import PREFIX_BYTES, KeySpace

logger = logging.getLogger(__name__)

_GRACE_S = 1.0
"""How much longer than it may take an answer to a synchronous load is waited for."""

_POLL_INTERVAL_S = 0.0002
"""How often a synchronous load is looked at; a tenth of the shortest step worth the name."""

_IDLE_WAIT_S = 0.001
"""How long a step that computes nothing waits for a transfer, at most. An engine with nothing to
compute takes one step after the other, and where it shares the interpreter with the threads that
move bytes, it keeps them from running."""


@attrs.define
class _OpenJob:
    """A job that the pool has not answered.

    Attributes:
        plan: What the scheduler's side asked for.
        is_load: Direction.
        begun_s: When it was handed to the pool; None: it never was.
        arrival: What the device must wait for before it reads this load; None: the load may still
            fail, or nobody has said that it cannot.
        is_reported: Whether vLLM was told that this load has ended, which it has not.
        is_arriving: Whether it was told that it has ended well.
    """

    plan: TransferPlan
    is_load: bool
    begun_s: float | None = None
    arrival: Arrival | None = None
    is_reported: bool = False
    is_arriving: bool = False


class WorkerSide:
    """Drives a backend's pool from a vLLM worker.

    Args:
        pool: The backend's side in this worker.
        keyspace: Keys of this engine's namespace.
        rank: Index of this worker.
        timeout_ms: Deadline of a transfer.
        make_fence: Returns a function that waits for the device work submitted so far; None where
            the device works at once.
        shared_epoch: The epoch that this engine shares with others; None: it has its own.
        tell_evictions: Tell the scheduler's side what the pool evicts.
        loads_may_arrive: Report a load as ended while its last bytes are on their way, where the
            engine computes nothing else and the device can wait for them.
        clock: Seconds, monotonic.
        sleep: Waits for so many seconds on that clock.

    Attributes:
        rank: Index of this worker.
        is_asleep: Whether KV memory is given up.
        load_seconds: How long loads took that nobody has reported yet.
        store_seconds: How long stores took that nobody has reported yet.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        pool: WorkerPool,
        *,
        keyspace: KeySpace,
        rank: int,
        timeout_ms: int,
        make_fence: Callable[[], Callable[[], None]] | None = None,
        shared_epoch: EpochSource | None = None,
        tell_evictions: bool = False,
        loads_may_arrive: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pool = pool
        self._keyspace = keyspace
        self.rank = rank
        self._timeout_s = timeout_ms / 1000
        self._make_fence = make_fence
        self._shared_epoch = shared_epoch
        self._tell_evictions = tell_evictions
        self._loads_may_arrive = loads_may_arrive
        self._clock = clock
        self._sleep = sleep
        self._epoch = 0
        self.is_asleep = False
        # The epoch of the last step before KV memory was given up, if it ever was.
        self._epoch_before_sleep: int | None = None
        self._jobs: dict[int, _OpenJob] = {}
        # Of the metadata in hand, what has not been handed to the pool yet.
        self._loads: list[TransferPlan] = []
        self._stores: list[TransferPlan] = []
        # For vLLM's getters at the end of the step.
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._error_blocks: set[int] = set()
        self._answers: list[RankAnswer] = []
        self._is_idle = False
        self._wait: Callable[[float], None] | None = getattr(pool, "wait", None)
        self._evicted: list[bytes] = []
        self.load_seconds = Samples()
        self.store_seconds = Samples()

    # ------------------------------------------------------------ hooks, in vLLM's order

    def take_metadata(self, metadata: StepMetadata) -> None:
        """Answers ``bind_connector_metadata``."""
        self._drop_unsent()
        self._epoch = metadata.epoch
        self._loads = list(metadata.loads)
        self._stores = list(metadata.stores)
        self._is_idle = metadata.is_idle
        if not self._is_idle:
            self._order_arrivals()
        for job_id in metadata.cancels:
            self._cancel(job_id)
        for plan in metadata.refused:
            self._finish(_OpenJob(plan, True), _not_attempted(plan.job_id, "refused"))

    def start_loads(self) -> None:
        """Answers ``start_load_kv``; waits for synchronous loads, within their deadline."""
        loads, self._loads = self._loads, []
        if not loads:
            return
        # A block given to a load may still be written by the step of its former owner.
        fence = self._make_fence() if self._make_fence is not None else None
        waiting = set()
        for plan in loads:
            self._submit(plan, is_load=True, fence=fence)
            if plan.synchronous:
                waiting.add(plan.job_id)
        self._await(waiting, "loads that a forward pass waits for")

    def start_stores(self) -> None:
        """Answers ``wait_for_save``: every store of the step goes to the pool, exactly once."""
        stores, self._stores = self._stores, []
        if not stores:
            return
        # A step that computes nothing has not waited for them yet.
        self._order_arrivals()
        fence = self._make_fence() if self._make_fence is not None else None
        for plan in stores:
            self._submit(plan, is_load=False, fence=fence)

    def poll(self) -> tuple[set[str], set[str]]:
        """Answers ``get_transfer_results``.

        Returns:
            Requests whose asynchronous load has ended, and those among them whose load failed.

        Raises:
            BackendStalled: Memory that a native call may still write would have to be reused.
        """
        if self._jobs:
            if self._is_idle and self._wait is not None:
                self._wait(_IDLE_WAIT_S)
            self._take_results()
            if self._is_idle:
                self._report_arrivals()
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def take_error_blocks(self) -> set[int]:
        """Answers ``get_block_ids_with_load_errors``: destinations of failed synchronous loads."""
        blocks, self._error_blocks = self._error_blocks, set()
        return blocks

    def take_answers(self) -> WorkerMetadata | None:
        """Answers ``build_connector_worker_meta``."""
        answers, self._answers = self._answers, []
        gone = self._take_evictions() if self._tell_evictions else []
        if not answers and not gone:
            return None
        return WorkerMetadata(answers, [RankEvictions(self.rank, gone)] if gone else [])

    def _take_evictions(self) -> list[bytes]:
        """Returns keys that are gone, each with the answer to its last store or after it."""
        evicted = list(dict.fromkeys([*self._evicted, *self._pool.take_evictions()]))
        self._evicted = []
        if not evicted:
            return []
        try:
            present = self._pool.contains(evicted)
        except BackendError as error:
            logger.debug("the backend did not say which objects it holds: %s", error)
            present = [False] * len(evicted)
        # One that is there was stored again. Of one that is being stored nobody can say yet which
        # came first; it is looked at again.
        gone = [key for key, is_there in zip(evicted, present, strict=True) if not is_there]
        storing = self._keys_being_stored()
        self._evicted = [key for key in gone if key in storing]
        return [key for key in gone if key not in storing]

    def _keys_being_stored(self) -> set[bytes]:
        return {
            key
            for job in self._jobs.values()
            if not job.is_load
            for part in job.plan.parts
            for key in self._keys(job.plan, part)
        }

    @property
    def open_jobs(self) -> int:
        """Jobs that the pool has not answered."""
        return len(self._jobs)

    def pool_stats(self) -> PoolStats | None:
        """Says how full the pool is; None when it cannot say."""
        try:
            return self._pool.stats()
        except BackendError as error:
            logger.debug("the backend did not say how full its pool is: %s", error)
            return None

    def close(self, timeout_s: float) -> None:
        """Answers ``shutdown``."""
        self._pool.close(timeout_s)

    # ------------------------------------------------------------ sleep

    def fall_asleep(self) -> None:
        """Returns once no transfer can touch KV memory, and begins none until ``wake_up``.

        Raises:
            BackendStalled: A transfer does not end; KV memory must stay where it is.
        """
        self._drop_unsent()
        for job_id in list(self._jobs):
            self._cancel(job_id)
        self._await(set(self._jobs), "transfers of KV memory that is to be unmapped")
        self.is_asleep = True
        self._epoch_before_sleep = self._epoch

    def wake_up(self) -> None:
        """Begins transfers again; KV memory is there, and holds nothing."""
        self.is_asleep = False

    def _why_not_begun(self, plan: TransferPlan) -> str | None:
        """Says why a transfer must not touch KV memory; None: it may.

        vLLM has weights changed while it sleeps, if ever, and empties KV memory in any case. It
        raises the epoch before, so that whatever was planned earlier is told by its own.
        """
        if self.is_asleep:
            return "the engine sleeps"
        before = self._epoch_before_sleep
        if before is not None and (plan.epoch == before or plan.epoch != self._epoch):
            return "planned before the engine slept"
        return None

    # ------------------------------------------------------------ jobs

    def _submit(
        self, plan: TransferPlan, *, is_load: bool, fence: Callable[[], None] | None
    ) -> None:
        reason = self._why_not_begun(plan)
        if reason is not None:
            self._finish(_OpenJob(plan, is_load), _not_attempted(plan.job_id, reason))
            return
        begun_s = self._clock()
        job = TransferJob(
            plan.job_id,
            tuple(
                TransferPart(
                    part.group_index,
                    self._keys(plan, part),
                    unpack_ids(part.block_ids),
                )
                for part in plan.parts
            ),
            begun_s + self._timeout_s,
            fence,
            is_load and self._loads_may_arrive and not plan.synchronous,
        )
        open_job = _OpenJob(plan, is_load, begun_s)
        self._jobs[plan.job_id] = open_job
        try:
            (self._pool.load if is_load else self._pool.store)(job)
        except BackendStalled:
            raise
        except BackendError as error:
            del self._jobs[plan.job_id]
            self._finish(open_job, _not_attempted(plan.job_id, str(error)))

    def _keys(self, plan: TransferPlan, part: PlanPart) -> list[bytes]:
        return self._keyspace.keys_of_joined(
            part.hashes,
            part.hash_bytes,
            epoch=plan.epoch,
            group_index=part.group_index,
            rank=self.rank,
        )

    def _await(self, job_ids: set[int], what: str) -> None:
        # The pool does not begin a job after its deadline, and says so when one that runs takes as
        # long again (BackendStalled). What is silent even then has broken its contract.
        give_up_s = self._clock() + 2 * self._timeout_s + _GRACE_S
        while job_ids & self._jobs.keys():
            self._take_results()
            if self._clock() > give_up_s:
                raise BackendStalled(
                    f"the backend has not answered {len(job_ids & self._jobs.keys())} {what}"
                )
            self._sleep(_POLL_INTERVAL_S)

    def _cancel(self, job_id: int) -> None:
        try:
            self._pool.cancel(job_id)
        except BackendStalled:
            raise
        except BackendError as error:
            logger.warning("job %d could not be cancelled: %s", job_id, error)

    def _poll(self) -> list[JobResult]:
        try:
            return self._pool.poll()
        except BackendStalled:
            raise
        except BackendError as error:
            # Jobs stay open, and their blocks in use, until it answers.
            logger.warning("the backend did not say which transfers have ended: %s", error)
            return []

    def _take_results(self) -> None:
        for result in self._poll():
            job = self._jobs.get(result.job_id)
            if job is None:
                logger.error("backend answered job %d, which is not open", result.job_id)
            elif result.outcome is TransferOutcome.STALLED:
                self._leave(job, result)
            elif result.outcome is TransferOutcome.ARRIVING:
                job.arrival = result.arrival
            elif job.is_arriving and result.outcome is not TransferOutcome.DONE:
                raise BackendStalled(
                    f"job {result.job_id} was sure to end well and did not ({result.reason}); what "
                    "was computed since may be wrong, and the engine must stop"
                )
            else:
                del self._jobs[result.job_id]
                self._finish(job, result)

    def _report_arrivals(self) -> None:
        """Tells vLLM that loads have ended whose last bytes the device will wait for.

        Only where nothing else is computed: what runs beside a load must not wait for it.
        """
        for job in self._jobs.values():
            plan = job.plan
            if job.arrival is None or job.is_reported or not self._is_present(plan.epoch):
                continue
            job.is_reported = job.is_arriving = True
            self._received.add(plan.request_id)
            self._answers.append(RankAnswer(plan.job_id, self.rank, True, arriving=True))

    def _order_arrivals(self) -> None:
        """Has the device do what is submitted from now on after the loads that were reported."""
        for job in self._jobs.values():
            if job.is_arriving and job.arrival is not None:
                job.arrival.wait()

    def _leave(self, job: _OpenJob, result: JobResult) -> None:
        """Goes on without a job that the pool cannot end; its blocks are not free yet."""
        plan = job.plan
        logger.warning("%s; nothing waits for it, and its blocks stay in use", result.reason)
        if not job.is_load or job.is_reported:
            # Nobody waits for a store.
            return
        if plan.synchronous:
            # The forward pass would compute into the very blocks that may still be written.
            raise BackendStalled(f"{result.reason}, and a forward pass waits for it")
        job.is_reported = True
        self._received.add(plan.request_id)
        self._failed.add(plan.request_id)
        self._answers.append(
            RankAnswer(plan.job_id, self.rank, False, reason=result.reason, stalled=True)
        )

    def _finish(self, job: _OpenJob, result: JobResult) -> None:
        plan = job.plan
        succeeded = result.outcome is TransferOutcome.DONE
        if job.begun_s is not None and result.outcome is not TransferOutcome.NOT_ATTEMPTED:
            samples = self.load_seconds if job.is_load else self.store_seconds
            samples.add(self._clock() - job.begun_s)
        if job.is_load and succeeded and not job.is_arriving and not self._is_present(plan.epoch):
            # Reset while it was on its way: what it brought is from before. Of one that vLLM took
            # for ended before the reset, its own cache knows that.
            succeeded = False
        self._answers.append(
            RankAnswer(
                plan.job_id,
                self.rank,
                succeeded,
                result.outcome is not TransferOutcome.NOT_ATTEMPTED,
                result.bytes_moved,
                [key[PREFIX_BYTES:] for key in result.failed_keys],
                result.reason,
            )
        )
        if not job.is_load or job.is_reported:
            return
        if not plan.synchronous:
            self._received.add(plan.request_id)
            if not succeeded:
                self._failed.add(plan.request_id)
        elif not succeeded:
            for part in plan.parts:
                self._error_blocks.update(unpack_ids(part.block_ids).tolist())

    def _is_present(self, epoch: int) -> bool:
        if self._shared_epoch is not None and self._shared_epoch.current() != epoch:
            # Another engine has raised it, and the scheduler's side does not know yet.
            return False
        return epoch == self._epoch

    def _drop_unsent(self) -> None:
        """Answers for what was never handed to the pool, because a step was cut short."""
        for plan in self._loads:
            self._finish(_OpenJob(plan, True), _not_attempted(plan.job_id, "step cut short"))
        for plan in self._stores:
            self._finish(_OpenJob(plan, False), _not_attempted(plan.job_id, "step cut short"))
        self._loads, self._stores = [], []


def _not_attempted(job_id: int, reason: str) -> JobResult:
    return JobResult(job_id, TransferOutcome.NOT_ATTEMPTED, reason=reason)

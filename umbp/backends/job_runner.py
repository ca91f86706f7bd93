# SPDX-License-Identifier: Apache-2.0
"""Runs transfer jobs on threads, and answers each exactly once.

A backend that moves bytes with blocking calls hands its jobs to a ``JobRunner`` and gets the
queueing rules of ``umbp.backends.base`` for nothing: ``submit``, ``poll`` and ``cancel`` never
block, the queue is bounded, a job that waits past its deadline is not begun, and a job that runs
too long is reported as stalled instead of being given up, because its memory is still in use.

A job is in exactly one place: in a queue, in ``_running`` or, as its result, in ``_results``. It
moves between them under ``_changed``, so nothing can answer it twice. That a job has stalled, or is
arriving, is said once, while it is running.
"""

import enum
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import attrs

from umbp.backends.base import Arrival, JobResult, TransferJob, TransferOutcome
from umbp.errors import BackendStalled, UsageError

MAX_LOADS_BEFORE_STORE: Final = 8
"""A request waits for a load, nobody waits for a store; but a store pins blocks, so it must go."""

_REASON_CHARS_MAX: Final = 200


class TransferKind(enum.Enum):
    """Which way a job moves bytes."""

    LOAD = "load"
    """Objects into KV memory."""
    STORE = "store"
    """KV memory into objects."""


class StallPolicy(enum.Enum):
    """What follows when a job runs longer than it may."""

    RAISE = "raise"
    """``poll`` raises ``BackendStalled``: nothing but this process can hold the call up."""
    REPORT = "report"
    """``poll`` says ``STALLED`` once, and no job is begun until the call has returned."""


@attrs.define
class _Running:
    kind: TransferKind
    begun_s: float | None = None
    """When ``run`` was entered; None while the fence is waited for."""
    stalled: bool = False
    """Whether it was reported."""


@attrs.define(eq=False)
class JobRunner:
    """Bounded queues in front of a few threads, loads before stores.

    Threads start with the first job, so a process may fork before that. They are daemons: a native
    call that never returns does not keep the interpreter alive.

    Args:
        run: Executes one job on a runner thread and returns its result. What it raises becomes a
            ``FAILED`` result.
        thread_count: Jobs that run at the same time, at least 1.
        queue_limit: Jobs that may wait, over both kinds.
        timeout_ms: How long ``run`` may take before ``poll`` reports a stall.
        name: Prefix of the threads' names.
        on_stall: What follows a stall.
        clock: Seconds on the scale of ``TransferJob.deadline_s``.
    """

    _run: Callable[[TransferKind, TransferJob], JobResult]
    _thread_count: int = attrs.field(kw_only=True)
    _queue_limit: int = attrs.field(kw_only=True)
    _timeout_ms: int = attrs.field(kw_only=True)
    _name: str = attrs.field(kw_only=True)
    _on_stall: StallPolicy = attrs.field(default=StallPolicy.RAISE, kw_only=True)
    _clock: Callable[[], float] = attrs.field(default=time.monotonic, kw_only=True)

    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)
    _is_answered: threading.Event = attrs.field(factory=threading.Event, init=False)
    """Set while ``_results`` may hold one."""
    _loads: OrderedDict[int, TransferJob] = attrs.field(factory=OrderedDict, init=False)
    _stores: OrderedDict[int, TransferJob] = attrs.field(factory=OrderedDict, init=False)
    _loads_before_store: int = attrs.field(default=0, init=False)
    _running: dict[int, _Running] = attrs.field(factory=dict, init=False)
    _results: list[JobResult] = attrs.field(factory=list, init=False)
    _threads: list[threading.Thread] = attrs.field(factory=list, init=False)
    _closed: bool = attrs.field(default=False, init=False)

    def submit(self, kind: TransferKind, job: TransferJob) -> None:
        """Queues a job. A full queue or a closed runner is answered through ``poll``.

        Raises:
            UsageError: A job of this id is waiting or running.
        """
        with self._changed:
            if job.job_id in self._loads or job.job_id in self._stores:
                raise UsageError(f"job {job.job_id} is already waiting")
            if job.job_id in self._running:
                raise UsageError(f"job {job.job_id} is already running")
            refusal = self._refusal()
            if refusal is not None:
                self._answer(_not_attempted(job.job_id, refusal))
                return
            queue = self._loads if kind is TransferKind.LOAD else self._stores
            queue[job.job_id] = job
            self._changed.notify()

    def announce(self, job_id: int, arrival: Arrival) -> None:
        """Says of a load that runs, and may arrive, that nothing can go wrong any more.

        Called by ``run``, at most once for each job.
        """
        with self._changed:
            self._answer(JobResult(job_id, TransferOutcome.ARRIVING, arrival=arrival))

    def poll(self) -> list[JobResult]:
        """Returns the results since the last call, each exactly once.

        Raises:
            BackendStalled: A job runs longer than ``timeout_ms``, under ``StallPolicy.RAISE``.
                Results that have come in are kept for a later call.
        """
        with self._changed:
            now_s = self._clock()
            for job_id, running in self._running.items():
                elapsed_s = now_s - running.begun_s if running.begun_s is not None else 0.0
                if not running.stalled and elapsed_s * 1000 > self._timeout_ms:
                    self._note_stall(job_id, running, elapsed_s)
            results, self._results = self._results, []
            if results:
                self._is_answered.clear()
            return results

    def wait(self, timeout_s: float) -> None:
        """Returns once ``poll`` has a result, or when that time has passed."""
        self._is_answered.wait(timeout_s)

    @property
    def is_stalled(self) -> bool:
        """Whether a job that was reported as stalled is still running."""
        return any(running.stalled for running in self._running.values())

    def is_open(self, job_id: int) -> bool:
        """Whether a job of this id is waiting or running."""
        with self._changed:
            return any(job_id in jobs for jobs in (self._loads, self._stores, self._running))

    def cancel(self, job_id: int) -> None:
        """Takes a waiting job out of its queue; a running or unknown job is left alone."""
        with self._changed:
            for queue in (self._loads, self._stores):
                if queue.pop(job_id, None) is not None:
                    self._answer(_not_attempted(job_id, "cancelled"))

    def close(self, timeout_s: float) -> bool:
        """Answers waiting jobs as not attempted and ends the threads. Idempotent.

        Args:
            timeout_s: How long to wait for the jobs that run, in all.

        Returns:
            Whether every thread has ended. If not, a job still runs and its memory is in use.
        """
        with self._changed:
            self._closed = True
            self._drop_waiting("closed")
            self._changed.notify_all()
            threads = tuple(self._threads)
            if self.is_stalled:
                # Whoever holds the call up will not let go of it for our sake.
                timeout_s = 0.0
        give_up_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _note_stall(self, job_id: int, running: _Running, elapsed_s: float) -> None:
        reason = (
            f"{running.kind.value} job {job_id} has run for {elapsed_s:.1f} s, longer than "
            f"{self._timeout_ms} ms"
        )
        if self._on_stall is StallPolicy.RAISE:
            raise BackendStalled(f"{reason}; its memory stays in use and the engine must stop")
        running.stalled = True
        self._answer(JobResult(job_id, TransferOutcome.STALLED, reason=reason))
        self._drop_waiting("another transfer has stalled")

    def _answer(self, *results: JobResult) -> None:
        """Keeps results for ``poll``. Called under the lock."""
        self._results.extend(results)
        if self._results:
            self._is_answered.set()

    def _drop_waiting(self, reason: str) -> None:
        for queue in (self._loads, self._stores):
            self._answer(*(_not_attempted(job_id, reason) for job_id in queue))
            queue.clear()

    def _refusal(self) -> str | None:
        """Says why a job cannot be queued now; starts the threads if it is the first."""
        if self._closed:
            return "closed"
        if self.is_stalled:
            return "another transfer has stalled"
        waiting_count = len(self._loads) + len(self._stores)
        if waiting_count >= self._queue_limit:
            return f"queue full ({waiting_count} jobs)"
        if not self._threads:
            self._start_threads()
        return None if self._threads else "no thread could be started"

    def _start_threads(self) -> None:
        for index in range(self._thread_count):
            thread = threading.Thread(target=self._work, name=f"{self._name}-{index}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The system's limit. Those that did start serve the queue; with none, the next
                # submit tries again.
                return
            self._threads.append(thread)

    def _work(self) -> None:
        """Runs jobs until the runner is closed; the body of every thread."""
        while True:
            with self._changed:
                while not (self._loads or self._stores or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                kind, job = self._take()
                if self._clock() > job.deadline_s:
                    self._answer(_not_attempted(job.job_id, "deadline passed"))
                    continue
                running = self._running[job.job_id] = _Running(kind)
            result = self._execute(running, job)
            with self._changed:
                del self._running[job.job_id]
                self._answer(result)

    def _take(self) -> tuple[TransferKind, TransferJob]:
        """Chooses the next job. Called with at least one waiting."""
        store_is_due = self._loads_before_store >= MAX_LOADS_BEFORE_STORE
        if self._stores and (store_is_due or not self._loads):
            self._loads_before_store = 0
            return TransferKind.STORE, self._stores.popitem(last=False)[1]
        if self._stores:
            self._loads_before_store += 1
        return TransferKind.LOAD, self._loads.popitem(last=False)[1]

    def _execute(self, running: _Running, job: TransferJob) -> JobResult:
        try:
            if job.fence is not None:
                job.fence()
            running.begun_s = self._clock()
            return self._run(running.kind, job)
        except Exception as error:  # Whatever a native library raises must become the one answer.
            return JobResult(
                job.job_id,
                TransferOutcome.FAILED,
                failed_keys=tuple(key for part in job.parts for key in part.keys),
                reason=_one_line(error),
            )


def _not_attempted(job_id: int, reason: str) -> JobResult:
    return JobResult(job_id, TransferOutcome.NOT_ATTEMPTED, reason=reason)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_REASON_CHARS_MAX]

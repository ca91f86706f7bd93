# SPDX-License-Identifier: Apache-2.0
"""Runs loads and stores apart, so that a store that stalls does not keep loads from going on.

Every store of a pool node asks the master, and waits for as long as it is stopped. A load of the
node's own objects asks nobody. In one ``JobRunner`` the first stalled store would refuse them.
"""

import time
from collections.abc import Callable
from typing import Final

from umbp.backends.base import JobResult, TransferJob
from umbp.backends.job_runner import JobRunner, StallPolicy, TransferKind
from umbp.errors import UsageError

STORE_THREAD_COUNT: Final = 1
"""Stores take turns, beside the loads."""


class TransferLanes:
    """Two ``JobRunner`` that report stalls, one for each kind of job, behind the calls of one.

    Args:
        run: Executes one job.
        load_thread_count: Loads that run at the same time; stores take turns.
        queue_limit: Jobs of each kind that may wait.
        timeout_ms: How long ``run`` may take before a stall is reported.
        name: Prefix of the threads' names.
    """

    def __init__(
        self,
        run: Callable[[TransferKind, TransferJob], JobResult],
        *,
        load_thread_count: int,
        queue_limit: int,
        timeout_ms: int,
        name: str,
    ) -> None:
        thread_counts = {
            TransferKind.LOAD: load_thread_count,
            TransferKind.STORE: STORE_THREAD_COUNT,
        }
        self._lanes = {
            kind: JobRunner(
                run,
                thread_count=thread_count,
                queue_limit=queue_limit,
                timeout_ms=timeout_ms,
                name=f"{name}-{kind.value}",
                on_stall=StallPolicy.REPORT,
            )
            for kind, thread_count in thread_counts.items()
        }

    def submit(self, kind: TransferKind, job: TransferJob) -> None:
        """Queues a job. A full queue or a closed lane is answered through ``poll``.

        Raises:
            UsageError: A job of this id is waiting or running.
        """
        if any(lane.is_open(job.job_id) for lane in self._lanes.values()):
            raise UsageError(f"job {job.job_id} is already waiting or running")
        self._lanes[kind].submit(kind, job)

    def poll(self) -> list[JobResult]:
        """Returns the results since the last call, each exactly once."""
        return [result for lane in self._lanes.values() for result in lane.poll()]

    def wait(self, timeout_s: float) -> None:
        """Returns once a load has a result, or when that time has passed.

        Nobody waits for a store.
        """
        self._lanes[TransferKind.LOAD].wait(timeout_s)

    def cancel(self, job_id: int) -> None:
        """Takes a waiting job out of its queue; a running or unknown job is left alone."""
        for lane in self._lanes.values():
            lane.cancel(job_id)

    def close(self, timeout_s: float) -> bool:
        """Answers waiting jobs and ends the threads. Idempotent.

        Args:
            timeout_s: How long to wait for the jobs that run, in all.

        Returns:
            Whether every thread has ended.
        """
        give_up_s = time.monotonic() + timeout_s
        ended = [
            lane.close(max(0.0, give_up_s - time.monotonic())) for lane in self._lanes.values()
        ]
        return all(ended)

# SPDX-License-Identifier: Apache-2.0
"""A transfer job as calls of a MORI client, and their answers as the job's one result."""

from collections.abc import Callable, Mapping

from umbp.backends.base import JobResult, TransferJob, TransferOutcome, TransferPart
from umbp.backends.job_runner import TransferKind
from umbp.backends.mori_client import Moved
from umbp.backends.mori_columns import GroupColumns
from umbp.errors import UsageError


def move_job(
    kind: TransferKind,
    job: TransferJob,
    columns: Mapping[int, GroupColumns],
    move: Callable[[TransferPart, GroupColumns], Moved],
) -> JobResult:
    """Moves a job part by part.

    Args:
        kind: Direction.
        job: The job.
        columns: Layout of each group.
        move: Moves one part.

    Raises:
        UsageError: A part leaves KV memory, or its group has no layout; nothing was moved.
        BackendError: As ``move`` raises it.
    """
    for part in job.parts:
        if part.group_index not in columns:
            raise UsageError(f"group {part.group_index} has no layout")
        columns[part.group_index].check(part)
    bytes_moved = 0
    failed_keys: list[bytes] = []
    for part in job.parts:
        moved = move(part, columns[part.group_index])
        bytes_moved += moved.object_count * columns[part.group_index].object_bytes
        failed_keys.extend(part.keys[index] for index in moved.failed)
    if not failed_keys:
        return JobResult(job.job_id, TransferOutcome.DONE, bytes_moved)
    problem = "are missing" if kind is TransferKind.LOAD else "found no room"
    return JobResult(
        job.job_id,
        TransferOutcome.FAILED,
        bytes_moved,
        tuple(failed_keys),
        f"{len(failed_keys)} of {job.object_count} objects {problem}",
    )

# SPDX-License-Identifier: Apache-2.0
"""A pool under test with KV memory beside it; what the checks in ``conformance`` share."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final

import attrs

from umbp.backends.base import (
    Arrival,
    JobResult,
    KVMemory,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerPool,
    WorkerSite,
)
from umbp.errors import BackendError
from umbp.testing.kv_memory import GroupShape, KVShape, make_kv_memory

PATIENCE_S: Final = 30.0
"""Far more than any answer takes, even on a machine that is busy with something else."""

INSTANCE: Final = "conformance"
"""Name of the engine that the checks pretend to be."""

BIG: Final = 0
SMALL: Final = 1
_GROUPS: Final = (
    # Layers of several sizes, none of them a power of two.
    GroupShape(head_count=2, plane_bytes=(3072, 3072, 520, 3072)),
    GroupShape(head_count=1, plane_bytes=(1536,)),
)
_BLOCK_COUNT: Final = 10
_PAUSE_S: Final = 0.0005

Objects = Mapping[int, Mapping[bytes, int]]
"""What a job moves: by group, the block id of each key."""


class ConformanceError(AssertionError):
    """A backend breaks a rule of ``umbp.backends.base``."""


@attrs.frozen(eq=False)
class PoolCase:
    """What a check wants of a pool.

    Attributes:
        memory: The KV memory that the check will register.
        capacity_bytes: Capacity of the pool. A pool with a larger minimum may take that.
        queue_limit: Jobs that may wait.
        transfer_threads: Jobs that may run at the same time.
        site: The worker to open the pool for.
    """

    memory: KVMemory
    capacity_bytes: int
    queue_limit: int
    transfer_threads: int
    site: WorkerSite


MakePool = Callable[[PoolCase], WorkerPool]
"""Opens a pool; does not register KV memory."""


def require(condition: bool, message: str) -> None:
    """Raises unless a rule is kept.

    Raises:
        ConformanceError: It is not.
    """
    if not condition:
        raise ConformanceError(message)


class Rig:
    """A registered pool, its KV memory and the answers that have come in.

    Attributes:
        other_side_is_gone: Whether a job may also be refused by a ``BackendError``.

    Args:
        make: Opens the pool.
        patience_s: How long an answer may take.
        shape: How KV memory is laid out.
        object_count: Objects of group ``BIG`` that the pool has room for.
        queue_limit: Jobs that may wait.
        transfer_threads: Jobs that may run at the same time.
        rank: The worker, of ``rank_count``.
        rank_count: Workers that hold a part of every block.
    """

    def __init__(  # noqa: PLR0913 - all but two are named
        self,
        make: MakePool,
        patience_s: float,
        *,
        shape: KVShape = KVShape.LHB,
        object_count: int = 16,
        queue_limit: int = 64,
        transfer_threads: int = 1,
        rank: int = 0,
        rank_count: int = 1,
    ) -> None:
        self._shape = shape
        self.kv = make_kv_memory(shape, _GROUPS, block_count=_BLOCK_COUNT)
        self.case = PoolCase(
            memory=self.kv.memory,
            # Room for a backend's own rounding; object sizes are no multiples of anything.
            capacity_bytes=object_count * (self.object_bytes(BIG) + 64),
            queue_limit=queue_limit,
            transfer_threads=transfer_threads,
            site=WorkerSite(
                rank=rank,
                rank_count=rank_count,
                device_type="cpu",
                device_index=None,
                instance=INSTANCE,
                transfer_timeout_ms=int(patience_s * 1000),
            ),
        )
        self._patience_s = patience_s
        self._next_job_id = 0
        self._unanswered: set[int] = set()
        self._results: dict[int, JobResult] = {}
        self._may_arrive: set[int] = set()
        self._arrivals: dict[int, Arrival] = {}
        self._gated = threading.Event()
        self._gate_open = threading.Event()
        self._gate_gave_up = False
        self.other_side_is_gone = False
        self.pool = make(self.case)
        self.pool.register(self.kv.memory)

    def __enter__(self) -> "Rig":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gate_open.set()
        self.pool.close(self._patience_s)

    def move_kv_memory(self) -> None:
        """Registers KV memory at other addresses, of the same layout and zeroed."""
        self.kv = make_kv_memory(self._shape, _GROUPS, block_count=_BLOCK_COUNT)
        self.pool.register(self.kv.memory)

    def object_bytes(self, group_index: int) -> int:
        """Size of one object of a group."""
        return self.kv.memory.layout(group_index).object_bytes

    def store(
        self,
        objects: Objects,
        *,
        deadline_s: float | None = None,
        fence: Callable[[], None] | None = None,
    ) -> int:
        """Starts a store and returns its job id."""
        return self._start(self.pool.store, self._job(objects, deadline_s, fence))

    def load(
        self,
        objects: Objects,
        *,
        deadline_s: float | None = None,
        fence: Callable[[], None] | None = None,
    ) -> int:
        """Starts a load and returns its job id."""
        return self._start(self.pool.load, self._job(objects, deadline_s, fence))

    def load_that_may_arrive(self, objects: Objects) -> int:
        """Starts a load that may be announced before it has ended, and returns its job id."""
        job = attrs.evolve(self._job(objects, None, None), may_arrive=True)
        self._may_arrive.add(job.job_id)
        return self._start(self.pool.load, job)

    def arrival(self, job_id: int) -> Arrival | None:
        """Waits until a load has arrived or ended; None if it ended without a word."""
        give_up_s = time.monotonic() + self._patience_s
        while job_id not in self._arrivals and job_id not in self._results:
            require(time.monotonic() < give_up_s, f"no answer to jobs {sorted(self._unanswered)}")
            self._poll()
            time.sleep(_PAUSE_S)
        return self._arrivals.get(job_id)

    def store_done(self, blocks: Mapping[bytes, int]) -> None:
        """Stores blocks of group ``BIG``, which must succeed."""
        result = self.finish(self.store({BIG: blocks}))
        require(result.outcome is TransferOutcome.DONE, f"a store with room ended {result}")

    def require_loads(self, blocks: Mapping[bytes, int], content: Mapping[int, bytes]) -> None:
        """Loads objects of group ``BIG`` and compares the blocks that they went to."""
        result = self.finish(self.load({BIG: blocks}))
        require(result.outcome is TransferOutcome.DONE, f"loading {list(blocks)} ended {result}")
        self.require_blocks(BIG, content)

    def require_blocks(self, group_index: int, content: Mapping[int, bytes]) -> None:
        """Compares blocks of KV memory with what they must hold."""
        for block_id, expected in content.items():
            found = self.kv.read(group_index, block_id)
            if found == expected:
                continue
            differing = [at for at in range(len(expected)) if found[at] != expected[at]]
            raise ConformanceError(
                f"block {block_id} of group {group_index} differs in {len(differing)} of "
                f"{len(expected)} bytes, first at {differing[0]}"
            )

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """Asks the pool which objects exist.

        Raises:
            BackendError: The pool cannot say.
        """
        try:
            present = [bool(here) for here in self.pool.contains(keys)]
        except (BackendError, ConformanceError):
            raise
        except Exception as error:
            raise ConformanceError(f"contains raised {error!r}") from error
        require(len(present) == len(keys), f"{len(present)} answers to {len(keys)} keys")
        return present

    def exists(self, key: bytes) -> bool:
        """Asks the pool whether one object exists."""
        return self.exist([key])[0]

    def finish(self, job_id: int) -> JobResult:
        """Waits for the result of one job."""
        return self.wait([job_id])[0]

    def wait(self, job_ids: Iterable[int]) -> list[JobResult]:
        """Waits for the results of jobs, in the order of ``job_ids``."""
        wanted = list(job_ids)
        self.poll_until(lambda results: all(job_id in results for job_id in wanted))
        return [self._results[job_id] for job_id in wanted]

    def poll_until(self, satisfied: Callable[[Mapping[int, JobResult]], bool]) -> list[JobResult]:
        """Polls until the results that have come in are enough, and returns all of them."""
        give_up_s = time.monotonic() + self._patience_s
        while not satisfied(self._results):
            require(time.monotonic() < give_up_s, f"no answer to jobs {sorted(self._unanswered)}")
            self._poll()
            time.sleep(_PAUSE_S)
        return list(self._results.values())

    def wait_in_pool(self, timeout_s: float) -> bool:
        """Calls the pool's ``wait``; False when it has none."""
        wait = getattr(self.pool, "wait", None)
        if wait is None:
            return False
        try:
            wait(timeout_s)
        except BackendError as error:
            raise ConformanceError(f"wait raised {error!r}") from error
        return True

    def is_answered(self, job_id: int) -> bool:
        """Polls once, and says whether a job has its result."""
        self._poll()
        return job_id in self._results

    def require_quiet(self) -> None:
        """Polls some more; every job must have been answered, and nothing else may come."""
        for _ in range(20):
            self._poll()
            time.sleep(_PAUSE_S)
        require(not self._unanswered, f"no answer to jobs {sorted(self._unanswered)}")

    def gate(self) -> None:
        """A fence that waits for ``open_gate``."""
        self._gated.set()
        if not self._gate_open.wait(self._patience_s):
            self._gate_gave_up = True

    def wait_until_gated(self) -> None:
        """Waits until a job is at the gate."""
        require(self._gated.wait(self._patience_s), "the fence of a job is never called")

    def open_gate(self) -> None:
        """Lets the job at the gate go on."""
        self._require_unblocked()
        self._gate_open.set()

    def _job(
        self, objects: Objects, deadline_s: float | None, fence: Callable[[], None] | None
    ) -> TransferJob:
        job_id = self._next_job_id
        self._next_job_id += 1
        self._unanswered.add(job_id)
        parts = tuple(
            TransferPart(group_index, tuple(blocks), list(blocks.values()))
            for group_index, blocks in objects.items()
        )
        if deadline_s is None:
            deadline_s = time.monotonic() + self._patience_s
        return TransferJob(job_id, parts, deadline_s, fence)

    def _start(self, start: Callable[[TransferJob], None], job: TransferJob) -> int:
        try:
            start(job)
        except BackendError as error:
            require(self.other_side_is_gone, f"starting a job raised {error!r}, not an answer")
            self._unanswered.remove(job.job_id)
            self._results[job.job_id] = JobResult(
                job.job_id, TransferOutcome.NOT_ATTEMPTED, reason=str(error)
            )
        except Exception as error:
            raise ConformanceError(f"starting a job raised {error!r}, not an answer") from error
        self._require_unblocked()
        return job.job_id

    def _require_unblocked(self) -> None:
        require(not self._gate_gave_up, "a call into the pool blocked while a job was running")

    def _poll(self) -> None:
        try:
            results = self.pool.poll()
        except BackendError as error:
            raise ConformanceError(f"poll raised {error!r}, not an answer") from error
        for result in results:
            require(result.job_id in self._unanswered, f"an answer nobody waits for: {result}")
            if result.outcome is TransferOutcome.ARRIVING:
                self._take_arrival(result)
                continue
            arrived = result.job_id in self._arrivals
            require(
                not arrived or result.outcome is TransferOutcome.DONE,
                f"a load that was announced ended {result}",
            )
            self._unanswered.remove(result.job_id)
            self._results[result.job_id] = result

    def _take_arrival(self, result: JobResult) -> None:
        job_id = result.job_id
        require(job_id in self._may_arrive, f"a job that may not arrive was announced: {result}")
        require(job_id not in self._arrivals, f"a load was announced twice: {result}")
        require(result.arrival is not None, f"an announcement with nothing to wait for: {result}")
        if result.arrival is not None:
            self._arrivals[job_id] = result.arrival

# SPDX-License-Identifier: Apache-2.0
"""What a backend is: the contract between the connector and whoever keeps the objects.

A backend knows bytes and keys. It knows nothing of requests, of vLLM or of the lifecycle; it owns
its memory (allocation, publication, eviction), and answers for each job exactly once.

A backend is a class that satisfies ``Backend``, named by an entry point in the group
``umbp.backends``. It has two sides:

* ``WorkerPool``, one per worker process, moves bytes between KV memory and objects.
* ``LookupClient``, one in the scheduler process, says which objects exist. A backend whose pool
  lives in the workers (``pool_in_worker``) has none: umbp asks every ``WorkerPool.contains`` over a
  private Unix socket or, within one process, by a call.

Rules that hold for every implementation, and which the conformance tests check:

1. An object is atomic. It is found by a lookup only after all its bytes are stored, and a load
   that cannot fill every byte of every part of the job fails as a whole.
2. The first bytes stored under a key stay. Storing an existing key again changes nothing and
   counts as stored, so a key must never be reused for other content.
3. Every job that was handed to ``load`` or ``store`` comes back from ``poll`` exactly once, also
   after ``cancel`` and also when the other side is gone. Until then its KV memory is in use.
4. ``load``, ``store``, ``poll``, ``cancel`` and ``take_evictions`` never block on I/O.
5. Once KV memory is registered, nothing but ``BackendError`` is raised, and ``UsageError`` for a
   job id that is still in use.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import attrs
import numpy as np
import numpy.typing as npt

BACKEND_API: Final = 1
"""Version of this contract. A backend that says another number is refused by name."""

Int64Array = npt.NDArray[np.int64]


def _int64(value: Any) -> Int64Array:
    return np.ascontiguousarray(value, dtype=np.int64)


@attrs.frozen(eq=False)
class ObjectLayout:
    """Where the objects of one KV cache group lie in KV memory, as columns.

    Block ``b`` occupies one range per entry: ``range_bytes[r]`` bytes at
    ``base_addresses[r] + b * block_strides[r]``. The object is these ranges joined in order.

    Attributes:
        group_index: Index of the KV cache group.
        block_count: Number of blocks that KV memory has.
        base_addresses: int64[ranges], address of the range in block 0.
        block_strides: int64[ranges], bytes from one block to the next.
        range_bytes: int64[ranges], length of the range.
    """

    group_index: int
    block_count: int
    base_addresses: Int64Array = attrs.field(converter=_int64)
    block_strides: Int64Array = attrs.field(converter=_int64)
    range_bytes: Int64Array = attrs.field(converter=_int64)

    @property
    def object_bytes(self) -> int:
        """Size of one object of this group."""
        return int(self.range_bytes.sum())

    @property
    def range_offsets(self) -> Int64Array:
        """int64[ranges], where each range begins inside the object."""
        return np.concatenate(([0], np.cumsum(self.range_bytes)[:-1])).astype(np.int64)

    def addresses(self, block_ids: Int64Array) -> Int64Array:
        """Computes the address of every range of every block at once.

        Args:
            block_ids: int64[blocks].

        Returns:
            int64[blocks, ranges].
        """
        return self.base_addresses[None, :] + block_ids[:, None] * self.block_strides[None, :]


@attrs.frozen(eq=False)
class MemoryRegion:
    """One allocation that holds KV.

    Attributes:
        tensor: One-dimensional int8 ``torch.Tensor`` over the whole allocation; keeps it alive.
        address: Address of its first byte.
        size_bytes: Its length.
        device_type: ``"cpu"``, ``"cuda"`` (ROCm says that too) or another torch device type.
        device_index: Index of the device; None on a CPU.
    """

    tensor: Any
    address: int
    size_bytes: int
    device_type: str
    device_index: int | None


@attrs.frozen(eq=False)
class KVMemory:
    """All KV memory of one worker: its allocations, and the layout of each group."""

    regions: tuple[MemoryRegion, ...]
    layouts: tuple[ObjectLayout, ...]

    def layout(self, group_index: int) -> ObjectLayout:
        """Returns the layout of a group.

        Raises:
            KeyError: The group has no layout.
        """
        for layout in self.layouts:
            if layout.group_index == group_index:
                return layout
        raise KeyError(group_index)


@attrs.frozen(eq=False)
class TransferPart:
    """The blocks of one group that a job moves.

    Attributes:
        group_index: Index of the KV cache group.
        keys: One key per block, no duplicates.
        block_ids: int64[blocks], ids in KV memory, same order as ``keys``.
    """

    group_index: int
    keys: Sequence[bytes]
    block_ids: Int64Array = attrs.field(converter=_int64)


@attrs.frozen(eq=False)
class TransferJob:
    """One load or one store on one rank.

    Attributes:
        job_id: Unique among the jobs of this worker.
        parts: What to move.
        deadline_s: Time by ``time.monotonic()`` after which a job that has not begun is not begun
            any more and answered ``NOT_ATTEMPTED``.
        fence: Called on the backend's own thread before the first byte moves; returns once the
            device work that must come before the transfer has ended. None: nothing to wait for.
        may_arrive: Whether ``ARRIVING`` is an answer to this load.
    """

    job_id: int
    parts: tuple[TransferPart, ...]
    deadline_s: float
    fence: Callable[[], None] | None = None
    may_arrive: bool = False

    @property
    def object_count(self) -> int:
        """Number of objects in all parts."""
        return sum(len(part.keys) for part in self.parts)


class TransferOutcome(enum.Enum):
    """How a job ended."""

    DONE = "done"
    """Load: every byte is in place. Store: every object was stored, or existed."""
    FAILED = "failed"
    """Load: at least one object is missing or could not be read; destination bytes are undefined.
    Store: at least one object was not stored; the others were."""
    NOT_ATTEMPTED = "not_attempted"
    """Nothing was read or written: cancelled in time, past its deadline, queue full, closed."""
    STALLED = "stalled"
    """Not an end, and given at most once before it: a native call has outlived
    ``transfer_timeout_ms`` and may still read or write the job's blocks. umbp keeps them until the
    end comes, and goes on without the job."""
    ARRIVING = "arriving"
    """Not an end, and given at most once before it, of a load that ``may_arrive``: nothing can go
    wrong any more, and device work that waits for ``JobResult.arrival`` finds every byte in place.
    The end follows by itself, and is ``DONE``. For pools that queue copies on a device: the engine
    submits its work while the last bytes come in."""


class Arrival(Protocol):
    """What the device has to wait for before it reads what a load brings."""

    def wait(self) -> None:
        """Makes the device work that the calling thread submits from now on wait for the bytes.

        Called by the thread that submits the forward pass, as often as it likes, also when the load
        has ended. Does not block that thread.
        """


@attrs.frozen
class JobResult:
    """The one answer to a job, or the news that it has stalled or is arriving.

    Attributes:
        job_id: The job.
        outcome: How it ended.
        bytes_moved: Bytes copied by this job; existing objects are not copied again.
        failed_keys: Keys that were missing, could not be read or could not be stored.
        reason: One short line for a log when the outcome is not ``DONE``.
        arrival: Of an ``ARRIVING`` load, what the device waits for.
    """

    job_id: int
    outcome: TransferOutcome
    bytes_moved: int = 0
    failed_keys: tuple[bytes, ...] = ()
    reason: str = ""
    arrival: Arrival | None = None


@attrs.frozen
class PoolStats:
    """How full a pool is. Counters only rise.

    Attributes:
        capacity_bytes: What the pool may hold.
        used_bytes: What it holds now, with its own rounding.
        object_count: Objects that a lookup would find; None where the backend cannot tell.
        evicted_count: Objects that it has removed so far; None where the backend cannot tell.
    """

    capacity_bytes: int
    used_bytes: int | None
    object_count: int | None
    evicted_count: int | None


@attrs.frozen
class WorkerSite:
    """Where a ``WorkerPool`` is opened.

    Attributes:
        rank: Index of this worker among ``rank_count``.
        rank_count: Number of workers that hold a part of every block.
        device_type: Torch device type of KV memory.
        device_index: Index of the device among those that this process sees; None on a CPU.
        instance: Name of this engine on this host, unique among live engines.
        transfer_timeout_ms: How long one native call may take before the pool counts as stalled.
        physical_device_index: Index of the device among all of the host; None on a CPU.
    """

    rank: int
    rank_count: int
    device_type: str
    device_index: int | None
    instance: str
    transfer_timeout_ms: int
    physical_device_index: int | None = None


@runtime_checkable
class WorkerPool(Protocol):
    """A backend's side in a worker. All methods but ``contains`` are called by one thread.

    It may also have a method ``wait(timeout_s: float) -> None``, which returns once ``poll`` has
    something to return, or when that time has passed. Where it is missing, an idle engine asks
    again and again, and takes the processor away from the threads that move bytes.
    """

    def register(self, memory: KVMemory) -> None:
        """Makes KV memory known; called once, before any transfer.

        Raises:
            ConfigError: An option does not fit this memory, such as a pool that holds no object.
            BackendError: The memory cannot be used.
        """

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Says which objects exist now, in order. Thread-safe; does not count as a use for LRU.

        Raises:
            BackendError: The pool cannot say.
        """

    def load(self, job: TransferJob) -> None:
        """Starts to copy objects into KV memory. A full queue is answered through ``poll``."""

    def store(self, job: TransferJob) -> None:
        """Starts to copy KV memory into objects. A full queue is answered through ``poll``."""

    def poll(self) -> list[JobResult]:
        """Returns the results that have come in since the last call, each exactly once.

        A pool that somebody else may hold up, such as a server, says ``STALLED`` of a job that it
        cannot end in time, and goes on. A pool that can only hang with its own process raises.

        Raises:
            BackendStalled: A native call has outlived ``transfer_timeout_ms``, and the pool cannot
                go on.
        """

    def cancel(self, job_id: int) -> None:
        """Asks to end a job early. It ends by its result; an unknown job is ignored."""

    def take_evictions(self) -> list[bytes]:
        """Returns keys that the pool has removed since the last call; bounded, may be lossy."""

    def stats(self) -> PoolStats:
        """Says how full the pool is."""

    def close(self, timeout_s: float) -> None:
        """Ends transfers and gives memory back, in at most about ``timeout_s``. Idempotent.

        Jobs that had not begun are dropped. When a native call cannot be ended in time, what it
        uses is left allocated.
        """


@attrs.frozen(eq=False)
class LookupPart:
    """The blocks of one group that a question asks for.

    Attributes:
        group_index: Index of the KV cache group.
        hash_bytes: Length of one block hash.
        hashes: The block hashes, joined.
    """

    group_index: int
    hash_bytes: int
    hashes: bytes


@attrs.frozen(eq=False)
class LookupQuestion:
    """Asks which blocks every rank holds.

    Attributes:
        question_id: Unique among the questions of this client.
        epoch: Epoch of the keys.
        parts: The blocks, by group.
    """

    question_id: int
    epoch: int
    parts: tuple[LookupPart, ...]


@attrs.frozen(eq=False)
class LookupAnswer:
    """The one answer to a question.

    Attributes:
        question_id: The question.
        present: One bool array per part, True where every rank holds the block; None when some
            rank could not say, which is a miss.
        reason: One short line for a log when ``present`` is None.
        lacking: Names a rank that lacks a block, from the index of its part and its index in that;
            None when all hold it. None where the client cannot tell. A function, because only a
            report wants to know.
    """

    question_id: int
    present: tuple[npt.NDArray[np.bool_], ...] | None
    reason: str = ""
    lacking: Callable[[int, int], int | None] | None = attrs.field(
        default=None, eq=False, repr=False
    )


@runtime_checkable
class LookupClient(Protocol):
    """A backend's side in the scheduler. Called by one thread; never blocks beyond ``wait_s``.

    It may also have a method ``counters() -> Mapping[str, int]``, whose names begin with
    ``lookup_``; the connector shows them beside its own, and those that it knows
    (``umbp.connector.metric_table``) as metrics.
    """

    def ask(self, question: LookupQuestion) -> None:
        """Sends a question. Whatever goes wrong comes back as an answer or not at all."""

    def answers(self, wait_s: float = 0.0) -> list[LookupAnswer]:
        """Returns answers that have come in, waiting at most ``wait_s`` for the first."""

    def forget(self, question_id: int) -> None:
        """Drops a question; its late answer is not returned."""

    def close(self) -> None:
        """Gives everything back. Idempotent."""


@attrs.frozen
class SchedulerSite:
    """Where a ``LookupClient`` is opened.

    Attributes:
        namespace: Digest of the namespace, 16 bytes (see ``umbp.keys``).
        rank_count: Number of workers that hold a part of every block.
        instance: Name of this engine on this host.
        lookup_timeout_ms: How long an answer is waited for.
    """

    namespace: bytes
    rank_count: int
    instance: str
    lookup_timeout_ms: int


@runtime_checkable
class EpochSource(Protocol):
    """The epoch that all engines of one pool share. Called by one thread in each process."""

    def current(self) -> int:
        """Returns the present epoch: at least 0, below 2**63, and none that was left before.

        Asked for in every step, so it takes microseconds.
        """

    def advance(self) -> int:
        """Begins a new epoch for every engine, and returns it.

        Raises:
            BackendError: The epoch is where it was.
        """


@runtime_checkable
class MovablePool(WorkerPool, Protocol):
    """The pool of a backend with ``follows_sleep_mode``: it can do without KV memory."""

    def unregister(self) -> None:
        """Lets go of KV memory; called while no job is open.

        Objects stay and are found. Then comes ``register`` with memory of the same layout, perhaps
        elsewhere, or ``close``.
        """


class Backend(Protocol):
    """What the entry point names. Stateless; its ``open`` methods do the work.

    A backend that reads objects from other hosts says so by a class attribute
    ``hit_source = "p2p"``; without it, metrics call its hits ``"host"``.

    A backend whose lookups may list objects that are gone may say, as a class attribute
    ``load_failure_quarantine_ms: int``, what that option is where the user does not.

    A backend whose pools are ``MovablePool`` says so by a class attribute ``follows_sleep_mode =
    True``; an engine with vLLM's sleep mode is refused without it.

    A backend whose ``WorkerPool.contains`` answers out of this process's own memory, and waits for
    nothing, says so by a class attribute ``contains_is_local = True``: no I/O, no call of a library
    that may block, no lock that a transfer holds for long. A scheduler in the same process then
    calls it on its own thread, where no timeout ends the call; all others ask over the socket.

    A backend that needs a library may also have a class method ``check_available() -> None``, which
    raises ``BackendUnavailable`` when it cannot be used here. Tools ask it before an engine starts.

    Attributes:
        api: Must equal ``BACKEND_API``.
        options_type: An attrs class with the backend's own options, each with metadata ``help``.
        pool_in_worker: Whether the pool lives in the workers, so that umbp asks them itself.
    """

    api: ClassVar[int]
    options_type: ClassVar[type[Any]]
    pool_in_worker: ClassVar[bool]

    @classmethod
    def open_worker(cls, options: Any, site: WorkerSite) -> WorkerPool:
        """Opens the worker's side.

        Raises:
            ConfigError: An option cannot work here.
            BackendUnavailable: The other side, or a library, is not there.
        """


class SharedBackend(Backend, Protocol):
    """A backend whose pool lives elsewhere: ``pool_in_worker`` is False.

    When a reset is to reach every engine of the pool, it also has a class method
    ``open_epoch(options) -> EpochSource``, called once in the scheduler and once in every worker.
    Without it, a reset concerns the engine that was told to.
    """

    @classmethod
    def open_lookup(cls, options: Any, site: SchedulerSite) -> LookupClient:
        """Opens the scheduler's side.

        Raises:
            ConfigError: An option cannot work here.
            BackendUnavailable: The other side, or a library, is not there.
        """

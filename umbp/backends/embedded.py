# SPDX-License-Identifier: Apache-2.0
"""The ``embedded`` backend: MORI's UMBP client inside each worker, with a pool in host memory.

Each worker owns one client and one pool; pools do not see each other. Bytes move between KV memory
and the pool in ranged calls on registered memory, with no staging copy in host memory.

The client is constructed by ``register``, because its page size follows from the size of the
objects. What can fail before that fails in ``open_worker``: options, capacity, and MORI's import.

What MORI does not tell, umbp does not know: which objects were evicted, how many there are, and
how full the pool is. A store that is answered ``DONE`` was stored once; when a load comes for it,
it may be gone, and that is a miss.
"""

import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import attrs

from umbp.backends.base import (
    BACKEND_API,
    JobResult,
    KVMemory,
    PoolStats,
    TransferJob,
    TransferPart,
    WorkerSite,
)
from umbp.backends.job_runner import JobRunner, TransferKind
from umbp.backends.mori_client import (
    MoriClient,
    Moved,
    PoolBacking,
    object_names,
    pool_config,
)
from umbp.backends.mori_columns import GroupColumns, group_columns
from umbp.backends.mori_jobs import move_job
from umbp.backends.mori_library import MoriLibrary, load_mori
from umbp.backends.mori_options import (
    device_staging_option,
    log_level_option,
    put_retries_option,
    require_device,
    stages,
)
from umbp.backends.mori_pages import PoolPlan, plan_pool
from umbp.backends.mori_probe import prove_transfers
from umbp.backends.mori_transfers import Transfers, open_transfers
from umbp.backends.pool_options import PoolOptions
from umbp.errors import BackendError, ConfigError
from umbp.options import option

logger = logging.getLogger(__name__)

_READ_LEASE_MS: Final = 1
"""The shortest that MORI takes (0 is its default, 500). The client keeps gets and puts apart, so no
get needs the lease; and while it holds, eviction takes the newest objects instead of the oldest."""


@attrs.frozen(kw_only=True)
class EmbeddedOptions(PoolOptions):
    """Options of the ``embedded`` backend.

    Raises:
        ConfigError: Both capacities are given, or the watermarks are in the wrong order.
    """

    high_watermark: float = option(
        0.95,
        help="Share of the pool at which a store evicts. The rest stays free, because MORI never "
        "evicts to make room for the store at hand. Lowered where one object needs more room.",
        minimum=0.05,
        maximum=1.0,
    )
    low_watermark: float = option(
        0.9,
        help="Share of the pool at which eviction ends; below high_watermark.",
        minimum=0.01,
        maximum=1.0,
    )
    page_size_bytes: int | None = option(
        None,
        help="Page size of the pool; an object takes whole pages. null chooses the largest with "
        "which no object wastes more than 5 %: for one object size, that size.",
        unit="bytes",
        minimum=64,
    )
    use_hugepages: bool = option(
        False,
        help="Take the pool from huge pages of 2 MiB. Without enough free ones MORI falls back to "
        "normal pages, and says so at log level warn.",
    )
    use_shared_memory: bool = option(
        False,
        help="Ask MORI to back the pool by shared memory. MORI 1.2.4 accepts that and keeps the "
        "pool in private memory all the same.",
    )
    device_staging: bool | None = device_staging_option()
    put_retries: int = put_retries_option()
    log_level: str | None = log_level_option()

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.low_watermark >= self.high_watermark:
            raise ConfigError(
                f"option low_watermark is {self.low_watermark}, expected less than high_watermark, "
                f"which is {self.high_watermark}; lower it"
            )


@attrs.frozen
class _Opened:
    """What exists once KV memory is known."""

    client: MoriClient
    plan: PoolPlan
    columns: dict[int, GroupColumns]
    transfers: Transfers | None
    """None while there is no KV memory."""
    memory: KVMemory | None
    """Held so that it stays allocated while MORI may copy."""


class EmbeddedPool:
    """One worker's pool. See ``umbp.backends.base.WorkerPool``.

    Args:
        options: The options.
        site: The worker.
        capacity_bytes: What this worker's pool may take.
        library: MORI.
    """

    def __init__(
        self, options: EmbeddedOptions, site: WorkerSite, capacity_bytes: int, library: MoriLibrary
    ) -> None:
        self._options = options
        self._site = site
        self._capacity_bytes = capacity_bytes
        self._library = library
        self._opened: _Opened | None = None
        self._runner = JobRunner(
            self._run,
            thread_count=options.transfer_threads,
            queue_limit=options.queue_limit,
            timeout_ms=site.transfer_timeout_ms,
            name=f"umbp-embedded-{site.rank}",
        )

    def register(self, memory: KVMemory) -> None:
        """Constructs MORI's client for the objects of this memory, and registers the memory.

        Raises:
            BackendError: MORI cannot use the memory, or the pool is too small for its objects.
        """
        opened = self._opened
        if opened is not None and opened.transfers is not None:
            raise BackendError("KV memory is already registered")
        columns = group_columns(memory)
        if opened is None:
            plan = self._plan([group.object_bytes for group in columns.values()])
            prove_transfers(self._library, memory)
        else:
            plan = opened.plan
        transfers = open_transfers(
            memory,
            columns,
            staged=stages(self._options.device_staging, self._library, memory),
            thread_count=self._options.transfer_threads,
        )
        client = opened.client if opened is not None else self._open_client(plan)
        for region in transfers.regions:
            client.register(region)
        self._opened = _Opened(client, plan, columns, transfers, memory)

    def unregister(self) -> None:
        """Makes MORI forget KV memory; its client and the objects stay."""
        opened = self._opened
        if opened is not None and opened.transfers is not None:
            for region in opened.transfers.regions:
                opened.client.deregister(region)
            self._opened = attrs.evolve(opened, transfers=None, memory=None)

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Says which objects exist now.

        Raises:
            BackendError: The pool is not open.
        """
        opened = self._require_open()
        # A name carries the size, and a key does not say which group it is of.
        found = [False] * len(keys)
        for object_bytes in {group.object_bytes for group in opened.columns.values()}:
            of_size = opened.client.contains(object_names(keys, object_bytes))
            found = [before or now for before, now in zip(found, of_size, strict=True)]
        return found

    def load(self, job: TransferJob) -> None:
        """Starts to copy objects into KV memory."""
        self._runner.submit(TransferKind.LOAD, job)

    def store(self, job: TransferJob) -> None:
        """Starts to copy KV memory into objects. Stores take turns, whatever the thread count."""
        self._runner.submit(TransferKind.STORE, job)

    def poll(self) -> list[JobResult]:
        """Returns the results since the last call.

        Raises:
            BackendStalled: A job has outlived ``transfer_timeout_ms``.
        """
        return self._runner.poll()

    def wait(self, timeout_s: float) -> None:
        """See ``WorkerPool``."""
        self._runner.wait(timeout_s)

    def cancel(self, job_id: int) -> None:
        """Takes a job out of the queue; one that runs ends by itself."""
        self._runner.cancel(job_id)

    def take_evictions(self) -> list[bytes]:
        """Returns nothing: MORI does not say what it evicts."""
        return []

    def stats(self) -> PoolStats:
        """Says how large the pool is; MORI does not say how full."""
        opened = self._opened
        capacity_bytes = opened.plan.capacity_bytes if opened else self._capacity_bytes
        return PoolStats(capacity_bytes, used_bytes=None, object_count=None, evicted_count=None)

    def close(self, timeout_s: float) -> None:
        """Ends transfers and gives the pool back.

        A call that does not return in time goes on, and its thread holds the pool and KV memory
        for as long as it does.
        """
        has_ended = self._runner.close(timeout_s)
        opened, self._opened = self._opened, None
        if opened is None:
            return
        opened.client.close()
        if not has_ended:
            logger.warning("a transfer still runs; its pool and KV memory stay allocated")

    def _plan(self, object_sizes: Sequence[int]) -> PoolPlan:
        return plan_pool(
            self._capacity_bytes,
            object_sizes,
            page_bytes=self._options.page_size_bytes,
            high_watermark=self._options.high_watermark,
            low_watermark=self._options.low_watermark,
        )

    def _open_client(self, plan: PoolPlan) -> MoriClient:
        config = self._config(plan)
        return MoriClient(self._library, config, put_retries=self._options.put_retries)

    def _config(self, plan: PoolPlan) -> Any:
        options, site = self._options, self._site
        name = f"/umbp-{site.instance}-{site.rank}" if options.use_shared_memory else None
        backing = PoolBacking(
            numa_node=options.numa_node,
            prefault=options.prefault,
            use_hugepages=options.use_hugepages,
            shared_memory_name=name,
        )
        return pool_config(self._library, plan, backing)

    def _require_open(self) -> _Opened:
        if self._opened is None:
            raise BackendError("the pool has no KV memory, or is closed")
        return self._opened

    def _run(self, kind: TransferKind, job: TransferJob) -> JobResult:
        """Executes one job, on a thread of the runner."""
        opened = self._require_open()
        transfers = opened.transfers
        if transfers is None:
            raise BackendError("KV memory is not registered")

        def move(part: TransferPart, columns: GroupColumns) -> Moved:
            names = object_names(part.keys, columns.object_bytes)
            if kind is TransferKind.LOAD:
                return transfers.load(opened.client, names, part)
            return transfers.store(
                opened.client,
                names,
                part,
                objects_per_put=opened.plan.objects_per_put(columns.object_bytes),
            )

        return move_job(kind, job, opened.columns, move)


class EmbeddedBackend:
    """What the entry point ``embedded`` names."""

    api: ClassVar[int] = BACKEND_API
    options_type: ClassVar[type[Any]] = EmbeddedOptions
    pool_in_worker: ClassVar[bool] = True
    follows_sleep_mode: ClassVar[bool] = True

    @classmethod
    def check_available(cls) -> None:
        """Imports MORI, in a process of a tool and never in the scheduler's.

        Raises:
            BackendUnavailable: MORI, or a library that it needs, is missing.
        """
        load_mori(default_read_lease_ms=_READ_LEASE_MS)

    @classmethod
    def open_worker(cls, options: EmbeddedOptions, site: WorkerSite) -> EmbeddedPool:
        """Checks everything that can be checked without KV memory, and imports MORI.

        Raises:
            ConfigError: The device is not one that MORI moves, or the capacity is not there.
            BackendUnavailable: MORI, or a library that it needs, is missing.
        """
        require_device("embedded", site)
        options.require_numa_node()
        capacity_bytes = options.resolve_capacity_bytes(site.rank_count)
        library = load_mori(options.log_level, default_read_lease_ms=_READ_LEASE_MS)
        return EmbeddedPool(options, site, capacity_bytes, library)

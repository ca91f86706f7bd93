# SPDX-License-Identifier: Apache-2.0
"""The ``distributed`` backend: every worker is a node with a pool, and a master lists the objects.

A worker stores into its own pool and tells the master; whoever asks the master finds it. A load of
the node's own objects is a copy within the process; one of another node's objects goes over RDMA.
The scheduler asks the master with a client of its own (``umbp.backends.mori_lookup``).

The master may be stopped or die at any time:

* Stopped, stores do not return. The first is reported as stalled, its blocks stay pinned, and no
  store is begun until it returns. Loads that were admitted before go on, since they need no master
  where the objects are this node's own; that is why they have threads of their own.
* Dead, stores are not attempted, and loads go on as well. A master that is started anew learns
  from the nodes what they hold.
* A get that outlives the read lease may bring other objects' bytes and counts as failed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs

from umbp.backends.base import (
    BACKEND_API,
    JobResult,
    KVMemory,
    PoolStats,
    SchedulerSite,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerSite,
)
from umbp.backends.distributed_options import DistributedOptions
from umbp.backends.job_runner import TransferKind
from umbp.backends.master_link import MasterLink
from umbp.backends.mori_client import MoriClient, Moved, shared_names
from umbp.backends.mori_columns import GroupColumns, group_columns
from umbp.backends.mori_jobs import move_job
from umbp.backends.mori_library import MoriLibrary, load_mori
from umbp.backends.mori_lookup import MoriLookup
from umbp.backends.mori_node import (
    READ_LEASE_MS,
    NodePlan,
    join_as_node,
    join_to_ask,
    plan_node,
)
from umbp.backends.mori_options import require_device, stages
from umbp.backends.mori_probe import prove_transfers
from umbp.backends.mori_transfers import Transfers, open_transfers
from umbp.backends.transfer_lanes import STORE_THREAD_COUNT, TransferLanes
from umbp.errors import BackendError, BackendUnavailable

logger = logging.getLogger(__name__)

_Move = Callable[[TransferPart, GroupColumns], Moved]


@attrs.frozen
class _Opened:
    """What exists once KV memory is known."""

    client: MoriClient
    link: MasterLink
    plan: NodePlan
    columns: dict[int, GroupColumns]
    transfers: Transfers
    memory: KVMemory
    """Held so that it stays allocated while MORI may copy."""


class DistributedPool:
    """One worker's node. See ``umbp.backends.base.WorkerPool``.

    Args:
        options: The options.
        site: The worker.
        capacity_bytes: What this worker's pool may take.
        library: MORI.
    """

    def __init__(
        self,
        options: DistributedOptions,
        site: WorkerSite,
        capacity_bytes: int,
        library: MoriLibrary,
    ) -> None:
        self._options = options
        self._site = site
        self._capacity_bytes = capacity_bytes
        self._library = library
        self._opened: _Opened | None = None
        self._lanes = TransferLanes(
            self._run,
            load_thread_count=options.transfer_threads,
            queue_limit=options.queue_limit,
            timeout_ms=site.transfer_timeout_ms,
            name=f"umbp-distributed-{site.rank}",
        )

    def register(self, memory: KVMemory) -> None:
        """Joins the master with a pool for the objects of this memory, and registers the memory.

        Raises:
            ConfigError: The pool or the scratch memory holds no object, or the port is in use.
            BackendUnavailable: The master does not take the node.
            BackendError: MORI cannot use the memory.
        """
        if self._opened is not None:
            raise BackendError("KV memory is already registered")
        columns = group_columns(memory)
        sizes = [group.object_bytes for group in columns.values()]
        plan = plan_node(self._options, self._capacity_bytes, sizes)
        prove_transfers(self._library, memory)
        transfers = open_transfers(
            memory,
            columns,
            staged=stages(self._options.device_staging, self._library, memory),
            thread_count=self._options.transfer_threads + STORE_THREAD_COUNT,
        )
        client = join_as_node(self._library, self._options, self._site, plan)
        for region in transfers.regions:
            client.register(region)
        link = MasterLink(self._options.master(), client)
        self._opened = _Opened(client, link, plan, columns, transfers, memory)

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Says which objects this node has, or the master lists. Blocks while that is stopped.

        Raises:
            BackendError: The pool is not open.
        """
        return self._require_open().client.contains(shared_names(keys))

    def load(self, job: TransferJob) -> None:
        """Starts to copy objects into KV memory."""
        self._lanes.submit(TransferKind.LOAD, job)

    def store(self, job: TransferJob) -> None:
        """Starts to copy KV memory into objects. Stores take turns."""
        self._lanes.submit(TransferKind.STORE, job)

    def poll(self) -> list[JobResult]:
        """Returns the results since the last call, and which job has stalled."""
        return self._lanes.poll()

    def wait(self, timeout_s: float) -> None:
        """See ``WorkerPool``."""
        self._lanes.wait(timeout_s)

    def cancel(self, job_id: int) -> None:
        """Takes a job out of the queue; one that runs ends by itself."""
        self._lanes.cancel(job_id)

    def take_evictions(self) -> list[bytes]:
        """Returns nothing: MORI does not say what it evicts."""
        return []

    def stats(self) -> PoolStats:
        """Says how large the pool is; MORI does not say how full."""
        opened = self._opened
        capacity_bytes = opened.plan.capacity_bytes if opened else self._capacity_bytes
        return PoolStats(capacity_bytes, used_bytes=None, object_count=None, evicted_count=None)

    def close(self, timeout_s: float) -> None:
        """Ends transfers, leaves the master and gives the pool back.

        While the master is stopped, or a call has stalled, nothing can be given back: the pool
        goes with the process, and the master misses the node in its time.
        """
        has_ended = self._lanes.close(timeout_s)
        opened, self._opened = self._opened, None
        if opened is None:
            return
        if not has_ended:
            logger.warning("a transfer still runs; its pool and KV memory stay allocated")
        opened.link.close(is_busy=not has_ended)

    def _require_open(self) -> _Opened:
        if self._opened is None:
            raise BackendError("the pool has no KV memory, or is closed")
        return self._opened

    def _run(self, kind: TransferKind, job: TransferJob) -> JobResult:
        """Executes one job, on a thread of the lanes."""
        opened = self._require_open()
        if kind is TransferKind.LOAD:
            return move_job(kind, job, opened.columns, _loading(opened, opened.client))
        try:
            linked = opened.link.client()
        except BackendUnavailable as error:
            return JobResult(job.job_id, TransferOutcome.NOT_ATTEMPTED, reason=str(error))
        result = move_job(kind, job, opened.columns, _storing(opened, linked.client))
        if len(result.failed_keys) == job.object_count:
            opened.link.doubt(linked)
        else:
            linked.client.publish()
        return result


def _loading(opened: _Opened, client: MoriClient) -> _Move:
    def load(part: TransferPart, _: GroupColumns) -> Moved:
        return opened.transfers.load(client, shared_names(part.keys), part)

    return load


def _storing(opened: _Opened, client: MoriClient) -> _Move:
    def store(part: TransferPart, _: GroupColumns) -> Moved:
        # A put evicts nothing, whatever its size: the master has that done.
        return opened.transfers.store(
            client, shared_names(part.keys), part, objects_per_put=len(part.keys) or 1
        )

    return store


class DistributedBackend:
    """What the entry point ``distributed`` names."""

    api: ClassVar[int] = BACKEND_API
    options_type: ClassVar[type[Any]] = DistributedOptions
    pool_in_worker: ClassVar[bool] = False
    hit_source: ClassVar[str] = "p2p"
    """An object may lie on this host; only the master knows, and the farther place is said."""
    load_failure_quarantine_ms: ClassVar[int] = 30_000
    """A dead node's objects are listed until the master misses it, by default for as long."""

    @classmethod
    def check_available(cls) -> None:
        """Imports MORI, in a process of a tool.

        Raises:
            BackendUnavailable: MORI, or a library that it needs, is missing.
        """
        load_mori(default_read_lease_ms=READ_LEASE_MS)

    @classmethod
    def open_worker(cls, options: DistributedOptions, site: WorkerSite) -> DistributedPool:
        """Checks everything that can be checked without KV memory, and imports MORI.

        Raises:
            ConfigError: The device is not one that MORI moves, or the capacity is not there.
            BackendUnavailable: MORI, or a library that it needs, is missing.
        """
        require_device("distributed", site)
        options.require_numa_node()
        capacity_bytes = options.resolve_capacity_bytes(site.rank_count)
        library = load_mori(options.log_level, default_read_lease_ms=READ_LEASE_MS)
        return DistributedPool(options, site, capacity_bytes, library)

    @classmethod
    def open_lookup(cls, options: DistributedOptions, site: SchedulerSite) -> MoriLookup:
        """Joins the master with a client that asks, and no more.

        Raises:
            BackendUnavailable: MORI is missing, or the master does not answer.
        """
        library = load_mori(options.log_level, default_read_lease_ms=READ_LEASE_MS)
        client = join_to_ask(library, options, site.instance)
        return MoriLookup(MasterLink(options.master(), client), site, asked="the master")

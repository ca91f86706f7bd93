# SPDX-License-Identifier: Apache-2.0
"""The ``standalone`` backend: one pool of host memory for all engines of a host, in MORI's server.

``umbp_standalone_server`` owns the pool. Workers register KV memory with it through HIP's memory
handles, and it copies straight between that memory and its pool. The scheduler asks it, too, with a
client of its own (``umbp.backends.mori_lookup``).

The server is another process, so it may be stopped or die while it has KV memory in its hands:

* Stopped, a call on it does not return. The job is reported as stalled, its blocks stay pinned, and
  nothing new is begun until the call returns.
* Dead, calls answer False at once. Jobs are not attempted until a server listens again, and then KV
  memory is registered anew (``umbp.backends.mori_link``).
* A get that outlives the server's read lease may bring other objects' bytes and counts as failed.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from umbp.backends.base import (
    BACKEND_API,
    JobResult,
    KVMemory,
    MemoryRegion,
    PoolStats,
    SchedulerSite,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerSite,
)
from umbp.backends.bounded_call import bounded_call
from umbp.backends.job_runner import JobRunner, StallPolicy, TransferKind
from umbp.backends.mori_client import MoriClient, Moved, server_config, shared_names
from umbp.backends.mori_columns import GroupColumns, group_columns
from umbp.backends.mori_jobs import move_job
from umbp.backends.mori_library import MoriLibrary, hip_device_count, load_mori
from umbp.backends.mori_link import LinkedClient, MoriLink
from umbp.backends.mori_lookup import MoriLookup
from umbp.backends.mori_options import DEVICE_TYPES, require_device, stages
from umbp.backends.mori_server import (
    ServerSettings,
    ensure_started,
    server_read_lease_ms,
    wait_until_listening,
)
from umbp.backends.mori_transfers import Transfers, open_transfers
from umbp.backends.server_address import ServerAddress
from umbp.backends.server_probe import prove_server_transfers
from umbp.backends.shared_epoch import SharedEpoch
from umbp.backends.standalone_options import StandaloneOptions
from umbp.errors import BackendError, BackendUnavailable, ConfigError

logger = logging.getLogger(__name__)

_BYTES_PER_PUT: Final = 16 << 20
"""A put finds only the room that eviction has left free, which a client cannot know. This is the
room in a pool of 160 MiB with MORI's watermarks; larger objects go one at a time."""

_RECONNECT_TIMEOUT_MS: Final = 2000
"""How long a client is waited for when a server that was there before listens again."""


class StandalonePool:
    """One worker's side. See ``umbp.backends.base.WorkerPool``.

    Args:
        options: The options.
        site: The worker.
        library: MORI.
    """

    def __init__(self, options: StandaloneOptions, site: WorkerSite, library: MoriLibrary) -> None:
        self._options = options
        self._library = library
        self._address = options.server_address()
        self._connect_timeout_ms = options.startup_timeout_ms
        self._memory: KVMemory | None = None
        self._columns: dict[int, GroupColumns] = {}
        self._transfers: Transfers | None = None
        self._link = MoriLink(self._address, self._connect, self._share)
        self._runner = JobRunner(
            self._run,
            thread_count=options.transfer_threads,
            queue_limit=options.queue_limit,
            timeout_ms=site.transfer_timeout_ms,
            name=f"umbp-standalone-{site.rank}",
            on_stall=StallPolicy.REPORT,
        )

    def register(self, memory: KVMemory) -> None:
        """Gives the server access to KV memory, and proves that it moves bytes.

        Raises:
            BackendUnavailable: The server does not answer, or cannot reach memory of this kind.
            BackendError: The memory cannot be shared.
        """
        if self._memory is not None:
            raise BackendError("KV memory is already registered")
        self._columns = group_columns(memory)
        _require_devices(memory)
        self._memory = memory
        self._transfers = transfers = open_transfers(
            memory,
            self._columns,
            staged=stages(self._options.device_staging, self._library, memory),
            thread_count=self._options.transfer_threads,
        )
        # The server may be stopped, and then the calls do not return.
        bounded_call(
            lambda: prove_server_transfers(self._link.client().client, transfers.regions),
            2 * self._options.startup_timeout_ms / 1000,
            f"the server at {self._address} did not register KV memory",
        )
        self._connect_timeout_ms = min(self._connect_timeout_ms, _RECONNECT_TIMEOUT_MS)

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Says which objects exist now. Blocks while the server is stopped.

        Raises:
            BackendError: There is no server.
        """
        return self._link.client().client.contains(shared_names(keys))

    def load(self, job: TransferJob) -> None:
        """Starts to copy objects into KV memory."""
        self._runner.submit(TransferKind.LOAD, job)

    def store(self, job: TransferJob) -> None:
        """Starts to copy KV memory into objects. Stores take turns, whatever the thread count."""
        self._runner.submit(TransferKind.STORE, job)

    def poll(self) -> list[JobResult]:
        """Returns the results since the last call, and which job has stalled."""
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
        """Says how large the pool is where this engine started it; MORI does not say how full."""
        return PoolStats(self._options.capacity_bytes or 0, None, None, None)

    def close(self, timeout_s: float) -> None:
        """Ends transfers; objects stay in the server. Does not wait for a call that has stalled."""
        if not self._runner.close(timeout_s):
            logger.warning("a transfer still runs; its KV memory stays allocated")
        self._link.close()

    def _connect(self, address: str) -> MoriClient:
        # A server that was started anew may have another lease.
        lease_ms = min(
            self._options.read_lease_ms,
            server_read_lease_ms(self._address) or self._options.read_lease_ms,
        )
        return MoriClient(
            self._library,
            server_config(self._library, address, timeout_ms=self._connect_timeout_ms),
            put_retries=self._options.put_retries,
            read_lease_ms=lease_ms,
        )

    def _share(self, client: MoriClient) -> None:
        """Registers every allocation; a client with one missing could use none."""
        for region in self._transfers.regions if self._transfers is not None else ():
            if not client.share(region):
                if self._address.listener() is None:
                    raise BackendUnavailable(f"no server listens at {self._address}")
                raise BackendError(_why_not_shared(region))

    def _run(self, kind: TransferKind, job: TransferJob) -> JobResult:
        """Executes one job, on a thread of the runner."""
        try:
            linked = self._link.client()
        except BackendUnavailable as error:
            return JobResult(job.job_id, TransferOutcome.NOT_ATTEMPTED, reason=str(error))
        result = self._move(linked, kind, job)
        if len(result.failed_keys) == job.object_count and self._link.doubt(linked):
            # What was tried once may have moved bytes, so it stands when there is no second time.
            with contextlib.suppress(BackendUnavailable):
                result = self._move(self._link.client(), kind, job)
        return result

    def _move(self, linked: LinkedClient, kind: TransferKind, job: TransferJob) -> JobResult:
        transfers = self._transfers
        if transfers is None:
            raise BackendError("the pool has no KV memory")

        def move(part: TransferPart, columns: GroupColumns) -> Moved:
            names = shared_names(part.keys)
            if kind is TransferKind.LOAD:
                return transfers.load(linked.client, names, part)
            objects_per_put = max(1, _BYTES_PER_PUT // columns.object_bytes)
            return transfers.store(linked.client, names, part, objects_per_put=objects_per_put)

        return move_job(kind, job, self._columns, move)


def _require_devices(memory: KVMemory) -> None:
    if any(region.device_type not in DEVICE_TYPES for region in memory.regions):
        kinds = sorted({region.device_type for region in memory.regions})
        raise BackendError(f"MORI does not move memory of device type {', '.join(kinds)}")
    if not hip_device_count():
        kinds = sorted({region.device_type for region in memory.regions})
        raise BackendUnavailable(
            f"KV memory is on {' and '.join(kinds)}, and the HIP runtime that MORI uses sees no "
            "device, so that no server can reach it: backend standalone needs a GPU with ROCm, or "
            "with CUDA and native/hip_cuda; choose backend memory or embedded"
        )


def _why_not_shared(region: MemoryRegion) -> str:
    return (
        f"the server cannot be given {region.size_bytes} bytes of {region.device_type} memory at "
        f"{region.address:#x}: it must be device memory that HIP can share between processes, an "
        "allocation of its own"
    )


class StandaloneBackend:
    """What the entry point ``standalone`` names."""

    api: ClassVar[int] = BACKEND_API
    options_type: ClassVar[type[Any]] = StandaloneOptions
    pool_in_worker: ClassVar[bool] = False

    @classmethod
    def check_available(cls) -> None:
        """Imports MORI, in a process of a tool.

        Raises:
            BackendUnavailable: MORI, or a library that it needs, is missing.
        """
        load_mori()

    @classmethod
    def open_worker(cls, options: StandaloneOptions, site: WorkerSite) -> StandalonePool:
        """Imports MORI, and starts a server or waits for one.

        Raises:
            ConfigError: The device is not one that MORI moves, or the server's directory is open
                to others.
            BackendUnavailable: MORI is missing, or no server listens.
        """
        require_device("standalone", site)
        library = load_mori(options.log_level)
        _find_server(options)
        return StandalonePool(options, site, library)

    @classmethod
    def open_lookup(cls, options: StandaloneOptions, site: SchedulerSite) -> MoriLookup:
        """Connects a client that asks, and no more.

        Raises:
            BackendUnavailable: MORI is missing, or the server does not answer.
        """
        library = load_mori(options.log_level)
        address = _find_server(options)
        timeouts_ms = iter((options.startup_timeout_ms,))

        def connect(spelled: str) -> MoriClient:
            timeout_ms = next(timeouts_ms, _RECONNECT_TIMEOUT_MS)
            return MoriClient(
                library,
                server_config(library, spelled, timeout_ms=timeout_ms),
                put_retries=0,
                read_lease_ms=options.read_lease_ms,
            )

        link = MoriLink(address, connect, lambda _: None)
        bounded_call(
            link.client,
            2 * options.startup_timeout_ms / 1000,
            f"the server at {address} did not answer",
        )
        return MoriLookup(link, site)

    @classmethod
    def open_epoch(cls, options: StandaloneOptions) -> SharedEpoch:
        """Opens the epoch that all engines of the server share.

        Raises:
            ConfigError: Its file cannot be made or used.
        """
        return SharedEpoch(options.server_address().beside(".epoch"))


def _find_server(options: StandaloneOptions) -> ServerAddress:
    """Starts a server if that is wanted, and waits until somebody listens."""
    address = options.server_address()
    give_up_s = time.monotonic() + options.startup_timeout_ms / 1000
    if options.auto_start:
        assert options.capacity_bytes is not None
        ensure_started(
            ServerSettings(
                address=address,
                capacity_bytes=options.capacity_bytes,
                read_lease_ms=options.read_lease_ms,
                log_level=options.log_level,
            ),
            give_up_s,
        )
    wait_until_listening(address, give_up_s)
    address.require_private()
    lease_ms = server_read_lease_ms(address)
    if lease_ms is not None and lease_ms < options.read_lease_ms:
        raise ConfigError(
            f"option read_lease_ms is {options.read_lease_ms}, but the server at {address} "
            f"protects what is read for {lease_ms} ms; set it to at most that, or start the server "
            "with more"
        )
    return address

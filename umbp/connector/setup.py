# SPDX-License-Identifier: Apache-2.0
"""Opens the two sides: backend, sockets, core, in the order in which they need each other."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch

import umbp
from umbp.backends.base import (
    EpochSource,
    KVMemory,
    LookupClient,
    MovablePool,
    SchedulerSite,
    SharedBackend,
    WorkerPool,
    WorkerSite,
)
from umbp.backends.lookup_client import SocketLookupClient
from umbp.backends.lookup_server import LookupServer
from umbp.connector.config import ConnectorConfig, ConnectorOptions, wants_kv_events
from umbp.connector.layout import kv_memory
from umbp.connector.lazy import spare_blocks
from umbp.connector.lookup_log import LookupLog
from umbp.connector.report_files import BoundedLines, open_directory, write_whole
from umbp.connector.scheduler import SchedulerSide
from umbp.connector.support import loads_may_arrive, why_load_async
from umbp.connector.tracing import core_maker
from umbp.connector.worker import WorkerSide
from umbp.fsm import Core, CoreLimits
from umbp.keys import KeySpace

logger = logging.getLogger(__name__)

MANIFEST_SUFFIX: Final = ".manifest.json"
LOOKUPS_SUFFIX: Final = ".lookups.jsonl"


def open_scheduler_side(  # noqa: PLR0913 - keyword-only
    config: ConnectorConfig,
    keyspace: KeySpace,
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    strict: bool,
    open_lookup: Callable[[ConnectorConfig, KeySpace], LookupClient] | None = None,
    clock: Callable[[], float] = time.monotonic,
    make_core: Callable[[CoreLimits, int], Core] | None = None,
) -> SchedulerSide:
    """Opens the scheduler's side. No pool, no MORI: at most a client that asks.

    Args:
        config: The configuration.
        keyspace: Keys of the namespace.
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``.
        strict: Raise what would otherwise be logged and counted; for tests.
        open_lookup: Opens the client that asks; None: the one that fits the backend.
        clock: Seconds, monotonic.
        make_core: Makes the core from its limits and its first epoch, for whoever watches it; None:
            as the options say.

    Raises:
        ConfigError: An option cannot work.
    """
    from vllm.v1.core.kv_cache_utils import (
        resolve_kv_cache_block_sizes,
    )

    options = config.options
    transfer = vllm_config.kv_transfer_config
    _, unit_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    spare = spare_blocks(vllm_config, kv_cache_config) if options.lazy_offload else 0
    if options.lazy_offload and not spare:
        logger.warning(
            "option lazy_offload is true, but KV memory of %d blocks has none to spare beyond "
            "those of the longest request: blocks are stored when they are computed",
            kv_cache_config.num_blocks,
        )
    limits = config.core_limits(
        unit_tokens=unit_tokens,
        blocks_per_unit=blocks_per_unit(kv_cache_config, unit_tokens),
        block_count=kv_cache_config.num_blocks,
        spare_blocks=spare,
    )
    lookups = None
    if options.enable_lookup and transfer.is_kv_consumer:
        lookups = (open_lookup or _open_lookup)(config, keyspace)
    shared_epoch = _open_epoch(config)
    return SchedulerSide(
        (make_core or core_maker(config, keyspace, vllm_config))(
            limits, shared_epoch.current() if shared_epoch is not None else 0
        ),
        lookups,
        load_async=load_async(options.load_async, vllm_config, kv_cache_config),
        lookup_async=options.lookup_async,
        store=transfer.is_kv_producer,
        save_decode_cache=options.save_decode_cache,
        lazy_step_tokens=_lazy_step_tokens(options, vllm_config),
        shared_epoch=shared_epoch,
        lookup_log=_lookup_log(config, keyspace),
        strict=strict,
        clock=clock,
    )


def _lazy_step_tokens(options: ConnectorOptions, vllm_config: Any) -> int | None:
    """Returns how many tokens a step computes at most; None without lazy offload."""
    if not options.lazy_offload:
        return None
    return int(vllm_config.scheduler_config.max_num_batched_tokens)


def _lookup_log(config: ConnectorConfig, keyspace: KeySpace) -> LookupLog | None:
    """Opens the log of lookups, if one is wanted."""
    path, kept = config.report_path(keyspace, LOOKUPS_SUFFIX), config.options.explain_lookups
    return LookupLog(BoundedLines(path, kept)) if path is not None and kept else None


def write_manifest(
    config: ConnectorConfig, keyspace: KeySpace, manifest: Mapping[str, Any]
) -> None:
    """Writes what the namespace is made of, if that is wanted.

    Raises:
        ConfigError: The directory is not this user's alone.
    """
    path = config.report_path(keyspace, MANIFEST_SUFFIX)
    if path is None:
        return
    open_directory(path.parent)
    report = {
        "umbp": umbp.__version__,
        "instance": config.instance(keyspace),
        "backend": config.options.backend,
        "namespace": keyspace.namespace.hex(),
        "manifest": manifest,
    }
    write_whole(path, json.dumps(report, indent=2, default=str) + "\n")
    logger.info("umbp has written its manifest to %s", path)


def load_async(wanted: bool, vllm_config: Any, kv_cache_config: Any) -> bool:
    """Says whether to load between steps; an engine that needs it overrules the option, once."""
    reason = None if wanted else why_load_async(vllm_config, kv_cache_config)
    if reason is None:
        return wanted
    logger.warning("option load_async is false and is ignored: %s", reason)
    return True


def blocks_per_unit(kv_cache_config: Any, unit_tokens: int) -> float:
    """Returns how many blocks of all groups ``unit_tokens`` tokens fill on average."""
    if len(kv_cache_config.kv_cache_groups) == 1:
        return 1.0
    return sum(
        float(unit_tokens / group.kv_cache_spec.block_size)
        for group in kv_cache_config.kv_cache_groups
        if group.kv_cache_spec.prefix_cacheable
    )


def _open_lookup(config: ConnectorConfig, keyspace: KeySpace) -> LookupClient:
    timeout_ms = config.options.lookup_timeout_ms
    if config.backend.pool_in_worker:
        return SocketLookupClient(
            config.socket_paths(keyspace),
            namespace=keyspace.namespace,
            lookup_timeout_ms=timeout_ms,
        )
    site = SchedulerSite(
        namespace=keyspace.namespace,
        rank_count=config.rank_count,
        instance=config.instance(keyspace),
        lookup_timeout_ms=timeout_ms,
    )
    shared = cast(type[SharedBackend], config.backend)
    return shared.open_lookup(config.backend_options, site)


def _open_epoch(config: ConnectorConfig) -> EpochSource | None:
    """Opens the epoch that the backend shares between engines, if it does."""
    open_epoch = getattr(config.backend, "open_epoch", None)
    if open_epoch is None:
        return None
    return cast(EpochSource, open_epoch(config.backend_options))


def open_worker_parts(
    config: ConnectorConfig, keyspace: KeySpace, vllm_config: Any
) -> "WorkerParts":
    """Opens the backend's pool in this worker.

    Raises:
        ConfigError: An option cannot work here.
        BackendUnavailable: The backend is not there.
    """
    device = vllm_config.device_config.device
    rank = vllm_config.parallel_config.rank
    on_cpu = device is None or device.type == "cpu"
    device_index = None if on_cpu else torch.accelerator.current_device_index()
    site = WorkerSite(
        rank=rank,
        rank_count=config.rank_count,
        device_type=device.type if device is not None else "cpu",
        device_index=device_index,
        instance=config.instance(keyspace),
        transfer_timeout_ms=config.options.timeout_ms,
        physical_device_index=None if device_index is None else _physical_index(device_index),
    )
    pool = config.backend.open_worker(config.backend_options, site)
    return WorkerParts(config, keyspace, rank, pool, vllm_config=vllm_config)


def _physical_index(device_index: int) -> int:
    """Returns the index on the host of a device that this process sees."""
    from vllm.platforms import current_platform

    try:
        return int(current_platform.visible_device_id_to_physical_device_id(device_index))
    except ValueError:
        # The environment names devices in a way that vLLM does not read, such as by a UUID.
        return device_index


class WorkerParts:
    """What a worker has opened, from its pool to its lookup server.

    Args:
        config: The configuration.
        keyspace: Keys of the namespace.
        rank: Index of this worker.
        pool: The backend's pool, not registered yet.
        vllm_config: vLLM's ``VllmConfig``.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        keyspace: KeySpace,
        rank: int,
        pool: WorkerPool,
        *,
        vllm_config: Any,
    ) -> None:
        self._config = config
        self._keyspace = keyspace
        self._rank = rank
        self._pool = pool
        self._vllm_config = vllm_config
        self._server: LookupServer | None = None
        self._memory = KVMemory((), ())
        self._side: WorkerSide | None = None

    def register(self, kv_caches: Mapping[str, Any], kv_cache_config: Any) -> WorkerSide:
        """Registers KV memory, and begins to answer lookups where the pool is in the worker.

        Raises:
            ConfigError: The KV memory cannot be addressed, or another engine serves the lookups.
        """
        self._memory = memory = kv_memory(kv_caches, kv_cache_config)
        self._pool.register(memory)
        if self._config.backend.pool_in_worker:
            self._server = LookupServer(
                self._pool.contains,
                keyspace=self._keyspace,
                rank=self._rank,
                path=self._config.socket_paths(self._keyspace)[self._rank],
                contains_is_local=getattr(self._config.backend, "contains_is_local", False),
            )
        self._side = WorkerSide(
            self._pool,
            keyspace=self._keyspace,
            rank=self._rank,
            timeout_ms=self._config.options.timeout_ms,
            make_fence=_fence_maker(memory.regions[0].device_type),
            shared_epoch=_open_epoch(self._config),
            tell_evictions=wants_kv_events(self._vllm_config),
            loads_may_arrive=loads_may_arrive(self._vllm_config, kv_cache_config),
        )
        return self._side

    def unregister(self) -> None:
        """Gives KV memory up before vLLM unmaps it. Idempotent.

        Raises:
            BackendStalled: A transfer does not end.
        """
        if self._side is not None and not self._side.is_asleep:
            self._side.fall_asleep()
            cast(MovablePool, self._pool).unregister()

    def restore(self) -> None:
        """Registers KV memory that vLLM has mapped again. Idempotent.

        Raises:
            BackendError: The memory cannot be used.
        """
        if self._side is not None and self._side.is_asleep:
            self._pool.register(self._memory)
            self._side.wake_up()

    def close(self, timeout_s: float) -> None:
        """Ends lookups first, so that nobody asks a pool that is going."""
        if self._server is not None:
            self._server.close()
        self._pool.close(timeout_s)


def _fence_maker(device_type: str) -> Callable[[], Callable[[], None]] | None:
    """Returns what makes fences on a device; None on a CPU, where work is done when submitted."""
    if device_type == "cpu":
        return None

    def make_fence() -> Callable[[], None]:
        event = torch.Event(device_type)
        event.record()
        return event.synchronize

    return make_fence

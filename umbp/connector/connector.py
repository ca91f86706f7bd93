# SPDX-License-Identifier: Apache-2.0
"""``UMBPStoreConnector``: vLLM's connector interface, translated to the two sides.

vLLM makes one object of this class in the scheduler and one in every worker. Each has exactly one
side; a hook of the other side is never called on it.
"""

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from umbp.backends.registry import find_backend
from umbp.connector.config import ConnectorConfig, wants_kv_events
from umbp.connector.groups import GroupRules
from umbp.connector.kv_events import KVEvents, event_groups
from umbp.connector.metadata import StepMetadata, WorkerMetadata
from umbp.connector.namespace import digest, manifest
from umbp.connector.plugin import register_class
from umbp.connector.prom import UMBPPromMetrics
from umbp.connector.reports import SchedulerReports, WorkerReports
from umbp.connector.scheduler import SchedulerSide
from umbp.connector.setup import (
    WorkerParts,
    open_scheduler_side,
    open_worker_parts,
    write_manifest,
)
from umbp.connector.stats import UMBPStats
from umbp.connector.support import (
    check_supported,
    refuse_random_hashes,
    refuse_sleep_mode,
    sparse_groups,
    warn_of_policy,
)
from umbp.connector.worker import WorkerSide
from umbp.errors import UsageError
from umbp.keys import KeySpace
from umbp.trace.spans import SpanLog, SpannedCore

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
"""How long a worker's shutdown may wait for transfers that are running."""

_SPANS_TIMEOUT_S = 2.0
"""How long shutdown may wait for spans to leave."""

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM 0.31 does not tell sources of hits apart.
    CacheHitSource = None


class UMBPStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Offloads KV blocks to a backend's host memory and restores them.

    Args:
        vllm_config: vLLM's configuration.
        role: Which side this object is.
        kv_cache_config: KV cache groups and blocks.

    Raises:
        ConfigError: The configuration cannot work; the message says what to do.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config, self.manifest = self._configure(vllm_config, kv_cache_config)
        keyspace = KeySpace(digest(self.manifest))
        self._backend_name = config.options.backend
        self._hit_source = config.hit_source
        # Read by vLLM's base class when it counts where the tokens of a prompt came from.
        self._cache_hit_source = CacheHitSource(self._hit_source) if CacheHitSource else None
        self._reports: SchedulerReports | WorkerReports | None = None
        self._kv_events: KVEvents | None = None
        self._spans: SpanLog | None = None
        self._scheduler_side: SchedulerSide | None = None
        self._worker_parts: WorkerParts | None = None
        self._worker_side: WorkerSide | None = None
        self._sparse_groups = sparse_groups(kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            warn_of_policy(vllm_config)
            write_manifest(config, keyspace, self.manifest)
            self._scheduler_side = self._open_scheduler_side(config, keyspace)
            core = self._scheduler_side.core
            self._spans = core.spans if isinstance(core, SpannedCore) else None
            logger.info(
                "umbp offloads to %r, namespace %s",
                config.options.backend,
                keyspace.namespace.hex(),
            )
        else:
            self._worker_parts = self._open_worker_parts(config, keyspace)

    _find_backend = staticmethod(find_backend)

    def _configure(
        self, vllm_config: Any, kv_cache_config: Any
    ) -> tuple[ConnectorConfig, dict[str, Any]]:
        """Checks the configuration; returns umbp's own part of it, and the namespace's manifest."""
        check_supported(vllm_config, kv_cache_config)
        config = ConnectorConfig.from_vllm(vllm_config, self._find_backend)
        refuse_sleep_mode(vllm_config, config.options.backend, config.backend)
        refuse_random_hashes(vllm_config, is_shared=not config.backend.pool_in_worker)
        return config, manifest(
            vllm_config, kv_cache_config, key_namespace=config.options.key_namespace
        )

    def _open_scheduler_side(self, config: ConnectorConfig, keyspace: KeySpace) -> SchedulerSide:
        strict = os.environ.get("UMBP_STRICT", "") == "1"
        return open_scheduler_side(
            config, keyspace, self._vllm_config, self._kv_cache_config, strict=strict
        )

    def _open_worker_parts(self, config: ConnectorConfig, keyspace: KeySpace) -> WorkerParts:
        return open_worker_parts(config, keyspace, self._vllm_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True: a backend that cannot follow is refused when the engine starts, by its name."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that does not happen is a miss later, never a wrong answer."""
        return False

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler's side, for tools that run in the engine's process."""
        if self._scheduler_side is None:
            raise UsageError("this connector object is a worker's; it has no scheduler side")
        return self._scheduler_side

    @property
    def worker_side(self) -> WorkerSide:
        """The worker's side, once KV caches are registered."""
        if self._worker_side is None:
            raise UsageError("KV caches are not registered with this connector object")
        return self._worker_side

    def counters(self) -> dict[str, int]:
        """Returns everything that the scheduler's side has counted, by name."""
        return self.scheduler_side.counters()

    # ------------------------------------------------------------ scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Takes the manager whose rules decide hits, and the pool through which blocks are pinned.

        Raises:
            ConfigError: The manager treats groups in a way that umbp cannot follow.
        """
        super().bind_kv_cache_manager(kv_cache_manager)
        rules = GroupRules(kv_cache_manager, self._sparse_groups)
        self.scheduler_side.bind(rules, kv_cache_manager.block_pool)
        if wants_kv_events(self._vllm_config):
            self._kv_events = KVEvents(self.scheduler_side.core, event_groups(kv_cache_manager))
        self._reports = SchedulerReports(
            self.scheduler_side, self._backend_name, self._hit_source, self._kv_events
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Says how many tokens beyond the engine's own can be loaded; None: ask again."""
        return self.scheduler_side.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Takes the blocks that a request was given."""
        # Their ids matter to a load only, and vLLM makes the lists anew for each who asks.
        block_ids = blocks.get_block_ids() if num_external_tokens else ()
        self.scheduler_side.admitted(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Plans the step's stores and hands all new transfers to the workers."""
        metadata = self.scheduler_side.step_metadata(scheduler_output)
        metadata.is_idle = not scheduler_output.total_num_scheduled_tokens
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes the workers' answers."""
        metadata = connector_output.kv_connector_worker_meta
        if not isinstance(metadata, WorkerMetadata):
            return
        if self._spans is not None:
            self._spans.note_answers(metadata.answers)
        if self._kv_events is None:
            self.scheduler_side.take_worker_answers(metadata)
            return
        leases = self._kv_events.leases_of(metadata)
        self.scheduler_side.take_worker_answers(metadata)
        self._kv_events.follow(metadata, leases)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request of a model with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Ends a request; never asks to keep its blocks, since stores pin their own."""
        self.scheduler_side.finished(request, block_ids)
        return False, None

    def register_finished_partial_tail(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Takes boundaries that a request reached as it ended; its blocks are pinned, not kept."""
        self.scheduler_side.finished_boundaries(request, block_ids, partial_tail_offloads)
        return False

    def has_pending_push_work(self) -> bool:
        """True exactly while a transfer is open, so that its answer is fetched."""
        return self.scheduler_side.has_open_transfers()

    def has_pending_block_frees(self) -> bool:
        """True while waiting for a store frees blocks that preemption would have to."""
        return self.scheduler_side.may_free_blocks_soon()

    def take_events(self) -> Iterable[Any]:
        """Returns KV events of what is stored and what is gone, where vLLM publishes any."""
        return self._kv_events.take() if self._kv_events is not None else ()

    def reset_cache(self) -> bool:
        """Makes everything stored so far unfindable."""
        return self.scheduler_side.reset()

    # ------------------------------------------------------------ worker's side

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Registers KV memory with the backend and begins to answer lookups."""
        if self._worker_parts is None:
            raise UsageError("KV caches are registered with a worker's connector object only")
        self._worker_side = self._worker_parts.register(kv_caches, self._kv_cache_config)
        self._reports = WorkerReports(self._worker_side, self._backend_name, self._hit_source)

    def unregister_kv_caches(self) -> None:
        """Gives KV memory up before vLLM puts the engine to sleep."""
        if self._worker_parts is not None:
            self._worker_parts.unregister()

    def restore_kv_caches(self) -> None:
        """Registers KV memory again after vLLM has woken the engine."""
        if self._worker_parts is not None:
            self._worker_parts.restore()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Takes what the scheduler's side wants of this step."""
        super().bind_connector_metadata(connector_metadata)
        self.worker_side.take_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts this step's loads; waits for synchronous ones only."""
        self.worker_side.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: synchronous loads have ended, asynchronous ones are not read yet."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is stored by layer: an object is published whole."""

    def wait_for_save(self) -> None:
        """Starts this step's stores; their source blocks are pinned, so nothing is waited for."""
        self.worker_side.start_stores()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Reports asynchronous loads that have ended, each exactly once."""
        received, failed = self.worker_side.poll()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Reports the destinations of synchronous loads that failed in this step."""
        return self.worker_side.take_error_blocks()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Hands the answers of this rank to the scheduler's side."""
        return self.worker_side.take_answers()

    # ------------------------------------------------------------ both

    def get_kv_connector_stats(self) -> UMBPStats | None:
        """Reports what has happened since the last report, when one is due."""
        return self._reports.take() if self._reports is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> UMBPStats:
        """Makes a report of its data again, in vLLM's frontend."""
        return UMBPStats(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> UMBPPromMetrics:
        """Registers the metrics with vLLM's endpoint."""
        register_class(cls)
        return UMBPPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Ends transfers and lookups and gives memory back, in bounded time."""
        if self._scheduler_side is not None:
            self._scheduler_side.close()
        if self._spans is not None:
            self._spans.close(_SPANS_TIMEOUT_S)
        if self._worker_parts is not None:
            self._worker_parts.close(_CLOSE_TIMEOUT_S)

# SPDX-License-Identifier: Apache-2.0
"""The real connector, with simulated time, pools and lookups. vLLM loads it by this module's name.

Everything else is what it is in production: checks, options, namespace, core, both sides.
"""

import functools
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from umbp.backends.base import LookupClient
from umbp.backends.registry import find_backend
from umbp.connector.config import ConnectorConfig
from umbp.connector.connector import UMBPStoreConnector
from umbp.connector.scheduler import SchedulerSide
from umbp.connector.setup import WorkerParts, open_scheduler_side
from umbp.connector.support import loads_may_arrive
from umbp.connector.worker import WorkerSide
from umbp.keys import KeySpace
from umbp.sim.lookup import SimLookupClient
from umbp.sim.site import SimSite, current_site


class SimStoreConnector(UMBPStoreConnector):
    """``UMBPStoreConnector`` in a simulated engine; strict, so that every refused event raises."""

    # Looking through what is installed takes longer than a whole course.
    _find_backend = staticmethod(functools.cache(find_backend))

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._site = current_site()
        super().__init__(vllm_config, role, kv_cache_config)

    def _configure(
        self, vllm_config: Any, kv_cache_config: Any
    ) -> tuple[ConnectorConfig, dict[str, Any]]:
        # Once for a model: its engines come by the thousand.
        known = self._site.world.model.notes
        if "configured" not in known:
            known["configured"] = super()._configure(vllm_config, kv_cache_config)
        configured: tuple[ConnectorConfig, dict[str, Any]] = known["configured"]
        return configured

    def _open_scheduler_side(self, config: ConnectorConfig, keyspace: KeySpace) -> SchedulerSide:
        return open_scheduler_side(
            config,
            keyspace,
            self._vllm_config,
            self._kv_cache_config,
            strict=True,
            open_lookup=functools.partial(_open_lookup, self._site),
            clock=self._site.world.clock.now,
            make_core=self._site.world.make_core,
        )

    def _open_worker_parts(self, config: ConnectorConfig, keyspace: KeySpace) -> WorkerParts:
        return _SimParts(config, keyspace, self._vllm_config, self._site)


def _open_lookup(site: SimSite, config: ConnectorConfig, keyspace: KeySpace) -> LookupClient:
    return SimLookupClient(
        pools=site.pools,
        stores=site.world.stores,
        keyspace=keyspace,
        clock=site.world.clock,
        faults=site.world.faults,
        timeout_s=config.options.lookup_timeout_ms / 1000,
    )


class _SimParts(WorkerParts):
    """A worker's parts on a simulated pool: no memory to register, no lookups to serve."""

    def __init__(
        self, config: ConnectorConfig, keyspace: KeySpace, vllm_config: Any, site: SimSite
    ) -> None:
        rank = vllm_config.parallel_config.rank
        super().__init__(config, keyspace, rank, site.pools[rank], vllm_config=vllm_config)
        self._clock = site.world.clock

    def register(self, kv_caches: Mapping[str, Any], kv_cache_config: Any) -> WorkerSide:
        return WorkerSide(
            self._pool,
            keyspace=self._keyspace,
            rank=self._rank,
            timeout_ms=self._config.options.timeout_ms,
            loads_may_arrive=loads_may_arrive(self._vllm_config, kv_cache_config),
            clock=self._clock.now,
            sleep=self._clock.rest,
        )

# SPDX-License-Identifier: Apache-2.0
"""The connectors that the installed vLLM brings along.

Their scheduler's sides are real; their workers are played by what answers at once.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from _plane_engine import Connector, PlaneEngine, Shape, kv_cache_config_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_HOST_BLOCKS = 4
"""Blocks in host memory for each block of KV memory, so that nothing is evicted."""
_CHUNK_BYTES = 4096
"""What vLLM's ``OffloadingConnector`` rounds a block up to."""


class Played:
    """A connector whose workers are played.

    Attributes:
        ranks: How many workers there are.
    """

    name: str
    module: str
    type_name: str
    finds_any = False

    def __init__(self) -> None:
        self.ranks = 1

    def options(self, shape: Shape) -> dict[str, Any]:
        """See ``Connector``."""
        return {"cpu_bytes_to_use": self._host_bytes(shape)}

    def _host_bytes(self, shape: Shape) -> int:
        # Nothing of it is allocated: only the scheduler's bookkeeping knows of it.
        kv_bytes = kv_cache_config_of(shape).kv_cache_tensors[0].size
        return _HOST_BLOCKS * shape.ranks * kv_bytes

    def open(self, engine: PlaneEngine) -> None:
        """See ``Connector``."""
        self.ranks = engine.shape.ranks

    def expect(self, *, found: bool) -> None:
        """See ``Connector``."""

    def close(self) -> None:
        """See ``Connector``."""


class SimpleCpu(Played):
    """vLLM's ``SimpleCPUOffloadConnector``."""

    name = "SimpleCPUOffload"
    module = f"{_V1}.simple_cpu_offload_connector"
    type_name = "SimpleCPUOffloadConnector"

    def options(self, shape: Shape) -> dict[str, Any]:
        """See ``Connector``."""
        return {**super().options(shape), "lazy_offload": False}

    def execute(self, metadata: Any) -> tuple[list[Any], set[str]]:
        """See ``Connector``."""
        answer = importlib.import_module("vllm.v1.simple_kv_offload.metadata")
        event, answers = metadata.store_event, []
        if event >= 0:
            answers = [answer.SimpleCPUOffloadWorkerMetadata({event: 1}) for _ in range(self.ranks)]
        return answers, set(metadata.load_event_to_reqs.get(metadata.load_event, ()))


class Offloading(Played):
    """vLLM's ``OffloadingConnector``, on a CPU's memory."""

    name = "Offloading"
    module = f"{_V1}.offloading_connector"
    type_name = "OffloadingConnector"

    def _host_bytes(self, shape: Shape) -> int:
        return _HOST_BLOCKS * shape.ranks * shape.block_count * _CHUNK_BYTES * shape.layers

    def execute(self, metadata: Any) -> tuple[list[Any], set[str]]:
        """See ``Connector``."""
        common = importlib.import_module(f"{_V1}.offloading.common")
        jobs = [*metadata.load_jobs, *metadata.store_jobs]
        answers = [
            common.OffloadingWorkerMetadata(dict.fromkeys(jobs, 1)) for _ in range(self.ranks)
        ]
        return answers if jobs else [], {job.req_id for job in metadata.load_jobs.values()}


class InTree(Played):
    """vLLM 0.33's own connector to MORI, ``v1/umbp``, with a pool that finds all or nothing."""

    name = "v1/umbp"
    module = f"{_V1}.umbp.connector"
    type_name = "UMBPStoreConnector"
    # It keeps the keys that it has made; a prompt that comes for the first time has none.
    finds_any = True

    def __init__(self) -> None:
        super().__init__()
        self._runtime = _KeyRuntime()

    def options(self, shape: Shape) -> dict[str, Any]:
        """See ``Connector``."""
        runtime = importlib.import_module(f"{_V1}.umbp.runtime")
        builders = runtime.UMBPRuntimeFactory._builders
        builders["embedded"] = lambda _: self._runtime
        return {}

    def open(self, engine: PlaneEngine) -> None:
        """See ``Connector``."""
        super().open(engine)
        connector_type = getattr(importlib.import_module(self.module), self.type_name)
        handshakes = {}
        for rank in range(engine.shape.ranks):
            worker = connector_type(
                engine.rank_config(rank), KVConnectorRole.WORKER, engine.kv_cache_config
            )
            worker.register_kv_caches(engine.kv_caches())
            handshakes[rank] = worker.get_handshake_metadata()
        engine.connector.set_xfer_handshake_metadata(handshakes)

    def execute(self, metadata: Any) -> tuple[list[Any], set[str]]:
        """See ``Connector``."""
        data = importlib.import_module(f"{_V1}.umbp.data")
        event, answers = metadata.store_event, []
        if event >= 0:
            answers = [
                data.UMBPConnectorWorkerMetadata(store_events={event: data.StoreEventResult(1)})
                for _ in range(self.ranks)
            ]
        return answers, set(metadata.load_requests)

    def expect(self, *, found: bool) -> None:
        """See ``Connector``."""
        self._runtime.finds = found


class _KeyRuntime:
    """MORI's place in ``v1/umbp``: finds all keys or none.

    Attributes:
        finds: Whether it finds all.
    """

    def __init__(self) -> None:
        self.finds = False

    def create_scheduler_handle(self, *_: Any) -> "_KeyRuntime":
        """Is its own handle."""
        return self

    def create_worker_handle(self, *_: Any) -> "_KeyRuntime":
        """Is its own handle."""
        return self

    def lookup(self, keys: Sequence[str]) -> list[bool]:
        """Answers at once."""
        return [self.finds] * len(keys)

    def register_buffers(self, kv_caches: Any) -> None:
        """Does nothing."""

    def take_evicted_keys(self) -> tuple[str, ...]:
        """Evicts nothing."""
        return ()

    def close(self) -> None:
        """Does nothing."""


PEERS: tuple[Callable[[], Connector], ...] = (SimpleCpu, Offloading, InTree)


def usable(make: Callable[[], Connector]) -> str:
    """Says why a connector cannot be measured here; an empty string if it can."""
    peer = make()
    try:
        importlib.import_module(peer.module)
    except ImportError as error:
        return f"{peer.name}: not in this vLLM ({error})"
    return ""

# SPDX-License-Identifier: Apache-2.0
"""The connectors that are measured: umbp, and those that the installed vLLM brings along.

umbp runs with its ``memory`` backend, real pools and real sockets. Of the others only the
scheduler's side is real: their workers are played by what answers at once.
"""

import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from _plane_engine import Connector, PlaneEngine, Shape, kv_cache_config_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from umbp.connector import UMBPStoreConnector

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_PATIENCE_S = 60.0
_POOL_BYTES = 64 << 20
_HOST_BLOCKS = 4
"""Blocks in host memory for each block of KV memory, so that nothing is evicted."""
_CHUNK_BYTES = 4096
"""What vLLM's ``OffloadingConnector`` rounds a block up to."""


class Umbp:
    """umbp itself.

    Args:
        options: Options of its own.
        with_workers: Whether it has any; without, no lookup is ever answered.
    """

    name = "umbp"
    module = "umbp.connector"
    type_name = "UMBPStoreConnector"
    finds_any = False
    _serial = 0

    def __init__(self, *, with_workers: bool = True, **options: Any) -> None:
        self._with_workers = with_workers
        self._options = options
        self.workers: list[Any] = []

    def options(self, shape: Shape) -> dict[str, Any]:
        """See ``Connector``."""
        Umbp._serial += 1
        return {
            "backend": "memory",
            "total_capacity_bytes": _POOL_BYTES * shape.ranks,
            "lookup_instance": f"bench-{os.getpid()}-{Umbp._serial}",
            "lookup_timeout_ms": int(_PATIENCE_S * 1000),
            **self._options,
        }

    def open(self, engine: PlaneEngine) -> None:
        """See ``Connector``."""
        for rank in range(engine.shape.ranks if self._with_workers else 0):
            worker = UMBPStoreConnector(
                engine.rank_config(rank), KVConnectorRole.WORKER, engine.kv_cache_config
            )
            worker.register_kv_caches(engine.kv_caches())
            self.workers.append(worker)

    def execute(self, metadata: Any) -> tuple[list[Any], set[str]]:
        """See ``Connector``."""
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            worker.wait_for_save()
            worker.clear_connector_metadata()
        jobs = len(metadata.loads) + len(metadata.stores)
        answers, received = [], []
        for worker in self.workers:
            answer, ended = self.wait_for(worker, jobs)
            received.append(ended)
            if answer is not None:
                answers.append(answer)
        return answers, set.intersection(*received) if received else set()

    def wait_for(self, worker: Any, jobs: int) -> tuple[Any, set[str]]:
        """Waits until a rank has answered for every job."""
        answer, ended = None, set()
        give_up_s = time.monotonic() + _PATIENCE_S
        while True:
            ended |= worker.get_transfer_results(set()).finished_recving or set()
            more = worker.build_connector_worker_meta()
            if more is not None:
                answer = more if answer is None else answer.aggregate(more)
            if jobs <= (0 if answer is None else len(answer.answers)):
                return answer, ended
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"a transfer has not ended within {_PATIENCE_S:g} s")
            time.sleep(0.0001)

    def expect(self, *, found: bool) -> None:
        """See ``Connector``."""

    def close(self) -> None:
        """See ``Connector``."""
        for worker in self.workers:
            worker.shutdown()
        self.workers.clear()


class _Played:
    """A connector whose workers are played."""

    name: str
    module: str
    type_name: str
    finds_any = False

    def __init__(self) -> None:
        self._ranks = 1

    def options(self, shape: Shape) -> dict[str, Any]:
        """See ``Connector``."""
        return {"cpu_bytes_to_use": self._host_bytes(shape)}

    def _host_bytes(self, shape: Shape) -> int:
        # Nothing of it is allocated: only the scheduler's bookkeeping knows of it.
        kv_bytes = kv_cache_config_of(shape).kv_cache_tensors[0].size
        return _HOST_BLOCKS * shape.ranks * kv_bytes

    def open(self, engine: PlaneEngine) -> None:
        """See ``Connector``."""
        self._ranks = engine.shape.ranks

    def expect(self, *, found: bool) -> None:
        """See ``Connector``."""

    def close(self) -> None:
        """See ``Connector``."""


class SimpleCpu(_Played):
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
            answers = [
                answer.SimpleCPUOffloadWorkerMetadata({event: 1}) for _ in range(self._ranks)
            ]
        return answers, set(metadata.load_event_to_reqs.get(metadata.load_event, ()))


class Offloading(_Played):
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
            common.OffloadingWorkerMetadata(dict.fromkeys(jobs, 1)) for _ in range(self._ranks)
        ]
        return answers if jobs else [], {job.req_id for job in metadata.load_jobs.values()}


class InTree(_Played):
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
                for _ in range(self._ranks)
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

# SPDX-License-Identifier: Apache-2.0
"""umbp: with workers that are played, as those of the others are, and twice with real ones."""

import os
import time
from typing import Any, ClassVar

import numpy as np
from _plane_engine import PlaneEngine, Shape
from _plane_peers import Played
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from umbp.backends.base import LookupAnswer, LookupQuestion
from umbp.backends.memory import MemoryBackend
from umbp.connector import UMBPStoreConnector
from umbp.connector.metadata import RankAnswer, WorkerMetadata
from umbp.connector.setup import open_scheduler_side

_PATIENCE_S = 60.0
_POOL_BYTES = 16 << 20


class AtOnce:
    """A ``LookupClient`` that finds all or nothing, at once.

    Attributes:
        finds: Whether it finds all.
    """

    def __init__(self) -> None:
        self.finds = False
        self._answers: list[LookupAnswer] = []

    def ask(self, question: LookupQuestion) -> None:
        """See ``LookupClient``."""
        present = tuple(
            np.full(len(part.hashes) // part.hash_bytes, self.finds) for part in question.parts
        )
        self._answers.append(LookupAnswer(question.question_id, present))

    def answers(self, wait_s: float = 0.0) -> list[LookupAnswer]:
        """See ``LookupClient``."""
        answers, self._answers = self._answers, []
        return answers

    def forget(self, question_id: int) -> None:
        """See ``LookupClient``."""
        self._answers = [one for one in self._answers if one.question_id != question_id]

    def close(self) -> None:
        """See ``LookupClient``."""


class PlayedStoreConnector(UMBPStoreConnector):
    """``UMBPStoreConnector`` that asks ``lookups`` in place of its workers."""

    def _open_scheduler_side(self, config: Any, keyspace: Any) -> Any:
        self.lookups = AtOnce()
        return open_scheduler_side(
            config,
            keyspace,
            self._vllm_config,
            self._kv_cache_config,
            strict=True,
            open_lookup=lambda *_: self.lookups,
        )


class Umbp(Played):
    """umbp's scheduler's side."""

    name = "umbp"
    module = "_plane_umbp"
    type_name = "PlayedStoreConnector"
    finds_any = True

    def options(self, shape: Shape) -> dict[str, Any]:
        """See ``Connector``."""
        return {"backend": "memory"}

    def open(self, engine: PlaneEngine) -> None:
        """See ``Connector``."""
        super().open(engine)
        self._lookups = engine.connector.lookups

    def execute(self, metadata: Any) -> tuple[list[Any], set[str]]:
        """See ``Connector``."""
        jobs = [plan.job_id for plan in (*metadata.loads, *metadata.stores)]
        answers = [
            WorkerMetadata([RankAnswer(job_id, rank, True) for job_id in jobs])
            for rank in range(self.ranks)
        ]
        return answers if jobs else [], {plan.request_id for plan in metadata.loads}

    def expect(self, *, found: bool) -> None:
        """See ``Connector``."""
        self._lookups.finds = found


class MemoryElsewhere(MemoryBackend):
    """The ``memory`` backend, asked as one in another process is."""

    contains_is_local: ClassVar[bool] = False


class SocketStoreConnector(UMBPStoreConnector):
    """``UMBPStoreConnector`` that asks workers of its own process over their sockets, too."""

    _find_backend = staticmethod(lambda _: MemoryElsewhere)


class UmbpInProcess:
    """umbp with its ``memory`` backend: real workers and pools, in the scheduler's process.

    Args:
        options: Options of its own.
        with_workers: Whether it has any; without, no lookup is ever answered.
    """

    name = "umbp, in process"
    module = "umbp.connector"
    type_name = "UMBPStoreConnector"
    worker_type: type[UMBPStoreConnector] = UMBPStoreConnector
    finds_any = False
    _serial = 0

    def __init__(self, *, with_workers: bool = True, **options: Any) -> None:
        self._with_workers = with_workers
        self._options = options
        self.workers: list[Any] = []

    def options(self, shape: Shape) -> dict[str, Any]:
        """See ``Connector``."""
        UmbpInProcess._serial += 1
        return {
            "backend": "memory",
            "total_capacity_bytes": _POOL_BYTES * shape.ranks,
            "lookup_instance": f"bench-{os.getpid()}-{UmbpInProcess._serial}",
            "lookup_timeout_ms": int(_PATIENCE_S * 1000),
            **self._options,
        }

    def open(self, engine: PlaneEngine) -> None:
        """See ``Connector``."""
        for rank in range(engine.shape.ranks if self._with_workers else 0):
            worker = self.worker_type(
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


class UmbpOnSockets(UmbpInProcess):
    """The same with lookups over sockets, as with workers in processes of their own."""

    name = "umbp, sockets"
    module = "_plane_umbp"
    type_name = "SocketStoreConnector"
    worker_type = SocketStoreConnector

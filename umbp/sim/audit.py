# SPDX-License-Identifier: Apache-2.0
"""What must hold in every step, beside the content of KV memory."""

from collections import Counter
from typing import Any, Final

from umbp.connector.metadata import RankAnswer, WorkerMetadata
from umbp.fsm import LeaseKind, RequestContext, RequestState, TransferLease
from umbp.sim.clock import VirtualClock
from umbp.sim.connector import SimStoreConnector
from umbp.sim.memory import OracleError
from umbp.sim.workers import Batch

_GAUGES: Final = frozenset({"requests_live", "leases_open", "blocks_pinned"})


class Audit:
    """Watches one engine.

    Args:
        scheduler: vLLM's scheduler.
        connector: The scheduler's connector object.
        clock: The time.
    """

    def __init__(self, scheduler: Any, connector: SimStoreConnector, clock: VirtualClock) -> None:
        self._clock = clock
        self._pool = scheduler.kv_cache_manager.block_pool
        self._side = connector.scheduler_side
        self._core = self._side.core
        self._ranks = self._core.limits.rank_count
        self._free_blocks = self._pool.get_num_free_blocks()
        self._counters: dict[str, int] = {}
        # Per rank, loads that vLLM waits for, by request id.
        self._awaited: list[Counter[str]] = [Counter() for _ in range(self._ranks)]
        self._unanswered: dict[int, set[int]] = {}
        # (job id, rank) of transfers that were spoken of before their end, and of loads whether
        # they were said to have ended well.
        self._spoken_of: dict[tuple[int, int], bool] = {}
        self._open_loads: dict[int, TransferLease] = {}
        self._failed: set[RequestContext] = set()
        self._quarantined: dict[bytes, float] = {}

    # ------------------------------------------------------------ moments

    def after_schedule(self, batch: Batch) -> None:
        """Checks pins, and takes note of what the workers are to do."""
        self._check_references()
        metadata = batch.output.kv_connector_metadata
        for plan in (*metadata.loads, *metadata.refused):
            if not plan.synchronous:
                for awaited in self._awaited:
                    awaited[plan.request_id] += 1
        for plan in (*metadata.loads, *metadata.stores, *metadata.refused):
            if plan.job_id in self._unanswered:
                raise OracleError(f"job {plan.job_id} is handed over twice")
            self._unanswered[plan.job_id] = set(range(self._ranks))
        for plan in metadata.loads:
            self._check_load(self._core.leases[plan.job_id])

    def before_update(self, batch: Batch) -> None:
        """Checks what the workers report."""
        for rank, received in enumerate(batch.received):
            for request_id in received:
                self._awaited[rank][request_id] -= 1
                if self._awaited[rank][request_id] < 0:
                    raise OracleError(f"rank {rank} reports the load of {request_id} twice")
        metadata = batch.result.kv_connector_output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            self._take_answers(metadata, batch.output.kv_connector_metadata.epoch)

    def after_update(self, batch: Batch) -> None:
        """Checks counters, and notes which loads have failed."""
        counters = self._side.counters()
        for name, value in self._counters.items():
            if counters[name] < value and name not in _GAUGES:
                raise OracleError(f"counter {name} fell from {value} to {counters[name]}")
        self._counters = counters
        if counters["events_refused"]:
            raise OracleError("the core refused an event")
        for job_id, lease in list(self._open_loads.items()):
            if job_id in self._core.leases:
                continue
            del self._open_loads[job_id]
            context = lease.request
            assert context is not None, "a load belongs to a request"
            going_on = context.state in (RequestState.LOOKUP, RequestState.RUNNING)
            if lease.failed and going_on and context.generation == lease.generation:
                self._failed.add(context)
        self._check_references()

    def after_reset(self) -> None:
        """Takes note that nothing is in quarantine any more."""
        if self._core.counters.epochs_raised != self._counters.get("epochs_raised", 0):
            self._quarantined.clear()

    def at_rest(self) -> None:
        """Checks that nothing is left when all requests have ended.

        Raises:
            OracleError: Something is.
        """
        core = self._core
        left = {
            "blocks in use": self._free_blocks - self._pool.get_num_free_blocks(),
            "leases": len(core.leases),
            "pinned blocks": core.pinned_blocks,
            "requests": len(core.requests),
            "requests that may fill blocks": len(core.filling),
            "synchronous loads": core.sync_loads,
            "unreported loads": sum(awaited.total() for awaited in self._awaited),
            "unanswered jobs": len(self._unanswered),
            "transfers that stalled or arrive": len(self._spoken_of),
        }
        found = {what: count for what, count in left.items() if count}
        if found:
            raise OracleError(f"left at rest: {found}")

    # ------------------------------------------------------------ checks

    def _check_references(self) -> None:
        """Checks that vLLM counts a reference for every pin, and for every load's block."""
        wanted: Counter[int] = Counter()
        loading: set[int] = set()
        for lease in self._core.leases.values():
            for part in lease.parts:
                if lease.kind is LeaseKind.STORE:
                    wanted.update(part.block_ids)
                else:
                    loading.update(part.block_ids)
        for block_id, count in wanted.items():
            held = self._pool.blocks[block_id].ref_cnt
            if held < count and block_id:
                raise OracleError(f"block {block_id} has {count} pins and {held} references")
        for block_id in loading:
            if self._pool.blocks[block_id].ref_cnt < 1:
                raise OracleError(f"block {block_id} is free while a load writes to it")

    def _check_load(self, lease: TransferLease) -> None:
        self._open_loads[lease.job_id] = lease
        context = lease.request
        assert context is not None, "a load belongs to a request"
        if context in self._failed:
            raise OracleError(f"{context.identity} loads again after a load has failed")
        window_s = self._core.limits.quarantine_s
        for part in lease.parts:
            for block_hash in part.block_hashes:
                failed_s = self._quarantined.get(block_hash)
                if failed_s is not None and failed_s < context.answered_s < failed_s + window_s:
                    raise OracleError(f"{context.identity} loads an object in quarantine")

    def _take_answers(self, metadata: WorkerMetadata, known_epoch: int) -> None:
        for answer in metadata.answers:
            ranks = self._unanswered.get(answer.job_id)
            if ranks is None or answer.rank not in ranks:
                raise OracleError(f"rank {answer.rank} answers job {answer.job_id} twice")
            part = answer.job_id, answer.rank
            promised = self._spoken_of.get(part, False)
            self._check_epoch(answer, known_epoch, promised=promised)
            if answer.arriving or answer.stalled:
                if part in self._spoken_of:
                    raise OracleError(f"rank {answer.rank} speaks twice of job {answer.job_id}")
                self._spoken_of[part] = answer.arriving
                continue
            self._spoken_of.pop(part, None)
            if promised and not answer.succeeded:
                raise OracleError(f"rank {answer.rank} takes back the end of job {answer.job_id}")
            ranks.discard(answer.rank)
            if not ranks:
                del self._unanswered[answer.job_id]
            lease = self._core.leases.get(answer.job_id)
            if lease is None or lease.kind is not LeaseKind.LOAD or answer.succeeded:
                continue
            if answer.attempted and lease.epoch == self._core.epoch:
                for block_hash in answer.failed_hashes:
                    self._quarantined[block_hash] = self._clock.now()

    def _check_epoch(self, answer: RankAnswer, known_epoch: int, *, promised: bool) -> None:
        """Checks that no load from before a reset is said to have ended well after it."""
        lease = self._core.leases.get(answer.job_id)
        if lease is None or lease.kind is not LeaseKind.LOAD or not answer.succeeded or promised:
            return
        if lease.epoch < known_epoch:
            raise OracleError(
                f"rank {answer.rank} reports {lease.identity} of epoch {lease.epoch} as "
                f"good, and knows of epoch {known_epoch}"
            )

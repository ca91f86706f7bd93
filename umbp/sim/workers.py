# SPDX-License-Identifier: Apache-2.0
"""The workers of an engine: vLLM's order of hooks, around a forward pass that only checks."""

import pickle
from typing import Any, Final

import attrs
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from umbp.connector.metadata import StepMetadata, TransferPlan, unpack_ids
from umbp.sim.connector import SimStoreConnector
from umbp.sim.memory import OracleError, Work
from umbp.sim.site import SimSite

POISON: Final = 511
"""The token that is sampled from nonsense; no text has it."""


@attrs.define(eq=False)
class Batch:
    """A step under way.

    Attributes:
        number: Its number.
        output: vLLM's ``SchedulerOutput``.
        work: What is computed.
        sampling: Requests that get a token.
        epoch: Age of what it computes.
        oldest_epoch: Nothing older may be read.
        result: What the workers say; None before they have.
        poisoned: Requests that were computed from nonsense, because a load failed.
        received: For each rank, requests whose load was reported as ended.
    """

    number: int
    output: Any
    work: list[Work]
    sampling: frozenset[str]
    epoch: int
    oldest_epoch: int
    result: Any = None
    poisoned: set[str] = attrs.field(factory=set)
    received: list[set[str]] = attrs.field(factory=list)


class Workers:
    """All ranks of one engine.

    Args:
        site: Memory and pools.
    """

    def __init__(self, site: SimSite) -> None:
        model = site.world.model
        self._memories = site.memories
        self.connectors = []
        for config in model.rank_configs:
            connector = SimStoreConnector(config, KVConnectorRole.WORKER, model.kv_cache_config)
            connector.register_kv_caches({})
            self.connectors.append(connector)
        self._serialize = model.options.serialize
        self._aggregator = (
            KVOutputAggregator(model.options.ranks) if model.options.ranks > 1 else None
        )
        # Until which step a request may still be computed from nonsense.
        self._doubtful: dict[str, int | None] = {}

    def execute(self, batch: Batch) -> None:
        """Does a step on every rank."""
        output, metadata = batch.output, batch.output.kv_connector_metadata
        packed = pickle.dumps(metadata) if self._serialize else None
        synchronous = output.has_sync_kv_loads
        copies = [
            (one.src_block_id, one.dst_block_id) for one in output.kv_cache_block_copies or ()
        ]
        for memory, connector in zip(self._memories, self.connectors, strict=True):
            own = metadata if packed is None else pickle.loads(packed)
            connector.handle_preemptions(own)
            memory.prepare(output.new_block_ids_to_zero or (), copies, batch.work)
            connector.bind_connector_metadata(own)
            if synchronous:
                connector.start_load_kv(None)
        risky = _synchronous_blocks(metadata)
        for work in batch.work:
            self._compute(work, batch, risky)
        outputs = [
            self._finish(connector, batch, synchronous=synchronous) for connector in self.connectors
        ]
        results = [self._result(batch, output) for output in outputs]
        batch.result = self._aggregator.aggregate(results) if self._aggregator else results[0]
        failed = batch.result.kv_connector_output.invalid_block_ids
        for work in batch.work:
            if work.request_id in batch.poisoned and not self._excused(work, batch, failed):
                raise OracleError(f"{work.request_id} read a failed load that nobody reported")

    def settle(self, batch: Batch, last_number: int) -> None:
        """Takes note that the scheduler knows of a step.

        Args:
            batch: The step.
            last_number: Number of the last step that was planned before.
        """
        for request_id in batch.poisoned:
            if self._doubtful.get(request_id, 0) is None:
                self._doubtful[request_id] = last_number

    def close(self) -> None:
        """Shuts every rank's connector down."""
        for connector in self.connectors:
            connector.shutdown()

    def _compute(self, work: Work, batch: Batch, risky: frozenset[int]) -> None:
        problems = [memory.check(work) for memory in self._memories]
        problem = next((one for one in problems if one is not None), None)
        poisoned = problem is not None
        if poisoned:
            if not self._excused(work, batch, risky):
                raise OracleError(f"step {batch.number}: {problem}")
            batch.poisoned.add(work.request_id)
            self._doubtful[work.request_id] = None
        for memory in self._memories:
            age = memory.age(work)
            if age is not None and age < batch.oldest_epoch and not poisoned:
                raise OracleError(
                    f"step {batch.number}: {work.request_id} reads KV of epoch {age}, after a "
                    f"reset to epoch {batch.oldest_epoch}"
                )
            age = batch.epoch if age is None else min(age, batch.epoch)
            memory.compute(work, age, poisoned=poisoned)

    def _excused(self, work: Work, batch: Batch, blocks: "frozenset[int] | set[int]") -> bool:
        """Says whether a request may read nonsense: vLLM is about to hear that its load failed."""
        if any(block_id in blocks for table in work.table for block_id in table):
            return True
        until = self._doubtful.get(work.request_id, 0)
        return until is None or batch.number <= until

    @staticmethod
    def _finish(
        connector: SimStoreConnector, batch: Batch, *, synchronous: bool
    ) -> KVConnectorOutput:
        if not synchronous:
            connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(batch.output.finished_req_ids)
        batch.received.append(set(results.finished_recving or ()))
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return output

    @staticmethod
    def _result(batch: Batch, output: KVConnectorOutput) -> ModelRunnerOutput:
        ids = [work.request_id for work in batch.work]
        sampled = []
        for work in batch.work:
            token = POISON if work.request_id in batch.poisoned else work.text.token(work.end)
            sampled.append([token] if work.request_id in batch.sampling else [])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=output,
        )


def _synchronous_blocks(metadata: StepMetadata) -> frozenset[int]:
    """Returns the destinations of this step's synchronous loads."""
    plans: list[TransferPlan] = [*metadata.loads, *metadata.refused]
    return frozenset(
        int(block_id)
        for plan in plans
        if plan.synchronous
        for part in plan.parts
        for block_id in unpack_ids(part.block_ids)
    )

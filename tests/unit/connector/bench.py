# SPDX-License-Identifier: Apache-2.0
"""A scheduler's side on a bench: fakes all around it, and a clock that is set by hand."""

from typing import Any

from umbp.connector.groups import GroupRules
from umbp.connector.metadata import RankAnswer, StepMetadata, WorkerMetadata
from umbp.connector.scheduler import SchedulerSide
from umbp.fsm import Core, CoreLimits

from .fakes import (
    UNIT_TOKENS,
    FakeLookups,
    FakePool,
    FakeRequest,
    block_hash,
    one_group_rules,
    step_output,
)


class Bench:
    """A scheduler's side with all that is around it, and a clock that is set by hand."""

    def __init__(
        self,
        *,
        ranks: int = 1,
        blocks: int = 64,
        rules: GroupRules | None = None,
        **options: Any,
    ) -> None:
        self.now_s = 0.0
        self.pool = FakePool(blocks)
        self.lookups = FakeLookups()
        limits = {
            name: options.pop(name)
            for name in ("quarantine_s", "pinned_blocks_max", "transfer_timeout_s")
            if name in options
        }
        shared = options.get("shared_epoch")
        self.core = Core(
            CoreLimits(unit_tokens=UNIT_TOKENS, rank_count=ranks, **limits),
            shared.current() if shared is not None else 0,
        )
        self.side = SchedulerSide(
            self.core, self.lookups, strict=True, clock=lambda: self.now_s, **options
        )
        self.side.bind(rules or one_group_rules(), self.pool)
        self.ranks = ranks

    def store_hashes(self, count: int) -> None:
        self.lookups.stored |= {block_hash(index) for index in range(count)}

    def admit(self, request: FakeRequest, local_tokens: int = 0) -> list[int]:
        """Lets vLLM ask and allocate; returns the request's blocks."""
        external, _ = self.side.matched_tokens(request, local_tokens)
        assert external is not None
        table = self.pool.take(-(-request.num_tokens // UNIT_TOKENS))
        self.side.admitted(request, (table,), external)
        if not external:
            # vLLM writes it down when it has admitted the request, and before it builds metadata.
            request.num_computed_tokens = local_tokens
        return table

    def run_prompt(self, request: FakeRequest, table: list[int]) -> StepMetadata:
        """Schedules the rest of a prompt in one step."""
        left = request.num_prompt_tokens - request.num_computed_tokens
        output = step_output({request.request_id: left}, {request.request_id: table})
        metadata = self.side.step_metadata(output)
        request.num_computed_tokens = request.num_prompt_tokens
        return metadata

    def answer(self, job_id: int, *, succeeded: bool = True, **fields: Any) -> None:
        """Lets every rank answer."""
        for rank in range(self.ranks):
            answer = RankAnswer(job_id, rank, succeeded, **fields)
            self.side.take_worker_answers(WorkerMetadata([answer]))

    def idle_step(self, **fields: Any) -> StepMetadata:
        return self.side.step_metadata(step_output({}, **fields))

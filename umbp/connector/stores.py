# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request a step makes storable, as events for the core."""

from collections.abc import Sequence
from typing import Any

from umbp.connector.groups import GroupRules
from umbp.connector.lazy import LazyStores
from umbp.fsm import BlocksDeferred, BlocksFilled, BoundaryOffered, Core, RequestContext


class StorePlanner:
    """Reads vLLM's requests and block tables, and asks the core what of them to store.

    Args:
        core: The lifecycle.
        rules: Cache-group rules.
        lazy: Takes what is stored only when KV memory is about to reuse it; None: nothing is.
    """

    def __init__(self, core: Core, rules: GroupRules, lazy: LazyStores | None = None) -> None:
        self._core = core
        self._rules = rules
        self._lazy = lazy

    def filled(
        self, context: RequestContext, scheduled: int, block_state: Any
    ) -> BlocksFilled | BlocksDeferred | None:
        """Plans the blocks that a step fills.

        Args:
            context: A context out of ``Core.filling``.
            scheduled: Tokens of it that the step computes.
            block_state: vLLM's ``KVConnectorBlockState``.
        """
        request = context.source
        # Positions past the prompt may hold draft tokens that are thrown away again.
        computed = min(request.num_computed_tokens + scheduled, request.num_prompt_tokens)
        span = self._span(context, max(computed, _confirmed_tokens(request)))
        if span is None:
            return None
        # Only now: the table is resolved on demand, and most steps fill no block.
        return self._filled(context, span, block_state.get_block_ids(context.request_id))

    def filled_at_end(
        self, context: RequestContext, table: Sequence[Sequence[int]]
    ) -> BlocksFilled | BlocksDeferred | None:
        """Plans the blocks that a request has filled when it ends.

        Args:
            context: A context out of ``Core.filling``.
            table: Its block ids, for each group.
        """
        span = self._span(context, _confirmed_tokens(context.source))
        return None if span is None else self._filled(context, span, table)

    def boundaries(
        self,
        context: RequestContext,
        offers: Sequence[tuple[int, int, int]],
        table: Sequence[Sequence[int]] | None,
        scheduled: int,
    ) -> BoundaryOffered | None:
        """Plans the boundaries that vLLM hands off.

        Args:
            context: The request.
            offers: (group, block id, boundary in tokens).
            table: Its block ids, for each group; None: vLLM has none any more.
            scheduled: Tokens of it that the step computes.
        """
        # State is where the step begins, copied before it, or where it ends, or at a checkpoint
        # between. vLLM 0.31 offers a boundary once more when the state has gone on.
        begin = context.source.num_computed_tokens
        computed = begin + scheduled
        end = min(computed, context.store_end_tokens)
        wanted = [offer for offer in offers if begin <= offer[2] <= end]
        if table is None or not wanted:
            return None
        hashes = context.source.block_hashes
        parts = self._rules.boundary_parts(hashes, table, wanted, computed)
        count = sum(len(part.block_ids) for part in parts)
        if self._lazy is not None and self._core.may_defer():
            if self._core.decline_boundary(context, 0) != "declined_boundary":
                self._lazy.note(parts)
            return None
        if not count or not self._core.may_store_boundary(context, count):
            return None
        end = max(boundary for _, _, boundary in wanted)
        return BoundaryOffered(context.request_id, end, end, parts)

    def _span(self, context: RequestContext, computed: int) -> tuple[int, int] | None:
        # A block is storable once it has a hash; hashes of decoded blocks come a step later.
        hashed = len(context.source.block_hashes) * self._core.limits.unit_tokens
        computed = min(computed, hashed)
        if self._lazy is not None and self._core.may_defer():
            # Nothing is pinned now, so that no limit applies.
            return self._core.filled_span(context, computed)
        return self._core.storable(context, computed)

    def _filled(
        self,
        context: RequestContext,
        span: tuple[int, int],
        table: Sequence[Sequence[int]] | None,
    ) -> BlocksFilled | BlocksDeferred | None:
        if table is None:
            return None
        parts = self._rules.filled_parts(context.source.block_hashes, table, *span)
        if not parts:
            return None
        if self._lazy is not None and self._core.may_defer():
            self._lazy.note(parts)
            return BlocksDeferred(context.request_id, *span)
        return BlocksFilled(context.request_id, *span, parts)


def _confirmed_tokens(request: Any) -> int:
    """Tokens whose KV is final: not the ones that asynchronous scheduling only expects."""
    return int(request.num_computed_tokens - request.num_output_placeholders)

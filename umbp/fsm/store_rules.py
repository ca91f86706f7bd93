# SPDX-License-Identifier: Apache-2.0
"""What may be stored now, and why something may not. Nothing here moves a machine."""

import math
from typing import Final

from umbp.fsm.counters import CoreCounters, Decline
from umbp.fsm.lease import TransferLease
from umbp.fsm.limits import CoreLimits
from umbp.fsm.request import RequestContext, RequestState

_RUNNING: Final = RequestState.RUNNING


class StoreRules:
    """The part of a core that answers questions about stores.

    Attributes: see ``Core``, which writes them.
    """

    limits: CoreLimits
    epoch: int
    leases: dict[int, TransferLease]
    counters: CoreCounters
    pinned_blocks: int
    sync_loads: int
    local_cache_tainted: bool

    # ------------------------------------------------------------ of what a step computes

    def storable(self, request: RequestContext, computed_tokens: int) -> tuple[int, int] | None:
        """Says which tokens of a request are to be stored now.

        Args:
            request: A context out of ``filling``.
            computed_tokens: Tokens whose KV is in its blocks once the step being planned has run.

        Returns:
            ``(begin, end)``, multiples of the unit, for ``BlocksFilled``; None for nothing now.
        """
        span = self.filled_span(request, computed_tokens)
        if span is None:
            return None
        decline = self.decline(span)
        if decline == "declined_pin_limit":
            # As much of it as may be pinned: the span only grows while it is put off.
            shorter = self._within_pin_limit(span)
            if shorter is not None:
                return shorter
        if decline is not None:
            self.counters.count(decline)
            return None
        return span

    def _within_pin_limit(self, span: tuple[int, int]) -> tuple[int, int] | None:
        begin, end = span
        room = self.limits.pinned_blocks_max - self.pinned_blocks
        units = math.floor(room / self.limits.blocks_per_unit)
        end = min(end, begin + units * self.limits.unit_tokens)
        return (begin, end) if end > begin else None

    def filled_span(self, request: RequestContext, computed_tokens: int) -> tuple[int, int] | None:
        """Returns the tokens of a request that are computed and not stored yet, in whole units."""
        if request.state is not _RUNNING or request.epoch != self.epoch:
            return None
        end = min(computed_tokens, request.store_end_tokens)
        end -= end % self.limits.unit_tokens
        if end <= request.planned_tokens or request.store_barred:
            return None
        return request.planned_tokens, end

    def decline(self, span: tuple[int, int]) -> Decline | None:
        """Says why a span of tokens ``(begin, end)`` cannot be stored now; None if it can."""
        decline = self._decline_transfer()
        if decline is not None:
            return decline
        units = (span[1] - span[0]) // self.limits.unit_tokens
        return self._decline_pins(math.ceil(units * self.limits.blocks_per_unit))

    def decline_boundary(self, request: RequestContext, block_count: int) -> Decline | None:
        """Says why a boundary of a request cannot be stored now; None if it can."""
        if request.state is not _RUNNING or request.epoch != self.epoch or request.store_barred:
            return "declined_boundary"
        return self._decline_transfer() or self._decline_pins(block_count)

    def may_store_boundary(self, request: RequestContext, block_count: int) -> bool:
        """Says whether ``BoundaryOffered`` is legal for so many blocks, and counts why not."""
        decline = self.decline_boundary(request, block_count)
        if decline is not None:
            self.counters.count(decline)
        return decline is None

    # ------------------------------------------------------------ of what nobody uses

    def may_defer(self) -> bool:
        """Says whether what is computed now may be stored once its blocks are about to be reused.

        Not while the engine's own cache may hold the same KV from before a reset: the two cannot be
        told apart later. Nor while a synchronous load is open, which may yet turn out to have
        failed.
        """
        lazy = self.limits.lazy_blocks_max > 0
        return lazy and not self.local_cache_tainted and not self.sync_loads

    def lazy_room(self) -> int:
        """Returns how many blocks about to be reused may be stored now; counts why none may."""
        decline = self.decline_lazy(1)
        if decline is not None:
            self.counters.count(decline)
            return 0
        return self._lazy_pins_max() - self.pinned_blocks

    def decline_lazy(self, block_count: int) -> Decline | None:
        """Says why so many blocks that no request uses cannot be stored now; None if they can."""
        if self.local_cache_tainted:
            return "declined_stale_epoch"
        decline = self._decline_transfer()
        if decline is None and self.pinned_blocks + block_count > self._lazy_pins_max():
            decline = "declined_pin_limit"
        return decline

    def _lazy_pins_max(self) -> int:
        return min(self.limits.lazy_blocks_max, self.limits.pinned_blocks_max)

    # ------------------------------------------------------------ of anything

    def _decline_transfer(self) -> Decline | None:
        if self.sync_loads:
            return "declined_sync_load"
        if len(self.leases) >= self.limits.open_leases_max:
            return "declined_lease_limit"
        return None

    def _decline_pins(self, block_count: int) -> Decline | None:
        if self.pinned_blocks + block_count > self.limits.pinned_blocks_max:
            return "declined_pin_limit"
        return None

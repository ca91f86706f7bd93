# SPDX-License-Identifier: Apache-2.0
"""The one record of a transfer."""

import enum
import math
from collections.abc import Sequence
from typing import Any

import attrs

from umbp.fsm.request import RequestContext
from umbp.fsm.values import value


class LeaseState(enum.Enum):
    """Where a transfer is in its lifecycle. ``umbp.fsm.table`` says what leads where."""

    SUBMITTED = "submitted"
    """Planned; its blocks are held; no worker knows of it yet."""
    IN_FLIGHT = "in_flight"
    """Handed to the workers; at least one has not answered."""
    STALLED = "stalled"
    """Past its deadline and cancelled, or beyond the reach of some rank; its blocks stay held until
    every rank answers."""
    SETTLED = "settled"
    """Every rank succeeded."""
    FAILED = "failed"
    """Every rank answered, and at least one failed."""
    RELEASED = "released"
    """Its blocks are no longer held by it."""

    __hash__ = object.__hash__


class LeaseKind(enum.Enum):
    """Direction of a transfer."""

    LOAD = "load"
    STORE = "store"

    __hash__ = object.__hash__


@value(eq=False)
class LeasePart:
    """The blocks of one KV cache group in a transfer.

    Attributes:
        group_index: Index of the group.
        block_hashes: What each block is stored under. Opaque to the core.
        block_ids: Ids of the blocks in KV memory, one per hash. Opaque to the core.
    """

    group_index: int
    block_hashes: Sequence[bytes]
    block_ids: Sequence[int]


@attrs.define(eq=False, weakref_slot=False)
class TransferLease:
    """One load or store, and who has still to answer for it.

    A store may belong to no request: its blocks are free in the engine's eyes, and about to be
    reused. It has the same lifecycle, and nobody to tell when it has ended.

    The blocks of a store are pinned by its lease alone. The blocks of a load belong to the
    request, which the engine keeps until the workers report the load's end; when they report it
    while one of them can still write, the lease pins these blocks, too.

    Attributes:
        job_id: Unique among all transfers and all lives of requests.
        request: The request it was made for; None: a store of blocks that no request uses.
        generation: The life of that request that it was made in; None without a request.
        kind: Direction.
        epoch: Epoch of its keys.
        parts: What it moves.
        block_count: Blocks in all parts.
        begin_tokens: First token position that it covers.
        end_tokens: The position after the last.
        ranks_left: Bit mask of the ranks that have not answered.
        ranks_stalled: Bit mask of the ranks that were reported as stalled, also if they have
            answered since.
        ranks_arriving: Bit mask of the ranks that were reported as arriving, also if they have
            answered since.
        pinned: Whether the lease pins its blocks.
        synchronous: A load that the same step's forward pass reads.
        failed: Some rank has answered that it failed.
        attempted: Some rank that failed had begun its part.
        broken: A rank failed that the engine had been told has ended well.
        state: State of the lifecycle; written by ``Core`` only.
        deadline_s: When it is cancelled, and cancelled again.
        wake_s: When the deadline queue looks at it next.
    """

    job_id: int
    request: RequestContext | None
    generation: int | None
    kind: LeaseKind
    epoch: int
    parts: tuple[LeasePart, ...]
    block_count: int
    begin_tokens: int
    end_tokens: int
    ranks_left: int
    ranks_stalled: int = 0
    ranks_arriving: int = 0
    pinned: bool = False
    synchronous: bool = False
    failed: bool = False
    attempted: bool = False
    broken: bool = False
    state: LeaseState = LeaseState.SUBMITTED
    deadline_s: float = math.inf
    wake_s: float = math.inf

    @property
    def ranks_silent(self) -> int:
        """Bit mask of the ranks that have said nothing: they neither ended, stalled nor arrive."""
        return self.ranks_left & ~(self.ranks_stalled | self.ranks_arriving)

    @property
    def number(self) -> int:
        """Orders this lease among others that are due at the same time."""
        return self.job_id

    @property
    def identity(self) -> str:
        """How errors and logs name this transfer."""
        owner = self.request.identity if self.request is not None else "free blocks"
        return f"{self.kind.value} {self.job_id} of {owner}"

    @property
    def source(self) -> Any:
        """The engine's own request object; None without a request."""
        return self.request.source if self.request is not None else None

    @property
    def request_id(self) -> str:
        """Id of the request; empty without one."""
        return self.request.request_id if self.request is not None else ""

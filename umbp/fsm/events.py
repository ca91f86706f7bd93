# SPDX-License-Identifier: Apache-2.0
"""What can happen, as values. Past tense: an event is a fact.

The first group comes from outside, through ``Core.step``. The second group is derived by the core,
which classifies facts so that the tables need no guards: two outcomes are two events.
"""

from typing import Any, TypeAlias

from umbp.fsm.lease import LeasePart
from umbp.fsm.values import value

# ---------------------------------------------------------------- facts about requests


@value(eq=False)
class LookupAsked:
    """The engine wants to know how much of a request is stored.

    Attributes:
        request_id: The request.
        source: The engine's request object, kept for the connector.
        local_tokens: Tokens the engine has by itself, a multiple of the unit.
        limit_tokens: A hit may not end after this position.
        store_end_tokens: Nothing at or after this position is to be stored.
    """

    request_id: str
    source: Any
    local_tokens: int
    limit_tokens: int
    store_end_tokens: int


@value(eq=False)
class LookupSkipped(LookupAsked):
    """As ``LookupAsked``, but nothing must be looked up for this request."""


@value(eq=False)
class LookupAnswered:
    """The backend answered a lookup.

    Attributes:
        request_id: The request.
        question_id: The question.
        hit_end_tokens: Where the hit ends; at or below the local tokens it is a miss.
        hit: What was found, kept for the connector; opaque to the core.
    """

    request_id: str
    question_id: int
    hit_end_tokens: int
    hit: Any = None


@value(eq=False)
class LoadAdmitted:
    """The engine gave a request blocks for the hit.

    Attributes:
        request_id: The request.
        begin_tokens: Where the engine's own tokens end and the load begins.
        end_tokens: Where the load ends.
        parts: The destination blocks.
        synchronous: Whether the same step computes the request.
    """

    request_id: str
    begin_tokens: int
    end_tokens: int
    parts: tuple[LeasePart, ...]
    synchronous: bool


@value(eq=False)
class ComputeAdmitted:
    """The engine gave a request blocks and loads nothing; it starts at ``computed_tokens``."""

    request_id: str
    computed_tokens: int


@value(eq=False)
class BlocksFilled:
    """The step being planned fills these blocks of a request.

    Attributes:
        request_id: The request.
        begin_tokens: First position, as ``Core.storable`` said.
        end_tokens: Position after the last, as ``Core.storable`` said.
        parts: The source blocks.
    """

    request_id: str
    begin_tokens: int
    end_tokens: int
    parts: tuple[LeasePart, ...]


@value(eq=False)
class BlocksDeferred:
    """The step being planned fills these blocks, and they stay in KV memory until it reuses them.

    Attributes:
        request_id: The request.
        begin_tokens: First position, as ``Core.filled_span`` said.
        end_tokens: Position after the last, as ``Core.filled_span`` said.
    """

    request_id: str
    begin_tokens: int
    end_tokens: int


@value(eq=False)
class BoundaryOffered:
    """The engine hands off a boundary of a request: blocks from which it can be resumed there.

    Attributes:
        request_id: The request.
        begin_tokens: The boundary.
        end_tokens: The boundary.
        parts: The source blocks, not empty; ``Core.may_store_boundary`` said yes to their number.
    """

    request_id: str
    begin_tokens: int
    end_tokens: int
    parts: tuple[LeasePart, ...]


@value(eq=False)
class Preempted:
    """The engine took a request's blocks back."""

    request_id: str


@value(eq=False)
class RequestFinished:
    """The engine is done with a request: it ended, or was aborted in whatever state."""

    request_id: str


# ---------------------------------------------------------------- facts about KV memory


@value(eq=False)
class ReuseNeared:
    """KV memory is about to reuse blocks that no request uses and that are not stored.

    Attributes:
        parts: The blocks, at most as many as ``Core.lazy_room`` said.
    """

    parts: tuple[LeasePart, ...]


# ---------------------------------------------------------------- facts about transfers


@value(eq=False)
class LeaseSent:
    """A transfer is part of what the workers are about to receive."""

    job_id: int


@value(eq=False)
class RankSucceeded:
    """One rank has done its part of a transfer and no longer touches the blocks."""

    job_id: int
    rank: int


@value(eq=False)
class RankFailed:
    """One rank could not do its part of a transfer and no longer touches the blocks.

    Attributes:
        job_id: The transfer.
        rank: The rank.
        attempted: False when it never began: that says nothing about the objects.
        failed_hashes: Block hashes of the objects that could not be read.
    """

    job_id: int
    rank: int
    attempted: bool = True
    failed_hashes: tuple[bytes, ...] = ()


@value(eq=False)
class RankStalled:
    """One rank cannot end its part of an asynchronous load, and has told the engine that it failed.

    It may still write the blocks. Its answer follows when it does not any more.

    Attributes:
        job_id: The transfer.
        rank: The rank.
    """

    job_id: int
    rank: int


@value(eq=False)
class RankArriving:
    """One rank's part of an asynchronous load can no longer fail, and still writes the blocks.

    Whatever the engine computes from now on finds it in place, because the device is told to wait
    for it, and so the engine was told that it has ended. Its answer follows when it has.

    Attributes:
        job_id: The transfer.
        rank: The rank.
    """

    job_id: int
    rank: int


@value(eq=False)
class EpochRaised:
    """The store was reset.

    Attributes:
        local_cache_kept: The engine's own prefix cache could not be emptied, so that KV from
            before the reset may still be shared through it.
        epoch: The new epoch, where engines share one; None: the next number.
    """

    local_cache_kept: bool
    epoch: int | None = None


# ---------------------------------------------------------------- derived by the core


@value(eq=False)
class LookupExpired:
    """No answer came in time."""


@value(eq=False)
class LoadSettled:
    """The load that the request waits for has succeeded on every rank."""


@value(eq=False)
class LoadFailed:
    """The load that the request waits for has failed; the engine will ask again."""


@value(eq=False)
class LoadStalled:
    """Every rank has reported the end of the load that the request waits for; some still work."""


@value(eq=False)
class LoadArrived:
    """Every rank has reported the end of the load that the request waits for; some still write."""


@value(eq=False)
class SyncLoadFailed:
    """A load failed whose step was computed already; the engine computes that step again."""


@value(eq=False)
class LoadExpired:
    """The load that the request waits for is past its deadline."""


@value(eq=False)
class LeaseClosed:
    """A transfer that the request does not wait for has ended."""


@value(eq=False)
class StoreExpired:
    """Transfers of a request that is otherwise done are past their deadline."""


@value(eq=False)
class LeasesDrained:
    """The last transfer of a request that is otherwise done has ended."""


@value(eq=False)
class Forgotten:
    """The engine has not mentioned a request for so long that it cannot exist any more."""


@value(eq=False)
class RankAnswered:
    """A rank has answered for a transfer, and others have not yet."""


@value(eq=False)
class AllRanksSucceeded:
    """The last rank has answered for a transfer, and none has failed."""


@value(eq=False)
class SomeRankFailed:
    """The last rank has answered for a transfer, and at least one has failed."""


@value(eq=False)
class LeaseExpired:
    """A transfer is past its deadline."""


@value(eq=False)
class LeaseReleased:
    """A transfer that every rank has answered gives its blocks back."""


Event: TypeAlias = (
    LookupAsked
    | LookupAnswered
    | LoadAdmitted
    | ComputeAdmitted
    | BlocksFilled
    | BlocksDeferred
    | BoundaryOffered
    | ReuseNeared
    | Preempted
    | RequestFinished
    | LeaseSent
    | RankSucceeded
    | RankFailed
    | RankStalled
    | RankArriving
    | EpochRaised
)
"""What ``Core.step`` takes."""

# SPDX-License-Identifier: Apache-2.0
"""Every bound that the core keeps."""

from typing import Any

import attrs

from umbp.errors import UsageError


def _positive(_: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
    if value <= 0:
        raise UsageError(f"{attribute.name} must be positive, got {value!r}")


@attrs.frozen(kw_only=True)
class CoreLimits:
    """Bounds of the core. Times are seconds on the clock whose readings the caller passes in.

    Attributes:
        unit_tokens: Tokens in the smallest piece that is looked up, loaded and stored.
        blocks_per_unit: Blocks, of all groups, that one unit of tokens fills on average.
        rank_count: Number of workers that answer for each transfer.
        lookup_timeout_s: How long a lookup may stay unanswered before it is a miss.
        answer_lifetime_s: How long a lookup's answer is used before the backend is asked again;
            bounds how stale the residency is that a request waiting in the queue acts on.
        transfer_timeout_s: How long a transfer may stay unanswered before it is cancelled, and
            between one cancellation and the next.
        idle_timeout_s: How long a request may go unmentioned before its context is dropped. Only
            reached when the engine forgot to say that a request has ended.
        quarantine_s: How long a key that failed to load is a miss for every request. 0: not at all.
        open_leases_max: Transfers open at once; further stores are declined.
        pinned_blocks_max: Blocks that open stores may pin; further stores are declined.
        lazy_blocks_max: The same, for a store that belongs to no request: so many may be pinned,
            by whatever stores, when it begins. 0: there are no such stores.
    """

    unit_tokens: int = attrs.field(validator=_positive)
    blocks_per_unit: float = attrs.field(default=1.0, validator=_positive)
    rank_count: int = attrs.field(default=1, validator=_positive)
    lookup_timeout_s: float = attrs.field(default=0.1, validator=_positive)
    answer_lifetime_s: float = attrs.field(default=5.0, validator=_positive)
    transfer_timeout_s: float = attrs.field(default=30.0, validator=_positive)
    idle_timeout_s: float = attrs.field(default=3600.0, validator=_positive)
    quarantine_s: float = 0.0
    open_leases_max: int = attrs.field(default=4096, validator=_positive)
    pinned_blocks_max: int = attrs.field(default=1 << 40, validator=_positive)
    lazy_blocks_max: int = attrs.field(default=0, validator=attrs.validators.ge(0))

# SPDX-License-Identifier: Apache-2.0
"""What the core counts. Every decline is silent otherwise, so each has its own number."""

import operator
from typing import Final, Literal, TypeAlias

import attrs

Decline: TypeAlias = Literal[
    "declined_sync_load",
    "declined_lease_limit",
    "declined_pin_limit",
    "declined_boundary",
    "declined_stale_epoch",
]
"""Why a store that is due is not planned now: the name of the counter."""


@attrs.define
class CoreCounters:
    """Counters that only rise, since the core was made.

    Attributes:
        lookups: Questions sent to the backend.
        lookup_hits: Answers with at least one unit to load.
        lookup_misses: Answers without.
        lookups_expired: Questions that were not answered in time.
        loads_started: Loads admitted by the engine.
        loads_settled: Loads that every rank did.
        loads_failed: Loads that some rank could not do.
        loads_not_attempted: Failed loads of which no rank had begun its part.
        loads_stalled: Loads that some rank reported as failed while it could still write.
        loads_arriving: Loads that some rank reported as ended while their last bytes were on their
            way.
        tokens_restored: Tokens covered by settled loads.
        stores_started: Stores planned.
        stores_settled: Stores that every rank did.
        stores_failed: Stores that some rank could not do.
        tokens_stored: Tokens covered by settled stores of requests.
        tokens_deferred: Tokens that were computed and are stored once KV memory is about to reuse
            their blocks.
        lazy_stores_started: Of the stores planned, those of blocks about to be reused.
        lazy_blocks_stored: Blocks of such stores that every rank did.
        leases_stalled: Transfers that went past their deadline.
        answers_unknown: Answers for transfers that are closed, or given twice.
        preemptions: Lives that ended by preemption.
        requests_forgotten: Contexts dropped because the engine never mentioned them again.
        epochs_raised: Resets.
        declined_lease_limit: Stores not planned because too many transfers are open.
        declined_pin_limit: Stores not planned because they would pin too many blocks.
        declined_stale_epoch: Lives whose stores ended because of a reset; and stores of free blocks
            that may be from before it.
        declined_barred: Lives whose KV must not be stored.
        declined_sync_load: Stores put off because a synchronous load is open.
        declined_boundary: Boundaries not stored because the life that reached them may not store.
    """

    lookups: int = 0
    lookup_hits: int = 0
    lookup_misses: int = 0
    lookups_expired: int = 0
    loads_started: int = 0
    loads_settled: int = 0
    loads_failed: int = 0
    loads_not_attempted: int = 0
    loads_stalled: int = 0
    loads_arriving: int = 0
    tokens_restored: int = 0
    stores_started: int = 0
    stores_settled: int = 0
    stores_failed: int = 0
    tokens_stored: int = 0
    tokens_deferred: int = 0
    lazy_stores_started: int = 0
    lazy_blocks_stored: int = 0
    leases_stalled: int = 0
    answers_unknown: int = 0
    preemptions: int = 0
    requests_forgotten: int = 0
    epochs_raised: int = 0
    declined_lease_limit: int = 0
    declined_pin_limit: int = 0
    declined_stale_epoch: int = 0
    declined_barred: int = 0
    declined_sync_load: int = 0
    declined_boundary: int = 0

    def count(self, decline: Decline) -> None:
        """Counts a store that was not planned."""
        setattr(self, decline, getattr(self, decline) + 1)

    def as_dict(self) -> dict[str, int]:
        """Returns all counters by name."""
        return dict(zip(_NAMES, _VALUES(self), strict=True))


_NAMES: Final = tuple(field.name for field in attrs.fields(CoreCounters))
_VALUES: Final = operator.attrgetter(*_NAMES)

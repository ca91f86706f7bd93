# SPDX-License-Identifier: Apache-2.0
"""The lifecycle, as tables. No transition exists that is not a row here.

Two machines, coupled by leases
-------------------------------

A **request** is in one of six states. A **lease** is one transfer, a load or a store, with its own
states. A request holds at most one load that it waits for, and any number of stores; stores of an
earlier life may still be open when a new life begins, because preemption takes the request's
blocks back but cannot take back what a transfer is reading.

* Every life has a generation. A lease that ends moves the request only when the request waits for
  that very lease; any other lease is counted off (``LeaseClosed``) and changes nothing else.
* Only the answers of all ranks end a lease that the workers know of (``AllRanksSucceeded``,
  ``SomeRankFailed``). Neither a deadline, nor a preemption, an abort or a reset releases a block:
  they can at most ask for the transfer's end.
* A request need not wait for a load that a rank cannot end: once every rank has answered or is
  known to be stalled, the request is computed (``LoadStalled``), and the lease keeps the blocks.
* Nor for the last bytes of a load that cannot fail any more, where the device itself waits for them
  before it computes: once every rank has answered or is known to be arriving, the request goes on
  from the restored tokens (``LoadArrived``), and the lease keeps the blocks.
* A request is ``FINISHED`` only when no lease of any of its lives is open.
* A store may belong to no request at all (``ReuseNeared``): blocks that are free in the engine's
  eyes and about to be reused. Its lease goes the same way, under the same deadlines; when it ends
  there is nobody to tell. What its blocks hold was computed by lives that could have stored it, and
  put it off (``BlocksDeferred``).

No guards
---------

There is one row per state and event. Where a fact has two outcomes there are two events, and the
core chooses which one happened: a rank's answer is ``RankAnswered`` while others are missing, and
``AllRanksSucceeded`` or ``SomeRankFailed`` when it was the last. An event without a row is illegal:
``IllegalTransition`` is raised and nothing is changed.

Deadlines
---------

``REQUEST_DEADLINES`` and ``LEASE_DEADLINES`` name, for every state that is not final, the limit
that bounds it and the event that its end brings. A row that leads to a state starts that time anew,
also when the state was the same before; a row that says ``STAY`` lets it run on. Nothing waits for
ever: a silent lookup is a miss; a silent transfer is cancelled, again and again, while the worker's
own watch over native calls decides whether its memory can still be called safe; a request that the
engine never mentions again is dropped.

Invariants
----------

* A block is pinned once by each open store lease that names it, and by each open load lease of
  which a rank has stalled or is arriving; by nothing else of ours.
* A lease is released exactly once. ``open_leases`` of a request counts its unreleased leases.
* ``planned_tokens`` of a life never decreases, but for a load that failed before the life had
  stored anything; so nothing is stored twice by one life.
* No store is planned while a synchronous load is open, nor by a life of an earlier epoch. Nor is
  one of free blocks while the engine's own cache may hold KV from before a reset.
"""

from collections.abc import Sequence
from typing import Any, Final

import attrs

from umbp.fsm import effects, events
from umbp.fsm.lease import LeaseState
from umbp.fsm.request import RequestState

STAY: Final = "="
"""Destination of a row that leaves the state as it is."""


@attrs.frozen
class Deadline:
    """What bounds a state.

    Attributes:
        limit: Name of the field of ``CoreLimits``.
        event: The class of the event that its end brings.
    """

    limit: str
    event: type[Any]


@attrs.frozen
class Row:
    """One line of a table.

    Attributes:
        event: The event's class.
        sources: The states that take it.
        dest: The state that follows, or ``STAY``.
        effect: What is written and commanded; None for nothing.
        deadline: What bounds the next state after this row, where it is not that state's own.
    """

    event: type[Any]
    sources: Sequence[Any]
    dest: Any
    effect: Any = None
    deadline: Deadline | None = None


_P = RequestState
_ALIVE: Final = (_P.LOOKUP, _P.LOADING, _P.RUNNING, _P.PREEMPTED)

QUESTION_DEADLINE: Final = Deadline("lookup_timeout_s", events.LookupExpired)
"""Bounds ``LOOKUP`` while a question is open."""

REQUEST_TABLE: Final = (
    # Looking up. A question may be asked again: the engine's own hit moves while it waits. From a
    # life that was admitted it is a preemption, too: the engine starts a request over only after
    # it took its blocks back.
    Row(events.LookupAsked, _ALIVE, _P.LOOKUP, effects.ask_lookup, QUESTION_DEADLINE),
    Row(events.LookupSkipped, _ALIVE, _P.LOOKUP, effects.skip_lookup),
    Row(events.LookupAnswered, (_P.LOOKUP,), _P.LOOKUP, effects.take_answer),
    Row(events.LookupExpired, (_P.LOOKUP,), _P.LOOKUP, effects.expire_lookup),
    # Admitted by the engine, with or without a load.
    Row(events.LoadAdmitted, (_P.LOOKUP,), _P.LOADING, effects.start_load),
    Row(events.ComputeAdmitted, (_P.LOOKUP, _P.RUNNING), _P.RUNNING, effects.start_compute),
    # Loading.
    Row(events.LoadSettled, (_P.LOADING,), _P.RUNNING, effects.finish_load),
    Row(events.LoadFailed, (_P.LOADING,), _P.LOOKUP, effects.fail_load),
    Row(events.LoadStalled, (_P.LOADING,), _P.LOOKUP, effects.leave_load),
    Row(events.LoadArrived, (_P.LOADING,), _P.RUNNING, effects.run_ahead),
    Row(events.SyncLoadFailed, (_P.LOADING,), _P.RUNNING, effects.fail_sync_load),
    # The lease has its own deadline, which cancels the transfer.
    Row(events.LoadExpired, (_P.LOADING,), _P.LOADING),
    # Running. A synchronous load runs while it loads, and so may be preempted.
    Row(events.BlocksFilled, (_P.RUNNING,), _P.RUNNING, effects.start_store),
    Row(events.BlocksDeferred, (_P.RUNNING,), _P.RUNNING, effects.defer_store),
    Row(events.BoundaryOffered, (_P.RUNNING,), _P.RUNNING, effects.store_boundary),
    Row(events.Preempted, (_P.LOADING, _P.RUNNING), _P.PREEMPTED, effects.preempt),
    # The end, from wherever it comes.
    Row(events.RequestFinished, _ALIVE, _P.STORING, effects.finish_request),
    Row(events.Forgotten, (_P.LOOKUP, _P.RUNNING, _P.PREEMPTED), _P.STORING,
        effects.forget_request),
    Row(events.StoreExpired, (_P.STORING,), _P.STORING),
    Row(events.LeasesDrained, (_P.STORING,), _P.FINISHED),
    # What may happen in any state.
    Row(events.LeaseClosed, (*_ALIVE, _P.STORING), STAY, effects.close_lease),
    Row(events.EpochRaised, (_P.LOOKUP,), _P.LOOKUP, effects.restart_lookup),
    Row(events.EpochRaised, (_P.LOADING, _P.RUNNING, _P.PREEMPTED), STAY),
)  # fmt: skip

_L = LeaseState
_SENT: Final = (_L.IN_FLIGHT, _L.STALLED)

LEASE_TABLE: Final = (
    # A lease begins in its first state: one of a request by a row above, one of none by this.
    Row(events.ReuseNeared, (_L.SUBMITTED,), _L.SUBMITTED, effects.store_free_blocks),
    Row(events.LeaseSent, (_L.SUBMITTED,), _L.IN_FLIGHT),
    Row(events.RankAnswered, _SENT, STAY),
    Row(events.AllRanksSucceeded, _SENT, _L.SETTLED, effects.settle_lease),
    Row(events.SomeRankFailed, _SENT, _L.FAILED, effects.fail_lease),
    Row(events.RankStalled, _SENT, _L.STALLED, effects.hold_stalled),
    Row(events.RankArriving, _SENT, STAY, effects.hold_arriving),
    Row(events.LeaseExpired, (_L.SUBMITTED,), _L.FAILED, effects.abandon_lease),
    Row(events.LeaseExpired, _SENT, _L.STALLED, effects.stall_lease),
    Row(events.LeaseReleased, (_L.SETTLED, _L.FAILED), _L.RELEASED, effects.release_lease),
)

REQUEST_FINAL: Final = _P.FINISHED
LEASE_FINAL: Final = _L.RELEASED

REQUEST_DEADLINES: Final = {
    _P.LOOKUP: Deadline("idle_timeout_s", events.Forgotten),
    _P.LOADING: Deadline("transfer_timeout_s", events.LoadExpired),
    _P.RUNNING: Deadline("idle_timeout_s", events.Forgotten),
    _P.PREEMPTED: Deadline("idle_timeout_s", events.Forgotten),
    _P.STORING: Deadline("transfer_timeout_s", events.StoreExpired),
}

# SETTLED and FAILED are left in the same call of the core in which they are entered.
LEASE_DEADLINES: Final = {
    _L.SUBMITTED: Deadline("transfer_timeout_s", events.LeaseExpired),
    _L.IN_FLIGHT: Deadline("transfer_timeout_s", events.LeaseExpired),
    _L.STALLED: Deadline("transfer_timeout_s", events.LeaseExpired),
}

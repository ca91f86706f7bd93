# SPDX-License-Identifier: Apache-2.0
"""The lifecycle of requests and transfers: pure, without clock, thread, I/O or randomness.

Read ``table`` first: it says which machines exist and holds every transition. ``core.Core`` takes
events, moves the machines and returns commands; the connector performs them.
"""

from umbp.fsm.commands import (
    CancelTransfer,
    Command,
    DropLookup,
    PinBlocks,
    ReleasePins,
    StartLoad,
    StartLookup,
    StartStore,
)
from umbp.fsm.core import Core, LookupReply
from umbp.fsm.events import (
    BlocksDeferred,
    BlocksFilled,
    BoundaryOffered,
    ComputeAdmitted,
    EpochRaised,
    Event,
    LeaseSent,
    LoadAdmitted,
    LookupAnswered,
    LookupAsked,
    LookupSkipped,
    Preempted,
    RankArriving,
    RankFailed,
    RankStalled,
    RankSucceeded,
    RequestFinished,
    ReuseNeared,
)
from umbp.fsm.lease import LeaseKind, LeasePart, LeaseState, TransferLease
from umbp.fsm.limits import CoreLimits
from umbp.fsm.request import RequestContext, RequestState

__all__ = [
    "BlocksDeferred",
    "BlocksFilled",
    "BoundaryOffered",
    "CancelTransfer",
    "Command",
    "ComputeAdmitted",
    "Core",
    "CoreLimits",
    "DropLookup",
    "EpochRaised",
    "Event",
    "LeaseKind",
    "LeasePart",
    "LeaseSent",
    "LeaseState",
    "LoadAdmitted",
    "LookupAnswered",
    "LookupAsked",
    "LookupReply",
    "LookupSkipped",
    "PinBlocks",
    "Preempted",
    "RankArriving",
    "RankFailed",
    "RankStalled",
    "RankSucceeded",
    "ReleasePins",
    "RequestContext",
    "RequestFinished",
    "RequestState",
    "ReuseNeared",
    "StartLoad",
    "StartLookup",
    "StartStore",
    "TransferLease",
]

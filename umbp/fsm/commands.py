# SPDX-License-Identifier: Apache-2.0
"""What is to be done, as values. Imperative: a command is a duty.

Commands are performed in the order in which they are returned, before the next event is given.
"""

from typing import TypeAlias

from umbp.fsm.lease import TransferLease
from umbp.fsm.request import RequestContext
from umbp.fsm.values import value


@value(eq=False)
class StartLookup:
    """Ask the backend how far the KV of a request exists.

    Answer with ``LookupAnswered`` under the same ``question_id``, or never: the deadline makes
    silence a miss.

    Attributes:
        request: The request; ``question_id`` and ``epoch`` are written on it.
        begin_tokens: Position from which to ask, a multiple of the unit.
        end_tokens: Position up to which to ask, a multiple of the unit, above ``begin_tokens``.
    """

    request: RequestContext
    begin_tokens: int
    end_tokens: int


@value(eq=False)
class DropLookup:
    """Forget a question; its answer is of no use any more."""

    question_id: int


@value(eq=False)
class StartLoad:
    """Hand a load to every worker in the metadata of the step being planned.

    Give ``LeaseSent`` when it is in the metadata. Each rank answers exactly once, with
    ``RankSucceeded`` or ``RankFailed``.
    """

    lease: TransferLease


@value(eq=False)
class StartStore:
    """Pin the source blocks NOW, then hand a store to every worker in the next metadata.

    The pin comes first because the engine may free the blocks in the same scheduling step.
    Give ``LeaseSent`` when it is in the metadata. Each rank answers exactly once. A lease that is
    released before that must not be handed over any more: its blocks are not held.
    """

    lease: TransferLease


@value(eq=False)
class PinBlocks:
    """Pin the destination blocks of a load NOW: the engine is about to take them back.

    A rank may still write them. ``ReleasePins`` follows when none does.
    """

    lease: TransferLease


@value(eq=False)
class CancelTransfer:
    """Ask every worker to end a transfer early. It ends by its answers, not by this."""

    lease: TransferLease


@value(eq=False)
class ReleasePins:
    """Give back the pins of a lease: every rank has answered. Exactly once for each pin."""

    lease: TransferLease


Command: TypeAlias = (
    StartLookup | DropLookup | StartLoad | StartStore | PinBlocks | CancelTransfer | ReleasePins
)

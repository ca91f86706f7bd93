# SPDX-License-Identifier: Apache-2.0
"""An engine and its workers, as the core sees them: blocks with owners and pins, open questions.

It performs the core's commands and checks each against what was commanded before. What it hands
out is what no request owns, no open store pins and no open load writes.
"""

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from umbp.errors import IllegalTransition, UsageError
from umbp.fsm import (
    CancelTransfer,
    Command,
    Core,
    DropLookup,
    Event,
    LeaseKind,
    LeasePart,
    LeaseState,
    PinBlocks,
    ReleasePins,
    RequestContext,
    StartLoad,
    StartLookup,
    StartStore,
    TransferLease,
)

UNIT = 4
PROMPT_BLOCKS = 5
PROMPT = PROMPT_BLOCKS * UNIT


@attrs.define(eq=False)
class Transfer:
    """What the workers know of a lease.

    Attributes:
        lease: The lease.
        sent: Whether they have heard of it.
        answered: Ranks that have answered.
    """

    lease: TransferLease
    sent: bool = False
    answered: set[int] = attrs.field(factory=set)

    @property
    def blocks(self) -> list[int]:
        return [block for part in self.lease.parts for block in part.block_ids]


class Engine:
    """A small engine on a core.

    Args:
        core: The core that it drives.
        block_count: Blocks that there are.
        prompt_blocks: Blocks of a prompt.
    """

    def __init__(self, core: Core, block_count: int, *, prompt_blocks: int = PROMPT_BLOCKS) -> None:
        self.core = core
        self.now_s = 0.0
        self.block_count = block_count
        self.prompt_blocks = prompt_blocks
        self.tables: dict[str, list[int]] = {}
        self.transfers: dict[int, Transfer] = {}
        self.pinning: set[int] = set()
        self.questions: dict[int, RequestContext] = {}
        self.contexts: list[RequestContext] = []
        self.stored_until: Counter[int] = Counter()

    # ------------------------------------------------------------ blocks

    def pins(self) -> Counter[int]:
        """Counts how often each block is pinned."""
        return Counter(block for job_id in self.pinning for block in self.transfers[job_id].blocks)

    def take_blocks(self) -> list[int] | None:
        """Returns blocks for a whole prompt, which nobody uses; None if there are too few."""
        used = set(self.pins())
        for table in self.tables.values():
            used.update(table)
        for transfer in self.transfers.values():
            if transfer.lease.kind is LeaseKind.LOAD and self.is_open(transfer):
                used.update(transfer.blocks)
        free = [block for block in range(self.block_count) if block not in used]
        return free[: self.prompt_blocks] if len(free) >= self.prompt_blocks else None

    def parts(self, table: Sequence[int], begin: int, end: int) -> tuple[LeasePart, ...]:
        first, last = begin // UNIT, end // UNIT
        return parts_of(table[first:last])

    def is_open(self, transfer: Transfer) -> bool:
        return transfer.lease.state is not LeaseState.RELEASED

    # ------------------------------------------------------------ events and commands

    def give(self, event: Event) -> bool:
        """Gives an event; a refused one must change nothing. Says whether it was taken."""
        before = state_of(self.core, self.contexts)
        content = fields_of(event)
        try:
            commands = self.core.step(event, self.now_s)
            # Events are frozen for the type checker alone.
            assert fields_of(event) == content
        except (IllegalTransition, UsageError):
            assert state_of(self.core, self.contexts) == before
            return False
        self.perform(commands)
        return True

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.perform(self.core.tick(self.now_s))

    def perform(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case StartLookup(request=request):
                    assert request.question_id not in self.questions
                    assert command.begin_tokens < command.end_tokens <= PROMPT
                    self.questions[request.question_id] = request
                case DropLookup(question_id=question_id):
                    del self.questions[question_id]
                case StartLoad(lease=lease):
                    self._open(lease)
                case StartStore(lease=lease):
                    self._open(lease)
                    self._check_store(lease)
                    self.pinning.add(lease.job_id)
                case PinBlocks(lease=lease):
                    # While the engine still keeps them for the request.
                    assert lease.kind is LeaseKind.LOAD
                    assert lease.job_id not in self.pinning
                    self.pinning.add(lease.job_id)
                case CancelTransfer(lease=lease):
                    assert self.transfers[lease.job_id].sent
                    assert lease.job_id in self.core.leases
                case ReleasePins(lease=lease):
                    # Each lease is released once, and by the answers of all ranks alone.
                    self.pinning.remove(lease.job_id)
                    transfer = self.transfers[lease.job_id]
                    ranks = set(range(self.core.limits.rank_count))
                    assert transfer.answered == ranks or not transfer.sent

    def _open(self, lease: TransferLease) -> None:
        assert lease.job_id not in self.transfers
        self.transfers[lease.job_id] = Transfer(lease)

    def _check_store(self, lease: TransferLease) -> None:
        assert lease.epoch == self.core.epoch
        assert not self.core.sync_loads
        if lease.request is None:
            self._check_free(lease)
            return
        table = self.tables[lease.request.request_id]
        if lease.begin_tokens == lease.end_tokens:
            # A boundary is handed off whenever it is reached.
            assert set(self.transfers[lease.job_id].blocks) <= set(table)
            return
        first, last = lease.begin_tokens // UNIT, lease.end_tokens // UNIT
        assert self.transfers[lease.job_id].blocks == table[first:last]
        # Nothing is stored twice by one life.
        assert lease.begin_tokens >= self.stored_until[lease.generation]
        self.stored_until[lease.generation] = lease.end_tokens

    def _check_free(self, lease: TransferLease) -> None:
        """Blocks that nobody uses hold what was computed since the last reset, and no other."""
        assert not self.core.local_cache_tainted
        used = {block for table in self.tables.values() for block in table}
        blocks = self.transfers[lease.job_id].blocks
        assert used.isdisjoint(blocks)
        assert self.pins().keys().isdisjoint(blocks)

    def note_contexts(self) -> None:
        """Remembers every context that ever was."""
        known = set(map(id, self.contexts))
        self.contexts += [one for one in self.core.requests.values() if id(one) not in known]


def parts_of(blocks: Sequence[int]) -> tuple[LeasePart, ...]:
    """Names blocks of the one group that there is."""
    return (LeasePart(0, (b"",) * len(blocks), tuple(blocks)),)


def fields_of(record: Any) -> tuple[Any, ...]:
    """Returns what the fields of a record hold."""
    return _reader(type(record))(record)


@functools.cache
def _reader(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    names = kind.__match_args__
    if len(names) > 1:
        # In one call: an exhaustive search does this a million times.
        return operator.attrgetter(*names)
    return lambda record: tuple(getattr(record, name) for name in names)


def state_of(core: Core, contexts: Iterable[RequestContext]) -> Any:
    """Copies everything that a refused event must leave alone."""
    return (
        list(map(fields_of, contexts)),
        list(map(fields_of, core.leases.values())),
        list(core.requests),
        list(core.filling),
        fields_of(core.counters),
        (core.epoch, core.pinned_blocks, core.sync_loads, core.local_cache_tainted),
        len(core.quarantine),
        len(core.deadlines),
    )

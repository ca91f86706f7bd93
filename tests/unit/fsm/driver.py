# SPDX-License-Identifier: Apache-2.0
"""Drives a core by hand: short names for events, and a clock that is set."""

from typing import Any

import attrs

from umbp.fsm import (
    BlocksFilled,
    Command,
    ComputeAdmitted,
    Core,
    CoreLimits,
    Event,
    LeasePart,
    LeaseSent,
    LoadAdmitted,
    LookupAnswered,
    LookupAsked,
    LookupSkipped,
    Preempted,
    RankFailed,
    RankSucceeded,
    RequestContext,
    RequestFinished,
    RequestState,
    StartLoad,
    StartStore,
    TransferLease,
)

UNIT = 16
PROMPT = 10 * UNIT
"""Tokens of every request here, all of which may be stored."""

ALIVE = (
    RequestState.LOOKUP,
    RequestState.LOADING,
    RequestState.RUNNING,
    RequestState.PREEMPTED,
)


def parts(begin: int, end: int, groups: int = 1) -> tuple[LeasePart, ...]:
    """Blocks for a span of tokens, the same number in each group."""
    first, last = begin // UNIT, end // UNIT
    hashes, blocks = (b"hash",) * (last - first), tuple(range(first, last))
    return tuple(LeasePart(group, hashes, blocks) for group in range(groups))


class Driver:
    """A core, and the engine and workers around it."""

    def __init__(self, **limits: Any) -> None:
        self.core = Core(CoreLimits(unit_tokens=UNIT, **limits))
        self.now_s = 0.0

    def give(self, event: Event) -> list[Command]:
        return self.core.step(event, self.now_s)

    def wait(self, seconds: float) -> list[Command]:
        self.now_s += seconds
        return self.core.tick(self.now_s)

    def request(self, name: str = "a") -> RequestContext:
        return self.core.requests[name]

    def reply(self, local: int = 0, name: str = "a") -> object:
        return self.core.lookup_reply(name, local, self.now_s)

    # ------------------------------------------------------------ the engine

    def ask(self, name: str = "a", local: int = 0, end: int = PROMPT) -> list[Command]:
        return self.give(LookupAsked(name, None, local, end, PROMPT))

    def skip(self, name: str = "a", local: int = 0) -> list[Command]:
        return self.give(LookupSkipped(name, None, local, PROMPT, PROMPT))

    def answer(self, hit: int, name: str = "a", *, found: object = None) -> list[Command]:
        question_id = self.request(name).question_id
        assert question_id is not None
        return self.give(LookupAnswered(name, question_id, hit, found))

    def find(self, hit: int, name: str = "a", local: int = 0) -> None:
        self.ask(name, local)
        self.answer(hit, name)

    def load(
        self, begin: int, end: int, name: str = "a", *, synchronous: bool = False
    ) -> TransferLease:
        """Admits a load; it is not sent yet."""
        event = LoadAdmitted(name, begin, end, parts(begin, end), synchronous)
        (command,) = self.give(event)
        assert isinstance(command, StartLoad)
        return command.lease

    def compute(self, computed: int = 0, name: str = "a") -> list[Command]:
        return self.give(ComputeAdmitted(name, computed))

    def run(self, computed: int = 0, name: str = "a") -> None:
        """Admits a request for which nothing is looked up."""
        self.skip(name, computed)
        self.compute(computed, name)

    def fill(self, begin: int, end: int, name: str = "a") -> TransferLease:
        """Stores a span; the store is not sent yet."""
        (command,) = self.give(BlocksFilled(name, begin, end, parts(begin, end)))
        assert isinstance(command, StartStore)
        return command.lease

    def preempt(self, name: str = "a") -> list[Command]:
        return self.give(Preempted(name))

    def finish(self, name: str = "a") -> list[Command]:
        return self.give(RequestFinished(name))

    # ------------------------------------------------------------ the workers

    def send(self, lease: TransferLease) -> TransferLease:
        assert self.give(LeaseSent(lease.job_id)) == []
        return lease

    def succeed(self, lease: TransferLease, rank: int = 0) -> list[Command]:
        return self.give(RankSucceeded(lease.job_id, rank))

    def fail(
        self, lease: TransferLease, rank: int = 0, *, attempted: bool = True, hashes: Any = ()
    ) -> list[Command]:
        return self.give(RankFailed(lease.job_id, rank, attempted, hashes))

    # ------------------------------------------------------------ whole situations

    def bring(self, state: RequestState, name: str = "a") -> TransferLease | None:
        """Brings a new request into a state; returns the transfer that is sent there, if any."""
        if state is RequestState.LOOKUP:
            self.ask(name)
            return None
        if state is RequestState.LOADING:
            self.find(4 * UNIT, name)
            return self.send(self.load(0, 4 * UNIT, name))
        self.run(name=name)
        lease = self.send(self.fill(0, UNIT, name))
        if state is RequestState.PREEMPTED:
            self.preempt(name)
        if state is RequestState.STORING:
            self.finish(name)
        return lease

    def loading(self) -> TransferLease:
        """Brings a new request into ``LOADING``, and returns the load that it waits for."""
        lease = self.bring(RequestState.LOADING)
        assert lease is not None
        return lease


def snapshot(core: Core) -> dict[str, Any]:
    """Copies everything that an event may change, but for the numbers that were drawn."""
    contexts = {id(request): request for request in core.requests.values()}
    owners = (lease.request for lease in core.leases.values())
    contexts |= {id(request): request for request in owners if request is not None}
    return {
        "contexts": {key: attrs.asdict(context) for key, context in contexts.items()},
        "requests": {name: id(request) for name, request in core.requests.items()},
        "filling": {name: id(request) for name, request in core.filling.items()},
        "leases": {job_id: _fields(lease) for job_id, lease in core.leases.items()},
        "counters": core.counters.as_dict(),
        "quarantine": len(core.quarantine),
        "deadlines": len(core.deadlines),
        "pinned_blocks": core.pinned_blocks,
        "sync_loads": core.sync_loads,
        "epoch": core.epoch,
        "tainted": core.local_cache_tainted,
    }


def _fields(lease: TransferLease) -> dict[str, Any]:
    return attrs.asdict(lease, recurse=False) | {"request": id(lease.request)}

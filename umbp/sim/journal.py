# SPDX-License-Identifier: Apache-2.0
"""What happened to each request: the core's events and commands, and what vLLM scheduled."""

import attrs

from umbp.fsm import (
    CancelTransfer,
    Command,
    ComputeAdmitted,
    Core,
    CoreLimits,
    DropLookup,
    Event,
    LoadAdmitted,
    LookupAnswered,
    LookupAsked,
    PinBlocks,
    RankArriving,
    RankFailed,
    RankStalled,
    RankSucceeded,
    ReleasePins,
    RequestContext,
    StartLoad,
    StartLookup,
    StartStore,
    TransferLease,
)


@attrs.frozen
class Entry:
    """One line of a request's time line.

    Attributes:
        time_s: When.
        origin: Who says so: ``client``, ``vLLM`` or ``umbp``.
        event: What happened; of umbp, the name of the event, or ``deadline``.
        tokens: Positions it is about, or None.
        state: State of the request afterwards, as its origin names it.
        detail: What umbp had to do then, and more.
    """

    time_s: float
    origin: str
    event: str
    tokens: tuple[int, int] | None = None
    state: str = ""
    detail: str = ""


class Journal:
    """All lines of all requests.

    Attributes:
        entries: Lines of each request in order.
        loaded: For each request, the tokens that its last admission loads; None: none.
    """

    def __init__(self) -> None:
        self.entries: dict[str, list[Entry]] = {}
        self.loaded: dict[str, tuple[int, int] | None] = {}

    def note(self, request_id: str, entry: Entry) -> None:
        """Adds a line."""
        self.entries.setdefault(str(request_id), []).append(entry)

    def note_computed(self, request_id: str, entry: Entry) -> None:
        """Adds a line about computed tokens; steps of one token that follow each other share one.

        A decode of a thousand tokens would else be a thousand lines.
        """
        lines = self.entries.get(str(request_id), [])
        last = lines[-1] if lines else None
        if last is not None and last.event == entry.event == "decodes":
            assert last.tokens is not None
            assert entry.tokens is not None
            lines[-1] = attrs.evolve(last, tokens=(last.tokens[0], entry.tokens[1]))
        else:
            self.note(request_id, entry)

    def most_eventful(self) -> str | None:
        """Returns the request with most kinds of lines, and of these the one with most lines."""
        return max(self.entries, key=self._eventfulness, default=None)

    def _eventfulness(self, request_id: str) -> tuple[int, int]:
        lines = self.entries[request_id]
        return len({(line.event, line.state) for line in lines}), len(lines)


class WatchedCore(Core):
    """The real core; what goes in and what comes out is written down.

    Args:
        limits: Every bound.
        epoch: Part of every key.
        journal: Takes the lines.
    """

    def __init__(self, limits: CoreLimits, epoch: int, journal: Journal) -> None:
        super().__init__(limits, epoch)
        self._journal = journal
        self._asking: dict[int, RequestContext] = {}

    def step(self, event: Event, now_s: float) -> list[Command]:
        """Takes one event."""
        job_id = getattr(event, "job_id", None)
        lease = self.leases.get(job_id) if job_id is not None else None
        request_id = getattr(event, "request_id", None)
        before = self.requests.get(request_id) if request_id is not None else None
        out = super().step(event, now_s)
        context = before
        if lease is not None:
            # Its request may be forgotten while the transfer is still open.
            context = lease.request
        elif request_id is not None:
            context = self.requests.get(request_id, before)
        if context is not None:
            self._note_event(event, context, lease, out)
        return out

    def tick(self, now_s: float) -> list[Command]:
        """Brings in every deadline that has passed."""
        out = super().tick(now_s)
        for command in out:
            context = self._context_of(command)
            if context is not None:
                entry = Entry(
                    now_s, "umbp", "deadline", None, context.state.name, describe_command(command)
                )
                self._journal.note(context.request_id, entry)
        return out

    def _note_event(
        self,
        event: Event,
        context: RequestContext,
        lease: TransferLease | None,
        out: list[Command],
    ) -> None:
        for command in out:
            if isinstance(command, StartLookup) and context.question_id is not None:
                self._asking[context.question_id] = context
        if isinstance(event, LoadAdmitted):
            self._journal.loaded[str(context.request_id)] = event.begin_tokens, event.end_tokens
        elif isinstance(event, LookupAsked):
            # vLLM begins anew with this request.
            self._journal.loaded[str(context.request_id)] = None
        facts = [describe_lease(lease, event)] if lease is not None else []
        facts += [describe_command(command) for command in out]
        entry = Entry(
            self.now_s,
            "umbp",
            type(event).__name__,
            event_tokens(event),
            context.state.name,
            ", ".join(facts),
        )
        self._journal.note(context.request_id, entry)

    def _context_of(self, command: Command) -> RequestContext | None:
        match command:
            case DropLookup(question_id=question_id):
                return self._asking.pop(question_id, None)
            case StartLookup(request=request):
                return request
            case _:
                return command.lease.request


def event_tokens(event: Event) -> tuple[int, int] | None:
    """Returns the positions that an event is about."""
    match event:
        case LookupAsked(local_tokens=begin, limit_tokens=end):
            return begin, end
        case LookupAnswered(hit_end_tokens=end):
            return 0, end
        case ComputeAdmitted(computed_tokens=end):
            return 0, end
        case _:
            first: int | None = getattr(event, "begin_tokens", None)
            return None if first is None else (first, getattr(event, "end_tokens", first))


def describe_lease(lease: TransferLease, event: Event) -> str:
    """Says which transfer an event is about, and which rank."""
    what = f"{lease.kind.value} {lease.job_id}"
    if isinstance(event, RankSucceeded | RankFailed | RankStalled | RankArriving):
        what += f" rank {event.rank}"
        if isinstance(event, RankFailed):
            what += (
                f", {len(event.failed_hashes)} objects missing"
                if event.attempted
                else (", not begun")
            )
    return what


def describe_command(command: Command) -> str:
    """Says what umbp has to do."""
    name = type(command).__name__
    match command:
        case StartLookup(begin_tokens=begin, end_tokens=end):
            return f"{name} {begin}..{end}"
        case StartLoad(lease=lease) | StartStore(lease=lease):
            return f"{name} {lease.job_id} ({lease.block_count} blocks)"
        case PinBlocks(lease=lease) | CancelTransfer(lease=lease) | ReleasePins(lease=lease):
            return f"{name} of {lease.kind.value} {lease.job_id}"
        case _:
            return name

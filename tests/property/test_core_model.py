# SPDX-License-Identifier: Apache-2.0
"""The core agrees with a plain model of it, event by event.

Both are given the same random events. They must refuse the same ones, command the same, end in the
same states with the same deadlines, and say the same about lookups and stores.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from core_model import Model, Refused
from hypothesis import given
from hypothesis import strategies as st

from umbp.errors import IllegalTransition, UsageError
from umbp.fsm import (
    BlocksDeferred,
    BlocksFilled,
    BoundaryOffered,
    CancelTransfer,
    Command,
    ComputeAdmitted,
    Core,
    CoreLimits,
    DropLookup,
    EpochRaised,
    Event,
    LeasePart,
    LeaseSent,
    LeaseState,
    LoadAdmitted,
    LookupAnswered,
    LookupAsked,
    LookupReply,
    LookupSkipped,
    PinBlocks,
    Preempted,
    RankArriving,
    RankFailed,
    RankStalled,
    RankSucceeded,
    ReleasePins,
    RequestFinished,
    RequestState,
    ReuseNeared,
    StartLoad,
    StartLookup,
    StartStore,
)

pytestmark = pytest.mark.pure

UNIT = 4
PROMPT = 5 * UNIT
NAMES = ("a", "b", "c")


class Pair:
    """A core and a model of it, in step."""

    def __init__(self, limits: CoreLimits) -> None:
        self.core = Core(limits)
        self.model = Model(limits)
        self.now_s = 0.0

    def give(self, event: Event, act: Callable[[], Any]) -> None:
        """Gives the core an event, and lets the model do what it stands for."""
        self.model.now_s = self.now_s
        open_before = self.questions()
        try:
            expected = act()
        except Refused:
            expected = Refused
        try:
            commands = self.core.step(event, self.now_s)
        except (IllegalTransition, UsageError):
            assert expected is Refused, event
            return
        assert expected is not Refused, event
        self.adopt(commands, expected)
        answered = {event.question_id} if isinstance(event, LookupAnswered) else set()
        dropped = [one.question_id for one in commands if isinstance(one, DropLookup)]
        assert sorted(dropped) == sorted(open_before - self.questions() - answered)
        if isinstance(event, RankSucceeded | RankFailed | RankStalled | RankArriving):
            assert list(map(_brief, commands)) == expected
        self.compare()

    def adopt(self, commands: Sequence[Command], opened: Any) -> None:
        """Gives a lease of the model the job id that the core has drawn."""
        for command in commands:
            if isinstance(command, StartLoad | StartStore):
                assert opened.kind == command.lease.kind.value
                self.model.leases[command.lease.job_id] = opened
            if isinstance(command, StartLookup):
                assert opened == "asked"

    def question_of(self, name: str) -> int | None:
        request = self.core.requests.get(name)
        return request.question_id if request is not None else None

    def questions(self) -> set[int]:
        return {number for name in NAMES if (number := self.question_of(name)) is not None}

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        asking = {name for name in self.core.requests if self.question_of(name)}
        expected = self.model.wait(self.now_s)
        commands = self.core.tick(self.now_s)
        dropped = [("drop", name) for name in asking if not self.question_of(name)]
        brief = [_brief(one) for one in commands if not isinstance(one, DropLookup)]
        assert sorted(brief + dropped) == sorted(expected)
        self.compare()

    def compare(self) -> None:
        """Holds everything of the two against each other."""
        core, model = self.core, self.model
        assert (core.epoch, core.local_cache_tainted) == (model.epoch, model.tainted)
        assert set(core.requests) == set(model.requests)
        for name, request in core.requests.items():
            _same_request(request, model.requests[name])
        assert set(core.leases) == set(model.leases)
        for job_id, lease in core.leases.items():
            _same_lease(lease, model.leases[job_id])
        for name in NAMES:
            for tokens in range(0, PROMPT + 1, 2):
                reply = core.lookup_reply(name, tokens, self.now_s)
                said = reply.value if isinstance(reply, LookupReply) else reply
                assert said == model.reply(name, tokens)
                if name in core.requests:
                    span = core.storable(core.requests[name], tokens)
                    assert span == model.storable(name, tokens)
        for name, request in core.requests.items():
            for blocks in range(4):
                may_store = core.may_store_boundary(request, blocks)
                assert may_store == model.may_store_boundary(name, blocks)


def _brief(command: Command) -> tuple[str, int]:
    match command:
        case CancelTransfer(lease=lease):
            return ("cancel", lease.job_id)
        case ReleasePins(lease=lease):
            return ("release", lease.job_id)
        case PinBlocks(lease=lease):
            return ("pin", lease.job_id)
    raise AssertionError(f"{command} was not to be expected")


def _same_request(request: Any, expected: Any) -> None:
    assert request.state.name == expected.state
    assert request.deadline_s == expected.deadline_s
    assert (request.question_id is not None) == expected.asking
    assert request.open_leases == expected.leases
    assert request.load_barred == expected.load_barred
    assert request.epoch == expected.epoch


def _same_lease(lease: Any, expected: Any) -> None:
    if expected.request is None:
        assert lease.request is None
    else:
        assert lease.request.state.name == expected.request.state
    assert lease.deadline_s == expected.deadline_s
    assert (lease.state is not LeaseState.SUBMITTED) == expected.sent
    assert (lease.failed, lease.pinned) == (expected.failed, expected.pinned)
    assert lease.broken == expected.broken
    assert {rank for rank in range(3) if lease.ranks_left & 1 << rank} == expected.left
    assert (lease.begin_tokens, lease.end_tokens) == (expected.begin, expected.end)
    assert (lease.epoch, lease.block_count) == (expected.epoch, expected.blocks)


# ---------------------------------------------------------------- what is done to both


@st.composite
def moves(draw: st.DrawFn) -> tuple[Any, ...]:
    name = draw(st.sampled_from(NAMES))
    blocks = st.integers(0, 5)
    kind = draw(st.sampled_from(["next"] * 6 + ["work"] * 4 + list(MOVES)))
    return kind, name, draw(blocks), draw(blocks), draw(st.booleans()), draw(st.integers(0, 9))


def ask(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    local, end, stored = low * UNIT + (number == 9), high * UNIT + number % UNIT, PROMPT - number
    kind = LookupSkipped if flag else LookupAsked
    event = kind(name, None, local, end, stored)
    pair.give(event, lambda: pair.model.ask(name, local, end, stored, flag))


def answer(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    question_id = pair.question_of(name)
    if question_id is None or number == 0:
        pair.give(LookupAnswered(name, -1, high * UNIT), lambda: None)
    else:
        event = LookupAnswered(name, question_id, high * UNIT)
        pair.give(event, lambda: pair.model.answer(name, high * UNIT))


def load(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    count = max(0, high - low) + (number == 0)
    event = LoadAdmitted(name, low * UNIT, high * UNIT, _parts(count), flag)
    pair.give(event, lambda: pair.model.load(name, low * UNIT, high * UNIT, count, flag))


def compute(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    computed = low * UNIT + number % UNIT
    pair.give(ComputeAdmitted(name, computed), lambda: pair.model.compute(name, computed))


def fill(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    begin = pair.core.requests[name].planned_tokens if name in pair.core.requests else 0
    begin += UNIT * (number == 0)
    end = begin + low * UNIT
    event = BlocksFilled(name, begin, end, _parts(low))
    pair.give(event, lambda: pair.model.fill(name, begin, end, low))


def defer(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    begin = pair.core.requests[name].planned_tokens if name in pair.core.requests else 0
    begin += UNIT * (number == 0)
    end = begin + low * UNIT
    pair.give(BlocksDeferred(name, begin, end), lambda: pair.model.defer(name, begin, end))


def near_reuse(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    blocks = low % 4
    event = ReuseNeared(_parts(blocks) if blocks else ())
    pair.give(event, lambda: pair.model.near_reuse(blocks))


def offer_boundary(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    boundary, blocks = high * UNIT, low % 4
    event = BoundaryOffered(name, boundary, boundary, _parts(blocks) if blocks else ())
    pair.give(event, lambda: pair.model.offer_boundary(name, boundary, blocks))


def preempt(pair: Pair, name: str, *_: Any) -> None:
    pair.give(Preempted(name), lambda: pair.model.preempt(name))


def finish(pair: Pair, name: str, *_: Any) -> None:
    pair.give(RequestFinished(name), lambda: pair.model.finish(name))


def reset(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    epoch = None if number < 5 else pair.core.epoch + number - 5
    pair.give(EpochRaised(flag, epoch), lambda: pair.model.reset(flag, epoch))


def wait(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    pair.wait((0.5, 1.0, 5.0, 10.0, 100.0)[number % 5])


def send(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    job_id = _job(pair, number)
    pair.give(LeaseSent(job_id), lambda: pair.model.send(job_id))


def rank_answers(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    job_id, rank = _job(pair, number), low % 4
    event = RankSucceeded(job_id, rank) if flag else RankFailed(job_id, rank)
    pair.give(event, lambda: pair.model.rank_answers(job_id, rank, flag))


def rank_stalls(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    job_id, rank = _job(pair, number), low % 4
    pair.give(RankStalled(job_id, rank), lambda: pair.model.rank_stalls(job_id, rank))


def rank_arrives(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    job_id, rank = _job(pair, number), low % 4
    pair.give(RankArriving(job_id, rank), lambda: pair.model.rank_arrives(job_id, rank))


MOVES = {
    move.__name__: move
    for move in (
        ask,
        answer,
        load,
        compute,
        fill,
        defer,
        near_reuse,
        offer_boundary,
        preempt,
        finish,
        reset,
        wait,
        send,
        rank_answers,
        rank_stalls,
        rank_arrives,
    )
}


def what_comes_next(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    """Does what an engine would do next with a request."""
    request = pair.core.requests.get(name)
    if request is None or request.state is RequestState.PREEMPTED:
        ask(pair, name, low % 2, 5, not pair.core.may_lookup(name), 0)
    elif request.question_id is not None and number:
        answer(pair, name, low, high or 5, flag, 1)
    elif request.state is RequestState.LOOKUP:
        begin, end = request.local_tokens // UNIT, (request.hit_end_tokens or 0) // UNIT
        act = load if end > begin else compute
        act(pair, name, begin, end, flag, 4)
    elif request.state is RequestState.LOADING:
        index = sorted(pair.core.leases).index(request.load_job_id)
        hear_of_load(pair, name, low, high, flag, index)
    elif request.state is RequestState.RUNNING and number == 0:
        offer_boundary(pair, name, low, high, flag, number)
    elif request.state is RequestState.RUNNING and number < 3:
        defer(pair, name, 1 + low % 2, high, flag, 1)
    elif request.state is RequestState.RUNNING:
        fill(pair, name, 1 + low % 2, high, flag, 1)


def hear_of_load(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    """Hands over the load of that number, or lets a rank say something of it."""
    low %= pair.core.limits.rank_count
    if pair.core.leases[_job(pair, number)].state is LeaseState.SUBMITTED:
        send(pair, name, low, high, flag, number)
    elif high < 4:
        rank_arrives(pair, name, low, high, flag, number)
    else:
        (rank_stalls if high == 4 else rank_answers)(pair, name, low, high, flag, number)


def work(pair: Pair, name: str, low: int, high: int, flag: bool, number: int) -> None:
    """Lets every rank answer for one transfer."""
    job_id = _job(pair, number)
    if job_id in pair.core.leases and pair.core.leases[job_id].state is LeaseState.SUBMITTED:
        send(pair, name, low, high, flag, number)
    for rank in range(pair.core.limits.rank_count):
        if rank == high and number == 9:
            rank_stalls(pair, name, rank, high, flag, number)
        elif flag and number > 4:
            rank_arrives(pair, name, rank, high, flag, number)
        else:
            rank_answers(pair, name, rank, high, flag or rank != high, number)


def _job(pair: Pair, number: int) -> int:
    job_ids = sorted(pair.core.leases)
    return job_ids[number % len(job_ids)] if job_ids else 10**6


def _parts(count: int) -> tuple[LeasePart, ...]:
    return (LeasePart(0, (b"",) * count, tuple(range(count))),)


@given(
    st.lists(moves(), min_size=40, max_size=120),
    st.integers(1, 3),
    st.sampled_from([2, 100]),
    st.sampled_from([3, 100]),
    st.sampled_from([0, 2, 100]),
)
def test_the_core_agrees_with_a_plain_model(
    steps: list[tuple[Any, ...]],
    rank_count: int,
    leases_max: int,
    blocks_max: int,
    lazy_max: int,
) -> None:
    pair = Pair(
        CoreLimits(
            unit_tokens=UNIT,
            rank_count=rank_count,
            lookup_timeout_s=1.0,
            answer_lifetime_s=5.0,
            transfer_timeout_s=10.0,
            idle_timeout_s=100.0,
            open_leases_max=leases_max,
            pinned_blocks_max=blocks_max,
            lazy_blocks_max=lazy_max,
        )
    )
    every_move = MOVES | {"next": what_comes_next, "work": work}
    for kind, *arguments in steps:
        every_move[kind](pair, *arguments)

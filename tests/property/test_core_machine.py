# SPDX-License-Identifier: Apache-2.0
"""Events in any order never break the core's invariants, and every request ends.

A small engine does legal and illegal things to a core; after each of them the invariants of
``umbp.fsm.table`` are checked. At the end the faults stop: every rank answers, every request ends,
and nothing may be left.
"""

import math
from collections import Counter

import pytest
from core_engine import PROMPT, PROMPT_BLOCKS, UNIT, Engine, parts_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from umbp.fsm import (
    BlocksDeferred,
    BlocksFilled,
    BoundaryOffered,
    ComputeAdmitted,
    Core,
    CoreLimits,
    EpochRaised,
    LeaseKind,
    LeaseSent,
    LeaseState,
    LoadAdmitted,
    LookupAnswered,
    LookupAsked,
    LookupSkipped,
    Preempted,
    RankArriving,
    RankFailed,
    RankStalled,
    RankSucceeded,
    RequestContext,
    RequestFinished,
    RequestState,
    ReuseNeared,
)

pytestmark = pytest.mark.pure

names = st.sampled_from(["a", "b", "c"])
blocks = st.integers(0, PROMPT_BLOCKS)
hits = st.integers(1, PROMPT_BLOCKS)
booleans = st.booleans()
numbers = st.integers(0, 1000)


ENDED = (RequestState.STORING, RequestState.FINISHED)


class CoreMachine(RuleBasedStateMachine):
    """Rules are events; what they are about is chosen among what there is."""

    @initialize(
        rank_count=st.integers(1, 3),
        open_leases_max=st.sampled_from([2, 100]),
        pinned_blocks_max=st.sampled_from([3, 100]),
        lazy_blocks_max=st.sampled_from([0, 2, 100]),
        block_count=st.sampled_from([12, 40]),
    )
    def start(self, block_count: int, **limits: int) -> None:
        self.core = Core(
            CoreLimits(
                unit_tokens=UNIT,
                lookup_timeout_s=1.0,
                answer_lifetime_s=5.0,
                transfer_timeout_s=10.0,
                idle_timeout_s=100.0,
                quarantine_s=5.0,
                **limits,
            )
        )
        self.engine = Engine(self.core, block_count)
        self.counted = self.core.counters.as_dict()
        self.lives: dict[int, tuple[RequestContext, int, RequestState]] = {}

    # ------------------------------------------------------------ what usually comes next

    @rule(
        name=names,
        local=blocks,
        hit=hits,
        synchronous=booleans,
        steps=st.integers(1, 7),
        first=st.sampled_from(("nothing", "arrives", "stalls", "fails", "succeeds")),
    )
    def go_on(
        self, name: str, local: int, hit: int, synchronous: bool, steps: int, first: str = "nothing"
    ) -> None:
        """Does what an engine would do next with a request."""
        for _ in range(steps):
            request = self.core.requests.get(name)
            if request is None or request.state is RequestState.PREEMPTED:
                may_hit = self.core.may_lookup(name)
                self.ask(name, local % hit, PROMPT, not may_hit, PROMPT_BLOCKS)
            elif request.state is RequestState.LOADING:
                if first != "nothing":
                    self.hear_of_load(request.load_job_id, first)
                return
            elif request.state is RequestState.RUNNING:
                self.fill(name, request.planned_tokens + UNIT)
            elif request.question_id is not None:
                self.answer(name, hit)
            elif (request.hit_end_tokens or 0) > request.local_tokens:
                self.load(name, 0, 0, True, synchronous)
            else:
                self.compute(name, request.local_tokens)

    @rule(local=blocks, hit=hits, steps=st.integers(3, 7))
    def compute_together(self, local: int, hit: int, steps: int) -> None:
        """Lets every request compute and store as far as it comes without a load."""
        for name in ("a", "b", "c"):
            request = self.core.requests.get(name)
            if request is None or request.state is RequestState.LOOKUP:
                self.ask(name, local % hit, 0, True, PROMPT_BLOCKS)
            self.go_on(name, local, hit, False, steps)

    @rule(number=numbers, failing=st.none() | st.integers(0, 2), attempted=booleans)
    def work(self, number: int, failing: int | None, attempted: bool) -> None:
        """Lets every rank answer for one transfer."""
        job_ids = list(self.core.leases)
        if job_ids:
            job_id = job_ids[number % len(job_ids)]
            if self.core.leases[job_id].state is LeaseState.SUBMITTED:
                self.send_job(job_id)
            for rank in range(self.core.limits.rank_count):
                self.give_answer(job_id, rank, rank != failing, attempted, (b"x",))

    def hear_of_load(self, job_id: int, first: str) -> None:
        """Lets every rank but the first say that its part of a load cannot fail."""
        lease = self.core.leases[job_id]
        if lease.state is LeaseState.SUBMITTED:
            self.send_job(job_id)
        if first in ("fails", "succeeds"):
            self.give_answer(job_id, 0, first == "succeeds", True, (b"x",))
        elif not lease.synchronous:
            kind = RankArriving if first == "arrives" else RankStalled
            assert self.engine.give(kind(job_id, 0))
        for rank in range(1, self.core.limits.rank_count):
            assert self.engine.give(RankArriving(job_id, rank)) != lease.synchronous

    # ------------------------------------------------------------ the engine

    @rule(name=names, local=blocks, end=st.integers(0, PROMPT), skip=booleans, stored=blocks)
    def ask(self, name: str, local: int, end: int, skip: bool, stored: int) -> None:
        kind = LookupSkipped if skip else LookupAsked
        before = self.core.requests.get(name)
        admitted = before is not None and before.state in (
            RequestState.LOADING,
            RequestState.RUNNING,
        )
        taken = self.engine.give(kind(name, object(), local * UNIT, end, stored * UNIT))
        if taken and admitted:
            self.engine.tables.pop(name, None)

    @rule(name=names, hit=blocks)
    def answer(self, name: str, hit: int) -> None:
        for question_id, request in list(self.engine.questions.items()):
            if request.request_id == name:
                del self.engine.questions[question_id]
                assert self.engine.give(LookupAnswered(name, question_id, hit * UNIT, object()))

    @rule(name=names, number=numbers)
    def answer_nothing(self, name: str, number: int) -> None:
        if number not in self.engine.questions:
            assert self.engine.give(LookupAnswered(name, number, PROMPT))

    @rule(name=names, begin=blocks, end=blocks, fitting=booleans, synchronous=booleans)
    def load(self, name: str, begin: int, end: int, fitting: bool, synchronous: bool) -> None:
        request = self.core.requests.get(name)
        table = self.engine.take_blocks()
        if table is None or name in self.engine.tables:
            return
        span = (begin * UNIT, end * UNIT)
        if fitting and request is not None and request.hit_end_tokens is not None:
            span = (request.local_tokens, request.hit_end_tokens)
        parts = self.engine.parts(table, *span)
        self.engine.tables[name] = table
        if not self.engine.give(LoadAdmitted(name, *span, parts, synchronous)):
            del self.engine.tables[name]

    @rule(name=names, computed=st.integers(0, PROMPT))
    def compute(self, name: str, computed: int) -> None:
        had = name in self.engine.tables
        table = self.engine.tables.get(name) or self.engine.take_blocks()
        if table is None:
            return
        self.engine.tables[name] = table
        if not self.engine.give(ComputeAdmitted(name, computed)) and not had:
            del self.engine.tables[name]

    @rule(name=names, computed=st.integers(0, PROMPT + UNIT))
    def fill(self, name: str, computed: int) -> None:
        request = self.core.filling.get(name)
        span = self.core.storable(request, computed) if request is not None else None
        if span is not None:
            parts = self.engine.parts(self.engine.tables[name], *span)
            assert self.engine.give(BlocksFilled(name, *span, parts))

    @rule(name=names, computed=st.integers(0, PROMPT + UNIT))
    def defer(self, name: str, computed: int) -> None:
        request = self.core.filling.get(name)
        span = self.core.filled_span(request, computed) if request is not None else None
        if span is not None:
            assert self.engine.give(BlocksDeferred(name, *span)) == self.core.may_defer()

    @rule(count=blocks)
    def near_reuse(self, count: int) -> None:
        table = self.engine.take_blocks()
        if table is not None:
            may_store = count > 0 and self.core.decline_lazy(count) is None
            assert self.engine.give(ReuseNeared(parts_of(table[:count]))) == may_store

    @rule(name=names, begin=blocks, end=blocks)
    def fill_anything(self, name: str, begin: int, end: int) -> None:
        table = self.engine.tables.get(name, list(range(PROMPT_BLOCKS)))
        span = (begin * UNIT, end * UNIT)
        self.engine.give(BlocksFilled(name, *span, self.engine.parts(table, *span)))

    @rule(name=names, boundary=blocks, count=blocks)
    def offer_boundary(self, name: str, boundary: int, count: int) -> None:
        request, table = self.core.requests.get(name), self.engine.tables.get(name)
        if request is not None and table is not None:
            may_store = self.core.may_store_boundary(request, count)
            event = BoundaryOffered(name, boundary * UNIT, boundary * UNIT, parts_of(table[:count]))
            assert self.engine.give(event) == (may_store and count > 0)

    @rule(name=names)
    def preempt(self, name: str) -> None:
        if self.engine.give(Preempted(name)):
            self.engine.tables.pop(name, None)

    @rule(name=names)
    def finish(self, name: str) -> None:
        self.engine.give(RequestFinished(name))
        self.engine.tables.pop(name, None)

    @precondition(lambda self: len(self.core.requests) > 1)
    @rule(kept=booleans, further=st.none() | st.integers(0, 3))
    def reset(self, kept: bool, further: int | None) -> None:
        epoch = None if further is None else self.core.epoch + further
        assert self.engine.give(EpochRaised(kept, epoch)) == (further != 0)

    @rule(seconds=st.sampled_from([0.25, 1.0, 1.0, 10.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.engine.wait(seconds)

    # ------------------------------------------------------------ the workers

    @rule(number=numbers)
    def send(self, number: int) -> None:
        job_ids = list(self.engine.transfers)
        if job_ids:
            self.send_job(job_ids[-1 - number % len(job_ids)])

    def send_job(self, job_id: int) -> None:
        if self.engine.give(LeaseSent(job_id)):
            self.engine.transfers[job_id].sent = True

    @rule(
        number=numbers,
        rank=st.integers(0, 3),
        succeeded=booleans,
        attempted=booleans,
        block_hash=st.sampled_from([b"x", b"y"]),
    )
    def rank_answers(
        self, number: int, rank: int, succeeded: bool, attempted: bool, block_hash: bytes
    ) -> None:
        job_ids = list(self.engine.transfers)
        if job_ids:
            job_id = job_ids[-1 - number % len(job_ids)]
            self.give_answer(job_id, rank, succeeded, attempted, (block_hash,))

    @rule(number=numbers, rank=st.integers(0, 3))
    def rank_stalls(self, number: int, rank: int) -> None:
        self.report(RankStalled, number, rank)

    @rule(number=numbers, rank=st.integers(0, 3))
    def rank_arrives(self, number: int, rank: int) -> None:
        self.report(RankArriving, number, rank)

    def report(self, kind: type[RankStalled] | type[RankArriving], number: int, rank: int) -> None:
        job_ids = list(self.engine.transfers)
        if job_ids:
            lease = self.engine.transfers[job_ids[-1 - number % len(job_ids)]].lease
            silent = lease.ranks_left & ~(lease.ranks_stalled | lease.ranks_arriving)
            may_report = lease.kind is LeaseKind.LOAD and not lease.synchronous
            taken = self.engine.give(kind(lease.job_id, rank))
            is_open = lease.job_id in self.core.leases
            is_sent = lease.state is not LeaseState.SUBMITTED
            is_waited_for = is_open and silent >> rank & 1
            assert taken == (not is_waited_for or (may_report and is_sent))

    def give_answer(
        self, job_id: int, rank: int, succeeded: bool, attempted: bool, hashes: tuple[bytes, ...]
    ) -> None:
        transfer = self.engine.transfers[job_id]
        if transfer.sent and rank < self.core.limits.rank_count:
            transfer.answered.add(rank)
        if succeeded:
            taken = self.engine.give(RankSucceeded(job_id, rank))
        else:
            taken = self.engine.give(RankFailed(job_id, rank, attempted, hashes))
        # Only an answer for what was never sent is illegal; a late or double one is counted.
        assert taken or transfer.lease.state is LeaseState.SUBMITTED

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_engine_keeps_blocks_of_running_requests_only(self) -> None:
        self.engine.note_contexts()
        for name in list(self.engine.tables):
            request = self.core.requests.get(name)
            # A load that failed, or a request that was forgotten: the engine takes the blocks back.
            if request is None or request.state in (RequestState.LOOKUP, RequestState.PREEMPTED):
                del self.engine.tables[name]
        owned = Counter(block for table in self.engine.tables.values() for block in table)
        assert all(count == 1 for count in owned.values())

    @invariant()
    def pins_are_those_of_open_stores_and_held_loads(self) -> None:
        pinning = [
            one
            for one in self.core.leases.values()
            if one.kind is LeaseKind.STORE or one.ranks_stalled or one.ranks_arriving
        ]
        assert {lease.job_id for lease in pinning} == self.engine.pinning
        assert self.core.pinned_blocks == sum(self.engine.pins().values())
        stores = [one for one in pinning if one.kind is LeaseKind.STORE]
        if stores and len(stores) == len(pinning):
            # What a load holds is held whatever the limit.
            assert self.core.pinned_blocks <= self.core.limits.pinned_blocks_max

    @invariant()
    def open_leases_are_counted(self) -> None:
        open_by_context = Counter(id(lease.request) for lease in self.core.leases.values())
        for context in self.engine.contexts:
            assert context.open_leases == open_by_context[id(context)]
        loads = [one for one in self.core.leases.values() if one.kind is LeaseKind.LOAD]
        assert self.core.sync_loads == sum(lease.synchronous for lease in loads)
        still_open = {
            job_id
            for job_id, transfer in self.engine.transfers.items()
            if self.engine.is_open(transfer)
        }
        assert set(self.core.leases) == still_open

    @invariant()
    def states_and_facts_agree(self) -> None:
        for context in self.engine.contexts:
            alive = self.core.requests.get(context.request_id) is context
            state = context.state
            assert alive == (state not in ENDED)
            assert (context.open_leases > 0) or state is not RequestState.STORING
            assert (context.open_leases == 0) or state is not RequestState.FINISHED
            assert (context.question_id is None) or state is RequestState.LOOKUP
            assert (context.hit is None) or context.hit_end_tokens is not None
            assert (context.hit is None) or state in (RequestState.LOOKUP, *ENDED)
            if state is RequestState.LOADING:
                load = self.core.leases[context.load_job_id]
                assert (load.request, load.generation) == (context, context.generation)
                # Of some rank the engine does not know yet how its part ends.
                assert load.ranks_left & ~(load.ranks_stalled | load.ranks_arriving)
        assert self.engine.questions == {
            request.question_id: request
            for request in self.core.requests.values()
            if request.question_id is not None
        }

    @invariant()
    def filling_is_what_can_still_store(self) -> None:
        def can_store(request: RequestContext) -> bool:
            load = self.core.leases.get(request.load_job_id or 0)
            admitted = request.state is RequestState.RUNNING or (
                request.state is RequestState.LOADING and load is not None and load.synchronous
            )
            return (
                admitted
                and not request.store_barred
                and request.epoch == self.core.epoch
                and request.planned_tokens + UNIT <= request.store_end_tokens
            )

        assert self.core.filling == {
            name: request for name, request in self.core.requests.items() if can_store(request)
        }

    @invariant()
    def lives_are_unique_and_never_plan_backwards(self) -> None:
        for context in self.core.requests.values():
            of, planned, state = self.lives.get(context.generation, (context, 0, context.state))
            assert of is context
            failed = (state, context.state) == (RequestState.LOADING, RequestState.LOOKUP)
            assert context.planned_tokens >= planned or failed
            assert context.planned_tokens % UNIT == 0
            now = (context, context.planned_tokens, context.state)
            self.lives[context.generation] = now
        assert not set(self.lives) & set(self.engine.transfers)

    @invariant()
    def counters_only_rise(self) -> None:
        counted = self.core.counters.as_dict()
        assert all(counted[name] >= before for name, before in self.counted.items())
        self.counted = counted

    @invariant()
    def everything_that_lasts_has_a_deadline(self) -> None:
        queued = {(wake_s, id(subject)) for wake_s, _, subject in self.core.deadlines._entries}
        lasting = [one for one in self.engine.contexts if one.state is not RequestState.FINISHED]
        for subject in [*lasting, *self.core.leases.values()]:
            assert subject.deadline_s < math.inf
            assert subject.wake_s <= subject.deadline_s
            assert (subject.wake_s, id(subject)) in queued

    # ------------------------------------------------------------ the end

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in list(self.core.requests):
            self.finish(name)
        # Every rank answers once for everything that it was sent; that must be enough.
        for job_id in list(self.core.leases):
            if self.core.leases[job_id].state is LeaseState.SUBMITTED:
                self.send_job(job_id)
            for rank in range(self.core.limits.rank_count):
                self.give_answer(job_id, rank, True, True, ())
        assert not self.core.leases
        assert not self.core.requests
        assert not self.core.filling
        assert not self.engine.questions
        assert not self.engine.pins()
        assert self.core.pinned_blocks == self.core.sync_loads == 0
        assert all(one.state is RequestState.FINISHED for one in self.engine.contexts)
        self.engine.wait(1e6)
        assert len(self.core.deadlines) == 0


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(stateful_step_count=50)

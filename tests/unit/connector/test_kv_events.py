# SPDX-License-Identifier: Apache-2.0
"""KV events: what is announced, when, and when it is withdrawn."""

import random
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from umbp.backends.base import JobResult, TransferJob, TransferOutcome
from umbp.connector.config import wants_kv_events
from umbp.connector.kv_events import EventGroup, KVEvents
from umbp.connector.metadata import RankAnswer, RankEvictions, StepMetadata, WorkerMetadata
from umbp.connector.worker import WorkerSide
from umbp.fsm import LeaseKind, LeasePart, RequestContext, TransferLease
from umbp.keys import PREFIX_BYTES

from .bench import Bench
from .fakes import UNIT_TOKENS, FakeRequest, block_hash, step_output
from .worker_bench import KEYS, FakeWorkerPool, plan, step

GROUPS = {0: EventGroup(UNIT_TOKENS, "full_attention", None)}


@attrs.define(eq=False)
class EventRequest(FakeRequest):
    """vLLM's ``Request``, with what events tell of it."""

    all_token_ids: list[int] = attrs.field(factory=lambda: list(range(1000)))
    lora_request: Any = None
    mm_features: list[Any] = attrs.field(factory=list)
    cache_salt: str | None = None
    prompt_embeds: Any = None


class Watched:
    """A scheduler's side and the events that are made of it."""

    def __init__(self, *, ranks: int = 1, announced_max: int = 1000) -> None:
        self.bench = Bench(ranks=ranks)
        self.events = KVEvents(self.bench.core, GROUPS, announced_max=announced_max)

    def begin(self, name: str, blocks: int, first: int = 0, **fields: Any) -> int:
        """Computes a prompt whose block hashes begin at ``first``; returns the storing job."""
        request = EventRequest.of(name, blocks * UNIT_TOKENS + 1)
        request.block_hashes = [block_hash(first + at) for at in range(blocks)]
        for field, value in fields.items():
            setattr(request, field, value)
        table = self.bench.admit(request)
        (store,) = self.bench.run_prompt(request, table).stores
        self.bench.side.finished(request, ([],))
        self.bench.pool.free(table)
        return store.job_id

    def hear(
        self, *answers: RankAnswer, evictions: Iterable[tuple[int, Sequence[int]]] = ()
    ) -> list[Any]:
        """Takes a step's metadata, as the connector does, and returns the events."""
        gone = [RankEvictions(rank, self.keys(rank, hashes)) for rank, hashes in evictions]
        metadata = WorkerMetadata(list(answers), gone)
        leases = self.events.leases_of(metadata)
        self.bench.side.take_worker_answers(metadata)
        self.events.follow(metadata, leases)
        return self.events.take()

    def keys(self, rank: int, hashes: Sequence[int], epoch: int | None = None) -> list[bytes]:
        return KEYS.keys(
            [block_hash(one) for one in hashes],
            epoch=self.bench.core.epoch if epoch is None else epoch,
            group_index=0,
            rank=rank,
        )

    def store(self, name: str, blocks: int, first: int = 0) -> list[Any]:
        """Computes and stores a prompt on all ranks; returns the events."""
        job_id = self.begin(name, blocks, first)
        answers = [RankAnswer(job_id, rank, True) for rank in range(self.bench.ranks)]
        return self.hear(*answers)


def external(first: int, *others: int) -> list[Any]:
    """Block hashes as vLLM tells them to others."""
    return [maybe_convert_block_hash(block_hash(one)) for one in (first, *others)]


def hashes(events: Iterable[Any]) -> list[list[int]]:
    """Block hashes by their number, whichever way they are told."""
    number = {external(one)[0]: one for one in range(20)}
    return [[number[one] for one in event.block_hashes] for event in events]


# ---------------------------------------------------------------- stored


def test_a_block_is_announced_when_every_rank_has_stored_it() -> None:
    watched = Watched(ranks=2)
    job_id = watched.begin("a", 2)
    assert watched.hear(RankAnswer(job_id, 1, True)) == []
    (event,) = watched.hear(RankAnswer(job_id, 0, True))
    assert event == BlockStored(
        block_hashes=external(0, 1),
        parent_block_hash=None,
        token_ids=list(range(2 * UNIT_TOKENS)),
        block_size=UNIT_TOKENS,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        extra_keys=[None, None],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def test_a_store_that_failed_is_not_announced() -> None:
    watched = Watched(ranks=2)
    job_id = watched.begin("a", 2)
    assert watched.hear(RankAnswer(job_id, 0, True), RankAnswer(job_id, 1, False)) == []
    assert watched.events.announced_count == 0


def test_a_block_is_announced_once_and_its_neighbours_keep_their_parents() -> None:
    watched = Watched()
    watched.store("a", 1, first=1)
    first, second = watched.store("b", 3)
    assert hashes([first, second]) == [[0], [2]]
    assert (first.parent_block_hash, second.parent_block_hash) == (None, external(1)[0])
    assert second.token_ids == list(range(2 * UNIT_TOKENS, 3 * UNIT_TOKENS))


def test_a_later_step_of_a_prompt_goes_on_where_the_one_before_ended() -> None:
    watched = Watched()
    request = EventRequest.of("a", 4 * UNIT_TOKENS)
    table = watched.bench.admit(request)
    events = []
    for _ in range(2):
        scheduled = {"a": 2 * UNIT_TOKENS}
        (store,) = watched.bench.side.step_metadata(step_output(scheduled, {"a": table})).stores
        request.num_computed_tokens += 2 * UNIT_TOKENS
        events += watched.hear(RankAnswer(store.job_id, 0, True))
    assert hashes(events) == [[0, 1], [2, 3]]
    assert [event.parent_block_hash for event in events] == [None, external(1)[0]]
    assert [event.token_ids[0] for event in events] == [0, 2 * UNIT_TOKENS]


def test_a_boundary_inside_a_block_is_told_as_the_unit_before_it() -> None:
    # As vLLM does: a block of four units, and the state after the fifth and the sixth of them.
    bench = Bench()
    events = KVEvents(bench.core, {0: EventGroup(4 * UNIT_TOKENS, "full_attention", 128)})
    request = EventRequest.of("a", 7 * UNIT_TOKENS)
    context = RequestContext("a", request, 1, 0)
    part = LeasePart(0, [block_hash(at) for at in (3, 4, 5)], [1, 2, 3])
    end = 6 * UNIT_TOKENS
    lease = TransferLease(9, context, 1, LeaseKind.STORE, 0, (part,), 3, end, end, 0)
    events.follow(WorkerMetadata([]), [lease])
    block, boundaries = events.take()
    assert hashes([block, boundaries]) == [[3], [4, 5]]
    assert (block.block_size, boundaries.block_size) == (4 * UNIT_TOKENS, UNIT_TOKENS)
    assert (block.parent_block_hash, boundaries.parent_block_hash) == (None, external(3)[0])
    assert block.token_ids == list(range(4 * UNIT_TOKENS))
    assert boundaries.token_ids == list(range(4 * UNIT_TOKENS, 6 * UNIT_TOKENS))
    assert block.kv_cache_spec_sliding_window == 128


def test_what_a_hash_covers_beside_tokens_is_told() -> None:
    watched = Watched()
    lora = LoRARequest("poet", 7, "/poets/one")
    job_id = watched.begin("a", 2, lora_request=lora, cache_salt="s")
    (event,) = watched.hear(RankAnswer(job_id, 0, True))
    assert (event.lora_id, event.lora_name) == (7, "poet")
    assert event.extra_keys == [("poet", "s"), ("poet",)]


# ---------------------------------------------------------------- removed


def test_an_eviction_on_any_rank_withdraws_a_block_once() -> None:
    watched = Watched(ranks=2)
    watched.store("a", 3)
    (event,) = watched.hear(evictions=[(1, [1])])
    assert event == BlockRemoved(block_hashes=external(1), medium="CPU", group_idx=0)
    assert watched.hear(evictions=[(0, [1])]) == []
    (event,) = watched.store("b", 3)
    assert hashes([event]) == [[1]]


def test_evictions_of_other_epochs_and_of_strangers_are_ignored() -> None:
    watched = Watched()
    watched.store("a", 2)
    old = RankEvictions(0, watched.keys(0, [0], epoch=9))
    watched.events.follow(WorkerMetadata([], [old]), [])
    assert watched.hear(evictions=[(0, [77])]) == []
    assert watched.events.announced_count == 2


def test_stored_and_gone_in_one_step_is_announced_and_withdrawn() -> None:
    watched = Watched()
    job_id = watched.begin("a", 2)
    stored, removed = watched.hear(RankAnswer(job_id, 0, True), evictions=[(0, [0])])
    assert (hashes([stored]), hashes([removed])) == ([[0, 1]], [[0]])


def test_gone_on_one_rank_before_another_has_stored_it_is_not_announced() -> None:
    watched = Watched(ranks=2)
    job_id = watched.begin("a", 2)
    assert watched.hear(RankAnswer(job_id, 0, True), evictions=[(0, [0])]) == []
    (event,) = watched.hear(RankAnswer(job_id, 1, True))
    assert hashes([event]) == [[1]]


def test_gone_on_a_rank_that_has_still_to_store_it_is_announced() -> None:
    watched = Watched(ranks=2)
    job_id = watched.begin("a", 2)
    assert watched.hear(RankAnswer(job_id, 1, True), evictions=[(0, [0])]) == []
    (event,) = watched.hear(RankAnswer(job_id, 0, True))
    assert hashes([event]) == [[0, 1]]


def test_what_cannot_be_loaded_is_withdrawn() -> None:
    watched = Watched()
    watched.store("a", 3)
    watched.bench.store_hashes(3)
    request = EventRequest.of("b", 3 * UNIT_TOKENS + 1)
    watched.bench.admit(request)
    (load,) = watched.bench.idle_step().loads
    (event,) = watched.hear(RankAnswer(load.job_id, 0, False, failed_hashes=[block_hash(2)]))
    assert hashes([event]) == [[2]]


def test_a_reset_withdraws_everything_and_ends_what_is_on_its_way() -> None:
    watched = Watched()
    watched.store("a", 2)
    job_id = watched.begin("b", 4)
    watched.bench.side.reset()
    (event,) = watched.events.take()
    assert (type(event), hashes([event])) == (BlockRemoved, [[0, 1]])
    assert watched.hear(RankAnswer(job_id, 0, True)) == []
    (event,) = watched.store("c", 2)
    assert hashes([event]) == [[0, 1]]


def test_beyond_the_limit_the_oldest_are_withdrawn_and_counted() -> None:
    watched = Watched(announced_max=3)
    watched.store("a", 2)
    stored, removed = watched.store("b", 2, first=10)
    assert (hashes([stored]), hashes([removed])) == ([[10, 11]], [[0]])
    events = watched.events
    assert (events.stored_count, events.removed_count, events.forgotten_count) == (4, 1, 1)
    assert events.announced_count == 3


@pytest.mark.parametrize(("enabled", "wanted"), [(True, True), (False, False), (None, False)])
def test_nothing_is_made_where_vllm_publishes_nothing(enabled: bool | None, wanted: bool) -> None:
    events = None if enabled is None else types.SimpleNamespace(enable_kv_cache_events=enabled)
    assert wants_kv_events(types.SimpleNamespace(kv_events_config=events)) is wanted


# ---------------------------------------------------------------- what a worker tells


class _EvictingPool(FakeWorkerPool):
    """A pool that says what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[bytes] = []
        self.present: set[bytes] = set()

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [key in self.present for key in keys]

    def take_evictions(self) -> list[bytes]:
        evicted, self.evicted = self.evicted, []
        return evicted


def worker(*, tell: bool = True) -> tuple[WorkerSide, _EvictingPool]:
    pool = _EvictingPool()
    side = WorkerSide(pool, keyspace=KEYS, rank=0, timeout_ms=5000, tell_evictions=tell)
    return side, pool


def told(side: WorkerSide) -> list[list[bytes]]:
    metadata = side.take_answers()
    return [one.keys for one in metadata.evictions] if metadata is not None else []


def test_a_worker_tells_what_is_gone_and_not_what_is_back() -> None:
    side, pool = worker()
    pool.evicted, pool.present = [b"a", b"b"], {b"b"}
    assert told(side) == [[b"a"]]
    assert told(side) == []


def test_a_worker_that_nobody_asked_leaves_evictions_alone() -> None:
    side, pool = worker(tell=False)
    pool.evicted = [b"a"]
    assert side.take_answers() is None
    assert pool.evicted == [b"a"]


@pytest.mark.parametrize("is_back", [False, True])
def test_what_is_being_stored_is_told_after_the_answer(is_back: bool) -> None:
    side, pool = worker()
    step(side, StepMetadata(0, stores=[plan(1)]))
    key, _ = pool.jobs[1].parts[0].keys
    pool.evicted = [key]
    assert told(side) == []
    if is_back:
        pool.present = {key}
    pool.end(1, TransferOutcome.DONE)
    side.poll()
    metadata = side.take_answers()
    assert metadata is not None
    assert [answer.job_id for answer in metadata.answers] == [1]
    assert [one.keys for one in metadata.evictions] == ([] if is_back else [[key]])


# ---------------------------------------------------------------- against true content


class _SmallPool(_EvictingPool):
    """A pool that stores at any time and has room for a few objects."""

    def __init__(self, random_: random.Random, capacity: int) -> None:
        super().__init__()
        self._random = random_
        self._capacity = capacity
        self._order: deque[bytes] = deque()
        self._open: list[TransferJob] = []

    def store(self, job: TransferJob) -> None:
        self._open.append(job)

    def run(self) -> None:
        """Ends some of the jobs; called between any two things that a worker does."""
        while self._open and self._random.random() < 0.5:
            job = self._open.pop(0)
            for key in job.parts[0].keys:
                if key not in self.present:
                    self._admit(key)
            self.results.append(JobResult(job.job_id, TransferOutcome.DONE))

    def _admit(self, key: bytes) -> None:
        if len(self._order) >= self._capacity:
            victim = self._order.popleft()
            self.present.discard(victim)
            self.evicted.append(victim)
        self._order.append(key)
        self.present.add(key)

    def poll(self) -> list[JobResult]:
        self.run()
        results = super().poll()
        self.run()
        return results

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self.run()
        return super().contains(keys)

    def take_evictions(self) -> list[bytes]:
        self.run()
        return super().take_evictions()


@pytest.mark.parametrize("seed", range(40))
def test_at_rest_a_subscriber_knows_exactly_what_all_ranks_hold(seed: int) -> None:
    random_ = random.Random(seed)
    watched = Watched(ranks=2)
    pools = [_SmallPool(random_, random_.randrange(6, 12)) for _ in range(2)]
    sides = [
        WorkerSide(pool, keyspace=KEYS, rank=rank, timeout_ms=5000, tell_evictions=True)
        for rank, pool in enumerate(pools)
    ]
    index: set[Any] = set()
    bench = watched.bench
    for number in range(60):
        if number < 40 and random_.random() < 0.6:
            request = EventRequest.of(f"r{number}", random_.randrange(1, 4) * UNIT_TOKENS + 1)
            first = random_.randrange(10)
            request.block_hashes = [
                block_hash(first + at) for at in range(len(request.block_hashes))
            ]
            table = bench.admit(request)
            metadata = bench.run_prompt(request, table)
            bench.side.finished(request, ([],))
            bench.pool.free(table)
        else:
            metadata = bench.side.step_metadata(step_output({}))
        for side in sides:
            step_of(side, metadata)
        answers = [one for side in sides if (one := side.take_answers()) is not None]
        for one in answers[1:]:
            answers[0] = answers[0].aggregate(one)
        if answers:
            leases = watched.events.leases_of(answers[0])
            bench.side.take_worker_answers(answers[0])
            watched.events.follow(answers[0], leases)
        for event in watched.events.take():
            known = set(event.block_hashes)
            index = index | known if isinstance(event, BlockStored) else index - known
    assert not bench.core.leases
    held = [
        {maybe_convert_block_hash(key[PREFIX_BYTES:]) for key in pool.present} for pool in pools
    ]
    assert index == held[0] & held[1]


def step_of(side: WorkerSide, metadata: StepMetadata) -> None:
    side.take_metadata(metadata)
    side.start_loads()
    side.start_stores()
    side.poll()

# SPDX-License-Identifier: Apache-2.0
"""Preemption, and blocks that are used again while a store still reads them."""

import itertools
import time
from collections import deque
from collections.abc import Callable

import pytest
from connector.bench import Bench
from connector.fakes import FakeRequest, block_hash, step_output
from scheduler_rig import MakeRig

from umbp.backends.base import TransferJob, TransferOutcome, TransferPart, WorkerSite
from umbp.backends.memory import MemoryOptions, MemoryPool
from umbp.connector.metadata import PlanPart, StepMetadata, TransferPlan, pack_ids, unpack_ids
from umbp.connector.worker import WorkerSide
from umbp.errors import UsageError
from umbp.keys import KeySpace
from umbp.testing.kv_memory import GroupShape, HostKVMemory, KVShape, make_kv_memory

PATIENCE_S = 30.0
KEYS = KeySpace(bytes(16))


def open_pool() -> tuple[MemoryPool, HostKVMemory]:
    """A pool of the memory backend, and KV memory of 8 blocks."""
    site = WorkerSite(0, 1, "cpu", None, "cases", int(PATIENCE_S * 1000))
    pool = MemoryPool(MemoryOptions(capacity_bytes=1 << 16), site)
    kv = make_kv_memory(KVShape.LBH, [GroupShape(1, (512,))], block_count=8)
    pool.register(kv.memory)
    return pool, kv


def test_case_1_1_store_keeps_its_blocks_after_preemption(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=9, max_pinned_percent=100)
    rig.pool.holds_stores = True
    rig.add("old", range(100, 115), outputs=40)
    rig.step()
    victim = rig.add("victim", range(200, 264), outputs=40)
    while victim.num_preemptions == 0:
        rig.step()
    # Its stores have not begun, and the engine needs every block that it can have.
    pinned = {
        block for job in rig.pool.stores for part in job.parts for block in part.block_ids.tolist()
    }
    for _ in range(20):
        rig.step()
        assert not pinned & set(rig.scheduler.kv_cache_manager.get_block_ids("old")[0])
    rig.pool.release()
    rig.run()
    rig.forget_local()
    # What was stored is what the victim had computed.
    before = rig.side.counters()["tokens_restored"]
    rig.serve("again", [*range(200, 264), 1])
    assert rig.side.counters()["tokens_restored"] - before == 64
    rig.check_at_rest()


@pytest.mark.parametrize("store_first", [False, True])
def test_case_1_3_old_store_and_new_load_of_one_request_go_together(store_first: bool) -> None:
    bench = Bench()
    request = FakeRequest.of("a", 52)
    table = bench.admit(request)
    (store,) = bench.run_prompt(request, table).stores
    bench.pool.free(table)
    request.num_computed_tokens = 0
    request.status.name = "PREEMPTED"
    bench.idle_step(preempted=["a"])
    # The store is not answered; another request has stored the same blocks.
    bench.store_hashes(3)
    table = bench.admit(request)
    (load,) = bench.idle_step().loads
    assert load.request_id == store.request_id
    for job in (store, load) if store_first else (load, store):
        bench.answer(job.job_id)
    assert bench.core.counters.tokens_restored == 48
    assert bench.core.pinned_blocks == 0
    assert not bench.side.has_open_transfers()


def test_case_1_5_block_is_stored_when_this_life_has_filled_it() -> None:
    bench = Bench()
    request = FakeRequest.of("a", 50)
    first = bench.admit(request)
    for _ in range(2):
        bench.side.step_metadata(step_output({"a": 16}, {"a": first}))
        request.num_computed_tokens += 16
    request.num_computed_tokens = 0
    request.status.name = "PREEMPTED"
    bench.idle_step(preempted=["a"])
    bench.pool.free(first)
    second = bench.admit(request)
    (plan,) = bench.side.step_metadata(step_output({"a": 40}, {"a": second})).stores
    assert plan.parts[0].hashes == block_hash(0) + block_hash(1)
    request.num_computed_tokens = 40
    # Tokens 41 to 47 fill nothing, the 48th does.
    assert bench.side.step_metadata(step_output({"a": 7}, {"a": second})).stores == []
    request.num_computed_tokens = 47
    (plan,) = bench.side.step_metadata(step_output({"a": 3}, {"a": second})).stores
    assert plan.parts[0].hashes == block_hash(2)
    assert unpack_ids(plan.parts[0].block_ids).tolist() == [second[2]]


def test_case_1_5_exception_in_a_transfer_fails_that_transfer_only() -> None:
    pool, kv = open_pool()
    content = kv.fill(0, 1, seed=1)
    deadline_s = time.monotonic() + PATIENCE_S
    # A torn job: two keys, one block.
    jobs = [
        TransferJob(1, (TransferPart(0, (b"a", b"b"), [1]),), deadline_s),
        TransferJob(2, (TransferPart(0, (b"c",), [1]),), deadline_s),
    ]
    outcomes = {}
    for job in jobs:
        try:
            pool.store(job)
        except UsageError:
            outcomes[job.job_id] = TransferOutcome.FAILED
    while len(outcomes) < 2:
        outcomes.update({result.job_id: result.outcome for result in pool.poll()})
        assert time.monotonic() < deadline_s
    assert outcomes == {1: TransferOutcome.FAILED, 2: TransferOutcome.DONE}
    assert pool.contains([b"a", b"b", b"c"]) == [False, False, True]
    assert kv.read(0, 1) == content
    pool.close(PATIENCE_S)


class Device:
    """A device that runs behind: what is submitted to it is written when it is waited for."""

    def __init__(self, kv: HostKVMemory) -> None:
        self.kv = kv
        self.submitted: deque[tuple[int, bytes]] = deque()

    def submit(self, block_id: int, content: bytes) -> None:
        self.submitted.append((block_id, content))

    def make_fence(self) -> Callable[[], None]:
        count = len(self.submitted)

        def wait() -> None:
            for block_id, content in list(itertools.islice(self.submitted, count)):
                self.kv.write(0, block_id, content)
            for _ in range(count):
                self.submitted.popleft()

        return wait


def test_case_1_7_load_waits_for_steps_that_may_still_write_its_blocks() -> None:
    pool, kv = open_pool()
    device = Device(kv)
    side = WorkerSide(
        pool, keyspace=KEYS, rank=0, timeout_ms=int(PATIENCE_S * 1000), make_fence=device.make_fence
    )

    def transfer(job_id: int, block_id: int, **kinds: bool) -> None:
        part = PlanPart(0, 32, block_hash(0), pack_ids([block_id]))
        plan = TransferPlan(job_id, "a", 0, [part])
        side.take_metadata(StepMetadata(0, **{kind: [plan] for kind in kinds}))
        side.start_loads()
        side.start_stores()
        give_up_s = time.monotonic() + PATIENCE_S
        while side.take_answers() is None:
            side.poll()
            assert time.monotonic() < give_up_s

    wanted, stale = bytes([1]) * 512, bytes([2]) * 512
    device.submit(3, wanted)
    # The step that fills block 3 has not run on the device when its store is handed over.
    transfer(1, 3, stores=True)
    device.submit(5, stale)
    # Block 5 was freed and given to a load, and the step of its former owner has not run either.
    transfer(2, 5, loads=True)
    device.make_fence()()
    assert kv.read(0, 5) == wanted
    side.close(PATIENCE_S)


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_case_1_7_loads_with_two_steps_in_flight_read_what_was_stored(
    make_rig: MakeRig, role: str
) -> None:
    rig = make_rig(role=role, asynchronous=True, blocks=14)
    for number in range(4):
        rig.serve(f"first {number}", range(100 * number, 100 * number + 50))
    rig.forget_local()
    for number in range(16):
        # Blocks change hands all the time, and every other prompt is known.
        rig.add(f"r{number}", range(50 * number, 50 * number + 50), outputs=1 + number % 4)
    written: deque[set[int]] = deque()
    while rig.scheduler.has_requests() or rig.queue:
        while len(rig.queue) < 2 and rig.scheduler.has_requests():
            loads = rig.schedule().kv_connector_metadata.loads
            loaded = {
                block
                for plan in loads
                for part in plan.parts
                for block in unpack_ids(part.block_ids).tolist()
            }
            assert not any(loaded & blocks for blocks in written)
            rows = rig.queue[-1][1].values()
            written.append({table[at // 16] for _, *span, table, _ in rows for at in range(*span)})
        rig.execute()
        written.popleft()
    rig.check_at_rest()
    assert rig.pool.stores
    assert bool(rig.pool.loads) == (role == "kv_both")


def test_case_1_9_slow_stores_do_not_make_the_engine_preempt_in_circles(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(blocks=9, asynchronous=True, max_pinned_percent=100)
    rig.pool.holds_stores = True
    # Seven of eight blocks are pinned by a request that has ended.
    rig.add("past", range(112))
    while not rig.requests["past"].is_finished():
        rig.step()
    assert rig.side.counters()["blocks_pinned"] == 7
    waiting = rig.add("waiting", range(200, 250), outputs=4)
    assert rig.scheduler.connector.has_pending_block_frees()
    for _ in range(30):
        rig.step()
    assert waiting.num_preemptions <= 1
    rig.pool.release()
    assert rig.run() < 30
    assert len(waiting.output_token_ids) == 4
    assert waiting.num_preemptions <= 1
    rig.check_at_rest()


def test_case_1_9_pins_are_bounded(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=21, max_pinned_percent=25)
    rig.pool.holds_stores = True
    rig.add("a", range(160), outputs=2)
    for _ in range(12):
        rig.step()
        assert rig.side.counters()["blocks_pinned"] <= 5
    assert rig.side.counters()["declined_pin_limit"] > 0
    rig.pool.release()
    rig.run()
    rig.check_at_rest()

# SPDX-License-Identifier: Apache-2.0
"""Stores, pins, ends of lives and resets on the scheduler's side, one rule a test."""

from umbp.connector.metadata import RankAnswer, WorkerMetadata, unpack_ids

from .bench import Bench
from .fakes import FakeRequest, block_hash, step_output

# ---------------------------------------------------------------- stores and pins


def test_prompt_blocks_are_stored_in_the_step_that_fills_them() -> None:
    bench = Bench()
    request = FakeRequest.of("a", 40)
    table = bench.admit(request)
    (plan,) = bench.run_prompt(request, table).stores
    assert unpack_ids(plan.parts[0].block_ids).tolist() == table[:2]
    assert bench.run_prompt(request, table).stores == []


def test_chunks_store_each_block_once_when_it_is_full() -> None:
    """Case 4.2: a block fills in a step that allocates none."""
    bench = Bench()
    request = FakeRequest.of("a", 52)
    table = bench.admit(request)
    stored = []
    for chunk in (17, 17, 18):
        output = step_output({"a": chunk}, {"a": table})
        for plan in bench.side.step_metadata(output).stores:
            stored.append(unpack_ids(plan.parts[0].block_ids).tolist())
        request.num_computed_tokens += chunk
    assert stored == [[table[0]], [table[1]], [table[2]]]


def test_half_filled_block_of_a_new_life_is_not_stored() -> None:
    """Case 1.5: what the first life had computed says nothing about the second."""
    bench = Bench()
    request = FakeRequest.of("a", 50)
    table = bench.admit(request)
    bench.side.step_metadata(step_output({"a": 32}, {"a": table}))
    request.num_computed_tokens = 0
    request.status.name = "PREEMPTED"
    bench.idle_step(preempted=["a"])
    bench.pool.free(table)
    bench.lookups.stored.clear()
    table = bench.admit(request)
    (plan,) = bench.side.step_metadata(step_output({"a": 40}, {"a": table})).stores
    assert unpack_ids(plan.parts[0].block_ids).tolist() == table[:2]


def test_source_blocks_stay_pinned_until_every_rank_has_answered() -> None:
    """Case 1.1: preemption frees the request's blocks, not the store's."""
    bench = Bench(ranks=2)
    request = FakeRequest.of("a", 40)
    table = bench.admit(request)
    (plan,) = bench.run_prompt(request, table).stores
    bench.pool.free(table)
    bench.side.finished(request, (table,))
    assert [bench.pool.blocks[b].ref_cnt for b in table] == [1, 1, 0]
    bench.side.take_worker_answers(WorkerMetadata([RankAnswer(plan.job_id, 1, True)]))
    assert bench.pool.blocks[table[0]].ref_cnt == 1
    assert bench.side.has_open_transfers()
    bench.side.take_worker_answers(WorkerMetadata([RankAnswer(plan.job_id, 0, True)]))
    assert [bench.pool.blocks[b].ref_cnt for b in table] == [0, 0, 0]
    assert not bench.side.has_open_transfers()
    # The tail of a prefix goes to the free queue before its head.
    assert bench.pool.freed[-2:] == [table[1], table[0]]


def test_late_and_duplicate_answers_release_nothing_twice() -> None:
    bench = Bench(ranks=2)
    request = FakeRequest.of("a", 40)
    table = bench.admit(request)
    (plan,) = bench.run_prompt(request, table).stores
    for _ in range(3):
        bench.side.take_worker_answers(WorkerMetadata([RankAnswer(plan.job_id, 1, True)]))
    assert bench.side.has_open_transfers()
    bench.answer(plan.job_id)
    bench.answer(plan.job_id)
    assert [bench.pool.blocks[b].ref_cnt for b in table] == [1, 1, 1]
    assert bench.core.counters.answers_unknown == 5


def test_stalled_store_is_cancelled_and_keeps_its_pins() -> None:
    bench = Bench()
    request = FakeRequest.of("a", 40)
    table = bench.admit(request)
    (plan,) = bench.run_prompt(request, table).stores
    bench.side.finished(request, (table,))
    bench.pool.free(table)
    assert bench.side.may_free_blocks_soon()
    bench.now_s = 31.0
    assert bench.idle_step().cancels == [plan.job_id]
    assert bench.pool.blocks[table[0]].ref_cnt == 1
    # Waiting for it would be waiting for ever, so preemption must go on.
    assert not bench.side.may_free_blocks_soon()
    bench.answer(plan.job_id, succeeded=False, attempted=False)
    assert bench.pool.blocks[table[0]].ref_cnt == 0


def test_pins_are_bounded_and_put_off_stores_catch_up() -> None:
    """Case 1.9: pins must not take the pool from the engine."""
    bench = Bench(pinned_blocks_max=2)
    first, second = FakeRequest.of("a", 32), FakeRequest.of("b", 32)
    tables = {"a": bench.admit(first), "b": bench.admit(second)}
    output = step_output({"a": 32, "b": 32}, tables)
    (plan,) = bench.side.step_metadata(output).stores
    assert bench.core.counters.declined_pin_limit == 1
    bench.answer(plan.job_id)
    second.num_computed_tokens = 32
    (late,) = bench.side.step_metadata(step_output({"b": 1}, tables)).stores
    assert late.request_id == "b"


def test_decoded_blocks_are_stored_only_when_asked_for() -> None:
    for save_decode_cache, expected in ((False, 1), (True, 2)):
        bench = Bench(save_decode_cache=save_decode_cache)
        request = FakeRequest.of("a", 20)
        table = bench.admit(request)
        stores = len(bench.run_prompt(request, table).stores)
        request.num_tokens, request.num_computed_tokens = 34, 33
        request.block_hashes.append(block_hash(1))
        stores += len(bench.side.step_metadata(step_output({"a": 1}, {"a": table})).stores)
        assert stores == expected


def test_a_boundary_that_the_state_has_left_is_not_stored() -> None:
    """vLLM 0.31 offers a prompt's end again, one step late, under asynchronous scheduling.

    Models with checkpoints have it inside a step's tokens.
    """
    for computed, expected in ((8, 0), (16, 1), (20, 1), (32, 1), (33, 0)):
        bench = Bench()
        request = FakeRequest.of("a", 40)
        table = bench.admit(request)
        bench.run_prompt(request, table)
        request.num_computed_tokens = computed
        output = step_output({"a": 16}, {"a": table}, offers={"a": [(0, 9, 32)]})
        assert len(bench.side.step_metadata(output).stores) == expected, computed


def test_tokens_that_are_only_expected_are_not_stored() -> None:
    """Case 4.6: asynchronous scheduling counts tokens that may still be thrown away."""
    bench = Bench(save_decode_cache=True)
    request = FakeRequest.of("a", 20)
    table = bench.admit(request)
    bench.run_prompt(request, table)
    request.block_hashes.append(block_hash(1))
    request.num_computed_tokens, request.num_output_placeholders = 33, 2
    assert bench.side.step_metadata(step_output({"a": 1}, {"a": table})).stores == []


def test_last_decoded_block_is_stored_when_the_request_ends() -> None:
    bench = Bench(save_decode_cache=True)
    request = FakeRequest.of("a", 20)
    table = bench.admit(request)
    bench.run_prompt(request, table)
    request.num_tokens, request.num_computed_tokens = 33, 32
    request.block_hashes.append(block_hash(1))
    bench.side.finished(request, (table,))
    bench.pool.free(table)
    assert bench.pool.blocks[table[1]].ref_cnt == 1
    plans = bench.idle_step().stores
    assert [unpack_ids(plan.parts[0].block_ids).tolist() for plan in plans] == [[table[1]]]


def test_a_store_that_was_given_up_before_it_was_handed_over_never_begins() -> None:
    """Its blocks are not pinned any more, and may be somebody else's."""
    bench = Bench(save_decode_cache=True)
    request = FakeRequest.of("a", 20)
    table = bench.admit(request)
    (plan,) = bench.run_prompt(request, table).stores
    bench.answer(plan.job_id)
    request.num_tokens, request.num_computed_tokens = 33, 32
    request.block_hashes.append(block_hash(1))
    bench.side.finished(request, (table,))
    bench.pool.free(table)
    bench.now_s = 31.0
    assert bench.idle_step().stores == []
    assert bench.pool.blocks[table[1]].ref_cnt == 0
    assert not bench.side.has_open_transfers()


def test_a_load_that_was_given_up_before_it_was_handed_over_is_refused() -> None:
    bench = Bench()
    bench.store_hashes(3)
    bench.admit(FakeRequest.of("a", 100))
    bench.now_s = 31.0
    metadata = bench.idle_step()
    assert metadata.loads == []
    assert [plan.request_id for plan in metadata.refused] == ["a"]


def test_restored_blocks_are_not_stored_again() -> None:
    bench = Bench()
    bench.store_hashes(2)
    request = FakeRequest.of("a", 52)
    table = bench.admit(request)
    (load,) = bench.idle_step().loads
    bench.answer(load.job_id)
    request.num_computed_tokens = 32
    bench.side.admitted(request, (table,), 0)
    (store,) = bench.run_prompt(request, table).stores
    assert unpack_ids(store.parts[0].block_ids).tolist() == [table[2]]


def test_nothing_is_stored_while_a_synchronous_load_may_still_fail() -> None:
    bench = Bench(load_async=False)
    bench.store_hashes(2)
    request, other = FakeRequest.of("a", 52), FakeRequest.of("b", 20)
    other.block_hashes[0] = b"another prompt's".ljust(32)
    assert bench.side.matched_tokens(request, 0) == (32, False)
    tables = {"a": bench.pool.take(4), "b": bench.pool.take(2)}
    bench.side.admitted(request, (tables["a"],), 32)
    assert bench.side.matched_tokens(other, 0) == (0, False)
    bench.side.admitted(other, (tables["b"],), 0)
    metadata = bench.side.step_metadata(step_output({"a": 20, "b": 20}, tables))
    assert len(metadata.loads) == 1
    assert metadata.stores == []
    bench.answer(metadata.loads[0].job_id, succeeded=False)
    request.num_computed_tokens, other.num_computed_tokens = 0, 20
    assert bench.side.step_metadata(step_output({"a": 52, "b": 1}, tables)).stores == []


def test_a_request_does_not_share_blocks_that_the_same_step_loads() -> None:
    """Case 3.3: vLLM lets such a request read them, also when the load has failed."""
    bench = Bench(load_async=False)
    bench.store_hashes(2)
    request, sharer = FakeRequest.of("a", 52), FakeRequest.of("b", 100)
    table = bench.admit(request)
    assert bench.side.matched_tokens(sharer, 32) == (None, False)
    (load,) = bench.side.step_metadata(step_output({"a": 20}, {"a": table})).loads
    bench.answer(load.job_id)
    assert bench.side.matched_tokens(sharer, 32) == (0, False)


def test_a_failed_synchronous_load_leaves_the_engines_own_cache() -> None:
    bench = Bench(load_async=False, ranks=2)
    bench.store_hashes(2)
    request = FakeRequest.of("a", 52)
    table = bench.admit(request)
    # The engine caches the blocks of the load, the one computed from them, and a copy of one.
    bench.pool.cached = {block_hash(index): [table[index]] for index in range(3)}
    bench.pool.cached[block_hash(1)].append(40)
    bench.pool.cached[block_hash(7)] = [41]
    (load,) = bench.side.step_metadata(step_output({"a": 20}, {"a": table})).loads
    bench.answer(load.job_id, succeeded=False)
    cached = {hash_: blocks for hash_, blocks in bench.pool.cached.items() if blocks}
    assert cached == {block_hash(7): [41]}


# ---------------------------------------------------------------- ends of lives


def test_stale_notice_of_preemption_does_not_end_the_new_life() -> None:
    """A reset preempts between steps; the request is admitted again before the notice comes."""
    bench = Bench()
    request = FakeRequest.of("a", 40)
    table = bench.admit(request)
    bench.run_prompt(request, table)
    bench.pool.free(table)
    request.num_computed_tokens = 0
    request.status.name = "PREEMPTED"
    table = bench.admit(request)
    request.status.name = "RUNNING"
    output = step_output({"a": 40}, {"a": table}, preempted=["a"])
    assert len(bench.side.step_metadata(output).stores) == 1


def test_old_store_and_new_load_of_one_request_go_together() -> None:
    """Case 1.3: preempted with a store in flight, admitted again on a hit."""
    bench = Bench()
    request = FakeRequest.of("a", 52)
    table = bench.admit(request)
    (store,) = bench.run_prompt(request, table).stores
    bench.pool.free(table)
    request.num_computed_tokens = 0
    request.status.name = "PREEMPTED"
    bench.idle_step(preempted=["a"])
    bench.store_hashes(3)
    table = bench.admit(request)
    (load,) = bench.idle_step().loads
    bench.answer(load.job_id)
    bench.answer(store.job_id)
    assert not bench.side.has_open_transfers()
    assert bench.core.pinned_blocks == 0


def test_aborted_load_keeps_the_engine_stepping_until_it_is_answered() -> None:
    bench = Bench()
    bench.store_hashes(3)
    request = FakeRequest.of("a", 100)
    table = bench.admit(request)
    (load,) = bench.idle_step().loads
    request.num_computed_tokens = 48
    bench.side.finished(request, (table,))
    assert bench.side.has_open_transfers()
    bench.answer(load.job_id)
    assert not bench.side.has_open_transfers()


def test_engine_may_end_requests_that_were_never_seen() -> None:
    bench = Bench()
    bench.side.finished(FakeRequest.of("never seen", 10), ([],))
    assert bench.side.counters()["events_refused"] == 0


# ---------------------------------------------------------------- reset


def test_reset_changes_the_epoch_of_keys_and_drops_answers() -> None:
    bench = Bench()
    bench.store_hashes(3)
    request = FakeRequest.of("a", 100)
    bench.side.matched_tokens(request, 0)
    assert bench.side.reset() is True
    bench.lookups.stored.clear()
    assert bench.side.matched_tokens(request, 0) == (0, False)
    assert bench.idle_step().epoch == 1


def test_life_from_before_a_reset_stores_nothing_more() -> None:
    bench = Bench()
    request = FakeRequest.of("a", 64)
    table = bench.admit(request)
    bench.side.step_metadata(step_output({"a": 32}, {"a": table}))
    request.num_computed_tokens = 32
    bench.side.reset()
    assert bench.run_prompt(request, table).stores == []
    assert bench.core.counters.declined_stale_epoch == 1


def test_local_hit_after_a_reset_that_vllm_could_not_follow_is_not_stored() -> None:
    """vLLM keeps its own cache while blocks are in use: KV from before may be shared through it."""
    bench = Bench()
    holder = FakeRequest.of("holder", 64)
    table = bench.admit(holder)
    bench.side.reset()
    sharer = FakeRequest.of("sharer", 64)
    shared = bench.admit(sharer, local_tokens=32)
    assert bench.run_prompt(sharer, shared).stores == []
    bench.pool.free(table)
    bench.pool.free(shared)
    bench.side.reset()
    clean = FakeRequest.of("clean", 64)
    own = bench.admit(clean, local_tokens=32)
    assert len(bench.run_prompt(clean, own).stores) == 1


def test_local_hit_inside_a_block_after_such_a_reset_is_not_stored() -> None:
    """When vLLM asks, it leaves out what its own hit has of a block; it says so on admission."""
    bench = Bench()
    bench.admit(FakeRequest.of("holder", 64))
    bench.side.reset()
    sharer = FakeRequest.of("sharer", 64)
    shared = bench.admit(sharer, local_tokens=0)
    sharer.num_computed_tokens = 8
    assert bench.run_prompt(sharer, shared).stores == []


def test_close_closes_the_lookup_client() -> None:
    bench = Bench()
    bench.side.close()
    assert bench.lookups.is_closed


def test_consumer_without_producer_role_stores_nothing() -> None:
    bench = Bench(store=False)
    request = FakeRequest.of("a", 64)
    table = bench.admit(request)
    assert bench.run_prompt(request, table).stores == []

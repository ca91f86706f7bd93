# SPDX-License-Identifier: Apache-2.0
"""Chunked prefill, partial blocks, and synchronous against asynchronous scheduling."""

import pytest
from connector.bench import Bench
from connector.fakes import FakeRequest, block_hash, step_output
from connector.group_bench import full, make_manager, state
from scheduler_rig import MakeRig

from umbp.connector.groups import GroupRules
from umbp.connector.metadata import unpack_ids

PROMPT = list(range(100, 150))


def test_case_4_2_block_that_fills_in_a_step_without_new_blocks_is_stored(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(step_tokens=17, save_decode_cache=True)
    request = rig.add("a", range(20), outputs=30)
    new_blocks = []
    while not request.is_finished():
        output = rig.step()
        cached = output.scheduled_cached_reqs
        ids = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        if output.kv_connector_metadata.stores:
            new_blocks.append(ids.get("a"))
    rig.run()
    # 49 tokens have been computed: three blocks, two of which filled long after they were given.
    assert len(rig.pool.stored_keys) == 3
    assert None in new_blocks
    rig.forget_local()
    rig.serve("b", [*request.all_token_ids[:49], 1])
    assert rig.side.counters()["tokens_restored"] == 48
    rig.check_at_rest()


def test_case_4_4_hit_inside_a_block_ends_where_it_ends() -> None:
    """A hit of one and a half attention blocks of 32 tokens."""
    rules = GroupRules(make_manager(state(32), full(32), block=32, unit=16))
    bench = Bench(rules=rules)
    bench.store_hashes(3)
    request = FakeRequest.of("a", 70)
    assert bench.side.matched_tokens(request, 0) == (48, True)
    states, blocks = bench.pool.take(3), bench.pool.take(3)
    table = ([0, states[1], states[2]], blocks)
    bench.side.admitted(request, table, 48)
    (load,) = bench.idle_step().loads
    wanted = {part.group_index: unpack_ids(part.block_ids).tolist() for part in load.parts}
    # The state at 48, and both attention blocks that hold tokens before it.
    assert wanted == {0: [states[1]], 1: blocks[:2]}
    hashes = {part.group_index: part.hashes for part in load.parts}
    assert hashes == {0: block_hash(2), 1: block_hash(1) + block_hash(2)}
    bench.answer(load.job_id)
    assert bench.core.counters.tokens_restored == 48
    # The block is not taken for full: it is stored when this life has filled it.
    request.num_computed_tokens = 48
    bench.side.admitted(request, table, 0)
    (store,) = bench.side.step_metadata(step_output({"a": 22}, {"a": table})).stores
    (part,) = store.parts
    assert (part.group_index, unpack_ids(part.block_ids).tolist()) == (1, [blocks[1]])
    assert part.hashes == block_hash(3)


@pytest.mark.parametrize("save_decode_cache", [False, True])
def test_case_4_6_asynchronous_scheduling_stores_what_synchronous_scheduling_stores(
    make_rig: MakeRig, save_decode_cache: bool
) -> None:
    stored, outputs = [], []
    for asynchronous in (False, True):
        rig = make_rig(
            asynchronous=asynchronous, step_tokens=40, save_decode_cache=save_decode_cache
        )
        requests = [
            rig.add(f"r{number}", range(100 * number, 100 * number + 45), outputs=30 + number)
            for number in range(4)
        ]
        while rig.scheduler.has_requests() or rig.queue:
            while len(rig.queue) < 1 + asynchronous and rig.scheduler.has_requests():
                rig.schedule()
            rig.execute()
        outputs.append([list(request.output_token_ids) for request in requests])
        # Keys differ by namespace and rank only in what stands before the hash.
        stored.append({key[-32:] for key in rig.pool.stored_keys})
        rig.check_at_rest()
    assert outputs[0] == outputs[1]
    assert stored[0] == stored[1]
    # 45 tokens of prompt, and at least 74 with those that were decoded.
    assert len(stored[0]) == (16 if save_decode_cache else 8)


def test_case_4_6_token_that_is_only_expected_fills_no_block() -> None:
    bench = Bench(save_decode_cache=True)
    request = FakeRequest.of("a", 20)
    table = bench.admit(request)
    bench.run_prompt(request, table)
    # Two of these 33 tokens may be thrown away again, and 31 fill one block.
    request.block_hashes.append(block_hash(1))
    request.num_computed_tokens, request.num_output_placeholders = 33, 2
    assert bench.side.step_metadata(step_output({"a": 1}, {"a": table})).stores == []
    # Not skipped for ever: they are stored once they are certain.
    request.num_computed_tokens, request.num_output_placeholders = 34, 2
    (store,) = bench.side.step_metadata(step_output({"a": 1}, {"a": table})).stores
    assert unpack_ids(store.parts[0].block_ids).tolist() == [table[1]]


def test_case_4_8_request_for_prompt_logprobs_is_computed_and_stored(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.serve("warm", PROMPT)
    rig.forget_local()
    lookups = rig.side.counters()["lookups"]
    rig.serve("logprobs", PROMPT, prompt_logprobs=1)
    assert rig.side.counters()["lookups"] == lookups
    assert rig.pool.loads == []
    rig.serve("cold logprobs", range(300, 350), prompt_logprobs=1)
    rig.forget_local()
    rig.serve("served from those", [*range(300, 350), 1])
    assert rig.side.counters()["tokens_restored"] == 48
    rig.check_at_rest()

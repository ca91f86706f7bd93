# SPDX-License-Identifier: Apache-2.0
"""Hybrid models: recurrent state, sliding windows, boundaries inside a block."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector.bench import Bench
from connector.fakes import FakeRequest, block_hash, step_output
from connector.group_bench import HASHES, config_of, find, full, make_manager, state, window
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from umbp.backends.arena import Arena
from umbp.backends.object_index import ObjectIndex
from umbp.connector.groups import GroupRules, GroupsHit
from umbp.connector.metadata import unpack_ids
from umbp.connector.setup import load_async

# An engine that could load within a step.
IN_STEP = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))


def blocks_by_group(plan: Any) -> dict[int, list[int]]:
    return {part.group_index: unpack_ids(part.block_ids).tolist() for part in plan.parts}


@pytest.mark.parametrize(
    "specs",
    [[state()], [state(), full()], [full(), window(32)], [full(), full()]],
    ids=["state", "state and attention", "window", "two groups"],
)
def test_case_5_1_models_with_state_or_several_groups_load_between_steps(
    specs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    chosen = load_async(False, IN_STEP, config_of(*specs))
    assert chosen
    (record,) = caplog.records
    assert "load_async" in record.getMessage()
    bench = Bench(load_async=chosen)
    bench.store_hashes(2)
    # vLLM keeps such a request out of every step until its load is reported.
    assert bench.side.matched_tokens(FakeRequest.of("a", 40), 0) == (32, True)
    bench.admit(FakeRequest.of("b", 40))
    assert [plan.synchronous for plan in bench.idle_step().loads] == [False]


def test_case_5_1_one_group_of_attention_may_load_within_the_step() -> None:
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    assert not load_async(False, IN_STEP, config_of(full()))
    assert not load_async(False, IN_STEP, config_of(latent))


def test_case_5_3_state_is_stored_from_what_vllm_hands_off_and_never_by_place() -> None:
    bench = Bench(rules=GroupRules(make_manager(state(32), full(32), block=32, unit=16)))
    request = FakeRequest.of("a", 100)
    assert bench.side.matched_tokens(request, 0) == (0, False)
    states, blocks = bench.pool.take(4), bench.pool.take(4)
    table = ([states[0], states[1], states[2]], blocks)
    bench.side.admitted(request, table, 0)
    (store,) = bench.side.step_metadata(step_output({"a": 32}, {"a": table})).stores
    assert blocks_by_group(store) == {1: [blocks[0]]}
    request.num_computed_tokens = 32
    # The scratch blocks have moved: place 0 holds another state now.
    moved = ([states[3], states[0], states[1]], blocks)
    offers = {"a": [(0, states[2], 32)]}
    output = step_output({"a": 34}, {"a": moved}, offers=offers)
    by_place, handed_off = bench.side.step_metadata(output).stores
    assert blocks_by_group(by_place) == {1: [blocks[1]]}
    assert blocks_by_group(handed_off) == {0: [states[2]]}
    assert handed_off.parts[0].hashes == block_hash(1)
    assert bench.pool.blocks[states[2]].ref_cnt == 2
    assert [bench.pool.blocks[block].ref_cnt for block in states[:2]] == [1, 1]


def test_case_5_5_hit_rests_on_objects_that_exist_for_that_end() -> None:
    """Attention objects end at 32 and 64, states at 32 and 48."""
    rules = GroupRules(make_manager(full(32), state(32), block=32, unit=16))

    def stored(attention: list[int], states: list[int]) -> dict[int, set[bytes]]:
        ends = {0: attention, 1: states}
        return {index: {HASHES[end // 16 - 1] for end in ends[index]} for index in ends}

    # A request that ends before 64 has no hash for that object, and none at 48 is stored.
    hit = find(rules, HASHES[:3], stored([32, 64], [32, 48]), limit=63)
    assert hit.end_tokens == 32
    # One that goes on to 64 may resume at 48: the object at 64 holds all its tokens. Then that
    # object is what is loaded, and not one at 48, which does not exist.
    hit = find(rules, HASHES[:5], stored([32, 64], [32, 48]), limit=79)
    assert isinstance(hit, GroupsHit)
    for group, blocks in hit.blocks.items():
        existing = stored([32, 64], [32, 48])[group.index]
        assert set(blocks.values()) <= existing
    # With another continuation after 48 the hash at 64 is another, and 32 is right.
    other = [*HASHES[:3], block_hash(900), block_hash(901)]
    assert find(rules, other, stored([32, 64], [32, 48]), limit=79).end_tokens == 32


def test_case_5_7_store_that_was_put_off_takes_the_blocks_that_are_there_now() -> None:
    rules = GroupRules(make_manager(full(), window(32), block=16, unit=16))
    bench = Bench(rules=rules, blocks=96, pinned_blocks_max=20)
    blocker, request = FakeRequest.of("b", 160), FakeRequest.of("a", 112)
    request.block_hashes = [block_hash(100 + index) for index in range(7)]
    tables = {}
    for one, count in ((blocker, 10), (request, 7)):
        assert bench.side.matched_tokens(one, 0) == (0, False)
        tables[one.request_id] = (bench.pool.take(count), bench.pool.take(count))
        bench.side.admitted(one, tables[one.request_id], 0)
    (pinning,) = bench.side.step_metadata(step_output({"b": 160}, tables)).stores
    # No pin is left for the first store of the other one.
    assert bench.side.step_metadata(step_output({"a": 32}, tables)).stores == []
    request.num_computed_tokens = 32
    # Four blocks later its window has moved on, and somebody else has the blocks that left it.
    whole, windowed = tables["a"]
    gone = windowed[:4]
    bench.pool.free(gone)
    assert set(bench.pool.take(4)) == set(gone)
    bench.answer(pinning.job_id)
    table = (whole, [0, 0, 0, 0, *windowed[4:]])
    output = step_output({"a": 80}, {"a": table})
    (late,) = bench.side.step_metadata(output).stores
    assert blocks_by_group(late) == {0: whole, 1: windowed[4:]}
    assert late.parts[1].hashes == b"".join(request.block_hashes[4:])
    assert [bench.pool.blocks[block].ref_cnt for block in gone] == [1] * 4
    bench.answer(late.job_id)
    assert bench.core.pinned_blocks == 0


def test_case_5_7_block_that_is_offered_twice_is_pinned_once() -> None:
    bench = Bench(rules=GroupRules(make_manager(state(32), full(32), block=32, unit=16)))
    request = FakeRequest.of("a", 100)
    assert bench.side.matched_tokens(request, 0) == (0, False)
    states, blocks = bench.pool.take(4), bench.pool.take(4)
    bench.side.admitted(request, (states, blocks), 0)
    offers = {"a": [(0, states[0], 32), (0, states[0], 32)]}
    output = step_output({"a": 32}, {"a": (states, blocks)}, offers=offers)
    plans = bench.side.step_metadata(output).stores
    assert [blocks_by_group(plan) for plan in plans] == [{1: [blocks[0]]}, {0: [states[0]]}]
    assert bench.pool.blocks[states[0]].ref_cnt == 2


class Listed:
    """The hashes that an index of objects lists, as a lookup sees them."""

    def __init__(self, index: ObjectIndex) -> None:
        self.index = index

    def __contains__(self, hash_: bytes) -> bool:
        return self.index.contains([hash_])[0]


def test_case_5_9_what_is_not_there_yet_is_a_miss_and_holds_nobody_up() -> None:
    """Every pattern of four blocks that are stored, missing, being stored, or in quarantine."""
    rules = GroupRules(make_manager(window(32), block=16, unit=16))
    for pattern in itertools.product("SMPQ", repeat=4):
        index = ObjectIndex(Arena(1 << 12))
        bench = Bench(rules=rules, quarantine_s=30.0)
        bench.lookups.stored = Listed(index)  # type: ignore[assignment]
        for at, kind in enumerate(pattern):
            if kind in "SQ":
                index.publish(index.reserve([block_hash(at)], 64))
            elif kind == "P":
                index.reserve([block_hash(at)], 64)
        quarantined = [block_hash(at) for at, kind in enumerate(pattern) if kind == "Q"]
        bench.core.quarantine.add(quarantined, 0.0)
        expected = 0
        for end in range(1, 5):
            # The token after 16 * end tokens sees 31 tokens: two blocks.
            if all(kind == "S" for kind in pattern[max(0, end - 2) : end]):
                expected = 16 * end
        assert bench.side.matched_tokens(FakeRequest.of("a", 65), 0)[0] == expected, pattern

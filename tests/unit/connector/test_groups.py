# SPDX-License-Identifier: Apache-2.0
"""Group rules against vLLM's own classes and a brute-force oracle; no model is run."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from umbp.connector.groups import GroupRules, GroupsHit, Hit, RunHit
from umbp.connector.support import sparse_groups

from .group_bench import HASHES, config_of, find, full, make_manager, state, window

# ---------------------------------------------------------------- the oracle


@attrs.frozen
class Model:
    """A small model: its groups, and how vLLM aligns hits."""

    name: str
    specs: tuple[Any, ...]
    block: int
    unit: int
    tokens: int

    @property
    def is_fine(self) -> bool:
        states = any(isinstance(spec, MambaSpec) for spec in self.specs)
        windows = any(isinstance(spec, SlidingWindowSpec) for spec in self.specs)
        return states and not windows and self.unit < self.block

    @property
    def alignment(self) -> int:
        return self.unit if self.is_fine else self.block

    def positions(self, spec: Any) -> list[int]:
        """Where objects of a group may end."""
        step = self.unit if self.is_fine else spec.block_size
        return list(range(step, self.tokens + 1, step))

    def restorable(self, end: int, stored: dict[int, set[int]]) -> bool:
        """Says, from first principles, whether a request can be resumed at ``end``."""
        for index, spec in enumerate(self.specs):
            have, size = stored[index], spec.block_size
            if isinstance(spec, MambaSpec):
                if end not in have:
                    return False
                continue
            first = 0
            if isinstance(spec, SlidingWindowSpec):
                # The next token sees the ``sliding_window - 1`` tokens before it.
                first = max(0, end - spec.sliding_window + 1) // size
            if any((place + 1) * size not in have for place in range(first, end // size)):
                return False
            tail = range(end, (end // size + 1) * size + 1)
            if end % size and not any(at in have for at in tail if at <= self.tokens):
                return False
        return True

    def best(self, stored: dict[int, set[int]]) -> int:
        limit = self.tokens - 1
        ends = range(limit - limit % self.alignment, 0, -self.alignment)
        return next((end for end in ends if self.restorable(end, stored)), 0)


MODELS = [
    Model("full", (full(),), 16, 16, 65),
    Model("full and window", (full(), window(24)), 16, 16, 65),
    Model("full and window of one block", (full(), window(16)), 16, 16, 65),
    Model("full and state", (full(), state()), 16, 16, 65),
    Model("two windows", (full(), window(20), window(40)), 16, 16, 49),
    Model("full, window, state", (full(), window(24), state()), 16, 16, 49),
    Model("state inside blocks", (state(32), full(32)), 32, 16, 97),
    Model("two states inside blocks", (state(32), state(32), full(32)), 32, 16, 65),
]


def residencies(model: Model) -> Iterator[dict[int, set[int]]]:
    """Every subset of the objects that the groups may have."""
    objects = [
        (index, end) for index, spec in enumerate(model.specs) for end in model.positions(spec)
    ]
    for mask in itertools.product((False, True), repeat=len(objects)):
        stored: dict[int, set[int]] = {index: set() for index in range(len(model.specs))}
        for (index, end), present in zip(objects, mask, strict=True):
            if present:
                stored[index].add(end)
        yield stored


def found_in(model: Model, stored: dict[int, set[int]]) -> dict[int, set[bytes]]:
    return {
        index: {HASHES[end // model.unit - 1] for end in ends} for index, ends in stored.items()
    }


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_hit_is_what_is_restorable_for_every_residency(model: Model) -> None:
    rules = GroupRules(make_manager(*model.specs, block=model.block, unit=model.unit))
    hashes = HASHES[: model.tokens // model.unit]
    checked = 0
    for stored in residencies(model):
        hit = find(rules, hashes, found_in(model, stored), limit=model.tokens - 1)
        best = model.best(stored)
        assert hit.end_tokens == best, (stored, hit)
        check_loads(model, stored, hit)
        checked += 1
    assert checked == 2 ** sum(len(model.positions(spec)) for spec in model.specs)


def test_a_hit_names_the_blocks_of_its_own_prompt() -> None:
    """Whatever was looked up before: what stands for found blocks is used again."""
    rules = GroupRules(make_manager(full(), window(24), window(40), block=16, unit=16))
    for first, last in ((0, 3), (20, 40), (10, 14), (5, 64), (40, 43)):
        hashes = HASHES[first:last]
        count = len(hashes)
        stored = {index: set(hashes) for index in range(3)}
        hit = find(rules, hashes, stored, limit=16 * count)
        assert isinstance(hit, GroupsHit)
        assert hit.end_tokens == 16 * count
        seen = {
            group.index: [(place, hash_) for place, hash_ in blocks.items()]
            for group, blocks in hit.blocks.items()
        }
        everything = list(enumerate(hashes))
        assert seen == {0: everything, 1: everything[-2:], 2: everything[-3:]}


def check_loads(model: Model, stored: dict[int, set[int]], hit: Hit) -> None:
    """Every block that is to be loaded is stored, and lies where its group wants it."""
    if isinstance(hit, RunHit):
        return
    assert isinstance(hit, GroupsHit)
    for group, blocks in hit.blocks.items():
        index = group.index
        size = model.specs[index].block_size
        for place, hash_ in blocks.items():
            end = (HASHES.index(hash_) + 1) * model.unit
            assert end in stored[index]
            assert place * size < end <= (place + 1) * size
            assert place * size < hit.end_tokens


def test_longer_key_is_no_proof_of_a_shorter_boundary() -> None:
    """Case 5.5: attention keys at 32 and 64, state keys at 32 and 48: the hit is 32."""
    model = Model("", (full(32), state(32)), 32, 16, 65)
    stored = {0: {32}, 1: {32, 48}}
    rules = GroupRules(make_manager(*model.specs, block=32, unit=16))
    hit = find(rules, HASHES[:4], found_in(model, stored), limit=64)
    assert hit.end_tokens == 32


def test_local_tokens_count_as_found_and_are_not_loaded() -> None:
    model = Model("", (full(), window(24)), 16, 16, 97)
    rules = GroupRules(make_manager(*model.specs, block=16, unit=16))
    stored = {0: {48, 64}, 1: {64}}
    hit = find(rules, HASHES[:6], found_in(model, stored), local=48, limit=96)
    assert hit.end_tokens == 64
    parts = hit.parts(([1, 2, 3, 4, 5], [0, 0, 8, 9, 10]), 48)
    assert parts is not None
    assert {part.group_index: tuple(part.block_ids) for part in parts} == {0: (4,), 1: (9,)}


def test_a_block_that_the_table_lacks_refuses_the_load() -> None:
    model = Model("", (full(), state()), 16, 16, 65)
    rules = GroupRules(make_manager(*model.specs, block=16, unit=16))
    stored = {0: {16, 32, 48, 64}, 1: {48}}
    hit = find(rules, HASHES[:4], found_in(model, stored), limit=64)
    assert hit.end_tokens == 48
    assert hit.parts(([1, 2, 3], [0, 0, 7]), 0) is not None
    assert hit.parts(([1, 2], [0, 0, 7]), 0) is None
    assert hit.parts(([1, 2, 3], [0, 0, 0]), 0) is None


def test_the_live_coordinator_is_not_changed() -> None:
    manager = make_manager(full(), state(), block=16, unit=16)
    pools = [one.block_pool for one in manager.coordinator.single_type_managers]
    rules = GroupRules(manager)
    find(rules, HASHES[:4], {0: set(), 1: set()}, limit=63)
    assert [one.block_pool for one in manager.coordinator.single_type_managers] == pools
    assert manager.coordinator.block_pool is manager.block_pool


# ---------------------------------------------------------------- what is stored


def test_filled_blocks_skip_windows_that_have_moved_on_and_all_state() -> None:
    rules = GroupRules(make_manager(full(), window(24), block=16, unit=16))
    parts = rules.filled_parts(HASHES[:6], ([1, 2, 3, 4], [0, 0, 8, 9]), 16, 64)
    assert {part.group_index: tuple(part.block_ids) for part in parts} == {
        0: (2, 3, 4),
        1: (8, 9),
    }
    assert list(parts[0].block_hashes) == HASHES[1:4]
    rules = GroupRules(make_manager(full(32), state(32), block=32, unit=16))
    (part,) = rules.filled_parts(HASHES[:6], ([1, 2, 3], [0, 5, 6]), 16, 80)
    assert (part.group_index, tuple(part.block_ids)) == (0, (1, 2))
    assert list(part.block_hashes) == [HASHES[1], HASHES[3]]


def test_boundary_inside_a_block_takes_the_attention_page_along() -> None:
    rules = GroupRules(make_manager(state(32), full(32), block=32, unit=16))
    parts = rules.boundary_parts(HASHES[:6], ([0, 5, 6], [1, 2, 3]), [(0, 9, 80)], 90)
    assert [(p.group_index, p.block_hashes, tuple(p.block_ids)) for p in parts] == [
        (0, (HASHES[4],), (9,)),
        (1, (HASHES[4],), (3,)),
    ]


def test_boundary_at_a_blocks_end_takes_the_state_alone() -> None:
    rules = GroupRules(make_manager(state(32), full(32), block=32, unit=16))
    parts = rules.boundary_parts(HASHES[:6], ([0, 5], [1, 2]), [(0, 5, 64)], 64)
    assert [(p.group_index, tuple(p.block_ids)) for p in parts] == [(0, (5,))]


def test_boundary_offered_twice_is_stored_once() -> None:
    rules = GroupRules(make_manager(state(32), full(32), block=32, unit=16))
    parts = rules.boundary_parts(HASHES[:6], ([0, 5], [1, 2, 3]), [(0, 9, 80), (0, 9, 80)], 90)
    assert [len(part.block_ids) for part in parts] == [1, 1]


def test_null_and_unhashed_boundaries_are_left_alone() -> None:
    rules = GroupRules(make_manager(state(32), full(32), block=32, unit=16))
    offers = [(0, 0, 64), (0, 9, 72), (0, 9, 128)]
    assert rules.boundary_parts(HASHES[:6], ([0, 5], [1, 2, 3]), offers, 200) == ()


def test_group_that_drops_a_unit_is_keyed_one_unit_later() -> None:
    manager = make_manager(state(32), full(32), block=32, unit=16, eagle=(1,), use_eagle=True)
    rules = GroupRules(manager)
    assert [group.drops_unit for group in rules.groups] == [False, True]
    table = ([0, 5, 6], [1, 2, 3])
    parts = rules.boundary_parts(HASHES[:7], table, [(0, 9, 80)], 112)
    # 96 is a block's end, which is stored when it fills.
    assert [part.group_index for part in parts] == [0]
    parts = rules.boundary_parts(HASHES[:7], table, [(0, 9, 64)], 112)
    assert [(p.group_index, p.block_hashes, tuple(p.block_ids)) for p in parts] == [
        (0, (HASHES[3],), (9,)),
        (1, (HASHES[4],), (3,)),
    ]
    # Not before the unit past the boundary is computed.
    assert len(rules.boundary_parts(HASHES[:7], table, [(0, 9, 64)], 70)) == 1


def test_what_is_stored_for_a_drafted_boundary_gives_the_hit_back() -> None:
    manager = make_manager(state(32), full(32), block=32, unit=16, eagle=(1,), use_eagle=True)
    rules = GroupRules(manager)
    table = ([0, 5, 6], [1, 2, 3])
    stored: dict[int, set[bytes]] = {0: set(), 1: set()}
    for part in (
        *rules.filled_parts(HASHES[:7], table, 0, 100),
        *rules.boundary_parts(HASHES[:7], table, [(0, 9, 64)], 100),
    ):
        stored[part.group_index] |= set(part.block_hashes)
    hit = find(rules, HASHES[:7], stored, limit=111)
    assert hit.end_tokens == 64
    stored[1].discard(HASHES[4])
    stored[1].discard(HASHES[5])
    assert find(rules, HASHES[:7], stored, limit=111).end_tokens < 64


def test_block_ends_or_every_unit_are_asked_for() -> None:
    whole = GroupRules(make_manager(full(32), window(40, 32), block=32, unit=16))
    wanted = [HASHES[3], HASHES[5], HASHES[7]]
    assert [list(one.hashes) for one in whole.ask(HASHES[:8], 32)] == [wanted] * 2
    fine = GroupRules(make_manager(full(32), state(32), block=32, unit=16))
    assert [list(one.hashes) for one in fine.ask(HASHES[:6], 32)] == [HASHES[2:6]] * 2


@pytest.mark.parametrize("local_tokens", [0, 32, 64])
def test_the_end_of_what_was_asked_for_is_known(local_tokens: int) -> None:
    """A hash stands for all tokens before its block's end, so its index says where that is."""
    whole = GroupRules(make_manager(full(32), window(40, 32), block=32, unit=16))
    fine = GroupRules(make_manager(full(32), state(32), block=32, unit=16))
    for rules in (whole, fine):
        for one in rules.ask(HASHES[:8], local_tokens):
            for at, hash_ in enumerate(one.hashes):
                end = rules.end_tokens(one.group, local_tokens, at)
                assert end == (HASHES.index(hash_) + 1) * 16


def test_one_group_of_full_attention_is_a_run() -> None:
    rules = GroupRules(make_manager(full(), block=16, unit=16))
    assert rules.is_simple
    hit = find(rules, HASHES[:6], {0: set(HASHES[2:5])}, local=32, limit=95)
    assert isinstance(hit, RunHit)
    assert hit.end_tokens == 80
    (part,) = hit.parts(([1, 2, 3, 4, 5, 6],), 32) or ()
    assert (list(part.block_hashes), tuple(part.block_ids)) == (HASHES[2:5], (3, 4, 5))
    assert hit.parts(([1, 2, 3, 4],), 32) is None


def test_one_group_that_drops_a_block_ends_where_vllm_would() -> None:
    rules = GroupRules(make_manager(full(), block=16, unit=16, use_eagle=True))
    assert not rules.is_simple
    assert find(rules, HASHES[:6], {0: set(HASHES[:5])}, limit=95).end_tokens == 64


def test_sparse_groups_are_restored_by_whole_blocks() -> None:
    manager = make_manager(state(32), full(32), block=32, unit=16)
    rules = GroupRules(manager, sparse_groups=frozenset({1}))
    assert [group.is_fine for group in rules.groups] == [False, False]
    assert [list(one.hashes) for one in rules.ask(HASHES[:6], 0)] == [HASHES[1:6:2]] * 2
    table = ([0, 5, 6], [1, 2, 3])
    assert rules.boundary_parts(HASHES[:6], table, [(0, 9, 80)], 90) == ()
    (part,) = rules.boundary_parts(HASHES[:6], table, [(0, 6, 96)], 96)
    assert (part.group_index, tuple(part.block_ids)) == (0, (6,))
    # A state inside a block that is stored all the same is not restored from.
    stored = {0: set(HASHES[:5]), 1: set(HASHES[:6])}
    assert find(rules, HASHES[:6], stored, limit=95).end_tokens == 64


def test_four_groups_of_four_kinds() -> None:
    """Attention KV, sparse keys of four tokens each, delta-net state and convolution state."""
    sparse = MLAAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=1, dtype=torch.float32, tokens_per_state=4
    )
    kernel = dataclasses.replace(state(32), shapes=((3,),))
    specs = (full(32), sparse, state(32), kernel)
    assert sparse_groups(config_of(*specs)) == {1}
    rules = GroupRules(make_manager(*specs, block=32, unit=16), sparse_groups(config_of(*specs)))
    ends = (32, 64, 96)
    objects = [(index, end) for index in range(4) for end in ends]
    for mask in itertools.product((False, True), repeat=len(objects)):
        stored: dict[int, set[int]] = {index: set() for index in range(4)}
        for (index, end), present in zip(objects, mask, strict=True):
            if present:
                stored[index].add(end)
        best = max(
            (
                end
                for end in ends
                if all(end in stored[index] for index in (2, 3))
                and all(at in stored[index] for index in (0, 1) for at in ends if at <= end)
            ),
            default=0,
        )
        found = {index: {HASHES[end // 16 - 1] for end in have} for index, have in stored.items()}
        assert find(rules, HASHES[:7], found, limit=112).end_tokens == best


def test_scratch_groups_take_no_part() -> None:
    class Scratch(FullAttentionSpec):
        @property
        def prefix_cacheable(self) -> bool:
            return False

    spec = Scratch(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    assert sparse_groups(config_of(full(), spec)) == frozenset()

# SPDX-License-Identifier: Apache-2.0
"""EAGLE, MTP and other drafters."""

import copy

from connector.group_bench import HASHES, find, full, make_manager, state
from connector.namespace_bench import engine, ns, of

from umbp.connector.groups import GroupRules


def test_case_6_2_model_whose_drafter_is_in_no_group_of_its_own_is_restored() -> None:
    manager = make_manager(state(32), full(32), block=32, unit=16, use_eagle=True)
    rules = GroupRules(manager)
    table = ([0, 5, 6, 7], [1, 2, 3, 4])
    stored: dict[int, set[bytes]] = {0: set(), 1: set()}
    offers = [(0, 5, 64), (0, 6, 96)]
    for part in (
        *rules.filled_parts(HASHES[:8], table, 0, 128),
        *rules.boundary_parts(HASHES[:8], table, offers, 128),
    ):
        stored[part.group_index] |= set(part.block_hashes)
    assert find(rules, HASHES[:8], stored, limit=127).end_tokens == 96
    # Of the state, one boundary is enough.
    stored[0] = {HASHES[3]}
    assert find(rules, HASHES[:8], stored, limit=127).end_tokens == 64


def test_case_6_2_attention_alone_with_a_drafter_drops_one_block_and_no_more() -> None:
    rules = GroupRules(make_manager(full(), block=16, unit=16, use_eagle=True))
    assert find(rules, HASHES[:6], {0: set(HASHES[:6])}, limit=97).end_tokens == 80


def test_case_6_4_drafters_have_namespaces_of_their_own() -> None:
    seen = set()
    for name, tokens, method in [
        (None, 0, ""),
        ("org/drafter", 2, "eagle"),
        ("org/other-drafter", 2, "eagle"),
        ("org/drafter", 3, "eagle"),
        ("org/drafter", 2, "eagle3"),
    ]:
        vllm_config, kv_cache_config = engine()
        if name is not None:
            draft = copy.copy(vllm_config.model_config)
            draft.model = name
            vllm_config.speculative_config = ns(
                method=method, num_speculative_tokens=tokens, draft_model_config=draft
            )
        seen.add(of(vllm_config, kv_cache_config))
    assert len(seen) == 5


def test_case_6_4_layers_of_a_drafter_are_part_of_the_object() -> None:
    vllm_config, kv_cache_config = engine()
    before = of(vllm_config, kv_cache_config)
    kv_cache_config.kv_cache_groups[0].layer_names.append("draft.0")
    assert of(vllm_config, kv_cache_config) != before

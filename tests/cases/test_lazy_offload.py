# SPDX-License-Identifier: Apache-2.0
"""Lazy offload on vLLM's real scheduler and block pool, with the memory backend's real pool."""

from collections.abc import Iterator

import pytest
from scheduler_rig import BLOCK_TOKENS, MakeRig, Rig

BLOCKS = 44
"""Ten more than the longest request takes."""
PROMPT = list(range(1, 6 * BLOCK_TOKENS + 3))
"""Six blocks, and a little more."""


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return lazy_rig(make_rig)


def lazy_rig(make_rig: MakeRig, **options: object) -> Rig:
    return make_rig(blocks=BLOCKS, step_tokens=2 * BLOCK_TOKENS, lazy_offload=True, **options)


def others(count: int, first: int = 0) -> Iterator[tuple[str, list[int]]]:
    """Prompts that share nothing with any."""
    for number in range(first, first + count):
        step = number + 1
        yield f"other {number}", [200 + (at * step) % 293 for at in range(1, 6 * BLOCK_TOKENS + 1)]


def crowd(rig: Rig, first: int = 0) -> None:
    """Has other requests use all of KV memory, one after the other."""
    for name, tokens in others(12, first):
        rig.serve(name, tokens)


def is_cached(rig: Rig, name: str) -> bool:
    """Whether vLLM still has the first block of a request."""
    pool = rig.scheduler.kv_cache_manager.block_pool
    return pool.get_cached_block(rig.requests[name].block_hashes[0], [0]) is not None


def stored_hashes(rig: Rig) -> set[bytes]:
    return {key[-32:] for key in rig.pool.stored_keys}


def blocks_of(rig: Rig) -> set[int]:
    """Blocks of all stores so far."""
    parts = [part for job in rig.pool.stores for part in job.parts]
    return {int(block) for part in parts for block in part.block_ids}


def test_nothing_is_stored_while_memory_need_not_be_reused(rig: Rig) -> None:
    rig.serve("first", PROMPT, outputs=8)
    rig.serve("second", PROMPT[::-1])
    assert rig.pool.stores == []
    counters = rig.side.counters()
    assert counters["tokens_deferred"] == 12 * BLOCK_TOKENS
    assert counters["lazy_blocks_seen"] > 0
    rig.check_at_rest()


def test_what_memory_reuses_is_stored_and_restored(rig: Rig) -> None:
    cold = rig.serve("first", PROMPT, outputs=20)
    crowd(rig)
    assert not is_cached(rig, "first")
    assert set(rig.requests["first"].block_hashes[:6]) <= stored_hashes(rig)
    assert rig.serve("again", PROMPT, outputs=20) == cold
    counters = rig.side.counters()
    assert counters["tokens_restored"] == 6 * BLOCK_TOKENS
    assert counters["lazy_stores_started"] == counters["stores_started"] > 0
    assert counters["lazy_blocks_stored"] == len(rig.pool.stored_keys)
    rig.check_at_rest()


@pytest.mark.parametrize("lazy_offload", [False, True])
@pytest.mark.parametrize("save_decode_cache", [False, True])
def test_each_combination_restores_the_same(
    make_rig: MakeRig, lazy_offload: bool, save_decode_cache: bool
) -> None:
    """And decoded blocks are stored where the option says so, and nowhere else."""
    rig = make_rig(
        blocks=BLOCKS,
        step_tokens=2 * BLOCK_TOKENS,
        lazy_offload=lazy_offload,
        save_decode_cache=save_decode_cache,
    )
    cold = rig.serve("first", PROMPT, outputs=40)
    decoded = set(rig.requests["first"].block_hashes[6:8])
    crowd(rig)
    assert not is_cached(rig, "first")
    assert stored_hashes(rig).issuperset(rig.requests["first"].block_hashes[:6])
    assert stored_hashes(rig) & decoded == (decoded if save_decode_cache else set())
    assert rig.serve("again", PROMPT, outputs=40) == cold
    crowd(rig, 12)
    further = rig.serve("further", PROMPT + cold, outputs=4)
    restored = rig.side.counters()["tokens_restored"]
    assert restored == (6 + 6 + 2 * save_decode_cache) * BLOCK_TOKENS
    rig.forget_local()
    rig.pool.evict_all()
    assert rig.serve("cold", PROMPT + cold, outputs=4) == further
    rig.check_at_rest()


def test_blocks_are_not_reused_until_their_store_has_ended(rig: Rig) -> None:
    cold = rig.serve("first", PROMPT, outputs=4)
    rig.pool.holds_stores = True
    for name, tokens in others(12):
        rig.add(name, tokens)
        held = blocks_of(rig)
        while rig.requests[name].request_id in rig.scheduler.requests:
            rig.step()
            tables = rig.scheduler.kv_cache_manager.get_block_ids(name)[0]
            assert held.isdisjoint(tables)
    assert rig.side.counters()["blocks_pinned"] == len(held) > 0
    rig.pool.release()
    rig.run()
    assert rig.serve("again", PROMPT, outputs=4) == cold
    rig.check_at_rest()


def test_a_request_shares_a_block_that_is_being_stored(rig: Rig) -> None:
    cold = rig.serve("first", PROMPT, outputs=4)
    rig.pool.holds_stores = True
    for name, tokens in others(12):
        rig.add(name, tokens)
        while name in rig.scheduler.requests and not rig.pool.stores:
            rig.step()
        if rig.pool.stores:
            break
    held = blocks_of(rig)
    table = [
        rig.scheduler.kv_cache_manager.block_pool.get_cached_block(one, [0])[0].block_id
        for one in rig.requests["first"].block_hashes[:6]
    ]
    assert held <= set(table), "the first to be reused are those of the first request"
    request = rig.add("sharing", PROMPT, outputs=4)
    while not rig.scheduler.kv_cache_manager.get_block_ids("sharing")[0]:
        rig.step()
    assert rig.scheduler.kv_cache_manager.get_block_ids("sharing")[0][:6] == table
    rig.pool.release()
    rig.run()
    assert list(request.output_token_ids) == cold
    rig.check_at_rest()


def test_requests_are_served_while_no_store_ends(rig: Rig) -> None:
    """Also the longest: what lazy stores pin is what no request needs."""
    rig.serve("first", PROMPT)
    rig.pool.holds_stores = True
    for name, tokens in others(14):
        rig.add(name, tokens, outputs=3)
    longest = [at % 499 for at in range(500)]
    rig.add("longest", longest, outputs=3)
    names = set(rig.requests)
    for _ in range(400):
        rig.step()
        if not names & rig.scheduler.requests.keys():
            break
    assert not names & rig.scheduler.requests.keys(), "some request never ends"
    assert 0 < rig.side.counters()["blocks_pinned"] <= BLOCKS - 33
    rig.pool.release()
    rig.run()
    rig.check_at_rest()


def test_a_block_is_stored_once(rig: Rig) -> None:
    rig.serve("first", PROMPT)
    crowd(rig)
    rig.serve("again", PROMPT)
    crowd(rig, 12)
    keys = [key for job in rig.pool.stores for part in job.parts for key in part.keys]
    assert len(keys) == len(set(keys))


def test_a_step_that_reuses_nothing_looks_at_nothing(rig: Rig) -> None:
    rig.serve("first", PROMPT)
    rig.add("decoding", PROMPT[:20], outputs=12)
    rig.step()
    rig.step()
    seen = rig.side.counters()["lazy_blocks_seen"]
    for _ in range(8):
        rig.step()
    assert rig.side.counters()["lazy_blocks_seen"] == seen


def test_after_a_reset_that_left_blocks_in_use_stores_are_made_at_once(rig: Rig) -> None:
    """vLLM's cache then holds the same KV from before, and by its hash nobody can tell."""
    rig.serve("first", PROMPT)
    rig.add("running", PROMPT[:40], outputs=30)
    rig.step()
    rig.step()
    assert not rig.scheduler.reset_prefix_cache(reset_connector=True)
    rig.run()
    before = len(rig.pool.stores)
    rig.serve("new", [7] * 40)
    assert len(rig.pool.stores) > before
    crowd(rig)
    assert rig.side.counters()["lazy_stores_started"] == 0
    assert not stored_hashes(rig) & set(rig.requests["first"].block_hashes)
    # Once nothing of before is left it is as it was.
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    before = len(rig.pool.stores)
    rig.serve("newer", PROMPT)
    assert len(rig.pool.stores) == before
    crowd(rig)
    assert rig.side.counters()["lazy_stores_started"] > 0
    rig.check_at_rest()


def test_memory_with_nothing_to_spare_is_stored_at_once(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(blocks=34, lazy_offload=True)
    (record,) = (one for one in caplog.records if one.name.startswith("umbp"))
    assert "lazy_offload is true, but KV memory of 34 blocks has none to spare" in record.message
    rig.serve("first", PROMPT)
    assert set(rig.requests["first"].block_hashes[:6]) == stored_hashes(rig)
    rig.check_at_rest()


def test_what_a_preempted_request_has_not_computed_is_forgotten(rig: Rig) -> None:
    """The step that preempts it may have given it blocks, and their hashes, before."""
    rig.add("old", list(range(300)), outputs=100)
    victim = rig.add("victim", list(range(400, 100, -1)), outputs=100)
    noted = rig.side._bound.lazy._noted
    last = b""
    for _ in range(200):
        if len(victim.block_hashes) > 300 // BLOCK_TOKENS:
            # An earlier life has computed it, in a block that was reused since.
            last = victim.block_hashes[300 // BLOCK_TOKENS] + bytes(4)
            noted[last] = 1
        rig.step()
        if victim.num_preemptions:
            break
    assert victim.num_preemptions
    assert last
    assert last not in noted
    rig.run()
    rig.check_at_rest()


def test_a_store_that_failed_is_a_miss(rig: Rig) -> None:
    cold = rig.serve("first", PROMPT)
    rig.pool.failing_stores = 1000
    crowd(rig)
    assert rig.side.counters()["stores_failed"] > 0
    assert rig.pool.stored_keys == set()
    assert rig.serve("again", PROMPT) == cold
    assert rig.side.counters()["tokens_restored"] == 0
    rig.check_at_rest()

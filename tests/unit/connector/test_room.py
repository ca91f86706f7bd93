# SPDX-License-Identifier: Apache-2.0
"""Loads do not fill KV memory with requests that then cannot start."""

from types import SimpleNamespace

from umbp.connector.groups import Group
from umbp.connector.room import Room

from .bench import Bench
from .fakes import FakePool, FakeRequest


def two_requests(blocks: int) -> tuple[Bench, FakeRequest, FakeRequest]:
    """Both find two blocks stored, and have six blocks of prompt each."""
    bench = Bench(blocks=blocks + 1)
    bench.store_hashes(2)
    return bench, FakeRequest.of("a", 95), FakeRequest.of("b", 95)


def admit(bench: Bench, request: FakeRequest) -> list[int]:
    """Gives a request the blocks of its load alone, as vLLM does."""
    external, is_async = bench.side.matched_tokens(request, 0)
    assert (external, is_async) == (32, True)
    table = bench.pool.take(2)
    bench.side.admitted(request, (table,), 32)
    return table


def test_a_load_waits_while_those_before_it_could_not_start() -> None:
    bench, first, second = two_requests(9)
    admit(bench, first)
    # Seven blocks are free: the first needs four of them, the second six.
    assert bench.side.matched_tokens(second, 0) == (None, False)
    assert bench.side.counters()["admissions_put_off"] == 1
    bench.answer(bench.idle_step().loads[0].job_id)
    assert bench.side.matched_tokens(second, 0) == (None, False)
    table = bench.pool.take(4)
    bench.side.admitted(first, (table,), 0)
    assert bench.side.matched_tokens(second, 0) == (32, True)


def test_a_request_without_a_hit_waits_too() -> None:
    """At the head of vLLM's queue it would keep those behind it from starting."""
    bench, first, second = two_requests(9)
    admit(bench, first)
    bench.lookups.stored.clear()
    assert bench.side.matched_tokens(second, 0) == (None, False)
    bench.side.admitted(first, (bench.pool.take(4),), 0)
    assert bench.side.matched_tokens(second, 0) == (0, False)


def test_what_is_owed_follows_every_coming_and_going() -> None:
    pool = FakePool(4)
    room = Room(SimpleNamespace(groups=(Group(0, 16, False, False, False),)), pool)
    first, second, third = (FakeRequest.of(name, 31) for name in "abc")
    room.take(first, ([1],))
    room.take(first, ([1],))
    room.take(second, ([2],))
    # Of three free blocks, the two that have loaded need one each, and the third needs two.
    assert room.is_short(third)
    assert not room.is_short(first)
    room.leave("a")
    room.leave("a")
    assert not room.is_short(third)


def test_with_room_for_both_nobody_waits() -> None:
    bench, first, second = two_requests(12)
    admit(bench, first)
    admit(bench, second)


def test_alone_nobody_waits_however_little_there_is() -> None:
    bench, first, _ = two_requests(2)
    admit(bench, first)


def test_a_request_that_ends_or_fails_to_load_leaves_its_room() -> None:
    for end in ("finish", "fail"):
        bench, first, second = two_requests(9)
        table = admit(bench, first)
        (plan,) = bench.idle_step().loads
        assert bench.side.matched_tokens(second, 0) == (None, False)
        if end == "finish":
            bench.side.finished(first, (table,))
        else:
            bench.answer(plan.job_id, succeeded=False)
            assert bench.side.matched_tokens(first, 0) == (0, False)
        bench.pool.free(table)
        assert bench.side.matched_tokens(second, 0) == (32, True)


def test_state_goes_on_in_blocks_of_its_own() -> None:
    """Four tables of three blocks, of which state has one each; then two more to start with."""
    groups = tuple(
        Group(
            index,
            128,
            is_state=index > 0,
            is_fine=True,
            drops_unit=False,
            start_blocks=2 * (index > 0),
        )
        for index in range(4)
    )
    pool = FakePool(26)
    room = Room(SimpleNamespace(groups=groups), pool)  # type: ignore[arg-type]
    first, second, third = (FakeRequest.of(name, 360) for name in "abc")
    assert not room.is_short(first)
    pool.take(6)
    room.take(first, [[1, 2, 3], [0, 0, 4], [0, 0, 5], [0, 0, 6]])
    # 19 blocks are free: the first takes six more, the second twelve.
    assert not room.is_short(second)
    pool.take(6)
    room.take(second, [[7, 8, 9], [0, 0, 10], [0, 0, 11], [0, 0, 12]])
    assert room.is_short(third)
    room.leave("a")
    room.leave("b")
    assert not room.is_short(third)


def test_a_request_that_the_core_has_forgotten_leaves_its_room_too() -> None:
    for end in ("finish", "start"):
        bench, first, second = two_requests(9)
        table = admit(bench, first)
        bench.answer(bench.idle_step().loads[0].job_id)
        bench.now_s = 1e6
        bench.idle_step()
        assert bench.core.requests == {}
        assert bench.side.matched_tokens(second, 0) == (None, False)
        if end == "finish":
            bench.side.finished(first, (table,))
        else:
            bench.side.admitted(first, (table,), 0)
        assert bench.side.matched_tokens(second, 0) == (32, True)

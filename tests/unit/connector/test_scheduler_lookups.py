# SPDX-License-Identifier: Apache-2.0
"""Lookups and loads on the scheduler's side, one rule a test."""

from typing import Any

import pytest

from umbp.connector.lookups import OPEN_MAX
from umbp.connector.metadata import unpack_ids
from umbp.errors import BackendError

from .bench import Bench
from .fakes import FakeRequest, block_hash

# ---------------------------------------------------------------- lookups


def test_miss_answers_zero_and_not_asynchronous() -> None:
    assert Bench().side.matched_tokens(FakeRequest.of("a", 40), 0) == (0, False)


@pytest.mark.parametrize(
    ("tokens", "stored", "local", "expected"),
    [
        (40, 2, 0, 32),  # Whole blocks only.
        (32, 2, 0, 16),  # The last token is always computed, so the last block is no hit.
        (33, 2, 0, 32),
        (100, 3, 16, 32),  # Beyond what the engine has.
        (100, 1, 16, 0),  # Not beyond.
        (15, 1, 0, 0),  # No whole block.
    ],
)
def test_hit_is_the_unbroken_run_beyond_local_tokens(
    tokens: int, stored: int, local: int, expected: int
) -> None:
    bench = Bench()
    bench.store_hashes(stored)
    assert bench.side.matched_tokens(FakeRequest.of("a", tokens), local)[0] == expected


def test_hit_ends_at_the_first_hole() -> None:
    bench = Bench()
    bench.lookups.stored = {block_hash(0), block_hash(2), block_hash(3)}
    assert bench.side.matched_tokens(FakeRequest.of("a", 100), 0) == (16, True)


def test_lookups_that_go_on_to_fail_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    side = bench.side
    caplog.set_level("WARNING")
    for name, is_broken, warning_count in (
        ("a", True, 1),
        ("b", True, 1),
        ("c", False, 1),
        ("d", True, 2),
    ):
        bench.lookups.is_broken = is_broken
        assert side.matched_tokens(FakeRequest.of(name, 40), 0) == (0, False)
        assert len(caplog.records) == warning_count, caplog.text


def test_lookup_waits_at_most_its_deadline_and_is_then_a_miss() -> None:
    bench = Bench()
    bench.lookups.is_silent = True
    bench.store_hashes(3)
    side = bench.side
    real_answers = bench.lookups.answers

    def answers(wait_s: float = 0.0) -> Any:
        bench.now_s += wait_s
        return real_answers(wait_s)

    bench.lookups.answers = answers  # type: ignore[method-assign]
    assert side.matched_tokens(FakeRequest.of("a", 100), 0) == (0, False)
    assert bench.now_s == pytest.approx(bench.core.limits.lookup_timeout_s)
    assert side.counters()["lookups_expired"] == 1
    assert bench.lookups.forgotten


def test_counters_of_the_lookup_client_are_shown_beside_the_others() -> None:
    bench = Bench()
    before = bench.side.counters()
    bench.lookups.counters = lambda: {"lookup_example": 7}  # type: ignore[attr-defined]
    assert bench.side.counters() == {**before, "lookup_example": 7}


def test_time_that_a_client_takes_to_ask_is_part_of_the_lookup() -> None:
    bench = Bench()
    real_ask, real_answers = bench.lookups.ask, bench.lookups.answers

    def ask(question: Any) -> None:
        bench.now_s += 1 / 64
        real_ask(question)

    def answers(wait_s: float = 0.0) -> Any:
        bench.now_s += 1 / 32
        return real_answers(wait_s)

    bench.lookups.ask = ask  # type: ignore[method-assign]
    bench.lookups.answers = answers  # type: ignore[method-assign]
    bench.side.matched_tokens(FakeRequest.of("a", 40), 0)
    assert bench.side.lookup_meter.seconds.take() == [3 / 64]


def test_asynchronous_lookup_never_waits_and_asks_once() -> None:
    bench = Bench(lookup_async=True)
    bench.lookups.is_silent = True
    bench.store_hashes(3)
    request = FakeRequest.of("a", 100)
    for _ in range(3):
        assert bench.side.matched_tokens(request, 0) == (None, False)
        bench.idle_step()
    assert len(bench.lookups.questions) == 1
    assert set(bench.lookups.waits_s) == {0.0}
    bench.lookups.is_silent = False
    assert bench.side.matched_tokens(request, 0) == (48, True)


def test_asynchronous_lookup_is_a_miss_after_its_deadline() -> None:
    bench = Bench(lookup_async=True)
    bench.lookups.is_silent = True
    request = FakeRequest.of("a", 100)
    assert bench.side.matched_tokens(request, 0) == (None, False)
    bench.now_s = 0.2
    bench.idle_step()
    assert bench.side.matched_tokens(request, 0) == (0, False)


def test_asynchronous_lookup_polls_once_a_step_however_many_wait() -> None:
    bench = Bench(lookup_async=True)
    bench.lookups.is_silent = True
    for index in range(50):
        bench.side.matched_tokens(FakeRequest.of(f"r{index}", 100), 0)
    assert len(bench.lookups.waits_s) == 1


def test_a_long_queue_asks_by_and_by_and_misses_nothing() -> None:
    bench = Bench(lookup_async=True)
    bench.lookups.is_silent = True
    bench.store_hashes(3)
    queue = [FakeRequest.of(f"r{index}", 100) for index in range(OPEN_MAX + 20)]
    for request in queue:
        assert bench.side.matched_tokens(request, 0) == (None, False)
    assert len(bench.lookups.questions) == OPEN_MAX
    assert bench.side.counters()["lookups_put_off"] == 20
    bench.lookups.is_silent = False
    bench.idle_step()
    found = [bench.side.matched_tokens(request, 0) for request in queue]
    assert found == [(48, True)] * OPEN_MAX + [(None, False)] * 20
    bench.idle_step()
    assert [bench.side.matched_tokens(request, 0) for request in queue] == [(48, True)] * len(queue)


@pytest.mark.parametrize("lookup_async", [False, True])
def test_a_client_that_raises_has_answered_every_question(lookup_async: bool) -> None:
    bench = Bench(lookup_async=lookup_async)
    bench.store_hashes(3)
    bench.lookups.error = BackendError("the other side is gone")
    request = FakeRequest.of("a", 100)
    assert bench.side.matched_tokens(request, 0) == (0, False)
    assert bench.lookups.forgotten
    bench.lookups.error = None
    bench.idle_step()
    assert bench.side.matched_tokens(FakeRequest.of("b", 100), 0) == (48, True)


def test_a_question_that_cannot_be_asked_is_a_miss() -> None:
    bench = Bench()

    def ask(_: Any) -> None:
        raise BackendError("no connection")

    bench.lookups.ask = ask  # type: ignore[method-assign]
    assert bench.side.matched_tokens(FakeRequest.of("a", 100), 0) == (0, False)


@pytest.mark.parametrize("extra_places", [-1, 1])
def test_an_answer_that_does_not_fit_its_question_is_a_miss(extra_places: int) -> None:
    bench = Bench()
    bench.store_hashes(6)
    bench.lookups.extra_places = extra_places
    assert bench.side.matched_tokens(FakeRequest.of("a", 100), 0) == (0, False)


def test_a_rank_that_cannot_say_is_a_miss() -> None:
    bench = Bench()
    bench.lookups.is_broken = True
    bench.store_hashes(3)
    assert bench.side.matched_tokens(FakeRequest.of("a", 100), 0) == (0, False)


def test_repeated_question_is_answered_from_the_last_answer() -> None:
    bench = Bench()
    bench.store_hashes(3)
    request = FakeRequest.of("a", 100)
    assert bench.side.matched_tokens(request, 0) == (48, True)
    bench.lookups.stored.clear()
    assert bench.side.matched_tokens(request, 0) == (48, True)
    assert bench.side.matched_tokens(request, 32) == (16, True)


def test_old_answer_is_asked_for_again() -> None:
    bench = Bench()
    bench.store_hashes(3)
    request = FakeRequest.of("a", 100)
    bench.side.matched_tokens(request, 0)
    bench.lookups.stored.clear()
    bench.now_s = bench.core.limits.answer_lifetime_s + 1
    assert bench.side.matched_tokens(request, 0) == (0, False)


def test_engine_that_lost_local_blocks_is_looked_up_again() -> None:
    bench = Bench()
    bench.store_hashes(4)
    request = FakeRequest.of("a", 100)
    assert bench.side.matched_tokens(request, 32) == (32, True)
    assert bench.side.matched_tokens(request, 0) == (64, True)


def test_request_that_must_not_read_the_cache_asks_nothing_but_stores() -> None:
    bench = Bench()
    bench.store_hashes(3)
    request = FakeRequest.of("a", 64)
    request.skip_reading_prefix_cache = True
    table = bench.admit(request)
    assert bench.core.counters.lookups == 0
    assert len(bench.run_prompt(request, table).stores) == 1


def test_prompt_is_not_copied_into_the_question() -> None:
    bench = Bench()
    bench.lookups.is_silent = True
    bench.side._lookup_async = True
    bench.side.matched_tokens(FakeRequest.of("a", 100), 16)
    (question,) = bench.lookups.questions
    assert question.parts[0].hashes == b"".join(block_hash(index) for index in range(1, 6))


# ---------------------------------------------------------------- loads


def test_load_names_the_blocks_of_the_hit_only() -> None:
    bench = Bench()
    bench.store_hashes(3)
    request = FakeRequest.of("a", 100)
    table = bench.admit(request, local_tokens=16)
    (plan,) = bench.idle_step().loads
    assert unpack_ids(plan.parts[0].block_ids).tolist() == table[1:3]
    assert plan.parts[0].hashes == block_hash(1) + block_hash(2)
    assert not plan.synchronous
    assert bench.side.has_open_transfers()
    bench.answer(plan.job_id, bytes_moved=7)
    assert not bench.side.has_open_transfers()
    assert bench.side.counters()["tokens_restored"] == 32
    assert bench.side.counters()["bytes_loaded"] == 7


def test_failed_load_is_tried_once_per_request() -> None:
    bench = Bench()
    bench.store_hashes(3)
    request = FakeRequest.of("a", 100)
    table = bench.admit(request)
    (plan,) = bench.idle_step().loads
    bench.answer(plan.job_id, succeeded=False)
    bench.pool.free(table)
    assert bench.side.matched_tokens(request, 0) == (0, False)
    assert bench.core.counters.lookups == 1
    # Another request of the same prefix has its own try.
    assert bench.side.matched_tokens(FakeRequest.of("b", 100), 0) == (48, True)


def test_quarantine_makes_failed_keys_misses_for_everyone() -> None:
    bench = Bench(quarantine_s=30.0)
    bench.store_hashes(3)
    bench.admit(FakeRequest.of("a", 100))
    (plan,) = bench.idle_step().loads
    bench.answer(plan.job_id, succeeded=False, failed_hashes=[block_hash(1)])
    assert bench.side.matched_tokens(FakeRequest.of("b", 100), 0) == (16, True)
    bench.now_s = 31.0
    assert bench.side.matched_tokens(FakeRequest.of("c", 100), 0) == (48, True)


def test_transfer_not_attempted_is_no_reason_for_quarantine() -> None:
    bench = Bench(quarantine_s=30.0)
    bench.store_hashes(3)
    bench.admit(FakeRequest.of("a", 100))
    (plan,) = bench.idle_step().loads
    bench.answer(plan.job_id, succeeded=False, attempted=False, failed_hashes=[block_hash(0)])
    assert bench.side.matched_tokens(FakeRequest.of("b", 100), 0) == (48, True)


def test_load_that_cannot_be_planned_fails_at_once_instead_of_hanging_the_request() -> None:
    bench = Bench()
    bench.side._strict = False
    bench.store_hashes(3)
    request = FakeRequest.of("a", 100)
    bench.side.matched_tokens(request, 0)
    # More than was found: nobody could fill those blocks.
    bench.side.admitted(request, ([1, 2, 3, 4, 5, 6, 7],), 64)
    metadata = bench.idle_step()
    assert metadata.loads == []
    assert [plan.request_id for plan in metadata.refused] == ["a"]
    assert bench.side.counters()["events_refused"] == 1
    assert not bench.side.has_open_transfers()


def test_too_short_a_block_table_is_never_loaded_into() -> None:
    bench = Bench()
    bench.side._strict = False
    bench.store_hashes(3)
    request = FakeRequest.of("a", 100)
    bench.side.matched_tokens(request, 0)
    bench.side.admitted(request, ([1, 2],), 48)
    assert len(bench.idle_step().refused) == 1

# SPDX-License-Identifier: Apache-2.0
"""An epoch that engines share: whoever resets, nobody is served what was stored before."""

from .bench import Bench
from .fakes import FakeRequest, FakeSharedEpoch


def test_keys_carry_the_shared_epoch() -> None:
    bench = Bench(shared_epoch=FakeSharedEpoch(41))
    request = FakeRequest.of("a", 40)
    metadata = bench.run_prompt(request, bench.admit(request))
    assert (metadata.epoch, metadata.stores[0].epoch) == (41, 41)
    assert bench.lookups.questions == []


def test_a_reset_moves_every_engine() -> None:
    shared = FakeSharedEpoch(41)
    bench, other = Bench(shared_epoch=shared), Bench(shared_epoch=shared)
    assert bench.side.reset()
    assert bench.core.epoch == 51
    assert other.core.epoch == 41
    assert other.idle_step().epoch == 51
    # Its own cache was not emptied: what starts from there must not be stored as new.
    assert other.core.local_cache_tainted
    assert not bench.core.local_cache_tainted


def test_a_question_after_a_reset_elsewhere_is_of_the_new_epoch() -> None:
    shared = FakeSharedEpoch(41)
    bench = Bench(shared_epoch=shared, lookup_async=True)
    bench.store_hashes(2)
    request = FakeRequest.of("a", 40)
    assert bench.side.matched_tokens(request, 0) == (32, True)
    bench.lookups.is_silent = True
    shared.advance()
    assert bench.side.matched_tokens(request, 0) == (None, False)
    assert [question.epoch for question in bench.lookups.questions][-1] == 51


def test_a_reset_that_reaches_nobody_is_none() -> None:
    shared = FakeSharedEpoch(41)
    shared.is_broken = True
    bench = Bench(shared_epoch=shared)
    assert not bench.side.reset()
    assert bench.core.epoch == 41

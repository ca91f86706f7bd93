# SPDX-License-Identifier: Apache-2.0
"""Keys that failed to load are misses for a time, and then no more."""

import pytest

from umbp.errors import UsageError
from umbp.fsm.quarantine import Quarantine


def test_only_listed_hashes_are_returned() -> None:
    quarantine = Quarantine(10.0)
    quarantine.add([b"b", b"c"], 0.0)
    assert quarantine.listed([b"a", b"b", b"c"], 1.0) == {b"b", b"c"}
    assert quarantine.listed([b"c"], 1.0) == {b"c"}
    assert quarantine.listed([b"a"], 1.0) == set()
    assert quarantine.listed([], 1.0) == set()


def test_a_hash_is_listed_until_its_time_is_over() -> None:
    quarantine = Quarantine(10.0)
    quarantine.add([b"a"], 5.0)
    assert quarantine.listed([b"a"], 14.9) == {b"a"}
    assert quarantine.listed([b"a"], 15.0) == set()
    assert len(quarantine) == 0


def test_failing_again_begins_the_time_anew() -> None:
    quarantine = Quarantine(10.0)
    quarantine.add([b"a", b"b"], 0.0)
    quarantine.add([b"a"], 6.0)
    assert quarantine.listed([b"b", b"a"], 12.0) == {b"a"}
    assert quarantine.listed([b"a"], 16.0) == set()


def test_hashes_that_nobody_asks_for_do_not_stay_in_memory() -> None:
    quarantine = Quarantine(10.0)
    for second in range(100):
        quarantine.add([b"%d" % second], float(second))
        assert len(quarantine) <= 10


def test_without_a_period_nothing_is_listed() -> None:
    quarantine = Quarantine(0.0)
    quarantine.add([b"a"], 0.0)
    assert len(quarantine) == 0
    assert quarantine.listed([b"a"], 0.0) == set()


def test_clear_forgets_all() -> None:
    quarantine = Quarantine(10.0)
    quarantine.add([b"a"], 0.0)
    quarantine.clear()
    assert quarantine.listed([b"a"], 0.0) == set()


def test_a_negative_period_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^period_s must not be negative, got -1.0$"):
        Quarantine(-1.0)

# SPDX-License-Identifier: Apache-2.0
"""Sharers go together, an owner goes alone, and a waiting owner gets its turn."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from umbp.backends.shared_lock import SharedLock

TIMEOUT_S = 10
"""Longer than any thread needs; reached only when the lock is broken."""

Hold = Callable[[], AbstractContextManager[None]]


class Holder:
    """A thread that takes the lock and keeps it until told."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._let_go = threading.Event()
        self.has_it = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._hold():
            self.has_it.set()
            self._let_go.wait(TIMEOUT_S)

    def let_go(self) -> None:
        assert self.has_it.wait(TIMEOUT_S)
        self._let_go.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def lock() -> SharedLock:
    return SharedLock()


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def test_sharers_hold_it_together(lock: SharedLock) -> None:
    holders = [Holder(lock.shared) for _ in range(3)]
    assert all(holder.has_it.wait(TIMEOUT_S) for holder in holders)
    for holder in holders:
        holder.let_go()


def test_an_owner_waits_for_every_sharer_and_keeps_new_ones_out(lock: SharedLock) -> None:
    sharers = [Holder(lock.shared) for _ in range(2)]
    assert all(sharer.has_it.wait(TIMEOUT_S) for sharer in sharers)
    owner = Holder(lock.owned)
    wait_until(lambda: lock._waiting_owner_count == 1)
    late = Holder(lock.shared)
    sharers[0].let_go()
    assert not owner.has_it.is_set()
    sharers[1].let_go()
    assert owner.has_it.wait(TIMEOUT_S)
    assert not late.has_it.is_set()
    owner.let_go()
    late.let_go()


def test_an_error_inside_lets_go(lock: SharedLock) -> None:
    for hold in (lock.shared, lock.owned):
        with pytest.raises(KeyError), hold():
            raise KeyError
    Holder(lock.owned).let_go()


def test_nobody_is_ever_beside_an_owner(lock: SharedLock) -> None:
    inside: list[str] = []
    broken: list[list[str]] = []

    def hold(seed: int) -> None:
        choices: Iterator[float] = iter(random.Random(seed).choices((0.0, 1.0), k=200))
        for choice in choices:
            word, held = ("owner", lock.owned) if choice else ("sharer", lock.shared)
            with held():
                inside.append(word)
                seen = list(inside)
                if "owner" in seen and len(seen) > 1:
                    broken.append(seen)
                time.sleep(0)
                inside.remove(word)

    threads = [threading.Thread(target=hold, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not broken
    assert not inside

# SPDX-License-Identifier: Apache-2.0
"""No deadline is missed, whichever way it was moved before."""

import itertools
import math
from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbp.fsm.deadlines import DeadlineQueue


@attrs.define(eq=False)
class Subject:
    """Something that has a deadline."""

    number: int = attrs.field(factory=itertools.count().__next__)
    deadline_s: float = math.inf
    wake_s: float = math.inf


@pytest.fixture
def queue() -> DeadlineQueue[Subject]:
    return DeadlineQueue()


def all_due(queue: DeadlineQueue[Subject], now_s: float) -> list[Subject]:
    return list(iter(lambda: queue.due(now_s), None))


def test_a_deadline_is_due_from_its_moment_on(queue: DeadlineQueue[Subject]) -> None:
    subject = Subject()
    queue.set(subject, 5.0)
    assert queue.due(4.999) is None
    assert queue.due(5.0) is subject
    assert subject.deadline_s == math.inf
    assert queue.due(5.0) is None


def test_a_deadline_moves_later(queue: DeadlineQueue[Subject]) -> None:
    subject = Subject()
    queue.set(subject, 5.0)
    queue.set(subject, 8.0)
    assert queue.due(7.0) is None
    assert queue.due(8.0) is subject


def test_a_deadline_moves_earlier(queue: DeadlineQueue[Subject]) -> None:
    subject = Subject()
    queue.set(subject, 8.0)
    queue.set(subject, 5.0)
    assert queue.due(5.0) is subject
    assert queue.due(8.0) is None


def test_a_deadline_that_was_written_later_is_found(queue: DeadlineQueue[Subject]) -> None:
    subject = Subject()
    queue.set(subject, 5.0)
    # A deadline at or after ``wake_s`` may be written without a word to the queue.
    subject.deadline_s = 8.0
    assert queue.due(7.0) is None
    assert queue.due(8.0) is subject


def test_a_cleared_deadline_is_never_due(queue: DeadlineQueue[Subject]) -> None:
    subject = Subject()
    queue.set(subject, 5.0)
    queue.set(subject, math.inf)
    assert queue.due(1e9) is None
    assert len(queue) == 0


def test_a_deadline_may_be_set_again_when_it_was_due(queue: DeadlineQueue[Subject]) -> None:
    subject = Subject()
    for now_s in (5.0, 6.0, 7.0):
        queue.set(subject, now_s)
        assert queue.due(now_s) is subject


def test_subjects_that_are_due_together_are_never_compared(queue: DeadlineQueue[Subject]) -> None:
    subjects = [Subject() for _ in range(20)]
    for subject in reversed(subjects):
        queue.set(subject, 5.0)
    assert all_due(queue, 5.0) == subjects


def test_one_subject_may_be_queued_twice_for_one_moment(queue: DeadlineQueue[Subject]) -> None:
    subject, other = Subject(), Subject()
    queue.set(subject, 9.0)
    queue.set(subject, 5.0)
    subject.deadline_s = 9.0
    assert queue.due(5.0) is None
    queue.set(other, 9.0)
    assert set(all_due(queue, 9.0)) == {subject, other}
    assert len(queue) == 0


def test_subjects_that_ended_do_not_stay_in_memory(queue: DeadlineQueue[Subject]) -> None:
    lasting = [Subject() for _ in range(10)]
    for subject in lasting:
        queue.set(subject, 500.0)
    for _ in range(1000):
        subject = Subject()
        queue.set(subject, 100.0)
        queue.set(subject, math.inf)
        assert len(queue) < 200
    assert set(all_due(queue, 500.0)) == set(lasting)


def test_deadlines_that_moved_earlier_do_not_stay_in_memory(queue: DeadlineQueue[Subject]) -> None:
    subject = Subject()
    for deadline_s in range(2000, 1000, -1):
        queue.set(subject, float(deadline_s))
        assert len(queue) < 200
    assert queue.due(1001.0) is subject


def test_a_subject_that_was_swept_out_may_come_back(queue: DeadlineQueue[Subject]) -> None:
    subjects = [Subject() for _ in range(200)]
    for subject in subjects:
        queue.set(subject, 5.0)
        queue.set(subject, math.inf)
    for subject in subjects:
        queue.set(subject, 9.0)
    assert set(all_due(queue, 9.0)) == set(subjects)


def test_a_dead_entry_does_not_queue_its_subject_again(queue: DeadlineQueue[Subject]) -> None:
    subject = Subject()
    queue.set(subject, 8.0)
    queue.set(subject, 5.0)
    assert queue.due(5.0) is subject
    queue.set(subject, 20.0)
    assert queue.due(8.0) is None
    assert len(queue) == 1


def test_a_sweep_keeps_the_order(queue: DeadlineQueue[Subject]) -> None:
    subjects = [Subject() for _ in range(200)]
    times_s = [float(37 * index % 200) for index in range(200)]
    for subject, deadline_s in zip(subjects, times_s, strict=True):
        queue.set(subject, deadline_s)
    # What goes headed the heap, so that what stays has to be ordered anew.
    kept = {}
    for subject, deadline_s in zip(subjects, times_s, strict=True):
        if deadline_s < 150.0 and deadline_s % 5:
            queue.set(subject, math.inf)
        else:
            kept[deadline_s] = subject
    assert len(queue) < 200
    for now_s in range(200):
        assert queue.due(float(now_s)) is kept.get(float(now_s))


def met(queue: DeadlineQueue[Subject]) -> None:
    for _ in range(60):
        subject = Subject()
        queue.set(subject, 1.0)
        queue.set(subject, math.inf)
    assert queue.due(1.0) is None


def never_queued(queue: DeadlineQueue[Subject]) -> None:
    for _ in range(60):
        queue.set(Subject(), math.inf)


def moved_later(queue: DeadlineQueue[Subject]) -> None:
    subject = Subject()
    for index in range(60):
        queue.set(subject, index / 60)
    assert queue.due(1.0) is subject


def swept(queue: DeadlineQueue[Subject]) -> None:
    while True:
        subject = Subject()
        queue.set(subject, 1.0)
        queue.set(subject, math.inf)
        if len(queue) == 60:
            return


@pytest.mark.parametrize("before", [met, never_queued, moved_later, swept])
def test_only_entries_that_are_there_make_a_sweep_due(
    queue: DeadlineQueue[Subject], before: Callable[[DeadlineQueue[Subject]], None]
) -> None:
    subjects = [Subject() for _ in range(60)]
    for subject in subjects:
        queue.set(subject, 9.0)
    before(queue)
    for subject in subjects[:10]:
        queue.set(subject, math.inf)
    # Ten of sixty are dead, and not worth a sweep.
    assert len(queue) == 60


times = st.integers(0, 40).map(float)
moves = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 5), times),
    st.tuples(st.just("clear"), st.integers(0, 5), times),
    st.tuples(st.just("wait"), st.integers(0, 5), times),
)


@given(st.lists(moves, max_size=120), st.integers(0, 1))
def test_the_queue_agrees_with_a_dictionary(steps: list[tuple[str, int, float]], busy: int) -> None:
    """A dictionary of all deadlines is looked through whenever time goes on."""
    queue: DeadlineQueue[Subject] = DeadlineQueue()
    subjects = [Subject() for _ in range(6)]
    expected: dict[Subject, float] = {}
    now_s = 0.0
    for move, index, seconds in steps:
        for _ in range(70 * busy):  # Others that come and go make the queue sweep.
            passing = Subject()
            queue.set(passing, now_s + 1e6)
            queue.set(passing, math.inf)
        subject = subjects[index]
        if move == "set":
            queue.set(subject, now_s + seconds)
            expected[subject] = now_s + seconds
        elif move == "clear":
            queue.set(subject, math.inf)
            expected.pop(subject, None)
        else:
            now_s += seconds
            due = {one for one, deadline_s in expected.items() if deadline_s <= now_s}
            found = all_due(queue, now_s)
            assert len(found) == len(due)
            assert set(found) == due
            for one in due:
                del expected[one]
        for one in subjects:
            assert one.deadline_s == expected.get(one, math.inf)
            assert one.wake_s <= one.deadline_s

# SPDX-License-Identifier: Apache-2.0
"""Loads and stores do not wait for each other."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from umbp.backends.base import JobResult, TransferJob, TransferOutcome, TransferPart
from umbp.backends.job_runner import TransferKind
from umbp.backends.transfer_lanes import TransferLanes
from umbp.errors import UsageError

LOAD, STORE = TransferKind.LOAD, TransferKind.STORE
DONE = TransferOutcome.DONE
NOT_ATTEMPTED = TransferOutcome.NOT_ATTEMPTED
STALLED = TransferOutcome.STALLED
PATIENCE_S = 30.0


class Stuck:
    """Lanes in which jobs of one kind do not end before they are let go."""

    def __init__(self, kind: TransferKind, timeout_ms: int) -> None:
        self.kind = kind
        self.gate = threading.Event()
        self.is_running = threading.Event()
        self.lanes = TransferLanes(
            self._run, load_thread_count=1, queue_limit=2, timeout_ms=timeout_ms, name="test"
        )

    def _run(self, kind: TransferKind, job: TransferJob) -> JobResult:
        if kind is self.kind:
            self.is_running.set()
            assert self.gate.wait(PATIENCE_S)
        return JobResult(job.job_id, DONE)

    def submit(self, kind: TransferKind, job_id: int) -> None:
        part = TransferPart(0, [b"key"], np.array([0]))
        self.lanes.submit(kind, TransferJob(job_id, (part,), time.monotonic() + PATIENCE_S))

    def results(self, count: int) -> dict[int, TransferOutcome]:
        found: list[JobResult] = []
        give_up_s = time.monotonic() + PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < give_up_s, found
            found += self.lanes.poll()
            time.sleep(0.001)
        return {result.job_id: result.outcome for result in found}


@pytest.fixture
def stick() -> Iterator[Callable[..., Stuck]]:
    made: list[Stuck] = []

    def make(kind: TransferKind, timeout_ms: int = 60_000) -> Stuck:
        made.append(Stuck(kind, timeout_ms))
        return made[-1]

    yield make
    for one in made:
        one.gate.set()
        assert one.lanes.close(PATIENCE_S)


@pytest.mark.parametrize(("stuck", "other"), [(STORE, LOAD), (LOAD, STORE)])
def test_a_stall_in_one_lane_refuses_that_lane_alone(
    stick: Callable[..., Stuck], stuck: TransferKind, other: TransferKind
) -> None:
    rig = stick(stuck, timeout_ms=20)
    rig.submit(stuck, 1)
    assert rig.results(1) == {1: STALLED}
    rig.submit(stuck, 2)
    rig.submit(other, 3)
    assert rig.results(2) == {2: NOT_ATTEMPTED, 3: DONE}
    rig.gate.set()
    assert rig.results(1) == {1: DONE}
    rig.submit(stuck, 4)
    assert rig.results(1) == {4: DONE}


def test_a_job_id_is_one_of_both_lanes_and_a_wait_can_be_cancelled(
    stick: Callable[..., Stuck],
) -> None:
    rig = stick(STORE)
    rig.submit(STORE, 1)
    assert rig.is_running.wait(PATIENCE_S)
    rig.submit(STORE, 2)
    for job_id in (1, 2):
        with pytest.raises(UsageError, match=f"job {job_id} is already waiting or running"):
            rig.submit(LOAD, job_id)
    rig.lanes.cancel(2)
    assert rig.results(1) == {2: NOT_ATTEMPTED}
    rig.submit(LOAD, 2)
    assert rig.results(1) == {2: DONE}


def test_closing_waits_for_both_lanes_no_longer_than_it_may(stick: Callable[..., Stuck]) -> None:
    rig = stick(STORE)
    rig.submit(STORE, 1)
    assert rig.is_running.wait(PATIENCE_S)
    rig.submit(STORE, 2)
    assert not rig.lanes.close(0.01)
    rig.submit(LOAD, 3)
    assert rig.results(2) == {2: NOT_ATTEMPTED, 3: NOT_ATTEMPTED}
    rig.gate.set()
    assert rig.lanes.close(PATIENCE_S)
    assert rig.results(1) == {1: DONE}

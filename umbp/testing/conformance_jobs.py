# SPDX-License-Identifier: Apache-2.0
"""Checks of jobs: fences, deadlines, the queue, announcements, and one answer for each."""

import threading
import time
from collections.abc import Iterable
from typing import Final

from umbp.backends.base import JobResult, TransferJob, TransferOutcome, TransferPart
from umbp.errors import UsageError
from umbp.testing.conformance_rig import BIG, PATIENCE_S, ConformanceError, MakePool, Rig, require

_DONE: Final = TransferOutcome.DONE
_FAILED: Final = TransferOutcome.FAILED
_NOT_ATTEMPTED: Final = TransferOutcome.NOT_ATTEMPTED


def check_visible_when_complete(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """No byte is read before the fence has returned, and no object is found before that."""
    with Rig(make, patience_s) as rig:
        rig.kv.fill(BIG, 0, 1)
        content: list[bytes] = []
        caller = threading.get_ident()
        fence_threads: list[int] = []

        def fence() -> None:
            fence_threads.append(threading.get_ident())
            rig.gate()
            content.append(rig.kv.fill(BIG, 0, 2))

        store = rig.store({BIG: {b"key": 0}}, fence=fence)
        rig.wait_until_gated()
        require(not rig.exists(b"key"), "an object is found while its fence is waited for")
        require(caller not in fence_threads, "the fence is called on the caller's thread")
        rig.open_gate()
        require(rig.finish(store).outcome is _DONE, "a store with a fence did not end DONE")
        require(rig.exists(b"key"), "a stored object is not found")
        rig.require_loads({b"key": 1}, {1: content[0]})


def check_fence_error(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A job whose fence raises fails and has neither stored nor loaded anything."""

    def fence() -> None:
        raise RuntimeError("the device is gone")

    with Rig(make, patience_s) as rig:
        rig.kv.fill(BIG, 0, 1)
        rig.store_done({b"here": 0})
        store = rig.finish(rig.store({BIG: {b"key": 0}}, fence=fence))
        require(store.outcome is _FAILED, f"a store whose fence raised ended {store}")
        require(b"key" in store.failed_keys, f"the key that was not stored is not in {store}")
        require(not rig.exists(b"key"), "an object is found although its fence raised")
        before = rig.kv.snapshot()
        load = rig.finish(rig.load({BIG: {b"here": 1}}, fence=fence))
        require(load.outcome is _FAILED, f"a load whose fence raised ended {load}")
        require(rig.kv.snapshot() == before, "a load whose fence raised wrote to KV memory")


def check_answers_once(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """Each job comes back from ``poll`` exactly once, whatever else goes on."""
    with Rig(make, patience_s, transfer_threads=4, object_count=64, queue_limit=512) as rig:
        for block in range(8):
            rig.kv.fill(BIG, block, block)
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                rig.pool.contains([b"key-1", b"key-2"])

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            jobs = []
            for index in range(200):
                keys = {b"key-%d" % (index % 10): index % 4}
                start = rig.load if index % 3 else rig.store
                jobs.append(start({BIG: keys}))
                if index % 5 == 0:
                    rig.pool.cancel(jobs[-1])
            rig.wait(jobs)
        finally:
            stop.set()
            asking.join()
        rig.require_quiet()


def check_cancel(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A cancelled job ends by one result that tells the truth; any other id is ignored."""
    with Rig(make, patience_s) as rig:
        rig.kv.fill(BIG, 0, 1)
        running = rig.store({BIG: {b"running": 0}}, fence=rig.gate)
        rig.wait_until_gated()
        waiting = rig.store({BIG: {b"waiting": 0}})
        for job_id in (waiting, running, 1_000_000):
            rig.pool.cancel(job_id)
        rig.open_gate()
        for job_id, key in ((running, b"running"), (waiting, b"waiting")):
            result = rig.finish(job_id)
            require(
                rig.exists(key) == (result.outcome is _DONE),
                f"a cancelled store ended {result}, its object is found: {rig.exists(key)}",
            )
        rig.require_quiet()


def check_job_id_in_use(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A job under an id that is in use is refused, and the first one goes on."""
    with Rig(make, patience_s) as rig:
        rig.kv.fill(BIG, 0, 1)
        running = rig.store({BIG: {b"running": 0}}, fence=rig.gate)
        rig.wait_until_gated()
        waiting = rig.store({BIG: {b"waiting": 0}})
        for job_id in (running, waiting):
            part = TransferPart(BIG, (b"other",), [1])
            try:
                rig.pool.store(TransferJob(job_id, (part,), time.monotonic() + patience_s))
            except UsageError:
                continue
            raise ConformanceError(f"job id {job_id} was taken although it is in use")
        rig.open_gate()
        for result in rig.wait((running, waiting)):
            require(result.outcome is _DONE, f"a job whose id came twice ended {result}")
        require(not rig.exists(b"other"), "a job that was refused stored its object")
        rig.require_quiet()


def check_deadline(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A job whose deadline has passed is not begun."""
    with Rig(make, patience_s) as rig:
        rig.kv.fill(BIG, 0, 1)
        rig.store_done({b"here": 0})
        past_s = time.monotonic() - 1
        store = rig.finish(rig.store({BIG: {b"late": 0}}, deadline_s=past_s))
        require(store.outcome is _NOT_ATTEMPTED, f"a store past its deadline ended {store}")
        require(not rig.exists(b"late"), "a store past its deadline left an object")
        before = rig.kv.snapshot()
        load = rig.finish(rig.load({BIG: {b"here": 1}}, deadline_s=past_s))
        require(load.outcome is _NOT_ATTEMPTED, f"a load past its deadline ended {load}")
        require(rig.kv.snapshot() == before, "a load past its deadline wrote to KV memory")


def check_full_queue(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A job that finds the queue full does not block its caller and is answered at once."""
    with Rig(make, patience_s, queue_limit=4) as rig:
        rig.kv.fill(BIG, 0, 1)
        jobs = [rig.store({BIG: {b"first": 0}}, fence=rig.gate)]
        rig.wait_until_gated()
        jobs += [rig.store({BIG: {b"key-%d" % index: 0}}) for index in range(16)]
        early = rig.poll_until(lambda results: len(results) >= 12)
        _require_all(early, _NOT_ATTEMPTED, "a job that found the queue full")
        rig.open_gate()
        results = rig.wait(jobs)
        missing = [result for result in results if result.outcome is not _DONE]
        require(len(missing) == len(early), "a job that had room in the queue was not done")
        rig.require_quiet()


def check_wait(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """``wait``, where a pool has it, returns when a load has ended, and never later than asked."""
    with Rig(make, patience_s) as rig:
        rig.kv.fill(BIG, 0, 1)
        rig.store_done({b"here": 0})
        load = rig.load({BIG: {b"here": 1}}, fence=rig.gate)
        rig.wait_until_gated()
        has_wait = rig.wait_in_pool(0.01)
        opening = threading.Timer(0.05, rig.open_gate)
        opening.start()
        begun_s = time.monotonic()
        rig.wait_in_pool(patience_s)
        waited_s = time.monotonic() - begun_s
        require(waited_s < patience_s, "wait did not return although a load had ended")
        is_answered = rig.is_answered(load)
        require(is_answered or not has_wait, "wait returned although no load had ended")
        opening.join()
        rig.finish(load)


def check_arrival(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """What is announced before its end is there for whoever waits, and ends well; if at all."""
    with Rig(make, patience_s) as rig:
        content = rig.kv.fill(BIG, 0, 1)
        rig.store_done({b"here": 0})
        for blocks in ({b"here": 1}, {b"here": 2}):
            (block,) = blocks.values()
            load = rig.load_that_may_arrive({BIG: blocks})
            arrival = rig.arrival(load)
            if arrival is not None:
                arrival.wait()
                rig.require_blocks(BIG, {block: content})
                arrival.wait()
            rig.finish(load)
            rig.require_blocks(BIG, {block: content})
        lacking = rig.load_that_may_arrive({BIG: {b"here": 1, b"gone": 2}})
        require(rig.arrival(lacking) is None, "a load with a missing object was announced")
        require(rig.finish(lacking).outcome is _FAILED, "a load with a missing object did not fail")
        # Neither says more than its end.
        rig.require_loads({b"here": 3}, {3: content})
        rig.require_quiet()


def check_close_while_busy(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """``close`` keeps to its limit, may be called again, and no answer is lost by it."""
    with Rig(make, patience_s) as rig:
        rig.kv.fill(BIG, 0, 1)
        running = rig.store({BIG: {b"running": 0}}, fence=rig.gate)
        rig.wait_until_gated()
        waiting = [rig.store({BIG: {b"key-%d" % index: 0}}) for index in range(3)]
        rig.pool.close(0.01)
        late = rig.store({BIG: {b"late": 0}})
        _require_all(rig.wait([*waiting, late]), _NOT_ATTEMPTED, "a job that close() found waiting")
        rig.open_gate()
        rig.finish(running)
        rig.pool.close(patience_s)
        rig.pool.close(patience_s)
        rig.require_quiet()


def _require_all(results: Iterable[JobResult], outcome: TransferOutcome, what: str) -> None:
    for result in results:
        require(result.outcome is outcome, f"{what} ended {result}")

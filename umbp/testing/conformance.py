# SPDX-License-Identifier: Apache-2.0
"""Checks that a ``WorkerPool`` keeps the rules of ``umbp.backends.base``.

Give a function that opens the pool, and run everything, or one check at a time:

    def make(case):
        options = MyOptions(capacity_bytes=case.capacity_bytes, queue_limit=case.queue_limit)
        return MyBackend.open_worker(options, case.site)

    check_worker_pool(make)

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_backend(check):
        check(make)

A broken rule raises ``ConformanceError``. KV memory is ordinary host memory, so no GPU is needed.
The checks hold a job back by its fence, never by a delay, and are sure of what they see; only
waiting for an answer that never comes has a limit, ``patience_s``.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from umbp.backends.base import JobResult, TransferOutcome
from umbp.testing.conformance_rig import (
    BIG,
    PATIENCE_S,
    SMALL,
    ConformanceError,
    MakePool,
    PoolCase,
    Rig,
    require,
)
from umbp.testing.kv_memory import KVShape

__all__ = ["CHECKS", "ConformanceError", "MakePool", "PoolCase", "check_worker_pool"]

_DONE: Final = TransferOutcome.DONE
_FAILED: Final = TransferOutcome.FAILED
_NOT_ATTEMPTED: Final = TransferOutcome.NOT_ATTEMPTED


def check_round_trip(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """What was stored is loaded byte for byte, in every shape, and nothing else is written."""
    for shape in KVShape:
        with Rig(make, patience_s, shape=shape) as rig:
            big = {b"big-%d" % block: block for block in (5, 0, 3)}
            small = {b"small-%d" % block: block for block in (1, 7)}
            content = {key: rig.kv.fill(BIG, block, block) for key, block in big.items()}
            content |= {key: rig.kv.fill(SMALL, block, 90 + block) for key, block in small.items()}
            stored = rig.finish(rig.store({BIG: big, SMALL: small}))
            total_bytes = sum(map(len, content.values()))
            require(stored.outcome is _DONE, f"a store of new objects ended {stored}")
            require(stored.bytes_moved == total_bytes, f"{total_bytes} bytes stored: {stored}")
            rig.kv.wipe()
            # Other blocks than before, and in another order.
            big = dict(zip(reversed(big), (2, 6, 4), strict=True))
            small = {key: block + 1 for key, block in small.items()}
            loaded = rig.finish(rig.load({BIG: big, SMALL: small}))
            require(loaded.outcome is _DONE, f"a load of stored objects ended {loaded}")
            require(loaded.bytes_moved == total_bytes, f"{total_bytes} bytes loaded: {loaded}")
            rig.require_blocks(BIG, {block: content[key] for key, block in big.items()})
            rig.require_blocks(SMALL, {block: content[key] for key, block in small.items()})
            for group_index, blocks in ((BIG, big), (SMALL, small)):
                for block in blocks.values():
                    rig.kv.write(group_index, block, bytes(rig.object_bytes(group_index)))
            require(not any(rig.kv.snapshot()), f"{shape}: a load wrote outside of its blocks")


def check_first_bytes_stay(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """Storing an existing key changes nothing and counts as stored."""
    with Rig(make, patience_s) as rig:
        first = rig.kv.fill(BIG, 0, 1)
        rig.store_done({b"key": 0})
        rig.kv.fill(BIG, 0, 2)
        again = rig.finish(rig.store({BIG: {b"key": 0}}))
        require(again.outcome is _DONE, f"storing an existing key ended {again}")
        rig.require_loads({b"key": 1}, {1: first})


def check_missing_key_fails_load(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A load with one missing object fails, names it, and leaves the others usable."""
    with Rig(make, patience_s) as rig:
        content = rig.kv.fill(BIG, 0, 1)
        rig.store_done({b"here": 0})
        result = rig.finish(rig.load({BIG: {b"here": 1}, SMALL: {b"missing": 1}}))
        require(result.outcome is _FAILED, f"a load with a missing object ended {result}")
        require(b"missing" in result.failed_keys, f"the missing key is not in {result}")
        require(b"here" not in result.failed_keys, f"a key that exists is in {result}")
        rig.require_loads({b"here": 2}, {2: content})


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


def check_capacity(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A pool never holds more than its capacity and 5 %, and says what it evicted."""
    with Rig(make, patience_s, object_count=8) as rig:
        limit_bytes = rig.case.capacity_bytes * 1.05
        require(rig.pool.stats().capacity_bytes <= limit_bytes, f"stats say {rig.pool.stats()}")
        keys: list[bytes] = []
        evicted: list[bytes] = []
        for seed in range(32):
            keys.append(b"key-%d" % seed)
            content = rig.kv.fill(BIG, 0, seed)
            rig.store_done({keys[-1]: 0})
            rig.require_loads({keys[-1]: 1}, {1: content})
            held = [key for key, here in zip(keys, rig.exist(keys), strict=True) if here]
            held_bytes = len(held) * rig.object_bytes(BIG)
            require(held_bytes <= limit_bytes, f"{len(held)} objects are found, {held_bytes} bytes")
            used_bytes = rig.pool.stats().used_bytes
            require(used_bytes is None or used_bytes <= limit_bytes, f"{used_bytes} bytes used")
            evicted += rig.pool.take_evictions()
        require(len(set(evicted)) == len(evicted), "an eviction was reported twice")
        require(not any(rig.exist(evicted)), "an object that was said to be evicted is found")


def check_load_order_evicts(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """The object that was not loaded for longest goes first; a lookup is no use."""
    with Rig(make, patience_s, object_count=8) as rig:
        rig.kv.fill(BIG, 0, 1)
        keys = [b"key-%d" % index for index in range(3)]
        for key in keys:
            rig.store_done({key: 0})
        for index in range(64):
            rig.finish(rig.load({BIG: {keys[0]: 1}}))
            rig.exists(keys[1])
            rig.store_done({b"more-%d" % index: 0})
            loaded, only_asked_for, _ = rig.exist(keys)
            require(loaded, "an object was evicted though it was loaded after all others")
            if not only_asked_for:
                return
        raise ConformanceError("an object that was never loaded outlives 64 later ones")


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


def check_any_key(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """Keys are bytes: of any value, of any length, and no two of them are the same."""
    keys = [b"\0", b"\0\0", b"a", b"a\0", b"a\n", b"A", b"\xff" * 60, b"\xc3\xa4", b"\xe4"]
    keys += [bytes(range(256)), b"61", b"a" * 300, b"a" * 301]
    with Rig(make, patience_s, object_count=32) as rig:
        content = {}
        for seed, key in enumerate(keys):
            content[key] = rig.kv.fill(BIG, 0, seed)
            require(not rig.exists(key), f"key {key!r} is found before it was stored")
            rig.store_done({key: 0})
        require(all(rig.exist(keys)), "a key that was stored is not found")
        for key in keys:
            rig.require_loads({key: 1}, {1: content[key]})


def check_wrong_group(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A load that an object cannot fill fails; so does a job of a group that has no layout."""
    with Rig(make, patience_s) as rig:
        rig.kv.fill(SMALL, 0, 1)
        store = rig.finish(rig.store({SMALL: {b"key": 0}}))
        require(store.outcome is _DONE, f"a store of a new object ended {store}")
        result = rig.finish(rig.load({BIG: {b"key": 0}}))
        require(result.outcome is _FAILED, f"a load of an object that is too short ended {result}")
        for start in (rig.store, rig.load):
            result = rig.finish(start({7: {b"other": 0}}))
            require(result.outcome is _FAILED, f"a job of an unknown group ended {result}")


def _require_all(results: Iterable[JobResult], outcome: TransferOutcome, what: str) -> None:
    for result in results:
        require(result.outcome is outcome, f"{what} ended {result}")


CHECKS: Final[tuple[Callable[..., None], ...]] = (
    check_round_trip,
    check_first_bytes_stay,
    check_missing_key_fails_load,
    check_visible_when_complete,
    check_fence_error,
    check_capacity,
    check_load_order_evicts,
    check_answers_once,
    check_cancel,
    check_deadline,
    check_full_queue,
    check_close_while_busy,
    check_any_key,
    check_wrong_group,
)
"""Every check; each takes a ``MakePool`` and, optionally, ``patience_s``."""


def check_worker_pool(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """Runs every check.

    Args:
        make: Opens a new pool; the check registers KV memory and closes it.
        patience_s: How long an answer may take before it counts as lost.

    Raises:
        ConformanceError: A rule is broken; the message says which.
    """
    for check in CHECKS:
        check(make, patience_s)

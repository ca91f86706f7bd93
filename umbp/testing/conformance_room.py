# SPDX-License-Identifier: Apache-2.0
"""Checks of a full pool: capacity and eviction."""

import random
import threading
from typing import Final

from umbp.backends.base import TransferOutcome
from umbp.testing.conformance_rig import (
    BIG,
    PATIENCE_S,
    ConformanceError,
    MakePool,
    Rig,
    require,
)

_DONE: Final = TransferOutcome.DONE
_FAILED: Final = TransferOutcome.FAILED


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


def check_eviction_under_load(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """While stores evict, a load has all its bytes or fails and says which object is gone."""
    choose = random.Random(1)
    with Rig(make, patience_s, transfer_threads=4, object_count=8, queue_limit=512) as rig:
        content: dict[bytes, bytes] = {}
        done_count = 0
        for round_index in range(40):
            stores = []
            for block in range(3):
                key = b"key-%d-%d" % (round_index, block)
                content[key] = rig.kv.fill(BIG, block, 3 * round_index + block)
                stores.append(rig.store({BIG: {key: block}}))
            recent = list(content)[-18:]
            loads = {block: choose.choice(recent) for block in range(3, 10)}
            jobs = {block: rig.load({BIG: {key: block}}) for block, key in loads.items()}
            for store in rig.wait(stores):
                # Everything else may be in use at that moment, which is no fault.
                require(store.outcome in (_DONE, _FAILED), f"a store beside loads ended {store}")
            for block, result in zip(jobs, rig.wait(jobs.values()), strict=True):
                key = loads[block]
                if result.outcome is _DONE:
                    rig.require_blocks(BIG, {block: content[key]})
                    done_count += 1
                    continue
                require(result.outcome is _FAILED, f"a load beside stores ended {result}")
                require(result.failed_keys == (key,), f"{key!r} was to load: {result}")
        require(done_count > 0, "no load beside stores was ever done")
        require(not all(rig.exist(list(content))), f"{len(content)} objects outlive a full pool")


def check_many_threads(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """Lookups on several threads beside transfers on several: each has its own answer."""
    with Rig(make, patience_s, transfer_threads=4, object_count=64, queue_limit=512) as rig:
        content = {b"key-%d" % block: rig.kv.fill(BIG, block, block) for block in range(6)}
        keys = list(content)
        rig.store_done({key: block for block, key in enumerate(keys)})
        stop = threading.Event()
        faults: list[str] = []

        def ask(thread_index: int) -> None:
            choose = random.Random(thread_index)
            while not stop.is_set():
                asked = choose.sample([*keys, b"no-1", b"no-2"], choose.randint(1, 8))
                try:
                    found = [bool(here) for here in rig.pool.contains(asked)]
                except Exception as error:  # Whatever it is, it must fail the check.
                    faults.append(f"contains raised {error!r} on another thread")
                    return
                if found != [key in content for key in asked]:
                    faults.append(f"asked for {asked}, the answer is {found}")
                    return

        threads = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(4)]
        for thread in threads:
            thread.start()
        try:
            for round_index in range(25):
                loads = {block: keys[(round_index + block) % 6] for block in range(6, 10)}
                jobs = [rig.load({BIG: {key: block}}) for block, key in loads.items()]
                jobs.append(rig.store({BIG: {b"more-%d" % round_index: 0}}))
                for result in rig.wait(jobs):
                    require(result.outcome is _DONE, f"a job beside lookups ended {result}")
                rig.require_blocks(BIG, {block: content[key] for block, key in loads.items()})
        finally:
            stop.set()
            for thread in threads:
                thread.join(patience_s)
        require(not faults, "; ".join(faults))
        require(not any(thread.is_alive() for thread in threads), "a lookup does not return")

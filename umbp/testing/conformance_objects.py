# SPDX-License-Identifier: Apache-2.0
"""Checks of what is stored and loaded: bytes, keys and sizes."""

import random
from typing import Final

from umbp.backends.base import MovablePool, TransferOutcome
from umbp.keys import KeySpace
from umbp.testing.conformance_rig import BIG, PATIENCE_S, SMALL, MakePool, Rig, require
from umbp.testing.kv_memory import KVShape

_DONE: Final = TransferOutcome.DONE
_FAILED: Final = TransferOutcome.FAILED


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


def check_unknown_group(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A job of a group that has no layout fails."""
    with Rig(make, patience_s) as rig:
        for start in (rig.store, rig.load):
            result = rig.finish(start({7: {b"key": 0}}))
            require(result.outcome is _FAILED, f"a job of an unknown group ended {result}")


def check_wrong_size(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A load of an object that is too short or too long fails, and the object stays as it is."""
    with Rig(make, patience_s) as rig:
        content = {BIG: rig.kv.fill(BIG, 0, 1), SMALL: rig.kv.fill(SMALL, 0, 2)}
        keys = {BIG: b"big", SMALL: b"small"}
        for group_index, key in keys.items():
            store = rig.finish(rig.store({group_index: {key: 0}}))
            require(store.outcome is _DONE, f"a store of a new object ended {store}")
        for group_index, other, what in ((BIG, SMALL, "too short"), (SMALL, BIG, "too long")):
            load = rig.finish(rig.load({group_index: {keys[other]: 1}}))
            require(load.outcome is _FAILED, f"a load of an object that is {what} ended {load}")
            require(keys[other] in load.failed_keys, f"the key of that object is not in {load}")
            again = rig.finish(rig.store({group_index: {keys[other]: 0}}))
            require(again.outcome is _DONE, f"storing an existing key ended {again}")
        for group_index, key in keys.items():
            load = rig.finish(rig.load({group_index: {key: 2}}))
            require(load.outcome is _DONE, f"a load of a stored object ended {load}")
            rig.require_blocks(group_index, {2: content[group_index]})


def check_partial_store(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """Of a job whose objects exist in part, the others are stored, and only they are counted."""
    with Rig(make, patience_s) as rig:
        content = {b"key-%d" % block: rig.kv.fill(BIG, block, block) for block in range(6)}
        rig.store_done({b"key-0": 0, b"key-3": 3})
        result = rig.finish(rig.store({BIG: {key: block for block, key in enumerate(content)}}))
        require(result.outcome is _DONE, f"a store of which a part existed ended {result}")
        expected = 4 * rig.object_bytes(BIG)
        require(result.bytes_moved == expected, f"{expected} new bytes were to store: {result}")
        rig.kv.wipe()
        blocks = {key: 9 - block for block, key in enumerate(content)}
        rig.require_loads(blocks, {blocks[key]: content[key] for key in content})


def check_partial_load(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A load of some of the objects, from several stores, leaves every other byte as it was."""
    for shape in KVShape:
        with Rig(make, patience_s, shape=shape) as rig:
            content = {block: rig.kv.fill(BIG, block, block) for block in range(8)}
            for blocks in ((0, 1, 2, 3), (4, 5), (6, 7)):
                rig.store_done({b"key-%d" % block: block for block in blocks})
            # Not zero: writing zeros outside of the blocks must be seen.
            rig.kv.scribble(1)
            before = rig.kv.snapshot()
            targets = dict(zip((1, 6, 3), random.Random(1).sample(range(10), 3), strict=True))
            kept = {target: rig.kv.read(BIG, target) for target in targets.values()}
            rig.require_loads(
                {b"key-%d" % source: target for source, target in targets.items()},
                {target: content[source] for source, target in targets.items()},
            )
            for target, old in kept.items():
                rig.kv.write(BIG, target, old)
            require(rig.kv.snapshot() == before, f"{shape}: a load changed other bytes")


def check_reset_by_epoch(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """Objects of an earlier epoch are not those of a later one, and make room for them."""
    space = KeySpace(bytes(16))
    hashes = [b"hash-%03d" % index for index in range(4)]
    with Rig(make, patience_s, object_count=12) as rig:
        for epoch in range(6):
            keys = space.keys(hashes, epoch=epoch, group_index=BIG, rank=0)
            blocks = {key: block for block, key in enumerate(keys)}
            require(not any(rig.exist(keys)), f"an object of epoch {epoch} is found before it is")
            early = rig.finish(rig.load({BIG: blocks}))
            require(early.outcome is _FAILED, f"a load before any store of its epoch: {early}")
            content = {block: rig.kv.fill(BIG, block, 100 * epoch + block) for block in range(4)}
            rig.store_done(blocks)
            rig.kv.wipe()
            rig.require_loads(blocks, content)


def check_memory_moves(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """A pool that can do without KV memory keeps its objects, and serves them to new memory.

    Nothing is checked of a pool that has no ``unregister``.
    """
    with Rig(make, patience_s) as rig:
        if not isinstance(rig.pool, MovablePool):
            return
        content = rig.kv.fill(BIG, 0, 1)
        rig.store_done({b"before": 0})
        rig.pool.unregister()
        left = rig.kv
        before = left.snapshot()
        require(rig.exists(b"before"), "an object is gone with KV memory")
        load = rig.finish(rig.load({BIG: {b"before": 1}}))
        require(load.outcome is not _DONE, f"a load without KV memory ended {load}")
        store = rig.finish(rig.store({BIG: {b"during": 0}}))
        require(store.outcome is not _DONE, f"a store without KV memory ended {store}")
        require(not rig.exists(b"during"), "an object is found that was stored from no memory")
        rig.move_kv_memory()
        rig.require_loads({b"before": 1}, {1: content})
        after = rig.kv.fill(BIG, 2, 2)
        rig.store_done({b"after": 2})
        rig.require_loads({b"after": 3}, {3: after})
        require(left.snapshot() == before, "KV memory was written after it was unregistered")

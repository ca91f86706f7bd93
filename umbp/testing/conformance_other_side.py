# SPDX-License-Identifier: Apache-2.0
"""Checks of a backend whose other side, the process that keeps the objects, is killed.

Nothing may hang: each call, and each answer to a job, has ``patience_s``. And nothing may be made
up: what the other side kept is a miss, until it is there again byte for byte.
"""

from collections.abc import Callable, Sequence
from typing import Final

from umbp.backends.base import JobResult, TransferOutcome
from umbp.errors import BackendError
from umbp.testing.conformance_lookup import HASHES, LookupRig
from umbp.testing.conformance_rig import BIG, PATIENCE_S, Rig, require
from umbp.testing.harness import Harness
from umbp.testing.watched import watched

_DONE: Final = TransferOutcome.DONE


def check_kill_while_idle(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """After the other side was killed, every job ends undone and no object is found."""
    with Rig(watched(harness.open_pool, patience_s), patience_s) as rig:
        content = rig.kv.fill(BIG, 0, 1)
        rig.store_done({b"here": 0})
        _kill(harness, rig)
        for _ in range(3):
            store = rig.finish(rig.store({BIG: {b"new": 0}}))
            require(store.outcome is not _DONE, f"a store without its other side ended {store}")
            _require_honest(rig, rig.finish(rig.load({BIG: {b"here": 1}})), content)
            _require_none_found(rig, [b"here", b"new"])
        rig.require_quiet()


def check_kill_while_busy(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """Jobs that run or wait when the other side is killed are answered, each once."""
    with Rig(watched(harness.open_pool, patience_s), patience_s) as rig:
        content = rig.kv.fill(BIG, 0, 1)
        rig.store_done({b"here": 0})
        stores = [rig.store({BIG: {b"running": 0}}, fence=rig.gate)]
        rig.wait_until_gated()
        stores += [rig.store({BIG: {b"waiting-%d" % index: 0}}) for index in range(4)]
        load = rig.load({BIG: {b"here": 1}})
        _kill(harness, rig)
        rig.open_gate()
        for result in rig.wait(stores):
            # Not one byte had moved: the first was at its fence, and the others behind it.
            require(result.outcome is not _DONE, f"a store that lost its other side: {result}")
        _require_honest(rig, rig.finish(load), content)
        _require_none_found(rig, [b"here", b"running", b"waiting-0"])
        rig.require_quiet()


def check_kill_during_transfers(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """A kill amid transfers, at no particular moment, makes no load answer with other bytes."""
    blocks = range(1, 10)
    with Rig(watched(harness.open_pool, patience_s), patience_s, queue_limit=512) as rig:
        content = {}
        for key in (b"even", b"odd"):
            content[key] = rig.kv.fill(BIG, 0, len(key))
            rig.store_done({key: 0})
        for round_index in range(8):
            # Taking turns, so that a block that was not loaded holds the other object.
            key = (b"even", b"odd")[round_index % 2]
            loads = [rig.load({BIG: {key: block}}) for block in blocks]
            stores = [rig.store({BIG: {b"%d-%d" % (round_index, n): 0}}) for n in range(4)]
            if round_index == 3:
                _kill(harness, rig)
            for block, load in zip(blocks, rig.wait(loads), strict=True):
                if load.outcome is _DONE:
                    rig.require_blocks(BIG, {block: content[key]})
            rig.wait(stores)
        rig.require_quiet()


def check_close_after_kill(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """``close`` returns although the other side is gone, and may be called again."""
    with Rig(watched(harness.open_pool, patience_s), patience_s) as rig:
        rig.kv.fill(BIG, 0, 1)
        rig.store_done({b"here": 0})
        _kill(harness, rig)
        job = rig.load({BIG: {b"here": 1}})
        rig.pool.close(patience_s)
        rig.pool.close(patience_s)
        rig.finish(job)
        rig.require_quiet()


def check_lookup_after_kill(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """Questions after the kill are answered as unknown or missing, or not at all; none hangs."""
    if harness.open_lookup is None:
        return
    with LookupRig(harness, patience_s) as lookup:
        lookup.store(HASHES[:2])
        lookup.require_present({BIG: HASHES[:2]}, [[True, True]], "two blocks are stored")
        _kill(harness, lookup.ranks[0])
        asked = {lookup.ask({BIG: HASHES[:4]}) for _ in range(3)}
        for answer in lookup.client.answers(0.2):
            require(answer.question_id in asked, f"an answer to no question: {answer}")
            found = answer.present is not None and any(part.any() for part in answer.present)
            require(not found, "an object is found although its other side is gone")


def check_restart(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """After the other side was started anew, a new pool works; what was there is right or gone."""
    if harness.restart_other_side is None:
        return
    make = watched(harness.open_pool, patience_s)
    with Rig(make, patience_s, rank_count=2) as rig:
        content = rig.kv.fill(BIG, 0, 1)
        rig.store_done({b"here": 0})
        _kill(harness, rig)
        harness.restart_other_side()
        _require_honest(rig, rig.finish(rig.load({BIG: {b"here": 1}})), content)
    # A pool of rank 0 would begin with an other side of its own.
    with Rig(make, patience_s, rank=1, rank_count=2) as rig:
        content = rig.kv.fill(BIG, 0, 2)
        rig.store_done({b"after": 0})
        rig.require_loads({b"after": 1}, {1: content})


def _kill(harness: Harness, rig: Rig) -> None:
    assert harness.kill_other_side is not None
    harness.kill_other_side()
    rig.other_side_is_gone = True


def _require_honest(rig: Rig, load: JobResult, content: bytes) -> None:
    """A load into block 1 that says it was done has brought all bytes."""
    if load.outcome is _DONE:
        rig.require_blocks(BIG, {1: content})


def _require_none_found(rig: Rig, keys: Sequence[bytes]) -> None:
    try:
        found = rig.exist(keys)
    except BackendError:
        return
    require(not any(found), "an object is found although its other side is gone")


OTHER_SIDE_CHECKS: Final[tuple[Callable[..., None], ...]] = (
    check_kill_while_idle,
    check_kill_while_busy,
    check_kill_during_transfers,
    check_close_after_kill,
    check_lookup_after_kill,
    check_restart,
)
"""Every check of a killed other side; each takes a ``Harness`` and, optionally, ``patience_s``."""

# SPDX-License-Identifier: Apache-2.0
"""The embedded backend when the device gathers objects, here the CPU, before MORI moves them."""

import random
import threading
import types
import weakref
from collections.abc import Callable

import attrs
import pytest
from embedded_rig import BLOCKS, DONE, GROUP, KIB, OBJECT_BYTES, PATIENCE_S, OpenRig

from umbp.backends import staged_transfers
from umbp.backends.base import TransferPart
from umbp.backends.embedded import EmbeddedBackend, EmbeddedOptions, EmbeddedPool
from umbp.errors import BackendStalled
from umbp.testing.conformance import CHECKS, PoolCase
from umbp.testing.kv_memory import GroupShape, KVShape

pytestmark = pytest.mark.mori

CHOSEN = (
    "check_partial_load",
    "check_memory_moves",
    "check_many_threads",
    "check_close_while_busy",
)
"""Those that move the most, or end in the middle."""


@pytest.fixture(autouse=True)
def short_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot of three objects, so that jobs go through the ring several times."""
    monkeypatch.setattr(staged_transfers, "SLOT_BYTES", 3 * OBJECT_BYTES)


@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if check.__name__ in CHOSEN],
    ids=lambda check: check.__name__,
)
def test_it_keeps_the_rules_of_a_backend(check: Callable[..., None]) -> None:
    def make(case: PoolCase) -> EmbeddedPool:
        options = EmbeddedOptions(
            capacity_bytes=case.capacity_bytes,
            queue_limit=case.queue_limit,
            transfer_threads=case.transfer_threads,
            device_staging=True,
        )
        return EmbeddedBackend.open_worker(options, case.site)

    check(make, PATIENCE_S)


@pytest.mark.parametrize("shape", KVShape)
def test_every_layout_comes_back_byte_for_byte(open_rig: OpenRig, shape: KVShape) -> None:
    groups = [GROUP, GroupShape(3, (1000, 24, 1)), GroupShape(1, (5 * 64 * KIB,))]
    rig = open_rig(groups=groups, shape=shape, capacity_bytes=64 << 20, device_staging=True)
    sources = random.Random(1).sample(range(BLOCKS), 10)
    targets = random.Random(2).sample(range(BLOCKS), 10)
    content = [
        [rig.kv.fill(group, block, 100 * group + block) for block in sources]
        for group in range(len(groups))
    ]

    def parts(blocks: list[int]) -> tuple[TransferPart, ...]:
        return tuple(
            TransferPart(group, [b"%d/%d" % (group, index) for index in range(10)], blocks)
            for group in range(len(groups))
        )

    rig.pool.store(attrs.evolve(rig.job({}), parts=parts(sources)))
    assert rig.results(1)[0].outcome is DONE
    rig.kv.wipe()
    rig.pool.load(attrs.evolve(rig.job({}), parts=parts(targets)))
    assert rig.results(1)[0].outcome is DONE
    for group, stored in enumerate(content):
        for target, expected in zip(targets, stored, strict=True):
            assert rig.kv.read(group, target) == expected
            rig.kv.write(group, target, bytes(len(expected)))
    assert not any(rig.kv.snapshot())


def test_a_call_that_does_not_return_keeps_its_ring(open_rig: OpenRig) -> None:
    rig = open_rig(transfer_timeout_ms=50, device_staging=True)
    may_return = threading.Event()
    opened = rig.pool._opened
    assert opened is not None
    native = opened.client._native
    opened.client._native = types.SimpleNamespace(
        batch_exists=lambda names: may_return.wait() and native.batch_exists(names)
    )
    ring = weakref.ref(opened.transfers.regions[0].tensor)
    rig.pool.store(rig.job({b"a": 0}))
    with pytest.raises(BackendStalled, match="its memory stays in use"):
        rig.results(1)
    rig.pool.close(0.01)
    del opened
    assert ring() is not None
    may_return.set()

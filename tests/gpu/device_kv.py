# SPDX-License-Identifier: Apache-2.0
"""KV memory on a device in the shapes that vLLM gives it, filled and read range by range."""

import enum
import time
from collections.abc import Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch

from umbp.backends.base import (
    JobResult,
    KVMemory,
    MemoryRegion,
    ObjectLayout,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerPool,
    WorkerSite,
)

PATIENCE_S: Final = 60.0
BLOCK_COUNT: Final = 256
LAYER_COUNT: Final = 30
RANGE_BYTES: Final = 24 << 10
OTHER_LAYER_COUNT: Final = 5
OTHER_RANGE_BYTES: Final = 40 << 10
OTHER_BLOCK_COUNT: Final = 96

_Column = tuple[int, int, int]
"""Base address, block stride and length of one range."""


class Shape(enum.Enum):
    """Where the ranges of a block lie."""

    WHOLE = "one allocation"
    PER_LAYER = "an allocation per layer"
    HALVES = "K and V halves apart"
    GROUPS = "two groups of other block sizes"


def site(device: torch.device, timeout_ms: int = int(PATIENCE_S * 1000)) -> WorkerSite:
    """Returns a lone worker on a device."""
    return WorkerSite(
        rank=0,
        rank_count=1,
        device_type=device.type,
        device_index=device.index,
        instance="test",
        transfer_timeout_ms=timeout_ms,
    )


@attrs.frozen(eq=False)
class DeviceKV:
    """KV memory with a slow way in and out.

    Attributes:
        memory: What a backend registers.
    """

    memory: KVMemory

    def fill(self, group: int, block: int, seed: int) -> bytes:
        """Sets a block to pseudo-random bytes and returns them."""
        content = np.random.default_rng(seed).bytes(self.memory.layout(group).object_bytes)
        source = torch.from_numpy(np.frombuffer(content, dtype=np.int8).copy())
        pieces = self._pieces(group, block)
        for piece, part in zip(pieces, source.split([len(piece) for piece in pieces]), strict=True):
            piece.copy_(part)
        return content

    def read(self, group: int, block: int) -> bytes:
        """Returns the bytes of a block, in the order in which an object holds them."""
        return bytes(torch.cat(self._pieces(group, block)).cpu().numpy().tobytes())

    def zero(self, group: int, block: int) -> None:
        """Sets a block to zero."""
        for piece in self._pieces(group, block):
            piece.zero_()

    def wipe(self) -> None:
        """Sets every byte of every allocation to zero."""
        for region in self.memory.regions:
            region.tensor.zero_()

    def is_wiped(self) -> bool:
        """Says whether every byte of every allocation is zero."""
        return not any(bool(region.tensor.any()) for region in self.memory.regions)

    def _pieces(self, group: int, block: int) -> list[Any]:
        layout = self.memory.layout(group)
        (addresses,) = layout.addresses(np.array([block])).tolist()
        return [
            self._at(address, size)
            for address, size in zip(addresses, layout.range_bytes.tolist(), strict=True)
        ]

    def _at(self, address: int, size: int) -> Any:
        for region in self.memory.regions:
            begin = address - region.address
            if begin >= 0 and begin + size <= region.size_bytes:
                return region.tensor[begin : begin + size]
        raise AssertionError(f"{address:#x} is in no allocation")


def make_kv(device: torch.device, shape: Shape) -> DeviceKV:
    """Allocates zeroed KV memory. All shapes but ``GROUPS`` have one group."""
    regions: list[MemoryRegion] = []

    def allocate(size: int) -> int:
        tensor = torch.zeros(size, dtype=torch.int8, device=device)
        region = MemoryRegion(tensor, tensor.data_ptr(), size, device.type, device.index)
        regions.append(region)
        return region.address

    layer_bytes = BLOCK_COUNT * RANGE_BYTES
    columns: list[_Column]
    if shape is Shape.WHOLE:
        base = allocate(LAYER_COUNT * layer_bytes)
        bases = range(base, base + LAYER_COUNT * layer_bytes, layer_bytes)
        columns = [(begin, RANGE_BYTES, RANGE_BYTES) for begin in bases]
    elif shape is Shape.HALVES:
        half = RANGE_BYTES // 2
        columns = []
        for _ in range(LAYER_COUNT):
            base = allocate(layer_bytes)
            columns += [(base, half, half), (base + BLOCK_COUNT * half, half, half)]
    else:
        columns = [(allocate(layer_bytes), RANGE_BYTES, RANGE_BYTES) for _ in range(LAYER_COUNT)]
    layouts = [_layout(0, BLOCK_COUNT, columns)]
    if shape is Shape.GROUPS:
        # Its blocks are padded, as those of recurrent state are.
        stride = OTHER_RANGE_BYTES + 512
        others: list[_Column] = [
            (allocate(OTHER_BLOCK_COUNT * stride), stride, OTHER_RANGE_BYTES)
            for _ in range(OTHER_LAYER_COUNT)
        ]
        layouts.append(_layout(1, OTHER_BLOCK_COUNT, others))
    return DeviceKV(KVMemory(tuple(regions), tuple(layouts)))


def _layout(group: int, block_count: int, columns: Sequence[_Column]) -> ObjectLayout:
    bases, strides, sizes = zip(*columns, strict=True)
    return ObjectLayout(group, block_count, bases, strides, sizes)


def keys(group: int, count: int) -> list[bytes]:
    """Returns the keys of a group's first objects."""
    return [b"group-%d-%06d" % (group, index) for index in range(count)]


def run(pool: WorkerPool, kind: str, parts: Sequence[TransferPart], fence: Any = None) -> JobResult:
    """Runs one job, ``"store"`` or ``"load"``, and returns its result."""
    give_up_s = time.monotonic() + PATIENCE_S
    getattr(pool, kind)(TransferJob(0, tuple(parts), give_up_s, fence))
    while not (results := pool.poll()):
        assert time.monotonic() < give_up_s, f"the {kind} never ended"
        time.sleep(0.0001)
    (result,) = results
    return result


def assert_round_trip(pool: WorkerPool, kv: DeviceKV, object_count: int) -> None:
    """Stores objects of every group, loads them into other blocks, and compares every byte.

    Args:
        pool: A pool that has registered ``kv`` and holds all objects.
        kv: KV memory, zeroed.
        object_count: Objects of each group, fewer where it has not as many blocks.
    """
    content: dict[int, list[bytes]] = {}
    sources, targets = [], []
    for layout in kv.memory.layouts:
        group, count = layout.group_index, min(object_count, layout.block_count // 2)
        order = np.random.default_rng(group).permutation(layout.block_count)
        sources.append(TransferPart(group, keys(group, count), order[:count]))
        targets.append(TransferPart(group, keys(group, count), order[count : 2 * count]))
        content[group] = [kv.fill(group, int(block), seed=int(block)) for block in order[:count]]
    torch.cuda.synchronize()

    stored = run(pool, "store", sources)
    assert (stored.outcome, stored.reason) == (TransferOutcome.DONE, "")
    kv.wipe()
    torch.cuda.synchronize()
    loaded = run(pool, "load", targets)
    assert (loaded.outcome, loaded.reason) == (TransferOutcome.DONE, "")
    total_bytes = sum(len(one) for of_group in content.values() for one in of_group)
    assert stored.bytes_moved == loaded.bytes_moved == total_bytes
    for part in targets:
        for block, expected in zip(part.block_ids, content[part.group_index], strict=True):
            assert kv.read(part.group_index, int(block)) == expected
            kv.zero(part.group_index, int(block))
    assert kv.is_wiped()

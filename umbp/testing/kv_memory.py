# SPDX-License-Identifier: Apache-2.0
"""KV memory on a CPU in the shapes that vLLM gives it, filled and read byte by byte.

Reading and writing go through ``ctypes`` and plain loops, on purpose: a backend's fast copies are
checked against code that has nothing in common with them.
"""

import ctypes
import enum
import mmap
from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np
import torch

from umbp.backends.base import KVMemory, MemoryRegion, ObjectLayout

_GUARD_BYTES: Final = 64
"""Left between blocks where a shape pads them; no object contains it."""

_libc = ctypes.CDLL(None, use_errno=True)


class KVShape(enum.Enum):
    """The order of the dimensions layer (L), head (H) and block (B) in memory."""

    LBH = "per layer"
    """One allocation per layer; a block is one range of it (vLLM's HND and NHD)."""
    LHB = "head outside block"
    """One allocation per layer; a block is one range per head (vLLM's LHBNC)."""
    BLH = "block outermost"
    """One allocation; a block holds all layers side by side, then padding (vLLM's BLHNC)."""


@attrs.frozen
class GroupShape:
    """The size of one KV cache group.

    Attributes:
        head_count: Heads of every layer.
        plane_bytes: For each layer, bytes of one head of one block.
    """

    head_count: int
    plane_bytes: tuple[int, ...]

    @property
    def object_bytes(self) -> int:
        """Size of one object."""
        return self.head_count * sum(self.plane_bytes)


@attrs.frozen(eq=False)
class HostKVMemory:
    """KV memory with a slow way in and out.

    Attributes:
        memory: What a backend registers.
    """

    memory: KVMemory

    def read(self, group_index: int, block_id: int) -> bytes:
        """Returns the bytes of a block, in the order in which an object holds them."""
        return b"".join(
            ctypes.string_at(address, size) for address, size in self._ranges(group_index, block_id)
        )

    def write(self, group_index: int, block_id: int, content: bytes) -> None:
        """Sets the bytes of a block; the inverse of ``read``."""
        at = 0
        for address, size in self._ranges(group_index, block_id):
            ctypes.memmove(address, content[at : at + size], size)
            at += size

    def fill(self, group_index: int, block_id: int, seed: int) -> bytes:
        """Sets a block to pseudo-random bytes and returns them."""
        size = self.memory.layout(group_index).object_bytes
        content = np.random.default_rng(seed).bytes(size)
        self.write(group_index, block_id, content)
        return content

    def wipe(self) -> None:
        """Sets every byte of every allocation to zero."""
        for region in self.memory.regions:
            region.tensor.zero_()

    def scribble(self, seed: int) -> None:
        """Sets every byte of every allocation to a pseudo-random one that is not zero."""
        generator = np.random.default_rng(seed)
        for region in self.memory.regions:
            noise = generator.integers(1, 128, region.size_bytes, dtype=np.int8)
            region.tensor.copy_(torch.from_numpy(noise))

    def snapshot(self) -> bytes:
        """Returns every byte of every allocation."""
        return b"".join(
            ctypes.string_at(region.address, region.size_bytes) for region in self.memory.regions
        )

    def _ranges(self, group_index: int, block_id: int) -> list[tuple[int, int]]:
        layout = self.memory.layout(group_index)
        columns = zip(
            layout.base_addresses.tolist(),
            layout.block_strides.tolist(),
            layout.range_bytes.tolist(),
            strict=True,
        )
        return [(base + block_id * stride, size) for base, stride, size in columns]


def make_kv_memory(
    shape: KVShape, groups: Sequence[GroupShape], *, block_count: int
) -> HostKVMemory:
    """Allocates zeroed KV memory; each group has allocations of its own.

    Args:
        shape: Order of the dimensions.
        groups: Size of each group.
        block_count: Blocks of each group.
    """
    regions: list[MemoryRegion] = []
    layouts: list[ObjectLayout] = []
    for group_index, group in enumerate(groups):
        if shape is KVShape.BLH:
            added, columns = _block_outermost(group, block_count)
        else:
            added, columns = _by_layer(group, block_count, heads_apart=shape is KVShape.LHB)
        regions += added
        base_addresses, block_strides, range_bytes = zip(*columns, strict=True)
        layouts.append(
            ObjectLayout(group_index, block_count, base_addresses, block_strides, range_bytes)
        )
    return HostKVMemory(KVMemory(tuple(regions), tuple(layouts)))


_Column = tuple[int, int, int]
"""Base address, block stride and length of one range."""


def _by_layer(
    group: GroupShape, block_count: int, *, heads_apart: bool
) -> tuple[list[MemoryRegion], list[_Column]]:
    regions: list[MemoryRegion] = []
    columns: list[_Column] = []
    for plane_bytes in group.plane_bytes:
        page_bytes = plane_bytes * group.head_count
        region = _allocate(block_count * page_bytes)
        regions.append(region)
        if heads_apart:
            columns += [
                (region.address + head * block_count * plane_bytes, plane_bytes, plane_bytes)
                for head in range(group.head_count)
            ]
        else:
            columns.append((region.address, page_bytes, page_bytes))
    return regions, columns


def _block_outermost(
    group: GroupShape, block_count: int
) -> tuple[list[MemoryRegion], list[_Column]]:
    stride = group.object_bytes + _GUARD_BYTES
    region = _allocate(block_count * stride)
    columns: list[_Column] = []
    base = region.address
    for plane_bytes in group.plane_bytes:
        page_bytes = plane_bytes * group.head_count
        columns.append((base, stride, page_bytes))
        base += page_bytes
    return [region], columns


def _allocate(size_bytes: int) -> MemoryRegion:
    """Allocates pages of its own, between pages that nobody may touch.

    A transfer that leaves the allocation by a page ends the process. And a backend may share the
    allocation with another process without sharing anything else.
    """
    page_bytes = mmap.PAGESIZE
    inner_bytes = -(-size_bytes // page_bytes) * page_bytes
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, inner_bytes + 2 * page_bytes, flags=flags)
    everything = torch.frombuffer(mapped, dtype=torch.int8)
    tensor = everything[page_bytes : page_bytes + size_bytes]
    for guard in (everything.data_ptr(), everything.data_ptr() + page_bytes + inner_bytes):
        if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page_bytes), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
    return MemoryRegion(tensor, tensor.data_ptr(), size_bytes, "cpu", None)

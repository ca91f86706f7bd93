# SPDX-License-Identifier: Apache-2.0
"""Gathers objects from KV memory into one buffer, and scatters a buffer into KV memory.

Both run on the device that holds KV memory, at the speed of its memory. What is queued here runs
on the current stream; the caller waits for it.
"""

import logging
from collections.abc import Iterator
from typing import Any, Protocol

import attrs
import numpy as np
import torch

from umbp.backends.base import Int64Array, KVMemory, ObjectLayout
from umbp.backends.layout_columns import cut, merge_adjacent, split_evenly
from umbp.backends.torch_rows import TorchRows

logger = logging.getLogger(__name__)


class Rows(Protocol):
    """The ranges of one group, which all have one length. Thread-safe; keeps nothing."""

    def locate(self, block_ids: Int64Array) -> Any:
        """Brings to the device what it needs to find int64[objects] blocks."""

    def gather(self, located: Any, part: slice, staging: Any) -> None:
        """Queues the copies from some of the located blocks into a buffer.

        Args:
            located: What ``locate`` returned.
            part: Which of them; a start, a stop, and no step.
            staging: uint8[bytes] ``torch.Tensor`` on the device, exactly as long as the objects.
        """

    def scatter(self, located: Any, part: slice, staging: Any) -> None:
        """Queues the copies from a buffer into some of the located blocks; see ``gather``."""


@attrs.frozen(eq=False)
class Blocks:
    """Blocks of one group, where ``DeviceGather`` finds them.

    Attributes:
        object_bytes: Size of one object.
    """

    object_bytes: int
    _rows: Rows
    _located: Any


class DeviceGather:
    """Gathers and scatters the objects of every group. Thread-safe; keeps nothing between calls.

    Every method is called in inference mode, because torch refuses to write tensors outside of it
    that were allocated in it, as vLLM may have done.

    Args:
        memory: KV memory, on one device. Nobody else uses it yet.

    Raises:
        BackendError: A layout reaches outside of KV memory.
    """

    def __init__(self, memory: KVMemory) -> None:
        layouts = [split_evenly(merge_adjacent(layout)) for layout in memory.layouts]
        self._object_bytes = {layout.group_index: layout.object_bytes for layout in layouts}
        self._rows: dict[int, Rows] = {
            layout.group_index: _open_rows(memory, layout) for layout in layouts
        }

    def object_bytes(self, group_index: int) -> int:
        """Returns the size of one object of a group."""
        return self._object_bytes[group_index]

    @property
    def object_bytes_max(self) -> int:
        """Size of the largest object of all groups."""
        return max(self._object_bytes.values())

    def chunks(self, group_index: int, object_count: int, staging_bytes: int) -> Iterator[slice]:
        """Cuts objects into as many as a buffer holds, which is at least one."""
        return cut(object_count, staging_bytes // self._object_bytes[group_index])

    def locate(self, group_index: int, block_ids: Int64Array) -> Blocks:
        """Brings to the device what it needs to find blocks.

        Args:
            group_index: Index of the KV cache group.
            block_ids: int64[objects], ids in KV memory.
        """
        rows = self._rows[group_index]
        return Blocks(self._object_bytes[group_index], rows, rows.locate(block_ids))

    def gather(self, blocks: Blocks, part: slice, staging: Any) -> None:
        """See ``Rows.gather``."""
        blocks._rows.gather(blocks._located, part, staging)

    def scatter(self, blocks: Blocks, part: slice, staging: Any) -> None:
        """See ``Rows.scatter``."""
        blocks._rows.scatter(blocks._located, part, staging)


def _open_rows(memory: KVMemory, layout: ObjectLayout) -> Rows:
    """Takes the kernel where it works, and torch's own calls everywhere else."""
    by_torch = TorchRows(memory, layout)
    if memory.regions[0].device_type != "cuda":
        return by_torch
    try:
        from umbp.backends.triton_rows import TritonRows
    except ImportError as error:
        logger.info("Triton cannot be loaded (%s): torch gathers KV, layer by layer", error)
        return by_torch
    device = memory.regions[0].tensor.device
    try:
        with torch.cuda.device(device), torch.inference_mode():
            by_kernel = TritonRows(memory, layout)
            _prove(by_kernel, by_torch, layout, device)
    except Exception as error:
        # Whatever a compiler for a device can raise; what is left is slower and as good.
        logger.warning(
            "the kernel that gathers KV does not work here (%s: %s): torch does it, layer by layer",
            type(error).__name__,
            error,
        )
        return by_torch
    return by_kernel


def _prove(rows: Rows, reference: Rows, layout: ObjectLayout, device: Any) -> None:
    """Has both gather the same blocks, and writes back what they hold; compiles on the way.

    Raises:
        ValueError: They do not agree.
    """
    block_ids = np.unique(np.array([0, layout.block_count - 1]))
    part = slice(0, len(block_ids))
    size_bytes = layout.object_bytes * len(block_ids)
    gathered = torch.full((size_bytes,), 0xA5, dtype=torch.uint8, device=device)
    expected = torch.full((size_bytes,), 0x5A, dtype=torch.uint8, device=device)
    located, known = rows.locate(block_ids), reference.locate(block_ids)
    reference.gather(known, part, expected)
    rows.gather(located, part, gathered)
    if not torch.equal(gathered, expected):
        raise ValueError("it gathered other bytes than torch")
    rows.scatter(located, part, gathered)
    reference.gather(known, part, gathered)
    if not torch.equal(gathered, expected):
        raise ValueError("it scattered other bytes than it had gathered")

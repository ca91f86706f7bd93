# SPDX-License-Identifier: Apache-2.0
"""Moves objects through a small part of the device's own memory, where each is one range.

Every transfer thread has a ring of two slots. While MORI copies the objects of one slot, the device
gathers the next ones in the other; a load goes the other way round. Nothing passes through host
memory but the pool itself.

* MORI copies a slot only after the stream that gathered it has been waited for, and a slot is
  filled again only after MORI's call on it has returned.
* A load has ended only when the stream that scatters has. So has a transfer that fails.
* A call that never returns keeps its ring, as it keeps its blocks. There is one for every thread.
"""

import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch

from umbp.backends.base import KVMemory, MemoryRegion, ObjectLayout, TransferPart
from umbp.backends.device_gather import Blocks, DeviceGather
from umbp.backends.mori_client import MoriClient, Moved
from umbp.backends.mori_columns import GroupColumns
from umbp.errors import BackendError

SLOT_BYTES: Final = 16 << 20
"""Least size of a slot; one object if that is more. As much as MORI copies in half a millisecond,
beside which starting a gather costs little."""

SLOTS_PER_RING: Final = 2

_SLOT_ALIGNMENT: Final = 256
"""So that a slot may be seen as elements of any length."""


@attrs.frozen(eq=False)
class _Slot:
    """Room for objects.

    Attributes:
        staging: uint8[bytes] ``torch.Tensor`` on the device.
        columns: For each group, the room as blocks of one range, counted from 0.
    """

    staging: Any
    columns: dict[int, GroupColumns]


@attrs.frozen(eq=False)
class _Ring:
    slots: tuple[_Slot, ...]
    stream: Any


class StagedTransfers:
    """See ``umbp.backends.mori_transfers.Transfers``.

    Args:
        memory: KV memory, on one device.
        thread_count: Transfers that run at the same time.

    Attributes:
        regions: The rings, one allocation.

    Raises:
        BackendError: KV memory lies on several devices, or a layout reaches outside of it.
    """

    def __init__(self, memory: KVMemory, thread_count: int) -> None:
        first = memory.regions[0]
        devices = {(region.device_type, region.device_index) for region in memory.regions}
        if len(devices) > 1:
            raise BackendError(
                f"KV memory lies on {len(devices)} devices, and is gathered on one only: set "
                "option device_staging to false"
            )
        self._memory = memory  # Keeps the tensors that own the addresses alive.
        self._gather = DeviceGather(memory)
        slot_bytes = max(SLOT_BYTES, self._gather.object_bytes_max)
        self._slot_bytes = -(-slot_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        whole = torch.empty(
            thread_count * SLOTS_PER_RING * self._slot_bytes,
            dtype=torch.int8,
            device=first.tensor.device,
        )
        self.regions = (
            MemoryRegion(
                whole, whole.data_ptr(), whole.numel(), first.device_type, first.device_index
            ),
        )
        self._idle: queue.SimpleQueue[_Ring] = queue.SimpleQueue()
        for pieces in whole.view(thread_count, SLOTS_PER_RING, self._slot_bytes):
            slots = tuple(self._open_slot(piece) for piece in pieces)
            self._idle.put(_Ring(slots, torch.Stream(device=whole.device)))

    def store(
        self,
        client: MoriClient,
        names: Sequence[str],
        part: TransferPart,
        *,
        objects_per_put: int,
    ) -> Moved:
        """See ``Transfers.store``."""
        copied = 0
        failed: list[int] = []
        with self._ring() as ring:
            for chunk, slot in self._gathered(ring, part):
                count = chunk.stop - chunk.start
                moved = client.store(
                    names[chunk],
                    slot.columns[part.group_index],
                    np.arange(count),
                    objects_per_put=objects_per_put,
                )
                copied += moved.object_count
                failed.extend(chunk.start + index for index in moved.failed)
        return Moved(copied, tuple(failed))

    def load(self, client: MoriClient, names: Sequence[str], part: TransferPart) -> Moved:
        """See ``Transfers.load``."""
        failed: list[int] = []
        with self._ring() as ring:
            blocks = self._gather.locate(part.group_index, part.block_ids)
            for index, chunk in enumerate(self._chunks(part)):
                slot = ring.slots[index % SLOTS_PER_RING]
                count = chunk.stop - chunk.start
                moved = client.load(names[chunk], slot.columns[part.group_index], np.arange(count))
                # The other slot, that comes next, has been emptied meanwhile.
                ring.stream.synchronize()
                self._scatter(blocks, chunk, slot, moved.failed)
                failed.extend(chunk.start + index_in_chunk for index_in_chunk in moved.failed)
        return Moved(len(names) - len(failed), tuple(failed))

    def _gathered(self, ring: _Ring, part: TransferPart) -> Iterator[tuple[slice, _Slot]]:
        """Yields objects that lie in a slot, while the next are gathered in the other."""
        blocks = self._gather.locate(part.group_index, part.block_ids)
        object_bytes = self._gather.object_bytes(part.group_index)
        ready: tuple[slice, _Slot] | None = None
        for index, chunk in enumerate(self._chunks(part)):
            slot = ring.slots[index % SLOTS_PER_RING]
            ring.stream.synchronize()
            staged = slot.staging[: (chunk.stop - chunk.start) * object_bytes]
            self._gather.gather(blocks, chunk, staged)
            if ready is not None:
                yield ready
            ready = chunk, slot
        ring.stream.synchronize()
        if ready is not None:
            yield ready

    def _scatter(self, blocks: Blocks, chunk: slice, slot: _Slot, failed: Sequence[int]) -> None:
        """Queues the copies of the objects that were loaded; where others would lie is old."""
        object_bytes = blocks.object_bytes
        begin = 0
        for end in (*failed, chunk.stop - chunk.start):
            if begin < end:
                staged = slot.staging[begin * object_bytes : end * object_bytes]
                self._gather.scatter(blocks, slice(chunk.start + begin, chunk.start + end), staged)
            begin = end + 1

    def _chunks(self, part: TransferPart) -> Iterator[slice]:
        """Cuts a part into as many objects as a slot holds."""
        return self._gather.chunks(part.group_index, len(part.keys), self._slot_bytes)

    @contextlib.contextmanager
    def _ring(self) -> Iterator[_Ring]:
        """Lends a ring, on whose stream the caller then is, and waits for that at the end."""
        ring = self._idle.get()
        try:
            with torch.inference_mode(), ring.stream:
                try:
                    yield ring
                finally:
                    # Also after an error: what was queued still uses the ring and KV memory.
                    ring.stream.synchronize()
        finally:
            self._idle.put(ring)

    def _open_slot(self, piece: Any) -> _Slot:
        columns = {}
        for layout in self._memory.layouts:
            size = layout.object_bytes
            room = ObjectLayout(
                group_index=layout.group_index,
                block_count=self._slot_bytes // size,
                base_addresses=[piece.data_ptr()],
                block_strides=[size],
                range_bytes=[size],
            )
            columns[layout.group_index] = GroupColumns(room)
        return _Slot(piece.view(torch.uint8), columns)

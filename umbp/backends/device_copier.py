# SPDX-License-Identifier: Apache-2.0
"""Copies objects between KV memory on a device and a pool in host memory.

One copy per range keeps a fast link idle. So the device itself gathers objects into a small
buffer of its own, at the speed of its memory, and its copy engine moves the buffer to the pool;
a load goes the other way round. Host memory is read and written in place, once.
"""

import itertools
import threading
from typing import Any, Final

import attrs
import torch

from umbp.backends.arrival import StreamArrival
from umbp.backends.base import Int64Array, KVMemory
from umbp.backends.copiers import Announce
from umbp.backends.device_gather import DeviceGather
from umbp.backends.layout_columns import neighbour_runs

STAGING_BYTES: Final = 16 << 20
"""One staging buffer in device memory; every transfer thread takes two, of one object each if that
is more. Long enough that starting a copy costs nothing beside the copy, and short enough not to be
missed by the model."""

ARRIVAL_BYTES: Final = 1 << 30
"""How much of a load may still be on its way when it is announced: what the device then waits for.
As long as a processor takes to submit the step that reads it: 20 ms at 50 GB/s."""


@attrs.frozen(eq=False)
class _Lane:
    """A stream, and the buffer that only it uses."""

    stream: Any
    staging: Any


class DeviceCopier:
    """Copies on a stream of its own per thread, and returns once the bytes have arrived.

    Args:
        memory: KV memory, on one device.
        pool: uint8[bytes] ``torch.Tensor`` in host memory.

    Raises:
        BackendError: A layout reaches outside of KV memory.
    """

    def __init__(self, memory: KVMemory, pool: Any) -> None:
        self._pool = pool
        self._device = memory.regions[0].tensor.device
        self._gather = DeviceGather(memory)
        self._staging_bytes = max(STAGING_BYTES, self._gather.object_bytes_max)
        self._of_thread = threading.local()

    def store(self, group_index: int, block_ids: Int64Array, offsets: Int64Array) -> None:
        """See ``Copier.store``."""
        self._copy(group_index, block_ids, offsets, into_pool=True)

    def load(
        self,
        group_index: int,
        block_ids: Int64Array,
        offsets: Int64Array,
        announce: Announce | None = None,
    ) -> None:
        """See ``Copier.load``."""
        if self._device.type == "cpu":
            # Its streams have no events to wait for.
            announce = None
        self._copy(group_index, block_ids, offsets, into_pool=False, announce=announce)

    def _copy(
        self,
        group_index: int,
        block_ids: Int64Array,
        offsets: Int64Array,
        *,
        into_pool: bool,
        announce: Announce | None = None,
    ) -> None:
        lanes = self._lanes()
        object_bytes = self._gather.object_bytes(group_index)
        chunks = self._gather.chunks(group_index, len(offsets), self._staging_bytes)
        with torch.inference_mode():
            try:
                with lanes[0].stream:
                    blocks = self._gather.locate(group_index, block_ids)
                # Both lanes read it.
                lanes[0].stream.synchronize()
                # In turns: while one lane's buffer is gathered, the other's is on the link. A
                # stream runs its part in order, so its buffer can be used again at once.
                quiet_objects = len(offsets) - ARRIVAL_BYTES // object_bytes
                near_end = None
                for lane, part in zip(itertools.cycle(lanes), chunks, strict=False):
                    staged = lane.staging[: (part.stop - part.start) * object_bytes]
                    with lane.stream:
                        if into_pool:
                            self._gather.gather(blocks, part, staged)
                        self._move(object_bytes, staged, offsets[part], into_pool=into_pool)
                        if not into_pool:
                            self._gather.scatter(blocks, part, staged)
                    if announce is not None and near_end is None and part.stop >= quiet_objects:
                        near_end = lane.stream.record_event()
                if announce is not None and near_end is not None:
                    ends = [lane.stream.record_event() for lane in lanes]
                    near_end.synchronize()
                    announce(StreamArrival(self._device, ends))
            finally:
                # Also after an error: what was queued still uses KV memory and the pool.
                for lane in lanes:
                    lane.stream.synchronize()

    def _move(
        self, object_bytes: int, staged: Any, offsets: Int64Array, *, into_pool: bool
    ) -> None:
        """Queues the copies between a buffer of whole objects and their places in the pool."""
        for first, last in neighbour_runs(offsets, object_bytes):
            begin = int(offsets[first])
            stored = self._pool[begin : begin + (last - first) * object_bytes]
            buffered = staged[first * object_bytes : last * object_bytes]
            if into_pool:
                stored.copy_(buffered, non_blocking=True)
            else:
                buffered.copy_(stored, non_blocking=True)

    def _lanes(self) -> tuple[_Lane, _Lane]:
        """Returns the calling thread's lanes."""
        mine = self._of_thread
        if not hasattr(mine, "lanes"):
            mine.lanes = (self._open_lane(), self._open_lane())
        lanes: tuple[_Lane, _Lane] = mine.lanes
        return lanes

    def _open_lane(self) -> _Lane:
        stream = torch.Stream(device=self._device)
        with torch.inference_mode(), stream:
            staging = torch.empty(self._staging_bytes, dtype=torch.uint8, device=self._device)
        return _Lane(stream, staging)

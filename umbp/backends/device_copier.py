# SPDX-License-Identifier: Apache-2.0
"""Copies objects between KV memory on a device and a pool in host memory.

One copy per range keeps a fast link idle. So the device itself gathers objects into a small
buffer of its own, at the speed of its memory, and its copy engine moves the buffer to the pool;
a load goes the other way round. Host memory is read and written in place, once.

Measured on one H200 with 256 blocks of 30 ranges of 24 KiB: 4 GB/s with one asynchronous copy per
range, 46 to 48 GB/s this way with one allocation, 13 to 17 with one allocation per layer.
"""

import threading
from typing import Any, Final

import torch

from umbp.backends.base import Int64Array, KVMemory
from umbp.backends.device_gather import DeviceGather
from umbp.backends.layout_columns import neighbour_runs

STAGING_BYTES: Final = 16 << 20
"""Device memory that each transfer thread takes, or one object if that is more. Long enough that
starting a copy costs nothing beside the copy, and short enough not to be missed by the model."""


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

    def load(self, group_index: int, block_ids: Int64Array, offsets: Int64Array) -> None:
        """See ``Copier.load``."""
        self._copy(group_index, block_ids, offsets, into_pool=False)

    def _copy(
        self, group_index: int, block_ids: Int64Array, offsets: Int64Array, *, into_pool: bool
    ) -> None:
        stream, staging = self._stream_and_staging()
        object_bytes = self._gather.object_bytes(group_index)
        count_max = self._staging_bytes // object_bytes
        with torch.inference_mode(), stream:
            try:
                blocks = self._gather.locate(group_index, block_ids)
                # The stream runs all of this in order, so the buffer can be used again at once.
                for first in range(0, len(offsets), count_max):
                    part = slice(first, min(first + count_max, len(offsets)))
                    staged = staging[: (part.stop - first) * object_bytes]
                    if into_pool:
                        self._gather.gather(blocks, part, staged)
                    self._move(object_bytes, staged, offsets[part], into_pool=into_pool)
                    if not into_pool:
                        self._gather.scatter(blocks, part, staged)
            finally:
                # Also after an error: what was queued still uses KV memory and the pool.
                stream.synchronize()

    def _move(
        self, object_bytes: int, staged: Any, offsets: Int64Array, *, into_pool: bool
    ) -> None:
        """Queues the copies between a buffer of whole objects and their places in the pool."""
        for first, last in neighbour_runs(offsets, object_bytes, len(offsets)):
            begin = int(offsets[first])
            stored = self._pool[begin : begin + (last - first) * object_bytes]
            buffered = staged[first * object_bytes : last * object_bytes]
            if into_pool:
                stored.copy_(buffered, non_blocking=True)
            else:
                buffered.copy_(stored, non_blocking=True)

    def _stream_and_staging(self) -> tuple[Any, Any]:
        mine = self._of_thread
        if not hasattr(mine, "stream"):
            stream = torch.Stream(device=self._device)
            with torch.inference_mode(), stream:
                mine.staging = torch.empty(
                    self._staging_bytes, dtype=torch.uint8, device=self._device
                )
            mine.stream = stream
        return mine.stream, mine.staging

# SPDX-License-Identifier: Apache-2.0
"""Proves, before a pool is used, that MORI moves the bytes that it says it has moved.

MORI judges a copy by the HIP runtime's word. With a runtime that is not ROCm's it may answer True
and move nothing: its gather kernel is launched, the launch fails, and a runtime that does not
report that leaves the destination as it was. No attempt is made to recognise such a runtime;
instead a pattern is stored and loaded once, in a small pool of its own, and compared.
"""

from typing import Final

import numpy as np

from umbp.backends.base import KVMemory, MemoryRegion, ObjectLayout
from umbp.backends.mori_client import MoriClient, PoolBacking, object_names, pool_config
from umbp.backends.mori_columns import GroupColumns
from umbp.backends.mori_library import MoriLibrary, hip_device_count
from umbp.backends.mori_pages import plan_pool
from umbp.errors import BackendError, BackendUnavailable

_BLOCKS: Final = 2
_RANGES: Final = 16
_RANGE_BYTES: Final = 16 * 1024
_OBJECT_BYTES: Final = _RANGES * _RANGE_BYTES
_PATTERN_PERIOD: Final = 251
"""A prime, so that no range and no block looks like another."""


def prove_transfers(library: MoriLibrary, memory: KVMemory) -> None:
    """Stores and loads a pattern on every device that holds KV memory.

    Raises:
        BackendUnavailable: KV memory is on a device, and MORI's HIP runtime sees none.
        BackendError: A transfer failed, or did not move the bytes.
    """
    devices = {(region.device_type, region.device_index) for region in memory.regions}
    for device_type, device_index in sorted(devices, key=str):
        if device_type != "cpu" and hip_device_count() == 0:
            raise BackendUnavailable(
                f"KV memory is on a {device_type} device, but the HIP runtime that MORI uses sees "
                "no device: MORI needs a ROCm build of PyTorch and its ROCm, or on NVIDIA GPUs the "
                "runtime of native/hip_cuda in LD_LIBRARY_PATH (docs/setup.md)"
            )
        _prove_device(library, device_type, device_index)


def _prove_device(library: MoriLibrary, device_type: str, device_index: int | None) -> None:
    import torch  # MORI has imported it already; umbp's own modules load without it.

    device = torch.device(device_type if device_index is None else f"{device_type}:{device_index}")
    shape = (2, _RANGES, _BLOCKS, _RANGE_BYTES)
    scratch = torch.zeros(shape, dtype=torch.uint8, device=device)
    pattern = torch.arange(scratch[0].numel()).remainder(_PATTERN_PERIOD).to(torch.uint8)
    scratch[0] = pattern.view(shape[1:]).to(device)
    # Copying to the host waits for the device, so the scratch memory is ready for MORI.
    expected = scratch[0].cpu()
    region = MemoryRegion(scratch, scratch.data_ptr(), scratch.numel(), device_type, device_index)
    columns = [_columns(scratch[half].data_ptr()) for half in range(2)]

    plan = plan_pool(
        4 * _BLOCKS * _OBJECT_BYTES,
        [_OBJECT_BYTES],
        page_bytes=None,
        high_watermark=0.5,
        low_watermark=0.5,
    )
    client = MoriClient(library, pool_config(library, plan, PoolBacking()), put_retries=0)
    try:
        client.register(region)
        names = object_names([b"probe-0", b"probe-1"], _OBJECT_BYTES)
        blocks = np.arange(_BLOCKS)
        stored = client.store(names, columns[0], blocks, objects_per_put=_BLOCKS)
        loaded = client.load(names, columns[1], blocks)
    finally:
        client.close()
    if stored.failed or loaded.failed:
        raise BackendError(f"MORI could not move a test pattern of {device_type} memory")
    if not torch.equal(scratch[1].cpu(), expected):
        raise BackendError(
            f"MORI says that it moved {device_type} memory, and did not: with a HIP runtime that "
            "is not ROCm's, set the environment variable UMBP_DRAM_GATHER_KERNEL=0"
        )


def _columns(address: int) -> GroupColumns:
    bases = address + np.arange(_RANGES) * _BLOCKS * _RANGE_BYTES
    ones = np.ones(_RANGES, dtype=np.int64)
    return GroupColumns(ObjectLayout(0, _BLOCKS, bases, ones * _RANGE_BYTES, ones * _RANGE_BYTES))

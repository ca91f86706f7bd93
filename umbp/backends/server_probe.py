# SPDX-License-Identifier: Apache-2.0
"""Proves, before a server is used, that it moves the bytes that it says it has moved.

The reason is that of ``umbp.backends.mori_probe``: MORI believes its HIP runtime. Here the server's
runtime counts, and the memory must be one that the server can reach, so a piece of the memory
itself is used, KV memory before vLLM uses it, and given back as it was.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from umbp.backends.base import MemoryRegion, ObjectLayout
from umbp.backends.mori_client import MoriClient
from umbp.backends.mori_columns import GroupColumns
from umbp.errors import BackendError, BackendUnavailable

_PROBE_BYTES_MAX: Final = 64 * 1024
_PATTERN_PERIOD: Final = 251
"""A prime, so that no two pieces look alike."""
_ATTEMPTS: Final = 3
_PAUSE_S: Final = 0.2


def prove_server_transfers(client: MoriClient, regions: Sequence[MemoryRegion]) -> None:
    """Stores and loads a pattern on every device that holds memory which the server was given.

    Raises:
        BackendUnavailable: The server would not store or load it.
        BackendError: It says that it did, and did not.
    """
    largest: dict[tuple[str, int | None], MemoryRegion] = {}
    for region in sorted(regions, key=lambda region: region.size_bytes):
        largest[region.device_type, region.device_index] = region
    for region in largest.values():
        _prove_region(client, region)


def _prove_region(client: MoriClient, region: MemoryRegion) -> None:
    import torch  # MORI has imported it already; umbp's own modules load without it.

    probe_bytes = min(_PROBE_BYTES_MAX, region.size_bytes // 2)
    source, target = region.tensor[: 2 * probe_bytes].view(2, probe_bytes)
    pattern = torch.arange(probe_bytes).remainder(_PATTERN_PERIOD).sub(125).to(torch.int8)
    kept = region.tensor[: 2 * probe_bytes].clone()
    try:
        source.copy_(pattern)
        target.zero_()
        target.cpu()  # Waits for the device.
        _move_once(client, region, probe_bytes)
        is_same = torch.equal(target.cpu(), pattern)
    finally:
        region.tensor[: 2 * probe_bytes].copy_(kept)
    if not is_same:
        raise BackendError(
            f"the server says that it moved {region.device_type} memory, and did not: with a HIP "
            "runtime that is not ROCm's, start it with the environment variable "
            "UMBP_DRAM_GATHER_KERNEL=0"
        )


def _move_once(client: MoriClient, region: MemoryRegion, probe_bytes: int) -> None:
    """Stores the first piece of a region and loads it into the second."""
    ones = np.ones(1, dtype=np.int64)
    columns = GroupColumns(
        ObjectLayout(0, 2, ones * region.address, ones * probe_bytes, ones * probe_bytes)
    )
    for _ in range(_ATTEMPTS):
        # A name that nobody has used; the object is evicted in its time.
        name = [f"probe.{secrets.token_hex(8)}"]
        stored = client.store(name, columns, np.array([0]), objects_per_put=1)
        if not stored.failed and not client.load(name, columns, np.array([1])).failed:
            return
        time.sleep(_PAUSE_S)
    raise BackendUnavailable(
        f"the server could not store and load {probe_bytes} bytes of {region.device_type} memory: "
        "its pool is smaller than its load, or it cannot reach this memory; its log says which"
    )

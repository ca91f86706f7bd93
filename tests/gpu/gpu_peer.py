# SPDX-License-Identifier: Apache-2.0
"""What tests do in a process of its own: a pool of the standalone backend beside KV memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from device_kv import PATIENCE_S, DeviceKV, Shape, keys, make_kv, run, site

from umbp.backends.base import SchedulerSite, TransferPart
from umbp.backends.standalone import StandaloneBackend
from umbp.backends.standalone_options import StandaloneOptions

_STATE: dict[str, Any] = {}
"""What this process has."""


def open_pool(options: dict[str, Any], device: str, shape: Shape) -> tuple[int, ...]:
    """Opens this process's pool, and returns the sizes of what the server was given."""
    where = torch.device(device)
    kv = make_kv(where, shape)
    pool = StandaloneBackend.open_worker(StandaloneOptions(**options), site(where))
    _STATE.update(kv=kv, pool=pool)
    pool.register(kv.memory)
    assert pool._transfers is not None
    return tuple(region.size_bytes for region in pool._transfers.regions)


def store(seed: int, count: int) -> str:
    """Fills the first blocks of every group and stores them. Returns the outcome."""
    kv: DeviceKV = _STATE["kv"]
    parts = []
    for layout in kv.memory.layouts:
        group = layout.group_index
        for block in range(count):
            kv.fill(group, block, _seed_of(seed, group, block))
        parts.append(TransferPart(group, _keys(seed, group, count), np.arange(count)))
    _synchronize()
    return str(run(_STATE["pool"], "store", parts).outcome.value)


def load(seed: int, count: int, blocks: Sequence[int]) -> tuple[str, bool]:
    """Loads what was stored with that seed into blocks. Returns the outcome, and if it is right."""
    kv: DeviceKV = _STATE["kv"]
    kv.wipe()
    _synchronize()
    parts = [
        TransferPart(layout.group_index, _keys(seed, layout.group_index, count), list(blocks))
        for layout in kv.memory.layouts
    ]
    outcome = run(_STATE["pool"], "load", parts).outcome
    is_right = all(
        kv.read(group, block) == _content(kv, group, _seed_of(seed, group, index))
        for group in range(len(kv.memory.layouts))
        for index, block in enumerate(blocks)
    )
    return str(outcome.value), is_right


def contains(seed: int, count: int) -> list[bool]:
    """Asks the server as a pool does."""
    return list(_STATE["pool"].contains(_keys(seed, 0, count)))


def close() -> None:
    _STATE.pop("pool").close(PATIENCE_S)


def open_scheduler_side(options: dict[str, Any]) -> None:
    """Connects and closes a lookup client."""
    where = SchedulerSite(bytes(16), 1, "test", 10_000)
    StandaloneBackend.open_lookup(StandaloneOptions(**options), where).close()


def _keys(seed: int, group: int, count: int) -> list[bytes]:
    return [b"%d-" % seed + key for key in keys(group, count)]


def _seed_of(seed: int, group: int, index: int) -> int:
    return 10_000 * seed + 1000 * group + index


def _content(kv: DeviceKV, group: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(kv.memory.layout(group).object_bytes)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

# SPDX-License-Identifier: Apache-2.0
"""A program that compares the Triton kernel, interpreted on host memory, with bytes moved by hand.

Triton decides when it is imported whether it interprets, so this is a process of its own. It prints
one line for each layout, and fails at the first byte that differs.
"""

import sys
from collections.abc import Iterator

import numpy as np
import torch

from umbp.backends.base import KVMemory, ObjectLayout
from umbp.backends.layout_columns import merge_adjacent, split_evenly
from umbp.backends.triton_rows import TritonRows
from umbp.testing.kv_memory import GroupShape, HostKVMemory, KVShape, make_kv_memory

BLOCK_COUNT = 5
PLANES = ((8,), (24, 40, 17), (96, 96), (3, 1), (1 << 14, 1 << 13))
# Read-only, as ids are that come out of a step's metadata.
CHOSEN = np.frombuffer(np.array([3, 0, 4, 1]).tobytes(), dtype=np.int64)


def layouts() -> Iterator[tuple[str, HostKVMemory]]:
    for shape in KVShape:
        for planes in PLANES:
            kv = make_kv_memory(shape, [GroupShape(2, planes)], block_count=BLOCK_COUNT)
            yield f"{shape.name} {planes}", kv
    for base, stride in ((4, 16), (8, 12), (3, 16), (16, 17)):
        whole = make_kv_memory(KVShape.LBH, [GroupShape(1, (128,))], block_count=1)
        region = whole.memory.regions[0]
        layout = ObjectLayout(0, BLOCK_COUNT, [region.address + base], [stride], [8])
        yield f"base {base}, stride {stride}", HostKVMemory(KVMemory((region,), (layout,)))


def check(kv: HostKVMemory) -> None:
    layout = split_evenly(merge_adjacent(kv.memory.layouts[0]))
    rows = TritonRows(kv.memory, layout)
    size = layout.object_bytes
    content = {block: kv.fill(0, block, block) for block in range(BLOCK_COUNT)}
    located = rows.locate(CHOSEN)
    # Not from the first on: a job longer than the buffer goes in parts.
    part = slice(1, len(CHOSEN))
    staging = torch.full((len(CHOSEN) * size,), 7, dtype=torch.uint8)
    rows.gather(located, part, staging[: 3 * size])
    gathered = b"".join(content[block] for block in CHOSEN[part].tolist())
    assert staging.numpy().tobytes() == gathered + bytes([7]) * size
    kv.wipe()
    targets = np.array([4, 2, 0])
    rows.scatter(rows.locate(targets), slice(0, 3), staging[: 3 * size])
    for target, source in zip(targets.tolist(), CHOSEN[part].tolist(), strict=True):
        assert kv.read(0, target) == content[source]
        kv.write(0, target, bytes(size))
    assert not any(kv.snapshot())


def main() -> int:
    for name, kv in layouts():
        check(kv)
        sys.stdout.write(f"{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

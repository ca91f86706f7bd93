# SPDX-License-Identifier: Apache-2.0
"""Stores and loads a few bytes through MORI's real client, to see that it works here.

Run by the interpreter of the profile `mori` (`tools/run.py --profile mori -- python ...`).
"""

from __future__ import annotations

import ctypes
import sys

from mori.umbp import UMBPClient, UMBPConfig

OBJECT_BYTES = 4096


def main() -> int:
    """Returns the exit status: 0 when the bytes came back."""
    config = UMBPConfig()
    config.dram.capacity_bytes = 16 << 20
    config.ssd.enabled = False  # the embedded client has no such tier
    client = UMBPClient(config)
    source = ctypes.create_string_buffer(bytes(range(256)) * (OBJECT_BYTES // 256), OBJECT_BYTES)
    target = ctypes.create_string_buffer(OBJECT_BYTES)
    is_stored = client.put_from_ptr("check", ctypes.addressof(source), OBJECT_BYTES)
    is_loaded = client.get_into_ptr("check", ctypes.addressof(target), OBJECT_BYTES)
    is_same = source.raw == target.raw
    print(f"stored={is_stored} loaded={is_loaded} same={is_same}")
    return 0 if is_stored and is_loaded and is_same else 1


if __name__ == "__main__":
    sys.exit(main())

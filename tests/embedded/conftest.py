# SPDX-License-Identifier: Apache-2.0
"""Tests on MORI's real client. They need MORI and a HIP runtime, ROCm's or the stand-in.

Where ``UMBP_REQUIRE_MORI`` is 1 they fail when MORI cannot be loaded; elsewhere they are skipped.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from embedded_rig import BLOCKS, GROUP, PATIENCE_S, OpenRig, Rig, site

from umbp.backends.embedded import EmbeddedBackend, EmbeddedOptions
from umbp.backends.mori_library import MoriLibrary, load_mori
from umbp.errors import BackendUnavailable
from umbp.testing.kv_memory import GroupShape, KVShape, make_kv_memory


def require_mori() -> MoriLibrary:
    """Loads MORI as the backend does, or skips or fails the test."""
    try:
        return load_mori(default_read_lease_ms=1)
    except BackendUnavailable as error:
        if os.environ.get("UMBP_REQUIRE_MORI") == "1":
            pytest.fail(f"UMBP_REQUIRE_MORI is 1, but {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def mori() -> MoriLibrary:
    return require_mori()


@pytest.fixture
def open_rig() -> Iterator[OpenRig]:
    """Opens pools of ``object_count`` objects; closes them at the end."""
    rigs: list[Rig] = []

    def open_one(
        object_count: int = 32,
        *,
        groups: Sequence[GroupShape] = (GROUP,),
        shape: KVShape = KVShape.LBH,
        transfer_timeout_ms: int = int(PATIENCE_S * 1000),
        **options: Any,
    ) -> Rig:
        options.setdefault("capacity_bytes", object_count * groups[0].object_bytes)
        where = site(f"test-{len(rigs)}", transfer_timeout_ms)
        pool = EmbeddedBackend.open_worker(EmbeddedOptions(**options), where)
        rig = Rig(pool, make_kv_memory(shape, groups, block_count=BLOCKS))
        rigs.append(rig)
        pool.register(rig.kv.memory)
        return rig

    yield open_one
    for rig in rigs:
        rig.pool.close(PATIENCE_S)

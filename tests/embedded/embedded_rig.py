# SPDX-License-Identifier: Apache-2.0
"""An embedded pool with KV memory beside it, for the tests in this folder."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import numpy as np

from umbp.backends.base import JobResult, TransferJob, TransferOutcome, TransferPart, WorkerSite
from umbp.backends.embedded import EmbeddedPool
from umbp.testing.kv_memory import GroupShape, HostKVMemory

PATIENCE_S = 60.0
KIB = 1024
GROUP = GroupShape(head_count=2, plane_bytes=(4 * KIB,) * 8)
OBJECT_BYTES = GROUP.object_bytes
BLOCKS = 16

DONE = TransferOutcome.DONE
FAILED = TransferOutcome.FAILED
NOT_ATTEMPTED = TransferOutcome.NOT_ATTEMPTED


def site(instance: str = "test", transfer_timeout_ms: int = int(PATIENCE_S * 1000)) -> WorkerSite:
    return WorkerSite(
        rank=0,
        rank_count=1,
        device_type="cpu",
        device_index=None,
        instance=instance,
        transfer_timeout_ms=transfer_timeout_ms,
    )


@attrs.define(eq=False)
class Rig:
    """A registered pool with KV memory beside it."""

    pool: EmbeddedPool
    kv: HostKVMemory
    _job_id: int = 0

    def job(self, blocks: Mapping[bytes, int], **more: Any) -> TransferJob:
        self._job_id += 1
        part = TransferPart(0, list(blocks), np.array(list(blocks.values()), dtype=np.int64))
        deadline_s = time.monotonic() + PATIENCE_S
        return TransferJob(self._job_id, (part,), **{"deadline_s": deadline_s, **more})

    def store(self, blocks: Mapping[bytes, int]) -> JobResult:
        self.pool.store(self.job(blocks))
        return self.results(1)[0]

    def load(self, blocks: Mapping[bytes, int]) -> JobResult:
        self.pool.load(self.job(blocks))
        return self.results(1)[0]

    def results(self, count: int) -> list[JobResult]:
        """Waits for that many results, and returns them by job id."""
        results: list[JobResult] = []
        give_up_s = time.monotonic() + PATIENCE_S
        while len(results) < count:
            assert time.monotonic() < give_up_s, f"only {results}"
            results += self.pool.poll()
            time.sleep(0.0005)
        return sorted(results, key=lambda result: result.job_id)

    def fill(self, block_ids: Iterable[int], seed: int = 0) -> dict[int, bytes]:
        return {block: self.kv.fill(0, block, seed + block) for block in block_ids}


OpenRig = Callable[..., Rig]

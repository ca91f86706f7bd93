# SPDX-License-Identifier: Apache-2.0
"""The memory pool under any order of jobs: never a wrong byte, never more than its capacity.

The model is a function: a key's content is derived from the key, so every load can be checked
without knowing which objects the pool has evicted. Jobs of one batch run at the same time.
"""

import time
import zlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from umbp.backends.base import TransferJob, TransferOutcome, TransferPart, WorkerSite
from umbp.backends.memory import MemoryOptions, MemoryPool
from umbp.testing.kv_memory import GroupShape, KVShape, make_kv_memory

pytestmark = pytest.mark.pure

PATIENCE_S = 60.0
GROUPS = (GroupShape(2, (64, 96)), GroupShape(1, (200,)))
BLOCK_COUNT = 24
KEYS = [(group, b"%d-%d" % (group, number)) for group in range(2) for number in range(12)]
SITE = WorkerSite(
    rank=0,
    rank_count=1,
    device_type="cpu",
    device_index=None,
    instance="model",
    transfer_timeout_ms=int(PATIENCE_S * 1000),
)

jobs = st.tuples(
    st.sampled_from(["store", "load"]),
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True),
)


def content_of(group, key):
    return np.random.default_rng(zlib.crc32(key)).bytes(GROUPS[group].object_bytes)


class PoolMachine(RuleBasedStateMachine):
    CAPACITY = 3000

    def __init__(self):
        super().__init__()
        self.kv = make_kv_memory(KVShape.LHB, GROUPS, block_count=BLOCK_COUNT)
        self.pool = MemoryPool(
            MemoryOptions(capacity_bytes=self.CAPACITY, transfer_threads=3), SITE
        )
        self.pool.register(self.kv.memory)
        self.job_count = 0
        self.present = set()
        self.evicted = set()

    @rule(job=jobs)
    def run_alone(self, job):
        kind, objects = job
        missing = {key for _, key in objects} - self.present
        (result,) = self.run([job])
        if kind == "load":
            assert set(result.failed_keys) == missing
            assert result.outcome is (TransferOutcome.FAILED if missing else TransferOutcome.DONE)
        else:
            absent = {key for _, key in objects} - self.held()
            # An object of the last part may take the place of one of the first.
            assert absent <= set(result.failed_keys) | self.evicted
        self.look()

    @rule(batch=st.lists(jobs, min_size=2, max_size=4))
    def run_together(self, batch):
        self.run(batch)
        self.look()

    @invariant()
    def never_holds_more_than_its_capacity(self):
        stats = self.pool.stats()
        assert stats.used_bytes <= self.CAPACITY
        held_bytes = sum(GROUPS[group].object_bytes for group, key in KEYS if key in self.present)
        assert held_bytes <= stats.used_bytes
        assert stats.object_count == len(self.present)

    def teardown(self):
        self.run([("load", [each]) for each in KEYS if each[1] in self.present])
        self.pool.close(PATIENCE_S)
        assert self.pool.stats().used_bytes == 0

    def run(self, batch):
        """Runs jobs on blocks of their own, and checks every byte that they wrote."""
        first_block = 0
        expected = []
        ids = range(self.job_count, self.job_count + len(batch))
        self.job_count += len(batch)
        for job_id, (kind, objects) in zip(ids, batch, strict=True):
            blocks = dict(zip(objects, range(first_block, BLOCK_COUNT), strict=False))
            first_block += len(objects)
            for (group, key), block in blocks.items():
                size = GROUPS[group].object_bytes
                self.kv.write(
                    group, block, content_of(group, key) if kind == "store" else bytes(size)
                )
            parts = tuple(
                TransferPart(
                    group,
                    [key for of, key in objects if of == group],
                    [blocks[each] for each in objects if each[0] == group],
                )
                for group in range(2)
            )
            getattr(self.pool, kind)(TransferJob(job_id, parts, time.monotonic() + PATIENCE_S))
            expected.append((kind, blocks))
        results = self.answers(ids)
        for result, (kind, blocks) in zip(results, expected, strict=True):
            if kind == "load" and result.outcome is TransferOutcome.DONE:
                for (group, key), block in blocks.items():
                    assert self.kv.read(group, block) == content_of(group, key)
        return results

    def answers(self, ids):
        results = {}
        give_up_s = time.monotonic() + PATIENCE_S
        while len(results) < len(ids) and time.monotonic() < give_up_s:
            for result in self.pool.poll():
                assert result.job_id in ids
                assert result.job_id not in results
                results[result.job_id] = result
            time.sleep(0.0002)
        return [results[job_id] for job_id in ids]

    def held(self):
        self.evicted = set(self.pool.take_evictions())
        keys = [key for _, key in KEYS]
        return {key for key, here in zip(keys, self.pool.contains(keys), strict=True) if here}

    def look(self):
        """Learns what the pool holds; what is gone must have been evicted."""
        evicted, now = self.evicted, self.held()
        assert self.present - now <= evicted | self.evicted
        self.present, self.evicted = now, set()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(deadline=None)

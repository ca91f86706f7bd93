# SPDX-License-Identifier: Apache-2.0
"""Host memory, and work on the scheduler's path."""

import ctypes
import gc
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
from connector.bench import Bench
from connector.fakes import FakeRequest, step_output

from umbp.backends.base import WorkerSite
from umbp.backends.host_buffer import open_buffer
from umbp.backends.memory import MemoryOptions, MemoryPool
from umbp.backends.pool_options import PoolOptions


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_case_11_1_pool_takes_what_was_asked_for() -> None:
    # Just over a power of two, where an allocator that rounds up would nearly double it.
    capacity = (64 << 20) + (3 << 20)
    site = WorkerSite(0, 1, "cpu", None, "cases", 1000)
    gc.collect()  # Or it may come while the pool is measured.
    before = resident_bytes()
    pool = MemoryPool(MemoryOptions(capacity_bytes=capacity, prefault=True), site)
    taken = resident_bytes() - before
    pool.close(30.0)
    assert 0.95 * capacity < taken <= 1.05 * capacity


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_case_11_1_ranks_share_the_total(ranks: int) -> None:
    total = 1 << 20
    each = PoolOptions(total_capacity_bytes=total).resolve_capacity_bytes(ranks)
    assert total - ranks < each * ranks <= total


def test_case_11_3_pages_come_from_the_node_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[int, int, list[int]]] = []

    class Library:
        @staticmethod
        def mbind(address: Any, size: Any, _mode: int, mask: Any, *_: Any) -> int:
            calls.append((address.value, size.value, list(mask)))
            # The policy must be there before the first page is touched.
            resident.append(resident_bytes())
            return 0

    resident: list[int] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: Library)
    before = resident_bytes()
    buffer = open_buffer(32 << 20, numa_node=0, prefault=True)
    assert calls == [(buffer.tensor.data_ptr(), 32 << 20, [1])]
    assert resident[0] - before < 8 << 20
    buffer.close()


def events_of_planning(tokens: int, chunk: int) -> tuple[int, int]:
    """Counts calls, into Python and C: of a lookup and load; of a step that stores a chunk."""
    counts = [0]

    def count(*_: object) -> None:
        counts[0] += 1

    bench = Bench(blocks=tokens // 16 + 2)
    stored, fresh = FakeRequest.of("a", tokens), FakeRequest.of("b", tokens)
    fresh.block_hashes = [hash_[::-1] for hash_ in fresh.block_hashes]
    bench.lookups.stored = set(stored.block_hashes)
    table = list(range(1, tokens // 16 + 1))
    sys.setprofile(count)
    try:
        external, _ = bench.side.matched_tokens(stored, 0)
        bench.side.admitted(stored, (table,), external or 0)
        bench.idle_step()
        looked_up = counts[0]
        bench.side.matched_tokens(fresh, 0)
        bench.side.admitted(fresh, (table,), 0)
        fresh.num_computed_tokens = tokens - chunk
        bench.core.requests["b"].planned_tokens = tokens - chunk
        counts[0] = 0
        (plan,) = bench.side.step_metadata(step_output({"b": chunk}, {"b": table})).stores
        planned = counts[0]
    finally:
        sys.setprofile(None)
    assert len(plan.parts[0].hashes) == 2 * chunk
    return looked_up, planned


def test_case_11_5_planning_is_linear_and_a_step_costs_what_it_stores() -> None:
    short, long = events_of_planning(16_384, 2048), events_of_planning(131_072, 2048)
    # Eight times the tokens: at most eight times the calls, and far fewer where C does the work.
    assert long[0] <= 8 * short[0]
    assert long[1] <= short[1] + 16
    # Of a prompt of 128k tokens, no token is looked at one by one.
    assert long[0] < 4 * 131_072 // 16

# SPDX-License-Identifier: Apache-2.0
"""What tests do in a peer: a node of the distributed backend, and a client that looks up."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from masters import Master
from peer_calls import NAMESPACE, keep_lookup, keep_pool, lookup, pool, site
from peer_process import PATIENCE_S

from umbp.backends.base import LookupQuestion, SchedulerSite
from umbp.backends.distributed import DistributedBackend, DistributedPool
from umbp.backends.distributed_options import DistributedOptions
from umbp.backends.mori_lookup import MoriLookup
from umbp.errors import BackendUnavailable
from umbp.testing.conformance import CHECKS, Harness, PoolCase
from umbp.testing.conformance_rig import SMALL


def mori_problem() -> str | None:
    """Says why MORI cannot be loaded."""
    try:
        DistributedBackend.check_available()
    except BackendUnavailable as error:
        return str(error)
    return None


def open_pool(
    options: Mapping[str, Any], transfer_timeout_ms: int = int(PATIENCE_S * 1000)
) -> None:
    """Opens and registers this process's pool."""
    keep_pool(
        DistributedBackend.open_worker(DistributedOptions(**options), site(transfer_timeout_ms))
    )


def open_lookup(options: Mapping[str, Any], *, timeout_ms: int = 10_000, ranks: int = 1) -> None:
    keep_lookup(
        DistributedBackend.open_lookup(
            DistributedOptions(**options), SchedulerSite(NAMESPACE, ranks, "test", timeout_ms)
        )
    )


def opening_error(
    options: Mapping[str, Any], opening: Callable[..., None] = open_pool
) -> tuple[str, str, float]:
    """Returns how opening fails: the error's class and message, and after how long."""
    begun_s = time.monotonic()
    try:
        opening(options)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun_s
    raise AssertionError("it opened")


def capacity_bytes() -> int:
    """Returns how large the pool is."""
    size: int = pool().stats().capacity_bytes
    return size


def breaker_counters() -> dict[str, int]:
    return lookup().counters()


# ---------------------------------------------------------------- conformance


class _UpToDate:
    """A lookup client that asks when the master knows all that was stored before.

    A node tells the master right after a store, and on its own thread: for a moment, a lookup may
    miss. The checks do not allow for that. So each pool stores a marker, which the master hears of
    after everything else, before a question is asked.
    """

    def __init__(self, client: MoriLookup, pools: list[DistributedPool]) -> None:
        self._client = client
        self._pools = pools
        self._markers = 0

    def ask(self, question: LookupQuestion) -> None:
        with contextlib.suppress(BackendUnavailable):  # Of a closed client.
            self._await_markers()
        self._client.ask(question)

    def _await_markers(self) -> None:
        for node in self._pools:
            opened = node._opened
            if opened is None:
                continue
            self._markers += 1
            name = [f"marker-{self._markers}"]
            opened.client.store(name, opened.columns[SMALL], np.array([0]), objects_per_put=1)
            opened.client.publish()
            asking = self._client._link.client().client
            give_up_s = time.monotonic() + PATIENCE_S
            while not all(asking.contains(name)):
                assert time.monotonic() < give_up_s, "the master does not hear of an object"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def conform(check: Callable[..., None], folder: str) -> None:
    """Runs a check of the conformance suite. Each pool of a rank 0 gets a master of its own."""
    masters: list[Master] = []
    pools: list[DistributedPool] = []

    def open_case(case: PoolCase) -> DistributedPool:
        if case.site.rank == 0:
            masters.append(Master(Path(folder) / f"{len(masters)}.log"))
            masters[-1].start()
            pools.clear()
        options = {
            **masters[-1].options,
            "capacity_bytes": case.capacity_bytes,
            "queue_limit": case.queue_limit,
            "transfer_threads": case.transfer_threads,
        }
        pools.append(DistributedBackend.open_worker(DistributedOptions(**options), case.site))
        return pools[-1]

    def open_client(where: SchedulerSite) -> Any:
        options = DistributedOptions(**masters[-1].options)
        return _UpToDate(DistributedBackend.open_lookup(options, where), pools)

    try:
        check(open_case if check in CHECKS else Harness(open_case, open_client), PATIENCE_S)
    finally:
        for master in masters:
            master.end()

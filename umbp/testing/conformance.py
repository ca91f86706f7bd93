# SPDX-License-Identifier: Apache-2.0
"""Checks that a backend keeps the rules of ``umbp.backends.base``.

Give a function that opens the pool, and run everything, or one check at a time:

    def make(case):
        options = MyOptions(capacity_bytes=case.capacity_bytes, queue_limit=case.queue_limit)
        return MyBackend.open_worker(options, case.site)

    check_worker_pool(make)

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_backend(check):
        check(make)

A backend whose pool lives in another process has a lookup client too, and its other side can be
gone: ``check_backend`` takes a ``Harness`` that opens and ends all of them. ``pytest -p
umbp.testing.pytest_plugin --pyargs umbp.testing.checks --umbp-backend NAME`` does it by name.

A broken rule raises ``ConformanceError``. KV memory is ordinary host memory, so no GPU is needed.
The checks hold a job back by its fence, never by a delay, and are sure of what they see; only
waiting for an answer that never comes has a limit, ``patience_s``.
"""

from collections.abc import Callable
from typing import Final

from umbp.testing.conformance_jobs import (
    check_answers_once,
    check_arrival,
    check_cancel,
    check_close_while_busy,
    check_deadline,
    check_fence_error,
    check_full_queue,
    check_job_id_in_use,
    check_visible_when_complete,
    check_wait,
)
from umbp.testing.conformance_lookup import LOOKUP_CHECKS
from umbp.testing.conformance_objects import (
    check_any_key,
    check_first_bytes_stay,
    check_memory_moves,
    check_missing_key_fails_load,
    check_partial_load,
    check_partial_store,
    check_reset_by_epoch,
    check_round_trip,
    check_unknown_group,
    check_wrong_size,
)
from umbp.testing.conformance_other_side import OTHER_SIDE_CHECKS
from umbp.testing.conformance_rig import PATIENCE_S, ConformanceError, MakePool, PoolCase
from umbp.testing.conformance_room import (
    check_capacity,
    check_eviction_under_load,
    check_load_order_evicts,
    check_many_threads,
)
from umbp.testing.harness import Harness

__all__ = [
    "CHECKS",
    "ConformanceError",
    "Harness",
    "LOOKUP_CHECKS",
    "MakePool",
    "OTHER_SIDE_CHECKS",
    "PoolCase",
    "check_backend",
    "check_lookup_client",
    "check_other_side",
    "check_worker_pool",
]

CHECKS: Final[tuple[Callable[..., None], ...]] = (
    check_round_trip,
    check_first_bytes_stay,
    check_wrong_size,
    check_unknown_group,
    check_partial_store,
    check_partial_load,
    check_missing_key_fails_load,
    check_any_key,
    check_reset_by_epoch,
    check_memory_moves,
    check_visible_when_complete,
    check_fence_error,
    check_capacity,
    check_load_order_evicts,
    check_eviction_under_load,
    check_many_threads,
    check_answers_once,
    check_cancel,
    check_job_id_in_use,
    check_deadline,
    check_full_queue,
    check_wait,
    check_arrival,
    check_close_while_busy,
)
"""Every check of a ``WorkerPool``; each takes a ``MakePool`` and, optionally, ``patience_s``."""


def check_backend(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """Runs every check that applies: those of what the harness can open and end.

    Args:
        harness: Opens the backend's sides.
        patience_s: How long an answer may take before it counts as lost.

    Raises:
        ConformanceError: A rule is broken; the message says which.
    """
    check_worker_pool(harness.open_pool, patience_s)
    if harness.open_lookup is not None:
        check_lookup_client(harness, patience_s)
    if harness.kill_other_side is not None:
        check_other_side(harness, patience_s)


def check_worker_pool(make: MakePool, patience_s: float = PATIENCE_S) -> None:
    """Runs every check of a ``WorkerPool``.

    Args:
        make: Opens a new pool; the check registers KV memory and closes it.
        patience_s: How long an answer may take before it counts as lost.

    Raises:
        ConformanceError: A rule is broken; the message says which.
    """
    for check in CHECKS:
        check(make, patience_s)


def check_lookup_client(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """Runs every check of a ``LookupClient``.

    Args:
        harness: One that has ``open_lookup``.
        patience_s: How long an answer may take before it counts as lost.

    Raises:
        ConformanceError: A rule is broken; the message says which.
    """
    for check in LOOKUP_CHECKS:
        check(harness, patience_s)


def check_other_side(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """Runs every check of what happens when the other side ends.

    Args:
        harness: One that has ``kill_other_side``.
        patience_s: How long an answer may take before it counts as lost.

    Raises:
        ConformanceError: A rule is broken; the message says which.
    """
    for check in OTHER_SIDE_CHECKS:
        check(harness, patience_s)

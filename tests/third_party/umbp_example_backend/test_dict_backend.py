# SPDX-License-Identifier: Apache-2.0
"""The backend keeps the rules that umbp asks of every backend."""

from collections.abc import Callable

import pytest
from umbp_example_backend import DictBackend, DictOptions, DictPool

from umbp.testing.conformance import CHECKS, PoolCase


def make(case: PoolCase) -> DictPool:
    """Opens a pool of the size that a check wants."""
    options = DictOptions(capacity_bytes=case.capacity_bytes, queue_limit=case.queue_limit)
    return DictBackend.open_worker(options, case.site)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[..., None]) -> None:
    check(make)

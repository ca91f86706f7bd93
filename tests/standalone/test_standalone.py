# SPDX-License-Identifier: Apache-2.0
"""The standalone backend on MORI's real server."""

from collections.abc import Callable
from pathlib import Path

import peer_pool
import pytest
from peers import Peer

from umbp.backends.base import TransferOutcome
from umbp.testing.conformance import CHECKS

DONE = TransferOutcome.DONE
FAILED = TransferOutcome.FAILED


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_rules_of_a_backend(
    check: Callable[..., None], peer: Peer, folder: Path
) -> None:
    peer.run(peer_pool.conform, check, str(folder))

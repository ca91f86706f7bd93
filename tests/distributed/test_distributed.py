# SPDX-License-Identifier: Apache-2.0
"""The distributed backend keeps the rules of ``umbp.backends.base``, with its lookup client."""

from collections.abc import Callable
from pathlib import Path

import node_calls
import peer_calls
import pytest
from masters import Master
from peer_process import PeerProcess

from umbp.backends.base import TransferOutcome
from umbp.testing.conformance import CHECKS, LOOKUP_CHECKS
from umbp.testing.conformance_objects import check_reset_by_epoch, check_wrong_size
from umbp.testing.conformance_room import check_capacity, check_load_order_evicts

NOT_KEPT = (
    # The namespace and the group imply the size, as in a standalone server's pool.
    check_wrong_size,
    # A full pool refuses stores until the master's next sweep, which knows of no loads.
    check_capacity,
    check_load_order_evicts,
    check_reset_by_epoch,
)


@pytest.mark.parametrize(
    "check",
    [check for check in (*CHECKS, *LOOKUP_CHECKS) if check not in NOT_KEPT],
    ids=lambda check: check.__name__,
)
def test_it_keeps_the_rules_of_a_backend(
    check: Callable[..., None], peer: PeerProcess, tmp_path: Path
) -> None:
    """The pool is in the worker, so that there is no other side that objects could be lost with."""
    peer.run(node_calls.conform, check, str(tmp_path))


def test_objects_that_the_device_gathers_come_back(peer: PeerProcess, master: Master) -> None:
    peer.run(node_calls.open_pool, master.options | {"device_staging": True})
    names = {f"name-{block}": block for block in range(8)}
    content = peer.run(peer_calls.fill, {block: block for block in range(8)})
    assert peer.run(peer_calls.store, names).outcome is TransferOutcome.DONE
    elsewhere = {name: 15 - block for name, block in names.items()}
    assert peer.run(peer_calls.load, elsewhere).outcome is TransferOutcome.DONE
    for block in range(8):
        assert peer.run(peer_calls.read, 15 - block) == content[block]

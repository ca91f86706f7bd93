# SPDX-License-Identifier: Apache-2.0
"""The standalone backend when the device gathers objects: the server is given the rings alone."""

from collections.abc import Callable

import peer_calls
import peer_pool
from peers import Peer, Server

from umbp.backends.base import TransferOutcome
from umbp.backends.standalone import StandalonePool

DONE = TransferOutcome.DONE
STALLED = TransferOutcome.STALLED
STAGING = {"device_staging": True}
A = {"a": 0}


def shared_bytes() -> tuple[int, ...]:
    """Returns the sizes of what this process has given to the server."""
    pool = peer_calls.pool()
    assert isinstance(pool, StandalonePool)
    assert pool._transfers is not None
    return tuple(region.size_bytes for region in pool._transfers.regions)


def test_what_one_process_stores_another_loads(
    start_peer: Callable[[], Peer], server: Server
) -> None:
    first, second = start_peer(), start_peer()
    for peer in (first, second):
        peer.run(peer_pool.open_pool, server.options | STAGING)
        assert peer.run(shared_bytes) == (32 << 20,)
    content = first.run(peer_calls.fill, {block: block for block in range(8)})
    names = {f"name-{block}": block for block in range(8)}
    assert first.run(peer_calls.store, names).outcome is DONE
    elsewhere = {name: 15 - block for name, block in names.items()}
    assert second.run(peer_calls.load, elsewhere).outcome is DONE
    for block in range(8):
        assert second.run(peer_calls.read, 15 - block) == content[block]


def test_a_call_that_stalls_keeps_its_ring_and_its_bytes(peer: Peer, server: Server) -> None:
    peer.run(peer_pool.open_pool, server.options | STAGING, transfer_timeout_ms=100)
    content = peer.run(peer_calls.fill, {0: 1})
    server.stop()
    peer.run(peer_calls.begin, "store", A)
    assert peer.run(peer_calls.results, 1)[0].outcome is STALLED
    server.go_on()
    assert peer.run(peer_calls.results, 1)[0].outcome is DONE
    peer.run(peer_calls.wipe)
    peer.run(peer_calls.until_done, "load", {"a": 5})
    assert peer.run(peer_calls.read, 5) == content[0]


def test_the_next_server_is_given_the_rings_too(peer: Peer, server: Server) -> None:
    peer.run(peer_pool.open_pool, server.options | STAGING)
    content = peer.run(peer_calls.fill, {0: 1})
    assert peer.run(peer_calls.store, A).outcome is DONE
    server.kill()
    server.start()
    peer.run(peer_calls.until_done, "store", {"b": 0})
    peer.run(peer_calls.wipe)
    peer.run(peer_calls.until_done, "load", {"b": 5})
    assert peer.run(peer_calls.read, 5) == content[0]

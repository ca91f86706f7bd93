# SPDX-License-Identifier: Apache-2.0
"""What nodes and lookups do when the master, or another node, is stopped, killed or full."""

import socket
import time
from collections.abc import Callable

import node_calls
import peer_calls
import pytest
from masters import Master, free_port
from peer_calls import OBJECT_BYTES
from peer_process import PATIENCE_S, PeerProcess

from umbp.backends.base import TransferOutcome

DONE = TransferOutcome.DONE
FAILED = TransferOutcome.FAILED
NOT_ATTEMPTED = TransferOutcome.NOT_ATTEMPTED
STALLED = TransferOutcome.STALLED

AT_ONCE_S = 10.0
"""Far less than a call on a stopped master takes in these tests, which is for ever."""

A = {"a": 0}
B = {"b": 1}


def test_what_a_node_stores_is_listed_before_the_next_heartbeat(
    peer: PeerProcess, start_master: Callable[..., Master]
) -> None:
    master = start_master(heartbeat_ttl_s=600)
    peer.run(node_calls.open_pool, master.options)
    peer.run(node_calls.open_lookup, master.options)
    peer.run(peer_calls.fill, {0: 1})
    assert peer.run(peer_calls.store, A).bytes_moved == OBJECT_BYTES
    assert peer.run(peer_calls.until_found, A) < AT_ONCE_S
    assert peer.run(peer_calls.look_up, {"x": 0, **A}) == [False, True]
    assert peer.run(peer_calls.look_up, A, epoch=1) == [False]
    peer.run(node_calls.open_lookup, master.options, ranks=2)
    assert peer.run(peer_calls.look_up, A) == [False]


def test_without_rdma_another_node_s_object_fails_to_load_once_as_a_whole(
    start_peer: Callable[[], PeerProcess], master: Master
) -> None:
    first, second = start_peer(), start_peer()
    for node in (first, second):
        node.run(node_calls.open_pool, master.options)
    first.run(peer_calls.fill, {0: 1})
    assert first.run(peer_calls.store, A).outcome is DONE
    second.run(node_calls.open_lookup, master.options)
    second.run(peer_calls.until_found, A)
    second.run(peer_calls.fill, {3: 2})
    before = second.run(peer_calls.read, 3)
    result = second.run(peer_calls.load, {"a": 3})
    assert (result.outcome, len(result.failed_keys), result.bytes_moved) == (FAILED, 1, 0)
    assert second.run(peer_calls.read, 3) == before
    # It exists, and so it is not stored a second time.
    assert second.run(peer_calls.store, {"a": 3}).bytes_moved == 0
    assert first.run(peer_calls.load, {"a": 5}).outcome is DONE


def test_a_killed_node_s_objects_fail_to_load_until_the_master_misses_it(
    start_peer: Callable[[], PeerProcess], master: Master
) -> None:
    first, second = start_peer(), start_peer()
    for node in (first, second):
        node.run(node_calls.open_pool, master.options)
    first.run(peer_calls.fill, {0: 1})
    assert first.run(peer_calls.store, A).outcome is DONE
    second.run(node_calls.open_lookup, master.options)
    second.run(peer_calls.until_found, A)
    first.kill()
    assert second.run(peer_calls.look_up, A) == [True]
    assert second.run(peer_calls.load, {"a": 3}).outcome is FAILED
    give_up_s = time.monotonic() + PATIENCE_S
    while second.run(peer_calls.look_up, A) == [True]:
        assert time.monotonic() < give_up_s
        time.sleep(0.1)
    # Now it is nobody's, and is stored again.
    assert second.run(peer_calls.store, A).bytes_moved == OBJECT_BYTES
    assert second.run(peer_calls.load, {"a": 3}).outcome is DONE


def test_a_closed_node_s_objects_are_gone_at_once(
    start_peer: Callable[[], PeerProcess], start_master: Callable[..., Master]
) -> None:
    master = start_master(heartbeat_ttl_s=600)
    first, second = start_peer(), start_peer()
    first.run(node_calls.open_pool, master.options)
    first.run(peer_calls.fill, {0: 1})
    assert first.run(peer_calls.store, A).outcome is DONE
    second.run(node_calls.open_lookup, master.options)
    second.run(peer_calls.until_found, A)
    assert first.run(peer_calls.close_pool, 30.0) < AT_ONCE_S
    assert second.run(peer_calls.look_up, A) == [False]


def test_a_stopped_master_stalls_one_store_and_loads_go_on(
    peer: PeerProcess, master: Master
) -> None:
    peer.run(node_calls.open_pool, master.options, transfer_timeout_ms=200)
    content = peer.run(peer_calls.fill, {0: 1, 1: 2})
    assert peer.run(peer_calls.store, A).outcome is DONE
    master.stop()
    running = peer.run(peer_calls.begin, "store", B)
    waiting = peer.run(peer_calls.begin, "store", {"c": 2})
    first = {result.job_id: result for result in peer.run(peer_calls.results, 2)}
    assert first[running].outcome is STALLED
    assert first[waiting].outcome is NOT_ATTEMPTED
    late = peer.run(peer_calls.store, {"d": 2})
    assert (late.outcome, late.reason) == (NOT_ATTEMPTED, "another transfer has stalled")
    assert peer.run(peer_calls.load, {"a": 4}).outcome is DONE
    assert peer.run(peer_calls.read, 4) == content[0]

    master.go_on()
    (final,) = peer.run(peer_calls.results, 1)
    assert final.job_id == running
    assert final.outcome in (DONE, FAILED)
    peer.run(peer_calls.until_done, "store", {"c": 2})


def test_a_process_ends_while_the_master_is_stopped(peer: PeerProcess, master: Master) -> None:
    """Neither a stuck store, nor a lookup, nor MORI's destructors, which wait, keep it."""
    peer.run(node_calls.open_pool, master.options, transfer_timeout_ms=100)
    peer.run(node_calls.open_lookup, master.options, timeout_ms=100)
    master.stop()
    peer.run(peer_calls.begin, "store", A)
    assert peer.run(peer_calls.results, 1)[0].outcome is STALLED
    assert peer.run(peer_calls.look_up, A) == "the master does not answer"
    assert peer.run(peer_calls.close_pool, 30.0) < AT_ONCE_S
    assert peer.run(peer_calls.close_lookup) < AT_ONCE_S
    assert peer.end() < AT_ONCE_S


def test_an_idle_node_is_closed_while_the_master_is_stopped(
    peer: PeerProcess, master: Master
) -> None:
    peer.run(node_calls.open_pool, master.options)
    master.stop()
    assert peer.run(peer_calls.close_pool, 30.0) < AT_ONCE_S
    assert peer.end() < AT_ONCE_S


def test_a_silent_master_costs_one_lookup_and_then_none(peer: PeerProcess, master: Master) -> None:
    peer.run(node_calls.open_pool, master.options)
    peer.run(node_calls.open_lookup, master.options, timeout_ms=200)
    peer.run(peer_calls.fill, {0: 1})
    assert peer.run(peer_calls.store, A).outcome is DONE
    peer.run(peer_calls.until_found, A)
    master.stop()
    assert peer.run(peer_calls.look_up, A) == "the master does not answer"
    for _ in range(300):
        _, ask_s = peer.run(peer_calls.ask, A)
        assert ask_s < AT_ONCE_S
    found, answers_s = peer.run(peer_calls.answers, PATIENCE_S)
    assert answers_s < AT_ONCE_S
    assert [answer.present for answer in found] == [None] * 300
    counters = {"lookup_breaker_open": 1, "lookup_breaker_opened": 1}
    assert peer.run(node_calls.breaker_counters) == counters
    master.go_on()
    peer.run(peer_calls.until_found, A)
    assert peer.run(node_calls.breaker_counters)["lookup_breaker_open"] == 0


def test_a_new_master_learns_what_the_nodes_hold(peer: PeerProcess, master: Master) -> None:
    peer.run(node_calls.open_pool, master.options)
    peer.run(node_calls.open_lookup, master.options)
    content = peer.run(peer_calls.fill, {0: 1, 1: 2})
    assert peer.run(peer_calls.store, A).outcome is DONE
    peer.run(peer_calls.until_found, A)
    master.kill()
    gone = f"the master at {master.address} is gone"
    reasons = [peer.run(peer_calls.look_up, A) for _ in range(3)]
    assert set(reasons[1:]) == {gone}
    stores = [peer.run(peer_calls.store, B) for _ in range(3)]
    assert [result.outcome for result in stores[1:]] == [NOT_ATTEMPTED] * 2
    assert stores[-1].reason == gone
    # What is this node's own needs no master.
    assert peer.run(peer_calls.load, {"a": 4}).outcome is DONE
    assert peer.run(peer_calls.read, 4) == content[0]

    master.start()
    peer.run(peer_calls.until_found, A)
    peer.run(peer_calls.until_done, "store", B)
    peer.run(peer_calls.until_found, {**A, **B})
    lines = peer.run(peer_calls.log_lines, "umbp.backends.master_link")
    assert f"{gone}; KV is computed until it is back" in lines
    assert f"the master at {master.address} answers again" in lines


def test_a_full_pool_refuses_stores_until_the_master_s_next_sweep(
    peer: PeerProcess, master: Master
) -> None:
    options = {**master.options, "capacity_bytes": 12 * OBJECT_BYTES}
    peer.run(node_calls.open_pool, options)
    assert peer.run(node_calls.capacity_bytes) == 12 * OBJECT_BYTES
    content = peer.run(peer_calls.fill, {0: 1})
    names = [f"n{index}" for index in range(13)]
    outcomes = [peer.run(peer_calls.store, {name: 0}).outcome for name in names]
    assert outcomes == [DONE] * 12 + [FAILED]
    peer.run(peer_calls.until_done, "store", {names[-1]: 0})
    peer.run(peer_calls.wipe)
    assert peer.run(peer_calls.load, {names[-1]: 5}).outcome is DONE
    assert peer.run(peer_calls.read, 5) == content[0]


def test_an_engine_does_not_start_without_a_master(peer: PeerProcess, master: Master) -> None:
    master.kill()
    options = {**master.options, "startup_timeout_ms": 200}
    for opening in (node_calls.open_pool, node_calls.open_lookup):
        kind, message, _ = peer.run(node_calls.opening_error, options, opening)
        assert kind == "BackendUnavailable"
        start = f"start one with `umbp serve master --address {master.address}`"
        assert message.startswith(f"the master at {master.address} is not there: {start}")


def test_an_engine_does_not_start_on_a_stopped_master(peer: PeerProcess, master: Master) -> None:
    master.stop()
    options = {**master.options, "startup_timeout_ms": 200}
    for opening in (node_calls.open_pool, node_calls.open_lookup):
        kind, message, elapsed_s = peer.run(node_calls.opening_error, options, opening)
        assert (kind, elapsed_s < AT_ONCE_S) == ("BackendUnavailable", True)
        assert message.startswith(f"the master at {master.address} does not answer: start one")


def test_a_port_that_is_in_use_is_named(peer: PeerProcess, master: Master) -> None:
    with socket.socket() as other:
        other.bind(("", free_port()))
        other.listen()
        port = other.getsockname()[1]
        options = {**master.options, "peer_service_port": port}
        kind, message, _ = peer.run(node_calls.opening_error, options)
    assert kind == "ConfigError"
    assert message.startswith(f"option peer_service_port is {port}, but port {port}, of rank 0, ")
    assert "Address already in use" in message


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"capacity_bytes": 1000},
            f"raise option total_capacity_bytes or capacity_bytes, to at "
            f"least {OBJECT_BYTES} per rank",
        ),
        (
            {"ranged_scratch_bytes": 1000, "io_engine_host": "127.0.0.1"},
            f"option ranged_scratch_bytes is 1000, but an object of this model has {OBJECT_BYTES}",
        ),
    ],
)
def test_room_for_no_object_is_refused(
    more: dict[str, object], words: str, peer: PeerProcess, master: Master
) -> None:
    kind, message, _ = peer.run(node_calls.opening_error, {**master.options, **more})
    assert (kind, words in message) == ("ConfigError", True), message


def test_an_interface_without_rdma_is_explained(peer: PeerProcess, master: Master) -> None:
    options = {**master.options, "io_engine_host": "127.0.0.1"}
    kind, message, _ = peer.run(node_calls.opening_error, options)
    assert (kind, "no active RDMA device" in message) == ("BackendUnavailable", True), message

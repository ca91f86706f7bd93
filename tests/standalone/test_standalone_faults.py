# SPDX-License-Identifier: Apache-2.0
"""What the standalone backend does when its server is stopped, killed and started again."""

import time
from collections.abc import Callable

import peer_calls
import peer_pool
import pytest
from peer_calls import OBJECT_BYTES
from peers import PATIENCE_S, Peer, Server

from umbp.backends.base import TransferOutcome

DONE = TransferOutcome.DONE
FAILED = TransferOutcome.FAILED
NOT_ATTEMPTED = TransferOutcome.NOT_ATTEMPTED
STALLED = TransferOutcome.STALLED

AT_ONCE_S = 10.0
"""Far less than a call on a stopped server takes in these tests, which is for ever."""

A = {"a": 0}
B = {"b": 1}


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_stopped_server_stalls_one_job_and_refuses_the_others(
    kind: str, peer: Peer, server: Server
) -> None:
    peer.run(peer_pool.open_pool, server.options, transfer_timeout_ms=200)
    content = peer.run(peer_calls.fill, {0: 1, 1: 2})
    assert peer.run(peer_calls.store, A).outcome is DONE
    server.stop()
    names = {"a": 1} if kind == "load" else B
    running = peer.run(peer_calls.begin, kind, names)
    waiting = peer.run(peer_calls.begin, "store", {"c": 2})
    first = {result.job_id: result for result in peer.run(peer_calls.results, 2)}
    assert first[running].outcome is STALLED
    assert first[waiting].outcome is NOT_ATTEMPTED
    late = peer.run(peer_calls.move, "load", {"a": 3})
    assert (late.outcome, late.reason) == (NOT_ATTEMPTED, "another transfer has stalled")
    assert peer.run(peer_calls.close_pool, 30.0) < AT_ONCE_S

    server.go_on()
    (final,) = peer.run(peer_calls.results, 1)
    assert final.job_id == running
    assert final.outcome in (DONE, FAILED)
    assert peer.run(peer_calls.read, 0) == content[0]


def test_after_a_stop_the_pool_goes_on(peer: Peer, server: Server) -> None:
    peer.run(peer_pool.open_pool, server.options, transfer_timeout_ms=100)
    content = peer.run(peer_calls.fill, {0: 1})
    server.stop()
    peer.run(peer_calls.begin, "store", A)
    assert peer.run(peer_calls.results, 1)[0].outcome is STALLED
    server.go_on()
    assert peer.run(peer_calls.results, 1)[0].outcome is DONE
    peer.run(peer_calls.wipe)
    peer.run(peer_calls.until_done, "load", {"a": 5})
    assert peer.run(peer_calls.read, 5) == content[0]


def test_a_killed_server_fails_what_runs_and_nothing_is_attempted_after_it(
    peer: Peer, server: Server
) -> None:
    peer.run(peer_pool.open_pool, server.options)
    peer.run(peer_calls.fill, {0: 1})
    assert peer.run(peer_calls.store, A).outcome is DONE
    server.kill()
    results = [peer.run(peer_calls.move, kind, A) for kind in ("load", "store", "load")]
    assert results[0].outcome in (FAILED, NOT_ATTEMPTED)
    assert [result.outcome for result in results[1:]] == [NOT_ATTEMPTED] * 2
    assert "no server listens at unix://" in results[-1].reason
    assert peer.run(peer_calls.close_pool, 30.0) < AT_ONCE_S
    peer.end()


def test_a_server_killed_in_mid_transfer_fails_it(peer: Peer, server: Server) -> None:
    peer.run(peer_pool.open_pool, server.options)
    peer.run(peer_calls.fill, {0: 1})
    server.stop()
    peer.run(peer_calls.begin, "store", A)
    time.sleep(0.1)
    server.kill()
    (result,) = peer.run(peer_calls.results, 1)
    assert result.outcome in (FAILED, NOT_ATTEMPTED)


def test_a_new_server_gets_the_memory_again(peer: Peer, server: Server) -> None:
    """Restores are back without a restart, also after gRPC has begun to wait between attempts."""
    peer.run(peer_pool.open_pool, server.options)
    peer.run(peer_pool.open_lookup, server.options)
    content = peer.run(peer_calls.fill, {0: 1})
    for _ in range(2):
        assert peer.run(peer_calls.store, A).outcome is DONE
        server.kill()
        give_up_s = time.monotonic() + 0.6
        while time.monotonic() < give_up_s:
            assert peer.run(peer_calls.store, A).outcome is not DONE
            assert peer.run(peer_calls.look_up, A) != [True]
        server.start()
        assert peer.run(peer_calls.look_up, A) == [False]
        assert peer.run(peer_calls.store, A).outcome is DONE
        assert peer.run(peer_calls.look_up, A) == [True]
        peer.run(peer_calls.wipe)
        assert peer.run(peer_calls.load, {"a": 4}).outcome is DONE
        assert peer.run(peer_calls.read, 4) == content[0]
        peer.run(peer_calls.fill, {0: 1})


def test_a_server_that_forgot_the_memory_gets_it_again(peer: Peer, server: Server) -> None:
    """MORI drops all registrations of a client when one is given up; any loss looks like that."""
    peer.run(peer_pool.open_pool, server.options)
    peer.run(peer_calls.fill, {0: 1})
    peer.run(peer_pool.lose_registrations)
    assert peer.run(peer_calls.store, A).outcome is DONE


def test_a_get_that_outlives_the_read_lease_has_failed(peer: Peer, server: Server) -> None:
    options = {**server.options, "read_lease_ms": 300}
    peer.run(peer_pool.open_pool, options)
    peer.run(peer_calls.fill, {0: 1})
    assert peer.run(peer_calls.store, A).outcome is DONE
    assert peer.run(peer_calls.load, {"a": 1}).outcome is DONE
    server.stop()
    peer.run(peer_calls.begin, "load", {"a": 2})
    time.sleep(0.6)
    server.go_on()
    (result,) = peer.run(peer_calls.results, 1)
    # The second attempt, on a server that goes on, is as good as any.
    assert result.outcome in (FAILED, DONE)
    answers = peer.run(peer_pool.slow_get, A, 0.4)
    assert answers == (0,)
    assert peer.run(peer_pool.slow_get, A, 0.0) == ()


def test_a_silent_server_costs_one_lookup_and_then_none(peer: Peer, server: Server) -> None:
    peer.run(peer_pool.open_pool, server.options)
    peer.run(peer_pool.open_lookup, server.options, timeout_ms=200)
    peer.run(peer_calls.fill, {0: 1})
    assert peer.run(peer_calls.store, A).outcome is DONE
    assert peer.run(peer_calls.look_up, A) == [True]
    server.stop()
    assert peer.run(peer_calls.look_up, A) == "the server does not answer"
    for _ in range(3):
        for _ in range(300):
            _, ask_s = peer.run(peer_calls.ask, A)
            assert ask_s < AT_ONCE_S
        found, answers_s = peer.run(peer_calls.answers, PATIENCE_S)
        assert answers_s < AT_ONCE_S
        assert [answer.present for answer in found] == [None] * 300
    stats = peer.run(peer_calls.lookup_stats)
    assert (stats.is_breaker_open, stats.breaker_opened_count, stats.open_questions) == (True, 1, 0)
    server.go_on()
    peer.run(peer_calls.until_found, A)
    stats = peer.run(peer_calls.lookup_stats)
    assert (stats.is_breaker_open, stats.breaker_opened_count) == (False, 1)
    opened, closed = peer.run(peer_calls.log_lines, "umbp.backends.breaker")
    assert "silent for 200 ms" in opened
    assert "answers again" in closed


def test_a_process_ends_while_the_server_is_stopped(peer: Peer, server: Server) -> None:
    """Neither a stuck call, nor a registered client, nor a lookup keeps a process from its end."""
    peer.run(peer_pool.open_pool, server.options, transfer_timeout_ms=100)
    peer.run(peer_pool.open_lookup, server.options, timeout_ms=100)
    server.stop()
    peer.run(peer_calls.begin, "store", A)
    assert peer.run(peer_calls.results, 1)[0].outcome is STALLED
    assert isinstance(peer.run(peer_calls.look_up, A), str)
    assert peer.run(peer_calls.close_pool, 30.0) < AT_ONCE_S
    assert peer.run(peer_calls.close_lookup) < AT_ONCE_S
    assert peer.end() < AT_ONCE_S


def test_an_idle_pool_is_closed_while_the_server_is_stopped(peer: Peer, server: Server) -> None:
    """MORI's destructor would wait for the server, and hold the interpreter's lock meanwhile."""
    peer.run(peer_pool.open_pool, server.options)
    server.stop()
    assert peer.run(peer_calls.close_pool, 30.0) < AT_ONCE_S
    assert peer.end() < AT_ONCE_S


def test_an_engine_does_not_start_without_a_server(peer: Peer, server: Server) -> None:
    server.kill()
    options = {**server.options, "startup_timeout_ms": 200}
    kind, message, elapsed_s = peer.run(peer_pool.opening_error, options)
    assert (kind, elapsed_s < AT_ONCE_S) == ("BackendUnavailable", True)
    assert message.startswith(f"no server at {server.address}: start one with `umbp serve")
    assert "\n" not in message


def test_an_engine_does_not_start_on_a_stopped_server(peer: Peer, server: Server) -> None:
    server.stop()
    options = {**server.options, "startup_timeout_ms": 500}
    kind, message, elapsed_s = peer.run(peer_pool.opening_error, options)
    assert (kind, elapsed_s < AT_ONCE_S) == ("BackendUnavailable", True)
    assert str(server.address) in message
    assert "\n" not in message


def test_a_read_lease_longer_than_the_server_s_is_refused(peer: Peer, server: Server) -> None:
    kind, message, _ = peer.run(peer_pool.opening_error, {**server.options, "read_lease_ms": 501})
    assert kind == "ConfigError"
    assert "option read_lease_ms is 501, but the server" in message
    assert "protects what is read for 500 ms" in message


def test_memory_of_the_heap_is_refused(peer: Peer, server: Server) -> None:
    kind, message, _ = peer.run(peer_pool.opening_error_of_small_memory, server.options)
    assert kind == "BackendError"
    assert message.startswith("the server cannot be given 4096 bytes of cpu memory at 0x")


def test_two_processes_share_objects_and_one_may_die(
    start_peer: Callable[[], Peer], server: Server
) -> None:
    first, second = start_peer(), start_peer()
    first.run(peer_pool.open_pool, server.options)
    second.run(peer_pool.open_pool, server.options)
    content = first.run(peer_calls.fill, {0: 1})[0]
    assert first.run(peer_calls.store, A).bytes_moved == OBJECT_BYTES
    first.kill()
    assert second.run(peer_calls.load, {"a": 7}).outcome is DONE
    assert second.run(peer_calls.read, 7) == content
    # What is there is not copied again.
    assert second.run(peer_calls.store, {"a": 3}).bytes_moved == 0
    second.run(peer_pool.open_lookup, server.options)
    assert second.run(peer_calls.look_up, {**A, **B}) == [True, False]


def test_a_hit_needs_every_rank_and_the_epoch(peer: Peer, server: Server) -> None:
    peer.run(peer_pool.open_pool, server.options)
    peer.run(peer_calls.fill, {0: 1, 1: 2})
    assert peer.run(peer_calls.store, {**A, **B}).outcome is DONE
    peer.run(peer_pool.open_lookup, server.options)
    assert peer.run(peer_calls.look_up, {"x": 0, **A, "y": 0, **B}) == [False, True, False, True]
    assert peer.run(peer_calls.look_up, A, epoch=1) == [False]
    peer.run(peer_pool.open_lookup, server.options, ranks=2)
    assert peer.run(peer_calls.look_up, A) == [False]

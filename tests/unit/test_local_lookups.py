# SPDX-License-Identifier: Apache-2.0
"""Lookups of ranks in the client's own process: a call where that is safe, else the sockets."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from lookup_ranks import (
    NAMESPACE,
    PATIENCE_S,
    Rank,
    blocks_of,
    make_question,
    one_answer,
    reason_of,
    serving,
)

from umbp.backends.local_lookups import LOCAL_SERVERS
from umbp.backends.lookup_client import SocketLookupClient
from umbp.backends.lookup_messages import encode_question
from umbp.backends.lookup_server import LookupServerCounters
from umbp.backends.memory import MemoryBackend
from umbp.errors import BackendError, UsageError

FRAME = encode_question(make_question(), NAMESPACE)


@contextlib.contextmanager
def asking(ranks: Sequence[Rank]) -> Iterator[SocketLookupClient]:
    client = SocketLookupClient(
        [rank.path for rank in ranks], namespace=NAMESPACE, lookup_timeout_ms=50
    )
    yield client
    client.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    """Two ranks that serve, and can be asked by a call."""
    with serving(tmp_path, 2, are_local=True) as pair:
        yield pair


@pytest.fixture
def client(ranks: list[Rank]) -> Iterator[SocketLookupClient]:
    with asking(ranks) as client:
        yield client


def were_called(*ranks: Rank) -> bool:
    """Says whether all questions so far were asked by a call; each rank has had at least one."""
    here = threading.current_thread()
    by_call = [asker is here for rank in ranks for asker in rank.askers]
    assert all(rank.askers for rank in ranks)
    assert len(set(by_call)) == 1, by_call
    return by_call[0]


def hang_until(event: threading.Event, entered: threading.Event) -> Callable[..., Sequence[bool]]:
    def hang(keys: Sequence[bytes]) -> Sequence[bool]:
        entered.set()
        assert event.wait(PATIENCE_S)
        return [True] * len(keys)

    return hang


# Where all ranks are here.


def test_the_answer_is_there_when_the_question_is_asked(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    ranks[0].hold(0, 0, 1, 2, 9, 11)
    ranks[1].hold(0, 1, 2, 3, 9)
    client.ask(make_question(7))
    (answer,) = client.answers(0.0)
    assert answer.question_id == 7
    assert blocks_of(answer) == [[1, 2, 9], []]
    assert answer.lacking is not None
    assert [answer.lacking(0, block) for block in range(4)] == [1, None, None, 0]
    assert were_called(*ranks)
    assert client.answers(0.0) == []


def test_calls_are_counted_as_questions_over_sockets_are(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    def fail(_: Sequence[bytes]) -> Sequence[bool]:
        raise BackendError("pool is\nclosed")

    client.ask(make_question(1))
    ranks[0].contains = fail
    client.ask(make_question(2))
    good, bad = client.answers()
    assert blocks_of(good) == [[], []]
    assert reason_of(bad) == "rank 0: BackendError: pool is closed"
    assert ranks[0].server is not None
    assert ranks[0].server.counters == LookupServerCounters(answered=1, refused=1)
    assert ranks[1].server is not None
    assert ranks[1].server.counters == LookupServerCounters(answered=2)
    assert were_called(*ranks)


def test_another_epoch_finds_nothing(ranks: list[Rank], client: SocketLookupClient) -> None:
    for rank in ranks:
        rank.hold(0, 1, epoch=3)
    for epoch, blocks in ((3, [1]), (4, []), (3, [1])):
        client.ask(make_question(epoch=epoch))
        assert blocks_of(one_answer(client)) == [blocks, []]


def test_an_answer_that_is_forgotten_is_not_returned(client: SocketLookupClient) -> None:
    client.ask(make_question(1))
    client.ask(make_question(2))
    client.forget(1)
    assert [answer.question_id for answer in client.answers()] == [2]


def test_servers_that_come_after_the_client_are_called(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, is_local=True)
    with asking([rank]) as client:
        client.ask(make_question(1))
        assert client.answers() == []
        rank.start()
        assert one_answer(client).question_id == 1
        client.ask(make_question(2))
        (answer,) = client.answers(0.0)
        assert answer.question_id == 2
        assert rank.askers[-1] is threading.current_thread() is not rank.askers[0]
        rank.stop()


def test_a_call_does_not_answer_a_question_that_is_open(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, is_local=True)
    entered, release = threading.Event(), threading.Event()
    rank.contains = hang_until(release, entered)
    with asking([rank]) as client:
        client.ask(make_question(1))
        rank.start()
        assert entered.wait(PATIENCE_S)
        with pytest.raises(UsageError, match="question 1 is open"):
            client.ask(make_question(1))
        release.set()
        assert one_answer(client).question_id == 1
        rank.stop()


def test_the_next_server_of_a_path_is_called_and_not_the_one_before(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    client.ask(make_question(1))
    before = [list(rank.askers) for rank in ranks]
    for rank in ranks:
        rank.stop()
    others = [Rank(rank.path.parent.parent, rank.index, is_local=True) for rank in ranks]
    for other in others:
        other.start()
        other.hold(0, 5)
    client.ask(make_question(2))
    _, answer = client.answers()
    assert blocks_of(answer) == [[5], []]
    assert were_called(*others)
    assert [rank.askers for rank in ranks] == before
    for other in others:
        other.stop()


def test_a_server_can_withdraw_itself_alone(ranks: list[Rank]) -> None:
    first, second = ranks[0].server, ranks[1].server
    assert first is not None
    assert second is not None
    LOCAL_SERVERS.withdraw(ranks[0].path, second)
    assert LOCAL_SERVERS.ask([ranks[0].path], FRAME) is not None
    for _ in range(2):
        LOCAL_SERVERS.withdraw(ranks[0].path, first)
    assert LOCAL_SERVERS.ask([ranks[0].path], FRAME) is None


# Where not all are here, or may not be called.


def test_a_pool_that_may_wait_is_asked_over_its_socket(tmp_path: Path) -> None:
    with serving(tmp_path, 2) as ranks, asking(ranks) as client:
        client.ask(make_question())
        assert blocks_of(one_answer(client)) == [[], []]
        assert not were_called(*ranks)


def test_one_rank_elsewhere_means_sockets_for_all(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    # As that of a rank in another process, which is nothing but a path.
    assert ranks[1].server is not None
    LOCAL_SERVERS.withdraw(ranks[1].path, ranks[1].server)
    client.ask(make_question())
    assert blocks_of(one_answer(client)) == [[], []]
    assert not were_called(*ranks)


def test_a_closed_server_is_not_called(ranks: list[Rank], client: SocketLookupClient) -> None:
    server = ranks[0].server
    assert server is not None
    ranks[0].stop()
    client.ask(make_question())
    assert client.answers(0.05) == []
    assert ranks[0].askers == []
    # Nor by somebody who has found it before.
    assert server.answer_here(FRAME) is None


def test_a_server_that_is_busy_keeps_no_caller_waiting(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    entered, release = threading.Event(), threading.Event()
    ranks[1].contains = hang_until(release, entered)
    server = ranks[1].server
    assert server is not None
    LOCAL_SERVERS.withdraw(ranks[1].path, server)
    client.ask(make_question(1))  # Over the sockets.
    assert entered.wait(PATIENCE_S)
    LOCAL_SERVERS.announce(ranks[1].path, server)
    client.ask(make_question(2))
    assert client.answers() == []
    release.set()
    answers: list[int] = []
    while len(answers) < 2:
        answers += [answer.question_id for answer in client.answers(PATIENCE_S)]
    assert sorted(answers) == [1, 2]


def test_close_waits_for_a_call(ranks: list[Rank], client: SocketLookupClient) -> None:
    entered, release = threading.Event(), threading.Event()
    ranks[0].contains = hang_until(release, entered)
    server = ranks[0].server
    assert server is not None
    replies: list[object] = []
    caller = threading.Thread(target=lambda: replies.append(server.answer_here(FRAME)))
    caller.start()
    assert entered.wait(PATIENCE_S)
    assert not server.close(timeout_s=0.2)
    release.set()
    caller.join(PATIENCE_S)
    assert replies != [None]
    assert server.close(PATIENCE_S)


def test_a_forked_child_asks_its_parent_over_the_sockets(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.hold(0, 4)
    with LOCAL_SERVERS._lock:  # As when another thread asks while this one forks.
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                signal.alarm(int(PATIENCE_S))
                assert LOCAL_SERVERS.ask([rank.path for rank in ranks], FRAME) is None
                with asking(ranks) as client:
                    client.ask(make_question())
                    assert blocks_of(one_answer(client)) == [[4], []]
                status = 0
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not were_called(*ranks)


def test_the_memory_backend_may_be_called_and_embedded_may_not() -> None:
    assert MemoryBackend.contains_is_local
    from umbp.backends.embedded import EmbeddedBackend

    assert not hasattr(EmbeddedBackend, "contains_is_local")

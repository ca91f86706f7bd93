# SPDX-License-Identifier: Apache-2.0
"""Lookups on a server that may be silent or gone: the link, the breaker and the client's thread.

The server is played by a socket and a dict; ``tests/standalone`` runs the same on MORI's.
"""

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from umbp.backends.base import LookupAnswer, LookupPart, LookupQuestion, SchedulerSite
from umbp.backends.bounded_call import bounded_call
from umbp.backends.breaker import Breaker
from umbp.backends.mori_client import shared_names
from umbp.backends.mori_link import PREPARE_INTERVAL_S, MoriLink
from umbp.backends.mori_lookup import MoriLookup
from umbp.backends.server_address import ServerAddress
from umbp.errors import BackendError, BackendUnavailable, UsageError
from umbp.keys import KeySpace

PATIENCE_S = 30.0
SPACE = KeySpace(b"sixteen bytes ns")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@attrs.define(eq=False)
class FakeServer:
    """Listens at an address; its clients answer from ``names``, when they may."""

    address: ServerAddress
    names: set[str] = attrs.field(factory=set)
    spellings: list[str] = attrs.field(factory=list)
    prepared: int = 0
    failure: BackendError | None = None
    may_answer: threading.Event = attrs.field(factory=threading.Event)
    calls: list[list[str]] = attrs.field(factory=list)
    _listener: socket.socket | None = None

    def start(self) -> None:
        self.address.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.address.path))
        self._listener.listen(64)

    def end(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def connect(self, spelling: str) -> Any:
        self.spellings.append(spelling)
        if self.failure is not None:
            raise self.failure
        return self

    def prepare(self, _: Any) -> None:
        self.prepared += 1

    # What a link and a lookup ask of a client.

    def contains(self, names: Sequence[str]) -> list[bool]:
        self.calls.append(list(names))
        assert self.may_answer.wait(PATIENCE_S)
        return [name in self.names for name in names]

    def close(self) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    # A path relative to the folder has few enough bytes.
    monkeypatch.chdir(tmp_path)
    server = FakeServer(ServerAddress(Path("s.grpc.sock")))
    server.may_answer.set()
    server.start()
    yield server
    server.may_answer.set()
    server.end()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(server: FakeServer, clock: Clock) -> MoriLink:
    return MoriLink(server.address, server.connect, server.prepare, clock=clock)


def question(question_id: int, *hashes: bytes, epoch: int = 7) -> LookupQuestion:
    return LookupQuestion(question_id, epoch, (LookupPart(0, 2, b"".join(hashes)),))


def stored(*hashes: bytes, rank: int = 0, epoch: int = 7) -> list[str]:
    return shared_names(SPACE.keys(hashes, epoch=epoch, group_index=0, rank=rank))


def open_lookup(link: MoriLink, *, ranks: int = 1, timeout_ms: int = 10_000, **more: Any) -> Any:
    return MoriLookup(link, SchedulerSite(SPACE.namespace, ranks, "test", timeout_ms), **more)


def one(answers: list[LookupAnswer]) -> LookupAnswer:
    (answer,) = answers
    return answer


# ---------------------------------------------------------------- link


def test_a_client_is_made_once_and_kept(link: MoriLink, server: FakeServer) -> None:
    assert link.client() == link.client()
    assert (server.spellings, server.prepared) == ([server.address.spelled(0)], 1)


def test_another_server_gets_another_client_under_another_spelling(
    link: MoriLink, server: FakeServer
) -> None:
    first = link.client()
    server.end()
    server.start()
    assert link.client().generation == first.generation + 1
    assert server.prepared == 2
    assert len(set(server.spellings)) == 2
    assert {os.path.abspath(spelling[7:]) for spelling in server.spellings} == {
        os.path.abspath("s.grpc.sock")
    }


def test_while_nobody_listens_no_client_is_made(link: MoriLink, server: FakeServer) -> None:
    used = link.client()
    server.end()
    assert not link.doubt(used)
    for _ in range(3):
        with pytest.raises(BackendUnavailable, match="no server listens at unix:"):
            link.client()
    assert (len(server.spellings), link.counters.losses) == (1, 1)
    server.start()
    assert link.client().generation > used.generation


def test_doubt_of_the_same_server_prepares_again_but_not_at_once(
    link: MoriLink, server: FakeServer, clock: Clock
) -> None:
    used = link.client()
    assert not link.doubt(used)
    assert link.client() == used
    clock.now_s += PREPARE_INTERVAL_S
    assert link.doubt(used)
    assert link.client().generation == used.generation + 1
    assert (len(server.spellings), server.prepared) == (1, 2)
    # Another thread's doubt about what was is answered by what is.
    assert link.doubt(used)
    assert link.client().generation == used.generation + 1


def test_a_server_that_does_not_answer_is_tried_less_and_less_often(
    link: MoriLink, server: FakeServer, clock: Clock
) -> None:
    server.failure = BackendError("not ready")
    with pytest.raises(BackendError, match="not ready"):
        link.client()
    with pytest.raises(BackendUnavailable, match="does not answer"):
        link.client()
    clock.now_s += 0.5
    with pytest.raises(BackendError, match="not ready"):
        link.client()
    clock.now_s += 0.5
    with pytest.raises(BackendUnavailable, match="does not answer"):
        link.client()
    server.failure = None
    clock.now_s += 0.5
    link.client()
    assert len(set(server.spellings)) == 3


def test_a_closed_link_makes_nothing(link: MoriLink) -> None:
    link.client()
    link.close()
    with pytest.raises(BackendUnavailable, match="closed"):
        link.client()


# ---------------------------------------------------------------- breaker and bounded calls


def test_a_breaker_is_open_while_one_call_is_silent(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    breaker = Breaker("it", 0.5, clock)
    assert (breaker.is_open, breaker.remaining_s()) == (False, None)
    breaker.begin()
    assert breaker.remaining_s() == 0.5
    clock.now_s += 0.499
    assert not breaker.is_open
    clock.now_s += 0.001
    assert [breaker.is_open for _ in range(3)] == [True] * 3
    clock.now_s += 1.5
    breaker.end()
    assert (breaker.is_open, breaker.opened_count) == (False, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "it has been silent for 500 ms; lookups miss until it answers",
        "it answers again, after 2.0 s",
    ]


def test_a_bounded_call_returns_raises_or_is_left_alone() -> None:
    assert bounded_call(lambda: 3, PATIENCE_S, "it") == 3
    with pytest.raises(BackendError, match="broken"):
        bounded_call(_raise, PATIENCE_S, "it")
    ended = threading.Event()
    with pytest.raises(BackendUnavailable, match=r"^it did not come within 0\.0 s$"):
        bounded_call(lambda: ended.wait(PATIENCE_S), 0.01, "it did not come")
    ended.set()


def _raise() -> None:
    raise BackendError("broken")


# ---------------------------------------------------------------- lookup


def test_a_block_is_there_when_every_rank_has_it(link: MoriLink, server: FakeServer) -> None:
    client = open_lookup(link, ranks=2)
    server.names = {*stored(b"aa", b"bb"), *stored(b"bb", b"cc", rank=1), *stored(b"dd", epoch=6)}
    client.ask(question(1, b"aa", b"bb", b"cc", b"dd"))
    answer = one(client.answers(PATIENCE_S))
    assert answer.present is not None
    assert answer.present[0].tolist() == [False, True, False, False]
    assert len(server.calls) == 1
    client.close()


def test_an_answer_names_a_rank_that_lacks_a_block(link: MoriLink, server: FakeServer) -> None:
    server.names = {*stored(b"aa", b"bb"), *stored(b"bb", rank=1)}
    lookup = open_lookup(link, ranks=2)
    lookup.ask(question(1, b"aa", b"bb", b"cc"))
    lacking = one(lookup.answers(PATIENCE_S)).lacking
    assert lacking is not None
    assert [lacking(0, block) for block in range(3)] == [1, None, 0]
    lookup.close()


def test_while_the_server_is_silent_everything_misses_at_once_and_nothing_piles_up(
    link: MoriLink, server: FakeServer
) -> None:
    client = open_lookup(link, timeout_ms=50)
    server.names = set(stored(b"aa"))
    server.may_answer.clear()
    client.ask(question(0, b"aa"))
    answer = one(client.answers(PATIENCE_S))
    assert (answer.present, answer.reason) == (None, "the server does not answer")
    for question_id in range(1, 1000):
        client.ask(question(question_id, b"aa"))
    assert len(client.answers(PATIENCE_S)) == 999
    stats = client.stats()
    assert (stats.is_breaker_open, stats.open_questions, len(server.calls)) == (True, 0, 1)
    assert client.counters() == {"lookup_breaker_open": 1, "lookup_breaker_opened": 1}
    server.may_answer.set()
    present = None
    while present is None:
        client.ask(question(1000, b"aa"))
        present = one(client.answers(PATIENCE_S)).present
    assert present[0].tolist() == [True]
    assert client.counters() == {"lookup_breaker_open": 0, "lookup_breaker_opened": 1}
    client.close()


def test_a_server_that_is_gone_is_a_reason_and_not_an_exception(
    link: MoriLink, server: FakeServer
) -> None:
    client = open_lookup(link)
    client.ask(question(1, b"aa"))
    client.answers(PATIENCE_S)
    server.end()
    reasons = set()
    for question_id in range(2, 4):
        client.ask(question(question_id, b"aa"))
        reasons.add(one(client.answers(PATIENCE_S)).reason)
    assert reasons == {"", "no server listens at unix://s.grpc.sock"}
    client.close()


def test_questions_are_bounded_dropped_and_refused(link: MoriLink, server: FakeServer) -> None:
    client = open_lookup(link, queue_limit=2)
    server.may_answer.clear()
    client.ask(question(1, b"aa"))
    client.ask(question(2, b"aa"))
    with pytest.raises(UsageError, match="question 2 is open already"):
        client.ask(question(2, b"aa"))
    client.ask(question(3, b"aa"))
    assert one(client.answers()).reason == "2 questions are open already"
    client.forget(1)
    client.forget(99)
    server.may_answer.set()
    assert one(client.answers(PATIENCE_S)).question_id == 2
    client.ask(LookupQuestion(4, 7, (LookupPart(0, 2, b"odd"),)))
    assert "no whole number" in one(client.answers(PATIENCE_S)).reason
    client.close()
    client.close()
    client.ask(question(5, b"aa"))
    assert one(client.answers(PATIENCE_S)).reason == "client is closed"

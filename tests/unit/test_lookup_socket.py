# SPDX-License-Identifier: Apache-2.0
"""A lookup client over real Unix sockets: what healthy ranks and what sick ones lead to."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import zmq
from lookup_ranks import (
    HASH_BYTES,
    NAMESPACE,
    PATIENCE_S,
    Rank,
    blocks_of,
    make_question,
    one_answer,
    reason_of,
    serving,
    wait_until,
)

from umbp.backends import lookup_client, lookup_messages
from umbp.backends.base import LookupAnswer, LookupClient, LookupPart, LookupQuestion
from umbp.backends.lookup_client import SocketLookupClient
from umbp.backends.lookup_messages import BLOCKS_MAX, PROTOCOL, Reply, encode_reply
from umbp.errors import BackendError, ConfigError, UsageError


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    """Two ranks that serve."""
    with serving(tmp_path, 2) as pair:
        yield pair


MakeClient = Callable[..., SocketLookupClient]


@pytest.fixture
def make_client(ranks: list[Rank]) -> Iterator[MakeClient]:
    """Makes clients, of both ranks unless told otherwise, that are closed at the end."""
    made = []

    def make(count: int = 2, **options: object) -> SocketLookupClient:
        settings = {"namespace": NAMESPACE, "lookup_timeout_ms": 50, **options}
        paths = [rank.path for rank in ranks[:count]]
        made.append(SocketLookupClient(paths, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(make_client: MakeClient) -> SocketLookupClient:
    return make_client()


# What healthy ranks answer.


def test_the_client_is_a_lookup_client(client: SocketLookupClient) -> None:
    assert isinstance(client, LookupClient)


def test_a_block_is_present_where_every_rank_has_it(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    ranks[0].hold(0, 0, 1, 2, 9, 11)
    ranks[1].hold(0, 1, 2, 3, 9)
    ranks[0].hold(1, 4)
    ranks[1].hold(1, 4)
    client.ask(make_question(7))
    answer = one_answer(client)
    assert answer.question_id == 7
    assert blocks_of(answer) == [[1, 2, 9], [4]]
    assert answer.present is not None
    assert [(part.dtype, part.shape) for part in answer.present] == [
        (np.dtype(bool), (12,)),
        (np.dtype(bool), (5,)),
    ]


def test_an_answer_names_a_rank_that_lacks_a_block(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    ranks[0].hold(0, 0, 1)
    ranks[1].hold(0, 1, 2)
    ranks[0].hold(1, 4)
    client.ask(make_question())
    lacking = one_answer(client).lacking
    assert lacking is not None
    assert [lacking(0, block) for block in range(4)] == [1, None, 0, 0]
    assert lacking(1, 4) == 1


def test_ranks_answer_for_their_own_keys_only(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    for rank in ranks:
        rank.hold(0, 1)
    ranks[1].keys = set(ranks[0].keys)  # Keys of rank 0 in the pool of rank 1.
    client.ask(make_question())
    assert blocks_of(one_answer(client)) == [[], []]


def test_another_epoch_finds_nothing(ranks: list[Rank], client: SocketLookupClient) -> None:
    for rank in ranks:
        rank.hold(0, 1, epoch=3)
    client.ask(make_question(1, epoch=4))
    client.ask(make_question(2, epoch=3))
    found: dict[int, list[list[int]]] = {}
    while len(found) < 2:
        found.update({a.question_id: blocks_of(a) for a in client.answers(PATIENCE_S)})
    assert found == {1: [[], []], 2: [[1], []]}


def test_questions_of_no_parts_and_of_no_blocks_are_answered(client: SocketLookupClient) -> None:
    client.ask(LookupQuestion(1, 0, ()))
    assert one_answer(client).present == ()
    client.ask(LookupQuestion(2, 0, (LookupPart(0, HASH_BYTES, b""),)))
    assert blocks_of(one_answer(client)) == [[]]


def test_many_open_questions_are_each_answered_once(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    for rank in ranks:
        rank.hold(0, *range(100))
    for question_id in range(100):
        client.ask(make_question(question_id, blocks=question_id))
    sizes: dict[int, int] = {}
    while len(sizes) < 100:
        for answer in client.answers(PATIENCE_S):
            assert answer.question_id not in sizes
            sizes[answer.question_id] = len(blocks_of(answer)[0])
    assert sizes == {question_id: question_id for question_id in range(100)}
    assert client.answers() == []


def test_the_largest_question_is_answered(ranks: list[Rank], client: SocketLookupClient) -> None:
    for rank in ranks:
        rank.contains = lambda keys: [True] * len(keys)
    hashes = np.arange(BLOCKS_MAX, dtype=">u8").tobytes()
    client.ask(LookupQuestion(1, 0, (LookupPart(0, 8, hashes),)))
    answer = one_answer(client)
    assert answer.present is not None
    assert answer.present[0].sum() == BLOCKS_MAX


def test_a_question_over_a_limit_is_settled_without_asking(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    too_many = (LookupPart(0, 1, bytes(BLOCKS_MAX + 1)),)
    too_long = (LookupPart(0, 0xFFFF, bytes(0xFFFF * 260)),)
    uneven = (LookupPart(0, HASH_BYTES, b"abc"),)
    parts = (LookupPart(0, 1, b""),) * 1000
    for question_id, refused in enumerate((too_many, too_long, uneven, parts)):
        client.ask(LookupQuestion(question_id, 0, refused))
    reasons = [reason_of(answer) for answer in client.answers()]
    assert "262145 blocks, at most 262144" in reasons[0]
    assert "bytes, at most 16777216" in reasons[1]
    assert "3 bytes are no whole number of 8-byte hashes" in reasons[2]
    assert "1000 parts, at most 256" in reasons[3]
    client.ask(make_question(9))
    assert blocks_of(one_answer(client)) == [[], []]
    assert [rank.server.counters.frames_dropped for rank in ranks if rank.server] == [0, 0]


def test_a_question_is_encoded_once_for_all_ranks(
    client: SocketLookupClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    def spy(question: LookupQuestion, namespace: bytes) -> bytes:
        encoded.append(question.question_id)
        return lookup_messages.encode_question(question, namespace)

    monkeypatch.setattr(lookup_client, "encode_question", spy)
    client.ask(make_question(5))
    one_answer(client)
    assert encoded == [5]


# What sick ranks answer.


def test_an_exception_of_one_pool_is_an_answer(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    def fail(_: Sequence[bytes]) -> Sequence[bool]:
        raise BackendError("pool is\nclosed \udcff")

    ranks[1].contains = fail
    client.ask(make_question(1))
    assert reason_of(one_answer(client)) == "rank 1: BackendError: pool is closed ?"
    ranks[1].contains = ranks[1].holds
    client.ask(make_question(2))
    assert blocks_of(one_answer(client)) == [[], []]


def test_a_pool_that_answers_too_few_keys_is_an_error(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    ranks[0].contains = lambda keys: [True]
    client.ask(make_question())
    assert reason_of(one_answer(client)) == "rank 0: the pool answered 1 of 12 keys"


def test_a_very_long_error_is_cut(ranks: list[Rank], client: SocketLookupClient) -> None:
    def fail(_: Sequence[bytes]) -> Sequence[bool]:
        raise BackendError("x" * 10_000_000)

    ranks[0].contains = fail
    client.ask(make_question())
    assert len(reason_of(one_answer(client))) < 500


def test_another_namespace_is_an_error_that_names_both(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    other = bytes(16)
    ranks[1].stop()
    ranks[1].start(namespace=other)
    client.ask(make_question())
    assert reason_of(one_answer(client)) == (
        f"rank 1: namespace {NAMESPACE.hex()} was asked, {other.hex()} is served"
    )


def test_a_wrong_rank_on_a_path_is_an_error(ranks: list[Rank], client: SocketLookupClient) -> None:
    ranks[1].stop()
    ranks[1].start(rank=0)
    client.ask(make_question())
    assert reason_of(one_answer(client)) == f"rank 1: rank 0 serves {ranks[1].path}"


def test_a_dead_rank_means_no_answer_and_the_next_question_finds_it_restarted(
    ranks: list[Rank], make_client: MakeClient
) -> None:
    client = make_client(1)
    ranks[0].stop()
    client.ask(make_question(1))
    assert client.answers(0.1) == []
    client.forget(1)
    ranks[0].hold(0, 2)
    ranks[0].start()
    client.ask(make_question(2))
    assert blocks_of(one_answer(client)) == [[2], []]
    assert client.seen.connections_rebuilt == 1


def test_a_rank_that_starts_after_the_client_is_found(
    ranks: list[Rank], make_client: MakeClient
) -> None:
    ranks[0].stop()
    client = make_client()
    client.ask(make_question())
    assert client.answers(0.05) == []
    ranks[0].start()
    assert blocks_of(one_answer(client)) == [[], []]


def test_a_late_answer_of_a_forgotten_question_is_dropped(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    client.ask(make_question(1))
    client.forget(1)
    client.ask(make_question(2))
    assert one_answer(client).question_id == 2
    assert client.seen.replies_dropped == 2
    assert client.seen.connections_rebuilt == 0


def test_forgetting_an_answer_that_waits_to_be_taken_drops_it(client: SocketLookupClient) -> None:
    client.ask(LookupQuestion(1, 0, (LookupPart(0, HASH_BYTES, b"abc"),)))
    client.forget(1)
    client.forget(12345)
    assert client.answers() == []


def test_a_silent_rank_is_connected_anew_and_its_open_questions_are_settled(
    ranks: list[Rank], make_client: MakeClient
) -> None:
    now_s = 100.0
    release = threading.Event()

    def hang(keys: Sequence[bytes]) -> Sequence[bool]:
        assert release.wait(PATIENCE_S)
        return ranks[0].holds(keys)

    client = make_client(1, clock=lambda: now_s)
    ranks[0].contains = hang
    client.ask(make_question(1))
    now_s += 0.04
    client.ask(make_question(2))
    now_s += 0.02  # Question 1 is 60 ms old and past the timeout of 50 ms, question 2 is not.
    client.forget(1)
    assert client.seen.connections_rebuilt == 0
    client.ask(make_question(3))
    assert client.seen.connections_rebuilt == 1
    (settled,) = client.answers()
    assert settled.question_id == 2
    assert reason_of(settled) == "rank 0 was silent and was connected anew"
    release.set()

    answers: list[LookupAnswer] = []

    def answered() -> bool:
        answers.extend(client.answers())
        return bool(answers)

    wait_until(answered)
    assert [answer.question_id for answer in answers] == [3]


def test_a_late_reply_keeps_the_connection(make_client: MakeClient) -> None:
    now_s = 100.0
    client = make_client(1, clock=lambda: now_s)
    client.ask(make_question(1))
    now_s += 10
    client.forget(1)
    assert client._poller.poll(int(PATIENCE_S * 1000))  # The reply is there, nobody has read it.
    client.ask(make_question(2))
    assert client.seen.connections_rebuilt == 0
    assert client.seen.replies_dropped == 1


def test_a_question_dropped_early_says_nothing_about_the_ranks(
    ranks: list[Rank], client: SocketLookupClient
) -> None:
    ranks[0].stop()
    for question_id in range(5):
        client.ask(make_question(question_id))
        client.forget(question_id)
    assert client.seen.connections_rebuilt == 0


def test_a_client_that_is_dropped_lets_go_of_its_sockets(tmp_path: Path) -> None:
    """The collector would end the context first, which waits for the sockets for ever."""
    script = (
        "import gc, sys, pathlib\n"
        "from umbp.backends.lookup_client import SocketLookupClient\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "path.chmod(0o700)\n"
        "client = SocketLookupClient([path / 'rank'], namespace=bytes(16), lookup_timeout_ms=1)\n"
        "client.itself = client\n"
        "del client\n"
        "gc.collect()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=PATIENCE_S)


def test_a_full_queue_is_an_answer_and_asking_never_waits(
    ranks: list[Rank], make_client: MakeClient
) -> None:
    client = make_client(1, queue_limit=4, lookup_timeout_ms=3_600_000)
    ranks[0].stop()
    for question_id in range(4):
        client.ask(make_question(question_id))
    client.ask(make_question(4))
    answer = one_answer(client)
    assert answer.question_id == 4
    assert reason_of(answer) == "4 questions are open already"
    for question_id in range(4):
        client.forget(question_id)
    client.ask(make_question(5))  # The forgotten ones still lie in the queue.
    assert reason_of(one_answer(client)) == "rank 0 reads no questions and its queue is full"


def test_asking_an_open_question_again_is_the_callers_error(client: SocketLookupClient) -> None:
    client.ask(make_question(1))
    with pytest.raises(UsageError, match="question 1 is open"):
        client.ask(make_question(1))


def test_a_closed_client_answers_at_once(client: SocketLookupClient) -> None:
    client.ask(make_question(1))
    client.close()
    client.close()
    assert client.answers(PATIENCE_S) == []
    client.ask(make_question(2))
    assert reason_of(one_answer(client)) == "client is closed"


def test_a_client_of_no_ranks_or_of_an_open_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one rank"):
        SocketLookupClient([], namespace=NAMESPACE, lookup_timeout_ms=1)
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="must have 0700"):
        SocketLookupClient([tmp_path / "x"], namespace=NAMESPACE, lookup_timeout_ms=1)


# What a client makes of a server that is not ours.


@pytest.fixture
def fake(ranks: list[Rank]) -> Iterator["zmq.Socket[bytes]"]:
    """A raw socket in the place of rank 1."""
    ranks[1].stop()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.rcvtimeo = int(PATIENCE_S * 1000)
        router.bind(f"ipc://{ranks[1].path}")
        yield router


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(PROTOCOL + 1, 1, 1, (b"", b"")), f"speaks lookup protocol {PROTOCOL + 1}"),
        (Reply(PROTOCOL, 1, 0, (b"", b"")), "rank 0 serves"),
        (Reply(PROTOCOL, 1, 1, None), "no masks and no reason"),
        (Reply(PROTOCOL, 1, 1, (b"\xff\xff",)), "1 masks for 2 parts"),
        (Reply(PROTOCOL, 1, 1, (b"\xff", b"\xff")), "mask of 1 bytes for 12 blocks"),
        (Reply(PROTOCOL, 1, 1, (b"\xff\xff\xff", b"\xff")), "mask of 3 bytes for 12 blocks"),
    ],
)
def test_a_wrong_reply_is_never_a_hit(
    fake: "zmq.Socket[bytes]", client: SocketLookupClient, reply: Reply, reason: str
) -> None:
    client.ask(make_question(1))
    identity, _ = fake.recv_multipart()
    fake.send_multipart([identity, encode_reply(reply)])
    assert re.search(reason, reason_of(one_answer(client)))


def test_replies_that_nobody_asked_for_are_counted(
    ranks: list[Rank], fake: "zmq.Socket[bytes]", client: SocketLookupClient
) -> None:
    for rank in ranks:
        rank.hold(0, 3)
    client.ask(make_question(1))
    identity, _ = fake.recv_multipart()
    good = encode_reply(Reply(PROTOCOL, 1, 1, (b"\xff\xf0", b"\xff")))
    for frames in ([b"garbage"], [b"\x80\x04pickle"], [good, good], [b""]):
        fake.send_multipart([identity, *frames])
    fake.send_multipart([identity, encode_reply(Reply(PROTOCOL, 99, 1, ()))])
    fake.send_multipart([identity, good])
    assert blocks_of(one_answer(client)) == [[3], []]
    fake.send_multipart([identity, good])
    wait_until(lambda: not client.answers() and client.seen.replies_dropped == 2)
    assert client.seen.frames_dropped == 4
    assert client.counters()["lookup_frames_dropped"] == 4


def test_a_second_reply_of_one_rank_stands_for_no_other_rank(
    ranks: list[Rank], fake: "zmq.Socket[bytes]", client: SocketLookupClient
) -> None:
    release = threading.Event()

    def wait(keys: Sequence[bytes]) -> Sequence[bool]:
        assert release.wait(PATIENCE_S)
        return ranks[0].holds(keys)

    ranks[0].contains = wait
    client.ask(make_question(1))
    identity, _ = fake.recv_multipart()
    for _ in range(2):
        fake.send_multipart([identity, encode_reply(Reply(PROTOCOL, 1, 1, (b"\xff\xf0", b"\xff")))])
    wait_until(lambda: client.answers() == [] and client.seen.replies_dropped == 1)
    release.set()
    assert blocks_of(one_answer(client)) == [[], []]

# SPDX-License-Identifier: Apache-2.0
"""Lookups under arbitrary input.

Masks come back as they were, no frame stops a server, and a call has the answer of a socket.
"""

import contextlib
import itertools
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lookup_ranks import PATIENCE_S, one_answer, serving

from umbp.backends.base import LookupAnswer, LookupPart, LookupQuestion
from umbp.backends.local_lookups import LOCAL_SERVERS
from umbp.backends.lookup_client import SocketLookupClient
from umbp.backends.lookup_messages import (
    PROTOCOL,
    MessageError,
    Question,
    Reply,
    decode_envelope,
    decode_question,
    decode_reply,
    encode_question,
    encode_reply,
    pack_mask,
    read_mask,
    unpack_mask,
)
from umbp.backends.lookup_server import LookupServer
from umbp.backends.socket_path import socket_path
from umbp.keys import NAMESPACE_BYTES, KeySpace

NAMESPACE = bytes(range(NAMESPACE_BYTES))
LAST_ID = 2**63

on_any_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""No time limits: how quick the machine is says nothing about the code."""

uint16s = st.integers(0, 2**16 - 1)
uint64s = st.integers(0, 2**64 - 1)
masks = st.lists(st.booleans(), max_size=200)


@st.composite
def parts(draw: st.DrawFn) -> LookupPart:
    hash_bytes = draw(st.integers(1, 40))
    blocks = draw(st.integers(0, 5))
    size = hash_bytes * blocks
    return LookupPart(draw(uint16s), hash_bytes, draw(st.binary(min_size=size, max_size=size)))


questions = st.builds(
    LookupQuestion, question_id=uint64s, epoch=uint64s, parts=st.lists(parts(), max_size=4)
)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
values = st.recursive(
    scalars | st.text(max_size=20) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    """A good question with some bytes replaced, removed or put in."""
    frame = bytearray(encode_question(draw(questions), NAMESPACE))
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(frame)))
        end = draw(st.integers(begin, min(begin + 4, len(frame))))
        frame[begin:end] = draw(st.binary(max_size=4))
    return bytes(frame)


def nearly_questions() -> st.SearchStrategy[bytes]:
    """Well-formed msgpack in the shape of a question, with values of any kind in it."""
    part = st.tuples(values | uint16s, values | st.integers(-1, 9), values | st.binary())
    fields = st.tuples(
        values | st.just(PROTOCOL),
        values | uint64s,
        values | st.just(NAMESPACE),
        values | uint64s,
        values | st.lists(part, max_size=3),
    )
    return fields.map(msgspec.msgpack.encode)


frames = st.binary(max_size=200) | values.map(msgspec.msgpack.encode) | mutants()
frames |= nearly_questions()


@on_any_machine
@given(masks, masks)
def test_masks_of_two_ranks_combine_to_what_both_have(first: list[bool], more: list[bool]) -> None:
    count = min(len(first), len(more))
    first, second = first[:count], more[:count]
    combined = read_mask(pack_mask(first), count) & read_mask(pack_mask(second), count)
    present = unpack_mask(combined, count)
    assert present.dtype == np.bool_
    assert present.tolist() == [a and b for a, b in zip(first, second, strict=True)]


@on_any_machine
@given(masks, st.integers(-30, 30).filter(bool))
def test_a_mask_of_another_length_is_refused(mask: list[bool], bytes_more: int) -> None:
    count = len(mask) + 8 * bytes_more
    if count >= 0:
        with pytest.raises(MessageError, match="mask of"):
            read_mask(pack_mask(mask), count)


@on_any_machine
@given(questions)
def test_a_question_comes_back_as_it_was(question: LookupQuestion) -> None:
    decoded = decode_question(encode_question(question, NAMESPACE))
    assert (decoded.protocol, decoded.namespace) == (PROTOCOL, NAMESPACE)
    assert (decoded.question_id, decoded.epoch) == (question.question_id, question.epoch)
    assert [(p.group_index, p.hash_bytes, p.hashes) for p in decoded.parts] == [
        (p.group_index, p.hash_bytes, p.hashes) for p in question.parts
    ]


@on_any_machine
@given(uint64s, uint16s, st.none() | st.lists(st.binary(max_size=9), max_size=4), st.text())
def test_a_reply_comes_back_as_it_was(
    question_id: int, rank: int, packed: list[bytes] | None, error: str
) -> None:
    reply = Reply(PROTOCOL, question_id, rank, None if packed is None else tuple(packed), error)
    decoded = decode_reply(encode_reply(reply))
    assert decoded.masks == reply.masks
    assert (decoded.question_id, decoded.rank) == (question_id, rank)


@on_any_machine
@given(frames)
@example(b"\x91" * 100_000)
def test_no_frame_raises_anything_but_a_message_error(frame: bytes) -> None:
    for decode in (decode_envelope, decode_question, decode_reply):
        with contextlib.suppress(MessageError):
            decode(frame)


class Server:
    """A server that says yes to every key, and a raw socket to it."""

    def __init__(self, directory: str) -> None:
        path = socket_path(directory, namespace=NAMESPACE, dp_index=0, instance="f", rank=0)
        self.server = LookupServer(self.contains, keyspace=KeySpace(NAMESPACE), rank=0, path=path)
        self.context = zmq.Context()
        self.raw = self.context.socket(zmq.DEALER)
        self.raw.rcvtimeo = 30_000
        self.raw.connect(f"ipc://{path}")

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [True] * len(keys)

    def close(self) -> None:
        self.raw.close(linger=0)
        self.context.term()
        assert self.server.close(30)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o700)
        running = Server(directory)
        yield running
        running.close()


def expected_reply(frame: bytes) -> tuple[int, bool] | None:
    """The rule in other words: the id and whether it is a yes; None where nothing is replied."""
    try:
        envelope = decode_envelope(frame)
    except MessageError:
        return None
    question: Question | None = None
    if envelope.protocol == PROTOCOL:
        try:
            question = decode_question(frame)
        except MessageError:
            question = None
    return envelope.question_id, question is not None and question.namespace == NAMESPACE


@on_any_machine
@given(st.lists(frames, max_size=5))
@example([b"\x91" * 100_000])
def test_every_frame_gets_its_one_reply_and_the_next_question_works(
    server: Server, sent: list[bytes]
) -> None:
    for frame in sent:
        server.raw.send(frame)
    part = LookupPart(0, 4, b"12345678")
    server.raw.send(encode_question(LookupQuestion(LAST_ID, 0, (part,)), NAMESPACE))
    for frame in sent:
        expected = expected_reply(frame)
        if expected is not None:
            reply = decode_reply(server.raw.recv())
            assert (reply.question_id, reply.masks is not None) == expected
            assert bool(reply.error) == (reply.masks is None)
    last = decode_reply(server.raw.recv())
    assert last == Reply(PROTOCOL, LAST_ID, 0, (b"\xc0",), "")


# A call and a socket.

Contains = Callable[[Sequence[bytes]], Sequence[bool]]


def holding(threshold: int) -> Contains:
    """A pool of so many 256ths of all keys."""
    return lambda keys: [zlib.crc32(key) % 256 < threshold for key in keys]


def failing(text: str) -> Contains:
    def fail(_: Sequence[bytes]) -> Sequence[bool]:
        raise OSError(text)

    return fail


pools = (
    st.integers(0, 256).map(holding)
    | st.text().map(failing)
    | st.integers(0, 9).map(lambda count: lambda _: [True] * count)
)
impossible = st.sampled_from(
    [
        LookupQuestion(0, -1, ()),
        LookupQuestion(0, 0, (LookupPart(1 << 16, 1, b"1"),)),
        LookupQuestion(0, 0, (LookupPart(0, 4, b"12345"),)),
        LookupQuestion(0, 0, (LookupPart(0, 0, b""),)),
        LookupQuestion(0, 0, (LookupPart(0, 1, b""),) * 257),
    ]
)


class TwoWays:
    """Two ranks that can be called, and clients of one or both, of their namespace or another."""

    def __init__(self, directory: str, stack: contextlib.ExitStack) -> None:
        self.ranks = stack.enter_context(serving(Path(directory), 2, are_local=True))
        paths = [rank.path for rank in self.ranks]
        # The third takes rank 1 for rank 0.
        self.clients = [
            SocketLookupClient(asked, namespace=namespace, lookup_timeout_ms=1000)
            for namespace in (NAMESPACE, bytes(NAMESPACE_BYTES))
            for asked in (paths, paths[:1], paths[1:])
        ]
        for client in self.clients:
            stack.callback(client.close)
        self._ids = itertools.count()

    def ask(self, client: SocketLookupClient, question: LookupQuestion) -> LookupAnswer:
        client.ask(attrs.evolve(question, question_id=next(self._ids)))
        return one_answer(client, PATIENCE_S)

    @contextlib.contextmanager
    def sockets_only(self) -> Iterator[None]:
        servers = [(rank.path, rank.server) for rank in self.ranks]
        for path, server in servers:
            assert server is not None
            LOCAL_SERVERS.withdraw(path, server)
        yield
        for path, server in servers:
            assert server is not None
            LOCAL_SERVERS.announce(path, server)


@pytest.fixture(scope="module")
def two_ways() -> Iterator[TwoWays]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        yield TwoWays(directory, stack)


def found_by(answer: LookupAnswer) -> object:
    """Everything that an answer says but for its reason, as something that can be compared."""
    if answer.present is None:
        assert answer.lacking is None
        return None
    assert answer.lacking is not None
    return [
        [(bool(here), answer.lacking(part, block)) for block, here in enumerate(mask)]
        for part, mask in enumerate(answer.present)
    ]


@on_any_machine
@given(questions | impossible, st.tuples(pools, pools), st.integers(0, 5))
def test_a_call_has_the_answer_that_sockets_have(
    two_ways: TwoWays, question: LookupQuestion, contains: tuple[Contains, Contains], which: int
) -> None:
    for rank, pool in zip(two_ways.ranks, contains, strict=True):
        rank.contains = pool
        rank.askers.clear()
    client = two_ways.clients[which]
    called = two_ways.ask(client, question)
    assert {asker for rank in two_ways.ranks for asker in rank.askers} <= {threading.main_thread()}
    with two_ways.sockets_only():
        sent = two_ways.ask(client, question)
    assert found_by(called) == found_by(sent)
    # Of two ranks that refuse, the one that is named is the one whose reply comes first.
    if not (called.reason.startswith("rank 0: ") and sent.reason.startswith("rank 1: ")):
        assert called.reason == sent.reason

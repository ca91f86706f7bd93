# SPDX-License-Identifier: Apache-2.0
"""A lookup server against hostile frames, and its life from bind to close."""

import ast
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq
from lookup_ranks import (
    HASH_BYTES,
    NAMESPACE,
    PATIENCE_S,
    Rank,
    block_hash,
    blocks_of,
    make_question,
    one_answer,
    serving,
    wait_until,
)

from umbp.backends import (
    local_lookups,
    lookup_client,
    lookup_messages,
    lookup_server,
    socket_path,
)
from umbp.backends.lookup_client import SocketLookupClient
from umbp.backends.lookup_messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    Reply,
    decode_reply,
    encode_question,
)
from umbp.backends.lookup_server import LookupServerCounters
from umbp.backends.socket_path import claim
from umbp.errors import BackendUnavailable, ConfigError

GOOD = encode_question(make_question(1), NAMESPACE)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with serving(tmp_path, 1) as (rank,):
        yield rank


@pytest.fixture
def client(rank: Rank) -> Iterator[SocketLookupClient]:
    client = SocketLookupClient([rank.path], namespace=NAMESPACE, lookup_timeout_ms=50)
    yield client
    client.close()


@pytest.fixture
def raw(rank: Rank) -> Iterator["zmq.Socket[bytes]"]:
    """A socket that sends the server whatever it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = int(PATIENCE_S * 1000)
        dealer.connect(f"ipc://{rank.path}")
        yield dealer


def counters(rank: Rank) -> LookupServerCounters:
    assert rank.server is not None
    return rank.server.counters


def replies_to(raw: "zmq.Socket[bytes]", *frames: bytes) -> Reply:
    """Sends one message and then a good question, and returns the reply to the first."""
    raw.send_multipart(frames)
    raw.send(GOOD)
    first, second = decode_reply(raw.recv()), decode_reply(raw.recv())
    assert second == Reply(PROTOCOL, 1, 0, (b"\x00\x00", b"\x00"), "")
    return first


def question(**fields: object) -> bytes:
    """A question with some fields other than they should be."""
    parts = [[0, HASH_BYTES, block_hash(0)]]
    good = {"protocol": PROTOCOL, "id": 7, "namespace": NAMESPACE, "epoch": 3, "parts": parts}
    return msgspec.msgpack.encode(list({**good, **fields}.values()))


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


UNREADABLE = {
    "empty": (b"",),
    "garbage": (b"\xc1" * 20,),
    "a number": (b"\x01",),
    "an object": (b"\x81\xa1a\x01",),
    "an array of one": (b"\x91\x01",),
    "an id that is text": (b"\x92\x01\xa1x",),
    "half a question": (GOOD[: len(GOOD) // 2],),
    "bytes after the question": (GOOD + b"\x00",),
    "endless nesting": (b"\x93\x01\x02" + b"\x91" * 100_000,),
    "a length of 4 GiB": (b"\x93\x01\x02\xc6\xff\xff\xff\xff",),
    "an array of 2**32 elements": (b"\x95\x01\x02\xc4\x00\x00\xdd\xff\xff\xff\xff",),
    "two frames": (GOOD, GOOD),
    "the empty frame of a REQ socket": (b"", GOOD),
    "very many frames": (b"",) * 1000,
}


@pytest.mark.parametrize("frames", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_message_without_an_envelope_is_dropped_and_counted(
    rank: Rank, raw: "zmq.Socket[bytes]", frames: Sequence[bytes]
) -> None:
    raw.send_multipart(frames)
    raw.send(GOOD)
    assert decode_reply(raw.recv()).question_id == 1
    assert counters(rank) == LookupServerCounters(answered=1, frames_dropped=1)


REFUSED = {
    "version": (question(protocol=PROTOCOL + 1), "lookup protocol 2 was asked, 1 is spoken"),
    "version and body": (b"\x93\x63\x07\xc0", "lookup protocol 99 was asked"),
    "namespace": (question(namespace=bytes(16)), f"namespace {'00' * 16} was asked"),
    "short namespace": (question(namespace=b"x"), "length"),
    "namespace as text": (question(namespace="x" * 16), r"\$\[2\]"),
    "negative epoch": (question(epoch=-1), "malformed"),
    "fraction of an epoch": (question(epoch=0.5), "malformed"),
    "no parts": (question(parts=None), "malformed"),
    "missing fields": (b"\x92\x01\x07", "malformed"),
    "great group": (question(parts=[[1 << 16, 8, b""]]), "malformed"),
    "negative group": (question(parts=[[-1, 8, b""]]), "malformed"),
    "hash of no bytes": (question(parts=[[0, 0, b""]]), "malformed"),
    "negative hash": (question(parts=[[0, -8, b""]]), "malformed"),
    "torn hash": (question(parts=[[0, 8, b"1234567"]]), "no whole number of 8-byte hashes"),
    "many parts": (question(parts=[[0, 8, b""]] * 257), "malformed"),
    "many blocks": (question(parts=[[0, 1, bytes(1 << 17)]] * 3), "393216 blocks, at most"),
}


@pytest.mark.parametrize(("frame", "error"), REFUSED.values(), ids=REFUSED.keys())
def test_a_question_that_cannot_be_answered_gets_one_reply_that_says_why(
    rank: Rank, raw: "zmq.Socket[bytes]", frame: bytes, error: str
) -> None:
    reply = replies_to(raw, frame)
    assert (reply.protocol, reply.question_id, reply.rank) == (PROTOCOL, 7, 0)
    assert reply.masks is None
    assert re.search(error, reply.error)
    assert "\n" not in reply.error
    assert counters(rank) == LookupServerCounters(answered=1, refused=1)


def test_a_pickle_is_never_loaded(rank: Rank, raw: "zmq.Socket[bytes]", tmp_path: Path) -> None:
    target = tmp_path / "exploded"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        bomb = pickle.dumps(Bomb(target), protocol=protocol)
        raw.send(bomb)
        raw.send(question(namespace=bomb))
    raw.send(GOOD)
    replies = [decode_reply(raw.recv()) for _ in range(pickle.HIGHEST_PROTOCOL + 2)]
    assert [reply.question_id for reply in replies][-1] == 1
    assert not target.exists()
    pickle.loads(bomb)  # The bomb works, so the check above can fail.
    assert target.exists()


@pytest.mark.parametrize(
    "module", [local_lookups, lookup_client, lookup_messages, lookup_server, socket_path]
)
def test_no_module_of_the_lookup_can_run_what_it_receives(module: object) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())  # type: ignore[attr-defined]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name for alias in node.names}
            names.add(getattr(node, "module", None) or "")
    banned = {"pickle", "cloudpickle", "marshal", "dill", "eval", "exec", "recv_pyobj"}
    assert not names & banned


def test_a_message_over_the_limit_ends_that_connection_only(
    rank: Rank, raw: "zmq.Socket[bytes]", client: SocketLookupClient
) -> None:
    monitor = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    raw.send(bytes(MESSAGE_BYTES_MAX + 1))
    assert monitor.poll(int(PATIENCE_S * 1000))
    raw.disable_monitor()
    monitor.close(linger=0)
    client.ask(make_question())
    assert blocks_of(one_answer(client)) == [[], []]
    assert counters(rank) == LookupServerCounters(answered=1)


def test_a_message_at_the_limit_is_read(raw: "zmq.Socket[bytes]") -> None:
    padding = MESSAGE_BYTES_MAX - len(question(parts=[[0, 8, bytes(1 << 20)]])) + (1 << 20)
    frame = question(parts=[[0, 8, bytes(padding)]])
    assert len(frame) == MESSAGE_BYTES_MAX
    assert "blocks, at most" in replies_to(raw, frame).error or "whole number"


def test_a_client_that_leaves_before_its_reply_does_not_disturb(
    rank: Rank, client: SocketLookupClient
) -> None:
    entered, release = threading.Event(), threading.Event()

    def wait(keys: Sequence[bytes]) -> Sequence[bool]:
        entered.set()
        assert release.wait(PATIENCE_S)
        return rank.holds(keys)

    rank.contains = wait
    with zmq.Context() as context, context.socket(zmq.DEALER) as leaver:
        leaver.linger = 0
        leaver.connect(f"ipc://{rank.path}")
        leaver.send(GOOD)
        assert entered.wait(PATIENCE_S)
    release.set()
    client.ask(make_question())
    assert blocks_of(one_answer(client)) == [[], []]
    wait_until(lambda: counters(rank).answered == 2)


def test_bytes_that_are_no_zeromq_do_not_disturb(rank: Rank, client: SocketLookupClient) -> None:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(str(rank.path))
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        client.ask(make_question())
        assert blocks_of(one_answer(client)) == [[], []]


# Its life.


def test_the_socket_is_private(rank: Rank) -> None:
    assert rank.path.stat().st_mode & 0o777 == 0o600


def test_a_live_path_is_refused_by_name(rank: Rank) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{rank.path} is served by process")):
        rank.start()


def test_close_removes_socket_and_lock_and_can_be_repeated(rank: Rank) -> None:
    assert len(list(rank.path.parent.iterdir())) == 2
    rank.stop()
    rank.stop()
    assert list(rank.path.parent.iterdir()) == []


def test_close_does_not_wait_for_a_pool_that_hangs(rank: Rank, client: SocketLookupClient) -> None:
    entered, release = threading.Event(), threading.Event()

    def hang(keys: Sequence[bytes]) -> Sequence[bool]:
        entered.set()
        assert release.wait(PATIENCE_S)
        return rank.holds(keys)

    rank.contains = hang
    client.ask(make_question())
    assert entered.wait(PATIENCE_S)
    server = rank.server
    assert server is not None
    assert server.close(timeout_s=0.01) is False
    with pytest.raises(ConfigError, match="is served by"):  # Its late end must hurt nobody.
        claim(rank.path)
    release.set()
    assert server.close(PATIENCE_S)
    claim(rank.path).release()


def test_a_path_that_cannot_be_bound_gives_everything_back(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.stop()

    def refuse(*_: object) -> None:
        raise zmq.ZMQError(zmq.EADDRINUSE)

    with monkeypatch.context() as patch:
        patch.setattr(lookup_server, "_bind", refuse)
        with pytest.raises(BackendUnavailable, match="cannot be bound"):
            rank.start()
    rank.start()


@pytest.mark.parametrize("end", ["", "os._exit(0)", "raise SystemExit(0)"])
def test_a_process_that_never_closes_ends_and_leaves_a_path_that_can_be_taken(
    tmp_path: Path, end: str
) -> None:
    path = Rank(tmp_path, 0).path
    script = (
        "import os, pathlib\n"
        "from umbp.backends.lookup_server import LookupServer\n"
        "from umbp.keys import KeySpace\n"
        f"server = LookupServer(lambda keys: [], keyspace=KeySpace({NAMESPACE!r}), rank=0,"
        f" path=pathlib.Path({str(path)!r}))\n{end}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S * 2)
    assert path.exists()
    claim(path).release()

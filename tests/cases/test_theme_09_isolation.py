# SPDX-License-Identifier: Apache-2.0
"""Tenants, and frames from whoever can reach a socket."""

import ast
import contextlib
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from lookup_ranks import NAMESPACE, PATIENCE_S, Rank, blocks_of, make_question, one_answer, serving
from scheduler_rig import MakeRig

import umbp
from umbp.backends.lookup_client import SocketLookupClient
from umbp.backends.lookup_messages import decode_reply, encode_question

PROMPT = list(range(100, 150))
GOOD = encode_question(make_question(1), NAMESPACE)
SOURCES = sorted(Path(umbp.__file__).parent.rglob("*.py"))


def test_case_9_1_salted_prompts_are_restored_for_the_same_salt_only(make_rig: MakeRig) -> None:
    rig = make_rig()

    def restored(name: str, salt: str | None) -> int:
        rig.forget_local()
        before: int = rig.side.counters()["tokens_restored"]
        rig.serve(name, PROMPT, salt=salt)
        after: int = rig.side.counters()["tokens_restored"]
        return after - before

    assert restored("a stores", "a") == 0
    assert restored("b asks", "b") == 0
    assert restored("nobody asks", None) == 0
    assert restored("a asks", "a") == 48
    assert restored("b asks again", "b") == 48
    rig.check_at_rest()


@contextlib.contextmanager
def dealer(rank: Rank) -> Iterator["zmq.Socket[bytes]"]:
    """A socket that sends a rank whatever it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.rcvtimeo = int(PATIENCE_S * 1000)
        raw.connect(f"ipc://{rank.path}")
        yield raw


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_case_9_3_pickle_that_is_sent_is_not_loaded(tmp_path: Path) -> None:
    target = tmp_path / "exploded"
    bombs = [pickle.dumps(Bomb(target), protocol=p) for p in range(pickle.HIGHEST_PROTOCOL + 1)]
    with serving(tmp_path, 1) as (rank,), dealer(rank) as raw:
        for bomb in bombs:
            raw.send(bomb)
        raw.send(GOOD)
        assert decode_reply(raw.recv()).question_id == 1
    assert not target.exists()
    pickle.loads(bombs[0])
    assert target.exists()


# The simulation's pickles never leave its process.
@pytest.mark.parametrize(
    "path", [one for one in SOURCES if one.parent.name != "sim"], ids=lambda path: path.name
)
def test_case_9_3_nothing_runs_what_it_receives(path: Path) -> None:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name for alias in node.names} | {getattr(node, "module", None)}
    banned = {"pickle", "cloudpickle", "marshal", "dill", "shelve", "recv_pyobj", "send_pyobj"}
    assert not names & (banned | {"exec", "eval"})


def test_case_9_3_sockets_are_private_files(tmp_path: Path) -> None:
    with serving(tmp_path, 1) as (rank,):
        assert rank.path.is_socket()
        assert rank.path.stat().st_mode & 0o077 == 0
        assert rank.path.parent.stat().st_mode & 0o077 == 0


def test_case_9_5_malformed_frames_do_not_end_the_server(tmp_path: Path) -> None:
    choose = random.Random(5)
    with serving(tmp_path, 1) as (rank,):
        rank.hold(0, 3)
        with dealer(rank) as raw:
            for _ in range(500):
                frame = bytearray(GOOD)
                for _ in range(choose.randrange(1, 4)):
                    frame[choose.randrange(len(frame))] = choose.randrange(256)
                raw.send(bytes(frame[: choose.randrange(len(frame) + 1)]))
                raw.send_multipart([choose.randbytes(choose.randrange(40)) for _ in range(2)])
            raw.send(encode_question(make_question(77_777), NAMESPACE))
            while decode_reply(raw.recv()).question_id != 77_777:
                pass
        client = SocketLookupClient([rank.path], namespace=NAMESPACE, lookup_timeout_ms=1000)
        client.ask(make_question(2))
        assert blocks_of(one_answer(client)) == [[3], []]
        client.close()


def test_case_9_5_error_is_no_miss_and_silence_is_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, 1) as (rank,):
        client = SocketLookupClient([rank.path], namespace=bytes(16), lookup_timeout_ms=50)
        client.ask(make_question(1))
        answer = one_answer(client)
        assert answer.present is None
        assert "namespace" in answer.reason
        rank.stop()
        client.ask(make_question(2))
        assert client.answers(0.05) == []
        client.close()
        rank.start()

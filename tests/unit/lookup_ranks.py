# SPDX-License-Identifier: Apache-2.0
"""Ranks with a set of keys for a pool, for the tests of lookups."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from umbp.backends.base import LookupAnswer, LookupPart, LookupQuestion
from umbp.backends.lookup_client import SocketLookupClient
from umbp.backends.lookup_server import LookupServer
from umbp.backends.socket_path import socket_path
from umbp.keys import KeySpace

NAMESPACE = bytes(range(16))
HASH_BYTES = 8
PATIENCE_S = 30.0
"""How long an answer that must come is waited for; no test expects it to take that long."""


def block_hash(index: int) -> bytes:
    return index.to_bytes(HASH_BYTES, "big")


def make_question(question_id: int = 1, blocks: int = 12, *, epoch: int = 3) -> LookupQuestion:
    """Asks for the blocks 0, 1, ... of group 0, and for the first five of group 1."""
    hashes = [block_hash(index) for index in range(blocks)]
    return LookupQuestion(
        question_id,
        epoch,
        (
            LookupPart(0, HASH_BYTES, b"".join(hashes)),
            LookupPart(1, HASH_BYTES, b"".join(hashes[:5])),
        ),
    )


class Rank:
    """A rank with a set of keys for a pool, which can be stopped and started.

    Attributes:
        askers: The threads that have asked the pool, in order.
    """

    contains: Callable[[Sequence[bytes]], Sequence[bool]]
    """What the server asks; a test puts something else here while the server runs."""

    def __init__(self, directory: Path, index: int, *, is_local: bool = False) -> None:
        self.index = index
        self.is_local = is_local
        self.askers: list[threading.Thread] = []
        self.path = socket_path(
            directory, namespace=NAMESPACE, dp_index=0, instance="t", rank=index
        )
        self.keys: set[bytes] = set()
        self.contains = self.holds
        self.server: LookupServer | None = None

    def holds(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [key in self.keys for key in keys]

    def _contains_now(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self.askers.append(threading.current_thread())
        return self.contains(keys)

    def hold(self, group_index: int, *blocks: int, epoch: int = 3) -> None:
        hashes = [block_hash(block) for block in blocks]
        self.keys.update(
            KeySpace(NAMESPACE).keys(hashes, epoch=epoch, group_index=group_index, rank=self.index)
        )

    def start(self, namespace: bytes = NAMESPACE, rank: int | None = None) -> LookupServer:
        self.server = LookupServer(
            self._contains_now,
            keyspace=KeySpace(namespace),
            rank=self.index if rank is None else rank,
            path=self.path,
            contains_is_local=self.is_local,
        )
        return self.server

    def stop(self) -> None:
        if self.server is not None:
            assert self.server.close(PATIENCE_S)


@contextlib.contextmanager
def serving(directory: Path, count: int, *, are_local: bool = False) -> Iterator[list[Rank]]:
    """Runs the servers of some ranks."""
    ranks = [Rank(directory, index, is_local=are_local) for index in range(count)]
    for rank in ranks:
        rank.start()
    yield ranks
    for rank in ranks:
        rank.stop()


def one_answer(client: SocketLookupClient, wait_s: float = PATIENCE_S) -> LookupAnswer:
    (answer,) = client.answers(wait_s)
    return answer


def blocks_of(answer: LookupAnswer) -> list[list[int]]:
    assert answer.present is not None, answer.reason
    return [np.flatnonzero(part).tolist() for part in answer.present]


def reason_of(answer: LookupAnswer) -> str:
    assert answer.present is None
    assert "\n" not in answer.reason
    return answer.reason


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "never came true"
        time.sleep(0.002)

# SPDX-License-Identifier: Apache-2.0
"""Asks every rank over its Unix socket which blocks it holds, without ever waiting for one.

A block is a hit only where every rank says so. A question is encoded once and handed to one queue
per rank; replies are combined as they come. A rank that leaves a question unanswered past the
lookup timeout, and says nothing else either, gets a new connection before the next question, since
what is queued on the old one can only be answered too late.

Where all ranks are in this very process, and their pools never make a caller wait, the question is
put to them by a call: nothing is sent, and the answer is there when ``ask`` returns.
"""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import attrs
import zmq

from umbp.backends.base import LookupAnswer, LookupQuestion
from umbp.backends.local_lookups import LOCAL_SERVERS
from umbp.backends.lookup_messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    ByteArray,
    Envelope,
    MessageError,
    decode_envelope,
    decode_reply,
    encode_question,
    read_mask,
    unpack_mask,
)
from umbp.backends.socket_path import private_directory
from umbp.errors import UsageError

QUEUE_LIMIT: Final = 256
"""Questions that may be open at once; as many may be queued for a rank that does not read."""


@attrs.define
class LookupClientCounters:
    """What a client has seen. Counters only rise.

    Attributes:
        replies_dropped: Replies to questions that were not open, or already had that reply.
        frames_dropped: Messages that could not be read.
        connections_rebuilt: Connections given up because their rank was silent.
    """

    replies_dropped: int = 0
    frames_dropped: int = 0
    connections_rebuilt: int = 0


@attrs.define(eq=False)
class _Rank:
    """The connection to one rank."""

    index: int
    path: Path
    socket: "zmq.Socket[bytes]"
    heard_s: float = -math.inf
    is_silent: bool = False


@attrs.define(eq=False)
class _OpenQuestion:
    """A question that some ranks have not answered yet."""

    question_id: int
    block_counts: tuple[int, ...]
    asked_s: float
    waiting: set[int]
    masks: tuple[ByteArray, ...] | None = None
    masks_of_ranks: dict[int, tuple[ByteArray, ...]] = attrs.field(factory=dict)

    def lacking(self, part_index: int, block_index: int) -> int | None:
        """Names a rank that lacks a block."""
        for rank, masks in sorted(self.masks_of_ranks.items()):
            if not unpack_mask(masks[part_index], block_index + 1)[block_index]:
                return rank
        return None

    def combine(self, rank: int, masks: tuple[ByteArray, ...]) -> None:
        self.masks_of_ranks[rank] = masks
        if self.masks is None:
            self.masks = masks
        else:
            pairs = zip(self.masks, masks, strict=True)
            self.masks = tuple(known & more for known, more in pairs)


class SocketLookupClient:
    """A ``LookupClient`` for pools that live in the workers. Used by one thread.

    Attributes:
        seen: What went wrong so far.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        namespace: bytes,
        lookup_timeout_ms: int,
        queue_limit: int = QUEUE_LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects to every rank; a rank that is not there yet is connected when it comes.

        Args:
            paths: The socket of each rank, in order of rank.
            namespace: Digest of the namespace.
            lookup_timeout_ms: How long an answer is waited for by the caller.
            queue_limit: Questions that may be open at once.
            clock: Seconds, monotonic.

        Raises:
            ConfigError: The sockets' directory is not private to this user.
        """
        if not paths:
            raise UsageError("a lookup needs the socket path of at least one rank, got none")
        for directory in {path.parent for path in paths}:
            private_directory(directory)
        self.seen = LookupClientCounters()
        self._paths = tuple(paths)
        self._namespace = namespace
        self._timeout_s = lookup_timeout_ms / 1000
        self._queue_limit = queue_limit
        self._clock = clock
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._ranks = [_Rank(index, path, self._connect(path)) for index, path in enumerate(paths)]
        self._rank_of = {rank.socket: rank for rank in self._ranks}
        self._open: dict[int, _OpenQuestion] = {}
        self._ready: list[LookupAnswer] = []
        self._is_closed = False
        # Of a client that is dropped without being closed, the collector would end the context
        # before its sockets, and that waits for ever.
        self._disconnect = weakref.finalize(self, _disconnect, self._ranks, self._context)

    def ask(self, question: LookupQuestion) -> None:
        """Puts a question to every rank, or settles it at once when that is not possible.

        Raises:
            UsageError: A question of that id is open.
        """
        if question.question_id in self._open:
            raise UsageError(f"question {question.question_id} is open already")
        if self._is_closed:
            self._ready.append(LookupAnswer(question.question_id, None, "client is closed"))
            return
        try:
            frame = encode_question(question, self._namespace)
        except MessageError as error:
            self._ready.append(LookupAnswer(question.question_id, None, str(error)))
            return
        replies = LOCAL_SERVERS.ask(self._paths, frame)
        problem = self._send(frame) if replies is None else ""
        if problem:
            self._ready.append(LookupAnswer(question.question_id, None, problem))
            return
        self._open[question.question_id] = _OpenQuestion(
            question.question_id,
            tuple(len(part.hashes) // part.hash_bytes for part in question.parts),
            self._clock(),
            {rank.index for rank in self._ranks},
        )
        if replies is not None:
            for rank, reply in zip(self._ranks, replies, strict=True):
                self._take(rank, reply)

    def answers(self, wait_s: float = 0.0) -> list[LookupAnswer]:
        """Returns answers that have come in, waiting at most ``wait_s`` for the first."""
        # With an answer at hand and nothing open, whatever the sockets have is for nobody.
        if not self._is_closed and (self._open or not self._ready):
            deadline_s = self._clock() + wait_s
            remaining_s = wait_s if self._open and not self._ready else 0.0
            self._receive(remaining_s)
            while self._open and not self._ready and remaining_s > 0:
                remaining_s = deadline_s - self._clock()
                self._receive(remaining_s)
        ready, self._ready = self._ready, []
        return ready

    def forget(self, question_id: int) -> None:
        """Drops a question. Ranks that let it time out and said nothing since are noted."""
        self._ready = [answer for answer in self._ready if answer.question_id != question_id]
        question = self._open.pop(question_id, None)
        if question is None or self._clock() - question.asked_s < self._timeout_s:
            # Answered, or dropped early, which says nothing about the ranks.
            return
        for index in question.waiting:
            if self._ranks[index].heard_s < question.asked_s:
                self._ranks[index].is_silent = True

    def counters(self) -> dict[str, int]:
        """Returns what went wrong so far, for the connector's counters."""
        return {f"lookup_{name}": count for name, count in attrs.asdict(self.seen).items()}

    def close(self) -> None:
        """Closes the connections and drops all questions. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._open.clear()
        self._ready.clear()
        self._disconnect()

    def _send(self, frame: bytes) -> str:
        """Queues a question for every rank; returns why not, or an empty string."""
        self._renew_silent_ranks()
        if len(self._open) >= self._queue_limit:
            return f"{len(self._open)} questions are open already"
        for rank in self._ranks:
            try:
                rank.socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                # Ranks before this one will answer; those replies are dropped and counted.
                return f"rank {rank.index} reads no questions and its queue is full"
        return ""

    def _receive(self, wait_s: float = 0.0) -> None:
        """Takes the frames that are there, a bounded number from each rank.

        Args:
            wait_s: How long to wait for the first.
        """
        timeout_ms = max(0, math.ceil(wait_s * 1000))
        # The poller says who has something; asking a socket that has nothing costs an exception.
        for _ in range(self._queue_limit):
            readable = self._poller.poll(timeout_ms)
            if not readable:
                return
            for socket, _ in readable:
                self._receive_from(self._rank_of[socket])
            timeout_ms = 0

    def _receive_from(self, rank: _Rank) -> None:
        """Takes one frame of a rank that has some."""
        frames = rank.socket.recv_multipart(zmq.NOBLOCK)
        rank.heard_s = self._clock()
        rank.is_silent = False
        if len(frames) == 1:
            self._take(rank, frames[0])
        else:
            self.seen.frames_dropped += 1

    def _take(self, rank: _Rank, frame: bytes) -> None:
        try:
            envelope = decode_envelope(frame)
        except MessageError:
            self.seen.frames_dropped += 1
            return
        question = self._open.get(envelope.question_id)
        if question is None or rank.index not in question.waiting:
            self.seen.replies_dropped += 1
            return
        try:
            masks = _masks(rank, question, envelope, frame)
        except MessageError as error:
            self._fail(question, f"rank {rank.index}: {error}")
            return
        question.waiting.discard(rank.index)
        question.combine(rank.index, masks)
        if not question.waiting:
            self._succeed(question)

    def _succeed(self, question: _OpenQuestion) -> None:
        del self._open[question.question_id]
        counted = zip(question.masks or (), question.block_counts, strict=True)
        present = tuple(unpack_mask(mask, count) for mask, count in counted)
        self._ready.append(LookupAnswer(question.question_id, present, lacking=question.lacking))

    def _fail(self, question: _OpenQuestion, reason: str) -> None:
        del self._open[question.question_id]
        self._ready.append(LookupAnswer(question.question_id, None, reason))

    def _renew_silent_ranks(self) -> None:
        if not any(rank.is_silent for rank in self._ranks):
            return
        self._receive()  # A late reply proves that the rank lives.
        for rank in self._ranks:
            if rank.is_silent:
                self._renew(rank)

    def _renew(self, rank: _Rank) -> None:
        self._poller.unregister(rank.socket)
        del self._rank_of[rank.socket]
        rank.socket.close(linger=0)
        rank.socket = self._connect(rank.path)
        self._rank_of[rank.socket] = rank
        rank.is_silent = False
        self.seen.connections_rebuilt += 1
        # Their replies can only come to the connection that is gone.
        for question in list(self._open.values()):
            if rank.index in question.waiting:
                self._fail(question, f"rank {rank.index} was silent and was connected anew")

    def _connect(self, path: Path) -> "zmq.Socket[bytes]":
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        dealer.setsockopt(zmq.SNDHWM, self._queue_limit)
        dealer.setsockopt(zmq.RCVHWM, self._queue_limit)
        dealer.connect(f"ipc://{path}")
        self._poller.register(dealer, zmq.POLLIN)
        return dealer


def _disconnect(ranks: Sequence[_Rank], context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    for rank in ranks:
        rank.socket.close(linger=0)
    context.term()


def _masks(
    rank: _Rank, question: _OpenQuestion, envelope: Envelope, frame: bytes
) -> tuple[ByteArray, ...]:
    """Reads one rank's masks out of its reply.

    Raises:
        MessageError: It is an error reply, or no reply to this question.
    """
    if envelope.protocol != PROTOCOL:
        raise MessageError(
            f"it speaks lookup protocol {envelope.protocol}, not {PROTOCOL}; "
            "run one version of umbp in all processes of an engine"
        )
    reply = decode_reply(frame)
    if reply.rank != rank.index:
        raise MessageError(f"rank {reply.rank} serves {rank.path}")
    if reply.masks is None:
        raise MessageError(reply.error or "it gave no masks and no reason")
    if len(reply.masks) != len(question.block_counts):
        raise MessageError(f"{len(reply.masks)} masks for {len(question.block_counts)} parts")
    counted = zip(reply.masks, question.block_counts, strict=True)
    return tuple(read_mask(mask, block_count) for mask, block_count in counted)

# SPDX-License-Identifier: Apache-2.0
"""Serves one rank's lookups over a Unix socket, on a thread of its own.

Every question gets exactly one reply, whatever the pool or the question is like. A frame of which
not even the envelope can be read has nobody to reply to; it is dropped and counted.

A client in the same process may put the same frame as a call instead (``answer_here``), where the
pool never makes its caller wait.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import attrs
import zmq

from umbp.backends.local_lookups import LOCAL_SERVERS
from umbp.backends.lookup_messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    Envelope,
    MessageError,
    QuestionPart,
    Reply,
    decode_envelope,
    decode_question,
    encode_reply,
    pack_mask,
)
from umbp.backends.socket_path import SocketClaim, claim
from umbp.errors import BackendUnavailable
from umbp.keys import KeySpace

logger = logging.getLogger(__name__)

QUEUE_LIMIT: Final = 1024
"""Messages that wait in either direction, per client, before more are refused by ZeroMQ."""

Contains = Callable[[Sequence[bytes]], Sequence[bool]]


@attrs.define
class LookupServerCounters:
    """What a server has done. Counters only rise; whoever answers writes them, one at a time.

    Attributes:
        answered: Questions answered with masks.
        refused: Questions answered with an error.
        frames_dropped: Messages that could not be read, so that nothing was replied.
        replies_dropped: Replies that the client had no room for, or had left before.
    """

    answered: int = 0
    refused: int = 0
    frames_dropped: int = 0
    replies_dropped: int = 0


class LookupServer:
    """Answers which blocks one rank holds.

    Attributes:
        counters: What the server has done.
    """

    def __init__(
        self,
        contains: Contains,
        *,
        keyspace: KeySpace,
        rank: int,
        path: Path,
        contains_is_local: bool = False,
    ) -> None:
        """Binds the path and begins to answer.

        Args:
            contains: Says which keys exist, in order; called on the server's thread, and on those
                of clients in this process if ``contains_is_local``; never twice at a time.
            keyspace: The keys of the namespace that is served.
            rank: Index of the worker whose keys these are.
            path: Where to serve, see ``umbp.backends.socket_path``.
            contains_is_local: What the backend says by this name, see ``Backend``.

        Raises:
            ConfigError: The path is in use, or its directory is not private.
            BackendUnavailable: The path cannot be bound.
        """
        self.counters = LookupServerCounters()
        self._contains = contains
        self._keyspace = keyspace
        self._rank = rank
        self._answering = threading.Lock()
        self._claim: SocketClaim = claim(path)
        self._context = zmq.Context()
        try:
            self._socket = _bind(self._context, path)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._claim.release()
            raise BackendUnavailable(f"lookup socket {path} cannot be bound: {error}") from error
        self._wake: int | None = os.eventfd(0)
        # A pool that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._serve, args=(self._wake,), name=f"umbp-lookup-{rank}", daemon=True
        )
        self._thread.start()
        if contains_is_local:
            LOCAL_SERVERS.announce(path, self)

    def answer_here(self, frame: bytes) -> bytes | None:
        """Answers a question on the caller's thread. Thread-safe.

        Returns:
            The reply's frame. None when the question has to go over the socket: the server is about
            to close, or busy with a question from there, for which a caller would have to wait.
        """
        if not self._answering.acquire(blocking=False):
            return None
        try:
            reply = self._reply(frame)
        finally:
            self._answering.release()
        return encode_reply(reply) if reply is not None else None

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stops the server and removes its files. Idempotent.

        Returns:
            Whether nobody asks the pool any more. When the pool does not return in time, the thread
            ends and gives the path up as soon as it does; until then the path stays taken.
        """
        if self._wake is None:
            return True
        deadline_s = time.monotonic() + timeout_s
        LOCAL_SERVERS.withdraw(self._claim.path, self)
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_s)
        # A client of this process may have found the server before, and still be in the pool. The
        # lock is kept, so that none comes in later.
        left_s = max(0.0, deadline_s - time.monotonic())
        if self._thread.is_alive() or not self._answering.acquire(timeout=left_s):
            logger.warning("lookup server of rank %d did not end in %g s", self._rank, timeout_s)
            return False
        os.close(self._wake)
        self._wake = None
        return True

    def _serve(self, wake: int) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        try:
            while wake not in dict(poller.poll()):
                self._serve_one()
        finally:
            LOCAL_SERVERS.withdraw(self._claim.path, self)
            self._socket.close(linger=0)
            # ZeroMQ removes the socket file on a thread of its own, and term() waits for that.
            # Only then may somebody else bind the path.
            self._context.term()
            self._claim.release()

    def _serve_one(self) -> None:
        try:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        with self._answering:
            reply = self._reply(frames[0]) if len(frames) == 1 else None
        if reply is None:
            self.counters.frames_dropped += 1
            return
        try:
            self._socket.send_multipart([identity, encode_reply(reply)], zmq.NOBLOCK)
        except zmq.ZMQError:  # The client is gone, or reads nothing.
            self.counters.replies_dropped += 1

    def _reply(self, frame: bytes) -> Reply | None:
        """Answers one frame; None when it does not say which question it is."""
        try:
            envelope = decode_envelope(frame)
        except MessageError:
            return None
        masks, error = None, ""
        try:
            masks = self._masks(envelope, frame)
            self.counters.answered += 1
        except MessageError as refusal:
            error = str(refusal)
        except Exception as failure:  # The pool may raise anything; its rank goes on answering.
            error = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
        if error:
            self.counters.refused += 1
        return Reply(PROTOCOL, envelope.question_id, self._rank, masks, error)

    def _masks(self, envelope: Envelope, frame: bytes) -> tuple[bytes, ...]:
        if envelope.protocol != PROTOCOL:
            raise MessageError(
                f"lookup protocol {envelope.protocol} was asked, {PROTOCOL} is spoken; "
                "run one version of umbp in all processes of an engine"
            )
        question = decode_question(frame)
        if question.namespace != self._keyspace.namespace:
            raise MessageError(
                f"namespace {question.namespace.hex()} was asked, "
                f"{self._keyspace.namespace.hex()} is served"
            )
        return tuple(self._mask(part, question.epoch) for part in question.parts)

    def _mask(self, part: QuestionPart, epoch: int) -> bytes:
        keys = self._keyspace.keys_of_joined(
            part.hashes,
            part.hash_bytes,
            epoch=epoch,
            group_index=part.group_index,
            rank=self._rank,
        )
        present = self._contains(keys)
        if len(present) != len(keys):
            raise MessageError(f"the pool answered {len(present)} of {len(keys)} keys")
        return pack_mask(present)


def _bind(context: "zmq.Context[zmq.Socket[bytes]]", path: Path) -> "zmq.Socket[bytes]":
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    router.setsockopt(zmq.SNDHWM, QUEUE_LIMIT)
    router.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
    # A reply that cannot be sent is an error here, so that it is counted, not silently dropped.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.bind(f"ipc://{path}")
    path.chmod(0o600)
    return router

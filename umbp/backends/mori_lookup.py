# SPDX-License-Identifier: Apache-2.0
"""Asks a shared MORI pool which blocks every rank has stored, from one thread that may get stuck.

A call on a server that is stopped does not return, and nothing can end it. So one daemon thread
makes the calls, one at a time; the scheduler hands it questions and takes answers, and never waits
for the thread itself. While a call is silent for longer than a lookup may take, the breaker is
open: what waits and what comes is answered at once, as a miss.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from umbp.backends.base import LookupAnswer, LookupPart, LookupQuestion, SchedulerSite
from umbp.backends.breaker import Breaker
from umbp.backends.mori_client import shared_names
from umbp.backends.mori_link import LinkedClient
from umbp.errors import BackendError, UsageError
from umbp.keys import KeySpace, split_hashes

QUEUE_LIMIT: Final = 256
"""Questions that may be open at once."""

NAMES_PER_CALL: Final = 16_384
"""Most names in one native call; 25 ms."""


class PoolLink(Protocol):
    """What connects to a shared pool and knows when it is gone."""

    def client(self) -> LinkedClient:
        """Returns the client; raises ``BackendError`` while the pool is gone."""

    def doubt(self, used: LinkedClient) -> bool:
        """Takes note that nothing succeeded with a client."""

    def close(self) -> None:
        """Gives the client up, and never waits for a call that runs."""


@attrs.frozen
class LookupStats:
    """What a lookup client is doing.

    Attributes:
        is_breaker_open: Whether questions are answered without asking.
        breaker_opened_count: How often that began.
        open_questions: Questions that wait for an answer.
    """

    is_breaker_open: bool
    breaker_opened_count: int
    open_questions: int


class MoriLookup:
    """A ``LookupClient`` of a shared pool. Used by one thread.

    Args:
        link: Connects to the pool.
        site: The scheduler.
        asked: Who is asked, for messages.
        queue_limit: Questions that may be open at once.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        link: PoolLink,
        site: SchedulerSite,
        *,
        asked: str = "the server",
        queue_limit: int = QUEUE_LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._keyspace = KeySpace(site.namespace)
        self._rank_count = site.rank_count
        self._queue_limit = queue_limit
        self._clock = clock
        self._breaker = Breaker(asked, site.lookup_timeout_ms / 1000, clock)
        self._silent = f"{asked} does not answer"
        self._changed = threading.Condition()
        # Open questions; the first ones may be with the thread already.
        self._open: dict[int, LookupQuestion] = {}
        self._waiting: OrderedDict[int, LookupQuestion] = OrderedDict()
        self._ready: list[LookupAnswer] = []
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def ask(self, question: LookupQuestion) -> None:
        """Hands a question to the thread, or answers it at once when that is of no use.

        Raises:
            UsageError: A question of that id is open.
        """
        is_silent = self._breaker.is_open
        with self._changed:
            if question.question_id in self._open:
                raise UsageError(f"question {question.question_id} is open already")
            refusal = None
            if self._is_closed:
                refusal = "client is closed"
            elif is_silent:
                refusal = self._silent
            elif len(self._open) >= self._queue_limit:
                refusal = f"{len(self._open)} questions are open already"
            elif not self._has_thread():
                refusal = "no thread could be started"
            if refusal is not None:
                self._ready.append(LookupAnswer(question.question_id, None, refusal))
                return
            self._open[question.question_id] = question
            self._waiting[question.question_id] = question
            self._changed.notify_all()

    def answers(self, wait_s: float = 0.0) -> list[LookupAnswer]:
        """Returns answers that have come in, waiting at most ``wait_s`` for the first."""
        give_up_s = self._clock() + wait_s
        while True:
            is_silent = self._breaker.is_open
            with self._changed:
                if is_silent:
                    self._answer_all(self._silent)
                wait_s = give_up_s - self._clock()
                if self._ready or not self._open or wait_s <= 0:
                    ready, self._ready = self._ready, []
                    return ready
                silence_s = self._breaker.remaining_s()
                self._changed.wait(wait_s if silence_s is None else min(wait_s, silence_s))

    def forget(self, question_id: int) -> None:
        """Drops a question; its late answer is not returned."""
        with self._changed:
            self._open.pop(question_id, None)
            self._waiting.pop(question_id, None)
            self._ready = [answer for answer in self._ready if answer.question_id != question_id]

    def stats(self) -> LookupStats:
        """Says what is going on. May be called by any thread."""
        return LookupStats(self._breaker.is_open, self._breaker.opened_count, len(self._open))

    def counters(self) -> dict[str, int]:
        """Returns the state of the breaker for the connector's counters."""
        stats = self.stats()
        return {
            "lookup_breaker_open": int(stats.is_breaker_open),
            "lookup_breaker_opened": stats.breaker_opened_count,
        }

    def close(self) -> None:
        """Drops all questions; the thread ends when its call returns. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._open.clear()
            self._waiting.clear()
            self._ready.clear()
            self._changed.notify_all()
        self._link.close()

    def _has_thread(self) -> bool:
        """Starts the thread with the first question, so that a process may fork before that."""
        if self._thread is not None:
            return True
        thread = threading.Thread(target=self._work, name="umbp-lookup", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _answer_all(self, reason: str) -> None:
        self._ready.extend(LookupAnswer(question_id, None, reason) for question_id in self._open)
        self._open.clear()
        self._waiting.clear()

    def _work(self) -> None:
        """Asks until the client is closed; the body of the thread."""
        while True:
            with self._changed:
                while not (self._waiting or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
                question = self._waiting.popitem(last=False)[1]
            answer = self._look_up(question)
            with self._changed:
                # Answered as silent meanwhile, or forgotten.
                if self._open.pop(question.question_id, None) is not None:
                    self._ready.append(answer)
                self._changed.notify_all()

    def _look_up(self, question: LookupQuestion) -> LookupAnswer:
        try:
            names: list[str] = []
            for part in question.parts:
                names += self._names(part, question.epoch)
            found = self._found(names)
        except (BackendError, ValueError) as error:
            reason = " ".join(str(error).split())
            return LookupAnswer(question.question_id, None, reason)
        begin = 0
        present: list[npt.NDArray[np.bool_]] = []
        held: list[npt.NDArray[np.bool_]] = []
        for part in question.parts:
            block_count = len(part.hashes) // part.hash_bytes
            end = begin + block_count * self._rank_count
            by_rank = found[begin:end].reshape(self._rank_count, block_count)
            held.append(by_rank)
            present.append(np.logical_and.reduce(by_rank, axis=0))
            begin = end

        def lacking(part_index: int, block_index: int) -> int | None:
            ranks = (~held[part_index][:, block_index]).nonzero()[0]
            return int(ranks[0]) if len(ranks) else None

        return LookupAnswer(question.question_id, tuple(present), lacking=lacking)

    def _names(self, part: LookupPart, epoch: int) -> list[str]:
        """Names a part's blocks, all of rank 0, then all of rank 1, and so on."""
        hashes = split_hashes(part.hashes, part.hash_bytes)
        names: list[str] = []
        for rank in range(self._rank_count):
            keys = self._keyspace.keys(hashes, epoch=epoch, group_index=part.group_index, rank=rank)
            names += shared_names(keys)
        return names

    def _found(self, names: list[str]) -> npt.NDArray[np.bool_]:
        found: list[bool] = []
        for begin in range(0, len(names), NAMES_PER_CALL):
            self._breaker.begin()
            with self._changed:
                self._changed.notify_all()  # Who waits now waits no longer than the breaker.
            try:
                linked = self._link.client()
                batch = linked.client.contains(names[begin : begin + NAMES_PER_CALL])
            finally:
                self._breaker.end()
            if not any(batch):
                # A server that is gone finds nothing, too; the next question then says so.
                self._link.doubt(linked)
            found += batch
        return np.array(found, dtype=np.bool_)

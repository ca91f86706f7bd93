# SPDX-License-Identifier: Apache-2.0
"""A backend's side in the scheduler, under a virtual clock and a fault plan."""

from collections.abc import Sequence

import numpy as np

from umbp.backends.base import LookupAnswer, LookupQuestion, WorkerPool
from umbp.errors import BackendError
from umbp.keys import KeySpace, split_hashes
from umbp.sim.clock import VirtualClock
from umbp.sim.faults import FaultSource, LookupFault
from umbp.sim.store import SimStore


class SimLookupClient:
    """A ``LookupClient`` that asks every rank's pool.

    Args:
        pools: The pool of each rank.
        stores: The store of each rank, from which found objects may be evicted.
        keyspace: Keys of the engine.
        clock: The time.
        faults: What goes wrong.
        timeout_s: How long an answer is waited for.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        *,
        pools: Sequence[WorkerPool],
        stores: Sequence[SimStore],
        keyspace: KeySpace,
        clock: VirtualClock,
        faults: FaultSource,
        timeout_s: float,
    ) -> None:
        self._pools = pools
        self._stores = stores
        self._keyspace = keyspace
        self._clock = clock
        self._faults = faults
        self._timeout_s = timeout_s
        self._open: set[int] = set()
        self._answers: list[LookupAnswer] = []
        self._errors = 0

    def ask(self, question: LookupQuestion) -> None:
        """Plans an answer."""
        fault = self._faults.lookup()
        self._open.add(question.question_id)
        if fault is LookupFault.SILENT:
            return
        delay_s = self._faults.latency_s() / 4
        if fault is LookupFault.SLOW:
            delay_s += self._timeout_s * 0.9
        self._clock.call_in(delay_s, lambda: self._answer(question, fault))

    def answers(self, wait_s: float = 0.0) -> list[LookupAnswer]:
        """Returns the answers that have come in, and waits on the virtual clock.

        Raises:
            BackendError: The plan says so.
        """
        if wait_s > 0:
            self._clock.advance_until(lambda: bool(self._answers or self._errors), wait_s)
        if self._errors:
            self._errors -= 1
            raise BackendError("simulated failure of a lookup client")
        answers, self._answers = self._answers, []
        return answers

    def forget(self, question_id: int) -> None:
        """Drops a question."""
        self._open.discard(question_id)
        self._answers = [one for one in self._answers if one.question_id != question_id]

    def close(self) -> None:
        """Drops all questions."""
        self._open.clear()
        self._answers.clear()

    def _answer(self, question: LookupQuestion, fault: LookupFault) -> None:
        if question.question_id not in self._open:
            return
        if fault is LookupFault.RAISE:
            self._errors += 1
            return
        self._open.discard(question.question_id)
        if fault is LookupFault.UNKNOWN:
            answer = LookupAnswer(question.question_id, None, "simulated")
        else:
            answer = LookupAnswer(question.question_id, self._present(question, fault))
        self._answers.append(answer)

    def _present(
        self, question: LookupQuestion, fault: LookupFault
    ) -> tuple[np.typing.NDArray[np.bool_], ...]:
        masks = []
        for part in question.parts:
            hashes = split_hashes(part.hashes, part.hash_bytes)
            mask = np.ones(len(hashes), dtype=bool)
            for rank, pool in enumerate(self._pools):
                keys = self._keyspace.keys(
                    hashes, epoch=question.epoch, group_index=part.group_index, rank=rank
                )
                mask &= np.fromiter(pool.contains(keys), dtype=bool, count=len(keys))
                # Answered and gone: what a full pool does.
                if self._faults.evicts():
                    self._stores[rank].evict(keys[self._faults.index(len(keys)) :][:1])
            if fault is LookupFault.WRONG_SIZE:
                mask = np.ones(len(mask) + (1 if self._faults.index(2) else -1), dtype=bool)
            masks.append(mask)
        return tuple(masks)

# SPDX-License-Identifier: Apache-2.0
"""Checks of the ``LookupClient`` of a backend whose pool lives elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final

from umbp.backends.base import (
    LookupAnswer,
    LookupPart,
    LookupQuestion,
    SchedulerSite,
    TransferOutcome,
)
from umbp.keys import KeySpace
from umbp.testing.conformance_rig import BIG, INSTANCE, PATIENCE_S, SMALL, Rig, require
from umbp.testing.harness import Harness
from umbp.testing.watched import WatchedClient, watched

_SPACE: Final = KeySpace(b"umbp-conformance")
HASHES: Final = tuple(b"\0\xff-%05d" % index for index in range(8))
"""Block hashes that the checks store and ask for."""

Asked = Mapping[int, Sequence[bytes]]
"""Block hashes of a question, by group."""


class LookupRig:
    """A lookup client beside the pools of all ranks."""

    def __init__(self, harness: Harness, patience_s: float, *, rank_count: int = 1) -> None:
        assert harness.open_lookup is not None
        self._patience_s = patience_s
        self._next_id = 0
        make = watched(harness.open_pool, patience_s)
        with ExitStack() as opening:
            self.ranks = [
                opening.enter_context(Rig(make, patience_s, rank=rank, rank_count=rank_count))
                for rank in range(rank_count)
            ]
            site = SchedulerSite(_SPACE.namespace, rank_count, INSTANCE, int(patience_s * 1000))
            self.client = WatchedClient(harness.open_lookup(site), patience_s)
            opening.callback(self.client.close)
            self._opened = opening.pop_all()

    def __enter__(self) -> "LookupRig":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()

    def store(self, hashes: Sequence[bytes], *, rank: int = 0, group: int = BIG) -> None:
        """Stores the blocks of some hashes on one rank, in epoch 1."""
        keys = _SPACE.keys(hashes, epoch=1, group_index=group, rank=rank)
        rig = self.ranks[rank]
        result = rig.finish(rig.store({group: {key: block for block, key in enumerate(keys)}}))
        require(result.outcome is TransferOutcome.DONE, f"a store with room ended {result}")

    def ask(self, asked: Asked, *, epoch: int = 1) -> int:
        """Asks and returns the id of the question."""
        self._next_id += 1
        parts = tuple(
            LookupPart(group, len(hashes[0]), b"".join(hashes)) for group, hashes in asked.items()
        )
        self.client.ask(LookupQuestion(self._next_id, epoch, parts))
        return self._next_id

    def answer(self, question_id: int) -> LookupAnswer:
        """Waits for one answer; no other may come."""
        answers = self.client.answers(self._patience_s)
        require(bool(answers), f"no answer to question {question_id}")
        require(
            [answer.question_id for answer in answers] == [question_id],
            f"question {question_id} was asked, these are the answers: {answers}",
        )
        return answers[0]

    def require_present(self, asked: Asked, expected: Sequence[Sequence[bool]], what: str) -> None:
        """Asks, and compares the answer."""
        present = self.answer(self.ask(asked)).present
        require(present is not None, f"{what}: the client could not say")
        found = [[bool(here) for here in part] for part in present or ()]
        require(found == [list(part) for part in expected], f"{what}: the answer is {found}")


def check_lookup_finds_what_is_stored(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """Each block of each group has its own answer, in the order of the question."""
    with LookupRig(harness, patience_s) as rig:
        rig.require_present({BIG: HASHES}, [[False] * 8], "nothing is stored")
        rig.store([HASHES[1], HASHES[4]])
        rig.store([HASHES[4], HASHES[5]], group=SMALL)
        asked = {BIG: HASHES[:6], SMALL: HASHES[3:6]}
        expected = [[index in (1, 4) for index in range(6)], [False, True, True]]
        rig.require_present(asked, expected, "some blocks of two groups are stored")


def check_lookup_of_an_epoch(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """Objects of one epoch are not found in another."""
    with LookupRig(harness, patience_s) as rig:
        rig.store(HASHES[:2])
        for epoch in (0, 2):
            present = rig.answer(rig.ask({BIG: HASHES[:2]}, epoch=epoch)).present
            found = present is not None and any(part.any() for part in present)
            require(not found, f"an object of epoch 1 is found in epoch {epoch}")


def check_lookup_needs_every_rank(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """A block is a hit only where every rank holds it."""
    with LookupRig(harness, patience_s, rank_count=2) as rig:
        rig.store(HASHES[:3], rank=0)
        rig.store(HASHES[1:4], rank=1)
        expected = [[False, True, True, False]]
        rig.require_present({BIG: HASHES[:4]}, expected, "two ranks hold different blocks")


def check_lookup_forgets(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """A question that was dropped is not answered, and each of the others is, once."""
    with LookupRig(harness, patience_s) as rig:
        first, dropped, last = (rig.ask({BIG: HASHES[index : index + 2]}) for index in range(3))
        rig.client.forget(dropped)
        rig.client.forget(1_000_000)
        # Asked for after the others: when it is answered, they are.
        marker = rig.ask({BIG: HASHES})
        seen: list[int] = []
        while not {first, last, marker} <= set(seen):
            answers = rig.client.answers(patience_s)
            require(bool(answers), f"no answer beside those to {seen}")
            seen += [answer.question_id for answer in answers]
        seen += [answer.question_id for answer in rig.client.answers(0.01)]
        require(sorted(seen) == [first, last, marker], f"the answers are to {sorted(seen)}")


def check_lookup_waits_no_longer(harness: Harness, patience_s: float = PATIENCE_S) -> None:
    """``answers`` returns after ``wait_s`` although nothing is asked; ``close`` may come twice."""
    with LookupRig(harness, patience_s) as rig:
        require(rig.client.answers(0.0) == [], "an answer to no question")
        require(rig.client.answers(0.01) == [], "an answer to no question")
        rig.client.close()
        rig.client.close()
        question_id = rig.ask({BIG: HASHES})
        for answer in rig.client.answers(0.01):
            require(
                answer.question_id == question_id and answer.present is None,
                f"a closed client answers {answer}",
            )


LOOKUP_CHECKS: Final[tuple[Callable[..., None], ...]] = (
    check_lookup_finds_what_is_stored,
    check_lookup_of_an_epoch,
    check_lookup_needs_every_rank,
    check_lookup_forgets,
    check_lookup_waits_no_longer,
)
"""Every check of a ``LookupClient``; each takes a ``Harness`` and, optionally, ``patience_s``."""

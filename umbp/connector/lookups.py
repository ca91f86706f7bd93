# SPDX-License-Identifier: Apache-2.0
"""Questions that are open: from a request's block hashes to a backend's answer, and to a hit."""

import logging
from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np

from umbp.backends.base import LookupAnswer, LookupClient, LookupPart, LookupQuestion
from umbp.connector.groups import Asked, BoolArray, GroupRules
from umbp.connector.lookup_log import LookupLog
from umbp.connector.samples import LookupMeter
from umbp.errors import BackendError
from umbp.fsm import LookupAnswered, RequestContext, StartLookup
from umbp.fsm.quarantine import Quarantine

logger = logging.getLogger(__name__)

OPEN_MAX: Final = 128
"""Half of what a client over sockets takes at once: one that takes no more says that a block is
missing, and a request at the end of a long queue would be computed for nothing."""


@attrs.frozen(eq=False)
class _Question:
    """A lookup that is open.

    Attributes:
        context: The request.
        begin_tokens: What the engine had by itself.
        asked: What was asked for.
        asked_s: When.
    """

    context: RequestContext
    begin_tokens: int
    asked: list[Asked]
    asked_s: float


class OpenLookups:
    """Asks a backend, and turns its answers into events.

    Args:
        client: The backend's side in the scheduler.
        rules: Cache-group rules.
        quarantine: Hashes that count as missing.
        meter: Measures.
        log: Takes what each lookup found; None: nobody wants to know.
    """

    def __init__(
        self,
        client: LookupClient,
        rules: GroupRules,
        quarantine: Quarantine,
        meter: LookupMeter,
        log: LookupLog | None = None,
    ) -> None:
        self._client = client
        self._rules = rules
        self._quarantine = quarantine
        self._log = log
        self._meter = meter
        self._questions: dict[int, _Question] = {}
        # Answered without asking.
        self._ready: list[LookupAnswered] = []
        # Why the last lookup failed; empty if it did not.
        self._failure = ""

    def start(self, command: StartLookup) -> None:
        """Asks which blocks of a request every rank holds."""
        context = command.request
        question_id = context.question_id
        if question_id is None:
            return
        asked = self._rules.ask(context.source.block_hashes, command.begin_tokens)
        parts = tuple(
            LookupPart(one.group.index, len(one.hashes[0]), b"".join(one.hashes))
            for one in asked
            if one.hashes
        )
        if not parts:
            answer = LookupAnswered(context.request_id, question_id, command.begin_tokens)
            self._ready.append(answer)
            return
        # Taken first: a client whose pool is at hand has the answer when ``ask`` returns.
        asked_s = self._meter.clock()
        try:
            self._client.ask(LookupQuestion(question_id, context.epoch, parts))
        except BackendError as error:
            logger.warning("lookup of %s cannot be asked: %s", context.request_id, error)
            self._meter.failed += 1
            answer = LookupAnswered(context.request_id, question_id, command.begin_tokens)
            self._ready.append(answer)
            return
        self._questions[question_id] = _Question(context, command.begin_tokens, asked, asked_s)

    @property
    def are_many(self) -> bool:
        """Whether the next question is better asked when one of those that are open has ended."""
        return len(self._questions) >= OPEN_MAX

    def drop(self, question_id: int) -> None:
        """Forgets a question; its answer is not returned."""
        question = self._questions.pop(question_id, None)
        self._client.forget(question_id)
        if self._log is not None and question is not None:
            self._log.note_failed(
                question.context, question.begin_tokens, "given up before it was answered"
            )

    def answers(self, wait_s: float, now_s: float) -> list[LookupAnswered]:
        """Returns what has been answered, waiting at most ``wait_s`` for the first.

        Args:
            wait_s: How long to wait.
            now_s: The time, for the quarantine.
        """
        events, self._ready = self._ready, []
        if self._questions and not events:
            for answer in self._take(wait_s):
                question = self._questions.pop(answer.question_id, None)
                if question is not None:
                    self._meter.seconds.add(self._meter.clock() - question.asked_s)
                    events.append(self._event(question, answer, now_s))
        return events

    def _take(self, wait_s: float) -> list[LookupAnswer]:
        """Returns the client's answers; a client that fails has answered every question: a miss."""
        try:
            return self._client.answers(wait_s)
        except BackendError as error:
            reason = str(error)
        failed = [LookupAnswer(question_id, None, reason) for question_id in self._questions]
        for answer in failed:
            self._client.forget(answer.question_id)
        return failed

    def close(self) -> None:
        """Gives the client back."""
        self._client.close()

    def _event(self, question: _Question, answer: LookupAnswer, now_s: float) -> LookupAnswered:
        request = question.context.source
        end, hit = question.begin_tokens, None
        masks = self._masks(question.asked, answer, now_s)
        if masks is None:
            reason = answer.reason or "the answer does not fit the question"
            self._note_failure(request.request_id, reason)
            if self._log is not None:
                self._log.note_failed(question.context, question.begin_tokens, reason)
        else:
            self._failure = ""
            hit = self._rules.hit(
                question.asked,
                masks,
                request.block_hashes,
                local_tokens=question.begin_tokens,
                # The last token is always computed: its logits are what the engine wants.
                limit_tokens=request.num_tokens - 1,
            )
            end = max(end, hit.end_tokens)
            if self._log is not None:
                self._log.note_found(
                    question.context,
                    answer,
                    rules=self._rules,
                    asked=question.asked,
                    masks=masks,
                    local_tokens=question.begin_tokens,
                    end_tokens=end,
                )
        return LookupAnswered(request.request_id, answer.question_id, end, hit)

    def _note_failure(self, request_id: str, reason: str) -> None:
        """Warns of a failure, and not again while lookups go on to fail for the same reason."""
        level = logging.DEBUG if reason == self._failure else logging.WARNING
        self._failure = reason
        self._meter.failed += 1
        logger.log(level, "lookup of %s failed: %s", request_id, reason)

    def _masks(
        self, asked: Sequence[Asked], answer: LookupAnswer, now_s: float
    ) -> list[BoolArray] | None:
        """Returns what is present by group, less what is in quarantine; None: nobody knows."""
        wanted = [len(one.hashes) for one in asked if one.hashes]
        if answer.present is None or wanted != [len(mask) for mask in answer.present]:
            return None
        answers = iter(answer.present)
        masks = [next(answers) if one.hashes else np.zeros(0, dtype=bool) for one in asked]
        for at, one in enumerate(asked):
            listed = self._quarantine.listed(one.hashes, now_s)
            if listed:
                masks[at] = masks[at] & np.array([hash_ not in listed for hash_ in one.hashes])
        return masks

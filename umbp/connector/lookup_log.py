# SPDX-License-Identifier: Apache-2.0
"""Writes down what each lookup found, and what was the first object that it lacked.

One JSON object a line; ``umbp explain`` reads them. Only an engine with ``explain_lookups`` has a
log, so that nothing is paid without.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from umbp.backends.base import LookupAnswer
from umbp.connector.groups import Asked, BoolArray, GroupRules
from umbp.connector.report_files import BoundedLines
from umbp.fsm import RequestContext


class LookupLog:
    """The last lookups of an engine.

    Args:
        lines: Where they are written.
        clock: Seconds since 1970, for people.
    """

    def __init__(self, lines: BoundedLines, clock: Callable[[], float] = time.time) -> None:
        self._lines = lines
        self._clock = clock

    def note_found(  # noqa: PLR0913 - keyword-only
        self,
        context: RequestContext,
        answer: LookupAnswer,
        *,
        rules: GroupRules,
        asked: Sequence[Asked],
        masks: Sequence[BoolArray],
        local_tokens: int,
        end_tokens: int,
    ) -> None:
        """Writes down an answer.

        Args:
            context: The request.
            answer: What the backend said.
            rules: Cache-group rules.
            asked: What was asked for.
            masks: bool[hashes] for each, what counts as present; less than the answer's where
                objects are in quarantine.
            local_tokens: What the engine had by itself.
            end_tokens: Where the hit ends.
        """
        missing = _first_missing(
            answer, rules, asked, masks, local_tokens=local_tokens, end_tokens=end_tokens
        )
        groups = [
            {"group": one.group.index, "asked": len(one.hashes), "present": int(mask.sum())}
            for one, mask in zip(asked, masks, strict=True)
        ]
        self._add(
            context, local_tokens, hit_end_tokens=end_tokens, groups=groups, first_missing=missing
        )

    def note_failed(self, context: RequestContext, local_tokens: int, reason: str) -> None:
        """Writes down that a lookup has failed, or was given up without an answer."""
        self._add(context, local_tokens, failure=reason)

    def _add(self, context: RequestContext, local_tokens: int, **facts: Any) -> None:
        request = context.source
        line = {
            "time_s": round(self._clock(), 3),
            "request": context.request_id,
            "epoch": context.epoch,
            "prompt_tokens": request.num_prompt_tokens,
            "local_tokens": local_tokens,
            **facts,
        }
        self._lines.add(json.dumps(line))


def _first_missing(  # noqa: PLR0913 - the parts of one question
    answer: LookupAnswer,
    rules: GroupRules,
    asked: Sequence[Asked],
    masks: Sequence[BoolArray],
    *,
    local_tokens: int,
    end_tokens: int,
) -> dict[str, Any] | None:
    """Finds the first object beyond the hit that is missing: that is why the hit ends there.

    Blocks of a window or of recurrent state that lie before it are rarely there, and not needed.
    """
    found: dict[str, Any] | None = None
    part = 0
    for one, mask in zip(asked, masks, strict=True):
        if not one.hashes:
            continue
        for at in (~mask).nonzero()[0].tolist():
            end = rules.end_tokens(one.group, local_tokens, at)
            if end <= end_tokens:
                continue
            if found is None or end < found["end_tokens"]:
                lacking = answer.lacking(part, at) if answer.lacking is not None else None
                present = answer.present
                found = {
                    "group": one.group.index,
                    "rank": lacking,
                    "end_tokens": end,
                    "hash": one.hashes[at].hex(),
                    "quarantined": present is not None and bool(present[part][at]),
                }
            break
        part += 1
    return found

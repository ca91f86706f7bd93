# SPDX-License-Identifier: Apache-2.0
"""Requests as their clients see them, and ids that do not depend on the process."""

from typing import Any

import attrs

from umbp.sim.text import Text


@attrs.define(eq=False)
class SimRequest:
    """A request as its client sees it.

    Attributes:
        request_id: Its id.
        source: vLLM's request.
        text: What it says and what the answer must be.
        prompt_tokens: Length of the prompt.
        received: Tokens of the answer so far.
        finished: No more will come.
        aborted: Its client has gone.
    """

    request_id: str
    source: Any
    text: Text
    prompt_tokens: int
    received: int = 0
    finished: bool = False
    aborted: bool = False


class RequestId(str):
    """A request id whose hash, and so its place in vLLM's sets, is the same in every process."""

    _number: int

    def __new__(cls, value: str) -> "RequestId":
        self = super().__new__(cls, value)
        number = 0
        for byte in value.encode():
            number = (number * 257 + byte) % ((1 << 61) - 1)
        self._number = number
        return self

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestId, (str(self),)

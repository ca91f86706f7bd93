# SPDX-License-Identifier: Apache-2.0
"""What the simulated model makes of a prompt: the tokens that follow, and the KV of each."""

import functools
from typing import Final

_MULTIPLIER: Final = 6364136223846793005
_INCREMENT: Final = 1442695040888963407
_MASK: Final = (1 << 61) - 1
_VOCABULARY: Final = 500


class Text:
    """A prompt and its one continuation.

    The KV of a token is a number that depends on all tokens up to it, as real KV does: it is right
    at one place only.

    Args:
        prompt: Token ids.
    """

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self._tokens = list(prompt)
        self._values = [_INCREMENT]

    def values(self, begin: int, end: int) -> list[int]:
        """Returns the KV of the tokens at positions ``begin`` to ``end - 1``."""
        self._extend(end)
        return self._values[begin + 1 : end + 1]

    def state(self, end: int) -> int:
        """Returns the recurrent state after the first ``end`` tokens."""
        self._extend(end)
        return self._values[end]

    def token(self, position: int) -> int:
        """Returns the token at a position, of the prompt or of the continuation."""
        self._extend(position + 1)
        return self._tokens[position]

    def _extend(self, end: int) -> None:
        values, tokens = self._values, self._tokens
        while len(values) <= end:
            last = values[-1]
            if len(values) > len(tokens):
                tokens.append((last >> 7) % _VOCABULARY)
            token = tokens[len(values) - 1]
            values.append(((last ^ (last >> 29)) * _MULTIPLIER + token * 2 + _INCREMENT) & _MASK)


@functools.lru_cache(maxsize=4096)
def text_of(prompt: tuple[int, ...]) -> Text:
    """Returns the text of a prompt; equal prompts share one."""
    return Text(prompt)

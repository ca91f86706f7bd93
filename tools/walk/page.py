# SPDX-License-Identifier: Apache-2.0
"""Reads the commands of a page, and compares what they print with what the page shows.

A block that is to be run stands in a fence below a label, which readers of the rendered page do not
see::

    <!-- walk: ask -->

    ```bash
    curl ...
    ```

The output that the page shows is labelled ``ask shows``. In it, ``…`` stands for anything.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LABEL = re.compile(r"<!-- walk: (?P<label>[^>]+) -->")
_FENCE = re.compile(r"```(?P<language>\w+)")


class PageError(Exception):
    """A page is not written as it should be. One line."""


class Block(NamedTuple):
    """A labelled block.

    Attributes:
        label: Its label.
        place: File and line, for messages.
        language: What the fence says.
        text: What is in it.
    """

    label: str
    place: str
    language: str
    text: str


def read_blocks(path: Path) -> dict[str, Block]:
    """Returns the labelled blocks of a page, by label and in its order.

    Raises:
        PageError: A label has no block below it, stands twice, or a fence does not end.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    blocks: dict[str, Block] = {}
    for index, line in enumerate(lines):
        found = _LABEL.fullmatch(line)
        if found is None:
            continue
        place = f"{path.name}:{index + 1}"
        label = found["label"]
        if label in blocks:
            raise PageError(f"{place}: there are two blocks {label!r}; rename one")
        blocks[label] = _block_below(lines, index, label, place)
    return blocks


def _block_below(lines: list[str], index: int, label: str, place: str) -> Block:
    fence = _FENCE.fullmatch(lines[index + 2]) if index + 2 < len(lines) else None
    if lines[index + 1 : index + 2] != [""] or fence is None:
        raise PageError(f"{place}: below {label!r} there must be an empty line and a ```-fence")
    try:
        end = lines.index("```", index + 3)
    except ValueError:
        raise PageError(f"{place}: the fence of {label!r} does not end") from None
    text = "\n".join(lines[index + 3 : end]) + "\n"
    return Block(label, place, fence["language"], text)


def missing_line(shown: str, printed: str) -> str | None:
    """Returns the first line that a page shows and that was not printed, in order; None: none.

    Args:
        shown: What the page shows; ``…`` stands for anything within a line.
        printed: What was printed.
    """
    rest = iter(printed.splitlines())
    for line in shown.splitlines():
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in line.split("…")))
        if not any(pattern.fullmatch(one.strip()) for one in rest):
            return line
    return None


def substitute(text: str, words: Mapping[str, str]) -> str:
    """Puts other words in the place of some, where they stand as whole words."""
    for word, other in words.items():
        text = re.sub(rf"(?<![\w.]){re.escape(word)}(?!\w)", other, text)
    return text

# SPDX-License-Identifier: Apache-2.0
"""Answers each prompt three times on vLLM: cold, after a local hit, and after a restore."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from needle_outcome import Outcome, Pair
from needle_prompts import Case, Prompt, make_prompt

from umbp.cli.engine import DemoEngine, RequestRecord
from umbp.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

SETTLE_TIMEOUT_S = 120.0
"""How long stores may take to be answered after a run."""


class NotMeasured(Exception):
    """A run could not be made; the message says why."""


@attrs.frozen
class Bar:
    """What is being answered: a bar on a terminal, a line for each prompt elsewhere."""

    _console: "Console"
    _total: int

    @contextlib.contextmanager
    def shown(self) -> Iterator[Any]:
        """Shows the bar; yields a function that takes the number of done prompts and a text."""
        if not self._console.is_terminal:
            yield self._print
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        # Without redirection: see umbp.cli.console.
        bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with bars:
            task = bars.add_task("", total=self._total)
            yield lambda done, text: bars.update(task, completed=done, description=text)

    def _print(self, done: int, text: str) -> None:
        self._console.print(f"  {done} of {self._total} done; {text}", markup=False)


def answer_all(
    cases: Sequence[Case], engine: DemoEngine, *, max_tokens: int, console: "Console"
) -> Outcome:
    """Answers every prompt.

    Args:
        cases: What to ask.
        engine: vLLM with umbp.
        max_tokens: Longest answer.
        console: Where progress is shown.

    Raises:
        NotMeasured: A run could not be made.
        ConfigError: A length is too short for any prompt.
    """
    pairs = []
    with Bar(console, len(cases)).shown() as show:
        for case in cases:
            show(len(pairs), f"{case.length_tokens} tokens, depth {case.depth:g}")
            begun_s = time.monotonic()
            try:
                prompt = make_prompt(case, engine.encode_chat, engine.decode)
            except ValueError as error:
                raise ConfigError(f"--lengths {case.length_tokens} is too few: {error}") from error
            pairs.append(answer_pair(prompt, engine, max_tokens))
            elapsed_s = time.monotonic() - begun_s
            show(
                len(pairs), f"{case.length_tokens} tokens, depth {case.depth:g}: {elapsed_s:.1f} s"
            )
    return Outcome(pairs, failed_loads=engine.counters()["loads_failed"])


def answer_pair(prompt: Prompt, engine: DemoEngine, max_tokens: int) -> Pair:
    """Answers one prompt three times; between the last two, vLLM's prefix cache is emptied.

    Raises:
        NotMeasured: Stores were not answered, or the cache could not be emptied.
    """
    cold = _answer(prompt, engine, max_tokens)
    local = _answer(prompt, engine, max_tokens)
    if not engine.drop_prefix_cache():
        raise NotMeasured("vLLM refused to empty its prefix cache: a block is still in use")
    return Pair(prompt, cold, local, _answer(prompt, engine, max_tokens))


def _answer(prompt: Prompt, engine: DemoEngine, max_tokens: int) -> RequestRecord:
    record = engine.answer(prompt.token_ids, max_tokens)
    if not engine.settle(SETTLE_TIMEOUT_S):
        raise NotMeasured(f"stores were not answered within {SETTLE_TIMEOUT_S:.0f} s")
    return record

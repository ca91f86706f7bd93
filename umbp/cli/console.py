# SPDX-License-Identifier: Apache-2.0
"""The terminal: progress while something takes long, and silence for everybody else."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from umbp.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console


_PLAIN_COLUMNS: Final = 100
"""Width where there is no terminal, such as in the log of a build."""


def open_console(stream: TextIO) -> "Console":
    """Opens a console of rich on a stream.

    Raises:
        ConfigError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise ConfigError("this command needs rich: pip install rich") from error
    width = None if stream.isatty() else _PLAIN_COLUMNS
    return Console(file=stream, highlight=False, width=width)


@contextlib.contextmanager
def output_to_file(path: Path) -> Iterator[TextIO]:
    """Sends all output of this process, native libraries' too, to a file.

    Args:
        path: The file; output is appended.

    Yields:
        A stream to where standard output went before.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    try:
        with open(path, "ab", buffering=0) as log, os.fdopen(os.dup(1), "w") as terminal:
            for number in saved:
                os.dup2(log.fileno(), number)
            yield terminal
    finally:
        # What is still buffered belongs to the file.
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)


class Progress:
    """Says what is being done and for how long: a spinner on a terminal, plain lines elsewhere."""

    def __init__(self, console: "Console") -> None:
        self._console = console

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Shows a step while it runs, and one line with its duration when it has ended."""
        begun = time.monotonic()
        ending = "failed after"
        try:
            with self._running(title):
                yield
            ending = "took"
        finally:
            elapsed_s = time.monotonic() - begun
            mark = "[green]✓[/]" if ending == "took" else "[red]✗[/]"
            self._console.print(f"{mark} {title} [dim]{ending} {elapsed_s:.1f} s[/]")

    @contextlib.contextmanager
    def _running(self, title: str) -> Iterator[None]:
        if not self._console.is_terminal:
            self._console.print(f"  {title} ...")
            yield
            return
        from rich.progress import Progress as Bars
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        # Without redirection: whoever logs meanwhile would keep rich's stream for ever and write
        # to the terminal.
        with Bars(
            *columns,
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as bars:
            bars.add_task(title, total=None)
            yield

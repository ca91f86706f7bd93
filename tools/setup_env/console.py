# SPDX-License-Identifier: Apache-2.0
"""Progress on stdout, logs of what ran, and the errors that end a set-up."""

from __future__ import annotations

import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from setup_env import layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

LOG_TAIL_LINES = 15


class SetupError(Exception):
    """Ends the set-up. The message is one line: what failed and what to do.

    Attributes:
        detail: The end of a log that shows why; shown where the step failed.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class MoriUnavailableError(SetupError):
    """MORI cannot be used here. The set-up goes on without it."""


class Console:
    """Prints one line for each step: its title when it begins, its duration when it ends."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def say(self, text: str) -> None:
        """Prints a line of its own."""
        print(text, flush=True)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Reports the enclosed work as one step, with the seconds since the set-up began."""
        begin = time.monotonic()
        print(f"[{begin - self._begin:6.1f} s] {title} ...", end="", flush=True)
        try:
            yield
        except BaseException as error:
            print(f" failed after {time.monotonic() - begin:.1f} s", flush=True)
            if isinstance(error, SetupError) and error.detail:
                print(error.detail, flush=True)
            raise
        print(f" {time.monotonic() - begin:.1f} s", flush=True)


def run_logged(
    command: Sequence[str | Path],
    log_name: str,
    *,
    advice: str,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs a command with its output in `.envs/logs/<log_name>.log`.

    Args:
        command: The program and its arguments.
        log_name: Name of the log, without its ending. An older log of this name is replaced.
        advice: What the reader should do when the command fails.
        environment: All environment variables of the command; by default this process's.

    Raises:
        SetupError: The command failed.
    """
    layout.LOGS.mkdir(parents=True, exist_ok=True)
    path = layout.LOGS / f"{log_name}.log"
    words = [str(word) for word in command]
    with path.open("w", encoding="utf-8") as log:
        log.write("$ " + " ".join(words) + "\n")
        log.flush()
        result = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
    if result.returncode != 0:
        message = f"{words[0]} ended with status {result.returncode}: {advice} (log: {path})"
        raise SetupError(message, log_tail(path))


def log_tail(path: Path) -> str:
    """The last lines of a log, indented."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])

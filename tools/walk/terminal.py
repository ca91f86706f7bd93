# SPDX-License-Identifier: Apache-2.0
"""The terminals in which a walk runs its commands: one for what ends, one for each that stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from page import Block, missing_line, substitute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

PATIENCE_S = 180.0
"""How long something may take to start, or to print what it should, on a busy machine."""
_PAUSE_S = 0.5
_STOP_S = 60.0
_TAIL_LINES = 25


class WalkError(Exception):
    """A command did not do what the page says.

    Attributes:
        detail: What it printed.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = "\n".join(detail.splitlines()[-_TAIL_LINES:])


class Service:
    """A command that runs until it is stopped, as in a terminal of its own."""

    def __init__(self, block: Block, process: subprocess.Popen[bytes], log: Path) -> None:
        self.block = block
        self._process = process
        self._log = log

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def await_text(self, text: str) -> None:
        """Waits until it has printed something.

        Raises:
            WalkError: It ended before, or took too long.
        """
        self._await(lambda: None if text in self.output else text)

    def await_lines(self, shows: Block) -> None:
        """Waits until it has printed what the page shows.

        Raises:
            WalkError: It ended before, or took too long.
        """
        self._await(lambda: missing_line(shows.text, self.output))

    def _await(self, missing: Callable[[], str | None]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while (text := missing()) is not None:
            if self._process.poll() is not None:
                status = self._process.returncode
                raise WalkError(f"{self.block.place}: ended with status {status}", self.output)
            if time.monotonic() > give_up_s:
                raise WalkError(f"{self.block.place}: has not printed {text!r}", self.output)
            time.sleep(_PAUSE_S)

    def stop(self) -> None:
        """Does what Ctrl+C does, and waits for the end. Idempotent.

        Raises:
            WalkError: It did not end.
        """
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                raise WalkError(f"{self.block.place}: Ctrl+C did not end it", self.output) from None


class Terminals:
    """Runs blocks of a page in one folder.

    Args:
        root: Where each terminal begins: the project.
        folder: Where logs go.
        variables: The block that every terminal begins with.
        words: Words of the page in whose place others are put, such as ports.
        environment: What the shells inherit.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        variables: Block,
        *,
        words: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> None:
        self._root = root
        self._folder = folder
        self._variables = variables
        self._words = words
        self._environment = dict(environment)
        self._services: list[Service] = []

    def _script(self, block: Block) -> list[str]:
        text = substitute(self._variables.text + block.text, self._words)
        return ["bash", "-eu", "-o", "pipefail", "-c", text]

    def run(self, block: Block, shows: Block | None = None) -> str:
        """Runs a block until it prints what the page shows; once, where that is nothing.

        A page may ask for something that comes a moment later, such as a metric.

        Returns:
            What it printed.

        Raises:
            WalkError: It failed, or never printed that.
        """
        give_up_s = time.monotonic() + PATIENCE_S / 6
        while True:
            printed, status = self._run_once(block)
            if status:
                raise WalkError(f"{block.place}: ended with status {status}", printed)
            missing = missing_line(shows.text, printed) if shows is not None else None
            if missing is None:
                return printed
            if time.monotonic() > give_up_s or block.language != "bash":
                raise WalkError(f"{block.place}: the page shows {missing!r}, not printed", printed)
            time.sleep(_PAUSE_S)

    def _run_once(self, block: Block) -> tuple[str, int]:
        done = subprocess.run(
            self._script(block),
            env=self._environment,
            cwd=self._root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=10 * PATIENCE_S,
            check=False,
        )
        return done.stdout.decode(errors="replace"), done.returncode

    def start(self, block: Block, ready: str) -> Service:
        """Starts a block in a terminal of its own, and waits until it says that it is ready.

        Raises:
            WalkError: It did not.
        """
        name = re.sub(r"\W+", "-", block.label)
        log = self._folder / f"{len(self._services)}-{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                # Whoever runs this in the background has SIGINT ignored, and a shell that begins so
                # cannot change it.
                ["env", "--default-signal=INT", *self._script(block)],
                env=self._environment,
                cwd=self._root,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        service = Service(block, process, log)
        self._services.append(service)
        service.await_text(ready)
        return service

    def close(self) -> None:
        """Stops what still runs, the last first."""
        for service in reversed(self._services):
            service.stop()

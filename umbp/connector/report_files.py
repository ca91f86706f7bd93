# SPDX-License-Identifier: Apache-2.0
"""Files that an engine writes for people, into a private directory: whole, or bounded.

Nothing here may fail an engine that runs: only the directory is checked, at start.
"""

import contextlib
import logging
import os
from pathlib import Path
from typing import Final

from umbp.backends.socket_path import private_directory

logger = logging.getLogger(__name__)

_MODE: Final = 0o600
_ADVICE: Final = "set option report_dir to a directory that umbp may make for itself alone"
_APPEND: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(path: Path) -> None:
    """Makes the directory of reports where it is missing.

    Raises:
        ConfigError: It cannot be made, or others may enter it.
    """
    private_directory(path, what="report directory", advice=_ADVICE)


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that whoever reads it sees all of it or the one before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, _MODE), "w", encoding="utf-8") as stream:
            stream.write(text)
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


class BoundedLines:
    """A file of lines, with the one before beside it (``.1``): of both, the last lines of a run.

    Args:
        path: The file; what is there from an earlier run goes.
        lines_max: Lines after which the file becomes the one before; so at least as many are kept,
            and at most twice as many.
    """

    def __init__(self, path: Path, lines_max: int) -> None:
        self._path = path
        self._before = path.with_name(path.name + ".1")
        self._lines_max = lines_max
        self._count = 0
        self._has_failed = False
        for old in (self._path, self._before):
            with contextlib.suppress(OSError):
                old.unlink(missing_ok=True)

    def add(self, line: str) -> None:
        """Adds a line; after a first failure, nothing.

        The file is opened for each, so that nothing has to be closed or flushed by whoever crashes.
        """
        if self._has_failed:
            return
        try:
            if self._count == self._lines_max:
                self._path.replace(self._before)
                self._count = 0
            with os.fdopen(os.open(self._path, _APPEND, _MODE), "a", encoding="utf-8") as stream:
                stream.write(line + "\n")
            self._count += 1
        except OSError as error:
            self._has_failed = True
            logger.warning("%s cannot be written any more: %s", self._path, error.strerror)

# SPDX-License-Identifier: Apache-2.0
"""A program that runs as a child of this process, with a log, until it is told to stop."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import IO, Final

from umbp.errors import BackendUnavailable, ConfigError

STOP_TIMEOUT_S: Final = 5.0
_LOG_TAIL_BYTES: Final = 400


class ChildProcess:
    """A running program.

    Args:
        command: The program and its arguments.
        environment: Its variables, all of them.
        log_path: Where it logs; None for this process's own output.
        what: What to call it in a message.

    Raises:
        ConfigError: The log cannot be opened.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path | None,
        *,
        what: str,
    ) -> None:
        self._what = what
        self._log_path = log_path
        with contextlib.ExitStack() as files:
            log = None if log_path is None else files.enter_context(open_log(log_path))
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def process_id(self) -> int:
        """Its process id."""
        return self._process.pid

    def require_running(self) -> None:
        """Raises when the program has ended.

        Raises:
            BackendUnavailable: It has; the message ends with the end of its log.
        """
        status = self._process.poll()
        if status is not None:
            raise BackendUnavailable(
                f"{self._what} ended with status {status}{log_tail(self._log_path)}"
            )

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for the end, and returns the exit status; None when the program runs on."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Ends the program, also one that is stopped. Idempotent."""
        if self._process.poll() is not None:
            return
        # What runs here has no work to finish: its objects, or its list of them, end with it.
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)
        if self.wait(STOP_TIMEOUT_S) is None:
            self._process.kill()
            self._process.wait()


def add_library_directories(
    environment: MutableMapping[str, str], directories: Sequence[str]
) -> None:
    """Has a program look for shared libraries in these directories first."""
    path = [*directories, environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(part for part in path if part)


def open_log(path: Path) -> IO[bytes]:
    """Opens a log of this user's to append to it.

    Raises:
        ConfigError: It cannot be opened.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.fdopen(os.open(path, flags, 0o600), "ab")
    except OSError as error:
        raise ConfigError(
            f"log file {path} cannot be opened: {error.strerror}; name another one"
        ) from error


def log_tail(path: Path | None) -> str:
    """Returns the end of a log on one line, for a message."""
    if path is None:
        return ""
    try:
        text = path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
    return f"; {path} ends with: {' '.join(text.split())}" if text.strip() else f"; see {path}"

# SPDX-License-Identifier: Apache-2.0
"""Runs a program in the foreground until it is told to stop, or ends by itself."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, Protocol

from umbp.cli.console import Progress, open_console
from umbp.errors import BackendUnavailable

EXIT_SERVER_ENDED: Final = 1


class Program(Protocol):
    """What is run."""

    @property
    def process_id(self) -> int:
        """Its process id."""

    def require_running(self) -> None:
        """Raises ``BackendUnavailable`` when it has ended."""

    def wait(self) -> int | None:
        """Waits for its end."""

    def stop(self) -> None:
        """Ends it. Idempotent."""


class _StopRequested(BaseException):
    """SIGINT or SIGTERM has come."""


def run_in_foreground(
    what: str,
    start: Callable[[], Program],
    await_ready: Callable[[Program], None],
    *,
    describe: Callable[[Program], str],
) -> int:
    """Runs a program until a signal or its own end.

    Args:
        what: What is started, for the terminal.
        start: Starts it.
        await_ready: Waits until it works.
        describe: Says in one line what works now.

    Returns:
        Exit status: 0 when it was told to stop, ``EXIT_SERVER_ENDED`` when it ended by itself.

    Raises:
        ConfigError: As ``start`` raises it.
        BackendUnavailable: As ``start`` raises it.
    """
    console = open_console(sys.stdout)
    with stop_on_signals():
        program = None
        try:
            with Progress(console).step(what):
                program = start()
                await_ready(program)
            console.print(f"{describe(program)}; Ctrl-C ends it", soft_wrap=True)
            program.wait()
            program.require_running()
        except BackendUnavailable as error:
            print(f"umbp serve: {' '.join(str(error).split())}", file=sys.stderr)
            return EXIT_SERVER_ENDED
        except _StopRequested:
            console.print("stopping")
            return 0
        finally:
            if program is not None:
                program.stop()
    return 0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Has SIGINT and SIGTERM end the body by ``_StopRequested``, and only once."""

    def stop(_: int, __: FrameType | None) -> None:
        for number in numbers:
            # Whoever is ending the server already is not to be interrupted.
            signal.signal(number, signal.SIG_IGN)
        raise _StopRequested

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except _StopRequested:
        # It came before there was anything to end.
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

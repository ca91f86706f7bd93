# SPDX-License-Identifier: Apache-2.0
"""``umbp serve``: runs a server that engines share, in the foreground until it is told to stop."""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from umbp.cli.console import Progress, open_console
from umbp.errors import BackendUnavailable

if TYPE_CHECKING:
    from umbp.backends.mori_server import ServerProcess, ServerSettings

EXIT_SERVER_ENDED: Final = 1

_READ_LEASE_MS: Final = 5000
"""Ten times MORI's: a load on a busy machine may take longer than half a second."""

_STARTUP_TIMEOUT_MS: Final = 30_000


class _StopRequested(BaseException):
    """SIGINT or SIGTERM has come."""


def add_serve(commands: Any) -> None:
    """Adds the command to a parser."""
    serve = commands.add_parser(
        "serve", help="run a server that several engines share", allow_abbrev=False
    )
    kinds = serve.add_subparsers(dest="kind", metavar="KIND", required=True)
    standalone = kinds.add_parser(
        "standalone",
        help="MORI's server for the engines of this host (backend standalone)",
        description="Runs MORI's umbp_standalone_server: one pool of host memory for all engines of"
        " this host that name its address. It runs until SIGINT or SIGTERM. Exit status 0: it was"
        " told to stop; 1: it ended by itself.",
        allow_abbrev=False,
    )
    standalone.add_argument(
        "--address",
        default="",
        metavar="ADDRESS",
        help="where to listen: unix:///absolute/path.grpc.sock, in a directory of this user's alone"
        " (default: server.grpc.sock in umbp's directory below the system's temporary one)",
    )
    standalone.add_argument(
        "--capacity-bytes", type=_count, required=True, metavar="N", help="host memory of the pool"
    )
    standalone.add_argument(
        "--read-lease-ms",
        type=_count,
        default=_READ_LEASE_MS,
        metavar="N",
        help="for how long a load keeps its objects from eviction; give engines the same"
        " read_lease_ms (default: %(default)s)",
    )
    _add_pool(standalone)
    standalone.add_argument(
        "--log-level",
        choices=("debug", "info", "warn", "error", "critical"),
        help="log level of MORI (default: as MORI_UMBP_LOG_LEVEL says, else error)",
    )
    standalone.add_argument(
        "--log-file",
        metavar="FILE",
        help="where the server logs; - for the terminal (default: beside the socket, ending in"
        " .log)",
    )
    standalone.add_argument(
        "--startup-timeout-ms",
        type=_count,
        default=_STARTUP_TIMEOUT_MS,
        metavar="N",
        help="how long the server may take to come up (default: %(default)s)",
    )
    standalone.set_defaults(run=_run_standalone)


def _add_pool(standalone: argparse.ArgumentParser) -> None:
    """Adds how the pool is made."""
    standalone.add_argument(
        "--high-watermark",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of the pool at which a store evicts; the rest must hold the largest object, of"
        " one block of one group on one rank (default: %(default)s)",
    )
    standalone.add_argument(
        "--low-watermark",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="share of the pool at which eviction ends (default: %(default)s)",
    )
    standalone.add_argument(
        "--page-size-bytes",
        type=_count,
        metavar="N",
        help="size of a page, of which an object takes a whole number (default: MORI's, 65536)",
    )
    standalone.add_argument(
        "--prefault", action="store_true", help="touch all of the pool at start"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def _run_standalone(parsed: argparse.Namespace) -> int:
    from umbp.backends.mori_server import ServerSettings, check_settings
    from umbp.backends.server_address import parse_address

    settings = ServerSettings(
        address=parse_address(parsed.address),
        capacity_bytes=parsed.capacity_bytes,
        read_lease_ms=parsed.read_lease_ms,
        high_watermark=parsed.high_watermark,
        low_watermark=parsed.low_watermark,
        page_size_bytes=parsed.page_size_bytes,
        prefault=parsed.prefault,
        log_level=parsed.log_level,
    )
    check_settings(settings)
    log_path = settings.address.beside(".log")
    if parsed.log_file is not None:
        log_path = Path(parsed.log_file)
    return serve(
        settings,
        None if parsed.log_file == "-" else log_path,
        startup_timeout_ms=parsed.startup_timeout_ms,
    )


def serve(settings: "ServerSettings", log_path: Path | None, *, startup_timeout_ms: int) -> int:
    """Runs a server until a signal or its own end.

    Args:
        settings: What to start.
        log_path: Where it logs; None for this process's own output.
        startup_timeout_ms: How long it may take to come up.

    Returns:
        Exit status.

    Raises:
        ConfigError: The address is in use, or something cannot be made.
        BackendUnavailable: MORI is missing, or the server has not come up.
    """
    from umbp.backends.mori_server import ServerProcess, claimed

    console = open_console(sys.stdout)
    with _stop_on_signals(), claimed(settings.address, time.monotonic()):
        server = None
        try:
            with Progress(console).step(f"start the server at {settings.address}"):
                server = ServerProcess(settings, log_path)
                _await_server(server, settings, startup_timeout_ms)
            console.print(
                f"process {server.process_id} serves {settings.capacity_bytes} bytes, read lease "
                f"{settings.read_lease_ms} ms, log {log_path or 'here'}; Ctrl-C ends it",
                soft_wrap=True,
            )
            server.wait()
            server.require_running()
        except BackendUnavailable as error:
            print(f"umbp serve: {' '.join(str(error).split())}", file=sys.stderr)
            return EXIT_SERVER_ENDED
        except _StopRequested:
            console.print("stopping")
            return 0
        finally:
            if server is not None:
                server.stop()
    return 0


def _await_server(
    server: "ServerProcess", settings: "ServerSettings", startup_timeout_ms: int
) -> None:
    """Waits until the server listens and answers a client of MORI's."""
    from umbp.backends.mori_library import load_mori
    from umbp.backends.mori_server import shake_hands, wait_until_listening

    give_up_s = time.monotonic() + startup_timeout_ms / 1000
    wait_until_listening(settings.address, give_up_s, server.require_running)
    remaining_ms = max(1000, int((give_up_s - time.monotonic()) * 1000))
    shake_hands(load_mori(), settings.address, remaining_ms)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
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

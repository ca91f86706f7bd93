# SPDX-License-Identifier: Apache-2.0
"""``umbp serve``: runs a server that engines share, in the foreground until it is told to stop."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from umbp.cli.foreground import Program, run_in_foreground
from umbp.cli.serve_master import add_master
from umbp.cli.serve_options import add_common, count

if TYPE_CHECKING:
    from umbp.backends.mori_server import ServerSettings

_READ_LEASE_MS: Final = 5000
"""Ten times MORI's: a load on a busy machine may take longer than half a second."""


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
        "--capacity-bytes", type=count, required=True, metavar="N", help="host memory of the pool"
    )
    standalone.add_argument(
        "--read-lease-ms",
        type=count,
        default=_READ_LEASE_MS,
        metavar="N",
        help="for how long a load keeps its objects from eviction; give engines the same"
        " read_lease_ms (default: %(default)s)",
    )
    _add_pool(standalone)
    add_common(standalone, log_file="beside the socket, ending in .log")
    standalone.set_defaults(run=_run_standalone)
    add_master(kinds)


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
        type=count,
        metavar="N",
        help="size of a page, of which an object takes a whole number (default: MORI's, 65536)",
    )
    standalone.add_argument(
        "--prefault", action="store_true", help="touch all of the pool at start"
    )


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
        BackendUnavailable: MORI is missing.
    """
    from umbp.backends.mori_server import ServerProcess, claimed

    with claimed(settings.address, time.monotonic()):
        return run_in_foreground(
            f"start the server at {settings.address}",
            lambda: ServerProcess(settings, log_path),
            lambda server: _await_server(server, settings, startup_timeout_ms),
            describe=lambda server: (
                f"process {server.process_id} serves {settings.capacity_bytes} bytes, read lease "
                f"{settings.read_lease_ms} ms, log {log_path or 'here'}"
            ),
        )


def _await_server(server: Program, settings: "ServerSettings", startup_timeout_ms: int) -> None:
    """Waits until the server listens and answers a client of MORI's."""
    from umbp.backends.mori_library import load_mori
    from umbp.backends.mori_server import shake_hands, wait_until_listening

    give_up_s = time.monotonic() + startup_timeout_ms / 1000
    wait_until_listening(settings.address, give_up_s, server.require_running)
    remaining_ms = max(1000, int((give_up_s - time.monotonic()) * 1000))
    shake_hands(load_mori(), settings.address, remaining_ms)

# SPDX-License-Identifier: Apache-2.0
"""Arguments that every kind of ``umbp serve`` has."""

import argparse
from typing import Final

_STARTUP_TIMEOUT_MS: Final = 30_000


def count(text: str) -> int:
    """Reads a whole number above 0.

    Raises:
        ArgumentTypeError: It is something else.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def add_common(parser: argparse.ArgumentParser, *, log_file: str) -> None:
    """Adds where and what to log, and how long to wait.

    Args:
        parser: The parser of one kind.
        log_file: Where the log is by default, in words.
    """
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warn", "error", "critical"),
        help="log level of MORI (default: as MORI_UMBP_LOG_LEVEL says, else error)",
    )
    parser.add_argument(
        "--log-file",
        metavar="FILE",
        help=f"where the server logs; - for the terminal (default: {log_file})",
    )
    parser.add_argument(
        "--startup-timeout-ms",
        type=count,
        default=_STARTUP_TIMEOUT_MS,
        metavar="N",
        help="how long the server may take to come up (default: %(default)s)",
    )

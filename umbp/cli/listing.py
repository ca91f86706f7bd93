# SPDX-License-Identifier: Apache-2.0
"""``umbp backends`` and ``umbp options``: what is installed, and what it can be told."""

import sys
from collections.abc import Iterator
from typing import Final

from umbp.backends.registry import (
    InstalledBackend,
    check_available,
    find_backend,
    installed_backends,
)
from umbp.cli import report
from umbp.cli.console import open_console
from umbp.connector.config import ConnectorOptions
from umbp.errors import UmbpError
from umbp.options import option_table

_COLUMNS: Final = ("backend", "distribution", "version", "usable")


def print_backends() -> None:
    """Prints a table of the installed backends.

    Raises:
        ConfigError: rich is not installed.
    """
    rows = [
        (backend.name, backend.distribution, backend.version, usability(backend))
        for backend in installed_backends()
    ]
    report.print_rows(open_console(sys.stdout), _COLUMNS, rows)


def usability(installed: InstalledBackend) -> str:
    """Returns ``yes``, or why the backend cannot be used here, on one line."""
    try:
        check_available(find_backend(installed.name))
    except UmbpError as error:
        return "no: " + " ".join(str(error).split())
    return "yes"


def print_options() -> None:
    """Prints the options of the connector and of every installed backend.

    Raises:
        ConfigError: rich is not installed.
    """
    console = open_console(sys.stdout)
    from rich.markdown import Markdown

    console.print(Markdown("\n".join(_sections())))


def _sections() -> Iterator[str]:
    yield f"## Connector\n\n{option_table(ConnectorOptions)}"
    for installed in installed_backends():
        try:
            body = option_table(find_backend(installed.name).options_type)
        except UmbpError as error:
            body = " ".join(str(error).split()) + "\n"
        yield f"## Backend `{installed.name}`\n\n{body}"

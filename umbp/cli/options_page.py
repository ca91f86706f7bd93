# SPDX-License-Identifier: Apache-2.0
"""The page docs/options.md, made from the option classes.

python -m umbp.cli.options_page docs/options.md
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from umbp.backends.registry import find_backend, installed_backends
from umbp.connector.config import ConnectorOptions
from umbp.options import DEFAULT_WHERE, option_table

_DISTRIBUTION: Final = "umbp"
"""The page tells of our own backends, whatever else is installed where it is made."""

_INTRODUCTION: Final = f"""\
# Options

All options are written into one flat JSON object, `{DEFAULT_WHERE}` in vLLM's
`--kv-transfer-config`: those of the connector, and those of the backend that it names. An unknown
name, a wrong type or a value out of range stops the engine at its start.

This page is generated from the code: `python -m umbp.cli.options_page docs/options.md`.
"""


def options_page() -> str:
    """Renders the page.

    Raises:
        ConfigError: A backend of ours cannot be imported.
    """
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    yield _INTRODUCTION
    yield f"## Connector\n\n{option_table(ConnectorOptions)}"
    for installed in installed_backends():
        if installed.distribution == _DISTRIBUTION:
            table = option_table(find_backend(installed.name).options_type)
            yield f"## Backend `{installed.name}`\n\n{table}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the file to write: python -m umbp.cli.options_page docs/options.md")
    Path(sys.argv[1]).write_text(options_page(), encoding="utf-8")

# SPDX-License-Identifier: Apache-2.0
"""The page of options says what the code says."""

from pathlib import Path

import attrs
import pytest

from umbp.backends.registry import find_backend, installed_backends
from umbp.cli.options_page import options_page
from umbp.connector.config import ConnectorOptions

PAGE = Path(__file__).parents[2] / "docs" / "options.md"

OURS = [found.name for found in installed_backends() if found.distribution == "umbp"]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == options_page(), (
        "run: python -m umbp.cli.options_page docs/options.md"
    )


def test_the_page_has_a_section_for_each_backend() -> None:
    assert OURS == ["distributed", "embedded", "memory", "standalone"]
    text = options_page()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Connector",
        "## Backend `distributed`",
        "## Backend `embedded`",
        "## Backend `memory`",
        "## Backend `standalone`",
    ]


@pytest.mark.parametrize("name", ["", *OURS])
def test_every_option_is_explained_and_has_its_unit(name: str) -> None:
    options_type = find_backend(name).options_type if name else ConnectorOptions
    for attribute in attrs.fields(options_type):
        assert attribute.metadata["help"].endswith("."), attribute.name
        for unit in ("ms", "bytes"):
            if attribute.name.endswith(f"_{unit}"):
                assert attribute.metadata["unit"] == unit, attribute.name

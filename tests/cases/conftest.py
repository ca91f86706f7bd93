# SPDX-License-Identifier: Apache-2.0
"""What the tests of public cases share."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scheduler_rig import Engine, MakeRig, Rig


@pytest.fixture(scope="session")
def rig_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name: socket paths are."""
    return tmp_path_factory.mktemp("rig")


@pytest.fixture
def make_rig(rig_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    """Makes engines without a model; other fields than ``Engine``'s are connector options."""
    monkeypatch.setenv("UMBP_STRICT", "1")
    made: list[Rig] = []
    names = (f"e{index}" for index in itertools.count())

    def make(**fields: Any) -> Rig:
        own = {name: fields.pop(name) for name in Engine.__slots__ if name in fields}
        options = {"lookup_instance": next(names), **fields}
        made.append(Rig(Engine(rig_folder, options=options, **own)))
        return made[-1]

    yield make
    for rig in made:
        rig.close()

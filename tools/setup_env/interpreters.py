# SPDX-License-Identifier: Apache-2.0
"""Finds the Python interpreters of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSIONS = ((3, 10), (3, 11), (3, 12), (3, 13))

# A name on PATH may be a wrapper that runs another version, or none: only asking it tells.
PROBE = """
import importlib.util, json, sys
print(json.dumps([
    sys.version_info[:3],
    getattr(sys, "_base_executable", sys.executable),
    importlib.util.find_spec("ensurepip") is not None,
    sys.implementation.name,
]))
"""


class Interpreter(NamedTuple):
    """One usable CPython."""

    path: str
    release: tuple[int, int, int]
    has_ensurepip: bool  # Debian and Ubuntu put it into a package of its own

    @property
    def version(self) -> tuple[int, int]:
        """The version without the patch number: it decides what can be installed."""
        return self.release[:2]

    @property
    def release_text(self) -> str:
        """The full version as text, such as "3.10.13"."""
        return ".".join(str(part) for part in self.release)


def probe(path: str) -> Interpreter | None:
    """Asks an interpreter what it is. None when it does not run or is not CPython."""
    try:
        answer = subprocess.run(
            [path, "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        release, executable, has_ensurepip, implementation = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if implementation != "cpython":
        return None
    return Interpreter(executable, tuple(release), has_ensurepip)


def find_interpreters() -> dict[tuple[int, int], Interpreter]:
    """The best interpreter of each version in VERSIONS that this machine has.

    Those on PATH come first, then pyenv's; one that can set up pip by itself is preferred.
    """
    found: dict[tuple[int, int], Interpreter] = {}
    for name, path in _candidates():
        if any(known.has_ensurepip and name == _name(known.version) for known in found.values()):
            continue
        interpreter = probe(path)
        if interpreter is None or interpreter.version not in VERSIONS:
            continue
        known_one = found.get(interpreter.version)
        if known_one is None or (interpreter.has_ensurepip and not known_one.has_ensurepip):
            found[interpreter.version] = interpreter
    return found


def _candidates() -> Iterator[tuple[str, str]]:
    """Yields the names and paths under which an interpreter may be found."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    pyenv_root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield "python3", sys.executable
    for name in map(_name, VERSIONS):
        installed = pyenv_root.glob(f"versions/{name[len('python') :]}.*/bin/{name}")
        newest_first = sorted(installed, key=_patch_number, reverse=True)
        for path in [folder / name for folder in folders] + newest_first:
            if os.access(path, os.X_OK):
                yield name, str(path)
    for folder in folders:
        if os.access(folder / "python3", os.X_OK):
            yield "python3", str(folder / "python3")


def _name(version: tuple[int, int]) -> str:
    return f"python{version[0]}.{version[1]}"


def _patch_number(path: Path) -> int:
    """The patch number in `.../versions/3.10.13/bin/python3.10`, -1 when it is no number."""
    patch = path.parents[1].name.split(".")[2]
    return int(patch) if patch.isdigit() else -1

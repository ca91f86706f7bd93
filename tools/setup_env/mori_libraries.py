# SPDX-License-Identifier: Apache-2.0
"""Fetches the shared libraries that MORI's wheel links to and the machine lacks.

MORI's wheels were built on Ubuntu and link its gRPC, protobuf and others by name. `ldd` says
which are missing; the name of a library gives the name of its package; what the package brings is
asked about in turn, until nothing is missing. Only missing libraries are taken, so those of the
system stay in use.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from setup_env import layout
from setup_env.apt import AptError, PrivateApt
from setup_env.console import MoriUnavailableError
from setup_env.os_release import read_os_release

if TYPE_CHECKING:
    from pathlib import Path

# MORI's programs, and the library behind its Python package; they lead to all others.
BINARIES = ("libmori_pybinds.so", "umbp_master", "umbp_standalone_server")

# The last Debian release with the gRPC and protobuf that the wheel for Python 3.10 links to.
# Ubuntu 22.04 has them itself.
PAST_DEBIAN = {(3, 10): "bullseye"}

# Libraries whose package is not named after them.
PACKAGES = {
    "libaddress_sorting": "libgrpc{version}",
    "libcares": "libc-ares{version}",
    "libcrypto": "libssl{version}",
    "libgpr": "libgrpc{version}",
    "libupb": "libgrpc{version}",
    "libz": "zlib{version}g",
}

# A round fetches one level of dependencies. There were three when this was written.
ROUNDS_MAX = 10


def package_names(library: str) -> list[str]:
    """Packages that may hold a library, most likely first.

    Args:
        library: A name as programs link it, such as "libgrpc++.so.1".

    Returns:
        Names as Debian and Ubuntu form them; with "t64" where the package was renamed for
        64-bit time. Empty when the name has no version.
    """
    match = re.fullmatch(r"(?P<stem>.+)\.so\.(?P<version>[0-9.]+)", library)
    if match is None:
        return []
    stem, version = match["stem"], match["version"]
    if stem.startswith("libabsl_"):
        name = f"libabsl{version}"  # one package for all of Abseil's libraries
    elif stem in PACKAGES:
        name = PACKAGES[stem].format(version=version)
    else:
        separator = "-" if stem[-1].isdigit() else ""
        name = stem.replace("_", "-").lower() + separator + version
    return [name, f"{name}t64"] + ([f"libcares{version}"] if stem == "libcares" else [])


def ldd_problems(output: str) -> tuple[set[str], set[str]]:
    """Reads what `ldd` prints.

    Returns:
        The names of missing libraries, and the lines about symbol versions that a library of
        the system does not have.
    """
    missing = set(re.findall(r"^\s*(\S+) => not found", output, re.MULTILINE))
    versions = set(re.findall(r"version `[^']+' not found \(required by [^)]+\)", output))
    return missing, versions


def fetch_mori_libraries(mori_folder: Path, python_version: tuple[int, int]) -> None:
    """Puts the libraries that MORI lacks into `.envs/native/mori-libs`.

    Args:
        mori_folder: The installed package `mori`.
        python_version: Of the wheel: it decides on which system the wheel was built.

    Raises:
        MoriUnavailableError: A library cannot be had.
    """
    layout.MORI_LIBRARIES.mkdir(parents=True, exist_ok=True)
    is_debian = read_os_release().get("ID") == "debian"
    apt = PrivateApt(layout.APT, PAST_DEBIAN.get(python_version) if is_debian else None)
    for _ in range(ROUNDS_MAX):
        missing = _missing_libraries(mori_folder)
        if not missing:
            return
        for library in sorted(missing):
            _fetch(library, apt)
    raise MoriUnavailableError(
        f"MORI's libraries still lack {', '.join(sorted(missing))}: remove {layout.NATIVE} and "
        "run this again"
    )


def _missing_libraries(mori_folder: Path) -> set[str]:
    missing: set[str] = set()
    for name in BINARIES:
        answer = subprocess.run(
            ["ldd", str(mori_folder / name)],
            capture_output=True,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": layout.library_path(), "LC_ALL": "C"},
            check=False,
        )
        lacking, versions = ldd_problems(answer.stdout + answer.stderr)
        if versions:
            raise MoriUnavailableError(f"MORI does not fit this system: {sorted(versions)[0]}")
        missing |= lacking
    return missing


def _fetch(library: str, apt: PrivateApt) -> None:
    """Copies one library out of its package."""
    names = package_names(library)
    try:
        package = next((name for name in names if apt.has(name)), None)
        if package is None:
            raise MoriUnavailableError(
                f"MORI links to {library}, and apt has no package {' or '.join(names)}: "
                "install that library"
            )
        folder = apt.unpack(package)
    except AptError as error:
        raise MoriUnavailableError(f"MORI links to {library}, which is missing: {error}") from error
    held = next(folder.rglob(library), None)
    if held is None:
        raise MoriUnavailableError(
            f"MORI links to {library}, and the package {package} does not hold it: "
            "install that library"
        )
    shutil.copyfile(held.resolve(), layout.MORI_LIBRARIES / library)

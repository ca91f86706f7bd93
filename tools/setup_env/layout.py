# SPDX-License-Identifier: Apache-2.0
"""Where things are: every path that the set-up reads or writes."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "tools" / "requirements"
HIP_HOST_SOURCE = ROOT / "native" / "hip_host"

# Everything the set-up makes is below this one folder, which git ignores.
ENVS = ROOT / ".envs"
LOGS = ENVS / "logs"
LOCK = ENVS / "setup.lock"
PROFILES = ENVS / "profiles.json"
NEXT_VLLM = ENVS / "vllm-next"

NATIVE = ENVS / "native"
HIP_HOST_LIBRARIES = NATIVE / "lib"
MORI_LIBRARIES = NATIVE / "mori-libs"
APT = NATIVE / "apt"


def environment_folder(version: tuple[int, int]) -> Path:
    """The virtual environment of one Python version, such as `.envs/py3.10`."""
    return ENVS / f"py{version[0]}.{version[1]}"


def environment_python(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / "bin" / "python"


def library_path() -> str:
    """The value of LD_LIBRARY_PATH with which MORI finds its libraries."""
    return f"{HIP_HOST_LIBRARIES}:{MORI_LIBRARIES}"

# SPDX-License-Identifier: Apache-2.0
"""Decides which environments a machine can have.

The profile `mori` has vLLM and MORI; `plain` has vLLM alone, preferably on another Python and
with another vLLM, so that both ends of the supported range are tested. MORI has wheels for two
Pythons only, and each needs the C library and other libraries of the system it was built on.
"""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, NamedTuple

from setup_env import layout
from setup_env.os_release import read_os_release

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from setup_env.interpreters import Interpreter

# In order of preference. 3.10 comes last: it has an older vLLM, which `mori` mostly covers.
PLAIN_VERSIONS = ((3, 11), (3, 12), (3, 13), (3, 10))


class Host(NamedTuple):
    """What of a machine decides whether MORI's wheels run on it."""

    system: str
    architecture: str
    glibc: tuple[int, int] | None  # None: another C library
    distribution: str  # ID in /etc/os-release


class MoriWheel(NamedTuple):
    """One of MORI's wheels."""

    version: tuple[int, int]  # of Python
    oldest_glibc: tuple[int, int]
    lacks_libraries_on: str | None

    def fits(self, host: Host) -> bool:
        """Whether the wheel's libraries can be loaded on a machine with glibc."""
        assert host.glibc is not None
        return host.glibc >= self.oldest_glibc and host.distribution != self.lacks_libraries_on


# In order of preference. The wheel for 3.12 links to the RE2 of Ubuntu 24.04 (libre2.so.10),
# which no release of Debian has; what the other one links to is in Debian 11.
MORI_WHEELS = (
    MoriWheel((3, 12), oldest_glibc=(2, 39), lacks_libraries_on="debian"),
    MoriWheel((3, 10), oldest_glibc=(2, 35), lacks_libraries_on=None),
)


class Plan(NamedTuple):
    """One environment to build."""

    profile: str
    interpreter: Interpreter
    with_mori: bool

    @property
    def vllm_requirements(self) -> str:
        """Name of the file that pins vLLM: 0.32 and later need Python 3.11."""
        return "vllm-0.31.txt" if self.interpreter.version < (3, 11) else "vllm-0.32.txt"


class Choice(NamedTuple):
    """The environments of a machine; for one that is missing, a line that says why."""

    mori: Plan | None
    mori_reason: str
    plain: Plan | None
    plain_reason: str


def this_host() -> Host:
    """Describes the machine that this process runs on."""
    try:
        library, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (OSError, ValueError):
        library, number = "", ""
    glibc = None
    if library == "glibc":
        major, minor = number.split(".")[:2]
        glibc = (int(major), int(minor))
    distribution = read_os_release().get("ID", "")
    return Host(platform.system(), platform.machine(), glibc, distribution)


def choose(found: Mapping[tuple[int, int], Interpreter], host: Host) -> Choice:
    """Picks the environments from the interpreters of a machine.

    Args:
        found: The interpreters, by version.
        host: The machine.
    """
    version = _mori_version(found, host)
    if version is None:
        return with_plain(found, None, _why_no_mori(host))
    return with_plain(found, Plan("mori", found[version], with_mori=True), "")


def with_plain(
    found: Mapping[tuple[int, int], Interpreter], mori: Plan | None, mori_reason: str
) -> Choice:
    """Adds the profile `plain` to what is known about `mori`."""
    for version in PLAIN_VERSIONS:
        if version in found and (mori is None or version != mori.interpreter.version):
            return Choice(mori, mori_reason, Plan("plain", found[version], with_mori=False), "")
    if mori is None:
        reason = (
            f"no Python of {_list_versions(PLAIN_VERSIONS)} found on PATH or in pyenv: install one"
        )
    else:
        version_text = _list_versions([mori.interpreter.version])
        reason = f"the only Python here, {version_text}, has the profile mori, which runs it all"
    return Choice(mori, mori_reason, None, reason)


def _mori_version(
    found: Mapping[tuple[int, int], Interpreter], host: Host
) -> tuple[int, int] | None:
    if host.system != "Linux" or host.architecture != "x86_64" or host.glibc is None:
        return None
    for wheel in MORI_WHEELS:
        if wheel.version in found and wheel.fits(host):
            return wheel.version
    return None


def _why_no_mori(host: Host) -> str:
    """A line that says why a machine without `_mori_version` has none."""
    if host.system != "Linux" or host.architecture != "x86_64":
        return f"MORI has wheels for Linux x86_64 only, this is {host.system} {host.architecture}"
    if host.glibc is None:
        return "MORI's wheels need glibc, which this system does not have"
    usable = [wheel.version for wheel in MORI_WHEELS if wheel.fits(host)]
    if not usable:
        glibc_text = f"{host.glibc[0]}.{host.glibc[1]}"
        return f"MORI's wheels need glibc 2.35 or later, this system has {glibc_text}"
    return (
        f"MORI's wheels for this system need Python {_list_versions(usable)}, not found on PATH "
        "or in pyenv: install it"
    )


def _list_versions(versions: Iterable[tuple[int, int]]) -> str:
    return " or ".join(f"{major}.{minor}" for major, minor in sorted(versions))


def write_profiles(plans: Iterable[Plan]) -> None:
    """Records the environments that are ready, for `tools/run.py`."""
    record = {
        plan.profile: str(
            layout.environment_folder(plan.interpreter.version).relative_to(layout.ROOT)
        )
        for plan in plans
    }
    layout.PROFILES.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_profiles() -> dict[str, str]:
    """The environments that are ready: profile to folder, relative to the project's."""
    try:
        record: dict[str, str] = json.loads(layout.PROFILES.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return record

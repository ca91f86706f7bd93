# SPDX-License-Identifier: Apache-2.0
"""Fetches and unpacks packages with apt, without root and without touching the system.

apt gets a state, a cache and a list of sources of its own. The sources are the machine's own for
its distribution. On Debian a past release can be added, from the same mirror, for libraries that
the present one no longer has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from setup_env.apt_sources import distribution_source, read_sources
from setup_env.os_release import read_os_release

if TYPE_CHECKING:
    from pathlib import Path

# As root, apt would fetch as a user who may not write here; "root" keeps it from changing user.
# Hooks of the machine's apt configuration would change the system, so they are cleared. Images
# for containers switch the two package caches off; without them every call takes seconds.
CONFIGURATION = """\
Dir::State "{folder}/state";
Dir::State::status "{folder}/state/status";
Dir::Cache "{folder}/cache";
Dir::Cache::pkgcache "pkgcache.bin";
Dir::Cache::srcpkgcache "srcpkgcache.bin";
Dir::Etc::sourcelist "{folder}/umbp.sources";
Dir::Etc::sourceparts "-";
APT::Sandbox::User "root";
APT::Architecture "amd64";
APT::Architectures "amd64";
Acquire::Languages "none";
Acquire::Retries "3";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""


class AptError(Exception):
    """apt cannot give a package. The message is one line."""


class PrivateApt:
    """apt with its files in one folder.

    Args:
        folder: Where its files go. It is made when needed and may be removed at any time.
        past_release: Code name of an older Debian release to look into as well.
    """

    def __init__(self, folder: Path, past_release: str | None = None) -> None:
        self._folder = folder
        self._past_release = past_release
        self._is_ready = False

    def has(self, package: str) -> bool:
        """Whether a package of this name can be fetched."""
        self._prepare()
        return self._run("apt-cache", "show", "--no-all-versions", package).returncode == 0

    def unpack(self, package: str) -> Path:
        """Fetches one package, without what it depends on, and unpacks it.

        Returns:
            The folder that holds the package's files.

        Raises:
            AptError: There is no such package, or it cannot be fetched.
        """
        target = self._folder / "unpacked" / package
        if target.is_dir():
            return target
        self._prepare()
        downloads = self._folder / "downloads" / package
        shutil.rmtree(downloads, ignore_errors=True)
        downloads.mkdir(parents=True)
        answer = self._run("apt-get", "download", package, folder=downloads)
        archives = list(downloads.glob("*.deb"))
        if answer.returncode != 0 or not archives:
            raise AptError(f"apt-get download {package}: {_last_line(answer)}")
        # Unpacked beside its place and renamed: a folder of the final name is complete.
        partial = target.with_name(f"{package}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        answer = self._run("dpkg-deb", "-x", str(archives[0]), str(partial))
        if answer.returncode != 0:
            raise AptError(f"dpkg-deb -x {archives[0].name}: {_last_line(answer)}")
        partial.rename(target)
        return target

    def _prepare(self) -> None:
        """Writes the configuration and fetches the lists of packages, once."""
        if self._is_ready:
            return
        for program in ("apt-get", "apt-cache", "dpkg-deb"):
            if shutil.which(program) is None:
                raise AptError(f"{program} is not installed (this is no Debian or Ubuntu)")
        for name in ("state/lists/partial", "cache/archives/partial"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        (self._folder / "state" / "status").touch()
        (self._folder / "umbp.sources").write_text(self._sources(), encoding="utf-8")
        text = CONFIGURATION.format(folder=self._folder)
        (self._folder / "apt.conf").write_text(text, encoding="utf-8")
        answer = self._run("apt-get", "update")
        if answer.returncode != 0:
            raise AptError(f"apt-get update: {_last_line(answer)}")
        self._is_ready = True

    def _sources(self) -> str:
        code_name = read_os_release().get("VERSION_CODENAME", "")
        source = distribution_source(read_sources(), code_name)
        if source is None:
            raise AptError(f"/etc/apt names no source for {code_name or 'this system'} main")
        stanzas = [source.stanza()]
        if self._past_release is not None:
            past = source._replace(suite=self._past_release, components=("main",))
            stanzas.append(past.stanza())
        return "\n".join(stanzas)

    def _run(
        self, program: str, *arguments: str, folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        options = [] if program == "dpkg-deb" else ["-c", str(self._folder / "apt.conf"), "-q"]
        return subprocess.run(
            [program, *options, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            check=False,
        )


def _last_line(answer: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in answer.stderr.splitlines() if line.startswith("E:")]
    return (lines or answer.stderr.splitlines() or ["no message"])[-1]

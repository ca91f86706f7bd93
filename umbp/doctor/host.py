# SPDX-License-Identifier: Apache-2.0
"""All that checks read of a machine, in one place, so that tests can put another in its place."""

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from umbp.backends.host_limits import MemoryLimits, memory_limits
from umbp.backends.master_address import MasterAddress, Presence
from umbp.doctor.probe import RESULT_MARK

_PROBE_TIMEOUT_S: Final = 300.0
"""Importing PyTorch and MORI from a cold network file system takes minutes at worst."""
_PRESENCE_TIMEOUT_S: Final = 2.0
_REASON_CHARS_MAX: Final = 300


@attrs.frozen
class Probed:
    """What a child process said of a library.

    Attributes:
        values: What it found out; empty when it could not.
        problem: Why it could not, on one line; empty when it could.
    """

    values: Mapping[str, Any]
    problem: str = ""


@attrs.define
class Host:
    """The machine.

    Attributes:
        root: Where ``/proc``, ``/sys`` and ``/dev`` are found.
        environment: Environment variables, which the engine is to have, too.
        python: Version of Python, major and minor.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = attrs.field(factory=lambda: dict(os.environ))
    python: tuple[int, int] = attrs.field(factory=lambda: sys.version_info[:2])
    _probed: dict[str, Probed] = attrs.field(factory=dict, init=False)

    def read(self, path: str) -> str | None:
        """Returns the text of a file without the space around it; None where it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def read_number(self, path: str) -> int | None:
        """Returns the whole number in a file; None where there is none."""
        try:
            return int(self.read(path) or "")
        except ValueError:
            return None

    def names(self, path: str) -> list[str]:
        """Returns the sorted names in a folder; none where it cannot be read."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except OSError:
            return []

    def fields(self, path: str) -> dict[str, str]:
        """Reads lines of ``name: value``, as of /proc/meminfo; empty where it cannot be read."""
        pairs = (line.partition(":") for line in (self.read(path) or "").splitlines())
        return {name.strip(): value.strip() for name, colon, value in pairs if colon}

    def free_bytes(self, path: str) -> int | None:
        """Returns the free bytes of the file system of a folder; None where there is none."""
        try:
            found = os.statvfs(self.root / path)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def memory(self) -> MemoryLimits | None:
        """Returns the memory of the machine or of the container around this process."""
        return memory_limits(self.root)

    def version_of(self, *distributions: str) -> tuple[str, str] | None:
        """Returns name and version of the first of these distributions that is installed."""
        for name in distributions:
            try:
                return name, importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def why_not_bound(self, address: str, port: int) -> str | None:
        """Says why a server could not listen there; None: it could. Port 0 is any.

        Args:
            address: IP address of this host; empty for all.
            port: TCP port.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as wanted:
                # A port whose last connection has only just ended can be had.
                wanted.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                wanted.bind((address, port))
        except OSError as error:
            return error.strerror or str(error)
        return None

    def presence(self, address: MasterAddress) -> Presence:
        """Greets a master."""
        return address.presence(_PRESENCE_TIMEOUT_S)

    def probe(self, what: str) -> Probed:
        """Loads a library in a child process, so that its crash is a finding.

        Args:
            what: ``torch``, or ``backend:`` and the name of a backend.
        """
        if what not in self._probed:
            self._probed[what] = self._run_probe(what)
        return self._probed[what]

    def _run_probe(self, what: str) -> Probed:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "umbp.doctor.probe", what],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Probed({}, f"has not loaded within {_PROBE_TIMEOUT_S:.0f} s")
        lines = ended.stdout.decode(errors="replace").splitlines()
        results = [line for line in lines if line.startswith(RESULT_MARK)]
        if results:
            values = json.loads(results[-1].removeprefix(RESULT_MARK))
            # What crashes when it ends has crashed: an engine's worker would, too.
            if ended.returncode == 0:
                return Probed(values, values.get("problem", ""))
        return Probed({}, _why_ended(ended.returncode, ended.stderr.decode(errors="replace")))


def _why_ended(status: int, errors: str) -> str:
    last = " ".join((errors.strip().splitlines() or ["it said nothing"])[-1].split())
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"crashes when it is loaded ({name}): {last[:_REASON_CHARS_MAX]}"
    return f"cannot be loaded (status {status}): {last[:_REASON_CHARS_MAX]}"

# SPDX-License-Identifier: Apache-2.0
"""The servers that faults happen to, one class for each mode, with what its engines are told."""

import os
import signal
import time
from pathlib import Path
from typing import Any, Final, Protocol
from unittest import mock

from engine import EngineSettings
from masters import Master

from umbp.backends.mori_server import ServerProcess, ServerSettings, wait_until_listening
from umbp.backends.server_address import parse_address

LOOKUP_TIMEOUT_MS: Final = 200
TIMEOUT_MS: Final = 1000
_CAPACITY_BYTES: Final = 64 << 20
_STARTUP_S: Final = 60.0
_SHARING: Final = {"UMBP_HIP_HOST_DEVICES": "1", "UMBP_HIP_HOST_REMAP": "1"}
"""Lets the stand-in HIP runtime pass KV memory for a device's, in engines and in the server."""


class Server(Protocol):
    """A process that engines depend on."""

    mode: str
    """Name of the backend."""

    def start(self) -> None:
        """Starts it and waits until it listens."""

    def stop(self) -> None:
        """Stops it without ending it (SIGSTOP)."""

    def go_on(self) -> None:
        """Lets it go on (SIGCONT)."""

    def kill(self) -> None:
        """Ends it as a crash does (SIGKILL)."""

    def end(self) -> None:
        """Ends it for good."""

    def engine_settings(self) -> EngineSettings:
        """Returns what an engine that uses it is started with."""


class StandaloneServer:
    """MORI's server of one host."""

    mode = "standalone"

    def __init__(self, folder: Path) -> None:
        self._log_path = folder / "server.log"
        self._settings = ServerSettings(
            address=parse_address(f"unix://{folder}/own/s.grpc.sock"),
            capacity_bytes=_CAPACITY_BYTES,
            read_lease_ms=5000,
        )
        self._process: ServerProcess | None = None

    def start(self) -> None:
        """See ``Server``."""
        self._settings.address.path.parent.mkdir(mode=0o700, exist_ok=True)
        with mock.patch.dict(os.environ, _SHARING):
            self._process = ServerProcess(self._settings, self._log_path)
        wait_until_listening(self._settings.address, time.monotonic() + _STARTUP_S)

    def stop(self) -> None:
        """See ``Server``."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """See ``Server``."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """See ``Server``."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(_STARTUP_S)

    def end(self) -> None:
        """See ``Server``."""
        if self._process is not None:
            self._process.stop()

    def engine_settings(self) -> EngineSettings:
        """See ``Server``."""
        options = {
            "address": str(self._settings.address),
            "read_lease_ms": self._settings.read_lease_ms,
            "total_capacity_bytes": None,
        }
        return _settings(self.mode, options, _SHARING)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.process_id, number)


class MasterServer(Master):
    """MORI's master."""

    mode = "distributed"

    def engine_settings(self) -> EngineSettings:
        """See ``Server``."""
        options = {**self.options, "total_capacity_bytes": _CAPACITY_BYTES}
        del options["capacity_bytes"]
        return _settings(self.mode, options, {})


def _settings(mode: str, options: dict[str, Any], environment: dict[str, str]) -> EngineSettings:
    bounds = {"lookup_timeout_ms": LOOKUP_TIMEOUT_MS, "timeout_ms": TIMEOUT_MS}
    return EngineSettings(
        model="llama", backend=mode, options={**options, **bounds}, environment=environment
    )

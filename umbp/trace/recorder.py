# SPDX-License-Identifier: Apache-2.0
"""Writes a trace: a line for each event that a core takes, and for each deadline that has passed.

A trace begins where nothing is open, so that a fresh core can play it. An engine that does not
trace has an ordinary ``Core`` and pays nothing.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

import umbp
from umbp.fsm import Command, Core, Event
from umbp.trace.codec import encode_command, encode_event

logger = logging.getLogger(__name__)

FORMAT: Final = 1
_MODE: Final = 0o600
_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class TraceFile:
    """A trace on disk, and the part before it beside it (``.1``); together never too large.

    A core that is idle begins the file anew once it has a quarter of the bound, and the trace ends
    for good when it has half of it without such a moment.

    Args:
        path: The file; what is there from an earlier run is replaced.
        bytes_max: Bound of both files together.
    """

    def __init__(self, path: Path, bytes_max: int) -> None:
        self._path = path
        self._before = path.with_name(path.name + ".1")
        self._bytes_max = bytes_max
        self._size_bytes = 0
        self._descriptor: int | None = None
        self._has_ended = False
        with contextlib.suppress(OSError):
            self._before.unlink(missing_ok=True)

    @property
    def wants_anew(self) -> bool:
        """Whether the file should begin anew, at the next moment at which the core is idle."""
        return self._size_bytes * 4 >= self._bytes_max

    def begin(self, header: dict[str, Any]) -> None:
        """Begins the file, or begins it anew."""
        try:
            if self._descriptor is not None:
                self.close()
                self._path.replace(self._before)
            self._descriptor = os.open(self._path, _FLAGS, _MODE)
        except OSError as error:
            self._end(f"cannot be written: {error.strerror}")
            return
        self._size_bytes = 0
        self.add(header)

    def add(self, line: dict[str, Any]) -> None:
        """Adds a line, at once: of an engine that dies the last ones count most."""
        if self._descriptor is None or self._has_ended:
            return
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if (self._size_bytes + len(data)) * 2 > self._bytes_max:
            self._end("is full: the trace ends here; raise trace_bytes")
            return
        try:
            os.write(self._descriptor, data)
        except OSError as error:
            self._end(f"cannot be written any more: {error.strerror}")
        self._size_bytes += len(data)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _end(self, why: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            logger.warning("trace %s %s", self._path, why)
        self.close()


class TracedCore(Core):
    """A core that writes down what goes in and what comes out."""

    _file: TraceFile | None = None
    _is_inside = False
    _has_fired = False

    def trace_to(self, file: TraceFile) -> None:
        """Begins to trace; before the first event."""
        self._file = file
        self._take_id: Callable[[], int] = self.next_id
        self._last_id = 0
        self.next_id = self._next_id
        self._begin()

    def step(self, event: Event, now_s: float) -> list[Command]:
        """Takes one event."""
        file = self._file
        if file is None:
            return super().step(event, now_s)
        if file.wants_anew and not self.requests and not self.leases:
            self._begin()
        line = {"now_s": now_s, **encode_event(event)}
        self._is_inside = True
        try:
            out = super().step(event, now_s)
        except Exception as error:
            file.add(line | {"error": type(error).__name__})
            raise
        finally:
            self._is_inside = False
        file.add(line | {"commands": [encode_command(command) for command in out]})
        return out

    def tick(self, now_s: float) -> list[Command]:
        """Brings in every deadline that has passed."""
        self._has_fired = False
        self._is_inside = True
        try:
            out = super().tick(now_s)
        finally:
            self._is_inside = False
        if self._has_fired and self._file is not None:
            commands = [encode_command(command) for command in out]
            self._file.add({"now_s": now_s, "event": "tick", "commands": commands})
        return out

    def _fire(self, subject: Any, event: Any) -> None:
        self._has_fired = True
        super()._fire(subject, event)

    def _next_id(self) -> int:
        self._last_id = self._take_id()
        if self._file is not None and not self._is_inside:
            # The connector numbers transfers that it refuses.
            self._file.add({"now_s": self.now_s, "event": "id"})
        return self._last_id

    def _begin(self) -> None:
        assert self._file is not None
        self._file.begin(
            {
                "umbp_trace": FORMAT,
                "umbp": umbp.__version__,
                "time_s": time.time(),
                "limits": attrs.asdict(self.limits),
                "epoch": self.epoch,
                "last_id": self._last_id,
                "local_cache_tainted": self.local_cache_tainted,
            }
        )

# SPDX-License-Identifier: Apache-2.0
"""What a reader of docs/walkthrough.md does, in the page's order."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

from browser import NO_BROWSER
from page import read_blocks
from perfetto import check_events, look_at_trace
from terminal import Service, Terminals, WalkError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from page import Block

ENGINE_READY = "Application startup complete."
SERVER_READY = "Ctrl-C ends it"
PROMETHEUS_READY = "Server is ready to receive web requests."
VIEWER_READY = "localhost"
WITH_MORI = ("embedded", "distributed", "standalone")
SERVERS = {"distributed": "distributed master", "standalone": "standalone server"}

EXECUTED = (
    *("demo", "backends", "question", "ask", "ask again", "look"),
    *("prometheus", "query", "dashboard", "subscriber", "reset the store", "trace", "perfetto"),
    *(f"{name} {part}" for name in ("memory", *WITH_MORI) for part in ("configuration", "engine")),
    *SERVERS.values(),
    *("second engine, wrong", "ask the second", "explain lookups", "explain"),
    "second engine, right",
)
"""Labels of the blocks that a walk runs; each terminal begins with ``variables``."""

SHOWN_APART = ("ask the second, wrong, shows", "ask the second, right, shows")
"""What one command shows at two times; everything else is shown by the label and ``shows``."""


class Walk:
    """One walk.

    Args:
        page: The page.
        terminals: Where its commands run.
        folder: The reader's folder.
        port: The port of Perfetto's page.
        step: Shows a step while it runs.
        skip: Says that something is left out, and why.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        terminals: Terminals,
        folder: Path,
        *,
        step: Callable[[str], AbstractContextManager[None]],
        skip: Callable[[str, str], None],
    ) -> None:
        self._blocks = blocks
        self._terminals = terminals
        self._folder = folder
        self._step = step
        self._skip = skip

    def _run(self, label: str, shows: str | None = None) -> str:
        shown = self._blocks.get(shows or f"{label} shows")
        return self._terminals.run(self._blocks[label], shown)

    def _start(self, label: str, ready: str) -> Service:
        return self._terminals.start(self._blocks[label], ready)

    def prepare(self) -> frozenset[str]:
        """Makes the model and the question; returns the backends that can be used here."""
        with self._step("umbp demo, which leaves the model"):
            self._run("demo")
        with self._step("which backends are there"):
            listed = self._run("backends")
        self._run("question")
        self._run("memory configuration")  # That of others is made from it.
        return frozenset(re.findall(r"^(\w+) .* yes *$", listed, re.MULTILINE))

    def serve(self, backend: str) -> Service:
        """Configures and starts an engine."""
        with self._step(f"{backend}: umbp doctor and vllm serve"):
            self._run(f"{backend} configuration")
            return self._start(f"{backend} engine", ENGINE_READY)

    def ask(self, backend: str) -> None:
        """Asks twice, with an empty prefix cache the second time, and looks at the metrics."""
        with self._step(f"{backend}: asked twice; the second answer is restored"):
            first = _content(self._run("ask"))
            second = _content(self._run("ask again"))
            if first != second:
                raise WalkError(f"{backend}: the answers differ: {first!r}, {second!r}")
            self._run("look")

    def watch(self) -> None:
        """Starts Prometheus, and evaluates the dashboard's queries."""
        if shutil.which("prometheus") is None:
            self._skip("Prometheus and the dashboard", "no program prometheus: apt-get install it")
            return
        with self._step("Prometheus scrapes vLLM, and sees the hit"):
            self._start("prometheus", PROMETHEUS_READY)
            self._run("query")
        with self._step("the dashboard's panels show the hit"):
            self._run("dashboard")

    def subscribe(self) -> None:
        """Sees the blocks of a reset go, and come again."""
        with self._step("a subscriber sees blocks removed and stored"):
            subscriber = self._start("subscriber", "subscribed")
            self._run("reset the store")
            subscriber.await_lines(self._blocks["subscriber shows"])
            subscriber.stop()

    def trace(self, browser: str | None, viewer_url: str) -> None:
        """Plays the trace, exports it, and opens it in Perfetto's page."""
        with self._step("umbp trace plays the trace and exports it"):
            self._run("trace")
            tracks = check_events(self._folder / "trace.json")
        if browser is None:
            self._skip("the trace in Perfetto", f"no program {NO_BROWSER}")
            return
        with self._step("Perfetto's page shows the trace"):
            viewer = self._start("perfetto", VIEWER_READY)
            look_at_trace(browser, viewer_url, tracks, self._folder / "perfetto.png")
            viewer.stop()

    def memory(self, browser: str | None, viewer_url: str) -> None:
        """The sections on ``memory``, on Prometheus, on events and on traces."""
        engine = self.serve("memory")
        self.ask("memory")
        self.watch()
        self.subscribe()
        self.trace(browser, viewer_url)
        engine.stop()

    def other(self, backend: str) -> Service:
        """The section on another backend; returns the engine, which runs."""
        if backend in SERVERS:
            with self._step(f"{backend}: {SERVERS[backend].split()[1]}"):
                self._start(SERVERS[backend], SERVER_READY)
        engine = self.serve(backend)
        self.ask(backend)
        return engine

    def second_engine(self) -> None:
        """The section on an engine that finds nothing."""
        with self._step("a second engine with another PYTHONHASHSEED"):
            wrong = self._start("second engine, wrong", ENGINE_READY)
        with self._step("it finds nothing, and umbp explain says why"):
            self._run("ask the second", SHOWN_APART[0])
            self._run("explain lookups")
            self._run("explain")
            wrong.stop()
        with self._step("with the same PYTHONHASHSEED its first answer is restored"):
            right = self._start("second engine, right", ENGINE_READY)
            self._run("ask the second", SHOWN_APART[1])
            right.stop()


def _content(printed: str) -> str:
    """Returns the text of an answer of the OpenAI API."""
    found = re.search(r'"content":"((?:[^"\\]|\\.)*)"', printed)
    return found[1] if found else ""


def read_walk(path: Path) -> dict[str, Block]:
    """Reads the page, and checks that it and this module know the same blocks.

    Raises:
        PageError: The page is not written as it should be.
        WalkError: It has other blocks.
    """
    blocks = read_blocks(path)
    needed = {"variables", *EXECUTED, *SHOWN_APART}
    known = needed | {f"{label} shows" for label in EXECUTED}
    if needed - set(blocks) or set(blocks) - known:
        raise WalkError(
            f"{path.name}: lacks {sorted(needed - set(blocks))}, and has "
            f"{sorted(set(blocks) - known)}, which no step runs"
        )
    return blocks

# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own.

vLLM keeps state in its modules, so an engine gets a process that has never run another. Importing
vLLM takes longer than starting a tiny model: one process imports it, and each engine is forked from
that (``multiprocessing``'s fork server). What an engine prints goes to a file.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import attrs
from engine import ENVIRONMENT, Engine, EngineSettings
from fork_server import start_fork_server

_PRELOADED: Final = [
    "vllm",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
]
_CALL_TIMEOUT_S: Final = 180.0
_CLOSE_TIMEOUT_S: Final = 30.0
_LOG_LINES: Final = 40
_ENGINES_KEPT: Final = 3

_context = multiprocessing.get_context("forkserver")


class EngineError(Exception):
    """An engine raised, or its process ended.

    Attributes:
        kind: Name of the exception's class in the engine's process; empty if that ended.
        message: The exception's message.
    """

    def __init__(self, kind: str, message: str, details: str) -> None:
        super().__init__(f"{kind}: {message}\n{details}")
        self.kind = kind
        self.message = message


class EngineProcess:
    """A process for one engine; the public methods of ``Engine`` can be called on it.

    Args:
        log_path: Where the process writes what it prints.
    """

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, log_path))
        self._process.start()
        theirs.close()

    @property
    def process_id(self) -> int:
        """The process's id."""
        assert self._process.pid is not None
        return self._process.pid

    def start(self, settings: EngineSettings, models: Path) -> None:
        """Starts the engine.

        Raises:
            EngineError: It did not start.
        """
        self._ask(None, (settings, models))

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls ``function(engine, ...)`` in the process; a function of a module, by its name.

        Raises:
            EngineError: It raised, or did not return in time.
        """
        return self._ask(function, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        method = getattr(Engine, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.run(method, *arguments, **keywords)

        return call

    def log(self) -> str:
        """Returns what the process has printed."""
        return self.log_path.read_text(errors="replace")

    def kill(self) -> None:
        """Ends the process as a crash would."""
        os.kill(self.process_id, signal.SIGKILL)
        self._process.join(_CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Ends the engine and its process, by force if they do not end by themselves."""
        if self._connection.closed:
            return
        self._connection.close()
        self._process.join(_CLOSE_TIMEOUT_S)
        if self._process.exitcode is None:
            self.kill()
        self._process.close()

    def _ask(
        self,
        function: Callable[..., Any] | None,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        name = "start" if function is None else function.__name__
        try:
            self._connection.send((function, arguments, keywords or {}))
            if not self._connection.poll(_CALL_TIMEOUT_S):
                self.kill()
                raise EngineError("", f"{name} took longer than {_CALL_TIMEOUT_S} s", self._tail())
            failure, result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise EngineError("", f"the process ended in {name}", self._tail()) from error
        if failure is not None:
            kind, message, details = failure
            raise EngineError(kind, message, f"{details}\n{self._tail()}")
        return result

    def _tail(self) -> str:
        lines = self.log().splitlines()[-_LOG_LINES:]
        return "\n".join(["-- the engine's process printed, last:", *lines])


class Engines:
    """Starts engines, and keeps the ones that were used last for the next test.

    Args:
        folder: For models and logs.

    Attributes:
        models: Folder of the models.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.models = folder / "models"
        self._kept: OrderedDict[str, EngineProcess] = OrderedDict()
        self._others: list[EngineProcess] = []
        self._count = 0

    def process(self) -> EngineProcess:
        """Starts a process without an engine."""
        _start_fork_server()
        self._count += 1
        process = EngineProcess(self._folder / f"process-{self._count}.log")
        self._others.append(process)
        return process

    def start(self, settings: EngineSettings) -> EngineProcess:
        """Starts an engine that nobody else gets.

        Engines that live at the same time must have names of their own; ``settings`` may give one.

        Raises:
            EngineError: It did not start.
        """
        process = self.process()
        options = {"lookup_instance": f"engine-{self._count}", **settings.options}
        process.start(attrs.evolve(settings, options=options), self.models)
        return process

    def shared(self, settings: EngineSettings) -> EngineProcess:
        """Returns an engine of these settings, reset and without work."""
        key = settings.identity
        if key not in self._kept:
            while len(self._kept) >= _ENGINES_KEPT:
                self._kept.popitem(last=False)[1].close()
            self._kept[key] = self.start(settings)
        self._kept.move_to_end(key)
        engine = self._kept[key]
        assert engine.reset_all()
        return engine

    def release(self, settings: EngineSettings) -> list[str]:
        """Takes back an engine that a test has had, and lists what it left undone.

        Such an engine is not used again.
        """
        key = settings.identity
        problems: list[str]
        try:
            problems, counters = self._kept[key].run(_come_to_rest)
            # Shown with a test that has failed.
            sys.stderr.write(f"{counters}\n")
        except EngineError as error:
            problems = [str(error)]
        if problems:
            self._kept.pop(key).close()
        return problems

    def end_started(self) -> None:
        """Ends the processes that ``start`` and ``process`` made, but not those that are kept.

        Idle engines are not free: the loops of vLLM's process groups wake up all the time.
        """
        kept = list(self._kept.values())
        for process in self._others:
            if process not in kept:
                process.close()
        self._others = kept

    def close(self) -> None:
        """Ends all processes."""
        self._kept.clear()
        self.end_started()


def load_mori(_: Engine | None) -> None:
    """Loads MORI in an engine's process; here, since a conftest's functions cannot be sent."""
    from umbp.backends import mori_library

    mori_library.load_mori(default_read_lease_ms=1)


def _come_to_rest(engine: Engine) -> tuple[list[str], dict[str, int]]:
    engine.set_faults()
    engine.abort_all()
    engine.settle()
    return engine.unrest(), engine.counters()


def _start_fork_server() -> None:
    # vLLM reads its environment when it is imported.
    start_fork_server(_PRELOADED, ENVIRONMENT)


def _serve(connection: Connection, log_path: Path) -> None:
    """Answers calls until the other side closes the connection; the body of the process."""
    _print_to(log_path)
    engine: Engine | None = None
    while True:
        try:
            function, arguments, keywords = connection.recv()
        except EOFError:
            break
        try:
            result = None
            if function is None:
                engine = Engine(*arguments)
            else:
                result = function(engine, *arguments, **keywords)
            reply: tuple[Any, Any] = (None, result)
        except BaseException as error:
            details = "".join(traceback.format_exception(error))
            reply = ((type(error).__name__, str(error), details), None)
        connection.send(reply)
    if engine is not None:
        engine.close()


def _print_to(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)

# SPDX-License-Identifier: Apache-2.0
"""``umbp demo``: one prompt, answered cold, from vLLM's prefix cache, and from umbp.

The third run comes after vLLM's own prefix cache was emptied, so that every reused token of it
was stored by umbp and restored from there.
"""

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from umbp.backends.registry import check_available, find_backend
from umbp.cli import engine, model_folder, report
from umbp.cli.console import Progress, open_console, output_to_file
from umbp.cli.demo_models import MODELS, DemoModel, provide
from umbp.cli.outcome import COLD, GPU_HIT, RESTORED, Outcome, Run
from umbp.connector.config import ConnectorOptions
from umbp.errors import ConfigError, UmbpError
from umbp.options import parse_options

if TYPE_CHECKING:
    from rich.console import Console

SETTLE_TIMEOUT_S: Final = 60.0
"""How long stores may take to be answered after a run."""

_LOG_TAIL_LINES: Final = 15
_WARM_UP_TOKENS: Final = 64


@attrs.frozen
class DemoSettings:
    """What the user asked for.

    Attributes:
        model_name: Name of the model in ``MODELS``.
        backend: Name of the backend.
        options: Further options of connector and backend.
        prompt_tokens: Most tokens of the prompt; it is up to one log entry shorter.
        max_tokens: Longest answer.
        model_directory: Folder of the model; None for one in the user's cache.
        json_file: Where the outcome goes as JSON; None for nowhere.
        keep_logs: Whether the engine's log stays when all went well.
    """

    model_name: str
    backend: str
    options: Mapping[str, Any]
    prompt_tokens: int
    max_tokens: int
    model_directory: Path | None
    json_file: Path | None
    keep_logs: bool

    @property
    def model(self) -> DemoModel:
        """The model."""
        return MODELS[self.model_name]


class _DemoFailed(Exception):
    """The runs could not be made; the message says which condition failed."""


def run_demo(settings: DemoSettings) -> int:
    """Runs the demo.

    Returns:
        Exit status: 0 when umbp restored what the GPU prefix hit had and all answers are the
        same, else 1 with one line on standard error.

    Raises:
        UmbpError: The settings cannot work.
    """
    _check(settings)
    log_file = _create_log()
    try:
        with output_to_file(log_file) as terminal:
            failure = _attempt(settings, open_console(terminal), log_file)
    except UmbpError:
        log_file.unlink()
        raise
    if failure is not None:
        print(f"umbp demo: {failure} (log of the engine: {log_file})", file=sys.stderr)
        return 1
    if settings.keep_logs:
        print(f"log of the engine: {log_file}")
    else:
        log_file.unlink()
    return 0


def _check(settings: DemoSettings) -> None:
    """Refuses what would fail only after a long while."""
    engine.check_installed()
    backend = find_backend(settings.backend)
    check_available(backend)
    parse_options(
        engine.connector_options(settings.backend, settings.options),
        ConnectorOptions,
        backend.options_type,
    )
    longest = engine.MODEL_TOKENS_MAX - settings.max_tokens
    if settings.prompt_tokens > longest:
        raise ConfigError(
            f"--prompt-tokens {settings.prompt_tokens} with --max-tokens {settings.max_tokens}"
            f" is more than the {engine.MODEL_TOKENS_MAX} tokens of the model;"
            f" ask for at most {longest}"
        )
    if settings.json_file is not None and not settings.json_file.absolute().parent.is_dir():
        raise ConfigError(f"--json {settings.json_file}: its folder does not exist, create it")


def _create_log() -> Path:
    directory = model_folder.cache_directory()
    path = directory / f"demo-{os.getpid()}.log"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the cache folder {directory} cannot be written ({error.strerror});"
            " set XDG_CACHE_HOME to another one"
        ) from error
    return path


def _attempt(settings: DemoSettings, console: "Console", log_file: Path) -> str | None:
    """Makes the demo; returns the condition that failed, if one did, as one line."""
    try:
        return _demonstrate(settings, console)
    except _DemoFailed as error:
        return str(error)
    # Whatever goes wrong inside vLLM: the user gets the end of the log and one line.
    except Exception as error:
        own_error = _own_error(error)
        if own_error is not None:
            raise own_error from error
        with log_file.open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        console.print("\n".join(lines[-_LOG_TAIL_LINES:]), markup=False)
        message = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {message}"


def _own_error(error: BaseException | None) -> UmbpError | None:
    """Finds umbp's own error among the causes of what vLLM raised."""
    while error is not None and not isinstance(error, UmbpError):
        error = error.__cause__ or error.__context__
    return error


def _demonstrate(settings: DemoSettings, console: "Console") -> str | None:
    progress = Progress(console)
    model = settings.model
    directory = provide(model, settings.model_directory, progress)
    with progress.step(f"starting vLLM with umbp, backend {settings.backend}"):
        demo_engine = engine.DemoEngine(
            directory,
            engine.connector_options(settings.backend, settings.options),
            model.engine_arguments,
        )
    try:
        outcome = _three_runs(settings, demo_engine, progress)
        report.print_outcome(console, outcome, settings.backend, model.answer_lines(outcome))
        if settings.json_file is not None:
            result = report.outcome_as_json(
                outcome,
                model=settings.model_name,
                backend=settings.backend,
                question=model.question,
                counters=demo_engine.counters(),
            )
            _write_json(settings.json_file, result)
    finally:
        demo_engine.close()
    return outcome.failed_condition()


def _three_runs(
    settings: DemoSettings, demo_engine: engine.DemoEngine, progress: Progress
) -> Outcome:
    prompt = _make_prompt(settings, demo_engine)
    with progress.step("warming up"):
        # The first forward pass of a process prepares kernels; no run should pay for that. The
        # tokens are the end of the prompt, so that no later run finds them at its beginning.
        _one_run("warm-up", prompt[-_WARM_UP_TOKENS:], 2, demo_engine)
    runs = []
    for name in (COLD, GPU_HIT, RESTORED):
        if name == RESTORED and not demo_engine.drop_prefix_cache():
            raise _DemoFailed("vLLM refused to empty its prefix cache: a block is still in use")
        with progress.step(f"run: {name}, {len(prompt)} tokens"):
            runs.append(_one_run(name, prompt, settings.max_tokens, demo_engine))
    return Outcome(*runs)


def _make_prompt(settings: DemoSettings, demo_engine: engine.DemoEngine) -> list[int]:
    try:
        return settings.model.prompt(settings.prompt_tokens, demo_engine)
    except ValueError as error:
        raise ConfigError(
            f"--prompt-tokens {settings.prompt_tokens} is too few: {error}"
        ) from error


def _one_run(
    name: str, prompt: Sequence[int], max_tokens: int, demo_engine: engine.DemoEngine
) -> Run:
    before = demo_engine.counters()
    request = demo_engine.answer(prompt, max_tokens)
    if not demo_engine.settle(SETTLE_TIMEOUT_S):
        raise _DemoFailed(f"run '{name}': stores were not answered within {SETTLE_TIMEOUT_S:.0f} s")
    after = demo_engine.counters()
    return Run(
        name=name,
        request=request,
        stored_bytes=after["bytes_stored"] - before["bytes_stored"],
        loaded_bytes=after["bytes_loaded"] - before["bytes_loaded"],
    )


def _write_json(path: Path, result: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error

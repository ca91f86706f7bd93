# SPDX-License-Identifier: Apache-2.0
"""A needle in restored KV: SmolLM2 answers from what umbp brought back, as from its own cache.

python benchmarks/needle [--lengths N ...] [--depths D ...] [--cases N] [--json FILE]

Exit status: 0 when all conditions hold, 1 when one does not, 2 for wrong arguments.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from needle_outcome import Outcome
from needle_prompts import make_cases
from needle_run import NotMeasured, answer_all

from umbp.backends.registry import check_available, find_backend
from umbp.cli import engine, model_folder
from umbp.cli.console import Progress, open_console, output_to_file
from umbp.cli.demo_models import DEFAULT_MODEL, MODELS, provide
from umbp.cli.report import print_rows
from umbp.connector.config import ConnectorOptions
from umbp.errors import ConfigError, UmbpError
from umbp.options import parse_options

LENGTHS_TOKENS = (500, 1500, 3000, 5000, 7500)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LOG_TAIL_LINES = 15


def main() -> int:
    """Runs it; returns the exit status."""
    parsed = _parse()
    try:
        _check(parsed)
        outcome = _run(parsed)
    except (UmbpError, NotMeasured) as error:
        print(f"needle: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    faults = outcome.faults()
    for fault in faults:
        print(f"needle: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="needle", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS_TOKENS, metavar="N", help="tokens"
    )
    parser.add_argument(
        "--depths", type=float, nargs="+", default=DEPTHS, metavar="D", help="from 0 to 1"
    )
    parser.add_argument("--cases", type=int, default=2, metavar="N", help="prompts in each cell")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="longest answer")
    parser.add_argument("--backend", default="memory", metavar="NAME")
    parser.add_argument("--model-dir", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every answer as JSON")
    return parser.parse_args()


def _check(parsed: argparse.Namespace) -> None:
    """Refuses what would fail only after a long while."""
    engine.check_installed()
    longest = engine.MODEL_TOKENS_MAX - parsed.max_tokens
    for name, values, least, most in (
        ("--lengths", parsed.lengths, 1, longest),
        ("--depths", parsed.depths, 0, 1),
        ("--cases", [parsed.cases], 1, 1000),
        ("--max-tokens", [parsed.max_tokens], 1, 1000),
    ):
        for value in values:
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}, expected from {least} to {most}")
    if parsed.json is not None and not parsed.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {parsed.json}: its folder does not exist, create it")
    backend = find_backend(parsed.backend)
    check_available(backend)
    parse_options(_connector_options(parsed), ConnectorOptions, backend.options_type)


def _connector_options(parsed: argparse.Namespace) -> dict[str, Any]:
    return engine.connector_options(parsed.backend, {})


def _run(parsed: argparse.Namespace) -> Outcome:
    log_file = model_folder.cache_directory() / f"needle-{os.getpid()}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with output_to_file(log_file) as terminal:
        console = open_console(terminal)
        try:
            outcome = _measure(parsed, console)
        except UmbpError:
            log_file.unlink()
            raise
        except NotMeasured as error:
            raise NotMeasured(f"{error} (log: {log_file})") from error
        # Whatever goes wrong inside vLLM: the end of the log says it.
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            console.print("\n".join(_tail(log_file)), markup=False)
            message = str(error).partition("\n")[0]
            raise NotMeasured(f"{type(error).__name__}: {message} (log: {log_file})") from error
    log_file.unlink()
    return outcome


def _measure(parsed: argparse.Namespace, console: Any) -> Outcome:
    begun_s = time.monotonic()
    progress = Progress(console)
    model = MODELS[DEFAULT_MODEL]
    directory = provide(model, parsed.model_dir, progress)
    with progress.step(f"starting vLLM with umbp, backend {parsed.backend}"):
        started = engine.DemoEngine(directory, _connector_options(parsed), model.engine_arguments)
    try:
        cases = list(make_cases(parsed.lengths, parsed.depths, parsed.cases))
        outcome = answer_all(cases, started, max_tokens=parsed.max_tokens, console=console)
    finally:
        started.close()
    console.print("\nretrieved after a local hit | after a restore, of the prompts in each cell\n")
    print_rows(console, *outcome.table())
    summary = f"\n{outcome.summary()}; {time.monotonic() - begun_s:.0f} s"
    console.print(summary, markup=False, soft_wrap=True)
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(outcome.as_json(), indent=2) + "\n", encoding="utf-8")
    return outcome


def _tail(log_file: Path) -> Sequence[str]:
    text = log_file.read_text(encoding="utf-8", errors="replace")
    return text.splitlines()[-LOG_TAIL_LINES:]


if __name__ == "__main__":
    sys.exit(main())

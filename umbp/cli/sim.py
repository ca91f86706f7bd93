# SPDX-License-Identifier: Apache-2.0
"""``umbp sim``: runs a simulation and shows what came of it.

Standard output depends on the options alone, so that two runs can be compared; progress and the
speed of this machine go to standard error.
"""

import argparse
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

from umbp.cli.console import open_console, output_to_file
from umbp.cli.engine import check_installed
from umbp.cli.sim_options import RANDOM_FAULTS
from umbp.errors import ConfigError
from umbp.sim.schedule import Fault, check_faults, parse_fault, random_faults, read_faults
from umbp.sim.traffic import Traffic

if TYPE_CHECKING:
    from umbp.sim.plan import SimPlan
    from umbp.sim.run import SimRun

_SHOW_EVERY_ROUNDS: Final = 20


def run_sim(parsed: argparse.Namespace) -> int:
    """Runs a simulation.

    Args:
        parsed: The options.

    Returns:
        Exit status: 1 when a check failed, else 0.

    Raises:
        UmbpError: The options cannot work.
    """
    for name, path in (("--json", parsed.json), ("--trace", parsed.trace)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{name} {path}: its folder does not exist, create it")
    traffic = _traffic(parsed)
    faults = _faults(parsed, traffic)
    check_installed("the simulator")
    console = open_console(sys.stdout)
    # vLLM has something to say when it is imported, and about every engine.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with output_to_file(Path(os.devnull)):
        from umbp.cli.sim_report import print_run
        from umbp.sim.driver import quiet
        from umbp.sim.run import SimRun
        from umbp.sim.summary import as_json

        quiet()
        run = SimRun(_plan(parsed, traffic, faults))
    failure = _finish(run)
    request_id = _chosen_request(run, parsed.request, failure)
    print_run(console, run, request_id)
    if parsed.json is not None:
        text = json.dumps(as_json(run, request_id, failure), indent=2, sort_keys=True)
        _write(parsed.json, text + "\n")
    if failure is not None:
        print(f"umbp sim: {failure}", file=sys.stderr)
        return 1
    return 0


def _traffic(parsed: argparse.Namespace) -> Traffic:
    return Traffic(
        conversations=parsed.conversations,
        rate_per_s=parsed.rate,
        turns=parsed.turns,
        think_s=parsed.think,
        systems=parsed.systems,
        system_tokens=parsed.system_tokens,
        question_tokens=parsed.question_tokens,
        answer_tokens=parsed.answer_tokens,
    )


def _faults(parsed: argparse.Namespace, traffic: Traffic) -> list[Fault]:
    faults = [parse_fault(text) for text in parsed.fault]
    shared = parsed.store == "shared"
    if parsed.faults == RANDOM_FAULTS:
        faults += random_faults(
            parsed.seed,
            duration_s=min(traffic.expected_s, parsed.seconds or traffic.expected_s),
            engines=parsed.engines,
            ranks=parsed.ranks,
            shared_store=shared,
        )
    elif parsed.faults is not None:
        faults += read_faults(Path(parsed.faults))
    check_faults(faults, engines=parsed.engines, ranks=parsed.ranks, shared_store=shared)
    return faults


def _plan(parsed: argparse.Namespace, traffic: Traffic, faults: list[Fault]) -> "SimPlan":
    from umbp.sim.models import ModelKind
    from umbp.sim.plan import SimPlan

    return SimPlan(
        seed=parsed.seed,
        engines=parsed.engines,
        ranks=parsed.ranks,
        kind=ModelKind(parsed.model),
        blocks=parsed.blocks,
        capacity_objects=parsed.capacity,
        shared_store=parsed.store == "shared",
        sticky=parsed.routing == "sticky",
        async_scheduling=parsed.async_scheduling,
        step_tokens=parsed.step_tokens,
        token_bytes=parsed.token_bytes,
        steps=parsed.steps,
        seconds=parsed.seconds,
        traffic=traffic,
        faults=faults,
        options=dict(parsed.option),
        trace_path=parsed.trace,
    )


def _finish(run: "SimRun") -> str | None:
    """Runs to the end; returns what has failed, if something has, as one line."""
    from umbp.sim.memory import OracleError
    from umbp.sim.run import SimFailed

    begun = time.monotonic()
    try:
        _advance_to_end(run)
    except SimFailed as error:
        if not isinstance(error.__cause__, OracleError):
            traceback.print_exception(error.__cause__)
        return " ".join(str(error).split())
    elapsed_s = time.monotonic() - begun
    steps = sum(engine.steps for engine in run.engines)
    requests = sum(len(engine.accounts) for engine in run.engines)
    print(
        f"umbp sim: {elapsed_s:.1f} s on this machine, {steps / elapsed_s:.0f} engine steps/s,"
        f" {requests / elapsed_s:.0f} requests/s",
        file=sys.stderr,
    )
    return None


def _advance_to_end(run: "SimRun") -> None:
    console = open_console(sys.stderr)
    if not console.is_terminal:
        run.finish()
        return
    from rich.progress import Progress

    with Progress(
        console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bars:
        bar = bars.add_task("conversations", total=run.plan.traffic.conversations)
        while run.advance():
            if run.rounds % _SHOW_EVERY_ROUNDS == 0:
                title = f"conversations, {run.clock.now():.1f} virtual s"
                bars.update(bar, completed=run.talks_over, description=title)


def _chosen_request(run: "SimRun", wanted: str | None, failure: str | None) -> str | None:
    """Returns the request to show: the wanted one, else that of the failure, else an eventful one.

    Raises:
        ConfigError: There was no request of the wanted id.
    """
    if wanted is None:
        named = re.findall(r"request-\d+", failure or "")
        known = [request_id for request_id in named if request_id in run.journal.entries]
        return known[0] if known else run.journal.most_eventful()
    if wanted not in run.journal.entries:
        ids = list(run.journal.entries)
        advice = f"write one from {ids[0]} to {ids[-1]}" if ids else "nobody asked anything"
        raise ConfigError(f"--request {wanted}: there was no such request; {advice}")
    return wanted


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--json {path}: cannot be written ({error.strerror}); name another file"
        ) from error

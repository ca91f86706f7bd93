# SPDX-License-Identifier: Apache-2.0
"""``umbp sim``: what it prints, which status it ends with, and that it repeats itself."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from umbp.cli import engine
from umbp.cli.main import EXIT_USAGE, main
from umbp.cli.sim_options import KINDS
from umbp.connector.scheduler import SchedulerSide
from umbp.sim.memory import StoredPage
from umbp.sim.models import ModelKind
from umbp.sim.store import SimStore

SMALL = ("sim", "--conversations", "6", "--rate", "20")


@pytest.fixture(autouse=True)
def _loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what a command does to its process."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    loggers = [logging.getLogger(name) for name in ("vllm", "umbp")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must be refused, and returns the one line that it says."""
    try:
        status: object = main(arguments)
    except SystemExit as ending:
        status = ending.code
    output, error = capsys.readouterr()
    assert (status, output) == (EXIT_USAGE, "")
    assert error.count("\n") == 1
    return error.strip()


def test_models_are_those_of_the_simulation() -> None:
    assert tuple(kind.value for kind in ModelKind) == KINDS


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--seed", "-1"], "--seed: '-1' is not a whole number from 0"),
        (["--turns", "4..2"], "--turns: '4..2' is not of the form N or LEAST..MOST"),
        (["--turns", "0..2"], "--turns: '0..2' is not of the form N or LEAST..MOST"),
        (["--rate", "nan"], "--rate: 'nan' is not a number from 0.001"),
        (["--think", "-1"], "--think: '-1' is not a number from 0"),
        (["--ranks", "3"], "--ranks: invalid choice: 3"),
        (["--option", "lookup_async"], "'lookup_async' is not of the form KEY=VALUE"),
        (["--fault", "loads=tardy"], "umbp sim: --fault 'loads=tardy': loads is 'tardy'"),
        (["--fault", "engine=2 dead"], "there is no engine 2; write engine=0 to engine=1"),
        (["--faults", "/nowhere.json"], "--faults /nowhere.json: No such file"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json: its folder"),
        (["--blocks", "20"], "--blocks 20 is too few"),
        (["--option", "backend=x"], "--option backend is not simulated"),
    ],
)
def test_wrong_options_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert expected in usage_error(capsys, "sim", *arguments)


def test_without_vllm_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    line = usage_error(capsys, "sim")
    assert line.startswith("umbp sim: the simulator needs vLLM: pip install ")


def test_it_shows_engines_totals_and_a_time_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    arguments = (*SMALL, "--fault", "t=0.3 forget", "--request", "request-3", "--json", str(path))
    assert main(arguments) == 0
    output, error = capsys.readouterr()
    outcome = json.loads(path.read_text())
    rows = [line.split() for line in output.splitlines()]
    of_tokens = {row[0]: row for row in rows if len(row) == 12 and row[-1] == "ms"}
    assert list(of_tokens) == ["0", "1", "all"]
    everything = outcome["total"]
    assert of_tokens["all"][1:8] == [
        str(everything[name])
        for name in (
            "requests",
            "answered",
            "prompt_tokens",
            "local_tokens",
            "restored_tokens",
            "computed_tokens",
            "recomputed_tokens",
        )
    ]
    assert "fault: t=0.3 forget" in output
    assert "request-3 on engine " in output
    assert [row[1:3] for row in rows if row and row[0].count(".") == 1][-1] == ["client", "has"]
    assert outcome["failure"] is None
    assert outcome["time_line"][0]["event"] == "arrives"
    assert "engine steps/s" in error


def test_an_unknown_request_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--request", "request-x"]) == EXIT_USAGE
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--request request-x: there was no such request; write one from request-0 to " in line


def run_failing(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> dict[str, Any]:
    """Runs a simulation that must fail; returns its outcome and the lines on standard error."""
    assert main([*SMALL, "--seed", "4", *arguments, "--json", str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    outcome: dict[str, Any] = json.loads(path.read_text())
    assert lines[-1] == f"umbp sim: {outcome['failure']}"
    return {**outcome, "lines": lines}


def test_a_wrong_byte_ends_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def get_first(store: SimStore, key: bytes) -> StoredPage | None:
        return next(iter(store._objects.values())) if key in store else None

    monkeypatch.setattr(SimStore, "get", get_first)
    outcome = run_failing(capsys, tmp_path / "out.json")
    assert len(outcome["lines"]) == 1
    for part in ("seed 4, engine ", ", step ", " is not the KV of tokens "):
        assert part in outcome["failure"]
    assert outcome["request"] in outcome["failure"]


def test_whatever_umbp_raises_ends_the_run_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def break_down(*_: object) -> None:
        raise ValueError("a leg is lacking")

    monkeypatch.setattr(SchedulerSide, "finished", break_down)
    outcome = run_failing(capsys, tmp_path / "out.json")
    assert "ValueError: a leg is lacking" in outcome["failure"]
    assert outcome["lines"][0].startswith("Traceback")


def test_another_process_gives_the_same_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Strings hash differently there, and vLLM's block hashes begin with another number."""
    arguments = [*SMALL, "--seed", "5", "--faults", "random", "--fault", "t=0.4 forget"]
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-m", "umbp.cli.main", *arguments, "--json", there],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert main([*arguments, "--json", str(here)]) == 0
    assert capsys.readouterr().out == done.stdout
    assert here.read_bytes() == there.read_bytes()
    assert json.loads(here.read_bytes())["total"]["restored_tokens"]

# SPDX-License-Identifier: Apache-2.0
"""The flow of the demo over a made-up engine: exit status, the one line, and what is left behind.

The real engine is in ``tests/e2e/test_demo.py``.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from umbp.cli import engine, hybrid_model
from umbp.cli.demo_text import ACCESS_CODE
from umbp.cli.engine import RequestRecord
from umbp.cli.main import main
from umbp.errors import ConfigError

ANSWER = (7, 3, 0, 5)
BLOCK = 32


@attrs.define
class FakeEngine:
    """An engine that answers at once, with faults to order."""

    model_directory: Path
    options: Mapping[str, Any]
    arguments: Mapping[str, Any]
    faults: frozenset[str] = frozenset()
    local: bool = False
    runs: int = 0
    closed: bool = False
    counts: dict[str, int] = attrs.field(factory=lambda: {"bytes_stored": 0, "bytes_loaded": 0})

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [len(word) for word in messages[0]["content"].split()]

    def answer(self, prompt: Sequence[int], max_tokens: int) -> RequestRecord:
        os.write(1, b"noise of vLLM\n")
        if "crash" in self.faults:
            raise RuntimeError("out of luck\nand more")
        self.runs += 1
        hit = (len(prompt) - 1) // BLOCK * BLOCK if self.runs > 2 else 0
        external = 0
        if not self.local:
            external, hit = hit, 0
            self.counts["bytes_loaded"] += 0 if "unloaded" in self.faults else external * 100
        if "short" in self.faults and external:
            external -= BLOCK
        if "warm" in self.faults and self.runs == 2:
            hit = BLOCK
        ids = ANSWER[:-1] if f"answer{self.runs}" in self.faults else ANSWER
        self.counts["bytes_stored"] += 100 * len(prompt) if self.runs <= 2 else 0
        self.local = True
        text = "" if "skip_tokenizer_init" in self.arguments else f"It is {ACCESS_CODE}."
        return RequestRecord(len(prompt), hit, external, 0.05, ids, text)

    def settle(self, timeout_s: float) -> bool:
        return "busy" not in self.faults

    def drop_prefix_cache(self) -> bool:
        if "kept" not in self.faults:
            self.local = False
        return "pinned" not in self.faults

    def counters(self) -> dict[str, int]:
        return dict(self.counts)

    def close(self) -> None:
        self.closed = True


@attrs.define
class Stage:
    """A folder with a model, a cache folder, and the engine that the demo will start."""

    model: Path
    cache: Path
    faults: set[str]
    engines: list[FakeEngine]

    def run(self, *arguments: str) -> int:
        return main(["demo", "--model-dir", str(self.model), "--prompt-tokens", "500", *arguments])

    @property
    def logs(self) -> list[Path]:
        return list(self.cache.glob("umbp/*.log"))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    made = Stage(model, tmp_path / "cache", set(), [])

    def start(
        directory: Path, options: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> FakeEngine:
        if "config" in made.faults:
            raise RuntimeError("engine failed to start") from ConfigError("option x is 1; say 2")
        made.engines.append(FakeEngine(directory, options, arguments, frozenset(made.faults)))
        return made.engines[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(made.cache))
    monkeypatch.setattr(engine, "DemoEngine", start)
    monkeypatch.setattr(engine, "check_installed", lambda: None)
    return made


def test_all_promises_kept(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    assert stage.run() == 0
    output, error = capfd.readouterr()
    assert error == ""
    assert "noise of vLLM" not in output
    (row,) = [line.split() for line in output.splitlines() if line.startswith("restored")]
    assert row[-2:] == ["memory", "yes"]
    assert max(len(line) for line in output.splitlines()) <= 80
    assert "KiB stored" in output
    assert "KiB loaded" in output
    assert int(row[3]) > 0
    assert f"It is {ACCESS_CODE}." in output
    assert stage.logs == []
    assert stage.engines[0].closed


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("short", "tokens, the GPU prefix hit had"),
        ("unloaded", "umbp counted no loaded bytes"),
        ("warm", "the cold run was not cold: it reused 32 tokens"),
        ("kept", "which should have been empty"),
        ("pinned", "vLLM refused to empty its prefix cache"),
        ("busy", "stores were not answered within"),
        ("answer3", "the answer of the run 'GPU prefix hit' is not the cold run's"),
        ("answer4", "the answer of the run 'restored' is not the cold run's"),
    ],
)
def test_broken_promise_is_status_1_and_one_line(
    stage: Stage, capfd: pytest.CaptureFixture[str], fault: str, expected: str
) -> None:
    stage.faults.add(fault)
    assert stage.run() == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert expected in error
    assert str(stage.logs[0]) in error
    assert stage.engines[0].closed


def test_crash_shows_the_end_of_the_log(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    stage.faults.add("crash")
    assert stage.run() == 1
    output, error = capfd.readouterr()
    assert "RuntimeError: out of luck" in output
    assert "noise of vLLM" in stage.logs[0].read_text()
    assert error.startswith("umbp demo: RuntimeError: out of luck (log of the engine:")
    assert error.count("\n") == 1


def test_configuration_error_inside_the_engine_is_its_own_line(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.faults.add("config")
    assert stage.run() == 2
    assert capfd.readouterr().err == "umbp demo: option x is 1; say 2\n"
    assert stage.logs == []


@pytest.mark.parametrize(
    ("model", "prompt_tokens", "expected"),
    [("chat", "10", "the shortest prompt has"), ("hybrid", "127", "wants at least 128")],
)
def test_too_short_a_prompt_is_a_configuration_error(
    stage: Stage,
    capfd: pytest.CaptureFixture[str],
    model: str,
    prompt_tokens: str,
    expected: str,
) -> None:
    assert stage.run("--model", model, "--prompt-tokens", prompt_tokens) == 2
    error = capfd.readouterr().err
    assert f"--prompt-tokens {prompt_tokens} is too few: " in error
    assert expected in error
    assert error.count("\n") == 1


class TestHybrid:
    """``--model hybrid``: other arguments, random tokens, and an answer without text."""

    def test_promises_kept(
        self, stage: Stage, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        file = tmp_path / "outcome.json"
        assert stage.run("--model", "hybrid", "--json", str(file)) == 0
        (arguments,) = [one.arguments for one in stage.engines]
        assert arguments["mamba_cache_mode"] == "align"
        assert arguments["prefix_match_unit"] == 16
        output = capfd.readouterr().out
        assert "random weights" in output
        assert "Answer:   7 3 0 5\n" in output
        assert "Question" not in output
        assert ACCESS_CODE not in output
        assert max(len(line) for line in output.splitlines()) <= 80
        outcome = json.loads(file.read_text())
        assert (outcome["model"], outcome["question"]) == ("hybrid", None)
        assert outcome["runs"][0]["prompt_token_count"] == 500

    def test_every_answer_that_differs_is_shown(
        self, stage: Stage, capfd: pytest.CaptureFixture[str]
    ) -> None:
        stage.faults.add("answer4")
        assert stage.run("--model", "hybrid") == 1
        output, error = capfd.readouterr()
        assert [line for line in output.splitlines() if line.startswith("Answer")] == [
            "Answer:   7 3 0 5",
            "Answer:   7 3 0",
        ]
        assert "the answer of the run 'restored' is not the cold run's" in error

    def test_model_is_written_into_the_cache_once(
        self, stage: Stage, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written = []

        def make_model(folder: Path, config: Mapping[str, Any]) -> None:
            written.append(config["model_type"])
            (folder / "config.json").write_text("{}")

        monkeypatch.setattr(hybrid_model, "make_model", make_model)
        for _ in range(2):
            assert main(["demo", "--model", "hybrid", "--prompt-tokens", "500"]) == 0
        assert written == ["qwen3_next"]
        folders = {one.model_directory for one in stage.engines}
        assert folders == {stage.cache / "umbp" / "random-Qwen3-Next"}
        assert capfd.readouterr().out.count("writing a model with random weights, once took") == 1


def test_options_reach_the_connector(stage: Stage) -> None:
    arguments = ["--option", "lookup_timeout_ms=7", "--option", "key_namespace=n"]
    assert stage.run(*arguments) == 0
    options = stage.engines[0].options
    assert options["backend"] == "memory"
    assert options["lookup_timeout_ms"] == 7
    assert options["key_namespace"] == "n"
    assert options["total_capacity_bytes"] == 1 << 30


@pytest.mark.parametrize("name", ["total_capacity_bytes", "capacity_bytes"])
def test_capacity_of_the_user_is_the_only_one(stage: Stage, name: str) -> None:
    assert stage.run("--option", f"{name}=123456789") == 0
    given = {key: value for key, value in stage.engines[0].options.items() if "capacity" in key}
    assert given == {name: 123456789}


def test_json_says_what_the_table_says(stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "outcome.json"
    assert stage.run("--json", str(file)) == 0
    outcome = json.loads(file.read_text())
    assert outcome["failed_condition"] is None
    assert [run["name"] for run in outcome["runs"]] == ["cold", "GPU prefix hit", "restored"]
    restored = outcome["runs"][2]
    assert restored["external_token_count"] == outcome["runs"][1]["local_token_count"] > 0
    assert restored["loaded_bytes"] > 0
    assert outcome["counters"]["bytes_loaded"] == restored["loaded_bytes"]


def test_logs_are_kept_on_demand(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    assert stage.run("--keep-logs") == 0
    assert "noise of vLLM" in stage.logs[0].read_text()
    assert str(stage.logs[0]) in capfd.readouterr().out


def test_output_is_given_back(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    assert stage.run() == 0
    capfd.readouterr()
    os.write(1, b"after\n")
    os.write(2, b"after\n")
    assert capfd.readouterr() == ("after\n", "after\n")


def test_unwritable_cache_is_one_line(
    stage: Stage, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.cache.write_text("a file")
    assert stage.run() == 2
    assert "set XDG_CACHE_HOME" in capfd.readouterr().err

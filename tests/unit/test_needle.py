# SPDX-License-Identifier: Apache-2.0
"""The needle benchmark places, finds and judges its needles, over a made-up engine."""

import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from rich.console import Console

from umbp.cli import engine
from umbp.cli.engine import RequestRecord
from umbp.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "benchmarks" / "needle"
sys.path.insert(0, str(FOLDER))
try:
    import needle_outcome
    import needle_prompts
    import needle_run
finally:
    sys.path.remove(str(FOLDER))

BLOCK = 32


def encode(messages: Sequence[Mapping[str, str]]) -> list[int]:
    """One token a character."""
    return [ord(letter) for letter in messages[0]["content"]]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


@attrs.define
class FakeEngine:
    """Answers with the code that the prompt has, with faults to order."""

    faults: frozenset[str] = frozenset()
    known: set[tuple[int, ...]] = attrs.field(factory=set)
    local: set[tuple[int, ...]] = attrs.field(factory=set)
    is_closed: bool = False

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return encode(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode(token_ids)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> RequestRecord:
        prompt = tuple(prompt)
        hit = (len(prompt) - 1) // BLOCK * BLOCK
        local = hit if prompt in self.local else 0
        external = hit if prompt in self.known and not local else 0
        if "short" in self.faults and external:
            external -= BLOCK
        if "crossed" in self.faults and not local and not external:
            local = BLOCK
        self.local.add(prompt)
        self.known.add(prompt)
        code = decode(prompt).partition("lamp room is ")[2][:4]
        text = "0000" if "wrong" in self.faults and external else code
        return RequestRecord(len(prompt), local, external, 0.1, tuple(map(ord, text)), text)

    def settle(self, timeout_s: float) -> bool:
        return "busy" not in self.faults

    def drop_prefix_cache(self) -> bool:
        if "kept" not in self.faults:
            self.local.clear()
        return "pinned" not in self.faults

    def counters(self) -> dict[str, int]:
        return {"loads_failed": 2 if "failed" in self.faults else 0}

    def close(self) -> None:
        self.is_closed = True


def outcome(*faults: str, depths: Sequence[float] = (0.0, 1.0)) -> Any:
    cases = list(needle_prompts.make_cases([2000, 4000], depths, 2))
    console = Console(file=io.StringIO())
    fake = FakeEngine(frozenset(faults))
    return needle_run.answer_all(cases, fake, max_tokens=8, console=console)


def test_each_cell_has_its_cases_and_no_two_cases_are_alike() -> None:
    cases = list(needle_prompts.make_cases([500, 7500], [0.0, 0.5, 1.0], 3))
    assert len(cases) == 18
    assert [case.length_tokens for case in cases] == [500] * 9 + [7500] * 9
    assert [case.depth for case in cases[:9]] == [0.0] * 3 + [0.5] * 3 + [1.0] * 3
    assert len({case.log.code for case in cases}) == 18
    assert all(case.log.title.startswith(f"{case.number}. ") for case in cases)
    assert len({case.number for case in cases}) == 18


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_needle_lies_at_its_depth(depth: float) -> None:
    case = needle_prompts.Case(7, 8000, depth)
    prompt = needle_prompts.make_prompt(case, encode, decode)
    text = decode(prompt.token_ids)
    assert text.count(case.log.code) == 1
    assert text.count(case.log.fact) == 1
    assert text.index(case.log.fact) + len(case.log.fact) == prompt.needle_end_tokens
    assert 7000 < len(prompt.token_ids) <= 8000
    assert abs(prompt.needle_end_tokens / len(prompt.token_ids) - depth) < 0.1


def test_the_end_of_a_text_is_its_last_token() -> None:
    assert needle_prompts.end_of_text("lo", encode([{"content": "hello"}]), decode) == 5
    assert needle_prompts.end_of_text("h", encode([{"content": "hello"}]), decode) == 1
    with pytest.raises(ValueError, match="'x' is not in the prompt"):
        needle_prompts.end_of_text("x", encode([{"content": "hello"}]), decode)


def test_all_conditions_hold() -> None:
    found = outcome()
    assert found.faults() == []
    restored = sum(pair.restored.external_token_count for pair in found.pairs)
    assert found.summary() == (
        "8 pairs: 8 with identical token ids, 8 needles inside the restored tokens, "
        f"0 failed loads, {restored} tokens restored; "
        "retrieved 8 after a local hit, 8 after a restore"
    )
    assert found.table() == (
        ["tokens", "depth 0", "depth 1"],
        [["2000", "2 | 2 of 2", "2 | 2 of 2"], ["4000", "2 | 2 of 2", "2 | 2 of 2"]],
    )


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("wrong", "prompt 1 (2000 tokens, depth 0): the two answers differ"),
        ("crossed", "the first run was not cold, it reused 32 tokens"),
        ("short", "tokens, the prefix cache had"),
        ("kept", "the prefix cache still had"),
        ("failed", "2 loads failed"),
    ],
)
def test_each_condition_can_fail(fault: str, line: str) -> None:
    assert any(line in found for found in outcome(fault).faults())


def test_a_needle_after_the_restored_tokens_is_a_fault() -> None:
    (pair, *_) = outcome().pairs
    assert pair.needle_was_restored
    end = pair.restored.external_token_count
    for needle_end, faults in ((end, 0), (end + 1, 1)):
        moved = attrs.evolve(pair, prompt=attrs.evolve(pair.prompt, needle_end_tokens=needle_end))
        assert len(moved.faults()) == faults


def test_the_second_run_must_be_a_local_hit() -> None:
    (pair, *_) = outcome().pairs
    twice = attrs.evolve(pair, local=pair.restored)
    assert "the second run had 0 tokens of the prefix cache" in twice.faults()[0]


def test_nothing_answered_is_no_success() -> None:
    assert needle_outcome.Outcome([], failed_loads=0).faults() == ["no prompt was answered"]


def test_an_answer_that_misses_the_code_is_counted_and_no_fault() -> None:
    pair = outcome().pairs[0]
    no_code = {"answer_text": "no idea", "answer_token_ids": (1, 2)}
    lost = attrs.evolve(
        pair,
        local=attrs.evolve(pair.local, **no_code),
        restored=attrs.evolve(pair.restored, **no_code),
    )
    found = needle_outcome.Outcome([pair, lost], failed_loads=0)
    assert found.faults() == []
    assert found.table()[1] == [["2000", "1 | 1 of 2"]]


@pytest.mark.parametrize(("fault", "message"), [("busy", "not answered"), ("pinned", "in use")])
def test_a_run_that_cannot_be_made_is_no_result(fault: str, message: str) -> None:
    with pytest.raises(needle_run.NotMeasured, match=message):
        outcome(fault)


def test_too_short_a_prompt_is_a_configuration_error() -> None:
    cases = list(needle_prompts.make_cases([50], [0.5], 1))
    with pytest.raises(ConfigError, match="--lengths 50 is too few: the shortest prompt has"):
        needle_run.answer_all(
            cases, FakeEngine(), max_tokens=8, console=Console(file=io.StringIO())
        )


class TestCommand:
    """The program, with its engine replaced."""

    @pytest.fixture
    def main(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        monkeypatch.syspath_prepend(str(FOLDER))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(engine, "check_installed", lambda: None)
        (tmp_path / "config.json").write_text("{}")
        source = (FOLDER / "__main__.py").read_text(encoding="utf-8")
        names: dict[str, Any] = {"__name__": "needle", "__file__": str(FOLDER / "__main__.py")}
        exec(compile(source, "needle", "exec"), names)

        def run(*arguments: str, faults: Sequence[str] = ()) -> int:
            monkeypatch.setattr(engine, "DemoEngine", lambda *given: FakeEngine(frozenset(faults)))
            monkeypatch.setattr(
                sys,
                "argv",
                ["needle", "--model-dir", str(tmp_path), "--lengths", "3000", *arguments],
            )
            status: int = names["main"]()
            return status

        return run

    def test_success(self, main: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "result.json"
        assert main("--depths", "0.5", "--json", str(path)) == 0
        printed = capfd.readouterr()
        assert printed.err == ""
        assert "\n3000    2 | 2 of 2" in printed.out
        assert "2 pairs: 2 with identical token ids" in printed.out.splitlines()[-1]
        result = json.loads(path.read_text())
        assert result["faults"] == []
        assert [pair["retrieved_restored"] for pair in result["pairs"]] == [True, True]
        assert list((tmp_path / "cache" / "umbp").iterdir()) == []

    def test_a_broken_condition_is_status_1(
        self, main: Any, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert main("--depths", "0.5", "--cases", "1", faults=["wrong"]) == 1
        assert capfd.readouterr().err == (
            "needle: prompt 1 (3000 tokens, depth 0.5): the two answers differ\n"
        )

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (["--depths", "2"], "--depths is 2.0, expected from 0 to 1"),
            (["--cases", "0"], "--cases is 0, expected from 1 to 1000"),
            (["--lengths", "9000"], "--lengths is 9000, expected from 1 to 8160"),
            (["--backend", "nope"], "option backend is 'nope', which is not installed"),
            (["--json", "/no/such/folder/x"], "--json /no/such/folder/x: its folder does not"),
        ],
    )
    def test_wrong_arguments_are_one_line(
        self, main: Any, capfd: pytest.CaptureFixture[str], arguments: list[str], line: str
    ) -> None:
        assert main(*arguments) == 2
        error = capfd.readouterr().err
        assert error.startswith(f"needle: {line}")
        assert error.count("\n") == 1

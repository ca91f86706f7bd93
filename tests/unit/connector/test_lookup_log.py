# SPDX-License-Identifier: Apache-2.0
"""The log of lookups names the first object that each lacked, its group and its rank."""

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from umbp.backends.base import LookupAnswer
from umbp.connector.groups import GroupRules
from umbp.connector.lookup_log import LookupLog
from umbp.connector.report_files import BoundedLines, open_directory, write_whole
from umbp.errors import ConfigError

from .bench import Bench
from .fakes import FakeRequest, block_hash
from .group_bench import full, make_manager, window


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.lookups.jsonl"


def logged(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make(path: Path, kept: int = 10, **options: Any) -> Bench:
    return Bench(lookup_log=LookupLog(BoundedLines(path, kept), clock=lambda: 12.0), **options)


def test_the_first_missing_object_is_where_the_hit_ends(path: Path) -> None:
    bench = make(path)
    bench.lookups.stored = {block_hash(index) for index in (0, 1, 3)}
    bench.side.matched_tokens(FakeRequest.of("a", 100), 0)
    assert logged(path) == [
        {
            "time_s": 12.0,
            "request": "a",
            "epoch": 0,
            "prompt_tokens": 100,
            "local_tokens": 0,
            "hit_end_tokens": 32,
            "groups": [{"group": 0, "asked": 6, "present": 3}],
            "first_missing": {
                "group": 0,
                "rank": None,
                "end_tokens": 48,
                "hash": block_hash(2).hex(),
                "quarantined": False,
            },
        }
    ]


def test_positions_count_what_the_engine_had(path: Path) -> None:
    bench = make(path)
    bench.store_hashes(3)
    bench.side.matched_tokens(FakeRequest.of("a", 100), 16)
    (line,) = logged(path)
    assert line["local_tokens"] == 16
    assert line["first_missing"]["end_tokens"] == 64


def test_what_lies_before_the_hit_is_not_what_it_lacked(path: Path) -> None:
    """Blocks that have left a window are not there, and nobody wants them."""
    rules = GroupRules(make_manager(full(), window(20), block=16, unit=16))
    bench = make(path, rules=rules)
    bench.lookups.stored = {block_hash(index) for index in range(4)}
    real = bench.lookups._answer

    def answer(question: Any) -> LookupAnswer:
        found = real(question)
        assert found.present is not None
        found.present[1][:2] = False
        return found

    bench.lookups._answer = answer  # type: ignore[method-assign]
    bench.side.matched_tokens(FakeRequest.of("a", 100), 0)
    (line,) = logged(path)
    assert line["hit_end_tokens"] == 64
    assert [one["present"] for one in line["groups"]] == [4, 2]
    assert (line["first_missing"]["group"], line["first_missing"]["end_tokens"]) == (0, 80)


def test_a_client_that_can_tell_names_the_rank(path: Path) -> None:
    bench = make(path)
    real = bench.lookups._answer

    def answer(question: Any) -> LookupAnswer:
        return attrs.evolve(real(question), lacking=lambda part, block: 10 * part + block)

    bench.lookups._answer = answer  # type: ignore[method-assign]
    bench.store_hashes(3)
    bench.side.matched_tokens(FakeRequest.of("a", 100), 0)
    assert logged(path)[0]["first_missing"]["rank"] == 3


def test_quarantined_objects_are_called_so(path: Path) -> None:
    bench = make(path, quarantine_s=5.0)
    bench.store_hashes(3)
    bench.core.quarantine.add((block_hash(1),), 0.0)
    bench.side.matched_tokens(FakeRequest.of("a", 40), 0)
    (line,) = logged(path)
    assert line["first_missing"]["quarantined"]
    assert line["first_missing"]["end_tokens"] == 32


def test_nothing_is_missing_when_all_is_there(path: Path) -> None:
    bench = make(path)
    bench.store_hashes(10)
    bench.side.matched_tokens(FakeRequest.of("a", 100), 0)
    assert logged(path)[0]["first_missing"] is None


def test_failed_and_unanswered_lookups_are_written_down(path: Path) -> None:
    bench = make(path)
    bench.lookups.is_broken = True
    bench.side.matched_tokens(FakeRequest.of("a", 40), 0)
    bench.lookups.is_silent = True
    real_answers = bench.lookups.answers

    def answers(wait_s: float = 0.0) -> Any:
        bench.now_s += wait_s
        return real_answers(wait_s)

    bench.lookups.answers = answers  # type: ignore[method-assign]
    bench.side.matched_tokens(FakeRequest.of("b", 40), 0)
    first, second = logged(path)
    assert (first["request"], first["failure"]) == ("a", "rank 1 is gone")
    assert (second["request"], second["failure"]) == ("b", "given up before it was answered")


def test_without_a_log_nothing_is_asked_of_the_answer() -> None:
    bench = Bench()
    bench.lookups._answer = lambda question: LookupAnswer(  # type: ignore[method-assign]
        question.question_id, (np.zeros(2, dtype=bool),), lacking=lambda part, block: 1 // 0
    )
    assert bench.side.matched_tokens(FakeRequest.of("a", 40), 0) == (0, False)


# ---------------------------------------------------------------- files


def test_lines_are_bounded_and_the_last_ones_stay(path: Path) -> None:
    path.write_text("of an earlier run\n")
    lines = BoundedLines(path, 3)
    for number in range(8):
        lines.add(str(number))
    before = path.with_name(path.name + ".1")
    assert before.read_text().split() == ["3", "4", "5"]
    assert path.read_text().split() == ["6", "7"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = BoundedLines(tmp_path / "gone" / "file", 3)
    lines.add("a")
    lines.add("b")
    assert len(caplog.records) == 1
    assert "cannot be written any more: No such file" in caplog.text


def test_a_whole_file_is_private_and_replaces_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "manifest.json"
    for text in ("first and longer", "second"):
        write_whole(path, text)
        assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    write_whole(tmp_path / "gone" / "file", "text")
    assert "cannot be written: No such file" in caplog.text


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    open_directory(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"report directory .*0755.*option report_dir"):
        open_directory(tmp_path / "open")

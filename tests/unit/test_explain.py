# SPDX-License-Identifier: Apache-2.0
"""umbp explain: what it makes of the files that engines write."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_cli import usage_error

from umbp.cli.main import main
from umbp.explain.lookups import read_lookups
from umbp.explain.manifests import compare
from umbp.explain.meanings import MEANINGS, meaning_of

MANIFEST = {
    "format": 1,
    "hash": {"algorithm": "sha256", "seed": ""},
    "draft_model": None,
    "groups": [{"block_size": 16, "specs": ["Full(16)"]}],
    "writer": {"attention_by_kind": {}},
}


def write(path: Path, **changes: Any) -> Path:
    report = {"instance": path.name.partition(".")[0], "manifest": MANIFEST | changes}
    path.write_text(json.dumps(report))
    return path


def rows(capsys: pytest.CaptureFixture[str], status: int, *arguments: Any) -> Any:
    assert main(["explain", "--json", *map(str, arguments)]) == status
    return json.loads(capsys.readouterr().out)


def test_equal_manifests_have_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(tmp_path / "a.manifest.json"), write(tmp_path / "b.manifest.json")
    assert rows(capsys, 0, first, second) == []
    assert len(rows(capsys, 0, "--all", first, second)) == 7
    assert main(["explain", str(first), str(second)]) == 0
    assert capsys.readouterr().out == "all 7 fields are equal: they share objects\n"


def test_differences_say_what_to_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "a.manifest.json")
    second = write(
        tmp_path / "b.manifest.json",
        hash={"algorithm": "sha256", "seed": "7"},
        draft_model={"method": "eagle"},
    )
    found = {row["path"]: row for row in rows(capsys, 1, first, second)}
    assert found.keys() == {"hash.seed", "draft_model", "draft_model.method"}
    assert (found["hash.seed"]["first"], found["hash.seed"]["second"]) == ('""', '"7"')
    assert "PYTHONHASHSEED" in found["hash.seed"]["advice"]
    assert (found["draft_model"]["first"], found["draft_model"]["second"]) == ("null", None)
    assert "--speculative-config" in found["draft_model.method"]["advice"]
    assert main(["explain", str(first), str(second)]) == 1
    text = capsys.readouterr().out
    assert "3 of 8 fields differ: they share no objects" in text
    assert "hash.seed" in text
    assert "PYTHONHASHSEED to one value" in text
    assert "hash.algorithm" not in text


def test_lists_are_compared_by_place() -> None:
    other = MANIFEST | {"groups": [{"block_size": 32, "specs": ["Full(16)"]}]}
    different = [row for row in compare({"manifest": MANIFEST}, {"manifest": other}) if row.advice]
    assert [row.path for row in different] == ["groups.0.block_size"]


def test_hashes_drawn_at_random_are_never_equal(tmp_path: Path) -> None:
    """Both manifests say that there is no seed, and vLLM then draws one in each process."""
    random = {"manifest": MANIFEST | {"hash": {"algorithm": "xxhash", "seed": ""}}}
    different = [row for row in compare(random, random) if row.advice]
    assert [row.path for row in different] == ["hash.seed"]
    seeded = {"manifest": MANIFEST | {"hash": {"algorithm": "xxhash", "seed": "1"}}}
    assert all(row.is_equal for row in compare(seeded, seeded))


def test_a_field_of_another_version_has_advice_all_the_same() -> None:
    other = {"manifest": MANIFEST | {"new": 1}}
    (row,) = [row for row in compare({"manifest": MANIFEST}, other) if row.advice]
    assert (row.what, row.advice) == ("", "run the same version of umbp")


def test_the_longest_path_counts() -> None:
    assert meaning_of("model.weights") is MEANINGS["model.weights"]
    assert meaning_of("model.new") is MEANINGS["model"]
    assert meaning_of("other") is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["gone.manifest.json", "gone.manifest.json"],
            "gone.manifest.json cannot be read: No such",
        ),
        (["text", "text"], "text cannot be read: Expecting value"),
        (["list", "list"], "list is no manifest"),
        (["list"], "name two files *.manifest.json, or one *.lookups.jsonl"),
        (["list", "list", "list"], "name two files"),
        (["gone.lookups.jsonl"], "gone.lookups.jsonl cannot be read: No such file"),
        (["bad.lookups.jsonl"], "bad.lookups.jsonl is no log of lookups"),
        (["binary.lookups.jsonl"], "binary.lookups.jsonl cannot be read: no text"),
    ],
)
def test_wrong_files_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], expected: str
) -> None:
    (tmp_path / "text").write_text("no json")
    (tmp_path / "list").write_text("[]")
    (tmp_path / "bad.lookups.jsonl").write_text('{"request": 1}\n')
    (tmp_path / "binary.lookups.jsonl").write_bytes(b"\xff\n")
    assert expected in usage_error(capsys, "explain", *(str(tmp_path / name) for name in names))


def lookup(request: str, end: int, **missing: Any) -> dict[str, Any]:
    return {
        "request": request,
        "prompt_tokens": 100,
        "local_tokens": 16,
        "hit_end_tokens": end,
        "groups": [{"group": 0, "asked": 5, "present": 2}],
        "first_missing": missing or None,
    }


def test_lookups_say_what_was_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.lookups.jsonl"
    place = {"group": 0, "end_tokens": 48, "hash": "ab" * 32, "quarantined": False}
    failed = {"request": "d", "prompt_tokens": 9, "local_tokens": 0, "failure": "rank 1 is gone"}
    lines = [
        lookup("a", 16, rank=1, **place),
        lookup("b", 32, rank=None, **place | {"quarantined": True}),
        lookup("c", 96),
        failed,
    ]
    texts = [json.dumps(line) + "\n" for line in lines]
    (tmp_path / "engine.lookups.jsonl.1").write_text(texts[0])
    path.write_text("".join(texts[1:]))
    whys = {row.request_id: row.why for row in read_lookups(path)}
    assert "group 0, up to token 48, rank 1 lacks it (abababababababab)" in whys["a"]
    assert "failed to load lately" in whys["b"]
    assert whys["c"] == "nothing is missing: 2 of 5 blocks"
    assert whys["d"] == "rank 1 is gone"
    assert main(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "2 of the last 4 lookups found something to load" in text
    assert "rank 1 is gone" in text
    assert [row["request_id"] for row in rows(capsys, 0, "--last", "1", path)] == ["d"]


def test_lookups_that_all_missed_have_status_1(tmp_path: Path) -> None:
    path = tmp_path / "engine.lookups.jsonl"
    path.write_text(json.dumps(lookup("a", 16)) + "\n")
    assert main(["explain", str(path)]) == 1

# SPDX-License-Identifier: Apache-2.0
"""umbp doctor from the command line: what it prints, its status, and a run on the real machine."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeHost, healthy_host
from test_cli import usage_error

from umbp.cli import doctor
from umbp.cli.console import open_console
from umbp.cli.main import main
from umbp.doctor.finding import Finding, fail, ok, warn


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    found = healthy_host(tmp_path / "root")
    found.environment["VLLM_RPC_BASE_PATH"] = str(tmp_path)
    monkeypatch.setattr(doctor, "Host", lambda: found)
    return found


def test_a_healthy_machine_has_status_0(host: FakeHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--tensor-parallel-size", "2"]) == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "Python", "3.11"]
    assert summary.split(", ")[1:3] == ["0 warn", "0 fail"]


def test_warnings_have_status_0_and_failures_1(
    host: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    host.python = (3, 14)
    assert main(["doctor"]) == 0
    first, advice, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("warn  Python")
    assert advice.strip().startswith("-> use Python 3.10 to 3.13")
    host.python = (3, 9)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fail  Python")
    assert lines[1].strip() == "-> use Python 3.10 or later"


def test_a_configuration_may_come_from_a_file(
    host: FakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"bakend": "memory"}')
    assert main(["doctor", "--json", "--config", f"@{file}"]) == 1
    report = json.loads(capsys.readouterr().out)
    (failure,) = [one for one in report["findings"] if one["level"] == "fail"]
    assert failure["what"] == (
        "kv_connector_extra_config has no option 'bakend'; did you mean backend?"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "{"], "--config is no JSON"),
        (["--config", "[]"], "--config is a JSON list, expected an object"),
        (["--config", "@/not/there"], "--config @/not/there: cannot be read (No such file"),
        (["--config", '{"kv_connector": "Other"}'], "kv_connector is 'Other'"),
        (["--tensor-parallel-size", "0"], "'0' is not a whole number above 0"),
        (["--prefix-caching-hash-algo", "md5"], "invalid choice: 'md5'"),
    ],
)
def test_wrong_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert expected in usage_error(capsys, "doctor", *arguments)


def test_a_file_that_is_no_text_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config"
    file.write_bytes(b"\xff\xfe")
    assert "cannot be read (no text)" in usage_error(capsys, "doctor", "--config", f"@{file}")


def test_the_table_of_a_terminal_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Finding("one", ok("[as] it should be")),
        Finding("two", warn("slow", "do this")),
        Finding("three", fail("broken")),
    ]
    doctor._print_table(open_console(sys.stdout), findings)
    text = capsys.readouterr().out
    for words in ("ok", "[as] it should be", "slow", "→ do this", "broken"):
        assert words in text
    assert text.rstrip().endswith("1 ok, 1 warn, 1 fail, 0 skip")


def test_the_real_machine_is_fit_for_these_tests(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs everything for real; with MORI where there is one, on its stand-in for ROCm."""
    has_mori = importlib.util.find_spec("mori") is not None
    options = {
        "backend": "embedded" if has_mori else "memory",
        "total_capacity_bytes": 64 << 20,
    }
    config = {
        "kv_connector": "UMBPStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": options,
    }
    assert main(["doctor", "--json", "--config", json.dumps(config)]) == 0
    found: dict[str, Any] = {
        one["subject"]: one for one in json.loads(capsys.readouterr().out)["findings"]
    }
    assert found["backend"]["level"] == "ok"
    assert found["vLLM"]["level"] == "ok"
    if has_mori:
        assert found["backend"]["what"] == "embedded, MORI 1.2.4"
        assert found["HIP runtime"]["level"] == "warn"

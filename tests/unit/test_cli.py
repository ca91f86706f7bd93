# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, which status it ends with, and how light it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import umbp
from umbp.backends.base import BACKEND_API
from umbp.backends.registry import InstalledBackend
from umbp.cli import engine, listing
from umbp.cli.main import EXIT_USAGE, main
from umbp.errors import BackendUnavailable, ConfigError


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must be refused, and returns the one line that it says."""
    try:
        status: object = main(arguments)
    except SystemExit as ending:
        status = ending.code
    output, error = capsys.readouterr()
    assert (status, output) == (EXIT_USAGE, "")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    return error.strip()


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(command in text for command in ("demo", "sim", "backends", "options", "--version"))


def test_version_lists_backends_with_their_distribution(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--version"]) == 0
    first, *backends = capsys.readouterr().out.splitlines()
    assert first.startswith(f"umbp {umbp.__version__} (Python 3.")
    assert f"backend memory (umbp {umbp.__version__})" in backends
    assert f"backend embedded (umbp {umbp.__version__})" in backends


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "umbp: a command is missing; see umbp --help"),
        (["dmo"], "invalid choice: 'dmo'"),
        (["demo", "--bakend", "x"], "unrecognized arguments: --bakend x"),
        (["demo", "--model", "llama"], "argument --model: invalid choice: 'llama' (choose from "),
        (["demo", "--option", "depth"], "--option: 'depth' is not of the form KEY=VALUE"),
        (["demo", "--option", "=3"], "--option: '=3' is not of the form KEY=VALUE"),
        (["demo", "--option", "backend=x"], "name the backend with --backend"),
        (["demo", "--prompt-tokens", "0"], "--prompt-tokens: '0' is not a whole number above 0"),
        (["demo", "--max-tokens", "-1"], "--max-tokens: '-1' is not a whole number above 0"),
        (["demo", "--max-tokens", "²"], "--max-tokens: '²' is not a whole number above 0"),
    ],
)
def test_wrong_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert expected in usage_error(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--backend", "nope"], "option backend is 'nope', which is not installed"),
        (["--option", "lookup_timeut_ms=3"], "did you mean lookup_timeout_ms"),
        (["--option", "lookup_timeout_ms=soon"], "option lookup_timeout_ms is 'soon'"),
        (["--prompt-tokens", "8145"], "ask for at most 8144"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json"),
    ],
)
def test_wrong_configuration_is_refused_before_vllm_starts(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.setattr(engine, "check_installed", lambda: None)
    line = usage_error(capsys, "demo", *arguments)
    assert line.startswith("umbp demo: ")
    assert expected in line


def test_demo_without_vllm_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    assert "pip install vllm" in usage_error(capsys, "demo")


def test_interruption_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "print_backends", interrupt)
    assert main(["backends"]) == 130
    assert capsys.readouterr().err == "umbp backends: interrupted\n"


def test_missing_rich_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    line = usage_error(capsys, "backends")
    assert line == "umbp backends: this command needs rich: pip install rich"


def test_missing_part_of_vllm_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(listing, "print_backends", lambda: lack("numpy"))
    assert "numpy is missing" in usage_error(capsys, "backends")
    monkeypatch.setattr(listing, "print_backends", lambda: lack("umbp.gone"))
    with pytest.raises(ModuleNotFoundError):
        main(["backends"])


def test_backends_says_which_are_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["memory", "umbp", umbp.__version__, "yes"] in rows


class Lacking:
    """A backend whose library is missing."""

    api = BACKEND_API

    @classmethod
    def check_available(cls) -> None:
        raise BackendUnavailable("libfoo is missing:\n pip install foo")


def test_usability_gives_the_reason_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = InstalledBackend("lacking", "some", "1", "some:Lacking")
    monkeypatch.setattr(listing, "find_backend", lambda name: Lacking)
    assert listing.usability(installed) == "no: libfoo is missing: pip install foo"


def test_options_lists_connector_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    text = capsys.readouterr().out
    assert "Backend memory" in text
    assert "lookup_timeout_ms" in text
    assert "total_capacity_bytes" in text


def test_options_of_a_broken_backend_do_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_backend(name: str) -> type:
        raise ConfigError(f"{name} lacks a leg")

    monkeypatch.setattr(listing, "find_backend", find_backend)
    assert main(["options"]) == 0
    text = capsys.readouterr().out
    assert "lookup_timeout_ms" in text
    assert "memory lacks a leg" in text


def test_import_is_light() -> None:
    """Neither the parser nor ``--version`` may load vLLM, torch, transformers or MORI."""
    program = (
        "import json, sys\n"
        "from umbp.cli.main import main\n"
        "main(['--version'])\n"
        "heavy = {'vllm', 'torch', 'transformers', 'mori', 'rich'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_script_is_the_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "umbp.cli.main", "demo", "--backend", "nope"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == EXIT_USAGE
    assert done.stderr.startswith("umbp demo: ")

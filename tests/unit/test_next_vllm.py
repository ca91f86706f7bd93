# SPDX-License-Identifier: Apache-2.0
"""A newer vLLM's Python files: fetched once, without the rest of the wheel, and found first."""

import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import next_vllm
from setup_env import layout, python_sources
from setup_env.console import SetupError


@pytest.fixture
def envs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for environments, and pins."""
    pins = tmp_path / "pins"
    pins.mkdir()
    (pins / python_sources.PIN).write_text("vllm==9.9\n")
    monkeypatch.setattr(layout, "REQUIREMENTS", pins)
    monkeypatch.setattr(layout, "ENVS", tmp_path)
    monkeypatch.setattr(layout, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(layout, "NEXT_VLLM", tmp_path / "vllm-next")
    return tmp_path


@pytest.fixture
def downloads(envs: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Any]]:
    """Every call of pip, which brings a small wheel."""
    calls: list[Sequence[Any]] = []

    def download(command: Sequence[Any], log_name: str, *, advice: str) -> None:
        calls.append(command)
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "vllm-9.9-py3-none-any.whl", "w") as wheel:
            for name in ("vllm/__init__.py", "vllm/v1/core.py", "vllm/_C.so", "vllm/a.json"):
                wheel.writestr(name, name)
            wheel.writestr("vllm-9.9.dist-info/METADATA", "Name: vllm")
            wheel.writestr("other/__init__.py", "")

    monkeypatch.setattr(python_sources, "run_logged", download)
    return calls


def test_only_python_files_of_the_package_are_kept(
    envs: Path, downloads: list[Sequence[Any]]
) -> None:
    folder = python_sources.fetch(Path("python"))
    kept = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert kept == ["pin-digest", "vllm/__init__.py", "vllm/v1/core.py"]
    assert not list(envs.rglob("*.whl")), "the wheel is large, and not needed any more"


def test_it_is_fetched_once_and_again_for_another_pin(
    envs: Path, downloads: list[Sequence[Any]]
) -> None:
    for _ in range(2):
        python_sources.fetch(Path("python"))
    assert len(downloads) == 1
    (layout.NEXT_VLLM / "vllm" / "old.py").touch()
    (layout.REQUIREMENTS / python_sources.PIN).write_text("vllm==9.10\n")
    folder = python_sources.fetch(Path("python"))
    assert len(downloads) == 2
    assert not (folder / "vllm" / "old.py").exists()


def test_a_download_that_failed_is_tried_again(
    envs: Path, downloads: list[Sequence[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: Sequence[Any], log_name: str, *, advice: str) -> None:
        raise SetupError("no network: try again")

    with monkeypatch.context() as offline:
        offline.setattr(python_sources, "run_logged", fail)
        with pytest.raises(SetupError):
            python_sources.fetch(Path("python"))
    python_sources.fetch(Path("python"))
    assert len(downloads) == 1


def test_the_files_come_before_everything_else(
    envs: Path, downloads: list[Sequence[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(next_vllm, "read_profiles", lambda: {"mori": "a", "plain": "b"})
    monkeypatch.setenv("PYTHONPATH", "/mine")
    next_vllm.main(["--", "python", "-m", "pytest"])
    ((program, command, environment),) = started
    assert (program, command) == ("python", ["python", "-m", "pytest"])
    assert environment["PYTHONPATH"] == f"{layout.NEXT_VLLM}{os.pathsep}/mine"
    assert environment["VIRTUAL_ENV"] == str(layout.ROOT / "b"), "the newer Python"


def test_without_an_environment_it_says_what_to_do(
    envs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(next_vllm, "read_profiles", dict)
    assert next_vllm.main(["--", "python"]) == 2
    assert capsys.readouterr().err == "next_vllm: no environment is set up: run `make setup`\n"

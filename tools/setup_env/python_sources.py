# SPDX-License-Identifier: Apache-2.0
"""Fetches the Python files of a vLLM that has no CPU build.

vLLM's scheduler, and whatever umbp's scheduler side meets of it, is Python alone. So the tests of
that side run with these files in front of an environment's own vLLM, whose PyTorch and other
requirements they use; the model's code would need the compiled rest.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from pathlib import Path

from setup_env import layout
from setup_env.console import run_logged

PIN = "vllm-next.txt"
_PACKAGE = "vllm/"


def fetch(python: Path) -> Path:
    """Returns the folder that holds the package `vllm`; downloads it if it is not there.

    Args:
        python: Interpreter of an environment, for its pip.

    Raises:
        SetupError: The wheel could not be had.
    """
    pin = layout.REQUIREMENTS / PIN
    digest = hashlib.sha256(pin.read_bytes()).hexdigest()
    done = layout.NEXT_VLLM / "pin-digest"
    if done.exists() and done.read_text(encoding="utf-8") == digest:
        return layout.NEXT_VLLM
    shutil.rmtree(layout.NEXT_VLLM, ignore_errors=True)
    layout.NEXT_VLLM.mkdir(parents=True)
    # Beside it: there is room for it where it is unpacked to.
    with tempfile.TemporaryDirectory(dir=layout.ENVS) as folder:
        command = [python, "-m", "pip", "download", "--no-input", "--progress-bar", "off"]
        command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "-d", folder]
        run_logged(
            [*command, "-r", pin],
            "next-vllm",
            advice="check the network and pip's configuration, then run this again",
        )
        unpack(next(Path(folder).glob("*.whl")), layout.NEXT_VLLM)
    done.write_text(digest, encoding="utf-8")
    return layout.NEXT_VLLM


def unpack(wheel: Path, folder: Path) -> None:
    """Unpacks the Python files of the package, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        chosen = [name for name in names if name.startswith(_PACKAGE) and name.endswith(".py")]
        archive.extractall(folder, chosen)

# SPDX-License-Identifier: Apache-2.0
"""The kernel that gathers and scatters KV: interpreted, every layout byte by byte; and compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

HERE = Path(__file__).parent
LAYOUT_COUNT = 19
COMPILED_COUNT = 8


def run(program: str, **variables: str) -> list[str]:
    """Runs a program of this folder and returns its lines."""
    pytest.importorskip("triton", reason="Triton comes with PyTorch for GPUs, and with vLLM")
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:umbp.backends.triton_rows", str(HERE / program)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_the_kernel_moves_every_layout_as_by_hand() -> None:
    assert len(run("interpreted_rows.py", TRITON_INTERPRET="1")) == LAYOUT_COUNT


def test_the_kernel_compiles_for_gpus_of_both_makers(tmp_path: Path) -> None:
    assert len(run("compiled_rows.py", TRITON_CACHE_DIR=str(tmp_path))) == COMPILED_COUNT

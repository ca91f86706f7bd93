# SPDX-License-Identifier: Apache-2.0
"""The kernel that gathers and scatters KV, interpreted: every layout, byte by byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "interpreted_rows.py"
LAYOUT_COUNT = 19


def test_the_kernel_moves_every_layout_as_by_hand() -> None:
    pytest.importorskip("triton", reason="Triton comes with PyTorch for GPUs, and with vLLM")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == LAYOUT_COUNT

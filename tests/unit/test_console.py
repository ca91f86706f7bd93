# SPDX-License-Identifier: Apache-2.0
"""Progress and silence: what reaches the terminal, and what must not."""

import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from umbp.cli.console import Progress, output_to_file


def test_plain_progress_says_begin_and_end() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream)).step("sweeping"):
        pass
    begin, end = stream.getvalue().splitlines()
    assert begin == "  sweeping ..."
    assert end.startswith("✓ sweeping took ")


def test_failed_step_says_so() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError, match="dust"), Progress(Console(file=stream)).step("sweeping"):
        raise ValueError("dust")
    assert "✗ sweeping failed after " in stream.getvalue()


def test_spinner_leaves_the_streams_of_others_alone() -> None:
    """A logger that is set up meanwhile keeps its stream, which must not be the terminal."""
    before = sys.stdout, sys.stderr
    with Progress(Console(file=io.StringIO(), force_terminal=True)).step("sweeping"):
        assert (sys.stdout, sys.stderr) == before


def test_output_goes_to_the_file_and_comes_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with output_to_file(log) as terminal:
        os.write(1, b"native out\n")
        os.write(2, b"native err\n")
        terminal.write("for the user\n")
    os.write(1, b"again\n")
    assert log.read_text() == "native out\nnative err\n"
    assert capfd.readouterr() == ("for the user\nagain\n", "")


def test_output_comes_back_after_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="dust"), output_to_file(tmp_path / "log"):
        raise ValueError("dust")
    os.write(1, b"again\n")
    assert capfd.readouterr().out == "again\n"

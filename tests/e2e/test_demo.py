# SPDX-License-Identifier: Apache-2.0
"""``umbp demo`` as a user runs it, on the real engine and the real model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.e2e


def run_demo(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Runs the command; returns how it ended and what it wrote as JSON."""
    outcome = tmp_path / "outcome.json"
    command = [sys.executable, "-m", "umbp.cli.main", "demo", "--prompt-tokens", "700"]
    done = subprocess.run(
        [*command, "--json", str(outcome), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=500,
    )
    return done, json.loads(outcome.read_text()) if outcome.exists() else None


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("memory", marks=pytest.mark.pure),
        pytest.param("embedded", marks=pytest.mark.mori),
    ],
)
def test_demo_restores_what_the_prefix_cache_had(tmp_path: Path, backend: str) -> None:
    done, outcome = run_demo(tmp_path, "--backend", backend)
    lacks_mori = done.returncode == 2 and "MORI" in done.stderr
    if lacks_mori and os.environ.get("UMBP_REQUIRE_MORI") != "1":
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    cold, gpu_hit, restored = outcome["runs"]
    prompt_tokens = cold["prompt_token_count"]
    assert 600 < prompt_tokens <= 700
    assert gpu_hit["local_token_count"] == (prompt_tokens - 1) // 32 * 32
    assert restored["external_token_count"] == gpu_hit["local_token_count"]
    assert restored["local_token_count"] == 0
    assert cold["stored_bytes"] >= restored["loaded_bytes"] > 0
    assert outcome["counters"]["tokens_restored"] == restored["external_token_count"]
    answers = {tuple(run["answer_token_ids"]) for run in outcome["runs"]}
    assert len(answers) == 1
    assert "7305" in restored["answer_text"]


@pytest.mark.pure
def test_hybrid_model_is_restored_inside_a_block(tmp_path: Path) -> None:
    done, outcome = run_demo(tmp_path, "--model", "hybrid", "--max-tokens", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    _, gpu_hit, restored = outcome["runs"]
    # The state at the end of the last unit of 16 tokens; a block of attention has hundreds.
    assert restored["external_token_count"] == gpu_hit["local_token_count"] == 688
    assert restored["local_token_count"] == 0
    assert restored["loaded_bytes"] > 0
    assert len({tuple(run["answer_token_ids"]) for run in outcome["runs"]}) == 1
    assert len(set(restored["answer_token_ids"])) > 8
    assert "token ids" in done.stdout


@pytest.mark.pure
def test_demo_fails_when_nothing_is_restored(tmp_path: Path) -> None:
    """With lookups off, umbp stores and never restores; the demo must notice."""
    done, outcome = run_demo(tmp_path, "--option", "enable_lookup=false")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("umbp demo: umbp restored 0 tokens, the GPU prefix hit had ")
    assert done.stderr.count("\n") == 1
    assert outcome["failed_condition"] in done.stderr


@pytest.mark.pure
def test_configuration_error_of_the_engine_is_one_line(tmp_path: Path) -> None:
    """The pool cannot hold one object, which only the running engine can know."""
    done, outcome = run_demo(tmp_path, "--option", "total_capacity_bytes=4096")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("umbp demo: ")
    assert "4096" in done.stderr
    assert done.stderr.count("\n") == 1
    assert outcome is None

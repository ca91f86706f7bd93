# SPDX-License-Identifier: Apache-2.0
"""Runs the proof: property tests, the exhaustive search, and the mutants; ends with one line.

python3 tools/run.py --profile best -- python tools/prove.py --profile ci
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))

from mutants import MUTANTS, Mutant  # noqa: E402
from mutate import copy_project  # noqa: E402

PROFILES: Final = ("dev", "ci", "nightly")
# Finding the mistake is enough here; making it small takes longer than finding it.
MUTANT_PROFILE: Final = "mutant"
MUTANT_TIMEOUT_S: Final = 900
_LONG: Final = ("test_scheduler_machine.py", "test_exhaustive.py", "test_core_machine.py")


def main() -> int:
    """Returns 0 when everything holds and every mutant was caught."""
    parser = argparse.ArgumentParser(description="Runs the proof and says what it covered.")
    parser.add_argument("--profile", choices=PROFILES, default="ci")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--no-mutants", action="store_true", help="leave the mutants out")
    parser.add_argument("--only", default="", help="mutants whose name has this text, and no more")
    options = parser.parse_args()
    held, states, examples = True, 0, 0
    if not options.only:
        held, states, examples = _hold(options.profile, options.jobs)
    chosen = [] if options.no_mutants else [one for one in MUTANTS if options.only in one.name]
    missed = [mutant for mutant, caught in _hunt(chosen, options.jobs) if not caught]
    print(
        f"prove: {'everything held' if held else 'NOT EVERYTHING HELD'}; {states:,} states"
        f" searched, {examples:,} examples run,"
        f" {len(chosen) - len(missed)} of {len(chosen)} mutants caught"
    )
    return 0 if held and not missed else 1


def _hold(profile: str, jobs: int) -> tuple[bool, int, int]:
    """Runs the property tests and the search, some files at a time.

    Returns:
        Whether all tests passed, states searched, examples run.
    """
    with tempfile.TemporaryDirectory() as scratch:
        proof = Path(scratch) / "proof.jsonl"
        environment = {
            **os.environ,
            "UMBP_HYPOTHESIS_PROFILE": profile,
            "UMBP_PROOF_FILE": str(proof),
        }

        def hold(file: Path) -> bool:
            status, output = _run_tests(str(file.relative_to(ROOT)), str(ROOT), environment, None)
            if status != 0:
                sys.stdout.write(output)
            print(f"property: {file.name}: {output.rstrip().rpartition(chr(10))[2]}", flush=True)
            return status == 0

        # The longest first, so that they end together.
        files = sorted(
            (ROOT / "tests" / "property").glob("test_*.py"),
            key=lambda file: (file.name not in _LONG, file.name),
        )
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            held = all(list(pool.map(hold, files)))
        facts = _facts(proof)
    states = sum(fact.get("states", 0) for fact in facts)
    return held, states, sum(fact.get("examples", 0) for fact in facts)


def _facts(proof: Path) -> list[dict[str, Any]]:
    if not proof.exists():
        return []
    return [json.loads(line) for line in proof.read_text(encoding="utf-8").splitlines()]


def _hunt(mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, bool]]:
    """Applies the mutants, some at a time, and says of each whether it was caught.

    Raises:
        SystemExit: A test fails without any mutant, and so can prove nothing.
    """
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for test, failing in zip(
            tests, pool.map(lambda test: _fails(test, None), tests), strict=True
        ):
            if failing:
                raise SystemExit(f"prove: {test} fails without any mutant")
        futures = {pool.submit(_catch, mutant): mutant for mutant in mutants}
        for done in concurrent.futures.as_completed(futures):
            mutant, catcher = futures[done], done.result()
            verdict = f"caught by {catcher}" if catcher else "NOT CAUGHT"
            print(f"mutant: {mutant.name}: {verdict}", flush=True)
            yield mutant, catcher is not None


def _catch(mutant: Mutant) -> str | None:
    """Returns the first file of tests that fails with the mutant in place; None if all pass."""
    return next((test for test in mutant.tests if _fails(test, mutant)), None)


def _fails(test: str, mutant: Mutant | None) -> bool:
    """Says whether a file of tests fails in a copy of the project with this mutant."""
    with tempfile.TemporaryDirectory(prefix="umbp-mutant-") as scratch:
        copy_project(ROOT, Path(scratch), mutant)
        environment = {**os.environ, "UMBP_HYPOTHESIS_PROFILE": MUTANT_PROFILE}
        environment.pop("PYTHONPATH", None)
        status, output = _run_tests(test, scratch, environment, MUTANT_TIMEOUT_S)
    if status not in (0, 1):
        # The tests could not be run, which proves nothing.
        sys.stdout.write(output[-2000:])
    return status == 1


def _run_tests(
    test: str, folder: str, environment: Mapping[str, str], timeout_s: float | None
) -> tuple[int, str]:
    """Returns pytest's exit status, 1 when a test failed or did not end, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    try:
        process = subprocess.run(
            # A night's examples take longer than a test may by day; whoever waits may end it.
            [*command, "-o", f"timeout={0 if timeout_s is None else 600}"],
            cwd=folder,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"{test} did not end within {timeout_s} s\n"
    return process.returncode, process.stdout


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Timing of small operations on noisy machines, and what a result must say about its origin."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs

REPOSITORY = Path(__file__).resolve().parents[1]

Operation = Callable[[int], None]
"""Does something that many times."""


@attrs.frozen
class Timing:
    """What an operation took.

    Attributes:
        rounds_us: Microseconds for one operation: float[rounds][samples].
    """

    rounds_us: Sequence[Sequence[float]]

    @property
    def median_us(self) -> float:
        """The median of the best round: the others were disturbed by something else."""
        return min(map(statistics.median, self.rounds_us))

    @property
    def spread_us(self) -> tuple[float, float]:
        """The lowest and the highest median of a round."""
        medians = [statistics.median(samples) for samples in self.rounds_us]
        return min(medians), max(medians)


def merge(first: Mapping[str, Timing], second: Mapping[str, Timing]) -> dict[str, Timing]:
    """Puts the rounds of two measurements of the same operations together."""
    return {
        name: Timing([*timing.rounds_us, *second[name].rounds_us]) for name, timing in first.items()
    }


def time_operations(
    operations: Mapping[str, Operation], *, rounds: int = 25, samples: int = 11, batch: int = 10
) -> dict[str, Timing]:
    """Times operations in turn, round by round, so that a disturbance meets them all.

    Args:
        operations: What to time, by name.
        rounds: How often each of them has its turn.
        samples: Readings of the clock in one turn.
        batch: Operations between two readings.
    """
    taken: dict[str, list[list[float]]] = {name: [] for name in operations}
    for operation in operations.values():
        operation(batch)
    for _ in range(rounds):
        for name, operation in operations.items():
            taken[name].append([_sample_us(operation, batch) for _ in range(samples)])
    return {name: Timing(rounds_us) for name, rounds_us in taken.items()}


def _sample_us(operation: Operation, batch: int) -> float:
    begin_ns = time.perf_counter_ns()
    operation(batch)
    return (time.perf_counter_ns() - begin_ns) / batch / 1000


def origin(packages: Sequence[str], arguments: Sequence[str]) -> dict[str, Any]:
    """Says where a result comes from: commit, command, versions, machine."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len((_git("status", "--porcelain") or "").splitlines()),
        "arguments": list(arguments),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "machine": {
            "architecture": platform.machine(),
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
        },
    }


def _git(*arguments: str) -> str | None:
    """Answers a question to git; None outside of a checkout."""
    try:
        asked = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return asked.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()

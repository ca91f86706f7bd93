# SPDX-License-Identifier: Apache-2.0
"""What metrics and traces cost the engine, side by side in one run.

python benchmarks/observing.py [--check] [--quick] [--json FILE]

Whole steps of vLLM's real scheduler, with the hooks of umbp's scheduler's side and of a worker, in
processor time of the thread; no model. One engine is observed in different ways, in turns. With
--check the exit status is 1 when a ratio exceeds its limit and the spread leaves no doubt of it.
"""

import argparse
import gc
import json
import logging
import math
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _observed_engine as observed
import attrs
import numpy as np
import vllm
from _measure import origin
from _observed_engine import KINDS, ObservedEngine
from _plane_cases import settled_heap
from _plane_engine import BLOCK_TOKENS, Shape
from _plane_report import format_number

LIMIT = 1.02
"""Most that observing may cost, of what the same step takes without."""
CONFIDENCE = 0.95

DECODING = 256
DECODE_PROMPT_TOKENS = 400
STEPS = 50
"""Steps of a sample: one report falls into each."""
PROMPT_TOKENS = 8192
_ENDLESS = 1 << 17
DECODE = f"{STEPS} steps in which {DECODING} requests decode"
REPORT = "a report"
MADE, TAKEN = "made, in the engine's process", "taken, in the frontend's"
PROMPTS = 5
REQUEST = (
    f"{PROMPTS} prompts of {PROMPT_TOKENS:,} tokens computed and stored, and as many restored, "
    "while a request decodes"
)

PAIRS = (
    ("umbp's metrics", observed.METRICS_ON, observed.VLLM_ALONE, LIMIT),
    ("all statistics, vLLM's too", observed.METRICS_ON, observed.METRICS_OFF, None),
    (
        "nothing at all: what this method does not resolve",
        observed.METRICS_ON,
        observed.AGAIN,
        None,
    ),
    ("a trace that is on", observed.TRACE_ON, observed.METRICS_ON, None),
)
"""What is compared: name, the kind with it, the kind without, and the limit; None: told only."""
ASKED = "of this, umbp's reports"
"""Their own time within ``METRICS_ON``, which other things that the machine does disturb less."""

Samples = Mapping[str, Sequence[float]]
"""Microseconds by kind; samples of one index were taken one right after the other."""


@attrs.frozen
class Compared:
    """A ratio, and how sure it is.

    Attributes:
        name: What is compared, and in what.
        ratio: The median of the ratios of all rounds.
        low: What it is at least, with ``CONFIDENCE``.
        high: What it is at most.
        limit: What it may be; None: any.
    """

    name: str
    ratio: float
    low: float
    high: float
    limit: float | None

    @property
    def verdict(self) -> str:
        """What the samples allow to say."""
        if self.limit is None:
            return ""
        if self.low > self.limit:
            return "MISSED"
        return "kept" if self.ratio <= self.limit else "unclear"

    def line(self) -> str:
        """Says all of it."""
        limit = "" if self.limit is None else f", at most {self.limit:g}"
        spread = f"{self.low:.3f} to {self.high:.3f}"
        return f"{self.verdict:<8}{self.ratio:.3f} ({spread}){limit}: {self.name}"


def compare(
    name: str, mine: Sequence[float], other: Sequence[float], limit: float | None
) -> Compared:
    """Compares samples that were taken in pairs; so few that nothing is certain have no verdict."""
    if 2 * 0.5 ** len(mine) > 1 - CONFIDENCE:
        limit = None
    ratios = sorted(one / two for one, two in zip(mine, other, strict=True))
    low, high = interval_of_median(len(ratios))
    return Compared(name, float(np.median(ratios)), ratios[low], ratios[high], limit)


def interval_of_median(count: int) -> tuple[int, int]:
    """Returns which of so many sorted samples enclose their median with ``CONFIDENCE``.

    Each sample lies below the true median with probability 1/2, whatever its distribution.
    """
    below, index = 0.0, 0
    while index < count // 2:
        below += math.comb(count, index) / 2**count
        if 2 * below > 1 - CONFIDENCE:
            break
        index += 1
    lowest = max(0, index - 1)
    return lowest, count - 1 - lowest


def measure(rounds: int, folder: Path) -> dict[str, Samples]:
    """Measures steps for all kinds, and what a report costs the frontend; by case."""
    tokens = DECODE_PROMPT_TOKENS + (rounds + 1) * STEPS * len(KINDS)
    decode = Shape(
        tokens=DECODE_PROMPT_TOKENS, requests=DECODING, blocks=DECODING * (tokens // 16 + 2) + 1024
    )
    reports: list[Any] = []
    made_us: list[float] = []
    return {
        DECODE: _in_turns(rounds, lambda trace: _Decoding(decode, trace, tokens), folder),
        REQUEST: _in_turns(rounds, lambda trace: _Restoring(trace, reports, made_us), folder),
        REPORT: {MADE: made_us, TAKEN: observed.frontend_us(reports)},
    }


def _in_turns(rounds: int, make: Callable[[Path | None], Any], folder: Path) -> Samples:
    """Takes one sample of each kind in every round, each time in another order."""
    names = list(KINDS)
    engines = {trace: make(folder if trace else None) for trace in (False, True)}
    samples: dict[str, list[float]] = {name: [] for name in (names[0], ASKED, *names[1:])}
    try:
        with settled_heap():
            for round_ in range(rounds + 1):
                # Each follows each, so that none always finds the caches that another has left.
                for name in random.Random(round_).sample(names, len(names)):
                    # Otherwise one of them would pay for the garbage of all.
                    gc.collect()
                    kind = KINDS[name]
                    took_us = engines[kind.trace].sample(kind) * 1e6
                    if round_:  # The first only warms up.
                        samples[name].append(took_us)
                        if name == observed.METRICS_ON:
                            samples[ASKED].append(engines[kind.trace].asked_s * 1e6)
    finally:
        for engine in engines.values():
            engine.close()
    return samples


class _Decoding:
    """An engine in which requests decode, with a worker that looks for work."""

    def __init__(self, shape: Shape, trace: Path | None, tokens: int) -> None:
        self._observed = ObservedEngine(shape, trace, with_workers=True)
        for _ in range(DECODING):
            self._observed.engine.add(DECODE_PROMPT_TOKENS, outputs=tokens)
        for _ in range(8):  # Prompts, their stores, and what else is left of them.
            self._observed.step()

    def sample(self, kind: observed.Kind) -> float:
        """Returns the seconds of ``STEPS`` steps."""
        self._observed.observe(kind)
        self._observed.asked_s = 0.0
        return sum(self._observed.step() for _ in range(STEPS))

    @property
    def asked_s(self) -> float:
        """See ``ObservedEngine``; of the last sample."""
        return self._observed.asked_s

    def close(self) -> None:
        """Ends the engine."""
        self._observed.close()


class _Restoring:
    """An engine that gets one prompt after the other, and has something to do between them.

    At rest an engine reports at once, which delays nobody.
    """

    def __init__(self, trace: Path | None, reports: list[Any], made_us: list[float]) -> None:
        shape = Shape(tokens=PROMPT_TOKENS, blocks=4 * PROMPT_TOKENS // BLOCK_TOKENS + 1024)
        self._observed = ObservedEngine(shape, trace, with_workers=False)
        self._observed.engine.add(BLOCK_TOKENS // 2, outputs=_ENDLESS)
        self._reports, self._made_us = reports, made_us

    def sample(self, kind: observed.Kind) -> float:
        """Returns the seconds of ``PROMPTS`` prompts that nothing is found of, and of as many."""
        self._observed.observe(kind)
        self._observed.asked_s = 0.0
        engine, peer = self._observed.engine, self._observed.peer
        took_s = 0.0
        for found in (False, True) * PROMPTS:
            peer.expect(found=found)
            request = engine.add(PROMPT_TOKENS)
            while request.request_id in engine.scheduler.requests:
                took_s += self._observed.step()
        return took_s

    @property
    def asked_s(self) -> float:
        """See ``ObservedEngine``; of the last sample."""
        return self._observed.asked_s

    def close(self) -> None:
        """Ends the engine, and keeps what it has reported."""
        self._reports += self._observed.reports
        self._made_us += self._observed.made_us
        self._observed.close()


def judge(measured: Mapping[str, Samples]) -> list[Compared]:
    """Compares what ``PAIRS`` says, in each case."""
    judged = []
    for case, samples in measured.items():
        if ASKED in samples:
            whole = samples[observed.METRICS_ON]
            rest = [one - two for one, two in zip(whole, samples[ASKED], strict=True)]
            judged.append(compare(f"umbp's reports by themselves, in {case}", whole, rest, LIMIT))
        judged += [
            compare(f"{name}, in {case}", samples[mine], samples[other], limit)
            for name, mine, other, limit in PAIRS
            if mine in samples and other in samples
        ]
    return judged


def report(measured: Mapping[str, Samples]) -> list[str]:
    """Writes what was measured, for a person."""
    lines = []
    for case, samples in measured.items():
        lines.append(f"\nmicroseconds: {case}")
        for name, values in samples.items():
            low, middle, high = (format_number(one) for one in np.percentile(values, (10, 50, 90)))
            lines.append(f"  {name:<24}{middle:>9}  ({low} to {high})")
    return [*lines, ""]


def _written(measured: Mapping[str, Samples], judged: Sequence[Compared]) -> dict[str, Any]:
    found = origin(["umbp", "numpy"], sys.argv)
    # Its distribution has another name on a CPU.
    found["packages"]["vllm"] = vllm.__version__
    compared = [{**attrs.asdict(one), "verdict": one.verdict} for one in judged]
    return {**found, "compared": compared, "samples_us": measured}


def main() -> int:
    """Returns 1 when, with --check, a limit is certainly exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rounds; judges nothing")
    parser.add_argument("--check", action="store_true", help="fail when a limit is exceeded")
    parser.add_argument("--rounds", type=int, default=31, help="samples of each kind")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="umbp-bench-") as folder:
        # What holds reports must be the user's alone, and temporary folders are.
        measured = measure(2 if options.quick else options.rounds, Path(folder))
    judged = judge(measured)
    print("\n".join([*report(measured), *(one.line() for one in judged)]))
    if options.json is not None:
        text = json.dumps(_written(measured, judged), indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    missed = any(one.verdict == "MISSED" for one in judged)
    return 1 if missed and options.check and not options.quick else 0


if __name__ == "__main__":
    # vLLM and the connectors say much about engines without a model.
    logging.disable(logging.WARNING)
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What the samples of ``gpu_restore`` say: a table, and the ratios that are judged."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

PEERS = ("SimpleCPUOffload", "Offloading")
RESTORE_RATIO = "restore, of the best peer"
COLD_RATIO = "cold prefill with stores, of without"
GAP_RATIO = "99th percentile of gaps, restores of hits"
LIMITS = {RESTORE_RATIO: 0.9, COLD_RATIO: 1.01, GAP_RATIO: 1.05}
"""The most that each may be."""


def median_s(record: Mapping[str, Any], name: str, field: str) -> float:
    """Returns the median of a field over the rounds of an engine."""
    return statistics.median(sample[field] for sample in record["samples"][name])


def quartiles_s(record: Mapping[str, Any], name: str, field: str) -> tuple[float, float]:
    """Returns the first and the third quartile."""
    values = [sample[field] for sample in record["samples"][name]]
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the least value that is at least as large as this share of all."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def is_restored(record: Mapping[str, Any], name: str) -> bool:
    """Says whether an engine restored as much as its prefix cache had, in every round."""
    return all(
        sample["restored_cached"] >= sample["hit_cached"] > 0 for sample in record["samples"][name]
    )


def ratios(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns every ratio that is judged and can be computed, by name."""
    found: dict[str, float] = {}
    names = record["samples"]
    ours = "umbp memory"
    if ours not in names:
        return found
    peers = [name for name in PEERS if name in names and is_restored(record, name)]
    if peers:
        best = min(median_s(record, name, "restored_s") for name in peers)
        found[RESTORE_RATIO] = median_s(record, ours, "restored_s") / best
    if "none" in names:
        without = median_s(record, "none", "cold_s")
        found[COLD_RATIO] = median_s(record, ours, "cold_s") / without
    of_rounds = gap_ratios(record, ours)
    if of_rounds:
        found[GAP_RATIO] = statistics.median(of_rounds)
    return found


def gap_ratios(record: Mapping[str, Any], name: str) -> list[float]:
    """Returns, for each round of an engine, its 99th percentile beside restores, of beside hits.

    A prompt that arrives makes one step long, of a computation that vLLM has not captured, and how
    long differs by half: of few arrivals a ratio says little.
    """
    rounds = record["gaps"].get(name, {})
    pairs = zip(rounds.get("restores", []), rounds.get("hits", []), strict=False)
    return [percentile(restores, 0.99) / percentile(hits, 0.99) for restores, hits in pairs]


def pooled(record: Mapping[str, Any], name: str, kind: str) -> list[float]:
    """Returns the gaps of all rounds."""
    return [gap for of_round in record["gaps"].get(name, {}).get(kind, []) for gap in of_round]


def failures(record: Mapping[str, Any]) -> list[str]:
    """Returns a line for every judged ratio that is missed."""
    missed = [
        f"{name}: {ratio:.3f}, at most {LIMITS[name]}"
        for name, ratio in ratios(record).items()
        if ratio > LIMITS[name]
    ]
    missed += [
        f"{name} did not restore all that its prefix cache had"
        for name in record["samples"]
        if name.startswith("umbp") and not is_restored(record, name)
    ]
    return missed


def print_report(record: Mapping[str, Any]) -> None:
    """Prints a row for each engine, and the ratios."""
    table = Table(title=f"{record['prompt_tokens']} tokens, milliseconds: median (quartiles)")
    table.add_column("engine")
    fields = {"cold": "cold_s", "prefix hit": "hit_s", "restored": "restored_s"}
    for title in (*fields, "tokens restored", "gaps p99: quiet", "with hits", "with restores"):
        table.add_column(title, justify="right")
    for name, samples in record["samples"].items():
        cells = []
        for field in fields.values():
            first, third = quartiles_s(record, name, field)
            middle = median_s(record, name, field)
            cells.append(f"{middle * 1e3:.1f} ({first * 1e3:.1f}..{third * 1e3:.1f})")
        cells.append(str(min(sample["restored_cached"] for sample in samples)))
        for kind in ("quiet", "hits", "restores"):
            taken = pooled(record, name, kind)
            cells.append(f"{percentile(taken, 0.99) * 1e3:.2f}" if taken else "")
        table.add_row(name, *cells)
    console = Console(width=140)
    console.print(table)
    for name, ratio in ratios(record).items():
        console.print(f"{name}: {ratio:.3f}")
    of_rounds = sorted(gap_ratios(record, "umbp memory"))
    if of_rounds:
        console.print(f"of {len(of_rounds)} rounds: {of_rounds[0]:.2f} to {of_rounds[-1]:.2f}")

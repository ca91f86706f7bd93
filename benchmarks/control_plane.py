# SPDX-License-Identifier: Apache-2.0
"""What umbp costs the scheduler and the forward thread, beside the connectors that vLLM brings.

python benchmarks/control_plane.py [--quick | --full] [--json FILE]

vLLM's real scheduler and the connectors' own objects run in one process, without a model. Times
are processor time of the calling thread. The exit status is 1 when a ratio is not kept.
"""

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _plane_cases as cases
import attrs
import vllm
from _measure import origin
from _plane_engine import Shape
from _plane_peers import PEERS, InTree, SimpleCpu, usable
from _plane_report import Judged, bars, bound, ratio, ratio_of_sums, table
from _plane_umbp import Umbp, UmbpInProcess, UmbpOnSockets

SHORT, MIDDLE, LONG = 8_192, 32_768, 131_072
GROWTH_MAX = 18.0
"""Most that 16 times the tokens may cost."""
REQUEST_MAX = {InTree.name: 1 / 4, SimpleCpu.name: 1 / 2}
"""Most that a request may cost, as a part of what it costs with another connector."""
GROWING = {Umbp.name: cases.GROWING, UmbpOnSockets.name: (cases.MISS, cases.HIT)}
"""What may not grow faster than the prompt; sockets make a difference to lookups alone."""
AGAIN_MAX_US = 5.0
DECODE_MAX = 1 / 10
BLOCK_BYTES_MAX = 40.0
SUBMIT_MAX = 1 / 20


@attrs.frozen
class Plan:
    """How much is measured.

    Attributes:
        short: Tokens of the shorter prompt.
        long: Tokens of the longest; None: growth is not judged.
        shapes: (groups, ranks, tokens) of each engine.
        rounds: How often each request is measured.
        decode_rounds: Decode steps.
        waiting_tokens: Prompt of each waiting request.
    """

    short: int
    long: int | None
    shapes: tuple[tuple[int, int, int], ...]
    rounds: int
    decode_rounds: int
    waiting_tokens: int = 2048


QUICK = Plan(2048, None, ((1, 1, 2048),), rounds=2, decode_rounds=4, waiting_tokens=64)
USUAL = Plan(
    SHORT,
    LONG,
    tuple((g, r, tokens) for g, r in ((1, 1), (4, 1), (1, 8)) for tokens in (SHORT, LONG)),
    rounds=15,
    decode_rounds=40,
)
FULL = Plan(
    SHORT,
    LONG,
    tuple((g, r, tokens) for g in (1, 4) for r in (1, 8) for tokens in (SHORT, MIDDLE, LONG)),
    rounds=20,
    decode_rounds=80,
)


@attrs.frozen
class Results:
    """All samples.

    Attributes:
        requests: By (groups, ranks, tokens), connector and name.
        decode: By connector and name.
        waiting: By name.
        store: By name.
        skipped: Why what was not measured was not.
    """

    requests: Mapping[tuple[int, int, int], Mapping[str, cases.Samples]]
    decode: Mapping[str, cases.Samples]
    waiting: cases.Samples
    store: cases.Samples
    skipped: Sequence[str]


def measure(plan: Plan) -> Results:
    """Measures everything that a plan asks for."""
    reasons = {make: usable(make) for make in PEERS}
    skipped = [reason for reason in reasons.values() if reason]
    others = [make for make, reason in reasons.items() if not reason]
    requests = {}
    for groups, ranks, tokens in plan.shapes:
        shape = Shape(groups=groups, ranks=ranks, tokens=tokens)
        makers = [Umbp, UmbpOnSockets]
        # vLLM runs no more than one worker in the scheduler's process.
        if ranks == 1:
            makers.append(UmbpInProcess)
        # Beside the others once; how umbp grows is judged by itself.
        if (groups, ranks, tokens) == (1, 1, plan.short):
            makers += others
        _note(f"requests of {tokens:,} tokens, {groups} groups, {ranks} ranks")
        requests[groups, ranks, tokens] = cases.measure_requests(makers, shape, plan.rounds)
    _note(f"{cases.DECODING} requests that decode")
    decode = cases.measure_decode([Umbp, *others], plan.decode_rounds)
    _note(f"{cases.WAITING_REQUESTS:,} requests that wait")
    waiting = cases.measure_waiting(plan.waiting_tokens, plan.rounds)
    _note("the hand-over of a store")
    store = cases.measure_store(plan.rounds)
    return Results(requests, decode, waiting, store, skipped)


def judge(results: Results, plan: Plan) -> list[Judged]:
    """Holds every target against what was measured."""
    mine = results.requests[1, 1, plan.short]
    own = mine[Umbp.name]
    judged = [
        ratio_of_sums(
            f"a request of {plan.short:,} tokens, against {name}",
            limit,
            [own[part] for part in cases.REQUEST_PARTS],
            [mine[name][part] for part in cases.REQUEST_PARTS],
        )
        for name, limit in REQUEST_MAX.items()
        if name in mine
    ]
    judged += [
        ratio(
            f"a step in which {cases.DECODING} requests decode, against {name}",
            DECODE_MAX,
            results.decode[Umbp.name][cases.DECODE],
            samples[cases.DECODE],
            paired=False,
        )
        for name, samples in results.decode.items()
        if name != Umbp.name
    ]
    judged += [
        bound("a waiting request, asked about again", AGAIN_MAX_US, own[cases.AGAIN], "µs"),
        bound("metadata of a block", BLOCK_BYTES_MAX, own[cases.PER_BLOCK_BYTES], "bytes"),
    ]
    judged.append(
        ratio(
            f"handing over a store of {cases.STORE_BLOCKS} blocks of {cases.STORE_LAYERS} layers, "
            f"against {cases.REFERENCE}",
            SUBMIT_MAX,
            results.store[cases.SUBMIT],
            results.store[cases.REFERENCE],
        )
    )
    return judged + _growth(results, plan)


def _growth(results: Results, plan: Plan) -> list[Judged]:
    if plan.long is None:
        return []
    return [
        ratio(
            f"{plan.long:,} tokens against {plan.short:,}, {groups} groups, {ranks} ranks, "
            f"{connector}: {name}",
            GROWTH_MAX,
            samples[connector][name],
            results.requests[groups, ranks, plan.short][connector][name],
            paired=False,
        )
        for (groups, ranks, tokens), samples in results.requests.items()
        if tokens == plan.long
        for connector, names in GROWING.items()
        for name in names
    ]


def report(results: Results, plan: Plan) -> list[str]:
    """Writes what was measured, for a person."""
    lines = []
    for (groups, ranks, tokens), by_connector in results.requests.items():
        title = f"\nmicroseconds: {tokens:,} tokens, {groups} groups, {ranks} ranks"
        medians = {name: cases.medians(samples) for name, samples in by_connector.items()}
        rows: dict[str, dict[str, float]] = {}
        for connector, values in medians.items():
            for name, value in values.items():
                rows.setdefault(name, {})[connector] = value
        lines += table(title, rows, list(medians))
        if len(medians) > 1:
            lines += bars(
                f"\n{cases.REQUEST}, {tokens:,} tokens",
                {name: values[cases.REQUEST] for name, values in medians.items()},
                "µs",
            )
    decode = {name: cases.medians(samples) for name, samples in results.decode.items()}
    lines += bars(
        f"\n{cases.DECODE}, {cases.DECODING} requests",
        {name: values[cases.DECODE] for name, values in decode.items()},
        "µs",
    )
    lines += bars(
        f"\n{cases.EMPTY_BYTES}",
        {name: values[cases.EMPTY_BYTES] for name, values in decode.items()},
        "B",
    )
    lines += bars(
        f"\n{cases.WAITING_REQUESTS:,} waiting requests of {plan.waiting_tokens:,} tokens",
        cases.medians(results.waiting),
        "µs",
    )
    lines += bars(
        f"\na store of {cases.STORE_BLOCKS} blocks of {cases.STORE_LAYERS} layers",
        cases.medians(results.store),
        "µs",
    )
    return lines


def _note(text: str) -> None:
    print(f"measuring {text}", file=sys.stderr, flush=True)


def _written(results: Results, judged: Sequence[Judged], plan: Plan) -> dict[str, Any]:
    found = origin(["umbp", "numpy", "pyzmq"], sys.argv)
    # Its distribution has another name on a CPU.
    found["packages"]["vllm"] = vllm.__version__
    return {
        **found,
        "plan": attrs.asdict(plan),
        "judged": [{**attrs.asdict(one), "kept": one.is_kept} for one in judged],
        "skipped": list(results.skipped),
        "requests": [
            {"groups": groups, "ranks": ranks, "tokens": tokens, "samples": samples}
            for (groups, ranks, tokens), samples in results.requests.items()
        ],
        "decode": results.decode,
        "waiting": results.waiting,
        "store": results.store,
    }


def main() -> int:
    """Returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument("--quick", action="store_true", help="a few seconds; judges nothing")
    how_much.add_argument("--full", action="store_true", help="every size and layout")
    parser.add_argument("--check", action="store_true", help="as without; for make bench")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL if options.full else USUAL
    with cases.settled_heap():
        results = measure(plan)
    print("\n".join(report(results, plan)))
    judged = [] if options.quick else judge(results, plan)
    lines = [one.line() for one in judged] + [f"skipped {one}" for one in results.skipped]
    print("", *lines, sep="\n")
    if options.json is not None:
        text = json.dumps(_written(results, judged, plan), indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if all(one.is_kept for one in judged) else 1


if __name__ == "__main__":
    # vLLM and the connectors say much about engines without a model.
    logging.disable(logging.WARNING)
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Options of ``umbp sim``."""

import argparse
from pathlib import Path
from typing import Any, Final

from umbp.cli.arguments import at_least, key_value, positive, span, whole
from umbp.sim.traffic import Traffic

KINDS: Final = ("dense", "hybrid", "window")
"""The simulated models."""

RANDOM_FAULTS: Final = "random"
_TRAFFIC: Final = Traffic()


def add_sim(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    sim = commands.add_parser(
        "sim",
        help="simulate engines, traffic and faults on vLLM's real scheduler",
        description="Simulates engines without a model: vLLM's real scheduler and umbp's real"
        " core and connector, under a virtual clock. Every block that a step reads is compared"
        " with what it must hold. Same seed, same result. Exit status 1: a check failed.",
        allow_abbrev=False,
    )
    sim.add_argument("--seed", type=whole, default=0, metavar="N", help="decides all that is drawn")
    _add_engines(sim.add_argument_group("engines"))
    _add_traffic(sim.add_argument_group("traffic"))
    _add_faults(sim.add_argument_group("faults"))
    _add_output(sim.add_argument_group("output"))
    sim.set_defaults(run=_run_sim)


def _add_engines(group: Any) -> None:
    group.add_argument("--engines", type=positive, default=2, metavar="N", help="(default: 2)")
    group.add_argument(
        "--ranks", type=int, choices=(1, 2, 4), default=2, help="workers of each (default: 2)"
    )
    group.add_argument(
        "--model",
        choices=KINDS,
        default=KINDS[0],
        help="attention alone, with recurrent state, or with a sliding window (default: dense)",
    )
    group.add_argument(
        "--store",
        choices=("shared", "own"),
        default="shared",
        help="whether engines share one store (default: shared)",
    )
    group.add_argument(
        "--blocks",
        type=positive,
        metavar="N",
        help="KV blocks of an engine (default: enough for two of the longest requests)",
    )
    group.add_argument(
        "--capacity",
        type=positive,
        default=4096,
        metavar="N",
        help="objects that the store of a rank holds (default: %(default)s)",
    )
    group.add_argument(
        "--step-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="tokens that a step computes at most, 16 at least (default: %(default)s)",
    )
    group.add_argument(
        "--token-bytes",
        type=positive,
        default=1 << 17,
        metavar="N",
        help="KV of one token, for bytes moved; no bytes are kept (default: %(default)s)",
    )
    group.add_argument("--async-scheduling", action="store_true", help="as in vLLM")
    group.add_argument(
        "--option",
        action="append",
        default=[],
        type=key_value,
        metavar="KEY=VALUE",
        help="an option of the connector, such as lookup_async=true; may be given several times",
    )


def _add_traffic(group: Any) -> None:
    group.add_argument(
        "--conversations",
        type=positive,
        default=_TRAFFIC.conversations,
        metavar="N",
        help="(default: %(default)s)",
    )
    group.add_argument(
        "--rate",
        type=at_least(0.001),
        default=_TRAFFIC.rate_per_s,
        metavar="N",
        help="conversations that begin in a second, on average (default: %(default)g)",
    )
    spans = (
        ("--turns", _TRAFFIC.turns, "questions of a conversation"),
        ("--question-tokens", _TRAFFIC.question_tokens, "length of a question"),
        ("--answer-tokens", _TRAFFIC.answer_tokens, "length of an answer"),
    )
    for name, default, text in spans:
        shown = f"{text} (default: {default[0]}..{default[1]})"
        group.add_argument(name, type=span, default=default, metavar="N..N", help=shown)
    group.add_argument(
        "--think",
        type=at_least(0),
        default=_TRAFFIC.think_s,
        metavar="S",
        help="seconds between answer and question, on average (default: %(default)g)",
    )
    group.add_argument(
        "--systems",
        type=positive,
        default=_TRAFFIC.systems,
        metavar="N",
        help="different system prompts (default: %(default)s)",
    )
    group.add_argument(
        "--system-tokens",
        type=positive,
        default=_TRAFFIC.system_tokens,
        metavar="N",
        help="length of each (default: %(default)s)",
    )
    group.add_argument(
        "--routing",
        choices=("any", "sticky"),
        default="any",
        help="whether all turns of a conversation go to one engine (default: any)",
    )
    group.add_argument(
        "--steps", type=positive, metavar="N", help="nobody asks any more after so many steps"
    )
    group.add_argument(
        "--seconds", type=at_least(0), metavar="S", help="nor after so many virtual seconds"
    )


def _add_faults(group: Any) -> None:
    group.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="SPEC",
        help="what goes wrong, where and when, such as 't=2..3 engine=0 rank=1 loads=late:0.5';"
        " may be given several times (docs/simulator.md)",
    )
    group.add_argument(
        "--faults",
        metavar="random|FILE",
        help="drawn from the seed, or read from a JSON list of such texts",
    )


def _add_output(group: Any) -> None:
    group.add_argument(
        "--request", metavar="ID", help="whose time line is shown (default: the most eventful)"
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace of each engine (umbp trace), its number before the suffix",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the outcome as JSON too")


def _run_sim(parsed: argparse.Namespace) -> int:
    from umbp.cli.sim import run_sim

    return run_sim(parsed)

# SPDX-License-Identifier: Apache-2.0
"""``umbp trace``: plays a trace that an engine or the simulator wrote, and shows it."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from umbp.errors import ConfigError
from umbp.trace.perfetto import as_perfetto
from umbp.trace.replay import Played, play
from umbp.trace.story import tell


def add_trace(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    trace = commands.add_parser(
        "trace",
        help="play and show what happened to requests and transfers",
        description="Gives the events of a trace to a fresh core and compares what it does with"
        " what was recorded. Engines with trace_bytes write traces, and umbp sim --trace does"
        " (docs/trace.md). Exit status 0: the core does the same; 1: it differs.",
        allow_abbrev=False,
    )
    trace.add_argument("file", type=Path, metavar="FILE", help="a file *.trace.jsonl")
    shown = trace.add_mutually_exclusive_group()
    shown.add_argument(
        "--perfetto", type=Path, metavar="OUT", help="write JSON for ui.perfetto.dev"
    )
    shown.add_argument("--request", metavar="ID", help="tell what happened to a request")
    shown.add_argument(
        "--replay", action="store_true", help="show every difference, not only the first"
    )
    trace.set_defaults(run=_run_trace)


def _run_trace(parsed: argparse.Namespace) -> int:
    played = _read(parsed.file)
    if parsed.request is not None:
        story = list(tell(played, parsed.request))
        if not story:
            raise ConfigError(f"--request {parsed.request}: {_known(played)}")
        print("\n".join(story))
    elif parsed.perfetto is not None:
        _write(parsed.perfetto, json.dumps(as_perfetto(played)))
    differences = [one for one in played if one.difference]
    for one in differences if parsed.replay else differences[:1]:
        print(f"line {one.number}, {one.line['event']}: {one.difference}")
    if parsed.request is None:
        print(_summary(played, len(differences)))
    return 1 if differences else 0


def _read(path: Path) -> list[Played]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise ConfigError(f"{path} cannot be read: {reason}; name a trace.jsonl") from error
    if lines and not lines[-1].endswith("}"):
        # The engine died while it wrote.
        del lines[-1]
    if not lines:
        raise ConfigError(f"{path} is empty; name a trace.jsonl that an engine has written")
    return list(play(lines, str(path)))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--perfetto {path}: cannot be written ({error.strerror}); name another file"
        ) from error


def _known(played: Sequence[Played]) -> str:
    ids = (move.request_id for one in played for move in one.transitions)
    moves = Counter(filter(None, ids))
    shown = ", ".join(name for name, _ in moves.most_common(5))
    return f"there is no such request; the most eventful are {shown}" if shown else "it is empty"


def _summary(played: Sequence[Played], differences: int) -> str:
    # A transfer of free blocks has none.
    requests = {move.request_id for one in played for move in one.transitions} - {""}
    seconds = played[-1].now_s - played[0].now_s if played else 0.0
    verdict = f"{differences} of them played otherwise" if differences else "all played the same"
    return f"{len(played)} events of {len(requests)} requests in {seconds:.3f} s: {verdict}"

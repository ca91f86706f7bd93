# SPDX-License-Identifier: Apache-2.0
"""Tells what happened to one request, as text."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from umbp.trace.replay import Played, Transition

_HIDDEN: Final = ("event", "request_id", "now_s", "commands", "error", "parts", "source")


def tell(played: Iterable[Played], request_id: str) -> Iterator[str]:
    """Tells a request's story.

    Args:
        played: A trace.
        request_id: The request.

    Yields:
        A line for each event that moved the request or one of its transfers, and below it what
        moved and what was to be done. Times are seconds since the first line.
    """
    begin_s: float | None = None
    for one in played:
        begin_s = one.now_s if begin_s is None else begin_s
        moved = [move for move in one.transitions if move.request_id == request_id]
        if not moved and one.line.get("request_id") != request_id:
            continue
        yield f"{one.now_s - begin_s:10.4f} s  {one.line['event']}{_facts(one.line)}"
        for move in moved:
            yield f"{'':14}{_describe(move)}"
        for command in one.line.get("commands", ()):
            if command.get("request_id", request_id) == request_id:
                yield f"{'':14}-> {command['command']}{_facts(command, ('command',))}"
        if "error" in one.line:
            yield f"{'':14}refused: {one.line['error']}"
        if one.difference:
            yield f"{'':14}played now: {one.difference}"


def _facts(line: Mapping[str, Any], hidden: Iterable[str] = ()) -> str:
    left_out = (*_HIDDEN, *hidden)
    facts = [f"{name}={value}" for name, value in line.items() if name not in left_out]
    facts += [f"group {group}: blocks {ids}" for group, ids in line.get("parts", ())]
    return "  " + ", ".join(facts) if facts else ""


def _describe(move: Transition) -> str:
    who = f"life {move.generation}" if move.job_id is None else f"{move.kind} {move.job_id}"
    if move.source == move.target:
        return f"{who}: {move.event}, stays {move.target}"
    return f"{who}: {move.event}, {move.source} to {move.target}"

# SPDX-License-Identifier: Apache-2.0
"""Events and commands as JSON values.

An event is written so that a core to which it is given again does the same: without what is opaque
to a core (the engine's request, what a hit found, hashes of blocks), and with block ids as ranges.
A command is only ever compared, so it is written as little as identifies it.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs

from umbp.fsm import (
    BlocksDeferred,
    BlocksFilled,
    BoundaryOffered,
    Command,
    ComputeAdmitted,
    DropLookup,
    EpochRaised,
    Event,
    LeasePart,
    LeaseSent,
    LoadAdmitted,
    LookupAnswered,
    LookupAsked,
    LookupSkipped,
    Preempted,
    RankArriving,
    RankFailed,
    RankStalled,
    RankSucceeded,
    RequestFinished,
    ReuseNeared,
    StartLookup,
)

EVENTS: Final[Mapping[str, Callable[..., Event]]] = {
    kind.__name__: kind
    for kind in (
        LookupAsked,
        LookupSkipped,
        LookupAnswered,
        LoadAdmitted,
        ComputeAdmitted,
        BlocksFilled,
        BlocksDeferred,
        BoundaryOffered,
        Preempted,
        RequestFinished,
        ReuseNeared,
        LeaseSent,
        RankSucceeded,
        RankFailed,
        RankStalled,
        RankArriving,
        EpochRaised,
    )
}
"""Every event from outside, by name."""

_OPAQUE: Final = ("source", "hit")


def encode_event(event: Event) -> dict[str, Any]:
    """Writes an event; its name is under ``event``."""
    line: dict[str, Any] = {"event": type(event).__name__}
    for field in attrs.fields(type(event)):
        value = getattr(event, field.name)
        if field.name == "parts":
            value = [[part.group_index, _ranges(part.block_ids)] for part in value]
        elif field.name == "failed_hashes":
            value = [hash_.hex() for hash_ in value]
        elif field.name in _OPAQUE:
            continue
        line[field.name] = value
    return line


def decode_event(line: Mapping[str, Any]) -> Event:
    """Makes an event of what ``encode_event`` wrote.

    Raises:
        KeyError: There is no such event.
        TypeError: It lacks a field, or has one too many.
        ValueError: A field is malformed.
    """
    fields = {name: value for name, value in line.items() if name in _FIELDS[line["event"]]}
    if "parts" in fields:
        fields["parts"] = tuple(_part(group, ranges) for group, ranges in fields["parts"])
    if "failed_hashes" in fields:
        fields["failed_hashes"] = tuple(map(bytes.fromhex, fields["failed_hashes"]))
    for name in _OPAQUE:
        if name in _FIELDS[line["event"]]:
            fields[name] = None
    return EVENTS[line["event"]](**fields)


_FIELDS: Final = {
    name: frozenset(attrs.fields_dict(kind))  # type: ignore[arg-type]
    for name, kind in EVENTS.items()
}


def encode_command(command: Command) -> dict[str, Any]:
    """Writes what identifies a command; its name is under ``command``."""
    line: dict[str, Any] = {"command": type(command).__name__}
    match command:
        case StartLookup(request=request, begin_tokens=begin, end_tokens=end):
            line |= {
                "request_id": request.request_id,
                "question_id": request.question_id,
                "begin_tokens": begin,
                "end_tokens": end,
            }
        case DropLookup(question_id=question_id):
            line["question_id"] = question_id
        case _:
            lease = command.lease
            line |= {
                "job_id": lease.job_id,
                "kind": lease.kind.value,
                "request_id": lease.request_id,
                "blocks": lease.block_count,
            }
    return line


def _part(group_index: int, ranges: str) -> LeasePart:
    ids = _ids(ranges)
    return LeasePart(group_index, (b"",) * len(ids), ids)


def _ranges(ids: Iterable[int]) -> str:
    """Writes ids as ranges, such as ``4-7,9``: blocks are often handed out in order."""
    shown = []
    for _, run in itertools.groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        first, last = numbers[0], numbers[-1]
        shown.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(shown)


def _ids(ranges: str) -> tuple[int, ...]:
    ids: list[int] = []
    for text in filter(None, ranges.split(",")):
        first, _, last = text.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return tuple(ids)

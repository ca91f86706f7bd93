# SPDX-License-Identifier: Apache-2.0
"""Plays a trace: gives its events to a fresh core, and compares what comes out."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from umbp.errors import ConfigError, UmbpError
from umbp.fsm import Core, CoreLimits, RequestContext, TransferLease
from umbp.trace.codec import decode_event, encode_command

FORMATS: Final = (1,)


@attrs.frozen
class Transition:
    """A state machine has taken an event, from outside or derived.

    Attributes:
        request_id: The request; empty for a transfer of none.
        generation: Its life; None for a transfer of no request.
        job_id: The transfer that moved; None: the request itself did.
        kind: ``load`` or ``store``; empty for a request.
        event: Name of the event.
        source: Name of the state before.
        target: Name of the state after.
    """

    request_id: str
    generation: int | None
    job_id: int | None
    kind: str
    event: str
    source: str
    target: str


@attrs.frozen
class Played:
    """A line of a trace that was played.

    Attributes:
        number: Its number in the file, from 1.
        now_s: Its time.
        line: The line.
        transitions: What moved, in order.
        difference: How the core behaved in another way than was recorded; empty if it did not.
    """

    number: int
    now_s: float
    line: Mapping[str, Any]
    transitions: tuple[Transition, ...]
    difference: str


class _PlayedCore(Core):
    """A core that notes its transitions."""

    def __init__(self, limits: CoreLimits, epoch: int) -> None:
        super().__init__(limits, epoch)
        self.transitions: list[Transition] = []

    def _fire(self, subject: "RequestContext | TransferLease", event: Any) -> None:
        source = subject.state.name
        super()._fire(subject, event)
        if isinstance(subject, TransferLease):
            job_id, kind = subject.job_id, subject.kind.value
        else:
            job_id, kind = None, ""
        self.transitions.append(
            Transition(
                str(subject.request_id),
                subject.generation,
                job_id,
                kind,
                type(event).__name__,
                source,
                subject.state.name,
            )
        )

    def take_transitions(self) -> tuple[Transition, ...]:
        """Returns those since the last call."""
        found, self.transitions = tuple(self.transitions), []
        return found


def play(lines: Iterable[str], where: str) -> Iterator[Played]:
    """Plays a trace.

    Args:
        lines: Its lines, the header first.
        where: What to call it in a message.

    Yields:
        Each line after the header.

    Raises:
        ConfigError: A line is none of a trace.
    """
    core: _PlayedCore | None = None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if core is None:
                core = _fresh_core(line)
                continue
            difference = _give(core, line)
            now_s = float(line["now_s"])
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, UmbpError):
                raise
            raise ConfigError(
                f"{where}, line {number}: no line of a trace; name a file that umbp wrote"
            ) from error
        yield Played(number, now_s, line, core.take_transitions(), difference)


def _fresh_core(header: Mapping[str, Any]) -> _PlayedCore:
    if header["umbp_trace"] not in FORMATS:
        raise ConfigError(
            f"the trace has format {header['umbp_trace']}, and this umbp plays {FORMATS[-1]}; use "
            f"umbp {header.get('umbp', 'of another version')}"
        )
    core = _PlayedCore(CoreLimits(**header["limits"]), header["epoch"])
    core.local_cache_tainted = header["local_cache_tainted"]
    core.next_id = itertools.count(header["last_id"] + 1).__next__
    return core


def _give(core: _PlayedCore, line: Mapping[str, Any]) -> str:
    """Gives a core a line; returns how it differs from what was recorded."""
    now_s = line["now_s"]
    if line["event"] == "id":
        core.next_id()
        return ""
    event = None if line["event"] == "tick" else decode_event(line)
    try:
        out = core.tick(now_s) if event is None else core.step(event, now_s)
    except UmbpError as error:
        expected = line.get("error", "commands")
        found = type(error).__name__
        return "" if expected == found else f"{found} ({error}), recorded {expected}"
    if "error" in line:
        return f"no error, recorded {line['error']}"
    commands = [encode_command(command) for command in out]
    if commands == line["commands"]:
        return ""
    return f"{json.dumps(commands)}, recorded {json.dumps(line['commands'])}"

# SPDX-License-Identifier: Apache-2.0
"""Shows a trace in Perfetto or Chrome: a track for each request and for each transfer.

Spans are states, instants are answers of ranks. Source: "Trace Event Format", the JSON that
https://ui.perfetto.dev and chrome://tracing open.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from umbp.fsm import LeaseState
from umbp.trace.replay import Played, Transition

_REQUESTS: Final = 1
_TRANSFERS: Final = 2
_MICROSECONDS: Final = 1e6
_ANSWERS: Final = ("RankSucceeded", "RankFailed", "RankStalled", "RankArriving")
_PLANNED: Final = ("StartLoad", "StartStore")
_FINAL: Final = ("FINISHED", "RELEASED")


@attrs.define
class _Track:
    """A request or transfer whose present state has not ended yet."""

    process: int
    number: int
    state: str = ""
    since_s: float = 0.0


class _Tracks:
    """Makes the events of a trace file."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
            for process, name in ((_REQUESTS, "requests"), (_TRANSFERS, "transfers"))
        ]
        self._open: dict[tuple[str, int | None], _Track] = {}
        self._numbers: dict[str, int] = {}

    def planned(self, command: Mapping[str, Any], now_s: float) -> None:
        """Begins the track of a transfer, which no transition makes."""
        if command["command"] in _PLANNED:
            job_id = command["job_id"]
            name = f"{command['kind']} {job_id} of {command['request_id'] or 'free blocks'}"
            track = self._new(_TRANSFERS, job_id, name)
            track.state, track.since_s = LeaseState.SUBMITTED.name, now_s
            self._open[str(command["request_id"]), job_id] = track

    def move(self, move: Transition, now_s: float) -> None:
        """Ends the state before and begins the one after; staying in one is no new span."""
        key = (move.request_id, move.job_id)
        track = self._open.get(key)
        if track is None and move.job_id is not None:
            # A transfer of no request, which begins with its command.
            return
        if track is None:
            number = self._numbers.setdefault(move.request_id, len(self._numbers) + 1)
            track = self._open[key] = self._new(_REQUESTS, number, move.request_id)
        elif move.source == move.target:
            return
        else:
            self._end(track, now_s)
        track.state, track.since_s = move.target, now_s
        if move.target in _FINAL:
            del self._open[key]

    def answer(self, played: Played) -> None:
        """Marks that a rank has answered for a transfer."""
        line = played.line
        self.events.append(
            {
                "ph": "i",
                "s": "t",
                "name": f"{line['event']} {line['rank']}",
                "ts": played.now_s * _MICROSECONDS,
                "pid": _TRANSFERS,
                "tid": line["job_id"],
                "args": {"rank": line["rank"]},
            }
        )

    def end_all(self, now_s: float) -> None:
        """Ends what is still open where the trace ends."""
        for track in self._open.values():
            self._end(track, now_s)

    def _new(self, process: int, number: int, name: str) -> _Track:
        self.events.append(
            {
                "ph": "M",
                "name": "thread_name",
                "pid": process,
                "tid": number,
                "args": {"name": name},
            }
        )
        return _Track(process, number)

    def _end(self, track: _Track, now_s: float) -> None:
        self.events.append(
            {
                "ph": "X",
                "name": track.state,
                "ts": track.since_s * _MICROSECONDS,
                "dur": (now_s - track.since_s) * _MICROSECONDS,
                "pid": track.process,
                "tid": track.number,
            }
        )


def as_perfetto(played: Iterable[Played]) -> dict[str, Any]:
    """Returns a trace as the JSON object that Perfetto opens."""
    tracks = _Tracks()
    now_s = 0.0
    for one in played:
        now_s = one.now_s
        if one.line["event"] in _ANSWERS:
            tracks.answer(one)
        for command in one.line.get("commands", ()):
            tracks.planned(command, now_s)
        for move in one.transitions:
            tracks.move(move, now_s)
    tracks.end_all(now_s)
    return {"traceEvents": tracks.events, "displayTimeUnit": "ms"}

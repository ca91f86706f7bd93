# SPDX-License-Identifier: Apache-2.0
"""From a table to a ``transitions`` machine, and from that machine to a dispatch dictionary.

The machine is the source of truth: it is built from the table once, at import, and the dispatch is
read back from it, never written by hand. Requests and leases are never registered as its models:
one ``transitions`` trigger costs about ten microseconds, the dictionary a fraction of one.
"""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from transitions import Machine, Transition

from umbp.fsm.limits import CoreLimits
from umbp.fsm.table import STAY, Deadline, Row

Effect: TypeAlias = Callable[[Any, Any, Any], None]
Dispatch: TypeAlias = Mapping[Any, Mapping[type[Any], tuple[Any, Row]]]
"""``dispatch[state][event class] -> (next state, row)``"""
Steps: TypeAlias = dict[Any, dict[type[Any], tuple[Any, Effect | None, float | None]]]
"""``steps[state][event class] -> (next state, effect, seconds that bound the next state)``"""


class EffectTransition(Transition):
    """A transition that carries its row."""

    def __init__(self, *args: Any, row: Row, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.row = row


class EffectMachine(Machine):
    """A machine whose transitions carry their rows."""

    transition_cls = EffectTransition


def build_machine(states: type[enum.Enum], table: Sequence[Row]) -> EffectMachine:
    """Builds the machine of a table; its first state is the initial one."""
    machine = EffectMachine(
        model=None,
        states=states,
        initial=next(iter(states)),
        auto_transitions=False,
        send_event=False,
    )
    for row in table:
        machine.add_transition(row.event.__name__, list(row.sources), row.dest, row=row)
    return machine


def compile_dispatch(machine: EffectMachine, states: type[enum.Enum]) -> Dispatch:
    """Reads a dispatch dictionary back from a machine.

    Raises:
        ValueError: Two rows take the same event in the same state, a row has a guard, or one names
            what is no state.
    """
    dispatch: dict[Any, dict[type[Any], tuple[Any, Row]]] = {state: {} for state in states}
    for source, dest, row in _rows(machine):
        for name in (source, dest):
            if name not in states.__members__:
                raise ValueError(f"row for {row.event.__name__} names {name}, which is no state")
        if row.event in dispatch[states[source]]:
            raise ValueError(f"two rows for {row.event.__name__} in {source}")
        dispatch[states[source]][row.event] = (states[dest], row)
    return dispatch


def compile_steps(
    dispatch: Dispatch, deadlines: Mapping[Any, Deadline], limits: CoreLimits
) -> Steps:
    """Works out what each event does under given limits.

    The seconds are None after ``STAY``, where the time of the state runs on, and in a state that
    has no deadline.
    """

    def period_s(dest: Any, row: Row) -> float | None:
        if row.dest == STAY:
            return None
        deadline = row.deadline or deadlines.get(dest)
        return None if deadline is None else float(getattr(limits, deadline.limit))

    return {
        state: {
            event: (dest, row.effect, period_s(dest, row)) for event, (dest, row) in rows.items()
        }
        for state, rows in dispatch.items()
    }


def _rows(machine: EffectMachine) -> Iterator[tuple[str, str, Row]]:
    """Yields (source, dest, row) of every transition."""
    for event in machine.events.values():
        for source, transitions in event.transitions.items():
            for transition in transitions:
                if not isinstance(transition, EffectTransition) or transition.dest is None:
                    raise ValueError(f"{event.name} in {source} does not come from a table")
                if transition.conditions or transition.prepare:
                    raise ValueError(f"row for {event.name} in {source} has a guard")
                yield source, transition.dest, transition.row


def mermaid(
    machine: EffectMachine, states: type[enum.Enum], deadline_events: frozenset[type[Any]]
) -> str:
    """Draws a machine as a Mermaid state diagram; deadlines are marked with a clock."""
    lines = ["stateDiagram-v2", f"    [*] --> {machine.initial}"]
    edges: dict[tuple[str, str], list[str]] = {}
    for source, dest, row in _rows(machine):
        label = row.event.__name__ + (" ⏱" if row.event in deadline_events else "")
        edges.setdefault((source, dest), []).append(label)
    order = {state.name: index for index, state in enumerate(states)}
    for source, dest in sorted(edges, key=lambda edge: (order[edge[0]], order[edge[1]])):
        lines.append(f"    {source} --> {dest}: {'<br/>'.join(edges[source, dest])}")
    sources = {source for source, _ in edges}
    lines += [f"    {state.name} --> [*]" for state in states if state.name not in sources]
    return "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""The tables are the machines: what runs is what the ``transitions`` machine would do."""

import enum
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest
from transitions import Machine, MachineError

from umbp.fsm import Core, CoreLimits, LeaseState, RequestState, core, effects, events
from umbp.fsm.compile import EffectMachine, build_machine, compile_dispatch, mermaid
from umbp.fsm.core import LEASE_MACHINE, REQUEST_MACHINE
from umbp.fsm.table import (
    LEASE_DEADLINES,
    LEASE_FINAL,
    LEASE_TABLE,
    QUESTION_DEADLINE,
    REQUEST_DEADLINES,
    REQUEST_FINAL,
    REQUEST_TABLE,
    STAY,
    Row,
)

REQUESTS = (REQUEST_MACHINE, RequestState, REQUEST_TABLE, REQUEST_DEADLINES, REQUEST_FINAL)
LEASES = (LEASE_MACHINE, LeaseState, LEASE_TABLE, LEASE_DEADLINES, LEASE_FINAL)
BOTH = pytest.mark.parametrize(
    ("machine", "states", "table", "deadlines", "final"),
    [REQUESTS, LEASES],
    ids=["request", "lease"],
)

EVENTS = tuple(
    member
    for _, member in inspect.getmembers(events, attrs.has)
    if member.__module__ == events.__name__
)
CLASSIFIED = {events.RankSucceeded, events.RankFailed}
"""Facts that no table takes: the core derives from them what happened to the lease."""


class Model:
    """Something that a machine moves."""

    def __init__(self, state: enum.Enum) -> None:
        self.state = state


def pairs() -> Iterator[Any]:
    for machine, states, *_ in (REQUESTS, LEASES):
        for state in states:
            for event in EVENTS:
                yield pytest.param(machine, state, event, id=f"{state.name}-{event.__name__}")


def live_next(machine: Machine, state: enum.Enum, event: type[Any]) -> enum.Enum | None:
    """Triggers the machine itself; None when it refuses."""
    model = Model(state)
    if event.__name__ not in machine.events:
        return None
    try:
        machine.events[event.__name__].trigger(model)
    except MachineError:
        assert model.state is state
        return None
    return model.state


@pytest.mark.parametrize(("machine", "state", "event"), pairs())
def test_dispatch_does_what_the_machine_does(
    machine: Machine, state: enum.Enum, event: type[Any]
) -> None:
    compiled = Core(CoreLimits(unit_tokens=1))._table[state]
    expected = live_next(machine, state, event)
    assert (compiled[event][0] if event in compiled else None) is expected


def test_the_pairs_are_both_legal_and_illegal() -> None:
    legal = [live_next(*pair.values) is not None for pair in pairs()]
    assert len(legal) == (6 + 6) * len(EVENTS)
    assert sum(legal) == sum(len(row.sources) for row in (*REQUEST_TABLE, *LEASE_TABLE))


@BOTH
def test_every_state_can_be_reached(machine, states, table, deadlines, final) -> None:
    reached = {next(iter(states))}
    for _ in states:
        for row in table:
            if row.dest != STAY and reached & set(row.sources):
                reached.add(row.dest)
    assert reached == set(states)


@BOTH
def test_the_final_state_and_no_other_has_no_exit(machine, states, table, deadlines, final) -> None:
    dispatch = compile_dispatch(machine, states)
    assert [state for state in states if not dispatch[state]] == [final]
    left = {
        source for row in table if row.dest != STAY for source in row.sources if source != row.dest
    }
    assert left == set(states) - {final}


@BOTH
def test_every_state_that_lasts_has_a_deadline(machine, states, table, deadlines, final) -> None:
    at_once = {LeaseState.SETTLED, LeaseState.FAILED} & set(states)
    assert set(deadlines) == set(states) - {final} - at_once
    dispatch = compile_dispatch(machine, states)
    for state in at_once:
        assert list(dispatch[state]) == [events.LeaseReleased]


@BOTH
def test_the_end_of_each_deadline_is_a_row_that_begins_the_next(
    machine, states, table, deadlines, final
) -> None:
    dispatch = compile_dispatch(machine, states)
    bounds = [(state, deadline) for state, deadline in deadlines.items()]
    bounds += [(row.dest, row.deadline) for row in table if row.deadline]
    for state, deadline in bounds:
        _, row = dispatch[state][deadline.event]
        # With STAY the state would have no deadline any more.
        assert row.dest != STAY
        assert deadline.limit in attrs.fields_dict(CoreLimits)


def test_only_a_question_has_a_deadline_of_its_own() -> None:
    rows = [row for row in (*REQUEST_TABLE, *LEASE_TABLE) if row.deadline]
    assert [(row.event, row.deadline) for row in rows] == [(events.LookupAsked, QUESTION_DEADLINE)]


def test_every_effect_is_in_a_table() -> None:
    written = {
        member
        for name, member in inspect.getmembers(effects, inspect.isfunction)
        if member.__module__ == effects.__name__ and not name.startswith("_")
    }
    assert {row.effect for row in (*REQUEST_TABLE, *LEASE_TABLE)} - {None} == written


def test_every_event_is_in_a_table() -> None:
    used = {row.event for row in (*REQUEST_TABLE, *LEASE_TABLE)}
    assert set(EVENTS) - used == CLASSIFIED


def test_events_from_outside_are_those_that_step_takes() -> None:
    handled = set(Core(CoreLimits(unit_tokens=1))._handlers)
    derived = {deadline.event for deadline in core._DEADLINES.values()}
    derived |= {QUESTION_DEADLINE.event}
    derived |= {type(event) for event in vars(core).values() if type(event) in EVENTS}
    assert handled | derived == set(EVENTS)
    assert not handled & derived


class Light(enum.Enum):
    RED = "red"
    GREEN = "green"


@attrs.frozen
class Switched:
    """An event."""


@attrs.frozen
class Waited:
    """An event."""


def rows(*added: Row) -> Sequence[Row]:
    return (Row(Switched, (Light.RED,), Light.GREEN), *added)


def test_two_rows_for_one_pair_are_refused() -> None:
    machine = build_machine(Light, rows(Row(Switched, (Light.RED, Light.GREEN), Light.RED)))
    with pytest.raises(ValueError, match=r"^two rows for Switched in RED$"):
        compile_dispatch(machine, Light)


@pytest.mark.parametrize("guard", ["conditions", "unless", "prepare"])
def test_guards_are_refused(guard: str) -> None:
    machine = build_machine(Light, rows())
    machine.add_transition(
        "Waited", "GREEN", "RED", row=Row(Waited, (Light.GREEN,), Light.RED), **{guard: print}
    )
    with pytest.raises(ValueError, match=r"^row for Waited in GREEN has a guard$"):
        compile_dispatch(machine, Light)


def test_transitions_from_elsewhere_are_refused() -> None:
    machine = build_machine(Light, rows())
    machine.add_transition("Waited", "RED", None, row=Row(Waited, (Light.RED,), None))
    with pytest.raises(ValueError, match=r"^Waited in RED does not come from a table$"):
        compile_dispatch(machine, Light)


@pytest.mark.parametrize(
    "row",
    [
        Row(Waited, (Light.GREEN,), RequestState.FINISHED),
        Row(Waited, (RequestState.FINISHED,), Light.GREEN),
    ],
    ids=["dest", "source"],
)
def test_rows_name_only_states_of_their_machine(row: Row) -> None:
    machine = build_machine(Light, rows(row))
    with pytest.raises(ValueError, match=r"^row for Waited names FINISHED, which is no state$"):
        compile_dispatch(machine, Light)


def test_a_machine_moves_no_model_of_its_own() -> None:
    for machine in (REQUEST_MACHINE, LEASE_MACHINE):
        assert isinstance(machine, EffectMachine)
        assert machine.models == []


def test_mermaid_draws_every_edge_once_and_marks_deadlines() -> None:
    machine = build_machine(
        Light, rows(Row(Waited, (Light.RED,), Light.GREEN), Row(Waited, (Light.GREEN,), STAY))
    )
    assert mermaid(machine, Light, frozenset({Waited})).splitlines() == [
        "stateDiagram-v2",
        "    [*] --> RED",
        "    RED --> GREEN: Switched<br/>Waited ⏱",
        "    GREEN --> GREEN: Waited ⏱",
    ]

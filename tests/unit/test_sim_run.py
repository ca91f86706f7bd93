# SPDX-License-Identifier: Apache-2.0
"""Runs of the simulator: they balance, come to rest whatever goes wrong, and find what is wrong."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from umbp.errors import ConfigError
from umbp.sim.memory import OracleError, StoredPage
from umbp.sim.models import ModelKind
from umbp.sim.plan import SimPlan
from umbp.sim.run import SimFailed, SimRun
from umbp.sim.schedule import parse_fault, random_faults
from umbp.sim.store import SimStore
from umbp.sim.summary import as_json, tallies, total
from umbp.sim.traffic import Traffic
from umbp.trace.replay import play

pytestmark = pytest.mark.usefixtures("quiet_simulation")

TRAFFIC = Traffic(conversations=16, rate_per_s=16.0)


def simulate(*faults: str, **plan: Any) -> SimRun:
    """Runs a plan to its end."""
    plan.setdefault("traffic", TRAFFIC)
    plan.setdefault("faults", [parse_fault(text) for text in faults])
    run = SimRun(SimPlan(**plan))
    run.finish()
    return run


def events(run: SimRun) -> Sequence[str]:
    return [entry.event for entries in run.journal.entries.values() for entry in entries]


@pytest.mark.parametrize("kind", ModelKind)
@pytest.mark.parametrize("shared_store", [True, False])
def test_every_prompt_token_has_come_from_somewhere(kind: ModelKind, shared_store: bool) -> None:
    """Three sources add up, and what vLLM began after is what umbp says that it loaded."""
    run = simulate("t=0.7 forget", "t=1.2 forget", kind=kind, shared_store=shared_store)
    one = total(tallies(run))
    assert one.requests == one.answered == sum(len(engine.requests) for engine in run.engines)
    assert one.prompt_tokens == one.local_tokens + one.restored_tokens + one.computed_tokens
    assert one.restored_tokens == sum(
        engine.counters()["tokens_restored"] for engine in run.engines
    )
    assert one.restored_tokens
    assert one.local_tokens
    assert run.talks_over == TRAFFIC.conversations


def test_the_trace_of_each_engine_plays_to_the_same_end(tmp_path: Path) -> None:
    """With faults and resets: the core of the trace takes no part of the simulation's state."""
    faults = random_faults(5, duration_s=TRAFFIC.expected_s, engines=2, ranks=2, shared_store=False)
    simulate(seed=5, faults=faults, shared_store=False, trace_path=tmp_path / "t.jsonl")
    for engine in range(2):
        lines = (tmp_path / f"t-{engine}.jsonl").read_text().splitlines()
        played = list(play(lines, "trace"))
        assert len(played) > 50
        assert [one.difference for one in played if one.difference] == []


@pytest.mark.parametrize("kind", ModelKind)
@pytest.mark.parametrize("load_async", [True, False])
def test_a_run_with_faults_ends_and_balances(kind: ModelKind, load_async: bool) -> None:
    faults = random_faults(2, duration_s=TRAFFIC.expected_s, engines=2, ranks=2, shared_store=False)
    options = {"load_async": load_async, "save_decode_cache": True}
    run = simulate(kind=kind, seed=2, faults=faults, shared_store=False, options=options)
    for tally in tallies(run):
        found = tally.local_tokens + tally.restored_tokens + tally.computed_tokens
        assert found == tally.prompt_tokens
    assert run.talks_over == TRAFFIC.conversations


def test_a_shared_store_saves_what_an_own_one_computes_again() -> None:
    shared, own = (
        total(tallies(simulate(shared_store=shared_store))) for shared_store in (True, False)
    )
    assert shared.restored_tokens > own.restored_tokens
    assert shared.recomputed_tokens < own.recomputed_tokens


def test_equal_seeds_give_equal_runs_and_faults_leave_traces() -> None:
    first, again, other = (as_json(simulate(seed=seed), None, None) for seed in (1, 1, 2))
    assert first == again
    assert first["total"] != other["total"]


def test_only_the_named_rank_of_the_named_engine_fails() -> None:
    run = simulate("engine=1 rank=0 loads=lost", shared_store=True)
    tally, broken = tallies(run)
    assert tally.loads_settled
    assert not tally.loads_failed
    assert broken.loads_failed
    assert not broken.loads_settled
    details = [
        entry.detail
        for entries in run.journal.entries.values()
        for entry in entries
        if entry.event == "RankFailed"
    ]
    assert details
    assert all("rank 0" in detail for detail in details)


def test_a_dead_rank_holds_what_it_has_until_it_is_back() -> None:
    run = simulate("t=0.2..1.2 engine=0 rank=1 dead")
    tally, other = tallies(run)
    assert tally.lookups_expired
    assert not other.lookups_expired
    assert run.engines[0].counters()["leases_stalled"]
    assert tally.stores_failed == 0
    assert tally.requests == tally.answered
    entries = [
        entry for request_id in run.engines[0].accounts for entry in run.journal.entries[request_id]
    ]
    held = {
        entry.detail for entry in entries if entry.event == "LeaseSent" and 0.2 < entry.time_s < 1.1
    }
    answered_s = [
        entry.time_s
        for entry in entries
        if entry.event == "RankSucceeded" and entry.detail.partition(" rank 1")[0] in held
    ]
    assert len(answered_s) == len(held) > 0
    assert all(1.2 <= time_s < 1.3 for time_s in answered_s)


def test_faults_without_an_end_end_with_the_traffic() -> None:
    run = simulate("loads=held stores=held")
    one = total(tallies(run))
    assert one.restored_tokens == 0
    assert one.stores_settled
    assert one.requests == one.answered


def test_a_reset_makes_stored_objects_misses() -> None:
    calm, reset = (
        total(tallies(simulate(*faults, shared_store=False, sticky=True)))
        for faults in ((), ("t=0.6 reset", "t=0.9 reset", "t=1.2 reset"))
    )
    assert reset.recomputed_tokens > calm.recomputed_tokens
    assert reset.requests == reset.answered


def test_a_forgetful_cache_is_made_up_for_by_the_store() -> None:
    forgets = [f"t={tenths / 10}  forget" for tenths in range(1, 20)]
    calm, forgetful = (total(tallies(simulate(*faults))) for faults in ((), forgets))
    assert forgetful.local_tokens < calm.local_tokens
    assert forgetful.restored_tokens > calm.restored_tokens


def test_a_hanging_pool_ends_its_engine_and_others_go_on() -> None:
    run = simulate("t=0.2 engine=0 loads=hung stores=hung", sticky=True)
    tally, other = tallies(run)
    assert list(run.ended) == [0]
    assert tally.answered < tally.requests
    assert other.answered == other.requests
    assert run.talks_over == TRAFFIC.conversations


def test_a_limit_stops_the_questions_and_not_the_answers() -> None:
    run = simulate(steps=60)
    one = total(tallies(run))
    assert run.talks_over < TRAFFIC.conversations
    assert one.requests == one.answered
    assert total(tallies(simulate(seconds=0.4))).requests < one.requests


def test_a_spoilt_store_fails_the_run() -> None:
    with pytest.raises(
        SimFailed, match=r"^seed 0, engine \d, step \d+, at 0\.\d+ s: .*request-\d+ on "
    ):
        simulate("t=0.6 spoil=500", "t=0.6 forget")


def test_a_store_that_answers_with_another_object_fails_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get_first(store: SimStore, key: bytes) -> StoredPage | None:
        return next(iter(store._objects.values())) if key in store else None

    monkeypatch.setattr(SimStore, "get", get_first)
    with pytest.raises(SimFailed) as caught:
        simulate()
    assert isinstance(caught.value.__cause__, OracleError)


def test_a_time_line_tells_a_request_from_arrival_to_answer() -> None:
    run = simulate()
    request_id = next(
        account.request_id
        for engine in run.engines
        for account in engine.accounts.values()
        if account.restored_tokens
    )
    entries = run.journal.entries[request_id]
    order = [entry.event for entry in entries]
    wanted = [
        "arrives",
        "LookupAsked",
        "LookupAnswered",
        "LoadAdmitted",
        "RankSucceeded",
        "computes",
        "first token",
        "RequestFinished",
        "has its answer",
    ]
    places = [order.index(event) for event in wanted]
    assert places == sorted(places)
    assert [entry.time_s for entry in entries] == sorted(entry.time_s for entry in entries)
    assert entries[order.index("LoadAdmitted")].state == "LOADING"
    assert entries[order.index("computes")].state == "RUNNING"


def test_deadlines_are_told_too() -> None:
    run = simulate("lookups=silent", traffic=Traffic(conversations=3))
    assert "deadline" in events(run)


def test_a_preempted_request_says_so() -> None:
    traffic = Traffic(conversations=30, rate_per_s=100.0)
    run = simulate(traffic=traffic, engines=1, blocks=58, seed=2)
    (tally,) = tallies(run)
    assert tally.preemptions
    assert "preempts" in events(run)
    assert tally.requests == tally.answered


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"blocks": 20}, "--blocks 20 is too few for conversations of up to 208 tokens; give at"),
        ({"traffic": Traffic(turns=(1, 200))}, "longer than the 4096 of the simulated model"),
        ({"step_tokens": 8}, "--step-tokens 8 is too few; give at least 16"),
        ({"options": {"socket_dir": "x"}}, "--option socket_dir is not simulated; write one of"),
        ({"options": {"timeout_ms": 0}}, "timeout_ms is 0"),
        ({"faults": [parse_fault("engine=2 dead")]}, "there is no engine 2"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(plan: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SimRun(SimPlan(**plan))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)

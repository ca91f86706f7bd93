# SPDX-License-Identifier: Apache-2.0
"""Every state that the lifecycle core can reach within small bounds is visited, and is right.

``exhaustive_bounds`` says what is searched, ``exhaustive_rules`` and ``exhaustive_space`` what must
hold. That the search can fail is shown on cores that are broken; that its small values mean what
they should, on cores that live through long random histories.
"""

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from exhaustive import Counterexample, Searched, search
from exhaustive_bounds import EVERY_CHANGE, NIGHTLY
from exhaustive_broken import BROKEN
from exhaustive_space import Lifecycle
from exhaustive_world import Bounds

from umbp.fsm import Core, RequestContext, TransferLease
from umbp.fsm.table import LEASE_TABLE, REQUEST_TABLE, STAY

pytestmark = pytest.mark.pure

SEARCHES = dict(EVERY_CHANGE)
if os.environ.get("UMBP_HYPOTHESIS_PROFILE") == "nightly":
    SEARCHES |= NIGHTLY
WALK_STEPS = 6000


@functools.cache
def searched(name: str) -> tuple[Lifecycle, Searched]:
    expected = SEARCHES[name]
    space = Lifecycle(expected.bounds)
    return space, search(space, expected.states)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_search_ends_and_counts(name: str) -> None:
    _, found = searched(name)
    expected = SEARCHES[name]
    note_proof(name, found)
    counted = (found.states, found.transitions, found.depth)
    assert counted == (expected.states, expected.transitions, expected.depth)


def note_proof(name: str, found: Searched) -> None:
    """Adds what was searched to the file that collects proofs, if there is one."""
    path = os.environ.get("UMBP_PROOF_FILE")
    if path:
        record = {"search": name, "states": found.states, "transitions": found.transitions}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def test_every_row_of_the_tables_is_taken_and_nothing_else() -> None:
    rows = {
        (source, row.event, source if row.dest == STAY else row.dest)
        for row in (*REQUEST_TABLE, *LEASE_TABLE)
        for source in row.sources
    }
    taken: set[Any] = set().union(*(searched(name)[0].rows for name in SEARCHES))
    assert {_brief(row) for row in taken ^ rows} == set()


def _brief(row: tuple[Any, type[Any], Any]) -> str:
    source, event, dest = row
    return f"{source.name} {event.__name__} {dest.name}"


# ---------------------------------------------------------------- the search can fail


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_core_is_found_by_the_shortest_way(name: str) -> None:
    broken = BROKEN[name]
    bounds = Bounds(requests=1, stalls=True, arrivals="arriving" in name, lazy="free" in name)
    with pytest.raises(Counterexample) as caught:
        search(Lifecycle(bounds, broken.make_core), 20_000)
    assert broken.says in str(caught.value)
    assert len(caught.value.path) == broken.steps


def test_a_counterexample_can_be_read() -> None:
    with pytest.raises(Counterexample) as caught:
        search(
            Lifecycle(Bounds(requests=1, ranks=1), BROKEN["preemption frees pins"].make_core),
            20_000,
        )
    assert str(caught.value) == STORY


STORY = """\
pins_are_those_of_stores_and_held_loads does not hold. \
A pin too many is memory lost; a pin too few is a block reused while it is read.
  1. a is asked for with 0 tokens of its own: looked up
       a is LOOKUP, its question is open
       epoch 0, pinned blocks: 0, tables: {}
  2. a is admitted to compute from token 0
       a is RUNNING
       epoch 0, pinned blocks: 0, tables: {'a': [0]}
  3. a fills its blocks up to token 4: they are stored
       a is RUNNING, planned up to token 4
       store 3 of a is SUBMITTED, blocks [0]
       epoch 0, pinned blocks: 1, tables: {'a': [0]}
  4. a is preempted
       a is PREEMPTED, planned up to token 4
       store 3 of a is SUBMITTED, blocks [0]
       epoch 0, pinned blocks: 0, tables: {}"""


# ---------------------------------------------------------------- values mean what they should


@pytest.mark.parametrize("name", SEARCHES)
def test_cores_with_long_histories_go_the_same_ways(name: str) -> None:
    space, found = searched(name)
    rng = random.Random(name)
    world = space.new_world()
    world.choose_rank = rng.choice
    state = space.codec.encode(world)
    for _ in range(WALK_STEPS):
        actions = list(space.codec.decode(state).actions())
        assert list(world.actions()) == actions
        action = rng.choice(actions)
        world.do(action)
        after = space.codec.encode(world)
        assert after in found.numbers
        assert after == space.follow(state, action)
        state = after


def test_nothing_that_a_core_keeps_is_forgotten_by_the_values() -> None:
    """Whoever adds a field says in ``exhaustive_codec`` what becomes of it."""
    fields = (*RequestContext.__match_args__, "", *TransferLease.__match_args__)
    assert " ".join(fields).split("  ") == [REQUEST_FIELDS, LEASE_FIELDS]
    assert " ".join(vars(Core(Bounds().limits()))) == CORE_FIELDS


REQUEST_FIELDS = (
    "request_id source generation epoch state deadline_s wake_s local_tokens question_id "
    "hit_end_tokens hit answered_s load_job_id load_barred store_barred planned_tokens "
    "store_end_tokens open_leases"
)
LEASE_FIELDS = (
    "job_id request generation kind epoch parts block_count begin_tokens end_tokens ranks_left "
    "ranks_stalled ranks_arriving pinned synchronous failed attempted broken state deadline_s "
    "wake_s"
)
CORE_FIELDS = (
    "limits epoch requests leases filling counters quarantine deadlines pinned_blocks sync_loads "
    "local_cache_tainted now_s _all_ranks _table _submitted_s _out emit next_id _handlers"
)

# SPDX-License-Identifier: Apache-2.0
"""The simulation itself: it repeats itself, shares objects, and can find what is wrong."""

import attrs
import pytest

from umbp.connector.worker import WorkerSide
from umbp.sim.driver import run_random, settle
from umbp.sim.engine import SimEngine
from umbp.sim.faults import CALM, LATE_ARRIVALS, TransferFault
from umbp.sim.memory import OracleError
from umbp.sim.models import EngineOptions, ModelKind, sim_model
from umbp.sim.requests import SimRequest
from umbp.sim.site import SimWorld

pytestmark = pytest.mark.usefixtures("quiet_simulation")

PROMPT = list(range(34))


def world_of(kind: ModelKind = ModelKind.DENSE, **options: object) -> SimWorld:
    chosen = attrs.evolve(EngineOptions(kind=kind, num_blocks=40, max_pinned_percent=100))
    return SimWorld(sim_model(attrs.evolve(chosen, **options)))


def test_equal_seeds_take_equal_courses() -> None:
    assert run_random(7) == run_random(7)
    assert run_random(7).digest != run_random(8).digest


@pytest.mark.parametrize("kind", ModelKind)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_engine_restores_what_the_first_has_stored(kind: ModelKind, ranks: int) -> None:
    world = world_of(kind, ranks=ranks)
    for restored in (False, True):
        engine = SimEngine(world)
        engine.add(PROMPT, 4)
        engine.drain()
        assert bool(engine.counters()["tokens_restored"]) is restored
        engine.close()


def test_a_read_of_a_spoilt_block_is_found() -> None:
    engine = SimEngine(world_of())
    engine.add(PROMPT, 8)
    work = engine.schedule().work[0]
    engine.complete()
    engine.site.memories[0].scribble(work.table[0][2])
    with pytest.raises(OracleError, match="is not the KV of tokens 8 to 12"):
        engine.drain()


def test_a_source_that_is_overwritten_before_its_store_ends_is_found() -> None:
    engine = SimEngine(world_of())
    engine.add(PROMPT, 1)
    work = engine.schedule().work[0]
    engine.execute()
    engine.site.memories[0].scribble(work.table[0][0])
    with pytest.raises(OracleError, match="somebody else's"):
        engine.world.clock.advance(1.0)


def test_a_pin_that_is_given_back_early_is_found() -> None:
    engine = SimEngine(world_of())
    engine.world.faults.plan = attrs.evolve(CALM, stores=(TransferFault.HELD,))
    engine.add(PROMPT, 1)
    table = engine.schedule().work[0].table
    engine.complete()
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.free_blocks([pool.blocks[table[0][0]]] * 2)
    with pytest.raises(OracleError, match="1 pins and 0 references"):
        engine.step()


def loading(world: SimWorld) -> tuple[SimEngine, SimRequest]:
    """Brings an engine to where a load is said to have ended, and its last bytes are to come."""
    engine = SimEngine(world)
    engine.add(PROMPT, 1)
    engine.drain()
    engine.forget()
    world.faults.plan = attrs.evolve(LATE_ARRIVALS, arrival_s=(0.5, 0.5))
    request = engine.add(PROMPT, 1)
    while not engine.loads_arriving:
        engine.step()
    return engine, request


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_that_arrives_is_waited_for_by_the_step_that_reads_it(ranks: int) -> None:
    engine, request = loading(world_of(ranks=ranks))
    began_s = engine.world.clock.now()
    while not request.finished:
        engine.step()
    assert engine.world.clock.now() - began_s < 0.5
    assert engine.loads_arriving
    engine.drain()
    assert engine.counters()["loads_arriving"] == 1


def test_a_step_that_does_not_wait_for_a_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSide, "_order_arrivals", lambda self: None)
    engine, _ = loading(world_of())
    with pytest.raises(OracleError, match="is not the KV of tokens 4 to 8"):
        engine.drain()


def test_blocks_that_are_freed_before_a_load_has_arrived_are_found() -> None:
    engine, request = loading(world_of())
    engine.abort(request.request_id)
    (lease,) = engine.connector.scheduler_side.core.leases.values()
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.free_blocks([pool.blocks[lease.parts[0].block_ids[0]]])
    with pytest.raises(OracleError, match="is free while a load writes to it"):
        engine.step()


def test_a_pool_that_stalls_is_the_end_of_its_engine() -> None:
    engine = SimEngine(world_of())
    engine.world.faults.plan = attrs.evolve(CALM, stores=(TransferFault.HUNG,))
    engine.add(PROMPT, 60)
    engine.step()
    engine.world.clock.advance(1.0)
    engine.step()
    assert engine.stopped


def test_an_engine_goes_on_without_a_load_that_is_left() -> None:
    world = world_of()
    engine = SimEngine(world)
    engine.add(PROMPT, 1)
    engine.drain()
    engine.forget()
    world.faults.plan = attrs.evolve(CALM, loads=(TransferFault.LEFT,))
    request = engine.add(PROMPT, 1)
    while not request.finished:
        engine.step()
    counters = engine.counters()
    assert (counters["loads_stalled"], counters["leases_open"]) == (1, 1)
    assert counters["tokens_restored"] == 0
    settle(engine)
    assert engine.counters()["leases_open"] == 0


def test_what_is_held_goes_on_when_it_is_revived() -> None:
    engine = SimEngine(world_of())
    engine.world.faults.plan = attrs.evolve(CALM, stores=(TransferFault.HELD,))
    engine.add(PROMPT, 2)
    for _ in range(60):
        engine.step()
    assert engine.has_work()
    assert engine.counters()["leases_stalled"]
    settle(engine)
    assert engine.counters()["stores_settled"]

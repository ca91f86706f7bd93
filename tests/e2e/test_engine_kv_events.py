# SPDX-License-Identifier: Apache-2.0
"""A subscriber of vLLM's own publisher knows what the pool holds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import engine_worker
import pytest
from engine import Engine, EngineSettings, prompt
from engine_process import EngineProcess, Engines
from event_index import EventIndex, endpoints

OBJECT_BYTES = 64 << 10
"""One block of the tiny model: 32 tokens, 4 layers, keys and values of 2 heads of 32 float32."""
ROOM = 20
PROMPTS = [prompt(200, seed=330 + index) for index in range(6)]


@attrs.frozen
class Subscribed:
    """An engine and a subscriber of its events."""

    engine: EngineProcess
    index: EventIndex

    def check(self) -> set[Any]:
        """The subscriber knows exactly the pool's content; returns it."""
        held, stored, removed = self.engine.run(_true_content)
        assert self.index.follow(stored, removed) == held
        return held


@pytest.fixture(params=["alone", "multi"])
def subscribed(
    request: pytest.FixtureRequest, engines: Engines, tmp_path: Path
) -> Iterator[Subscribed]:
    config = endpoints(tmp_path)
    options = {"total_capacity_bytes": ROOM * OBJECT_BYTES, "lookup_instance": request.param}
    settings = EngineSettings(options=options, arguments={"kv_events_config": config})
    if request.param == "multi":
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {"connectors": [settings.transfer_config()]},
        }
        settings = attrs.evolve(settings, transfer=transfer)
    index = EventIndex(config)
    engine = engines.start(settings)
    yield Subscribed(engine, index)
    engine.close()
    index.close()


def test_a_subscriber_knows_what_the_pool_holds(subscribed: Subscribed) -> None:
    engine, index = subscribed.engine, subscribed.index
    engine.answer(PROMPTS[0])
    held = subscribed.check()
    assert len(held) == 200 // 32
    # What is said of a block in host memory is what vLLM says of it on the GPU.
    on_gpu = index.blocks["GPU"]
    assert index.blocks["CPU"] == {block: on_gpu[block] for block in index.blocks["CPU"]}
    assert {one.parent is None for one in on_gpu.values()} == {True, False}

    # Evictions: 36 blocks go through a pool of 20.
    engine.generate(PROMPTS)
    evicted = subscribed.check()
    assert len(evicted) <= ROOM
    assert not held <= evicted
    assert engine.reset_local()
    engine.generate(PROMPTS[:2])
    subscribed.check()

    # A reset: nothing of it is found again, and what comes after is.
    assert engine.reset_all()
    engine.answer(PROMPTS[3])
    held = subscribed.check()
    assert len(held) == 200 // 32
    assert len(index.blocks["CPU"]) == len(held)


def _true_content(engine: Engine) -> tuple[set[Any], int, int]:
    """Returns the findable block hashes in the pool, and blocks announced and withdrawn."""
    connector: Any = engine.scheduler.connector
    connector = getattr(connector, "sub_connectors", [connector])[0]
    events = connector._kv_events
    (held,) = engine.workers(engine_worker.held_hashes, connector.scheduler_side.core.epoch)
    return held, events.stored_count, events.removed_count

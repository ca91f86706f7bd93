# SPDX-License-Identifier: Apache-2.0
"""Metrics in vLLM's own registry, after stores and restores on the real engine."""

import attrs
from engine import Engine, EngineSettings, full_blocks, prompt
from engine_process import EngineProcess, Engines

OBJECT_BYTES = 64 << 10
"""One block of the tiny model: 32 tokens, 4 layers, keys and values of 2 heads of 32 float32."""
TOKENS = prompt(205, seed=350)
COVERED = full_blocks(205)
BLOCKS = COVERED // 32
STORES = 3
"""Steps of 64 tokens that fill a block."""


def exposed(engine: Engine) -> dict[str, float]:
    """Reads what Prometheus would: umbp's series and vLLM's tokens by source, without labels that
    are the same everywhere."""
    import re

    from prometheus_client import REGISTRY, generate_latest

    found: dict[str, float] = {}
    for line in generate_latest(REGISTRY).decode().splitlines():
        if not line.startswith(("vllm:umbp_", "vllm:prompt_tokens_cached_by_source")):
            continue
        name, _, value = line.rpartition(" ")
        if "_created{" in name or "_bucket{" in name:
            continue
        name = re.sub(r'(engine|model_name)="[^"]*",?', "", name.removeprefix("vllm:"))
        name = name.replace(",}", "}")
        assert name not in found, "the same series twice"
        found[name] = float(value)
    return {name: value for name, value in found.items() if value}


def counted(found: dict[str, float]) -> dict[str, float]:
    """Leaves out durations, and gauges of the pool."""
    return {
        name.removeprefix("umbp_"): value
        for name, value in found.items()
        if "_sum{" not in name and "pool_" not in name and name.startswith("umbp_")
    }


def test_exact_values_after_a_store_and_a_restore(engines: Engines) -> None:
    engine = engines.start(EngineSettings())
    engine.answer(TOKENS)
    stored = engine.run(exposed)
    assert counted(stored) == {
        'lookups_started_total{backend="memory"}': 1,
        'lookups_total{backend="memory",result="miss",source="host"}': 1,
        'lookup_seconds_count{backend="memory"}': 1,
        'transfers_started_total{backend="memory",kind="store"}': STORES,
        'transfers_total{backend="memory",kind="store",outcome="settled"}': STORES,
        'store_seconds_count{backend="memory"}': STORES,
        'transferred_bytes_total{backend="memory",kind="store"}': BLOCKS * OBJECT_BYTES,
        'stored_tokens_total{backend="memory"}': COVERED,
    }
    assert stored['umbp_pool_objects{backend="memory",rank="0"}'] == BLOCKS
    assert stored['umbp_pool_used_bytes{backend="memory",rank="0"}'] >= BLOCKS * OBJECT_BYTES
    assert stored['umbp_pool_capacity_bytes{backend="memory",rank="0"}'] == 1 << 26

    assert engine.reset_local()
    assert engine.answer(TOKENS).external_tokens == COVERED
    restored = engine.run(exposed)
    assert counted(restored) == {
        **counted(stored),
        'lookups_started_total{backend="memory"}': 2,
        'lookups_total{backend="memory",result="hit",source="host"}': 1,
        'lookup_seconds_count{backend="memory"}': 2,
        'transfers_started_total{backend="memory",kind="load"}': 1,
        'transfers_total{backend="memory",kind="load",outcome="settled"}': 1,
        'load_seconds_count{backend="memory"}': 1,
        'transferred_bytes_total{backend="memory",kind="load"}': BLOCKS * OBJECT_BYTES,
        'restored_tokens_total{backend="memory",source="host"}': COVERED,
    }
    assert restored['umbp_load_seconds_sum{backend="memory"}'] > 0
    by_source = 'prompt_tokens_cached_by_source_total{source="host"}'
    # vLLM 0.31 has no such counter.
    assert restored.get(by_source, COVERED) == COVERED

    assert engine.reset_all()
    engine.answer(TOKENS)
    reset = engine.run(exposed)
    assert reset['umbp_resets_total{backend="memory"}'] == 1
    assert reset['umbp_epoch{backend="memory"}'] == 1
    engine.close()


def test_two_connectors_beside_each_other_add_up(engines: Engines) -> None:
    engine = _start_two(engines)
    engine.answer(TOKENS)
    found = counted(engine.run(exposed))
    assert found['transfers_total{backend="memory",kind="store",outcome="settled"}'] == 2 * STORES
    assert found['stored_tokens_total{backend="memory"}'] == 2 * COVERED
    assert engine.reset_local()
    assert engine.answer(TOKENS).external_tokens == COVERED
    found = counted(engine.run(exposed))
    # vLLM asks both, and loads from the first.
    assert found['lookups_total{backend="memory",result="hit",source="host"}'] == 2
    assert found['restored_tokens_total{backend="memory",source="host"}'] == COVERED
    engine.close()


def _start_two(engines: Engines) -> EngineProcess:
    inner = [
        EngineSettings(options={"lookup_instance": name}).transfer_config() for name in ("a", "b")
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": inner},
    }
    return engines.start(attrs.evolve(EngineSettings(), transfer=transfer))

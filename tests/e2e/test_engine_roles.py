# SPDX-License-Identifier: Apache-2.0
"""Engines that only store, only load, or never look up; and one that is told only a name."""

from typing import Any

import pytest
from engine import EngineSettings, full_blocks, prompt
from engine_process import Engines

TOKENS = prompt(205, seed=250)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool, bool]] = {
    # transfer configuration, options, looks up, stores
    "producer": ({"kv_role": "kv_producer"}, {}, False, True),
    "consumer": ({"kv_role": "kv_consumer"}, {}, True, False),
    "no_lookup": ({}, {"enable_lookup": False}, False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_half_of_the_work(engines: Engines, case: str) -> None:
    transfer, options, looks_up, stores = CASES[case]
    engine = engines.start(EngineSettings(transfer=transfer, options=options))
    cold = engine.answer(TOKENS)
    assert engine.reset_local()
    again = engine.answer(TOKENS)
    assert again.tokens == cold.tokens
    assert again.external_tokens == 0
    counters = engine.counters()
    assert (counters["lookups"] > 0) == looks_up
    assert (counters["tokens_stored"] > 0) == stores
    assert engine.unrest() == []
    engine.close()


def test_the_name_of_the_connector_is_enough(engines: Engines) -> None:
    engine = engines.start(EngineSettings(transfer={"kv_connector_module_path": None}))
    engine.answer(TOKENS)
    assert engine.reset_local()
    assert engine.answer(TOKENS).external_tokens == full_blocks(205)
    engine.close()

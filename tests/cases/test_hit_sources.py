# SPDX-License-Identifier: Apache-2.0
"""vLLM counts tokens that were restored under the place that the backend keeps them in."""

import pytest
from scheduler_rig import MakeRig

from umbp.backends.memory import MemoryBackend

sources = pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.31 does not tell sources of hits apart"
)

PROMPT = range(100, 150)
RESTORED = 48  # Tokens of whole blocks.


@pytest.mark.parametrize("source", ["host", "p2p"])
def test_hits_are_counted_by_their_source(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(MemoryBackend, "hit_source", source, raising=False)
    rig = make_rig(counts=True)
    rig.serve("a", PROMPT)
    rig.forget_local()
    rig.add("b", PROMPT)
    rig.schedule()
    # Taken before the step ends, when vLLM hands them over.
    counted = rig.scheduler.connector_prefix_cache_stats.hits_by_source
    assert counted == {sources.CacheHitSource(source): RESTORED}
    rig.execute()
    rig.run()
    rig.check_at_rest()

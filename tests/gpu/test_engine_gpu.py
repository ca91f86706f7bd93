# SPDX-License-Identifier: Apache-2.0
"""vLLM's real engine on a GPU: what is restored gives the tokens of a GPU prefix hit.

Random weights whose output depends on the KV, prefill in chunks, and decode steps replayed from
captured graphs. A cold prompt goes through other kernels than a hit, and may round otherwise.
"""

from collections.abc import Iterator

import pytest
import torch
from engine import Answer, full_blocks, prompt
from engine_process import EngineProcess, Engines
from gpu_engines import on_a_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(params=["memory", "embedded"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that moves GPU memory without a server."""
    if request.param == "embedded":
        request.getfixturevalue("mori")
    return str(request.param)


@pytest.fixture
def llama(engines: Engines, backend: str) -> Iterator[EngineProcess]:
    """An engine with attention alone; it must be at rest after the test."""
    settings = on_a_gpu(backend)
    yield engines.shared(settings)
    assert engines.release(settings) == []


@pytest.fixture
def hybrid(engines: Engines, backend: str, model: str) -> Iterator[EngineProcess]:
    """An engine with recurrent state beside attention; it must be at rest after the test."""
    settings = on_a_gpu(backend, model)
    yield engines.shared(settings)
    assert engines.release(settings) == []


def restore(engine: EngineProcess, tokens: list[int]) -> tuple[Answer, int]:
    """Loses the GPU's cache and all KV, answers, and returns how many loads failed, too."""
    before = engine.counters()
    assert engine.reset_local()
    answer = engine.answer(tokens)
    after = engine.counters()
    restored = after["tokens_restored"] - before["tokens_restored"]
    assert restored == answer.external_tokens
    return answer, after["loads_failed"] - before["loads_failed"]


@pytest.mark.parametrize("token_count", [31, 32, 33, 639, 640, 641, 2000])
def test_restored_answer_equals_the_gpu_prefix_hits(llama: EngineProcess, token_count: int) -> None:
    tokens = prompt(token_count, seed=token_count)
    cold = llama.answer(tokens)
    hit = llama.answer(tokens)
    assert (cold.local_tokens, cold.external_tokens) == (0, 0)
    assert (hit.local_tokens, hit.external_tokens) == (full_blocks(token_count), 0)
    assert len(set(hit.tokens)) > 5, "output does not vary, so it proves nothing"
    restored, loads_failed = restore(llama, tokens)
    assert loads_failed == 0
    assert (restored.local_tokens, restored.external_tokens) == (0, full_blocks(token_count))
    assert restored.tokens == hit.tokens


def test_store_and_restore_again_after_a_reset_of_everything(llama: EngineProcess) -> None:
    tokens = prompt(500, seed=99)
    llama.answer(tokens)
    hit = llama.answer(tokens)
    assert llama.reset_all()
    again = llama.answer(tokens)
    assert (again.local_tokens, again.external_tokens) == (0, 0)
    restored, loads_failed = restore(llama, tokens)
    assert loads_failed == 0
    assert (restored.external_tokens, restored.tokens) == (full_blocks(500), hit.tokens)


def test_many_requests_restored_at_once(llama: EngineProcess) -> None:
    """Sums round otherwise in another batch, so each answer is taken alone, on a GPU hit.

    Before the loss that hit is on KV that was computed, after it on KV that was restored.
    """
    shared = prompt(300, seed=1)
    prompts = [shared + prompt(200 + seed, seed=seed) for seed in range(24)]
    llama.generate(prompts, max_tokens=4)
    computed = [llama.answer(tokens) for tokens in prompts]
    assert all(answer.local_tokens for answer in computed)
    before = llama.counters()
    assert llama.reset_local()
    llama.generate(prompts, max_tokens=4)
    after = llama.counters()
    assert after["tokens_restored"] - before["tokens_restored"] > 24 * 200
    assert after["loads_failed"] == before["loads_failed"]
    assert [llama.answer(tokens) for tokens in prompts] == computed


@pytest.mark.parametrize(
    ("model", "token_count"),
    [
        *(("lfm", count) for count in (129, 257, 305, 1500)),
        *(("qwen_next", count) for count in (641, 657, 1281, 1900)),
    ],
)
def test_a_hybrid_is_restored_where_the_prefix_cache_ends(
    hybrid: EngineProcess, token_count: int
) -> None:
    tokens = prompt(token_count, seed=token_count)
    hybrid.answer(tokens)
    # What is found may grow once: vLLM caches the state where two prompts part.
    hybrid.answer(tokens)
    hit = hybrid.answer(tokens)
    restored, loads_failed = restore(hybrid, tokens)
    assert loads_failed == 0
    assert restored.external_tokens == hit.local_tokens > 0
    assert restored.tokens == hit.tokens
    assert len(set(hit.tokens)) > 5, "output does not vary, so it proves nothing"

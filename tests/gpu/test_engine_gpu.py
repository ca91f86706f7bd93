# SPDX-License-Identifier: Apache-2.0
"""vLLM's real engine on a GPU: what is restored gives the tokens of a GPU prefix hit.

Random weights whose output depends on the KV, and decode steps replayed from captured graphs. One
engine after another in this process, for each backend and model.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BLOCK_TOKENS: Final = 16
OUTPUT_TOKENS: Final = 24
SETTLE_S: Final = 30.0


@attrs.frozen
class Case:
    """An engine that tests want.

    Attributes:
        backend: Name of the backend.
        model: Name of the model.
    """

    backend: str
    model: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's engine in which the models differ."""
        if self.model == "llama":
            return {"block_size": BLOCK_TOKENS, "max_model_len": 4096}
        return {
            "mamba_cache_mode": "align",
            "prefix_match_unit": 16,
            "max_model_len": 2048,
            "num_gpu_blocks_override": 64,
        }


def on_each_backend(model: str) -> pytest.MarkDecorator:
    """Has a test run on an engine with this model for every backend that moves GPU memory."""
    cases = [Case(backend, model) for backend in ("memory", "embedded")]
    return pytest.mark.parametrize(
        "engine", cases, indirect=True, ids=[f"{case.model}-{case.backend}" for case in cases]
    )


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    case: Case = request.param
    if case.backend == "embedded":
        request.getfixturevalue("mori")
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setenv("UMBP_STRICT", "1")
    try:
        llm = _start(case, tmp_path_factory.mktemp("model"))
        yield llm
        llm.llm_engine.engine_core.shutdown()
    finally:
        patch.undo()


def _start(case: Case, folder: Path) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from tests.e2e.tiny_models import LLAMA_WIDE
    from umbp.cli.random_model import QWEN_NEXT, make_model

    model = make_model(folder, LLAMA_WIDE if case.model == "llama" else QWEN_NEXT)
    try:
        return LLM(
            model=str(model),
            skip_tokenizer_init=True,
            seed=0,
            dtype="bfloat16",
            gpu_memory_utilization=0.2,
            max_num_batched_tokens=512 if case.model == "llama" else 2048,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            kv_transfer_config=KVTransferConfig(
                kv_connector="UMBPStoreConnector",
                kv_connector_module_path="umbp.connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "backend": case.backend,
                    "total_capacity_bytes": 1 << 30,
                },
            ),
            **case.arguments,
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if case.model != "llama" and "flash" in str(error).lower():
            pytest.skip(f"this machine's FlashAttention does not run {case.model}: {error}")
        raise


class Session:
    """One engine, driven a request at a time."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector

    def answer(self, prompt: list[int]) -> tuple[list[int], int]:
        """Returns the output tokens and how many of the prompt were not computed."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=OUTPUT_TOKENS, detokenize=False, ignore_eos=True
        )
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        self.settle()
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    def batch(self, prompts: list[list[int]]) -> None:
        """Runs many prompts at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.llm.generate(requests, sampling, use_tqdm=False)
        self.settle()

    def settle(self) -> None:
        """Steps until every store has ended, so that no block is pinned."""
        until = time.monotonic() + SETTLE_S
        while self.scheduler.has_requests():
            assert time.monotonic() < until
            self.core.step_fn()
        assert self.connector.counters()["blocks_pinned"] == 0

    def lose_gpu_cache(self) -> None:
        """Empties vLLM's prefix cache and overwrites all KV, so that nothing old can be read.

        By noise and not by NaN: recurrent state that is not to be read is multiplied by zero.
        """
        assert self.llm.reset_prefix_cache()
        torch.cuda.synchronize()
        for cache in self.core.model_executor.driver_worker.worker.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, list | tuple) else (cache,):
                whole = torch.empty(0, dtype=torch.bfloat16, device=tensor.device)
                whole.set_(tensor.untyped_storage())
                whole.normal_(std=3.0)
        torch.cuda.synchronize()


@pytest.fixture
def session(engine: Any) -> Session:
    return Session(engine)


def prompt_of(tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 500) for _ in range(tokens)]


@on_each_backend("llama")
@pytest.mark.parametrize("tokens", [16 * 40 - 1, 16 * 40, 16 * 40 + 1, 2000])
def test_restored_answer_equals_the_gpu_prefix_hits(session: Session, tokens: int) -> None:
    prompt = prompt_of(tokens, seed=tokens)
    cold, cold_cached = session.answer(prompt)
    hit, hit_cached = session.answer(prompt)
    before = session.connector.counters()
    session.lose_gpu_cache()
    restored, restored_cached = session.answer(prompt)
    after = session.connector.counters()
    assert cold_cached == 0
    assert hit_cached > 0
    assert restored_cached == hit_cached
    assert after["tokens_restored"] - before["tokens_restored"] == hit_cached
    assert after["loads_failed"] == 0
    assert len(set(cold)) > 5, "output does not vary, so it proves nothing"
    # A cold prompt goes through other kernels than a hit, and may round otherwise.
    assert restored == hit


@on_each_backend("llama")
def test_store_and_restore_again_after_a_reset_of_everything(session: Session) -> None:
    prompt = prompt_of(500, seed=99)
    session.answer(prompt)
    hit, _ = session.answer(prompt)
    assert session.llm.reset_prefix_cache(reset_connector=True)
    _, again_cached = session.answer(prompt)
    session.lose_gpu_cache()
    restored, restored_cached = session.answer(prompt)
    assert again_cached == 0
    assert restored_cached > 0
    assert restored == hit


@on_each_backend("llama")
def test_many_requests_restored_at_once(session: Session) -> None:
    """Sums round otherwise in another batch, so each answer is taken alone, on a GPU hit.

    Before the loss that hit is on KV that was computed, after it on KV that was restored.
    """
    shared = prompt_of(300, seed=1)
    prompts = [shared + prompt_of(200 + seed, seed=seed) for seed in range(24)]
    session.batch(prompts)
    computed = [session.answer(prompt) for prompt in prompts]
    before = session.connector.counters()
    session.lose_gpu_cache()
    session.batch(prompts)
    after = session.connector.counters()
    assert after["tokens_restored"] - before["tokens_restored"] > 24 * 200
    assert after["loads_failed"] == 0
    assert [session.answer(prompt) for prompt in prompts] == computed


@on_each_backend("qwen_next")
def test_a_hybrid_model_is_restored_where_the_prefix_cache_ends(session: Session) -> None:
    """Gated delta nets beside attention; prompts that end inside, at and after blocks."""
    hits = []
    for tokens in (303, 639, 641, 1281, 1900):
        prompt = prompt_of(tokens, seed=tokens)
        _, cold_cached = session.answer(prompt)
        # What is found may grow once: vLLM caches the state where two prompts part.
        session.answer(prompt)
        hit, hit_cached = session.answer(prompt)
        before = session.connector.counters()
        session.lose_gpu_cache()
        restored, restored_cached = session.answer(prompt)
        after = session.connector.counters()
        assert cold_cached == 0
        assert restored_cached == hit_cached, tokens
        assert after["tokens_restored"] - before["tokens_restored"] == hit_cached
        assert after["loads_failed"] == 0
        assert restored == hit, tokens
        assert len(set(restored)) > 5, "output does not vary, so it proves nothing"
        hits.append(hit_cached)
    assert hits[-1] > 0

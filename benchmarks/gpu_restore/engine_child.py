# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own, asked for one measurement at a time."""

import os
import random
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import attrs

VOCABULARY: Final = 120_000
BLOCK_TOKENS: Final = 16
LEFT_TOKENS: Final = BLOCK_TOKENS // 2
"""What a prompt has beyond its whole blocks, so that after a hit every engine computes as much.

Some connectors also bring the last token of a prompt that ends with a block, and vLLM then takes a
captured decode step where the prefix cache computes a block."""
SETTLE_S: Final = 60.0
QUIET_STEPS: Final = 5


@attrs.frozen
class Connector:
    """A connector to measure.

    Attributes:
        name: For people.
        transfer_config: Keywords of vLLM's ``KVTransferConfig``; None for no connector.
    """

    name: str
    transfer_config: dict[str, Any] | None


@attrs.frozen
class EngineShape:
    """What every engine has, so that only the connector differs.

    Attributes:
        model: Folder of the model; with dummy weights, since only times are compared.
        device: ``"cuda"`` or ``"cpu"``.
        prompt_tokens: Tokens of a prompt that are stored and restored, whole blocks.
        kv_bytes: KV memory of the engine.
        tensor_parallel: Number of ranks.
    """

    model: str
    device: str
    prompt_tokens: int
    kv_bytes: int
    tensor_parallel: int = 1


def prompt_of(tokens: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Returns a prompt that shares no prefix with that of another seed."""
    source = random.Random(seed)
    return [source.randrange(10, vocabulary) for _ in range(tokens)]


class MeasuredEngine:
    """vLLM's engine in this process, and the times of what it does.

    Args:
        shape: What every engine has.
        connector: What this one has.
    """

    def __init__(self, shape: EngineShape, connector: Connector) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM
        from vllm.config import KVTransferConfig

        keywords: dict[str, Any] = {}
        if shape.device == "cuda":
            # Captured decode graphs without torch.compile, which would take minutes.
            keywords["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            keywords["gpu_memory_utilization"] = 0.1
            keywords["block_size"] = BLOCK_TOKENS
            keywords["kv_cache_memory_bytes"] = shape.kv_bytes
        else:
            keywords["enforce_eager"] = True
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, shape.kv_bytes >> 30))
        if connector.transfer_config is not None:
            keywords["kv_transfer_config"] = KVTransferConfig(**connector.transfer_config)
        self._shape = shape
        self._llm = LLM(
            model=shape.model,
            load_format="dummy",  # Times are compared, and no output.
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=shape.prompt_tokens + 1024,
            max_num_batched_tokens=shape.prompt_tokens + 1024,
            max_num_seqs=64,
            seed=0,
            tensor_parallel_size=shape.tensor_parallel,
            **keywords,
        )
        self._vocabulary = self._llm.llm_engine.model_config.get_vocab_size()
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._next_id = 0

    def prompt(self, seed: int) -> list[int]:
        """Returns the long prompt of a seed."""
        return prompt_of(self._shape.prompt_tokens + LEFT_TOKENS, seed, self._vocabulary)

    def answer(self, seed: int) -> tuple[float, int]:
        """Returns the seconds until a prompt's first token, and how many were not computed."""
        prompt = self.prompt(seed)
        begun_s = time.perf_counter()
        cached = self._run(prompt)
        return time.perf_counter() - begun_s, cached

    def settle(self) -> None:
        """Steps until nothing is left to store, whatever the connector."""
        until_s = time.monotonic() + SETTLE_S
        while self._core.scheduler.has_requests():
            if time.monotonic() > until_s:
                raise RuntimeError("the engine does not come to rest")
            self._core.step_fn()
        # Some connectors look for the end of a store only in a later step.
        for index in range(QUIET_STEPS):
            self._run(prompt_of(20, -1 - index, self._vocabulary))
            time.sleep(0.01)

    def lose_prefix_cache(self) -> None:
        """Empties the engine's own prefix cache."""
        until_s = time.monotonic() + SETTLE_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > until_s:
                raise RuntimeError("the prefix cache cannot be emptied: blocks stay in use")
            self.settle()

    def round(self, seed: int) -> dict[str, Any]:
        """Answers one prompt cold, from the prefix cache, and after that was emptied."""
        cold_s, cold_cached = self.answer(seed)
        self.settle()
        hit_s, hit_cached = self.answer(seed)
        self.settle()
        self.lose_prefix_cache()
        restored_s, restored_cached = self.answer(seed)
        self.settle()
        self.lose_prefix_cache()
        return {
            "cold_s": cold_s,
            "cold_cached": cold_cached,
            "hit_s": hit_s,
            "hit_cached": hit_cached,
            "restored_s": restored_s,
            "restored_cached": restored_cached,
        }

    def gaps(self, seeds: Sequence[int], running: int, output_tokens: int) -> list[float]:
        """Returns the times between tokens of running requests while others arrive.

        Args:
            seeds: Prompts that arrive, evenly spread, each for one token.
            running: Requests that decode all the time.
            output_tokens: Tokens that each of them decodes.
        """
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(
            temperature=0, max_tokens=output_tokens, detokenize=False, ignore_eos=True
        )
        once = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
        own = set()
        for index in range(running):
            own.add(self._add(prompt_of(128, 10_000 + index, self._vocabulary), sampling))
        prompts = [self.prompt(seed) for seed in seeds]
        arrivals = {
            (index + 1) * output_tokens // (len(prompts) + 1): prompt
            for index, prompt in enumerate(prompts)
        }
        gaps: list[float] = []
        last_s: dict[str, float] = {}
        decoded = 0
        while engine.has_unfinished_requests():
            outputs = [one for one in engine.step() if one.request_id in own]
            now_s = time.perf_counter()
            for output in outputs:
                if output.request_id in last_s:
                    gaps.append(now_s - last_s[output.request_id])
                last_s[output.request_id] = now_s
            if outputs:
                decoded += 1
                if decoded in arrivals:
                    self._add(arrivals.pop(decoded), once)
        self.settle()
        return gaps

    def prepare(self, seeds: Sequence[int]) -> None:
        """Has prompts stored, and in the prefix cache."""
        for seed in seeds:
            self.answer(seed)
            self.settle()

    def close(self) -> None:
        """Ends the engine."""
        self._llm.llm_engine.engine_core.shutdown()

    def _add(self, prompt: list[int], sampling: Any) -> str:
        self._next_id += 1
        name = f"measured-{self._next_id}"
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def _run(self, prompt: list[int]) -> int:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return int(output.num_cached_tokens or 0)


def serve(connection: Connection, shape: EngineShape, connector: Connector, log_path: str) -> None:
    """Starts an engine and answers calls ``(method, arguments)``; the body of a process."""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        engine = MeasuredEngine(shape, connector)
        connection.send((None, None))
        while True:
            method, arguments = connection.recv()
            connection.send((None, getattr(engine, method)(*arguments)))
            if method == "close":
                return
    except EOFError:
        return
    except BaseException as error:
        traceback.print_exc()
        connection.send((f"{type(error).__name__}: {error}", None))

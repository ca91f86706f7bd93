# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler with one connector whose hooks are timed; no model and no GPU."""

import copy
import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 16
WINDOW_TOKENS = 1024
TOKENS_MAX = 1 << 18
STEPS_MAX = 400
"""No measurement takes a tenth of it."""

MATCH = "get_num_new_matched_tokens"
ADMIT = "update_state_after_alloc"
PLAN = "build_connector_meta"
ANSWER = "update_connector_output"
HOOKS = (MATCH, ADMIT, PLAN, ANSWER)

_CONFIG = {
    "architectures": ["NeverRunForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 200_000,
    "max_position_embeddings": TOKENS_MAX,
}


@attrs.frozen
class Shape:
    """What an engine is built for.

    Attributes:
        groups: KV cache groups: one of full attention; each other one of a sliding window.
        ranks: Tensor-parallel workers.
        tokens: The longest prompt.
        requests: Requests that run at once.
        layers: Layers of each group.
        blocks: KV blocks; None: enough for two of the longest prompts.
    """

    groups: int = 1
    ranks: int = 1
    tokens: int = 8192
    requests: int = 8
    layers: int = 1
    blocks: int | None = None

    @property
    def block_count(self) -> int:
        """KV blocks."""
        return self.blocks or self.groups * 2 * (self.tokens // BLOCK_TOKENS) + 1024


class Connector(Protocol):
    """A connector to measure, and what stands for its workers.

    Attributes:
        name: How it is called in results.
        module: Where its class is.
        type_name: Its class.
        finds_any: Prompts that were never stored may be found, too: what plays the store finds all.
    """

    name: str
    module: str
    type_name: str
    finds_any: bool

    def options(self, shape: Shape) -> dict[str, Any]:
        """Returns ``kv_connector_extra_config``."""

    def open(self, engine: "PlaneEngine") -> None:
        """Makes what stands for the workers."""

    def execute(self, metadata: Any) -> tuple[list[Any], set[str]]:
        """Lets all ranks do a step, and all of its transfers end.

        Returns:
            What each rank says, and the requests whose load has ended.
        """

    def expect(self, *, found: bool) -> None:
        """Says whether the prompts that come next are to be found."""

    def close(self) -> None:
        """Gives everything back."""


class NeverRunForCausalLM(torch.nn.Module):
    """Has what vLLM looks for in the class of a model that generates text."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Does nothing."""
        return input_ids

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Does nothing."""
        return input_ids

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Does nothing."""
        return hidden_states


@functools.cache
def _model_config() -> ModelConfig:
    # vLLM would look into a class of its own in another process.
    ModelRegistry.register_model("NeverRunForCausalLM", NeverRunForCausalLM)
    with tempfile.TemporaryDirectory(prefix="umbp-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
        return ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=TOKENS_MAX
        )


def _specs(shape: Shape) -> list[Any]:
    page = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    window = SlidingWindowSpec(**page, sliding_window=WINDOW_TOKENS)
    return [FullAttentionSpec(**page), *[window] * (shape.groups - 1)]


def kv_cache_config_of(shape: Shape) -> KVCacheConfig:
    """Describes KV memory to vLLM."""
    groups, tensors = [], []
    for index, spec in enumerate(_specs(shape)):
        names = [f"group{index}.layer{layer}" for layer in range(shape.layers)]
        groups.append(KVCacheGroupSpec(names, spec))
        page_bytes = spec.page_size_bytes
        tensors.append(
            KVCacheTensor(
                size=page_bytes * shape.block_count * shape.layers,
                layers=names,
                layer_stride=page_bytes * shape.block_count,
                block_stride=page_bytes,
            )
        )
    return KVCacheConfig(
        num_blocks=shape.block_count, kv_cache_tensors=tensors, kv_cache_groups=groups
    )


class PlaneEngine:
    """A scheduler, a connector, and requests on their way through them.

    Attributes:
        shape: What it was built for.
        vllm_config: vLLM's configuration.
        kv_cache_config: KV memory as vLLM sees it.
        scheduler: vLLM's scheduler.
        connector: The scheduler's side of the connector.
        took_us: Microseconds of each call of each hook since ``forget``.
        metadata: What the last step had for the workers.
    """

    _serial = 0

    def __init__(self, peer: Connector, shape: Shape, *, log_stats: bool = False) -> None:
        self.shape = shape
        self.vllm_config = _vllm_config(peer, shape)
        self.kv_cache_config = kv_cache_config_of(shape)
        hash_function = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        self.scheduler: Any = Scheduler(
            vllm_config=self.vllm_config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=log_stats,
        )
        self.connector: Any = self.scheduler.connector
        self.took_us: dict[str, list[float]] = defaultdict(list)
        self.metadata: Any = None
        self._peer = peer
        for hook in HOOKS:
            self._time(hook)
        peer.open(self)

    def rank_config(self, rank: int) -> Any:
        """Returns vLLM's configuration as one worker sees it."""
        config = copy.copy(self.vllm_config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        return config

    def kv_caches(self) -> dict[str, torch.Tensor]:
        """Makes KV memory for one worker."""
        return {
            name: torch.zeros(
                (self.shape.block_count, group.kv_cache_spec.page_size_bytes), dtype=torch.uint8
            )
            for group in self.kv_cache_config.kv_cache_groups
            for name in group.layer_names
        }

    # ------------------------------------------------------------ requests and steps

    def add(self, tokens: int, *, first_token: int | None = None, outputs: int = 2) -> Request:
        """Adds a request; prompts of different first tokens have no block in common."""
        PlaneEngine._serial += 1
        first = PlaneEngine._serial if first_token is None else first_token
        request = Request(
            request_id=f"request-{PlaneEngine._serial:08d}",
            prompt_token_ids=[first, *range(1, tokens)],
            sampling_params=SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def forget(self) -> None:
        """Empties vLLM's own prefix cache, and the list of what hooks took."""
        if not self.scheduler.reset_prefix_cache():
            raise RuntimeError("blocks are still in use between two measurements")
        self.took_us.clear()

    def schedule(self) -> Any:
        """Plans a step."""
        return self.scheduler.schedule()

    def complete(
        self, output: Any, answers: Sequence[Any], received: Iterable[str], stats: Any = None
    ) -> Any:
        """Hands the results of a step to the scheduler.

        Args:
            output: vLLM's ``SchedulerOutput`` of the step.
            answers: What each rank says.
            received: Requests whose load has ended.
            stats: What the workers report, joined.

        Returns:
            vLLM's ``EngineCoreOutputs`` by client.
        """
        joined = functools.reduce(lambda one, other: one.aggregate(other), answers or [None])
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        return self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=[[] if requests[one].is_prefill_chunk else [5] for one in ids],
                kv_connector_output=KVConnectorOutput(
                    kv_connector_worker_meta=joined,
                    finished_recving=set(received) or None,
                    kv_connector_stats=stats,
                ),
            ),
        )

    def step(self) -> Any:
        """Plans a step and lets the workers do it; returns vLLM's ``SchedulerOutput``."""
        output = self.schedule()
        self.complete(output, *self._peer.execute(self.metadata))
        return output

    def run(self) -> None:
        """Steps until nothing is left to do.

        Raises:
            RuntimeError: It does not come to rest.
        """
        for _ in range(STEPS_MAX):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise RuntimeError(f"{self._peer.name} does not come to rest within {STEPS_MAX} steps")

    def close(self) -> None:
        """Shuts everything down."""
        self._peer.close()
        self.scheduler.shutdown()

    def _time(self, hook: str) -> None:
        inner = getattr(self.connector, hook)

        def timed(*arguments: Any) -> Any:
            # Of this thread alone: what else the machine does is not seen, nor is waiting.
            begin_s = time.thread_time()
            result = inner(*arguments)
            self.took_us[hook].append((time.thread_time() - begin_s) * 1e6)
            if hook == PLAN:
                self.metadata = result
            return result

        setattr(self.connector, hook, timed)


def _vllm_config(peer: Connector, shape: Shape) -> VllmConfig:
    config = VllmConfig(
        model_config=_model_config(),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.requests,
            max_num_batched_tokens=max(shape.tokens, 512 * shape.requests) + shape.requests,
            max_model_len=TOKENS_MAX,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=shape.ranks,
            distributed_executor_backend="mp" if shape.ranks > 1 else "uni",
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=peer.type_name,
            kv_connector_module_path=peer.module,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=peer.options(shape),
        ),
    )
    config.cache_config.num_gpu_blocks = shape.block_count
    return config

# SPDX-License-Identifier: Apache-2.0
"""Models to simulate: vLLM's configuration and KV cache groups, and no weights."""

import copy
import enum
import functools
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import attrs
import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

MAX_TOKENS: Final = 128
"""Longest prompt with its answer, where nothing else is said."""

MAX_TOKENS_LIMIT: Final = 4096
"""The same, whatever is said."""

_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    # As many as ranks may share, so that every rank has one.
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": MAX_TOKENS_LIMIT,
    "torch_dtype": "bfloat16",
}


class ModelKind(enum.Enum):
    """Which KV cache groups a model has."""

    DENSE = "dense"
    """One group of full attention."""
    HYBRID = "hybrid"
    """Recurrent state beside full attention; hits may end inside blocks."""
    WINDOW = "window"
    """A sliding window beside full attention."""


@attrs.frozen(kw_only=True)
class EngineOptions:
    """What an engine is started with.

    Attributes:
        kind: KV cache groups.
        ranks: Tensor-parallel workers.
        async_scheduling: Plan the next step before the results of the last one are in.
        num_blocks: KV blocks; few of them lead to preemptions.
        load_async: umbp's option.
        lookup_async: umbp's option.
        save_decode_cache: umbp's option.
        lazy_offload: umbp's option.
        lookup_timeout_ms: umbp's option.
        timeout_ms: umbp's option.
        load_failure_quarantine_ms: umbp's option.
        max_pinned_percent: umbp's option.
        load_failure_policy: vLLM's option.
        serialize: Send metadata to the workers as bytes.
        max_tokens: Longest prompt with its answer.
        step_tokens: Tokens that one step computes at most.
        max_requests: Requests that one step computes at most.
    """

    kind: ModelKind = ModelKind.DENSE
    ranks: int = 1
    async_scheduling: bool = False
    num_blocks: int = 24
    load_async: bool = True
    lookup_async: bool = False
    save_decode_cache: bool = False
    lazy_offload: bool = False
    lookup_timeout_ms: int = 50
    timeout_ms: int = 400
    load_failure_quarantine_ms: int = 0
    max_pinned_percent: int = 50
    load_failure_policy: str = "recompute"
    serialize: bool = False
    max_tokens: int = MAX_TOKENS
    step_tokens: int = 24
    max_requests: int = 8

    def extra_config(self) -> dict[str, Any]:
        """Returns ``kv_connector_extra_config``."""
        return {
            "backend": "memory",
            "load_async": self.load_async,
            "lookup_async": self.lookup_async,
            "save_decode_cache": self.save_decode_cache,
            "lazy_offload": self.lazy_offload,
            "lookup_timeout_ms": self.lookup_timeout_ms,
            "timeout_ms": self.timeout_ms,
            "load_failure_quarantine_ms": self.load_failure_quarantine_ms,
            "max_pinned_percent": self.max_pinned_percent,
        }


@attrs.frozen(eq=False)
class GroupShape:
    """How the forward pass uses the blocks of one KV cache group.

    Attributes:
        block_tokens: Tokens in a block.
        is_state: A block holds the state after its last token, and nothing of the tokens before.
        window_tokens: A token reads so many tokens up to itself; None: all of them.
    """

    block_tokens: int
    is_state: bool
    window_tokens: int | None


@attrs.frozen(eq=False)
class SimModel:
    """What vLLM has to know of a model. Built once, shared by many engines.

    Attributes:
        options: What it was built from.
        vllm_config: vLLM's ``VllmConfig``.
        rank_configs: The same, as each worker sees it.
        kv_cache_config: vLLM's ``KVCacheConfig``.
        groups: The groups, for the forward pass.
        block_tokens: vLLM's scheduler block.
        unit_tokens: Tokens in the unit of block hashes.
        hasher: Hashes the blocks of a request.
        structured_output: vLLM's ``StructuredOutputManager``, which is never used.
        notes: What its engines need to work out once only.
    """

    options: EngineOptions
    vllm_config: Any
    rank_configs: tuple[Any, ...]
    kv_cache_config: Any
    groups: tuple[GroupShape, ...]
    block_tokens: int
    unit_tokens: int
    hasher: Any
    structured_output: Any
    notes: dict[str, Any] = attrs.field(factory=dict)


def hybrid_may_run_ahead() -> bool:
    """Says whether vLLM keeps recurrent state right by itself under asynchronous scheduling.

    vLLM 0.31 caches the state at the end of a prompt once more a step later, when it has gone on.
    """
    return tuple(int(part) for part in vllm.__version__.split(".")[:2]) >= (0, 32)


@functools.cache
def sim_model(options: EngineOptions) -> SimModel:
    """Builds a model, or returns the one that was built from equal options."""
    vllm_config, rank_configs = _vllm_configs(options)
    specs = _specs(options.kind)
    for config in (vllm_config, *rank_configs):
        config.cache_config.num_gpu_blocks = options.num_blocks
        if options.kind is ModelKind.HYBRID:
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.prefix_match_unit = _HYBRID_UNIT
    kv_cache_config = KVCacheConfig(
        num_blocks=options.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)
        ],
    )
    block_tokens, unit_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    return SimModel(
        options,
        vllm_config,
        rank_configs,
        kv_cache_config,
        tuple(_shape(spec) for spec in specs),
        block_tokens,
        unit_tokens,
        get_request_block_hasher(unit_tokens, hash_function),
        StructuredOutputManager(vllm_config),
    )


_DENSE_BLOCK: Final = 4
_HYBRID_BLOCK: Final = 8
_HYBRID_UNIT: Final = 2
_WINDOW_TOKENS: Final = 10


def _specs(kind: ModelKind) -> list[Any]:
    def attention(block_tokens: int) -> Any:
        return FullAttentionSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
        )

    if kind is ModelKind.DENSE:
        return [attention(_DENSE_BLOCK)]
    if kind is ModelKind.WINDOW:
        window = SlidingWindowSpec(
            block_size=_DENSE_BLOCK,
            num_kv_heads=1,
            head_size=1,
            dtype=torch.float32,
            sliding_window=_WINDOW_TOKENS,
        )
        return [window, attention(_DENSE_BLOCK)]
    page = attention(_HYBRID_BLOCK)
    state = MambaSpec(
        block_size=_HYBRID_BLOCK,
        shapes=((1,),),
        dtypes=(torch.float32,),
        page_size_padded=page.page_size_bytes,
        mamba_cache_mode="align",
    )
    return [state, state, page]


def _shape(spec: Any) -> GroupShape:
    return GroupShape(
        spec.block_size, isinstance(spec, MambaSpec), getattr(spec, "sliding_window", None)
    )


def _vllm_configs(options: EngineOptions) -> tuple[Any, tuple[Any, ...]]:
    """Returns the scheduler's ``VllmConfig``, and that of each worker."""
    limits = (options.max_tokens, options.step_tokens, options.max_requests)
    base = _vllm_config(options.kind, options.ranks, options.async_scheduling, limits)
    transfer = KVTransferConfig(
        kv_connector="SimStoreConnector",
        kv_connector_module_path="umbp.sim.connector",
        kv_role="kv_both",
        kv_load_failure_policy=options.load_failure_policy,
        kv_connector_extra_config=options.extra_config(),
    )
    configs = []
    for rank in (0, *range(options.ranks)):
        # Only these parts differ between engines, and building them anew takes milliseconds.
        config = copy.copy(base)
        config.kv_transfer_config = transfer
        config.cache_config = copy.copy(base.cache_config)
        config.parallel_config = copy.copy(base.parallel_config)
        config.parallel_config.rank = rank
        configs.append(config)
    return configs[0], tuple(configs[1:])


@functools.cache
def _vllm_config(
    kind: ModelKind, ranks: int, async_scheduling: bool, limits: tuple[int, int, int]
) -> Any:
    max_tokens, step_tokens, max_requests = limits
    config = VllmConfig(
        model_config=_model_config(max_tokens),
        cache_config=CacheConfig(
            block_size=_HYBRID_BLOCK if kind is ModelKind.HYBRID else _DENSE_BLOCK,
            enable_prefix_caching=True,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_requests,
            max_num_batched_tokens=step_tokens,
            max_model_len=max_tokens,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=async_scheduling,
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp" if ranks > 1 else "uni",
        ),
        device_config=DeviceConfig("cpu"),
    )
    # A CPU has no use for it and vLLM turns it off; the scheduler does not mind where it runs.
    config.scheduler_config.async_scheduling = async_scheduling
    return config


@functools.cache
def _model_config(max_tokens: int) -> Any:
    # vLLM reads the folder once, here.
    with tempfile.TemporaryDirectory(prefix="umbp-sim-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
        return ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            max_model_len=max_tokens,
        )

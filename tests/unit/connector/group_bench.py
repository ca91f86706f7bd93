# SPDX-License-Identifier: Apache-2.0
"""Cache groups of vLLM's own classes, and lookups in them; no model is run."""

from typing import Any

import numpy as np
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from umbp.connector.groups import GroupRules, Hit

from .fakes import block_hash


def full(block: int = 16) -> Any:
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)


def window(tokens: int, block: int = 16) -> Any:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=tokens
    )


def state(block: int = 16) -> Any:
    return MambaSpec(
        block_size=block,
        shapes=((1,),),
        dtypes=(torch.float32,),
        page_size_padded=full(block).page_size_bytes,
        mamba_cache_mode="align",
    )


def config_of(*specs: Any, eagle: tuple[int, ...] = ()) -> Any:
    groups = [
        KVCacheGroupSpec([f"layer{index}"], spec, is_eagle_group=index in eagle)
        for index, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)


def make_manager(
    *specs: Any, block: int, unit: int, eagle: tuple[int, ...] = (), use_eagle: bool = False
) -> Any:
    return KVCacheManager(
        kv_cache_config=config_of(*specs, eagle=eagle),
        max_model_len=1024,
        scheduler_block_size=block,
        hash_block_size=unit,
        max_in_flight_tokens=1024,
        enable_caching=True,
        use_eagle=use_eagle,
    )


HASHES = [block_hash(index) for index in range(64)]


def find(
    rules: GroupRules,
    hashes: list[bytes],
    stored: dict[int, set[bytes]],
    *,
    local: int = 0,
    limit: int,
) -> Hit:
    """Asks, answers from ``stored``, and finds the hit."""
    asked = rules.ask(hashes, local)
    present = [
        np.array([hash_ in stored[one.group.index] for hash_ in one.hashes], dtype=bool)
        for one in asked
    ]
    return rules.hit(asked, present, hashes, local_tokens=local, limit_tokens=limit)

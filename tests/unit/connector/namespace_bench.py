# SPDX-License-Identifier: Apache-2.0
"""Configurations with all fields that the namespace reads."""

import types
from typing import Any

import attrs

from umbp.connector.namespace import digest, manifest


@attrs.frozen
class Spec:
    """A KV cache spec: whatever it says is part of the namespace."""

    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 32
    dtype: str = "bfloat16"


class HfConfig:
    """A Hugging Face configuration."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def ns(**fields: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**fields)


def engine() -> tuple[Any, Any]:
    """Configurations with all fields that the namespace reads."""
    model = ns(
        model="org/model",
        revision=None,
        dtype="bfloat16",
        quantization=None,
        quantization_config=None,
        hf_config=HfConfig(rope_theta=1e4, hidden_size=128, transformers_version="5"),
    )
    vllm_config = ns(
        model_config=model,
        cache_config=ns(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        parallel_config=ns(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_expert_parallel=False,
        ),
        speculative_config=None,
        device_config=ns(device_type="cpu"),
        attention_config=ns(backend=None, backend_per_kind={}),
        use_v2_model_runner=False,
    )
    groups = [ns(layer_names=["l0", "l1"], kv_cache_spec=Spec())]
    return vllm_config, ns(kv_cache_layout="LBHNC", kv_cache_groups=groups)


def of(vllm_config: Any, kv_cache_config: Any, key_namespace: str = "") -> bytes:
    return digest(manifest(vllm_config, kv_cache_config, key_namespace=key_namespace))

# SPDX-License-Identifier: Apache-2.0
"""The namespace: everything beside the tokens that decides what the bytes of a block are.

Two engines share objects only when their manifests are equal. A manifest is a plain dictionary
that a person can read and compare; its digest goes into every key. What belongs here is whatever
changes the KV of the same tokens, or its arrangement in an object: the model and its weights, its
configuration (RoPE among it), dtypes, quantisation, KV layout and what writes it, block sizes,
ranks, draft model, how block hashes are made, and the version of this format.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from umbp.keys import NAMESPACE_BYTES

FORMAT_VERSION: Final = 1
"""Raised when keys or objects are made differently."""

_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES: Final = 1 << 16
_SAMPLES: Final = 8
_TRUE: Final = ("1", "true")
# Differ between copies of one model, and change nothing that is computed.
_VOLATILE: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version"})


def manifest(vllm_config: Any, kv_cache_config: Any, *, key_namespace: str) -> dict[str, Any]:
    """Collects the namespace of an engine.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``.
        key_namespace: What the user adds.

    Returns:
        Plain values only; equal in the scheduler and in every worker.
    """
    import vllm

    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    return {
        "format": FORMAT_VERSION,
        "key_namespace": key_namespace,
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "model": _model(vllm_config.model_config),
        "draft_model": _draft_model(speculative),
        "cache_dtype": str(cache.cache_dtype),
        "hash": {
            "algorithm": str(cache.prefix_caching_hash_algo),
            # The seed of the first block's parent; vLLM fixes it when this is not set.
            "seed": os.environ.get("PYTHONHASHSEED", ""),
        },
        "ranks": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "prefill_context": parallel.prefill_context_parallel_size,
            "expert": bool(parallel.enable_expert_parallel),
        },
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "writer": _writer(vllm_config),
        "device": str(vllm_config.device_config.device_type),
        "groups": [_group(group) for group in kv_cache_config.kv_cache_groups],
    }


def digest(manifest_: dict[str, Any]) -> bytes:
    """Returns the 16 bytes that stand for a manifest in keys."""
    canonical = json.dumps(manifest_, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).digest()[:NAMESPACE_BYTES]


def _model(model: Any) -> dict[str, Any]:
    return {
        "name": str(model.model),
        "revision": str(model.revision),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "quantization_config": str(getattr(model, "quantization_config", None)),
        "config": _digest_of(model.hf_config),
        "weights": weights_digest(Path(model.model)),
    }


def _draft_model(speculative: Any) -> dict[str, Any] | None:
    if speculative is None:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    return {
        "method": str(speculative.method),
        "tokens": speculative.num_speculative_tokens,
        "model": _model(draft) if draft is not None else None,
    }


def _writer(vllm_config: Any) -> dict[str, Any]:
    """Says what writes KV into blocks; each may arrange it by a way of its own in one layout."""
    attention = getattr(vllm_config, "attention_config", None)
    by_kind = getattr(attention, "backend_per_kind", None) or {}
    return {
        "runner": 2 if getattr(vllm_config, "use_v2_model_runner", False) else 1,
        "attention": str(getattr(attention, "backend", None)),
        "attention_by_kind": {str(kind): str(backend) for kind, backend in by_kind.items()},
        # vLLM on ROCm then permutes the inside of blocks and calls the layout the same.
        "shuffled": os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "").lower() in _TRUE,
    }


def _group(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    # A group of layers with unequal specs wraps them.
    inner = getattr(spec, "kv_cache_specs", None)
    specs = [inner[name] for name in group.layer_names] if inner else [spec]
    return {
        "layers": len(group.layer_names),
        "block_size": spec.block_size,
        "specs": sorted({str(one) for one in specs}),
    }


def _digest_of(config: Any) -> str:
    """Fingerprints a Hugging Face configuration."""
    values = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    text = json.dumps(_stable(values), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _stable(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    return value


def weights_digest(path: Path) -> str:
    """Fingerprints the weight files in a folder from their sizes and samples of their content.

    Reads at most half a MiB of each file. A model that is no local folder is known by its name and
    revision alone, and gives an empty string: when such weights change under one name, the option
    ``key_namespace`` tells the old from the new.
    """
    if not path.is_dir():
        return ""
    digest_ = hashlib.sha256()
    for file in sorted(f for f in path.iterdir() if f.suffix in _WEIGHT_SUFFIXES):
        size = file.stat().st_size
        digest_.update(f"{file.name}:{size};".encode())
        for sample in _samples(file, size):
            digest_.update(sample)
    return digest_.hexdigest()[:32]


def _samples(file: Path, size: int) -> Iterator[bytes]:
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    with file.open("rb") as stream:
        for offset in range(0, size, step):
            stream.seek(offset)
            yield stream.read(_SAMPLE_BYTES)
        stream.seek(max(0, size - _SAMPLE_BYTES))
        yield stream.read(_SAMPLE_BYTES)

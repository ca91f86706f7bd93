# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights whose greedy output depends on the KV cache.

Constant or small weights hide every corruption: the output would be the same with any KV. Here
queries and keys are large, so that attention is peaked, and values dominate the residual stream, so
that what attention reads decides the next token. ``test_engine_corruption.py`` shows that it does.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GEMMA: Final[dict[str, Any]] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "sliding_window": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_local_base_freq": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Two kinds of attention, so that vLLM makes more than one KV cache group of it."""

CONFIGS: Final = {"llama": LLAMA, "gemma": GEMMA}

# Standard deviation times the square root of the fan-in, by the parameter's name.
_GAINS: Final = (
    (("q_proj", "k_proj"), 4.0),
    (("v_proj", "o_proj"), 2.0),
)
_OTHER_GAIN: Final = 1.5
_EMBEDDING_STD: Final = 0.02


def make_model(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """Writes a model that vLLM loads; does nothing when the folder holds it already."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * _deviation(name, parameter.shape[-1]))
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return folder


def _deviation(name: str, fan_in: int) -> float:
    if "embed" in name:
        return _EMBEDDING_STD
    for parts, gain in _GAINS:
        if any(part in name for part in parts):
            return gain / math.sqrt(fan_in)
    return _OTHER_GAIN / math.sqrt(fan_in)

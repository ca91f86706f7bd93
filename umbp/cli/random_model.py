# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights whose greedy output depends on the KV cache.

Constant or small weights hide every corruption: the output would be the same with any KV. Here
queries and keys are large, so that attention is peaked, and values dominate the residual stream, so
that what attention reads decides the next token. ``tests/e2e`` shows that it does.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

QWEN_NEXT: Final[dict[str, Any]] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Gated delta nets beside attention: recurrent state, and blocks of 640 tokens on a CPU."""

# Standard deviation times the square root of the fan-in, by the parameter's name.
_GAINS: Final = (
    (("q_proj", "k_proj"), 4.0),
    (("v_proj", "o_proj", "out_proj", "in_proj"), 2.0),
)
_OTHER_GAIN: Final = 1.5
_EMBEDDING_STD: Final = 0.02


def make_model(folder: Path, config: dict[str, Any], *, seed: int = 0, device: str = "cpu") -> Path:
    """Writes a model that vLLM loads; does nothing when the folder holds it already.

    Args:
        folder: Where the model goes; made when it is not there.
        config: The model's ``config.json``.
        seed: Other weights for each seed, and for each kind of device.
        device: Where they are made; on a GPU in the precision in which they are written.

    Returns:
        The folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if any(folder.glob("*.safetensors")):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    torch.manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            constant = _constant(name)
            if constant is not None:
                parameter.fill_(constant)
            elif parameter.dim() >= 2:
                noise = torch.randn(parameter.shape, generator=generator, device=device)
                is_kernel = "conv" in name and parameter.dim() == 3
                deviation = 0.7 if is_kernel else _deviation(name, parameter.shape[-1])
                parameter.copy_(noise * deviation)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return folder


def _constant(name: str) -> float | None:
    """Returns the value of a parameter that is not random; None for the others."""
    if "A_log" in name:
        return -6.0  # The state decays slowly, so that it remembers.
    if "dt_bias" in name:
        return 0.0
    if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
        return 3.0  # Peaked attention where queries and keys are normalised, ...
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 2.0  # ... and where one is added to the weight.
    return None


def _deviation(name: str, fan_in: int) -> float:
    if "embed" in name:
        return _EMBEDDING_STD
    for parts, gain in _GAINS:
        if any(part in name for part in parts):
            return gain / math.sqrt(fan_in)
    return _OTHER_GAIN / math.sqrt(fan_in)

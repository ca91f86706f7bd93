# SPDX-License-Identifier: Apache-2.0
"""Configurations of tiny models, for random weights whose output depends on the KV cache."""

from typing import Any, Final

from umbp.cli.random_model import QWEN_NEXT

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

LLAMA_WIDE: Final = LLAMA | {"hidden_size": 256, "head_dim": 64}
"""For GPUs: FlashAttention 3 wants heads of 64 or more."""

LLAMA_8B: Final = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
}
"""The shape of Llama-3.1-8B, but for its vocabulary; 14 GB. Made on a GPU, by whoever tests it."""

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

LFM: Final[dict[str, Any]] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 128,
    "conv_dim_out": 128,
    "block_dim": 128,
    "block_ff_dim": 256,
    "block_multiple_of": 32,
    "block_auto_adjust_ff_dim": False,
    "norm_eps": 1e-5,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_embedding": True,
}
"""Short convolutions beside attention: state that reaches two tokens back."""

CONFIGS: Final = {
    "llama": LLAMA,
    "llama_wide": LLAMA_WIDE,
    "llama_8b": LLAMA_8B,
    "gemma": GEMMA,
    "qwen_next": QWEN_NEXT,
    "lfm": LFM,
}

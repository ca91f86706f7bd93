# SPDX-License-Identifier: Apache-2.0
"""What each field of a manifest is, and what to do when two engines differ in it.

A field is named by its path in the manifest, with dots; the longest entry that it begins with
counts. ``umbp.connector.namespace`` says what the fields hold.
"""

from typing import Final

import attrs


@attrs.frozen
class Meaning:
    """A field.

    Attributes:
        what: What it is.
        advice: What to set so that two engines are equal in it.
    """

    what: str
    advice: str


_SAME_VLLM: Final = "run the same vLLM, with the same options, on the same kind of device"

MEANINGS: Final = {
    "format": Meaning("umbp's own format of keys and objects", "run the same version of umbp"),
    "key_namespace": Meaning("umbp's option key_namespace", "give both the same key_namespace"),
    "vllm": Meaning("minor version of vLLM", "run the same minor version of vLLM"),
    "model": Meaning("the model", "serve the same model from copies that are equal"),
    "model.name": Meaning("what --model says", "give both the same --model, path and all"),
    "model.revision": Meaning("what --revision says", "give both the same --revision"),
    "model.dtype": Meaning("data type of the weights", "give both the same --dtype"),
    "model.quantization": Meaning("method of quantisation", "give both the same --quantization"),
    "model.quantization_config": Meaning("how vLLM quantises", "give both the same quantisation"),
    "model.config": Meaning(
        "fingerprint of the model's configuration, RoPE and all",
        "compare config.json of both, --hf-overrides and --rope-scaling",
    ),
    "model.weights": Meaning(
        "fingerprint of the weight files of a local folder",
        "copy the weights anew; a name from a hub in one and a folder in the other differ too",
    ),
    "draft_model": Meaning(
        "the drafter of speculative decoding", "give both the same --speculative-config"
    ),
    "cache_dtype": Meaning("data type of the KV cache", "give both the same --kv-cache-dtype"),
    "hash.algorithm": Meaning(
        "what block hashes are made by", "give both the same --prefix-caching-hash-algo"
    ),
    "hash.seed": Meaning(
        "PYTHONHASHSEED, from which block hashes begin",
        "set PYTHONHASHSEED to one value for both, or for neither",
    ),
    "ranks.tensor": Meaning("tensor parallelism", "give both the same --tensor-parallel-size"),
    "ranks.pipeline": Meaning("pipeline parallelism", "leave --pipeline-parallel-size at 1"),
    "ranks.decode_context": Meaning(
        "context parallelism of decoding", "give both the same --decode-context-parallel-size"
    ),
    "ranks.prefill_context": Meaning(
        "context parallelism of prefill", "give both the same --prefill-context-parallel-size"
    ),
    "ranks.expert": Meaning("expert parallelism", "give both --enable-expert-parallel, or neither"),
    "layout": Meaning("how vLLM lays KV out in a block", _SAME_VLLM),
    "writer": Meaning("what writes KV into blocks", _SAME_VLLM),
    "writer.runner": Meaning(
        "version of vLLM's model runner", "set VLLM_USE_V2_MODEL_RUNNER alike"
    ),
    "writer.attention": Meaning("attention backend", "give both the same --attention-backend"),
    "writer.attention_by_kind": Meaning(
        "attention backends of kinds of layers", "give both the same --attention-config"
    ),
    "writer.shuffled": Meaning(
        "whether ROCm's kernels shuffle blocks", "set VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT alike"
    ),
    "device": Meaning("kind of device", "run both on the same kind of device"),
    "groups": Meaning(
        "KV cache groups: layers, block sizes, shapes",
        "give both the same --block-size and model; memory may decide block sizes of hybrid models",
    ),
}


def meaning_of(path: str) -> Meaning | None:
    """Returns the meaning of a field; None for one of another version."""
    while path:
        if path in MEANINGS:
            return MEANINGS[path]
        path = path.rpartition(".")[0]
    return None

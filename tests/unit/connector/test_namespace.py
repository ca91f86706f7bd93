# SPDX-License-Identifier: Apache-2.0
"""Whatever changes the bytes of a block changes the namespace (cases of theme 8)."""

import copy
from pathlib import Path

import pytest

from umbp.connector.namespace import manifest, weights_digest
from umbp.keys import NAMESPACE_BYTES

from .namespace_bench import Spec, engine, ns, of

CHANGES = {
    "model": lambda v, k: setattr(v.model_config, "model", "org/other"),
    "revision": lambda v, k: setattr(v.model_config, "revision", "v2"),
    "dtype": lambda v, k: setattr(v.model_config, "dtype", "float16"),
    "quantization": lambda v, k: setattr(v.model_config, "quantization", "fp8"),
    "online quantization": lambda v, k: setattr(v.model_config, "quantization_config", {"a": 1}),
    "rope": lambda v, k: v.model_config.hf_config.values.update(rope_theta=1e6),
    "nested rope": lambda v, k: v.model_config.hf_config.values.update(rope_scaling={"factor": 2}),
    "cache dtype": lambda v, k: setattr(v.cache_config, "cache_dtype", "fp8"),
    "hash": lambda v, k: setattr(v.cache_config, "prefix_caching_hash_algo", "xxhash"),
    "tensor parallel": lambda v, k: setattr(v.parallel_config, "tensor_parallel_size", 2),
    "context parallel": lambda v, k: setattr(v.parallel_config, "decode_context_parallel_size", 2),
    "layout": lambda v, k: setattr(k, "kv_cache_layout", "LBNHC"),
    "block size": lambda v, k: setattr(k.kv_cache_groups[0], "kv_cache_spec", Spec(block_size=32)),
    "heads": lambda v, k: setattr(k.kv_cache_groups[0], "kv_cache_spec", Spec(num_kv_heads=4)),
    "layers": lambda v, k: k.kv_cache_groups[0].layer_names.append("draft"),
    "runner": lambda v, k: setattr(v, "use_v2_model_runner", True),
    "attention": lambda v, k: setattr(v.attention_config, "backend", "FLASHINFER"),
    "attention of a kind": lambda v, k: v.attention_config.backend_per_kind.update(mla="TRITON"),
    "drafter": lambda v, k: setattr(
        v,
        "speculative_config",
        ns(method="eagle", num_speculative_tokens=2, draft_model_config=None),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_gives_another_namespace(change: str) -> None:
    vllm_config, kv_cache_config = engine()
    before = of(vllm_config, kv_cache_config)
    CHANGES[change](vllm_config, kv_cache_config)
    assert of(vllm_config, kv_cache_config) != before


def test_two_drafters_of_one_target_do_not_share() -> None:
    """Case 6.4."""
    vllm_config, kv_cache_config = engine()
    draft = copy.copy(vllm_config.model_config)
    vllm_config.speculative_config = ns(
        method="eagle", num_speculative_tokens=2, draft_model_config=draft
    )
    before = of(vllm_config, kv_cache_config)
    draft.model = "org/other-drafter"
    assert of(vllm_config, kv_cache_config) != before


def test_equal_engines_share() -> None:
    first, second = of(*engine()), of(*engine())
    assert first == second
    assert len(first) == NAMESPACE_BYTES


def test_what_only_differs_between_copies_of_a_model_does_not_count() -> None:
    vllm_config, kv_cache_config = engine()
    before = of(vllm_config, kv_cache_config)
    vllm_config.model_config.hf_config.values.update(
        transformers_version="6", _name_or_path="/elsewhere"
    )
    assert of(vllm_config, kv_cache_config) == before


def test_users_own_word_counts() -> None:
    assert of(*engine(), key_namespace="a") != of(*engine(), key_namespace="b")


def test_hash_seed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    before = of(*engine())
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert of(*engine()) != before


def test_shuffled_blocks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(*engine())
    for value, differs in (("0", False), ("False", False), ("1", True), ("true", True)):
        monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", value)
        assert (of(*engine()) != before) == differs


def test_manifest_is_readable() -> None:
    read = manifest(*engine(), key_namespace="team-a")
    assert read["key_namespace"] == "team-a"
    assert read["model"]["name"] == "org/model"
    assert read["ranks"]["tensor"] == 1
    assert "block_size=16" in read["groups"][0]["specs"][0]


def test_new_weights_under_one_path_count(tmp_path: Path) -> None:
    """Case 8.2: same path, same sizes, other content."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3_000_000))
    before = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == before
    for offset in (0, 1_500_000, 2_999_999):
        changed = bytearray(3_000_000)
        changed[offset] = 1
        weights.write_bytes(changed)
        assert weights_digest(tmp_path) != before
    weights.write_bytes(bytes(3_000_001))
    assert weights_digest(tmp_path) != before


def test_other_files_beside_the_weights_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = weights_digest(tmp_path)
    (tmp_path / "README.md").write_text("hello")
    assert weights_digest(tmp_path) == before


def test_model_of_a_hub_has_no_local_weights() -> None:
    assert weights_digest(Path("org/model")) == ""

# SPDX-License-Identifier: Apache-2.0
"""Keys and namespaces that must not collide."""

from pathlib import Path
from typing import Any

import pytest
from connector.bench import Bench
from connector.fakes import FakeRequest
from connector.namespace_bench import engine, of
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from umbp.connector.support import refuse_random_hashes
from umbp.errors import ConfigError


def test_case_8_2_other_weights_under_one_path_have_another_namespace(tmp_path: Path) -> None:
    vllm_config, kv_cache_config = engine()
    vllm_config.model_config.model = str(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(4096))
    before = of(vllm_config, kv_cache_config)
    assert of(vllm_config, kv_cache_config) == before
    (tmp_path / "model.safetensors").write_bytes(bytes(4095) + b"\x01")
    assert of(vllm_config, kv_cache_config) != before


def test_case_8_2_quantization_and_revision_have_namespaces_of_their_own() -> None:
    seen = set()
    for field, value in [
        ("revision", None),
        ("revision", "v2"),
        ("quantization", "fp8"),
        ("quantization_config", {"bits": 8}),
    ]:
        vllm_config, kv_cache_config = engine()
        setattr(vllm_config.model_config, field, value)
        seen.add(of(vllm_config, kv_cache_config))
    assert len(seen) == 4


def test_case_8_2_users_tell_weights_apart_that_cannot_be_read() -> None:
    assert of(*engine(), key_namespace="march") != of(*engine(), key_namespace="april")


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BHLNC"])
def test_case_8_4_layouts_have_namespaces_of_their_own(layout: str) -> None:
    seen = set()
    for other in (layout, "another"):
        vllm_config, kv_cache_config = engine()
        kv_cache_config.kv_cache_layout = other
        seen.add(of(vllm_config, kv_cache_config))
    assert len(seen) == 2


def test_case_8_4_model_runners_have_namespaces_of_their_own() -> None:
    seen = set()
    for is_second in (False, True):
        vllm_config, kv_cache_config = engine()
        vllm_config.use_v2_model_runner = is_second
        seen.add(of(vllm_config, kv_cache_config))
    assert len(seen) == 2


def test_case_8_4_attention_backends_have_namespaces_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = set()
    for backend, shuffled in [("FLASH_ATTN", "0"), ("ROCM_AITER_FA", "0"), ("ROCM_AITER_FA", "1")]:
        monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", shuffled)
        vllm_config, kv_cache_config = engine()
        vllm_config.attention_config.backend = backend
        seen.add(of(vllm_config, kv_cache_config))
    assert len(seen) == 3


def block_hashes(image: str | None, tokens: int = 100) -> list[bytes]:
    """vLLM's hashes of a prompt whose tokens 20 to 40 stand for an image."""
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    features: list[Any] = []
    if image is not None:
        features = [
            MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=image,
                mm_position=PlaceholderRange(offset=20, length=20),
                mm_hash=image,
            )
        ]
    request = Request(
        request_id="r",
        prompt_token_ids=[7] * tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        block_hasher=get_request_block_hasher(16, function),
    )
    return list(request.block_hashes)


def test_case_8_6_hit_ends_before_the_first_block_of_another_image() -> None:
    bench = Bench()
    stored = block_hashes("cat")
    bench.lookups.stored = set(stored)

    def hit(image: str | None) -> int | None:
        request = FakeRequest(f"ask for {image}", 100, 100, block_hashes(image))
        return bench.side.matched_tokens(request, 0)[0]

    assert hit("cat") == 96
    # The image begins in the second block.
    assert hit("dog") == 16
    assert hit(None) == 16


def test_case_8_8_hash_and_seed_are_part_of_the_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = set()
    for algorithm in ("sha256", "xxhash"):
        for seed in ("", "0", "1"):
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            vllm_config, kv_cache_config = engine()
            vllm_config.cache_config.prefix_caching_hash_algo = algorithm
            seen.add(of(vllm_config, kv_cache_config))
    assert len(seen) == 6


def test_case_8_8_a_shared_pool_needs_hashes_that_engines_have_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm_config, _ = engine()
    vllm_config.cache_config.prefix_caching_hash_algo = "xxhash_cbor"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="hash_algo is xxhash_cbor and PYTHONHASHSEED is not set"):
        refuse_random_hashes(vllm_config, is_shared=True)
    refuse_random_hashes(vllm_config, is_shared=False)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    refuse_random_hashes(vllm_config, is_shared=True)
    monkeypatch.delenv("PYTHONHASHSEED")
    vllm_config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    refuse_random_hashes(vllm_config, is_shared=True)

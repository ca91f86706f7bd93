# SPDX-License-Identifier: Apache-2.0
"""What the connector reads from vLLM's configuration, and what it refuses."""

import types
from pathlib import Path
from typing import Any

import pytest

from umbp.connector.config import ConnectorConfig
from umbp.errors import ConfigError
from umbp.keys import KeySpace

KEYS = KeySpace(bytes(range(16)))


def vllm_config(*, world_size: int = 1, nnodes: int = 1, dp_index: int = 0, **extra: Any) -> Any:
    return types.SimpleNamespace(
        kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=types.SimpleNamespace(
            world_size=world_size, nnodes=nnodes, data_parallel_index=dp_index
        ),
        kv_events_config=None,
    )


def test_memory_is_the_default_backend() -> None:
    config = ConnectorConfig.from_vllm(vllm_config())
    assert config.options.backend == "memory"
    assert config.backend.__name__ == "MemoryBackend"
    assert config.options.load_async
    assert not config.options.lookup_async


def test_one_object_is_split_between_connector_and_backend() -> None:
    config = ConnectorConfig.from_vllm(
        vllm_config(lookup_timeout_ms=7, total_capacity_bytes=1 << 24)
    )
    assert config.options.lookup_timeout_ms == 7
    assert config.backend_options.total_capacity_bytes == 1 << 24


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"backend": "nope"}, "backend is 'nope'.*embedded.*memory"),
        ({"backend": 3}, "option backend is 3"),
        ({"lookup_timout_ms": 1}, "lookup_timout_ms.*lookup_timeout_ms"),
        ({"total_capacity_byte": 1}, "total_capacity_byte.*total_capacity_bytes"),
        ({"lookup_timeout_ms": "1"}, "lookup_timeout_ms"),
        ({"lookup_timeout_ms": 0}, "lookup_timeout_ms"),
        ({"load_async": 1}, "load_async"),
        ({"total_capacity_bytes": -5}, "total_capacity_bytes.*-5"),
        ({"max_pinned_percent": 101}, "max_pinned_percent"),
        ({"lazy_offload": 1}, "lazy_offload"),
        ({"lazy_offload": True, "load_async": False}, "lazy_offload is true and load_async is fal"),
    ],
)
def test_refusals_are_one_line_and_name_the_option(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        ConnectorConfig.from_vllm(vllm_config(**extra))
    assert "\n" not in str(refusal.value)


def test_pools_in_workers_of_several_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="nnodes is 2"):
        ConnectorConfig.from_vllm(vllm_config(nnodes=2))


def test_loads_within_a_step_are_refused_where_another_process_may_hold_them_up() -> None:
    extra = {"backend": "standalone", "address": "unix:///run/x.grpc.sock", "load_async": False}
    with pytest.raises(ConfigError, match=r"option load_async is false, but .*'standalone'"):
        ConnectorConfig.from_vllm(vllm_config(**extra))


def test_lazy_offload_is_refused_where_vllm_publishes_kv_events() -> None:
    config = vllm_config(lazy_offload=True)
    config.kv_events_config = types.SimpleNamespace(enable_kv_cache_events=True)
    with pytest.raises(ConfigError, match="option lazy_offload is true and vLLM publishes KV ev"):
        ConnectorConfig.from_vllm(config)
    config.kv_events_config.enable_kv_cache_events = False
    assert ConnectorConfig.from_vllm(config).options.lazy_offload


def test_limits_of_the_core_follow_the_options() -> None:
    config = ConnectorConfig.from_vllm(
        vllm_config(
            world_size=4, lookup_timeout_ms=250, timeout_ms=1500, load_failure_quarantine_ms=30_000,
            max_pinned_percent=25,
        )
    )  # fmt: skip
    limits = config.core_limits(unit_tokens=16, block_count=200)
    assert (limits.rank_count, limits.unit_tokens) == (4, 16)
    assert (limits.lookup_timeout_s, limits.transfer_timeout_s) == (0.25, 1.5)
    assert limits.quarantine_s == 30
    assert limits.pinned_blocks_max == 50


def test_sockets_differ_by_rank_dp_index_and_instance(tmp_path: Path) -> None:
    """Case 7.5."""
    paths = [
        path
        for dp_index in (0, 1)
        for instance in ("", "blue")
        for path in ConnectorConfig.from_vllm(
            vllm_config(
                world_size=2, dp_index=dp_index, lookup_instance=instance, socket_dir=str(tmp_path)
            )
        ).socket_paths(KEYS)
    ]
    assert len(set(paths)) == 8
    assert all(tmp_path in path.parents for path in paths)


def test_sockets_lie_under_vllms_rpc_base_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    (path,) = ConnectorConfig.from_vllm(vllm_config()).socket_paths(KEYS)
    assert tmp_path in path.parents


def test_instances_of_different_namespaces_have_different_names() -> None:
    config = ConnectorConfig.from_vllm(vllm_config())
    assert config.instance(KEYS) != config.instance(KeySpace(b"x" * 16))

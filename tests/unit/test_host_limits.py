# SPDX-License-Identifier: Apache-2.0
"""memory_limits: the narrowest of the machine and every control group counts."""

import pytest

from umbp.backends.host_limits import MemoryLimits, memory_limits

GIB = 1 << 30


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    return tmp_path


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def write_v2(root, group, *, limit, used, inactive=0):
    folder = f"sys/fs/cgroup/{group}"
    write(root, f"{folder}/memory.max", f"{limit}\n")
    write(root, f"{folder}/memory.current", f"{used}\n")
    write(root, f"{folder}/memory.stat", f"anon 1\ninactive_file {inactive}\n")


def test_without_a_limited_group_the_machine_counts(root):
    write_v2(root, "", limit="max", used=GIB)
    assert memory_limits(root) == MemoryLimits(16 * GIB, 8 * GIB)


def test_a_group_limit_counts_less_what_is_used_and_cannot_be_reclaimed(root):
    write_v2(root, "", limit=4 * GIB, used=3 * GIB, inactive=2 * GIB)
    assert memory_limits(root) == MemoryLimits(4 * GIB, 3 * GIB)


def test_the_limit_of_a_group_further_out_counts_too(root):
    write(root, "proc/self/cgroup", "0::/outer/inner\n")
    write_v2(root, "outer", limit=2 * GIB, used=GIB)
    write_v2(root, "outer/inner", limit=3 * GIB, used=0)
    assert memory_limits(root) == MemoryLimits(2 * GIB, GIB)


def test_a_group_that_is_over_its_limit_leaves_nothing(root):
    write_v2(root, "", limit=GIB, used=2 * GIB)
    assert memory_limits(root) == MemoryLimits(GIB, 0)


def test_groups_of_version_1_whose_path_is_the_hosts(root):
    write(root, "proc/self/cgroup", "5:cpu:/x\n4:hugetlb,memory:/docker/abc\n0::/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {GIB // 2}\n")
    assert memory_limits(root) == MemoryLimits(2 * GIB, 3 * GIB // 2)


@pytest.mark.parametrize("meminfo", [None, "MemTotal: 5 kB\n"])
def test_a_system_that_does_not_tell(root, meminfo):
    (root / "proc/meminfo").unlink()
    if meminfo is not None:
        write(root, "proc/meminfo", meminfo)
    assert memory_limits(root) is None


def test_a_system_without_control_groups(root):
    (root / "proc/self/cgroup").unlink()
    assert memory_limits(root) == MemoryLimits(16 * GIB, 8 * GIB)


def test_this_system():
    limits = memory_limits()
    assert 0 < limits.available_bytes <= limits.total_bytes

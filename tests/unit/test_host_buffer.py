# SPDX-License-Identifier: Apache-2.0
"""HostBuffer: what is allocated is as large as asked for, and goes back."""

import ctypes
import mmap
import os
import re

import pytest

from umbp.backends.host_buffer import open_buffer
from umbp.errors import ConfigError

SIZE = 32 << 20


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("prefault", [False, True])
def test_memory_is_taken_when_asked_for_and_given_back_on_close(prefault):
    before = resident_bytes()
    buffer = open_buffer(SIZE, prefault=prefault)
    assert buffer.tensor.numel() == SIZE
    assert buffer.tensor.data_ptr() % mmap.PAGESIZE == 0
    assert (resident_bytes() - before > SIZE * 0.9) == prefault
    buffer.tensor.fill_(1)
    assert resident_bytes() - before > SIZE * 0.9
    for _ in range(2):
        buffer.close()
        assert resident_bytes() - before < SIZE * 0.1


def test_a_forked_child_does_not_share_the_memory():
    buffer = open_buffer(SIZE)
    address = buffer.tensor.data_ptr()
    flags = ""
    with open("/proc/self/smaps") as maps:
        inside = False
        for line in maps:
            bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if bounds:
                inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
            elif inside and line.startswith("VmFlags:"):
                flags = line
    assert " dc" in flags  # "Do not copy area on fork", proc_pid_smaps(5).


def test_a_size_that_cannot_be_had_is_refused():
    with pytest.raises(ConfigError, match="total_capacity_bytes"):
        open_buffer(1 << 62)


def test_a_numa_node_that_is_not_there_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"^option numa_node is 4093, but this machine has \[0"):
        open_buffer(SIZE, numa_node=4093)


def test_missing_libnuma_is_named(monkeypatch):
    def refuse(name, use_errno):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(ConfigError, match="install libnuma1"):
        open_buffer(SIZE, numa_node=0)


class FakeLibnuma:
    """Stands for libnuma where it is not installed, and records the call."""

    def __init__(self, status):
        self.status = status
        self.calls = []

    def mbind(self, *arguments):
        self.calls.append(arguments)
        return self.status


def test_the_whole_pool_is_given_the_node_as_preferred(monkeypatch):
    library = FakeLibnuma(0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: library)
    buffer = open_buffer(SIZE, numa_node=0)
    ((address, size, mode, mask, _, flags),) = library.calls
    assert (address.value, size.value) == (buffer.tensor.data_ptr(), SIZE)
    assert (mode, list(mask), flags) == (1, [1], 0)


def test_a_node_that_the_system_refuses_is_named(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: FakeLibnuma(-1))
    with pytest.raises(ConfigError, match="option numa_node is 0, but the system refuses it"):
        open_buffer(SIZE, numa_node=0)


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="the kernel has no NUMA")
def test_the_kernel_takes_the_preference():
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        pytest.skip("libnuma is not installed")
    buffer = open_buffer(SIZE, numa_node=0)
    with open("/proc/self/numa_maps") as maps:
        policies = dict(line.split()[:2] for line in maps)
    assert policies[f"{buffer.tensor.data_ptr():x}"].startswith("prefer")

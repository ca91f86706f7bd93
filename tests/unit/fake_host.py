# SPDX-License-Identifier: Apache-2.0
"""A machine that the doctor may look at, made of files in a folder and of answers given here."""

from pathlib import Path
from typing import Any

import attrs

from umbp.backends.master_address import Presence
from umbp.doctor.host import Host, Probed

GIB = 1 << 30
NO_GPU = {"version": "2.13", "hip": None, "cuda": None, "devices": 0}


@attrs.define
class FakeHost(Host):
    """A healthy machine, until a test changes it."""

    environment: Any = attrs.field(factory=dict)
    python: tuple[int, int] = (3, 11)
    versions: dict[str, str] = attrs.field(factory=lambda: {"vllm": "0.32.1"})
    shared_memory_bytes: int | None = 8 * GIB
    torch: Probed = attrs.field(factory=lambda: Probed(dict(NO_GPU)))
    library: Probed = attrs.field(factory=lambda: Probed({}))
    master: Presence = Presence.ANSWERS
    taken: dict[tuple[str, int], str] = attrs.field(factory=dict)

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def add_gpu(self, address: str, node: int) -> None:
        folder = f"sys/bus/pci/devices/{address}"
        self.write(f"{folder}/class", "0x030200")
        self.write(f"{folder}/vendor", "0x10de")
        self.write(f"{folder}/numa_node", node)

    def free_bytes(self, path: str) -> int | None:
        return self.shared_memory_bytes

    def version_of(self, *distributions: str) -> tuple[str, str] | None:
        found = [name for name in distributions if name in self.versions]
        return (found[0], self.versions[found[0]]) if found else None

    def why_not_bound(self, address: str, port: int) -> str | None:
        return self.taken.get((address, port))

    def presence(self, address: Any) -> Presence:
        return self.master

    def probe(self, what: str) -> Probed:
        return self.torch if what == "torch" else self.library


def healthy_host(root: Path) -> FakeHost:
    host = FakeHost(root=root)
    host.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB")
    host.write("proc/self/cgroup", "0::/")
    host.write("proc/self/status", "Name:\tpython\nCapEff:\t0000000000000000")
    host.write("proc/self/limits", "Max locked memory         8388608              8388608  bytes")
    host.write("sys/devices/system/node/node0/meminfo", "")
    return host

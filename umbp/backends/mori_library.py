# SPDX-License-Identifier: Apache-2.0
"""Loads MORI's Python module, in a worker and only when it is asked for.

Importing ``mori.umbp`` takes about two seconds and some hundred MiB, and loads PyTorch, the HIP
runtime and shared libraries that a machine may lack. So no module of umbp imports it at its top,
and ``load_mori`` turns each way in which the import fails into one line that says what is missing.
"""

import ctypes
import importlib
import os
import re
from pathlib import Path
from typing import Any, Final

import attrs

from umbp.errors import BackendUnavailable

LOG_LEVELS: Final = ("debug", "info", "warn", "error", "critical")
"""The words that MORI 1.2.4 knows; it ignores any other."""

_LOG_LEVEL_VARIABLE: Final = "MORI_UMBP_LOG_LEVEL"
READ_LEASE_VARIABLE: Final = "UMBP_DRAM_READ_LEASE_MS"

DEFAULT_READ_LEASE_MS: Final = 500
"""MORI's own. Source: MORI 1.2.4, the default of UMBP_DRAM_READ_LEASE_MS."""

_DISTRIBUTION: Final = "amd-mori>=1.2.4"
_NEEDED_CALLS: Final = (
    "batch_exists",
    "batch_get_ranges_into_ptr",
    "batch_put_ranges_from_ptr",
    "register_memory",
)
_SHARED_LIBRARY: Final = re.compile(r"lib[\w+.-]*\.so[\w.]*")
_RUNTIME: Final = re.compile(r"lib(amdhip64|hsa-runtime64|cudart)\.so")
_ON_CUDA_MARK: Final = "umbp_hip_on_cuda"
"""What `native/hip_cuda` exports and no other HIP runtime does."""
_GATHER_KERNEL_VARIABLE: Final = "UMBP_DRAM_GATHER_KERNEL"
_REASON_CHARS_MAX: Final = 300


@attrs.frozen
class MoriLibrary:
    """The parts of MORI that umbp uses.

    Attributes:
        version: Version of MORI.
        client_type: ``UMBPClient``; its instances own or reach a pool.
        config_type: ``UMBPConfig``, what a client is made of.
        server_config_type: ``UMBPStandaloneProcessConfig``, the part of it that names a server.
        node_config_type: ``UMBPDistributedConfig``, the part that makes the client a node.
        cpu_location: Says that registered memory is the host's.
        gpu_location: Says that registered memory is a device's.
        is_on_cuda: Whether its HIP runtime is the one on CUDA, which runs no kernel of MORI's.
    """

    version: str
    client_type: Any
    config_type: Any
    server_config_type: Any
    node_config_type: Any
    cpu_location: Any
    gpu_location: Any
    is_on_cuda: bool = False


def load_mori(
    log_level: str | None = None, *, default_read_lease_ms: int | None = None
) -> MoriLibrary:
    """Imports MORI. It reads its environment once, so the first import of a process decides.

    On CUDA its gather kernel is turned off, unless the environment says otherwise; servers that
    this process starts inherit that. MORI reads that variable when the first client is made.

    Args:
        log_level: One of ``LOG_LEVELS``; None leaves the environment's choice. MORI logs to
            standard output.
        default_read_lease_ms: How long a get protects its objects from eviction, at least 1, where
            the environment does not say; None leaves it to MORI.

    Raises:
        BackendUnavailable: MORI, or a shared library that it needs, cannot be loaded.
    """
    if log_level is not None:
        os.environ[_LOG_LEVEL_VARIABLE] = log_level
    if default_read_lease_ms is not None:
        os.environ.setdefault(READ_LEASE_VARIABLE, str(default_read_lease_ms))
    try:
        mori = importlib.import_module("mori")
        native = importlib.import_module("mori.cpp")
        umbp_module = importlib.import_module("mori.umbp")
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailable(_why_not_loaded(error)) from error
    version = str(getattr(mori, "__version__", "unknown"))
    client_type = umbp_module.UMBPClient
    missing = [name for name in _NEEDED_CALLS if not hasattr(client_type, name)]
    if missing:
        raise BackendUnavailable(
            f"MORI {version} has no {missing[0]}: pip install '{_DISTRIBUTION}'"
        )
    is_on_cuda = _is_on_cuda()
    if is_on_cuda:
        os.environ.setdefault(_GATHER_KERNEL_VARIABLE, "0")
    return MoriLibrary(
        version=version,
        client_type=client_type,
        config_type=umbp_module.UMBPConfig,
        server_config_type=umbp_module.UMBPStandaloneProcessConfig,
        node_config_type=umbp_module.UMBPDistributedConfig,
        cpu_location=native.MemoryLocationType.CPU,
        gpu_location=native.MemoryLocationType.GPU,
        is_on_cuda=is_on_cuda,
    )


def parse_read_lease_ms(text: str) -> int:
    """Reads the variable as MORI does, which takes 0 and what is no number for no answer."""
    return (int(text) if text.isascii() and text.isdecimal() else 0) or DEFAULT_READ_LEASE_MS


def server_binary(name: str) -> Path:
    """Returns the path of a program that comes with MORI, which must have been loaded.

    Args:
        name: ``"umbp_standalone_server"`` or ``"umbp_master"``.

    Raises:
        BackendUnavailable: MORI does not have it.
    """
    mori = importlib.import_module("mori")
    path = Path(str(mori.__file__)).parent / name
    if not os.access(path, os.X_OK):
        raise BackendUnavailable(f"MORI has no program {path}: pip install '{_DISTRIBUTION}'")
    return path


def runtime_directories() -> list[str]:
    """Returns where the HIP, HSA and CUDA runtimes of this process lie, for a server to load them.

    Where PyTorch brought them, a server would not find them by itself, or find others.
    """
    found: dict[str, None] = {}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")[2].strip()
        if _RUNTIME.match(path.rpartition("/")[2]):
            found["/" + path.rpartition("/")[0]] = None
    return list(found)


def hip_device_count() -> int | None:
    """Asks the HIP runtime that MORI has loaded how many devices it sees.

    Returns:
        The number, 0 when it fails; None when the process has no HIP runtime in its global scope.
    """
    count = ctypes.c_int(0)
    try:
        # MORI's import puts its libraries, and so the runtime, into the global scope.
        ctypes.CDLL(None).hipGetDeviceCount(ctypes.byref(count))
    except AttributeError:
        return None
    return count.value


def _is_on_cuda() -> bool:
    return hasattr(ctypes.CDLL(None), _ON_CUDA_MARK)


def _why_not_loaded(error: Exception) -> str:
    """Says in one line what is missing and what to do about it."""
    if isinstance(error, ModuleNotFoundError) and error.name == "mori":
        return (
            f"MORI is not installed: pip install '{_DISTRIBUTION}' "
            "(it has wheels for Python 3.10 and 3.12)"
        )
    text = " ".join(str(error).split())[:_REASON_CHARS_MAX]
    library = _SHARED_LIBRARY.search(text)
    if library is not None and "cannot open shared object file" in text:
        return (
            f"MORI is installed but its shared library {library.group()} is missing: install it "
            "or name its folder in LD_LIBRARY_PATH (docs/setup.md says how without ROCm)"
        )
    return f"MORI is installed but cannot be loaded: {text}"

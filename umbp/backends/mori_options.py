# SPDX-License-Identifier: Apache-2.0
"""What all backends on MORI have: the same options, and the same kinds of device."""

from typing import Any, Final

from umbp.backends.base import KVMemory, WorkerSite
from umbp.backends.mori_library import LOG_LEVELS, MoriLibrary
from umbp.errors import ConfigError
from umbp.options import option

DEVICE_TYPES: Final = ("cpu", "cuda")
"""Torch device types whose memory MORI moves; ROCm calls itself cuda, too."""


def put_retries_option() -> Any:
    """Declares the option ``put_retries``."""
    return option(
        1,
        help="How often an object that found no room is tried again.",
        minimum=0,
        maximum=16,
    )


def log_level_option(further: str = "") -> Any:
    """Declares the option ``log_level``.

    Args:
        further: What its help says beyond what is the same everywhere.
    """
    return option(
        None,
        help="Log level of MORI, which logs to standard output; null leaves it to the environment "
        f"variable MORI_UMBP_LOG_LEVEL. The first pool of a process decides.{further}",
        choices=LOG_LEVELS,
    )


def device_staging_option() -> Any:
    """Declares the option ``device_staging``."""
    return option(
        None,
        help="Whether the device gathers objects in its own memory (32 MiB for each transfer "
        "thread, more where an object has over 16 MiB), so that MORI moves each as one range. "
        "null: on NVIDIA GPUs, where MORI's gather kernel does not run.",
    )


def stages(device_staging: bool | None, library: MoriLibrary, memory: KVMemory) -> bool:
    """Says whether objects are gathered on the device, by the option or by what MORI runs on."""
    if device_staging is not None:
        return device_staging
    return library.is_on_cuda and all(region.device_type != "cpu" for region in memory.regions)


def require_device(backend: str, site: WorkerSite) -> None:
    """Refuses a worker whose memory MORI does not move.

    Args:
        backend: Name of the backend.
        site: The worker.

    Raises:
        ConfigError: It is on another kind of device.
    """
    if site.device_type not in DEVICE_TYPES:
        raise ConfigError(
            f"backend {backend} does not move memory of device type {site.device_type!r}, only "
            f"{' and '.join(DEVICE_TYPES)}: choose backend memory"
        )

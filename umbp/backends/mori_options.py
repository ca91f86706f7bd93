# SPDX-License-Identifier: Apache-2.0
"""What all backends on MORI have: the same options, and the same kinds of device."""

from typing import Any, Final

from umbp.backends.base import WorkerSite
from umbp.backends.mori_library import LOG_LEVELS
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
            f"{' and '.join(DEVICE_TYPES)} (ROCm): choose backend memory"
        )

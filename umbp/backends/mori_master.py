# SPDX-License-Identifier: Apache-2.0
"""Starts ``umbp_master``: checked options, the settings that umbp needs, a log.

What MORI 1.2.4 does and what is done about it:

* With its default it routes a node's put to any node, and without RDMA that put fails. It is
  started so that a node's objects stay with that node.
* Neither it nor its metrics port asks who comes, and the latter is open on every interface.
"""

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs

from umbp.backends.child_process import ChildProcess, add_library_directories
from umbp.backends.master_address import MasterAddress
from umbp.backends.mori_library import load_mori, runtime_directories, server_binary
from umbp.errors import ConfigError

DEFAULT_HEARTBEAT_TTL_S: Final = 10
DEFAULT_MISSED_HEARTBEATS: Final = 3
DEFAULT_EVICTION_INTERVAL_S: Final = 1
"""MORI's own is 5 s. Until the next look a full pool refuses stores."""

DEFAULT_METRICS_PORT: Final = 9091
_BINARY: Final = "umbp_master"


@attrs.frozen(kw_only=True)
class MasterSettings:
    """What a master is started with.

    Attributes:
        address: Where it listens.
        trust_network: Whether an address that others can reach is wanted.
        metrics_port: Port of its metrics, on every interface.
        heartbeat_ttl_s: Nodes send a heartbeat twice in that time.
        missed_heartbeats: A node is dead after so many times ``heartbeat_ttl_s``.
        eviction_interval_s: How often it looks for full pools.
        log_level: Log level of MORI; None leaves it to the environment.
    """

    address: MasterAddress
    trust_network: bool = False
    metrics_port: int = DEFAULT_METRICS_PORT
    heartbeat_ttl_s: int = DEFAULT_HEARTBEAT_TTL_S
    missed_heartbeats: int = DEFAULT_MISSED_HEARTBEATS
    eviction_interval_s: int = DEFAULT_EVICTION_INTERVAL_S
    log_level: str | None = None


def check_master_settings(settings: MasterSettings) -> None:
    """Refuses what cannot work, or would be open to others unasked.

    Raises:
        ConfigError: The address can be reached by others, is not this host's, or is in use.
    """
    address = settings.address
    if not (address.is_loopback or settings.trust_network):
        raise ConfigError(
            f"address {address} can be reached by other hosts, and a master answers whoever comes; "
            "add --trust-network if all who can reach it may read, replace and evict objects, or "
            "listen at 127.0.0.1"
        )
    _require_free(address.host, address.port, "address", "end who listens there, or choose another")
    _require_free("", settings.metrics_port, "metrics port", "choose another by --metrics-port")


def master_environment(
    settings: MasterSettings, inherited: Mapping[str, str], library_directories: list[str]
) -> dict[str, str]:
    """Builds the environment of a master.

    Args:
        settings: What it is started with.
        inherited: The variables to start from.
        library_directories: Where its libraries lie, if not where the system looks.
    """
    result = dict(inherited)
    add_library_directories(result, library_directories)
    result["UMBP_ROUTE_PUT_NODE_AFFINITY"] = "local"
    result["UMBP_HEARTBEAT_TTL_SEC"] = str(settings.heartbeat_ttl_s)
    result["UMBP_MAX_MISSED_HEARTBEATS"] = str(settings.missed_heartbeats)
    result["UMBP_REAPER_INTERVAL_SEC"] = str(max(1, settings.heartbeat_ttl_s // 2))
    result["UMBP_EVICTION_CHECK_INTERVAL_SEC"] = str(settings.eviction_interval_s)
    if settings.log_level is not None:
        result["MORI_UMBP_LOG_LEVEL"] = settings.log_level
    return result


def start_master(settings: MasterSettings, log_path: Path | None) -> ChildProcess:
    """Starts a master as a child of this process.

    Args:
        settings: What to start.
        log_path: Where it logs; None for this process's own output.

    Raises:
        ConfigError: The settings cannot work, or the log cannot be opened.
        BackendUnavailable: MORI is missing.
    """
    check_master_settings(settings)
    load_mori(settings.log_level)
    environment = master_environment(settings, os.environ, runtime_directories())
    command = [str(server_binary(_BINARY)), str(settings.address), str(settings.metrics_port)]
    return ChildProcess(command, environment, log_path, what=f"the master at {settings.address}")


def _require_free(host: str, port: int, what: str, advice: str) -> None:
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as wanted:
            # As gRPC binds it, so that connections of before that linger are no obstacle.
            wanted.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            wanted.bind(where)
    except OSError as error:
        shown = f"{host}:{port}" if host else str(port)
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{what} {shown} is in use; {advice}") from error
        raise ConfigError(f"{what} {shown} cannot be had: {error.strerror}") from error

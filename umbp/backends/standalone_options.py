# SPDX-License-Identifier: Apache-2.0
"""Options of the ``standalone`` backend."""

import attrs

from umbp.backends.mori_library import DEFAULT_READ_LEASE_MS
from umbp.backends.mori_options import (
    device_staging_option,
    log_level_option,
    put_retries_option,
)
from umbp.backends.server_address import ServerAddress, parse_address
from umbp.errors import ConfigError
from umbp.options import option


@attrs.frozen(kw_only=True)
class StandaloneOptions:
    """Options of the ``standalone`` backend.

    Raises:
        ConfigError: The address is no Unix socket, or a capacity is given or missing.
    """

    address: str = option(
        "",
        help="Where the server listens: unix:///absolute/path.grpc.sock. Default: server.grpc.sock "
        "in the user's private directory of umbp below the system's folder for temporary files.",
    )
    auto_start: bool = option(
        False,
        help="Start a server of capacity_bytes if nobody listens. It outlives the engine.",
    )
    capacity_bytes: int | None = option(
        None,
        help="Host memory of the server for objects of all engines; with auto_start only.",
        unit="bytes",
        minimum=1,
    )
    read_lease_ms: int = option(
        DEFAULT_READ_LEASE_MS,
        help="For how long the server keeps what is being loaded from eviction; the value that it "
        "was started with. A load call that takes as long has failed.",
        unit="ms",
        minimum=1,
        maximum=600_000,
    )
    startup_timeout_ms: int = option(
        10_000,
        help="How long a server is waited for when the engine starts.",
        unit="ms",
        minimum=100,
    )
    transfer_threads: int = option(
        1, help="Threads per rank that have objects copied.", minimum=1, maximum=16
    )
    queue_limit: int = option(
        4096, help="Transfers that may wait on each rank; more are not attempted.", minimum=1
    )
    device_staging: bool | None = device_staging_option()
    put_retries: int = put_retries_option()
    log_level: str | None = log_level_option(" With auto_start, the server's too.")

    def __attrs_post_init__(self) -> None:
        self.server_address()
        if self.auto_start and self.capacity_bytes is None:
            raise ConfigError("option auto_start is true and needs option capacity_bytes; set it")
        if self.capacity_bytes is not None and not self.auto_start:
            raise ConfigError(
                f"option capacity_bytes is {self.capacity_bytes}, but the server's pool has the "
                "size that it was started with; remove it, or set option auto_start"
            )

    def server_address(self) -> ServerAddress:
        """Returns the server's address.

        Raises:
            ConfigError: It is no Unix socket, or its path is relative or too long.
        """
        return parse_address(self.address)

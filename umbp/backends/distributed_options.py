# SPDX-License-Identifier: Apache-2.0
"""Options of the ``distributed`` backend."""

import attrs

from umbp.backends.master_address import PORT_MAX, MasterAddress, parse_master_address
from umbp.backends.mori_options import (
    device_staging_option,
    log_level_option,
    put_retries_option,
)
from umbp.backends.pool_options import PoolOptions
from umbp.errors import ConfigError
from umbp.options import REQUIRED, option


@attrs.frozen(kw_only=True)
class DistributedOptions(PoolOptions):
    """Options of the ``distributed`` backend.

    Raises:
        ConfigError: The master's address is none, the network is not said to be trusted, or two
            options do not go together.
    """

    master_address: str = option(
        REQUIRED, help="Where the master listens, HOST:PORT (`umbp serve master`)."
    )
    trust_network: bool = option(
        False,
        help="Must be true: MORI opens a port on every network interface of this host, where "
        "anybody who reaches it may read, replace and evict objects, without any authentication.",
    )
    node_address: str = option(
        "",
        help="IP address or name by which other nodes reach this host. Default: the address from "
        "which this host reaches the master.",
    )
    peer_service_port: int | None = option(
        None,
        help="Port of the node on device 0; that on device N gets this plus N, by the physical "
        "index, on a CPU by the rank. null: one that the system chooses.",
        minimum=1,
        maximum=PORT_MAX,
    )
    io_engine_host: str = option(
        "",
        help="IP address of the RDMA interface by which nodes exchange objects. Empty: they do "
        "not, and what only another node has fails to load.",
    )
    page_size_bytes: int | None = option(
        None,
        help="Page size of the pool; an object takes whole pages. null chooses the largest with "
        "which no object wastes more than 5 %. MORI's own would be 2 MiB.",
        unit="bytes",
        minimum=64,
    )
    ranged_scratch_bytes: int | None = option(
        None,
        help="Memory on each rank, beside the pool, through which objects of other nodes pass; at "
        "least one object. null: 16 MiB, or more where one object needs it.",
        unit="bytes",
        minimum=1,
    )
    cache_remote_fetches: bool = option(
        False,
        help="Keep a copy of what was loaded from another node. A pool fills faster with it.",
    )
    startup_timeout_ms: int = option(
        10_000,
        help="How long the master is waited for when the engine starts.",
        unit="ms",
        minimum=100,
    )
    device_staging: bool | None = device_staging_option()
    put_retries: int = put_retries_option()
    log_level: str | None = log_level_option()

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.master()
        if not self.trust_network:
            raise ConfigError(
                "option trust_network is false, but MORI opens a port on every network interface "
                "of this host where anybody may read, replace and evict objects without "
                "authentication; set it to true if all who reach this host may do that"
            )
        if self.cache_remote_fetches and not self.io_engine_host:
            raise ConfigError(
                "option cache_remote_fetches is true, but without option io_engine_host nothing is "
                "fetched; set that, or remove this"
            )
        if self.ranged_scratch_bytes is not None and not self.io_engine_host:
            raise ConfigError(
                f"option ranged_scratch_bytes is {self.ranged_scratch_bytes}, but without option "
                "io_engine_host nothing passes through it; set that, or remove this"
            )

    def master(self) -> MasterAddress:
        """Returns the master's address.

        Raises:
            ConfigError: It is no address.
        """
        return parse_master_address(self.master_address)

# SPDX-License-Identifier: Apache-2.0
"""Options that every backend with a pool in the worker has."""

from pathlib import Path
from typing import Final

import attrs

from umbp.backends.host_limits import MemoryLimits, memory_limits
from umbp.errors import ConfigError
from umbp.options import option

DEFAULT_TOTAL_CAPACITY_BYTES: Final = 4 << 30

_NODES: Final = Path("/sys/devices/system/node")


@attrs.frozen(kw_only=True)
class PoolOptions:
    """Size and threads of a pool of host memory.

    Raises:
        ConfigError: Both capacities are given.
    """

    total_capacity_bytes: int | None = option(
        None,
        help="Host memory for objects, summed over all ranks. 4 GiB if no capacity is given.",
        unit="bytes",
        minimum=1,
    )
    capacity_bytes: int | None = option(
        None,
        help="Host memory for objects on each rank, instead of total_capacity_bytes.",
        unit="bytes",
        minimum=1,
    )
    transfer_threads: int = option(
        1, help="Threads per rank that copy objects.", minimum=1, maximum=16
    )
    queue_limit: int = option(
        4096, help="Transfers that may wait on each rank; more are not attempted.", minimum=1
    )
    numa_node: int | None = option(
        None,
        help="NUMA node that pool memory is preferably taken from. null: where it is first used.",
        minimum=0,
    )
    prefault: bool = option(
        False, help="Touch all pool memory at start, instead of when it is first used."
    )

    def __attrs_post_init__(self) -> None:
        if self.capacity_bytes is not None and self.total_capacity_bytes is not None:
            raise ConfigError(
                f"option capacity_bytes is {self.capacity_bytes} and option total_capacity_bytes "
                f"is {self.total_capacity_bytes}; remove one of them"
            )

    def require_numa_node(self) -> None:
        """Refuses a node that this machine lacks; MORI would only log it, where nobody looks.

        Raises:
            ConfigError: It is lacking.
        """
        if self.numa_node is not None and not (_NODES / f"node{self.numa_node}").is_dir():
            raise ConfigError(
                f"option numa_node is {self.numa_node}, but {_NODES} has no such node; name one "
                "that it has"
            )

    def share_bytes(self, rank_count: int) -> int:
        """Returns the capacity of one rank, whether or not this machine has the memory.

        Raises:
            ConfigError: It is nothing.
        """
        return self._share(rank_count)[2]

    def _share(self, rank_count: int) -> tuple[str, int, int]:
        """Returns the option that decides, its value, and the capacity of one rank."""
        if self.capacity_bytes is not None:
            return "capacity_bytes", self.capacity_bytes, self.capacity_bytes
        name = "total_capacity_bytes"
        given = self.total_capacity_bytes or DEFAULT_TOTAL_CAPACITY_BYTES
        if given < rank_count:
            raise ConfigError(
                f"option {name} is {given}, nothing for each of {rank_count} ranks; raise it"
            )
        return name, given, given // rank_count

    def resolve_capacity_bytes(self, rank_count: int, limits: MemoryLimits | None = None) -> int:
        """Computes the capacity of one rank, and checks that this machine has the memory.

        Ranks open their pools at different moments, and some touch all of their memory at once.
        What is still available can therefore only be held against this rank's own share; the sum
        over ranks is held against what there is in all.

        Args:
            rank_count: Number of ranks, all on this machine.
            limits: What there is; None to ask the system.

        Returns:
            Bytes; times ``rank_count`` never more than ``total_capacity_bytes``.

        Raises:
            ConfigError: The memory is not there, or the share of a rank is nothing.
        """
        name, given, capacity = self._share(rank_count)
        limits = limits or memory_limits()
        if limits is None:
            return capacity
        if capacity > limits.available_bytes:
            there = f"{limits.available_bytes} bytes are available"
        elif capacity * rank_count > limits.total_bytes:
            there = f"this machine has {limits.total_bytes} bytes in all"
        else:
            return capacity
        most = min(limits.available_bytes, limits.total_bytes)
        if name == "capacity_bytes":
            most //= rank_count
        raise ConfigError(
            f"option {name} is {given}, {capacity} bytes for each of {rank_count} ranks, but "
            f"{there}; set it to at most {most}"
        )

# SPDX-License-Identifier: Apache-2.0
"""Joins a master: as a pool node, whose objects others find, or as a client that only asks.

What MORI 1.2.4 does, found by running its wheel, and what is done about it:

* An identity that is in use is refused, and one whose process died is in use until the master
  misses it. Every identity has a part that is never used again.
* A master asks a node over its peer service to evict. A node without one (port 0) stays full for
  ever, so a pool node always has a port.
* A master routes a put to another node unless it was started with
  ``UMBP_ROUTE_PUT_NODE_AFFINITY=local``, and to another node in any case while this one is full.
* Pages are 2 MiB, and scratch memory for ranged calls is none, unless they are set.
* A constructor whose master is stopped waits for it with no deadline, and holds the interpreter's
  lock meanwhile. The master is greeted right before.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from umbp.backends.base import WorkerSite
from umbp.backends.distributed_options import DistributedOptions
from umbp.backends.master_address import PORT_MAX, MasterAddress, Presence
from umbp.backends.mori_client import MoriClient
from umbp.backends.mori_library import READ_LEASE_VARIABLE, MoriLibrary, parse_read_lease_ms
from umbp.backends.mori_pages import WASTE_MAX, choose_page_bytes, pages_of
from umbp.errors import BackendUnavailable, ConfigError

logger = logging.getLogger(__name__)

READ_LEASE_MS: Final = 5000
"""For how long a load keeps its objects from eviction, unless the environment says otherwise. The
master picks victims without a thought of what this node loads, so there is nothing to lose."""

_SCRATCH_BYTES: Final = 16 << 20
_GREETING_TIMEOUT_S: Final = 0.5
_POLL_S: Final = 0.05
_NAME_CHARS_MAX: Final = 200


@attrs.frozen
class NodePlan:
    """The pool of one node.

    Attributes:
        page_bytes: Size of a page.
        page_count: Number of pages.
        scratch_bytes: Memory through which objects of other nodes pass.
    """

    page_bytes: int
    page_count: int
    scratch_bytes: int

    @property
    def capacity_bytes(self) -> int:
        """Size of the pool, whole pages."""
        return self.page_bytes * self.page_count


def plan_node(
    options: DistributedOptions, capacity_bytes: int, object_sizes: Sequence[int]
) -> NodePlan:
    """Plans a pool for objects of the given sizes.

    Args:
        options: The options.
        capacity_bytes: What the pool may take.
        object_sizes: Bytes, at least one, all positive.

    Raises:
        ConfigError: The pool, or the scratch memory, cannot hold one object.
    """
    largest_bytes = max(object_sizes)
    page_bytes = options.page_size_bytes or choose_page_bytes(object_sizes)
    needed_bytes = pages_of(largest_bytes, page_bytes) * page_bytes
    if capacity_bytes < needed_bytes:
        raise ConfigError(
            f"a pool of {capacity_bytes} bytes per rank has no room for an object of "
            f"{largest_bytes} bytes in pages of {page_bytes}; raise option total_capacity_bytes or "
            f"capacity_bytes, to at least {needed_bytes} per rank"
        )
    for size in object_sizes:
        taken_bytes = pages_of(size, page_bytes) * page_bytes
        if taken_bytes > (1 + WASTE_MAX) * size:
            logger.warning(
                "objects of %d bytes take %d in pages of %d, as option page_size_bytes says",
                size,
                taken_bytes,
                page_bytes,
            )
    scratch_bytes = options.ranged_scratch_bytes
    if scratch_bytes is None:
        scratch_bytes = max(_SCRATCH_BYTES if options.io_engine_host else 0, largest_bytes)
    elif scratch_bytes < largest_bytes:
        raise ConfigError(
            f"option ranged_scratch_bytes is {scratch_bytes}, but an object of this model has "
            f"{largest_bytes} bytes; set it to at least that"
        )
    return NodePlan(page_bytes, capacity_bytes // page_bytes, scratch_bytes)


def node_identity(role: str, instance: str) -> str:
    """Makes an identity that nobody has or had: host, process, role, engine and a random part."""
    name = f"{socket.gethostname()}-{os.getpid()}-{role}-{instance}"[:_NAME_CHARS_MAX]
    return f"{name}-{secrets.token_hex(4)}"


def peer_service_port(options: DistributedOptions, site: WorkerSite) -> int:
    """Returns the port of a worker's peer service, which is free at this moment.

    Raises:
        ConfigError: It is in use, or too large.
    """
    base = options.peer_service_port
    if base is None:
        with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as free:
            free.bind(("", 0))
            return int(free.getsockname()[1])
    index = site.physical_device_index
    where = f"device {index}" if index is not None else f"rank {site.rank}"
    port = base + (index if index is not None else site.rank)
    if port > PORT_MAX:
        raise ConfigError(
            f"option peer_service_port is {base}, and the node of {where} would get {port}, more "
            f"than {PORT_MAX}; lower it"
        )
    try:
        with socket.socket(socket.AF_INET) as wanted:
            # As gRPC binds it, so that connections of before that linger are no obstacle.
            wanted.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            wanted.bind(("", port))
    except OSError as error:
        raise ConfigError(
            f"option peer_service_port is {base}, but port {port}, of {where}, cannot be had "
            f"({error.strerror}); choose another, or remove the option"
        ) from error
    return port


def join_as_node(
    library: MoriLibrary, options: DistributedOptions, site: WorkerSite, plan: NodePlan
) -> MoriClient:
    """Makes the client of a pool node.

    Raises:
        ConfigError: Its port is in use.
        BackendUnavailable: The master does not take it.
    """
    config = _base_config(library, options, node_identity(f"rank{site.rank}", site.instance))
    dram = config.dram
    dram.capacity_bytes = plan.capacity_bytes
    dram.prefault = options.prefault
    if options.numa_node is not None:
        dram.numa_nodes = [options.numa_node]
    node = config.distributed
    node.dram_page_size = plan.page_bytes
    node.ranged_scratch_size = plan.scratch_bytes
    node.local_first = True
    node.cache_remote_fetches = options.cache_remote_fetches
    node.peer_service_port = peer_service_port(options, site)
    if options.io_engine_host:
        node.io_engine.host = options.io_engine_host
    config.distributed = node
    return _join(library, options, config)


def join_to_ask(library: MoriLibrary, options: DistributedOptions, instance: str) -> MoriClient:
    """Makes a client with no pool, no I/O engine and no peer service.

    Raises:
        BackendUnavailable: The master does not take it.
    """
    config = _base_config(library, options, node_identity("lookup", instance))
    config.dram.capacity_bytes = 0
    node = config.distributed
    node.local_first = False
    node.cache_remote_fetches = False
    node.peer_service_port = 0
    config.distributed = node
    return _join(library, options, config)


def wait_for_master(
    address: MasterAddress, give_up_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Waits until a master answers.

    Args:
        address: The master.
        give_up_s: Until when, by ``time.monotonic()``.
        check: Called between two looks; raises when there is no more hope.

    Raises:
        BackendUnavailable: It has not.
    """
    while (presence := address.presence(_GREETING_TIMEOUT_S)) is not Presence.ANSWERS:
        check()
        if time.monotonic() >= give_up_s:
            problem = "does not answer" if presence is Presence.SILENT else "is not there"
            raise BackendUnavailable(
                f"the master at {address} {problem}: start one with `umbp serve master --address "
                f"{address}`, or correct option master_address"
            )
        time.sleep(_POLL_S)


def effective_read_lease_ms() -> int:
    """Returns what MORI, which must have been loaded, has taken from the environment."""
    return parse_read_lease_ms(os.environ.get(READ_LEASE_VARIABLE, ""))


def _base_config(library: MoriLibrary, options: DistributedOptions, identity: str) -> Any:
    config = library.config_type()
    config.ssd.enabled = False
    node = library.node_config_type()
    node.master_config.master_address = str(options.master())
    node.master_config.node_id = identity
    node.master_config.node_address = options.node_address or options.master().address_towards()
    config.distributed = node
    return config


def _join(library: MoriLibrary, options: DistributedOptions, config: Any) -> MoriClient:
    master = options.master()
    wait_for_master(master, time.monotonic() + options.startup_timeout_ms / 1000)
    return MoriClient(
        library,
        config,
        put_retries=options.put_retries,
        read_lease_ms=effective_read_lease_ms(),
        master=str(master),
    )

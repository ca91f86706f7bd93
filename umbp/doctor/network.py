# SPDX-License-Identifier: Apache-2.0
"""Checks of what engines reach each other by: RDMA devices, ports and sockets."""

import os
import stat
from pathlib import Path
from typing import Final

from umbp.backends.distributed_options import DistributedOptions
from umbp.backends.master_address import PORT_MAX, Presence
from umbp.backends.server_address import how_to_start
from umbp.backends.socket_path import live_sockets, socket_path
from umbp.backends.standalone_options import StandaloneOptions
from umbp.doctor.finding import Result, fail, ok, skip, warn
from umbp.doctor.host import Host
from umbp.doctor.plan import EnginePlan
from umbp.errors import BackendUnavailable, ConfigError
from umbp.keys import NAMESPACE_BYTES

_DEVICES: Final = "sys/class/infiniband"


def rdma(host: Host, plan: EnginePlan) -> Result:
    """There is an RDMA device that works, and the address that is to be used is this host's."""
    address = plan.option("io_engine_host")
    devices = host.names(_DEVICES)
    shown = ", ".join(devices) or "no device"
    if not address:
        return skip(f"{shown}; option io_engine_host is not set")
    if not devices:
        return fail(
            f"option io_engine_host is {address!r}, and {_DEVICES} names no device",
            "load the driver of the network card, give the container /dev/infiniband, or remove "
            "io_engine_host: nodes then exchange nothing",
        )
    reason = host.why_not_bound(address, 0)
    if reason is not None:
        advice = "name the IP address of this host's RDMA interface"
        what = f"option io_engine_host is {address!r}, no address of this host ({reason})"
        return fail(what, advice)
    active = [name for name in devices if _is_active(host, name)]
    if not active:
        advice = "check cable and link: `ibstat`, `ip link`"
        return warn(f"no port of {shown} is active", advice)
    return ok(f"{', '.join(active)} active")


def _is_active(host: Host, device: str) -> bool:
    ports = f"{_DEVICES}/{device}/ports"
    # Such as "4: ACTIVE".
    return any(
        (host.read(f"{ports}/{port}/state") or "").endswith("ACTIVE") for port in host.names(ports)
    )


def node_ports(host: Host, plan: EnginePlan) -> Result:
    """The ports of the nodes are free."""
    base = plan.option("peer_service_port")
    if base is None:
        return skip("none is chosen by an option")
    ports = range(base, base + plan.ranks)
    if ports[-1] > PORT_MAX:
        what = (
            f"option peer_service_port is {base}, and rank {plan.ranks - 1} would get {ports[-1]}"
        )
        return fail(what, f"set it to at most {PORT_MAX - plan.ranks + 1}")
    taken = {port: reason for port in ports if (reason := host.why_not_bound("", port))}
    if taken:
        shown = ", ".join(f"{port} ({reason})" for port, reason in taken.items())
        advice = "end what listens there (`ss -ltnp`), or set option peer_service_port to another"
        return fail(f"cannot be had: {shown}", advice)
    return ok(f"{ports[0]} to {ports[-1]} are free")


def master(host: Host, plan: EnginePlan) -> Result:
    """The master of a distributed pool answers."""
    options = plan.works.backend_options
    if not isinstance(options, DistributedOptions):
        return skip("backend distributed alone has one")
    address = options.master()
    match host.presence(address):
        case Presence.ANSWERS:
            return ok(f"{address} answers")
        case Presence.GONE:
            advice = f"start it: umbp serve master --address {address}; or correct master_address"
            return fail(f"nobody listens at {address}", advice)
        case Presence.SILENT:
            advice = "it is stopped, or a firewall drops what is sent; restart it, or open its port"
            return fail(f"{address} does not answer", advice)


def server(_: Host, plan: EnginePlan) -> Result:
    """The server of a standalone pool listens, or may be started."""
    options = plan.works.backend_options
    if not isinstance(options, StandaloneOptions):
        return skip("backend standalone alone has one")
    address = options.server_address()
    try:
        address.require_private()
    except BackendUnavailable:
        listener = None
    except ConfigError as error:
        return fail(str(error))
    else:
        listener = address.listener()
    if listener is not None:
        who = f"process {listener}" if listener else "somebody"
        return ok(f"{who} listens at {address}")
    if options.auto_start:
        return ok(f"none at {address}: the engine starts one")
    return fail(f"nobody listens at {address}", how_to_start(address))


def lookup_sockets(host: Host, plan: EnginePlan) -> Result:
    """The engine may make its lookup sockets, and no other engine has them."""
    if plan.is_shared:
        return skip("none is needed")
    instance = plan.works.options.lookup_instance
    directory = plan.socket_directory(host.environment)
    try:
        longest = socket_path(
            directory.parent,
            namespace=bytes(NAMESPACE_BYTES),
            dp_index=0,
            instance=instance,
            rank=plan.ranks - 1,
        )
    except ConfigError as error:
        return fail(str(error))
    problem = _why_not_private(directory)
    if problem:
        advice = (
            f"set option socket_dir to a directory in which umbp may make {longest.parent.name}"
        )
        return fail(problem, advice)
    live = {path: pid for path, pid in live_sockets(directory).items() if _is_of(path, instance)}
    if live:
        who = ", ".join(sorted({str(pid) if pid else "unknown" for pid in live.values()}))
        return warn(
            f"{len(live)} are served in {directory} by process {who}",
            "a second engine of the same model on this host needs a lookup_instance of its own",
        )
    return ok(f"{directory}: free")


def _is_of(path: Path, instance: str) -> bool:
    """Says whether a socket's name could be one of this engine, whose namespace is not known."""
    middle = path.name.removesuffix(".sock").split("-", 2)[-1]
    return middle.startswith(f"{instance}-rank") if instance else middle.startswith("rank")


def _why_not_private(directory: Path) -> str:
    """Says what is wrong with a private directory that is there, or why it cannot be made."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        if os.access(directory.parent, os.W_OK | os.X_OK):
            return ""
        return f"{directory} cannot be made: {directory.parent} is missing or not writable"
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{directory} is not a directory"
    if found.st_uid != os.geteuid():
        return f"{directory} belongs to user {found.st_uid}, not {os.geteuid()}"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"{directory} may be entered by others (chmod 700 {directory})"
    return ""

# SPDX-License-Identifier: Apache-2.0
"""``umbp serve master``: runs the master that nodes of the ``distributed`` backend join."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbp.cli.foreground import Program, run_in_foreground
from umbp.cli.serve_options import add_common, count

if TYPE_CHECKING:
    from umbp.backends.mori_master import MasterSettings


def add_master(kinds: Any) -> None:
    """Adds the kind to the command."""
    master = kinds.add_parser(
        "master",
        help="MORI's master, which lists what nodes store (backend distributed)",
        description="Runs MORI's umbp_master: it lists the objects of all nodes and tells full ones"
        " what to evict. It holds no objects. It runs until SIGINT or SIGTERM. Exit status 0: it"
        " was told to stop; 1: it ended by itself.",
        allow_abbrev=False,
    )
    master.add_argument(
        "--address", required=True, metavar="HOST:PORT", help="where to listen; no default"
    )
    master.add_argument(
        "--trust-network",
        action="store_true",
        help="allow an address that other hosts reach: nobody is asked who they are",
    )
    for name, default, text in (
        ("--metrics-port", 9091, "port of the metrics, open on every interface"),
        ("--heartbeat-ttl-s", 10, "nodes report what they stored or lost twice in that time"),
        ("--missed-heartbeats", 3, "a node is given up after so many times --heartbeat-ttl-s"),
        ("--eviction-interval-s", 1, "how often to look for full pools, which refuse stores"),
    ):
        master.add_argument(
            name, type=count, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    add_common(master, log_file="the terminal")
    master.set_defaults(run=_run_master)


def _run_master(parsed: argparse.Namespace) -> int:
    from umbp.backends.master_address import parse_master_address
    from umbp.backends.mori_master import MasterSettings, start_master

    settings = MasterSettings(
        address=parse_master_address(parsed.address, "--address"),
        trust_network=parsed.trust_network,
        metrics_port=parsed.metrics_port,
        heartbeat_ttl_s=parsed.heartbeat_ttl_s,
        missed_heartbeats=parsed.missed_heartbeats,
        eviction_interval_s=parsed.eviction_interval_s,
        log_level=parsed.log_level,
    )
    log_path = None if parsed.log_file in (None, "-") else Path(parsed.log_file)
    return run_in_foreground(
        f"start the master at {settings.address}",
        lambda: start_master(settings, log_path),
        lambda master: _await_master(master, settings, parsed.startup_timeout_ms),
        describe=lambda master: (
            f"process {master.process_id} lists objects at {settings.address}, metrics at port "
            f"{settings.metrics_port}, log {log_path or 'here'}"
        ),
    )


def _await_master(master: Program, settings: "MasterSettings", startup_timeout_ms: int) -> None:
    """Waits until the master answers."""
    from umbp.backends.mori_node import wait_for_master

    give_up_s = time.monotonic() + startup_timeout_ms / 1000
    wait_for_master(settings.address, give_up_s, master.require_running)

# SPDX-License-Identifier: Apache-2.0
"""Options of ``umbp doctor``."""

import argparse
from typing import Any, Final

from umbp.cli.arguments import positive

HASHES: Final = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
"""What vLLM's --prefix-caching-hash-algo takes."""


def add_doctor(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    doctor = commands.add_parser(
        "doctor",
        help="check this machine and a configuration before an engine starts",
        description="Looks at this machine, what is installed and a configuration, and says what"
        " would keep an engine from starting or from restoring anything. Run it where the engine"
        " will run: same user, container, environment variables. Exit status 0: nothing failed,"
        " though there may be warnings; 1: something failed.",
        allow_abbrev=False,
    )
    doctor.add_argument(
        "--config",
        default="{}",
        metavar="JSON|@FILE",
        help="vLLM's --kv-transfer-config, or its kv_connector_extra_config alone"
        " (default: umbp's defaults)",
    )
    doctor.add_argument(
        "--tensor-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="as for vLLM (default: %(default)s)",
    )
    doctor.add_argument(
        "--prefix-caching-hash-algo",
        choices=HASHES,
        default=HASHES[0],
        help="as for vLLM (default: %(default)s)",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead")
    doctor.set_defaults(run=_run_doctor)


def _run_doctor(parsed: argparse.Namespace) -> int:
    from umbp.cli.doctor import run_doctor

    return run_doctor(parsed)

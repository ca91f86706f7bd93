# SPDX-License-Identifier: Apache-2.0
"""All checks, in the order in which they are reported."""

from collections.abc import Callable, Sequence
from typing import Final

import attrs

from umbp.doctor import memory, network, settings, software
from umbp.doctor.finding import Finding, Result, skip
from umbp.doctor.host import Host
from umbp.doctor.plan import EnginePlan


@attrs.frozen
class Check:
    """A check.

    Attributes:
        subject: What it looks at, in a word or two.
        look: Looks.
        needs_options: Whether it says something only where the options can work.
    """

    subject: str
    look: Callable[[Host, EnginePlan], Result]
    needs_options: bool = True


CHECKS: Final = (
    Check("Python", software.python, needs_options=False),
    Check("vLLM", software.vllm, needs_options=False),
    Check("PyTorch", software.gpus, needs_options=False),
    Check("options", settings.options, needs_options=False),
    Check("backend", software.backend),
    Check("HIP runtime", software.hip_runtime),
    Check("host memory", memory.host_memory),
    Check("huge pages", memory.huge_pages),
    Check("memlock", memory.locked_memory),
    Check("/dev/shm", memory.shared_memory, needs_options=False),
    Check("NUMA", memory.numa),
    Check("RDMA", network.rdma),
    Check("ports", network.node_ports),
    Check("master", network.master),
    Check("server", network.server),
    Check("lookup sockets", network.lookup_sockets),
    Check("kv_role", settings.role),
    Check("failure policy", settings.failure_policy, needs_options=False),
    Check("lookups", settings.lookups),
    Check("block hashes", settings.block_hashes),
    Check("allocator", settings.allocator, needs_options=False),
)


def examine(host: Host, plan: EnginePlan, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Makes every check.

    Args:
        host: The machine.
        plan: What is to be started.
        checks: The checks.
    """
    return [
        Finding(
            check.subject,
            skip("the options cannot work")
            if check.needs_options and plan.checked is None
            else check.look(host, plan),
        )
        for check in checks
    ]

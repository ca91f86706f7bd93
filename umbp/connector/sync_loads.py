# SPDX-License-Identifier: Apache-2.0
"""What vLLM's prefix cache must not show of a load that runs within a step.

vLLM puts the blocks of such a load into its prefix cache before they are filled.
"""

from typing import Any

from umbp.connector.groups import GroupRules
from umbp.connector.pins import BlockPins
from umbp.fsm import Core, TransferLease


def shares_open_load(core: Core, request: Any, local_tokens: int) -> bool:
    """Says whether the engine's own hit rests on blocks that a step is still to load."""
    unit = core.limits.unit_tokens
    for lease in core.leases.values():
        first = lease.begin_tokens // unit
        if (
            lease.synchronous
            and lease.begin_tokens < local_tokens
            and lease.source.block_hashes[first] == request.block_hashes[first]
        ):
            return True
    return False


def uncache(lease: TransferLease, rules: GroupRules, pins: BlockPins) -> None:
    """Takes what a failed synchronous load has left behind out of vLLM's prefix cache.

    That is the blocks of the load, and those that the same step computed from them. vLLM leaves all
    of them to be found until the request has computed them again, and for ever when it is aborted
    before.
    """
    first = lease.begin_tokens // rules.hash_tokens
    # Only a model with one group loads within a step.
    (group,) = rules.groups
    pins.uncache(lease.source.block_hashes[first:], group.index)

# SPDX-License-Identifier: Apache-2.0
"""Keeps KV memory from filling with requests that have loaded and then cannot start.

vLLM gives a request that loads between steps only the blocks of the load. Several such requests can
take all blocks there are; none can then be given the rest of its prompt, none is running, and vLLM
preempts running requests only: the engine would stand still for ever. So a request that would leave
too little for those before it waits until they have started, whether it is to load or not: one at
the head of vLLM's queue that cannot be given its blocks keeps those behind it from starting, too.
"""

from collections.abc import Sequence
from typing import Any

from umbp.connector.groups import GroupRules


class Room:
    """Requests that load, or have loaded and not started yet, and what they still need.

    Args:
        rules: Cache-group rules.
        block_pool: vLLM's ``BlockPool``.
    """

    def __init__(self, rules: GroupRules, block_pool: Any) -> None:
        self._rules = rules
        self._pool = block_pool
        # By request id: blocks that it still needs in order to start.
        self._owed: dict[str, int] = {}
        # Of all of them: a queue of a thousand asks a thousand times in a step.
        self._owed_by_all = 0

    @property
    def owed_blocks(self) -> int:
        """Free blocks that requests count on which have loaded, or load, and have not started."""
        return self._owed_by_all

    def is_short(self, request: Any) -> bool:
        """Says whether this request has to wait until others have started."""
        owed = self._owed_by_all - self._owed.get(request.request_id, 0)
        return bool(owed and self._needs(request) + owed > self._pool.get_num_free_blocks())

    def take(self, request: Any, table: Sequence[Sequence[int]]) -> None:
        """Notes a request that loads.

        Args:
            request: vLLM's request.
            table: Ids of the blocks that it was given, for each group.
        """
        self.leave(request.request_id)
        self._owed[request.request_id] = blocks = self._needs(request, table)
        self._owed_by_all += blocks

    def leave(self, request_id: str) -> None:
        """Notes that a request has started, or will not start from a load."""
        self._owed_by_all -= self._owed.pop(request_id, 0)

    def _needs(self, request: Any, table: Sequence[Sequence[int]] | None = None) -> int:
        """Returns the most blocks that a request must still be given so that it can start."""
        tokens = request.num_tokens + 1
        blocks = 0
        for group in self._rules.groups:
            held = len(table[group.index]) if table is not None else 0
            # Of state, all but the last are null blocks.
            wanted = 1 if group.is_state and not held else -(-tokens // group.block_tokens)
            blocks += max(0, wanted - held) + group.start_blocks
        return blocks

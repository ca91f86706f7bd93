# SPDX-License-Identifier: Apache-2.0
"""How the objects of one worker pass between KV memory and MORI.

MORI moves the ranges of an object one by one, or all by its gather kernel. The kernel needs ROCm;
an NVIDIA GPU cannot run it, and one copy per range keeps the link idle. There the GPU gathers
objects in a small part of its own memory, and MORI moves each as one range.
"""

from collections.abc import Sequence
from typing import Protocol

import attrs

from umbp.backends.base import KVMemory, MemoryRegion, TransferPart
from umbp.backends.mori_client import MoriClient, Moved
from umbp.backends.mori_columns import GroupColumns


class Transfers(Protocol):
    """Moves parts of jobs. Thread-safe.

    Attributes:
        regions: The memory that MORI must be told of.
    """

    @property
    def regions(self) -> tuple[MemoryRegion, ...]: ...

    def store(
        self,
        client: MoriClient,
        names: Sequence[str],
        part: TransferPart,
        *,
        objects_per_put: int,
    ) -> Moved:
        """Copies blocks into the objects that do not exist yet.

        Args:
            client: Moves the bytes.
            names: MORI's names of the part's objects, no duplicates.
            part: The blocks, which were checked.
            objects_per_put: Most objects that one put finds room for.
        """

    def load(self, client: MoriClient, names: Sequence[str], part: TransferPart) -> Moved:
        """Copies objects into blocks, and returns once they have arrived."""


@attrs.frozen
class DirectTransfers:
    """Hands MORI the ranges of every block."""

    _memory: KVMemory
    _columns: dict[int, GroupColumns]

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """All of KV memory."""
        return self._memory.regions

    def store(
        self,
        client: MoriClient,
        names: Sequence[str],
        part: TransferPart,
        *,
        objects_per_put: int,
    ) -> Moved:
        """See ``Transfers.store``."""
        columns = self._columns[part.group_index]
        return client.store(names, columns, part.block_ids, objects_per_put=objects_per_put)

    def load(self, client: MoriClient, names: Sequence[str], part: TransferPart) -> Moved:
        """See ``Transfers.load``."""
        return client.load(names, self._columns[part.group_index], part.block_ids)


def open_transfers(
    memory: KVMemory,
    columns: dict[int, GroupColumns],
    *,
    staged: bool,
    thread_count: int,
) -> Transfers:
    """Chooses how objects pass.

    Args:
        memory: KV memory.
        columns: Layout of each group.
        staged: Whether the device gathers objects first.
        thread_count: Transfers that run at the same time.

    Raises:
        BackendError: KV memory lies on several devices and is to be gathered.
    """
    if not staged:
        return DirectTransfers(memory, columns)
    # It imports torch, which MORI has imported already; umbp's own modules load without it.
    from umbp.backends.staged_transfers import StagedTransfers

    return StagedTransfers(memory, thread_count)

# SPDX-License-Identifier: Apache-2.0
"""Gathers and scatters the objects of one group by torch's own calls, on any device torch knows.

A range is a row of a table over its allocation, and one call moves many rows
(``umbp.backends.copiers`` says how). Ranges of one allocation need one call, ranges of many
allocations one call each.
"""

import math
from typing import Any, Final

import attrs
import numpy as np
import torch

from umbp.backends.base import Int64Array, KVMemory, ObjectLayout
from umbp.backends.layout_columns import region_indices

ELEMENT_TYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def element_bytes_of(memory: KVMemory, layout: ObjectLayout) -> int:
    """Returns the widest element, in bytes, that every range of a layout is made of.

    Args:
        memory: KV memory.
        layout: A layout whose ranges all have one length.
    """
    regions = region_indices(memory, layout)
    return math.gcd(
        8,
        int(layout.range_bytes[0]),
        *layout.base_addresses.tolist(),
        *layout.block_strides.tolist(),
        *(memory.regions[index].address for index in regions),
        *(memory.regions[index].tensor.storage_offset() for index in regions),
    )


@attrs.frozen(eq=False)
class _Run:
    """Rows that follow one another in an object and lie in the same allocation.

    Attributes:
        table: elements[rows, row], the allocation as overlapping rows.
        layout: The ranges that are these rows, one each.
        address: Address of row 0.
    """

    table: Any
    layout: ObjectLayout
    address: int


class TorchRows:
    """The rows of one group. See ``umbp.backends.device_gather.Rows``.

    Args:
        memory: KV memory, on one device.
        layout: A layout whose ranges all have one length.

    Raises:
        BackendError: The layout reaches outside of KV memory.
    """

    def __init__(self, memory: KVMemory, layout: ObjectLayout) -> None:
        regions = region_indices(memory, layout)
        self._device = memory.regions[0].tensor.device
        self._element_bytes = element_bytes_of(memory, layout)
        self._row_elements = int(layout.range_bytes[0]) // self._element_bytes
        self._row_count = len(layout.range_bytes)
        cuts = (np.flatnonzero(np.diff(regions)) + 1).tolist()
        self._runs = [
            self._open_run(memory, layout, int(regions[first]), slice(first, last))
            for first, last in zip((0, *cuts), (*cuts, len(regions)), strict=True)
        ]

    def locate(self, block_ids: Int64Array) -> list[Any]:
        """See ``Rows.locate``: for every run int64[objects, rows of the run], on the device."""
        return [
            torch.from_numpy(
                (run.layout.addresses(block_ids) - run.address) // self._element_bytes
            ).to(self._device)
            for run in self._runs
        ]

    def gather(self, located: list[Any], part: slice, staging: Any) -> None:
        """See ``Rows.gather``."""
        numbers = [of_run[part].reshape(-1) for of_run in located]
        objects = self._as_rows(staging)
        if len(self._runs) == 1:
            torch.index_select(self._runs[0].table, 0, numbers[0], out=objects.flatten(0, 1))
            return
        pieces = [
            run.table.index_select(0, chosen).unflatten(0, (len(objects), -1))
            for run, chosen in zip(self._runs, numbers, strict=True)
        ]
        torch.cat(pieces, dim=1, out=objects)

    def scatter(self, located: list[Any], part: slice, staging: Any) -> None:
        """See ``Rows.scatter``."""
        numbers = [of_run[part].reshape(-1) for of_run in located]
        counts = [len(run.layout.range_bytes) for run in self._runs]
        pieces = self._as_rows(staging).split(counts, dim=1)
        for run, chosen, piece in zip(self._runs, numbers, pieces, strict=True):
            run.table.index_copy_(0, chosen, piece.flatten(0, 1))

    def _as_rows(self, staging: Any) -> Any:
        """Views a buffer of whole objects as elements[objects, rows, row]."""
        elements = staging.view(ELEMENT_TYPES[self._element_bytes])
        return elements.view(-1, self._row_count, self._row_elements)

    def _open_run(
        self, memory: KVMemory, layout: ObjectLayout, region_index: int, rows: slice
    ) -> _Run:
        region = memory.regions[region_index]
        whole = region.size_bytes // self._element_bytes * self._element_bytes
        elements = region.tensor[:whole].view(ELEMENT_TYPES[self._element_bytes])
        shape = (len(elements) - self._row_elements + 1, self._row_elements)
        part = ObjectLayout(
            group_index=layout.group_index,
            block_count=layout.block_count,
            base_addresses=layout.base_addresses[rows],
            block_strides=layout.block_strides[rows],
            range_bytes=layout.range_bytes[rows],
        )
        return _Run(elements.as_strided(shape, (1, 1)), part, region.address)

# SPDX-License-Identifier: Apache-2.0
"""Gathers and scatters the objects of one group by one Triton kernel, on CUDA and on ROCm.

The kernel takes addresses, so ranges in any number of allocations cost one launch. vLLM allocates
KV memory layer by layer, and torch's own calls are one a layer: with 32 layers the launches alone
take as long as the copy to the host.

Import it only where Triton is installed, as it is with PyTorch for CUDA and ROCm.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from umbp.backends.base import Int64Array, KVMemory, ObjectLayout
from umbp.backends.torch_rows import ELEMENT_TYPES, element_bytes_of

_TILE_BYTES: Final = 8 << 10
"""What one program of the kernel moves: enough to keep the memory busy, and little enough that a
single object of one range is spread over the device."""


# Compiled once for every group, when it is opened: nothing that changes from call to call is a
# constant, and nothing is specialised by its value.
@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["block_ids", "staging"])
def _move_rows(  # type: ignore[no-untyped-def] # noqa: PLR0913 - as Triton wants it
    bases,
    strides,
    block_ids,
    first,
    staging,
    row_count: tl.constexpr,
    row_elements: tl.constexpr,
    tile_elements: tl.constexpr,
    into_staging: tl.constexpr,
):
    """Moves one tile of one row of one object between KV memory and the staging buffer.

    bases, strides: int64[rows], where each row lies in block 0, and how far apart blocks are.
    block_ids: int64[objects], of which those from ``first`` on lie in the staging buffer.
    """
    index = tl.program_id(0)
    place = index // row_count
    row = index % row_count
    block = tl.load(block_ids + first + place)
    address = tl.load(bases + row) + block * tl.load(strides + row)
    in_kv = address.to(tl.pointer_type(staging.dtype.element_ty))
    in_staging = staging + index.to(tl.int64) * row_elements
    at = tl.program_id(1) * tile_elements + tl.arange(0, tile_elements)
    inside = at < row_elements
    if into_staging:
        tl.store(in_staging + at, tl.load(in_kv + at, mask=inside), mask=inside)
    else:
        tl.store(in_kv + at, tl.load(in_staging + at, mask=inside), mask=inside)


class TritonRows:
    """The rows of one group. See ``umbp.backends.device_gather.Rows``.

    Args:
        memory: KV memory, on one device.
        layout: A layout whose ranges all have one length.

    Raises:
        BackendError: The layout reaches outside of KV memory.
    """

    def __init__(self, memory: KVMemory, layout: ObjectLayout) -> None:
        self._device = memory.regions[0].tensor.device
        element_bytes = element_bytes_of(memory, layout)
        self._element_type = ELEMENT_TYPES[element_bytes]
        self._row_elements = int(layout.range_bytes[0]) // element_bytes
        self._row_count = len(layout.range_bytes)
        self._object_bytes = layout.object_bytes
        self._tile_elements = min(
            _TILE_BYTES // element_bytes, triton.next_power_of_2(self._row_elements)
        )
        self._bases = torch.from_numpy(layout.base_addresses).to(self._device)
        self._strides = torch.from_numpy(layout.block_strides).to(self._device)

    def locate(self, block_ids: Int64Array) -> Any:
        """See ``Rows.locate``: int64[objects], on the device."""
        # A copy: ids out of the step's metadata are read-only, which torch warns of.
        return torch.from_numpy(block_ids.copy()).to(self._device)

    def gather(self, located: Any, part: slice, staging: Any) -> None:
        """See ``Rows.gather``."""
        self._launch(located, part, staging, into_staging=True)

    def scatter(self, located: Any, part: slice, staging: Any) -> None:
        """See ``Rows.scatter``."""
        self._launch(located, part, staging, into_staging=False)

    def _launch(self, located: Any, part: slice, staging: Any, *, into_staging: bool) -> None:
        object_count = part.stop - part.start
        if staging.numel() != object_count * self._object_bytes:
            raise ValueError(f"{staging.numel()} bytes for {object_count} objects")
        grid = (
            object_count * self._row_count,
            triton.cdiv(self._row_elements, self._tile_elements),
        )
        _move_rows[grid](
            self._bases,
            self._strides,
            located,
            part.start,
            staging.view(self._element_type),
            row_count=self._row_count,
            row_elements=self._row_elements,
            tile_elements=self._tile_elements,
            into_staging=into_staging,
        )

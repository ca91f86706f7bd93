# SPDX-License-Identifier: Apache-2.0
"""Addresses that the columns give, against the views that vLLM registers, byte for byte."""

import ctypes
import types
from collections.abc import Callable

import pytest
import torch

from umbp.connector.layout import kv_memory
from umbp.errors import ConfigError

BLOCKS, HEADS, TOKENS, CONTENT = 6, 3, 4, 8
LAYERS = ("l0", "l1", "l2")
Caches = dict[str, torch.Tensor]


def contiguous() -> Caches:
    """Layers outside blocks, heads inside: LBHNC."""
    raw = torch.zeros(len(LAYERS), BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16)
    return dict(zip(LAYERS, raw, strict=True))


def tokens_before_heads() -> Caches:
    """LBNHC: a block of a layer is one run, with tokens outside heads."""
    raw = torch.zeros(len(LAYERS), BLOCKS, TOKENS, HEADS, CONTENT, dtype=torch.bfloat16)
    return dict(zip(LAYERS, raw.transpose(2, 3), strict=True))


def heads_outside_blocks() -> Caches:
    """LHBNC: a block of a layer is one run per head."""
    raw = torch.zeros(len(LAYERS), HEADS, BLOCKS, TOKENS, CONTENT, dtype=torch.bfloat16)
    return dict(zip(LAYERS, raw.transpose(1, 2), strict=True))


def packed() -> Caches:
    """BLHNC: all layers of a block are one run."""
    raw = torch.zeros(BLOCKS, len(LAYERS), HEADS, TOKENS, CONTENT, dtype=torch.bfloat16)
    return {name: raw[:, index] for index, name in enumerate(LAYERS)}


def packed_by_head() -> Caches:
    """BHLNC: layers inside heads."""
    raw = torch.zeros(BLOCKS, HEADS, len(LAYERS), TOKENS, CONTENT, dtype=torch.bfloat16)
    return {name: raw[:, :, index] for index, name in enumerate(LAYERS)}


def padded() -> Caches:
    """Pages with padding that nobody owns."""
    raw = torch.zeros(len(LAYERS), BLOCKS, HEADS * TOKENS * CONTENT + 32, dtype=torch.bfloat16)
    real = raw[:, :, : HEADS * TOKENS * CONTENT]
    return dict(zip(LAYERS, real.unflatten(2, (HEADS, TOKENS, CONTENT)), strict=True))


def kernel_blocks() -> Caches:
    """Views that count half blocks."""
    raw = torch.zeros(len(LAYERS), 2 * BLOCKS, HEADS, TOKENS // 2, CONTENT, dtype=torch.bfloat16)
    return dict(zip(LAYERS, raw, strict=True))


def shared_layer() -> Caches:
    """A layer that reads the KV of another one."""
    caches = contiguous()
    caches["l2"] = caches["l0"]
    return caches


def group(names: tuple[str, ...], *, prefix_cacheable: bool = True) -> types.SimpleNamespace:
    spec = types.SimpleNamespace(prefix_cacheable=prefix_cacheable)
    return types.SimpleNamespace(layer_names=list(names), kv_cache_spec=spec)


def config(*groups: tuple[str, ...]) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=[group(names) for names in groups],
    )


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


LAYOUTS: list[tuple[Callable[[], Caches], int]] = [
    (contiguous, 3),
    (tokens_before_heads, 3),
    (heads_outside_blocks, 9),
    (packed, 1),
    (packed_by_head, 9),
    (padded, 3),
    (kernel_blocks, 3),
    (shared_layer, 2),
]


@pytest.mark.parametrize(("make", "range_count"), LAYOUTS)
def test_columns_name_exactly_the_bytes_of_a_block(
    make: Callable[[], Caches], range_count: int
) -> None:
    """Writes a mark into each block through the views, and reads it back through addresses."""
    caches = make()
    memory = kv_memory(caches, config(LAYERS))
    layout = memory.layout(0)
    assert len(layout.range_bytes) == range_count
    views = {tensor.data_ptr(): tensor for tensor in caches.values()}.values()
    for block in range(BLOCKS):
        for view in views:
            ratio = view.shape[0] // BLOCKS
            view.fill_(0)
            view[block * ratio : (block + 1) * ratio] = block + 1.5
        content = b"".join(
            read(int(address), int(size))
            for address, size in zip(
                layout.addresses(torch.tensor([block]).numpy())[0], layout.range_bytes, strict=True
            )
        )
        mark = torch.full((1,), block + 1.5, dtype=torch.bfloat16).view(torch.uint8)
        assert content == bytes(mark.tolist()) * (len(content) // 2)
        written = sum((view != 0).sum().item() for view in views) * 2
        assert len(content) == written == layout.object_bytes


def test_ranges_keep_the_order_of_layers_not_of_addresses() -> None:
    """Two processes may be given allocations in another order, and must cut objects alike."""
    caches = contiguous()
    backwards = kv_memory(caches, config(LAYERS[::-1])).layout(0)
    forwards = kv_memory(caches, config(LAYERS)).layout(0)
    assert backwards.base_addresses.tolist() == forwards.base_addresses.tolist()[::-1]


def test_regions_are_whole_allocations_each_once() -> None:
    caches = contiguous()
    (region,) = kv_memory(caches, config(LAYERS)).regions
    storage = caches["l0"].untyped_storage()
    assert (region.address, region.size_bytes) == (storage.data_ptr(), storage.nbytes())
    assert (region.device_type, region.device_index) == ("cpu", None)
    assert region.tensor.data_ptr() == region.address


def test_groups_have_layouts_of_their_own() -> None:
    memory = kv_memory(contiguous(), config(("l0", "l2"), ("l1",)))
    assert [layout.group_index for layout in memory.layouts] == [0, 1]
    assert memory.layout(0).object_bytes == 2 * memory.layout(1).object_bytes


def test_scratch_groups_have_no_layout_and_keep_the_others_numbers() -> None:
    both = config(("l0",), ("l1",))
    both.kv_cache_groups[0] = group(("l0",), prefix_cacheable=False)
    assert [layout.group_index for layout in kv_memory(contiguous(), both).layouts] == [1]


def test_layer_without_a_cache_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="layer l9 has no KV cache"):
        kv_memory(contiguous(), config(("l0", "l9")))


def test_view_that_does_not_fit_the_block_count_is_refused() -> None:
    caches = {"l0": torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT)}
    with pytest.raises(ConfigError, match="layer l0 has 7 blocks"):
        kv_memory(caches, config(("l0",)))

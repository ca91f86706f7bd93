# SPDX-License-Identifier: Apache-2.0
"""From vLLM's registered KV caches to the columns that backends read.

vLLM hands over one logical view ``[blocks, heads, tokens, content]`` per layer. Physically a block
of a layer is one run of bytes, or one run per head where heads lie outside blocks; layers may be
packed inside a block; a view may count smaller kernel blocks than the scheduler does. All of that
is read off the strides of the views, never assumed from a layout's name.
"""

from collections.abc import Mapping
from typing import Any

import torch

from umbp.backends.base import KVMemory, MemoryRegion, ObjectLayout
from umbp.errors import ConfigError


def kv_memory(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> KVMemory:
    """Computes the KV memory of one worker.

    Args:
        kv_caches: Layer name to tensor, as vLLM registers them.
        kv_cache_config: vLLM's ``KVCacheConfig``.

    Raises:
        ConfigError: A layer's blocks cannot be addressed.
    """
    layouts = tuple(
        _layout(index, group.layer_names, kv_caches, kv_cache_config.num_blocks)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        # Blocks that are scratch space of one request are never stored.
        if group.kv_cache_spec.prefix_cacheable
    )
    regions: dict[int, MemoryRegion] = {}
    for cache in kv_caches.values():
        for tensor in _tensors(cache):
            region = _region(tensor)
            regions.setdefault(region.address, region)
    return KVMemory(tuple(regions.values()), layouts)


def _tensors(cache: Any) -> list[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def _region(tensor: torch.Tensor) -> MemoryRegion:
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.int8, device=tensor.device).set_(storage)
    return MemoryRegion(
        tensor=raw,
        address=storage.data_ptr(),
        size_bytes=storage.nbytes(),
        device_type=tensor.device.type,
        device_index=tensor.device.index,
    )


def _layout(
    group_index: int, layer_names: list[str], kv_caches: Mapping[str, Any], block_count: int
) -> ObjectLayout:
    ranges: list[tuple[int, int, int]] = []
    for name in layer_names:
        if name not in kv_caches:
            raise ConfigError(f"layer {name} has no KV cache registered; umbp cannot store it")
        for tensor in _tensors(kv_caches[name]):
            ranges += _ranges(name, tensor, block_count)
    # Layers that share KV appear once: the second copy would be the same bytes. The order is that
    # of the layers, not of addresses, so that every process cuts objects the same way.
    unique = _merge(list(dict.fromkeys(ranges)))
    return ObjectLayout(
        group_index=group_index,
        block_count=block_count,
        base_addresses=[base for base, _, _ in unique],
        block_strides=[stride for _, stride, _ in unique],
        range_bytes=[size for _, _, size in unique],
    )


def _ranges(name: str, tensor: torch.Tensor, block_count: int) -> list[tuple[int, int, int]]:
    """Returns (address in block 0, bytes to the next block, bytes) of each run of a block."""
    item = tensor.element_size()
    ratio, rest = divmod(tensor.shape[0], block_count)
    if rest or not ratio:
        raise ConfigError(
            f"layer {name} has {tensor.shape[0]} blocks in its KV cache, which is no multiple of "
            f"vLLM's {block_count}; umbp cannot address them"
        )
    block_stride = tensor.stride(0) * item * ratio
    shape, strides = list(tensor.shape[1:]), list(tensor.stride()[1:])
    page = [(count, stride * item) for count, stride in zip(shape, strides, strict=True)]
    if ratio > 1:
        # A scheduler block is ``ratio`` kernel blocks in a row.
        page.insert(0, (ratio, tensor.stride(0) * item))
    runs = _runs(page, item)
    return [(tensor.data_ptr() + offset, block_stride, size) for offset, size in runs]


def _runs(dims: list[tuple[int, int]], item_bytes: int) -> list[tuple[int, int]]:
    """Splits a strided box into contiguous runs.

    Args:
        dims: (count, stride in bytes) of each dimension, in any order.
        item_bytes: Size of one element.

    Returns:
        (offset, bytes) of each run, by offset.
    """
    run_bytes = item_bytes
    outer: list[tuple[int, int]] = []
    for count, stride in sorted((d for d in dims if d[0] > 1), key=lambda d: d[1]):
        if stride == run_bytes and not outer:
            run_bytes *= count
        else:
            outer.append((count, stride))
    offsets = [0]
    for count, stride in outer:
        offsets = [offset + index * stride for index in range(count) for offset in offsets]
    return [(offset, run_bytes) for offset in sorted(offsets)]


def _merge(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Joins ranges that follow each other in memory in every block."""
    merged: list[tuple[int, int, int]] = []
    for base, stride, size in ranges:
        if merged:
            last_base, last_stride, last_size = merged[-1]
            # Joined runs must not run into the next block of the same layer.
            fits = last_size + size <= stride
            if last_stride == stride and last_base + last_size == base and fits:
                merged[-1] = (last_base, stride, last_size + size)
                continue
        merged.append((base, stride, size))
    return merged

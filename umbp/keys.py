# SPDX-License-Identifier: Apache-2.0
"""Keys of stored objects: what makes two pieces of KV the same object.

An object is the KV of one block of one cache group on one rank. Its key is a fixed prefix
followed by vLLM's own hash of the block, which covers every token before it; umbp never hashes
tokens. The prefix scopes that hash:

    namespace digest  16 bytes   model, dtype, layout, ... (``umbp.connector.namespace``)
    epoch              8 bytes   raised by every reset, so that old objects are never found again
    group              2 bytes   index of the KV cache group
    rank               2 bytes   index of the worker

All numbers are big-endian. Keys are opaque bytes to every backend.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Final

import attrs

NAMESPACE_BYTES: Final = 16
_PREFIX: Final = struct.Struct(f">{NAMESPACE_BYTES}sQHH")
PREFIX_BYTES: Final = _PREFIX.size


def _check_namespace(_: object, attribute: "attrs.Attribute[bytes]", value: bytes) -> None:
    if len(value) != NAMESPACE_BYTES:
        raise ValueError(f"{attribute.name} must have {NAMESPACE_BYTES} bytes, got {len(value)}")


@attrs.frozen
class KeySpace:
    """The keys of one namespace.

    Attributes:
        namespace: Digest of the namespace manifest, 16 bytes.
    """

    namespace: bytes = attrs.field(validator=_check_namespace)

    def prefix(self, *, epoch: int, group_index: int, rank: int) -> bytes:
        """Returns the 28 bytes that precede the block hash in every key of this scope."""
        return _PREFIX.pack(self.namespace, epoch, group_index, rank)

    def keys(
        self, block_hashes: Iterable[bytes], *, epoch: int, group_index: int, rank: int
    ) -> list[bytes]:
        """Returns one key per block hash, in order."""
        prefix = self.prefix(epoch=epoch, group_index=group_index, rank=rank)
        return [prefix + block_hash for block_hash in block_hashes]

    def keys_of_joined(
        self, packed: bytes, hash_bytes: int, *, epoch: int, group_index: int, rank: int
    ) -> list[bytes]:
        """Returns one key per hash, in order, of hashes that travel joined.

        Raises:
            ValueError: ``packed`` is not a whole number of hashes.
        """
        prefix = self.prefix(epoch=epoch, group_index=group_index, rank=rank)
        return [prefix + block_hash for (block_hash,) in _each_hash(packed, hash_bytes)]


def split_prefix(key: bytes) -> tuple[int, int, int]:
    """Returns (epoch, group index, rank) of a key."""
    _, epoch, group_index, rank = _PREFIX.unpack_from(key)
    return epoch, group_index, rank


def split_hashes(packed: bytes, hash_bytes: int) -> list[bytes]:
    """Splits hashes that travel joined into one bytes object.

    Args:
        packed: ``n * hash_bytes`` bytes.
        hash_bytes: Length of one hash.

    Raises:
        ValueError: ``packed`` is not a whole number of hashes.
    """
    return [block_hash for (block_hash,) in _each_hash(packed, hash_bytes)]


def _each_hash(packed: bytes, hash_bytes: int) -> Iterator[tuple[bytes]]:
    if hash_bytes <= 0 or len(packed) % hash_bytes:
        raise ValueError(f"{len(packed)} bytes are no whole number of {hash_bytes}-byte hashes")
    # Half as long as slicing.
    return struct.iter_unpack(f"{hash_bytes}s", packed)

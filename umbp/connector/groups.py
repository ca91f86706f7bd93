# SPDX-License-Identifier: Apache-2.0
"""Cache-group rules, applied by vLLM's own classes.

A model may have several KV cache groups: full attention, sliding windows, recurrent state. Where a
prefix may be resumed depends on all of them, in ways that differ between versions. umbp does not
know these rules. It asks vLLM's own coordinator, with a pool in place of the real one that answers
from a lookup, so that an external hit ends exactly where a local one would.

Positions are tokens; a *hash index* ``i`` stands for vLLM's block hash of the tokens before
``(i + 1) * hash_tokens``.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from umbp.fsm import LeasePart

BoolArray: TypeAlias = npt.NDArray[np.bool_]

NULL_BLOCK_ID: Final = 0
"""The block that vLLM puts where a group needs none."""


@attrs.frozen
class Group:
    """What has to be known of one KV cache group.

    Attributes:
        index: Index of the group.
        block_tokens: Tokens in one of its blocks.
        is_state: It holds recurrent state: one block stands for all tokens before its end, and only
            vLLM knows which block holds it.
        is_fine: A hit may end inside one of its blocks.
        drops_unit: vLLM looks one unit past a hit and drops it, for the drafter.
        start_blocks: Blocks that a request takes, beyond those of a hit, to go on from it.
    """

    index: int
    block_tokens: int
    is_state: bool
    is_fine: bool
    drops_unit: bool
    start_blocks: int = 0


class Hit(Protocol):
    """A prefix that every group can resume from, and what to load for it."""

    @property
    def end_tokens(self) -> int:
        """Where it ends."""

    def parts(
        self, table: Sequence[Sequence[int]], begin_tokens: int
    ) -> tuple[LeasePart, ...] | None:
        """Names what to load into a request's blocks, beyond what the engine has by itself.

        Args:
            table: Block ids of the request, for each group.
            begin_tokens: Where the engine's own tokens end; the end of a block of every group.

        Returns:
            A part for each group; None when a block that must be loaded is not in the table.
        """


@attrs.frozen(eq=False)
class RunHit:
    """A hit in the one group of a model: an unbroken run of blocks.

    Attributes:
        end_tokens: Its end.
        group: The group.
        block_hashes: Block hashes of the request.
    """

    end_tokens: int
    group: "Group"
    block_hashes: Sequence[bytes]

    def parts(
        self, table: Sequence[Sequence[int]], begin_tokens: int
    ) -> tuple[LeasePart, ...] | None:
        """See ``Hit.parts``."""
        index, size = self.group.index, self.group.block_tokens
        first, last = begin_tokens // size, self.end_tokens // size
        if last > len(table[index]):
            return None
        return (LeasePart(index, self.block_hashes[first:last], tuple(table[index][first:last])),)


@attrs.frozen(eq=False)
class GroupsHit:
    """A hit in all groups of a hybrid model.

    Attributes:
        end_tokens: Its end.
        blocks: For each group, the hash of each block that must be loaded, by the block's place in
            the request's table.
    """

    end_tokens: int
    blocks: Mapping["Group", Mapping[int, bytes]]

    def parts(
        self, table: Sequence[Sequence[int]], begin_tokens: int
    ) -> tuple[LeasePart, ...] | None:
        """See ``Hit.parts``."""
        parts = []
        for group, blocks in self.blocks.items():
            own = begin_tokens // group.block_tokens
            ids = table[group.index]
            wanted = {place: hash_ for place, hash_ in blocks.items() if place >= own}
            if any(place >= len(ids) or ids[place] == NULL_BLOCK_ID for place in wanted):
                return None
            if wanted:
                block_ids = tuple(ids[place] for place in wanted)
                parts.append(LeasePart(group.index, tuple(wanted.values()), block_ids))
        return tuple(parts)


@attrs.frozen(eq=False)
class Asked:
    """The blocks of one group that a lookup asks for.

    Attributes:
        group: The group.
        hashes: Their hashes, in order.
    """

    group: Group
    hashes: Sequence[bytes]


class _Found:
    """A block that a lookup has found, in place of vLLM's ``KVCacheBlock``.

    It stands for a place among the hashes of the request at hand; the null block has none.
    """

    __slots__ = ("is_null", "place")

    def __init__(self, place: int | None) -> None:
        self.place = place
        self.is_null = place is None


class _FoundBlocks:
    """In place of vLLM's ``BlockPool``: answers from a lookup, and can do nothing else."""

    def __init__(self, hash_tokens: int) -> None:
        self.hash_block_size = hash_tokens
        self.null_block = _Found(None)
        # Of the request at hand: where each hash is, and for each group which hashes are found.
        self.places: dict[bytes, int] = {}
        self.found: dict[int, bytes] = {}
        # What is returned, by number of groups and place. Made once: new objects for every block of
        # a long prompt cost more than all of vLLM's search.
        self._rows: defaultdict[int, list[tuple[_Found, ...]]] = defaultdict(list)

    def get_cached_block(self, block_hash: bytes, group_ids: Sequence[int]) -> Any:
        """Returns a block for each group; None when some group lacks it."""
        place = self.places.get(block_hash)
        if place is None:
            return None
        # A loop and no generator: vLLM asks once for every block of a prompt.
        for index in group_ids:
            if not self.found[index][place]:
                return None
        rows = self._rows[len(group_ids)]
        if place >= len(rows):
            more = range(len(rows), len(self.places))
            rows.extend((_Found(one),) * len(group_ids) for one in more)
        return rows[place]


class GroupRules:
    """The rules of one engine's cache groups.

    Args:
        kv_cache_manager: vLLM's ``KVCacheManager``; never changed.
        sparse_groups: Groups of which only whole blocks may be restored, whatever vLLM allows; then
            no hit ends inside a block.
    """

    def __init__(self, kv_cache_manager: Any, sparse_groups: frozenset[int] = frozenset()) -> None:
        coordinator = kv_cache_manager.coordinator
        self.hash_tokens: int = getattr(coordinator, "hash_block_size", None) or (
            coordinator.block_size
        )
        self._pool = _FoundBlocks(self.hash_tokens)
        self._coordinator = _with_pool(coordinator, self._pool)
        self.groups = _groups(coordinator, self.hash_tokens, sparse_groups)
        # By name: the classes move between modules, and a subclass may have rules of its own.
        names = [type(one).__name__ for one in coordinator.single_type_managers]
        self._is_run = names == ["FullAttentionManager"] and not self.groups[0].drops_unit

    @property
    def is_simple(self) -> bool:
        """Whether a hit is just the unbroken run of blocks of one group."""
        return len(self.groups) == 1 and self._is_run

    def ask(self, block_hashes: Sequence[bytes], local_tokens: int) -> list[Asked]:
        """Says what a lookup has to ask for.

        Args:
            block_hashes: Block hashes of the request.
            local_tokens: What the engine has by itself, which needs no asking.
        """
        return [
            Asked(group, block_hashes[self._first(group, local_tokens) :: self._step(group)])
            for group in self.groups
        ]

    def hit(
        self,
        asked: Sequence[Asked],
        present: Sequence[BoolArray],
        block_hashes: Sequence[bytes],
        *,
        local_tokens: int,
        limit_tokens: int,
    ) -> Hit:
        """Finds the longest prefix that can be resumed from what was found.

        Args:
            asked: What was asked for.
            present: bool[hashes] for each, whether every rank holds the block.
            block_hashes: Block hashes of the request.
            local_tokens: What the engine has by itself, which counts as found.
            limit_tokens: The hit may not end after this position.
        """
        if self.is_simple:
            (mask,), (group,) = present, self.groups
            hole = mask.tobytes().find(False)
            run = len(mask) if hole < 0 else hole
            end = min(local_tokens // self.hash_tokens + run, limit_tokens // self.hash_tokens)
            return RunHit(end * self.hash_tokens, group, block_hashes)
        pool = self._pool
        pool.places = dict(zip(block_hashes, range(len(block_hashes)), strict=True))
        for one, mask in zip(asked, present, strict=True):
            found = np.zeros(len(block_hashes), dtype=bool)
            found[: local_tokens // self.hash_tokens] = True
            found[self._first(one.group, local_tokens) :: self._step(one.group)] = mask
            pool.found[one.group.index] = found.tobytes()
        try:
            blocks, end_tokens, _ = self._coordinator.find_longest_cache_hit(
                block_hashes, limit_tokens
            )
        finally:
            pool.places, pool.found = {}, {}
        return GroupsHit(
            end_tokens,
            {
                group: {
                    place: block_hashes[block.place]
                    for place, block in enumerate(blocks[group.index])
                    if not block.is_null
                }
                for group in self.groups
            },
        )

    def filled_parts(
        self,
        block_hashes: Sequence[bytes],
        table: Sequence[Sequence[int]],
        begin_tokens: int,
        end_tokens: int,
    ) -> tuple[LeasePart, ...]:
        """Names the blocks whose last token lies in a span, for the groups that fill blocks.

        Blocks that have left a window are skipped; recurrent state is never taken by its place.
        """
        parts = []
        for group in self.groups:
            if group.is_state:
                continue
            ids = table[group.index]
            first = begin_tokens // group.block_tokens
            last = min(end_tokens // group.block_tokens, len(ids))
            step = group.block_tokens // self.hash_tokens
            hashes = block_hashes[(first + 1) * step - 1 : last * step : step]
            block_ids = tuple(ids[first:last])
            if NULL_BLOCK_ID in block_ids:
                kept = [at for at, block_id in enumerate(block_ids) if block_id != NULL_BLOCK_ID]
                hashes = [hashes[at] for at in kept]
                block_ids = tuple(block_ids[at] for at in kept)
            if block_ids:
                parts.append(LeasePart(group.index, hashes, block_ids))
        return tuple(parts)

    def _step(self, group: Group) -> int:
        """Hashes from one place where a hit may end to the next."""
        return 1 if group.is_fine else group.block_tokens // self.hash_tokens

    def _first(self, group: Group, local_tokens: int) -> int:
        """Index of the hash of the first such place beyond the engine's own tokens."""
        step = self._step(group)
        return local_tokens // (step * self.hash_tokens) * step + step - 1

    def end_tokens(self, group: Group, local_tokens: int, at: int) -> int:
        """Returns where the block of a hash ends.

        Args:
            group: Its group.
            local_tokens: What the engine had by itself when it was asked for.
            at: Its index among what was asked for of the group.
        """
        index = self._first(group, local_tokens) + at * self._step(group)
        return (index + 1) * self.hash_tokens

    def boundary_parts(
        self,
        block_hashes: Sequence[bytes],
        table: Sequence[Sequence[int]],
        offers: Iterable[tuple[int, int, int]],
        computed_tokens: int,
    ) -> tuple[LeasePart, ...]:
        """Names what makes boundaries that vLLM hands off restorable.

        That is the state block of each offer, and for each boundary inside an attention block the
        page that holds it, keyed at the boundary. The page grows at its end only, so a later copy
        of it serves the same boundary.

        Args:
            block_hashes: Block hashes of the request.
            table: Block ids of the request, for each group.
            offers: (group, block id, boundary in tokens), as vLLM hands them off.
            computed_tokens: Tokens whose KV is in the request's blocks when the store begins.
        """
        ends = {
            group.index: self.hash_tokens if group.is_fine else group.block_tokens
            for group in self.groups
        }
        chosen: dict[int, dict[bytes, int]] = {}
        for group_index, block_id, boundary in offers:
            # Where hits end at blocks only, nobody would ask for a boundary inside one.
            if block_id == NULL_BLOCK_ID or boundary % ends[group_index]:
                continue
            index = boundary // self.hash_tokens - 1
            if not 0 <= index < len(block_hashes):
                continue
            chosen.setdefault(group_index, {})[block_hashes[index]] = block_id
            for group in self.groups:
                if group.is_state or not group.is_fine:
                    continue
                end = boundary + (self.hash_tokens if group.drops_unit else 0)
                place, inside = divmod(end, group.block_tokens)
                ids = table[group.index]
                # A boundary at a block's end is the block itself, stored when it filled.
                if not inside or end > computed_tokens or place >= len(ids):
                    continue
                at = end // self.hash_tokens - 1
                if ids[place] != NULL_BLOCK_ID and at < len(block_hashes):
                    chosen.setdefault(group.index, {})[block_hashes[at]] = ids[place]
        return tuple(
            LeasePart(index, tuple(blocks), tuple(blocks.values()))
            for index, blocks in sorted(chosen.items())
        )


def _with_pool(coordinator: Any, pool: _FoundBlocks) -> Any:
    """Returns a copy of a coordinator, and of its managers, that looks blocks up in ``pool``."""
    shadow = copy.copy(coordinator)
    shadow.block_pool = pool
    managers = []
    for manager in coordinator.single_type_managers:
        shadow_manager = copy.copy(manager)
        shadow_manager.block_pool = pool
        managers.append(shadow_manager)
    shadow.single_type_managers = tuple(managers)
    return shadow


def _groups(coordinator: Any, hash_tokens: int, sparse_groups: frozenset[int]) -> tuple[Group, ...]:
    config = coordinator.kv_cache_config
    partial = bool(getattr(coordinator, "enable_partial_hash_hits", False))
    # vLLM 0.33 tells groups that drop from groups that belong to a drafter.
    older = getattr(coordinator, "eagle_group_ids", ())
    dropping: Any = getattr(coordinator, "drop_eagle_group_ids", older)
    # Groups of one spec are looked up together, and so drop together.
    together = {
        index: any(other in dropping for other in spec_group.group_ids)
        for spec_group in getattr(coordinator, "attention_groups", ())
        for index in spec_group.group_ids
    }
    groups = []
    for index, group in enumerate(config.kv_cache_groups):
        if not group.kv_cache_spec.prefix_cacheable:
            continue
        manager = coordinator.single_type_managers[index]
        block_tokens = manager.block_size
        is_state = type(manager).__name__ == "MambaManager"
        # All groups end a hit at one place, so one that cannot end inside blocks binds the others.
        fine = partial and block_tokens > hash_tokens and not sparse_groups
        groups.append(
            Group(
                index=index,
                block_tokens=block_tokens,
                is_state=is_state,
                is_fine=fine,
                drops_unit=together.get(index, index in dropping) and not is_state,
                # The state goes on in a block of its own, and may be kept in another on its way.
                start_blocks=2 + getattr(manager, "num_speculative_blocks", 0) if is_state else 0,
            )
        )
    return tuple(groups)

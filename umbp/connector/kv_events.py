# SPDX-License-Identifier: Apache-2.0
"""KV events: tells vLLM's subscribers which blocks umbp holds in host memory.

A block is announced once every rank has stored it, with the fields of vLLM's own GPU events and
medium ``CPU``. It is withdrawn when any rank has evicted it, when it fails to load, and when a
reset makes it unfindable. So a subscriber that adds and removes knows what this engine has stored
and can still find, as of the last step; never more than ``ANNOUNCED_MAX`` blocks: beyond that, the
oldest are withdrawn.

Everything rests on the order of what one rank says: its answer to a store comes before the news
that the object is gone again (``umbp.connector.worker``). While other ranks have still to answer,
what is gone already is remembered with the store, so that it is not announced in the end.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from umbp.connector.metadata import WorkerMetadata
from umbp.fsm import Core, LeaseKind, LeasePart, TransferLease
from umbp.keys import PREFIX_BYTES, split_prefix

MEDIUM: Final = "CPU"

ANNOUNCED_MAX: Final = 1 << 19
"""Blocks that are remembered as announced: about 100 MB, and 8 million tokens at 16 a block."""

_Block = tuple[int, bytes]
"""Group index and block hash."""

_STORED_FIELDS: Final = frozenset(BlockStored.__struct_fields__)


@attrs.frozen(eq=False)
class EventGroup:
    """What events say of a KV cache group.

    Attributes:
        block_tokens: Tokens in one of its blocks.
        kind: vLLM's name of what it holds.
        sliding_window: Its window in tokens; None: it has none.
    """

    block_tokens: int
    kind: str
    sliding_window: int | None


def event_groups(kv_cache_manager: Any) -> dict[int, EventGroup]:
    """Reads the groups of vLLM's ``KVCacheManager``, by index."""
    coordinator = kv_cache_manager.coordinator
    groups = coordinator.kv_cache_config.kv_cache_groups
    return {
        index: EventGroup(
            manager.block_size,
            get_kv_cache_spec_kind(group.kv_cache_spec).value,
            get_kv_cache_spec_sliding_window(group.kv_cache_spec),
        )
        for index, (group, manager) in enumerate(
            zip(groups, coordinator.single_type_managers, strict=True)
        )
    }


@attrs.frozen
class _Place:
    """Where a block lies in a request; token positions, half-open."""

    block_hash: bytes
    begin_tokens: int
    end_tokens: int

    @property
    def size_tokens(self) -> int:
        """Tokens that it stands for."""
        return self.end_tokens - self.begin_tokens


class KVEvents:
    """Makes KV events of what workers answer.

    Args:
        core: The lifecycle.
        groups: KV cache groups, by index.
        announced_max: Blocks that may be announced at the same time.

    Attributes:
        stored_count: Blocks announced.
        removed_count: Blocks withdrawn.
        forgotten_count: Of those, blocks that were withdrawn for room here alone.
    """

    def __init__(
        self,
        core: Core,
        groups: Mapping[int, EventGroup],
        *,
        announced_max: int = ANNOUNCED_MAX,
    ) -> None:
        self._core = core
        self._groups = groups
        self._announced_max = announced_max
        self._unit = core.limits.unit_tokens
        self._epoch = core.epoch
        # Oldest first.
        self._announced: dict[_Block, None] = {}
        # By job: what some rank has stored and lost again, while others have not answered.
        self._lost: dict[int, set[_Block]] = {}
        self._events: list[Any] = []
        self.stored_count = 0
        self.removed_count = 0
        self.forgotten_count = 0

    @property
    def announced_count(self) -> int:
        """Blocks that are announced and not withdrawn."""
        return len(self._announced)

    # ------------------------------------------------------------ what happens

    def leases_of(self, metadata: WorkerMetadata) -> list[TransferLease]:
        """Returns the transfers that a step's answers are about, before the core takes them."""
        leases = self._core.leases
        job_ids = dict.fromkeys(answer.job_id for answer in metadata.answers)
        return [leases[job_id] for job_id in job_ids if job_id in leases]

    def follow(self, metadata: WorkerMetadata, leases: Iterable[TransferLease]) -> None:
        """Takes note of what a step has changed, after the core has.

        Args:
            metadata: Answers and evictions of the workers.
            leases: What ``leases_of`` returned.
        """
        self._follow_epoch()
        failed = {
            answer.job_id: answer.failed_hashes
            for answer in metadata.answers
            if answer.attempted and answer.failed_hashes
        }
        for lease in leases:
            is_open = lease.job_id in self._core.leases
            if lease.kind is LeaseKind.STORE and not is_open:
                lost: Iterable[_Block] = self._lost.pop(lease.job_id, ())
                if not lease.failed and lease.epoch == self._epoch:
                    self._store(lease, lost)
            elif lease.kind is LeaseKind.LOAD and lease.job_id in failed:
                self._withdraw_failed(lease, failed[lease.job_id])
        for evictions in metadata.evictions:
            self._evict(evictions.rank, evictions.keys)

    def take(self) -> list[Any]:
        """Answers ``take_events``: returns the events since the last call, in order."""
        self._follow_epoch()
        events, self._events = self._events, []
        return events

    def _follow_epoch(self) -> None:
        """Withdraws everything when the store was reset: nothing of it is ever found again."""
        if self._core.epoch == self._epoch:
            return
        self._epoch = self._core.epoch
        self._lost.clear()
        gone, self._announced = self._announced, {}
        self._remove(gone)

    # ------------------------------------------------------------ stored

    def _store(self, lease: TransferLease, lost: Iterable[_Block]) -> None:
        if lease.request is None:
            # An event names tokens, and nobody knows those of free blocks: refused at start.
            return
        gone = set(lost)
        for part in lease.parts:
            fresh = []
            for block_hash in part.block_hashes:
                block = (part.group_index, block_hash)
                if block not in self._announced and block not in gone:
                    self._announced[block] = None
                    fresh.append(block_hash)
            if not fresh:
                continue
            self.stored_count += len(fresh)
            for run in self._runs(lease, attrs.evolve(part, block_hashes=fresh)):
                self._events.append(self._stored_event(lease, part.group_index, run))
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        excess = len(self._announced) - self._announced_max
        if excess > 0:
            oldest = [block for block, _ in zip(self._announced, range(excess), strict=False)]
            for block in oldest:
                del self._announced[block]
            self.forgotten_count += excess
            self._remove(oldest)

    def _runs(self, lease: TransferLease, part: LeasePart) -> Iterator[list[_Place]]:
        """Splits blocks into runs of one size in which each begins where the one before ends."""
        run: list[_Place] = []
        for place in self._places(lease, part):
            if run and (
                place.begin_tokens != run[-1].end_tokens or place.size_tokens != run[-1].size_tokens
            ):
                yield run
                run = []
            run.append(place)
        if run:
            yield run

    def _places(self, lease: TransferLease, part: LeasePart) -> Iterator[_Place]:
        unit = self._unit
        block_tokens = self._groups[part.group_index].block_tokens
        hashes = lease.source.block_hashes
        # A drafter's page is keyed one unit past the boundary.
        first, last = lease.begin_tokens // unit, lease.end_tokens // unit + 1
        index = {block_hash: at for at, block_hash in enumerate(hashes[first:last], first)}
        if not index.keys() >= set(part.block_hashes):
            # Boundaries reach back to where the step began.
            index = {block_hash: at for at, block_hash in enumerate(hashes)}
        for block_hash in part.block_hashes:
            end = (index[block_hash] + 1) * unit
            # vLLM says of a boundary inside a block what its last unit holds.
            size = block_tokens if end % block_tokens == 0 else unit
            yield _Place(block_hash, end - size, end)

    def _stored_event(self, lease: TransferLease, group_index: int, run: Sequence[_Place]) -> Any:
        """Says of blocks in a row what vLLM's block pool says of its own."""
        request = lease.source
        group = self._groups[group_index]
        begin, end = run[0].begin_tokens, run[-1].end_tokens
        lora = request.lora_request
        fields = {
            "block_hashes": [maybe_convert_block_hash(place.block_hash) for place in run],
            # Not the block before in this event or the last: the one before in the prompt.
            "parent_block_hash": (
                maybe_convert_block_hash(request.block_hashes[begin // self._unit - 1])
                if begin
                else None
            ),
            "token_ids": list(request.all_token_ids[begin:end]),
            "block_size": run[0].size_tokens,
            "lora_id": lora.adapter_id if lora else None,
            "medium": MEDIUM,
            "lora_name": lora.name if lora else None,
            "extra_keys": to_event_extra_keys(_extra_keys(request, run)),
            "group_idx": group_index,
            "kv_cache_spec_kind": group.kind,
            "kv_cache_spec_sliding_window": group.sliding_window,
            "session_id": getattr(request, "session_id", None),
        }
        return BlockStored(
            **{name: value for name, value in fields.items() if name in _STORED_FIELDS}
        )

    # ------------------------------------------------------------ removed

    def _evict(self, rank: int, keys: Iterable[bytes]) -> None:
        """Takes note of objects that a rank no longer has."""
        gone: list[_Block] = []
        for key in keys:
            epoch, group_index, _ = split_prefix(key)
            if epoch == self._epoch:
                gone.append((group_index, key[PREFIX_BYTES:]))
        if not gone:
            return
        self._withdraw(gone)
        for lease in self._core.leases.values():
            if lease.kind is LeaseKind.STORE and not lease.ranks_left >> rank & 1:
                lost = _blocks(lease).intersection(gone)
                if lost:
                    self._lost.setdefault(lease.job_id, set()).update(lost)

    def _withdraw_failed(self, lease: TransferLease, block_hashes: Iterable[bytes]) -> None:
        """Withdraws what could not be loaded: backends that do not tell what they evict."""
        failed = set(block_hashes)
        self._withdraw(block for block in sorted(_blocks(lease)) if block[1] in failed)

    def _withdraw(self, blocks: Iterable[_Block]) -> None:
        known = [block for block in dict.fromkeys(blocks) if block in self._announced]
        for block in known:
            del self._announced[block]
        self._remove(known)

    def _remove(self, blocks: Iterable[_Block]) -> None:
        by_group: dict[int, list[bytes]] = {}
        for group_index, block_hash in blocks:
            by_group.setdefault(group_index, []).append(block_hash)
        for group_index, block_hashes in by_group.items():
            self.removed_count += len(block_hashes)
            self._events.append(
                BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(one) for one in block_hashes],
                    medium=MEDIUM,
                    group_idx=group_index,
                )
            )


def _blocks(lease: TransferLease) -> set[_Block]:
    return {
        (part.group_index, block_hash) for part in lease.parts for block_hash in part.block_hashes
    }


def _extra_keys(request: Any, run: Sequence[_Place]) -> list[Any]:
    """Returns what each block's hash covers beside tokens, as vLLM's own functions say."""
    keys, feature = [], 0
    for place in run:
        one, feature = generate_block_hash_extra_keys(
            request, place.begin_tokens, place.end_tokens, feature
        )
        keys.append(one)
    return keys

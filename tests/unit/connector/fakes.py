# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what vLLM hands to the connector, with the attributes that it reads."""

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from umbp.backends.base import LookupAnswer, LookupQuestion
from umbp.connector.groups import GroupRules
from umbp.errors import BackendError
from umbp.keys import split_hashes

UNIT_TOKENS = 16


def block_hash(index: int) -> bytes:
    """A block hash of SHA-256's length that says which block it is of."""
    return index.to_bytes(32, "big")


@attrs.define(eq=False)
class FakeRequest:
    """vLLM's ``Request``."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    skip_reading_prefix_cache: bool = False
    max_tokens: int = 64
    status: Any = attrs.field(factory=lambda: types.SimpleNamespace(name="WAITING"))

    @classmethod
    def of(cls, request_id: str, tokens: int) -> "FakeRequest":
        """A request whose prompt has ``tokens`` tokens."""
        hashes = [block_hash(index) for index in range(tokens // UNIT_TOKENS)]
        return cls(request_id, tokens, tokens, hashes)


@attrs.define(eq=False)
class FakeBlock:
    """vLLM's ``KVCacheBlock``."""

    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class FakePool:
    """vLLM's ``BlockPool``, which refuses what the real one corrupts on."""

    def __init__(self, block_count: int) -> None:
        self.num_gpu_blocks = block_count
        self.blocks = [FakeBlock(index) for index in range(block_count)]
        self.blocks[0].is_null = True
        self.blocks[0].ref_cnt = 1
        self.freed: list[int] = []
        self.cached: dict[bytes, list[int]] = {}

    def take(self, count: int) -> list[int]:
        """Allocates blocks for a request."""
        free = [block for block in self.blocks if not block.ref_cnt][:count]
        assert len(free) == count
        self.touch(free)
        return [block.block_id for block in free]

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} freed twice"
            block.ref_cnt -= 1
            self.freed.append(block.block_id)

    def free(self, block_ids: Sequence[int]) -> None:
        """Frees a request's blocks, as vLLM does."""
        self.free_blocks(self.blocks[block_id] for block_id in block_ids)

    def get_num_free_blocks(self) -> int:
        return sum(not block.ref_cnt for block in self.blocks)

    def get_cached_block(self, block_hash: bytes, group_ids: list[int]) -> list[FakeBlock] | None:
        assert group_ids == [0]
        found = self.cached.get(block_hash)
        return [self.blocks[found[0]]] if found else None

    def evict_blocks(self, block_ids: set[int]) -> None:
        for cached in self.cached.values():
            cached[:] = [block_id for block_id in cached if block_id not in block_ids]


class FakeLookups:
    """A ``LookupClient`` that holds ``stored`` block hashes and answers when it is told to."""

    def __init__(self) -> None:
        self.stored: set[bytes] = set()
        self.questions: list[LookupQuestion] = []
        self.forgotten: list[int] = []
        self.is_silent = False
        self.is_broken = False
        self.waits_s: list[float] = []
        self.is_closed = False
        self.error: BackendError | None = None
        self.extra_places = 0

    def ask(self, question: LookupQuestion) -> None:
        self.questions.append(question)

    def answers(self, wait_s: float = 0.0) -> list[LookupAnswer]:
        self.waits_s.append(wait_s)
        if self.error is not None:
            raise self.error
        if self.is_silent:
            return []
        asked, self.questions = self.questions, []
        return [self._answer(question) for question in asked]

    def _answer(self, question: LookupQuestion) -> LookupAnswer:
        if self.is_broken:
            return LookupAnswer(question.question_id, None, "rank 1 is gone")
        present = tuple(
            np.array(self._present(split_hashes(part.hashes, part.hash_bytes)), dtype=bool)
            for part in question.parts
        )
        return LookupAnswer(question.question_id, present)

    def _present(self, hashes: Sequence[bytes]) -> list[bool]:
        present = [hash_ in self.stored for hash_ in hashes] + [True] * max(0, self.extra_places)
        return present[: len(hashes) + self.extra_places]

    def forget(self, question_id: int) -> None:
        self.forgotten.append(question_id)
        self.questions = [q for q in self.questions if q.question_id != question_id]

    def close(self) -> None:
        self.is_closed = True


class FakeSharedEpoch:
    """An ``EpochSource`` that other engines may advance, too."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.is_broken = False

    def current(self) -> int:
        return self.epoch

    def advance(self) -> int:
        if self.is_broken:
            raise BackendError("the epoch cannot be written")
        self.epoch += 10
        return self.epoch


@functools.cache
def one_group_rules() -> GroupRules:
    """The rules of a model with one group of full attention, from vLLM's own classes."""
    spec = FullAttentionSpec(
        block_size=UNIT_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    config = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    manager = KVCacheManager(
        kv_cache_config=config,
        max_model_len=1024,
        scheduler_block_size=UNIT_TOKENS,
        hash_block_size=UNIT_TOKENS,
        max_in_flight_tokens=1024,
    )
    return GroupRules(manager)


def step_output(
    scheduled: dict[str, int],
    tables: "Mapping[str, list[int] | tuple[list[int], ...]] | None" = None,
    *,
    preempted: Sequence[str] = (),
    finished: Sequence[str] = (),
    offers: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
) -> Any:
    """vLLM's ``SchedulerOutput``.

    Args:
        scheduled: Tokens scheduled, by request id.
        tables: Block table by request id: of the one group, or of each group.
        preempted: Ids of requests that have just been preempted.
        finished: Ids of requests that have just finished.
        offers: Boundaries that are handed off, by request id.
    """
    known = {
        name: table if isinstance(table, tuple) else (table,)
        for name, table in (tables or {}).items()
    }
    state = types.SimpleNamespace(get_block_ids=known.get, boundary_state_offloads=offers or {})
    return types.SimpleNamespace(
        num_scheduled_tokens=scheduled,
        preempted_req_ids=set(preempted),
        finished_req_ids=set(finished),
        kv_connector_block_state=state,
    )

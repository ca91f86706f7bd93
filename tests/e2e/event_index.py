# SPDX-License-Identifier: Apache-2.0
"""A subscriber of vLLM's KV events, as a router outside of the engine would write it."""

import time
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

_TIMEOUT_S: Final = 60.0


def endpoints(folder: Path) -> dict[str, Any]:
    """Returns vLLM's ``kv_events_config`` for sockets in a folder."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
    }


@attrs.frozen
class Described:
    """What an event says of one block, but where it lies.

    Attributes:
        parent: Hash of the block before it in the prompt.
        tokens: Its tokens.
        block_tokens: Their number, as the event has it.
        others: All other fields.
    """

    parent: int | bytes | None
    tokens: tuple[int, ...]
    block_tokens: int
    others: tuple[Any, ...]


class EventIndex:
    """Which blocks an engine says it has, by medium.

    Args:
        config: What ``endpoints`` returned.

    Attributes:
        blocks: For each medium, what was said of each block, by group and hash.
        stored: Blocks in all events of medium ``CPU`` that say stored.
        removed: The same for removed.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.blocks: dict[str, dict[tuple[int, int | bytes], Described]] = {"GPU": {}, "CPU": {}}
        self.stored = 0
        self.removed = 0
        self._context = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        self._subscriber.connect(config["endpoint"])
        # Several answers come to one question.
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(config["replay_endpoint"])
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next = 0

    def close(self) -> None:
        """Unsubscribes."""
        self._context.destroy(linger=0)

    def follow(self, stored: int, removed: int) -> set[int | bytes]:
        """Takes events until so many blocks were stored and removed; returns the hashes on CPU."""
        deadline = time.monotonic() + _TIMEOUT_S
        self._catch_up()
        while (self.stored, self.removed) != (stored, removed):
            left_ms = int(1000 * (deadline - time.monotonic()))
            assert left_ms > 0, f"{(self.stored, self.removed)} of {(stored, removed)} came"
            if self._subscriber.poll(left_ms):
                _, number, payload = self._subscriber.recv_multipart()
                self._take(int.from_bytes(number, "big"), payload)
        return {block_hash for _, block_hash in self.blocks["CPU"]}

    def _catch_up(self) -> None:
        """Asks for what was published before the subscription had reached the engine."""
        self._replay.send_multipart((b"", self._next.to_bytes(8, "big")))
        while True:
            assert self._replay.poll(int(1000 * _TIMEOUT_S)), "the replay never ended"
            _, _, number, payload = self._replay.recv_multipart()
            if not payload:
                return
            self._take(int.from_bytes(number, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number < self._next:
            return
        assert number == self._next, "a batch is missing"
        self._next += 1
        for event in self._decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.blocks[event.medium][event.group_idx, block_hash]
                self.removed += len(event.block_hashes) * (event.medium == "CPU")
            else:
                # vLLM's prefix cache was reset; whatever else was reset says so itself.
                self.blocks["GPU"].clear()

    def _store(self, event: BlockStored) -> None:
        known = self.blocks[event.medium]
        self.stored += len(event.block_hashes) * (event.medium == "CPU")
        parent = event.parent_block_hash
        extra_keys = event.extra_keys or [None] * len(event.block_hashes)
        for at, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
            others = (
                *(event.lora_id, event.lora_name, extra_keys[at]),
                *(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window),
                getattr(event, "session_id", None),
            )
            described = Described(parent, tuple(tokens), event.block_size, others)
            known[event.group_idx, block_hash] = described
            parent = block_hash

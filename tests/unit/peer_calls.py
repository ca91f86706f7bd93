# SPDX-License-Identifier: Apache-2.0
"""What tests do in a peer with its pool, the KV memory beside that, and its lookup client."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from peer_process import PATIENCE_S

from umbp.backends.base import (
    JobResult,
    LookupAnswer,
    LookupPart,
    LookupQuestion,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerPool,
    WorkerSite,
)
from umbp.backends.mori_lookup import LookupStats, MoriLookup
from umbp.keys import KeySpace
from umbp.testing.kv_memory import GroupShape, HostKVMemory, KVShape, make_kv_memory

KIB = 1024
GROUP = GroupShape(head_count=2, plane_bytes=(4 * KIB,) * 8)
OBJECT_BYTES = GROUP.object_bytes
BLOCKS = 16
NAMESPACE = bytes(range(16))
HASH_BYTES = 8

STATE: dict[str, Any] = {}
"""What this process has."""


def site(transfer_timeout_ms: int = int(PATIENCE_S * 1000)) -> WorkerSite:
    return WorkerSite(
        rank=0,
        rank_count=1,
        device_type="cpu",
        device_index=None,
        instance="test",
        transfer_timeout_ms=transfer_timeout_ms,
    )


def pool() -> Any:
    opened = STATE["pool"]
    return opened


def keep_pool(opened: WorkerPool) -> None:
    """Makes a pool this process's one, and registers KV memory with it."""
    STATE["kv"] = make_kv_memory(KVShape.LBH, [GROUP], block_count=BLOCKS)
    STATE["pool"] = opened
    opened.register(kv().memory)


def kv() -> HostKVMemory:
    memory: HostKVMemory = STATE["kv"]
    return memory


# ---------------------------------------------------------------- transfers


def fill(blocks: Mapping[int, int]) -> dict[int, bytes]:
    """Fills blocks from seeds."""
    return {block: kv().fill(0, block, seed) for block, seed in blocks.items()}


def keys(names: Mapping[str, int], epoch: int = 0) -> list[bytes]:
    hashes = [name.encode().ljust(HASH_BYTES, b".") for name in names]
    return KeySpace(NAMESPACE).keys(hashes, epoch=epoch, group_index=0, rank=0)


def begin(kind: str, names: Mapping[str, int], deadline_s: float = PATIENCE_S) -> int:
    """Starts a job on this process's pool and returns its id."""
    job_id: int = STATE.setdefault("job_id", 0) + 1
    STATE["job_id"] = job_id
    blocks = np.array(list(names.values()), dtype=np.int64)
    part = TransferPart(0, keys(names), blocks)
    job = TransferJob(job_id, (part,), time.monotonic() + deadline_s)
    (pool().store if kind == "store" else pool().load)(job)
    return job_id


def results(count: int) -> list[JobResult]:
    """Waits for that many results."""
    found: list[JobResult] = []
    give_up_s = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < give_up_s, f"only {found}"
        found += pool().poll()
        time.sleep(0.0005)
    return found


def move(kind: str, names: Mapping[str, int]) -> JobResult:
    begin(kind, names)
    return results(1)[0]


def store(names: Mapping[str, int]) -> JobResult:
    return move("store", names)


def load(names: Mapping[str, int]) -> JobResult:
    return move("load", names)


def read(block: int) -> bytes:
    return kv().read(0, block)


def wipe() -> None:
    kv().wipe()


def close_pool(timeout_s: float) -> float:
    """Closes the pool and returns how long that took."""
    begun_s = time.monotonic()
    pool().close(timeout_s)
    return time.monotonic() - begun_s


def until_done(kind: str, names: Mapping[str, int]) -> float:
    """Tries a job until it is done, as requests that come one after the other do."""
    begun_s = time.monotonic()
    while move(kind, names).outcome is not TransferOutcome.DONE:
        assert time.monotonic() < begun_s + PATIENCE_S
        time.sleep(0.02)
    return time.monotonic() - begun_s


# ---------------------------------------------------------------- lookups


def lookup() -> MoriLookup:
    client: MoriLookup = STATE["lookup"]
    return client


def ask(names: Mapping[str, int], epoch: int = 0) -> tuple[int, float]:
    """Asks, and returns the question's id and how long that took."""
    question_id: int = STATE.setdefault("question_id", 0) + 1
    STATE["question_id"] = question_id
    hashes = b"".join(name.encode().ljust(HASH_BYTES, b".") for name in names)
    begun_s = time.monotonic()
    lookup().ask(LookupQuestion(question_id, epoch, (LookupPart(0, HASH_BYTES, hashes),)))
    return question_id, time.monotonic() - begun_s


def answers(wait_s: float) -> tuple[list[LookupAnswer], float]:
    """Returns answers, and how long that took."""
    begun_s = time.monotonic()
    found = lookup().answers(wait_s)
    return found, time.monotonic() - begun_s


def look_up(names: Mapping[str, int], epoch: int = 0) -> list[bool] | str:
    """Asks and waits: which blocks there are, or why that is not known."""
    question_id, _ = ask(names, epoch)
    found, _ = answers(PATIENCE_S)
    (answer,) = found
    assert answer.question_id == question_id
    return answer.reason if answer.present is None else answer.present[0].tolist()


def until_found(names: Mapping[str, int]) -> float:
    """Asks until all blocks are there, and returns how long that took."""
    begun_s = time.monotonic()
    while look_up(names) != [True] * len(names):
        assert time.monotonic() < begun_s + PATIENCE_S
        time.sleep(0.02)
    return time.monotonic() - begun_s


def keep_lookup(client: MoriLookup) -> None:
    """Makes a client this process's one, and begins to keep what is logged."""
    logging.getLogger("umbp").addHandler(_Lines())
    STATE["lookup"] = client


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        STATE.setdefault("lines", []).append((record.name, record.getMessage()))


def log_lines(logger: str) -> list[str]:
    """Returns what was logged since a lookup was opened."""
    return [line for name, line in STATE.get("lines", []) if name == logger]


def lookup_stats() -> LookupStats:
    return lookup().stats()


def close_lookup() -> float:
    begun_s = time.monotonic()
    lookup().close()
    return time.monotonic() - begun_s

# SPDX-License-Identifier: Apache-2.0
"""A backend whose pool lives in another process, ``dict_server``, to test the checks with."""

import ctypes
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from umbp.backends.base import (
    JobResult,
    KVMemory,
    LookupAnswer,
    LookupQuestion,
    PoolStats,
    SchedulerSite,
    TransferJob,
    TransferOutcome,
)
from umbp.backends.job_runner import JobRunner, TransferKind
from umbp.errors import BackendError
from umbp.keys import KeySpace, split_hashes
from umbp.testing.conformance import Harness, PoolCase

SERVER = Path(__file__).with_name("dict_server.py")


class SharedPool:
    """A ``WorkerPool`` that sends the bytes of its blocks through a socket."""

    def __init__(self, case: PoolCase, path: Path) -> None:
        self._capacity_bytes = case.capacity_bytes
        self._connection: Connection[Any, Any] = Client(str(path), "AF_UNIX")
        self._lock = threading.Lock()
        self._memory = KVMemory((), ())
        self._runner = JobRunner(
            self._run,
            thread_count=case.transfer_threads,
            queue_limit=case.queue_limit,
            timeout_ms=case.site.transfer_timeout_ms,
            name="shared-dict",
        )

    def register(self, memory: KVMemory) -> None:
        self._memory = memory

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._ask("contains", list(keys))

    def load(self, job: TransferJob) -> None:
        self._runner.submit(TransferKind.LOAD, job)

    def store(self, job: TransferJob) -> None:
        self._runner.submit(TransferKind.STORE, job)

    def poll(self) -> list[JobResult]:
        return self._runner.poll()

    def cancel(self, job_id: int) -> None:
        self._runner.cancel(job_id)

    def take_evictions(self) -> list[bytes]:
        return []

    def stats(self) -> PoolStats:
        return PoolStats(self._capacity_bytes, None, None, None)

    def close(self, timeout_s: float) -> None:
        if self._runner.close(timeout_s):
            self._connection.close()

    def _ask(self, operation: str, argument: Any) -> Any:
        with self._lock:
            try:
                self._connection.send((operation, argument))
                return self._connection.recv()
            except (EOFError, OSError) as error:
                raise BackendError(f"the other side is gone: {error}") from error

    def _run(self, kind: TransferKind, job: TransferJob) -> JobResult:
        ranges = {
            key: self._ranges(part.group_index, block_id)
            for part in job.parts
            for key, block_id in zip(part.keys, part.block_ids.tolist(), strict=True)
        }
        if kind is TransferKind.LOAD:
            return self._load(job, ranges)
        content = {
            key: b"".join(ctypes.string_at(address, size) for address, size in of_block)
            for key, of_block in ranges.items()
        }
        return JobResult(job.job_id, TransferOutcome.DONE, self._ask("store", content))

    def _load(self, job: TransferJob, ranges: dict[bytes, list[tuple[int, int]]]) -> JobResult:
        sizes = {key: sum(size for _, size in of_block) for key, of_block in ranges.items()}
        found = self._ask("load", sizes)
        missing = tuple(key for key, here in zip(ranges, found, strict=True) if here is None)
        if missing:
            return JobResult(job.job_id, TransferOutcome.FAILED, 0, missing)
        for of_block, content in zip(ranges.values(), found, strict=True):
            begin = 0
            for address, size in of_block:
                ctypes.memmove(address, content[begin : begin + size], size)
                begin += size
        return JobResult(job.job_id, TransferOutcome.DONE, sum(sizes.values()))

    def _ranges(self, group_index: int, block_id: int) -> list[tuple[int, int]]:
        layout = self._memory.layout(group_index)
        begins = layout.addresses(np.array([block_id]))[0]
        return list(zip(begins.tolist(), layout.range_bytes.tolist(), strict=True))


class SharedClient:
    """A ``LookupClient`` that asks the server when it is asked."""

    def __init__(self, site: SchedulerSite, path: Path) -> None:
        self._space = KeySpace(site.namespace)
        self._rank_count = site.rank_count
        self._connection: Connection[Any, Any] = Client(str(path), "AF_UNIX")
        self._ready: list[LookupAnswer] = []

    def ask(self, question: LookupQuestion) -> None:
        self._ready.append(self._answer(question))

    def answers(self, wait_s: float = 0.0) -> list[LookupAnswer]:
        ready, self._ready = self._ready, []
        return ready

    def forget(self, question_id: int) -> None:
        self._ready = [answer for answer in self._ready if answer.question_id != question_id]

    def close(self) -> None:
        self._connection.close()

    def _answer(self, question: LookupQuestion) -> LookupAnswer:
        present = []
        try:
            for part in question.parts:
                hashes = split_hashes(part.hashes, part.hash_bytes)
                found = [
                    self._found(self._keys(hashes, question.epoch, part.group_index, rank))
                    for rank in range(self._rank_count)
                ]
                present.append(np.array(found, dtype=bool).all(axis=0))
        except (EOFError, OSError) as error:
            return LookupAnswer(question.question_id, None, str(error))
        return LookupAnswer(question.question_id, tuple(present))

    def _keys(self, hashes: list[bytes], epoch: int, group_index: int, rank: int) -> list[bytes]:
        return self._space.keys(hashes, epoch=epoch, group_index=group_index, rank=rank)

    def _found(self, keys: list[bytes]) -> list[bool]:
        self._connection.send(("contains", keys))
        found: list[bool] = self._connection.recv()
        return found


@attrs.define(eq=False)
class Server:
    """The other side: at most one process at a time, each under a path of its own.

    Attributes:
        folder: Where the sockets go.
    """

    folder: Path
    pool_type: Callable[[PoolCase, Path], Any] = SharedPool
    client_type: Callable[[SchedulerSite, Path], Any] = SharedClient
    _process: subprocess.Popen[str] | None = None
    _path: Path = Path()
    _capacity_bytes: int = 0
    _numbers: "itertools.count[int]" = attrs.field(factory=itertools.count)

    def harness(self) -> Harness:
        return Harness(self.open_pool, self.open_lookup, self.kill, self.start)

    def open_pool(self, case: PoolCase) -> Any:
        if case.site.rank == 0:
            self._capacity_bytes = case.capacity_bytes
            if self._process is None:
                self.start()
            else:
                with Client(str(self._path), "AF_UNIX") as connection:
                    connection.send(("empty", self._capacity_bytes))
                    connection.recv()
        return self.pool_type(case, self._path)

    def open_lookup(self, site: SchedulerSite) -> Any:
        return self.client_type(site, self._path)

    def start(self) -> None:
        self._path = self.folder / str(next(self._numbers))
        command = [sys.executable, str(SERVER), str(self._path), str(self._capacity_bytes)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

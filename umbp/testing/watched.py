# SPDX-License-Identifier: Apache-2.0
"""A pool and a lookup client whose calls may hang without hanging the check.

Each call runs on a thread of its own kind: all of one object's calls on one thread, as the contract
says, but for ``contains``, which may come from any. The threads are daemons, so that a call that
never returns does not keep the interpreter alive either.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from umbp.backends.base import (
    JobResult,
    KVMemory,
    LookupAnswer,
    LookupClient,
    LookupQuestion,
    PoolStats,
    TransferJob,
    WorkerPool,
)
from umbp.testing.conformance_rig import ConformanceError, MakePool

_Result = TypeVar("_Result")
_Calls = queue.SimpleQueue[Callable[[], None] | None]


class CallThread:
    """Runs calls on one thread and waits for each only so long.

    Args:
        patience_s: How long one call may take beyond what it was asked to wait.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._hung: ConformanceError | None = None
        self._calls: _Calls = queue.SimpleQueue()
        # The thread holds the queue alone, so that it ends when nobody has this object any more.
        threading.Thread(
            target=_work, args=(self._calls,), name="umbp-watched", daemon=True
        ).start()
        weakref.finalize(self, self._calls.put, None)

    def call(
        self, function: Callable[..., _Result], *arguments: Any, wait_s: float = 0.0
    ) -> _Result:
        """Makes a call, and returns or raises what it does.

        Args:
            function: What to call.
            arguments: Its arguments.
            wait_s: How long it may wait by itself.

        Raises:
            ConformanceError: It does not return, or an earlier call did not.
        """
        if self._hung is not None:
            raise self._hung
        outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put((function(*arguments), None))
            except BaseException as error:  # Goes on in the thread that waits.
                outcome.put((None, error))

        self._calls.put(run)
        try:
            result, error = outcome.get(timeout=wait_s + self._patience_s)
        except queue.Empty:
            name = getattr(function, "__name__", repr(function))
            self._hung = ConformanceError(f"{name} does not return")
            raise self._hung from None
        if error is not None:
            raise error
        returned: _Result = result
        return returned


def _work(calls: _Calls) -> None:
    while (run := calls.get()) is not None:
        run()


class WatchedPool:
    """A ``WorkerPool`` none of whose calls can hang its caller."""

    def __init__(self, pool: WorkerPool, patience_s: float) -> None:
        self._pool = pool
        self._calls = CallThread(patience_s)
        self._lookups = CallThread(patience_s)
        wait = getattr(pool, "wait", None)
        self.wait: Callable[[float], None] | None = None
        if wait is not None:
            self.wait = lambda timeout_s: self._calls.call(wait, timeout_s, wait_s=timeout_s)

    def register(self, memory: KVMemory) -> None:
        self._calls.call(self._pool.register, memory)

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return self._lookups.call(self._pool.contains, keys)

    def load(self, job: TransferJob) -> None:
        self._calls.call(self._pool.load, job)

    def store(self, job: TransferJob) -> None:
        self._calls.call(self._pool.store, job)

    def poll(self) -> list[JobResult]:
        return self._calls.call(self._pool.poll)

    def cancel(self, job_id: int) -> None:
        self._calls.call(self._pool.cancel, job_id)

    def take_evictions(self) -> list[bytes]:
        return self._calls.call(self._pool.take_evictions)

    def stats(self) -> PoolStats:
        return self._calls.call(self._pool.stats)

    def close(self, timeout_s: float) -> None:
        self._calls.call(self._pool.close, timeout_s, wait_s=timeout_s)


def watched(make: MakePool, patience_s: float) -> MakePool:
    """Returns a function that opens what ``make`` does, as a ``WatchedPool``."""
    return lambda case: WatchedPool(make(case), patience_s)


class WatchedClient:
    """A ``LookupClient`` none of whose calls can hang its caller, or may raise."""

    def __init__(self, client: LookupClient, patience_s: float) -> None:
        self._client = client
        self._calls = CallThread(patience_s)

    def ask(self, question: LookupQuestion) -> None:
        self._call(self._client.ask, question)

    def answers(self, wait_s: float = 0.0) -> list[LookupAnswer]:
        return self._call(self._client.answers, wait_s, wait_s=wait_s)

    def forget(self, question_id: int) -> None:
        self._call(self._client.forget, question_id)

    def close(self) -> None:
        self._call(self._client.close)

    def _call(
        self, function: Callable[..., _Result], *arguments: Any, wait_s: float = 0.0
    ) -> _Result:
        try:
            return self._calls.call(function, *arguments, wait_s=wait_s)
        except ConformanceError:
            raise
        except Exception as error:
            name = getattr(function, "__name__", repr(function))
            raise ConformanceError(f"{name} raised {error!r}") from error

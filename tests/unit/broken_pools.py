# SPDX-License-Identifier: Apache-2.0
"""Pools that break a rule: each is the memory backend's with one thing wrong."""

import contextlib
import threading
import time
from collections import OrderedDict

import attrs
import numpy as np

from umbp.backends.base import JobResult, TransferOutcome, TransferPart
from umbp.backends.memory import MemoryOptions, MemoryPool
from umbp.errors import UsageError

PATIENCE_S = 1.0
"""For an answer or a call that never comes. Wherever else, a busy machine may take its time."""


class Broken(MemoryPool):
    """Opens as the memory backend does."""

    capacity_factor = 1
    queue_factor = 1

    def __init__(self, case):
        options = MemoryOptions(
            capacity_bytes=case.capacity_bytes * self.capacity_factor,
            queue_limit=case.queue_limit * self.queue_factor,
            transfer_threads=case.transfer_threads,
        )
        super().__init__(options, case.site)


class SwapsBlocks(Broken):
    def _load(self, copier, job):
        parts = [attrs.evolve(part, block_ids=np.roll(part.block_ids, 1)) for part in job.parts]
        return super()._load(copier, attrs.evolve(job, parts=tuple(parts)))


class WritesOutside(Broken):
    def register(self, memory):
        super().register(memory)
        self.memory = memory

    def _load(self, copier, job):
        self.memory.regions[0].tensor[-1] = 1
        return super()._load(copier, job)


class CountsNoBytes(Broken):
    def poll(self):
        return [attrs.evolve(result, bytes_moved=0) for result in super().poll()]


class Overwrites(Broken):
    def _store(self, copier, job):
        for part in job.parts:
            for key, block_id in zip(part.keys, part.block_ids, strict=True):
                if self.contains([key])[0]:
                    pins = self._index.pin([key], [self._layouts[part.group_index].object_bytes])
                    copier.store(part.group_index, np.array([block_id]), pins.offsets)
                    self._index.unpin(pins)
        return super()._store(copier, job)


class RefusesExisting(Broken):
    def _store(self, copier, job):
        if any(any(self.contains(part.keys)) for part in job.parts):
            return JobResult(job.job_id, TransferOutcome.FAILED)
        return super()._store(copier, job)


class LoadsWhatThereIs(Broken):
    def _load(self, copier, job):
        parts = []
        for part in job.parts:
            here = np.array(self.contains(part.keys))
            keys = [key for key, found in zip(part.keys, here, strict=True) if found]
            parts.append(TransferPart(part.group_index, keys, part.block_ids[here]))
        return super()._load(copier, attrs.evolve(job, parts=tuple(parts)))


class NamesNoKeys(Broken):
    def poll(self):
        return [attrs.evolve(result, failed_keys=()) for result in super().poll()]


class FailsAllKeys(Broken):
    def _load(self, copier, job):
        result = super()._load(copier, job)
        if not result.failed_keys:
            return result
        return attrs.evolve(
            result, failed_keys=tuple(key for part in job.parts for key in part.keys)
        )


class PublishesEarly(Broken):
    def store(self, job):
        self.early = {key for part in job.parts for key in part.keys}
        super().store(job)

    def contains(self, keys):
        present = super().contains(keys)
        return [here or key in self.early for here, key in zip(present, keys, strict=True)]


class FenceOnCaller(Broken):
    def store(self, job):
        if job.fence is not None:
            job.fence()
        super().store(attrs.evolve(job, fence=None))


class NoFence(Broken):
    def store(self, job):
        super().store(attrs.evolve(job, fence=None))


class ReadsBeforeFence(Broken):
    def store(self, job):
        def fence():
            self._copier.store(0, job.parts[0].block_ids, np.array([0]))
            before = self._buffer.tensor.clone()
            job.fence()
            self._store(self._copier, job)
            self._buffer.tensor.copy_(before)

        super().store(job if job.fence is None else attrs.evolve(job, fence=fence))


class SwallowsFenceError(Broken):
    def store(self, job):
        def fence():
            try:
                job.fence()
            except RuntimeError:
                return

        super().store(job if job.fence is None else attrs.evolve(job, fence=fence))


class HoldsTooMuch(Broken):
    capacity_factor = 2

    def stats(self):
        stats = super().stats()
        return attrs.evolve(stats, capacity_bytes=stats.capacity_bytes // 2, used_bytes=None)


class UsesTooMuch(Broken):
    def stats(self):
        return attrs.evolve(super().stats(), used_bytes=1 << 40)


class ReportsEvictionsTwice(Broken):
    def take_evictions(self):
        return super().take_evictions() * 2


class ReportsEvictionsThatDidNotHappen(Broken):
    def take_evictions(self):
        return list(self._index._objects)[:1]


class FirstInFirstOut(Broken):
    class Objects(OrderedDict):
        def move_to_end(self, key, last=True):
            pass

    def register(self, memory):
        super().register(memory)
        self._index._objects = self.Objects()


class LookupIsAUse(Broken):
    def contains(self, keys):
        for key in set(keys) & set(self._index._objects):
            self._index._objects.move_to_end(key)
        return super().contains(keys)


class AnswersTwice(Broken):
    def poll(self):
        return super().poll() * 2


class AnswersUnasked(Broken):
    def cancel(self, job_id):
        self._runner._results.append(JobResult(job_id, TransferOutcome.NOT_ATTEMPTED))


class LosesAnAnswer(Broken):
    lost = None

    def poll(self):
        results = super().poll()
        if results and self.lost is None:
            self.lost = results.pop()
        return results


class StoresCancelledJobs(Broken):
    cancelled = frozenset()

    def cancel(self, job_id):
        self.cancelled |= {job_id}

    def poll(self):
        return [
            attrs.evolve(result, outcome=TransferOutcome.NOT_ATTEMPTED)
            if result.job_id in self.cancelled
            else result
            for result in super().poll()
        ]


class NoDeadline(Broken):
    def store(self, job):
        super().store(attrs.evolve(job, deadline_s=1e12))


class NoLoadDeadline(Broken):
    def load(self, job):
        super().load(attrs.evolve(job, deadline_s=1e12))


class EndlessQueue(Broken):
    queue_factor = 1000


class BlocksWhenFull(Broken):
    queue_factor = 1000

    def store(self, job):
        while len(self._runner._stores) >= 4:
            time.sleep(0.01)
        super().store(job)


class WaitsTooLong(Broken):
    def wait(self, timeout_s):
        time.sleep(timeout_s)


class WaitsForNothing(Broken):
    def wait(self, timeout_s): ...


class Arrives(Broken):
    """Announces loads as it should, and moves their bytes when somebody waits."""

    class Arrival:
        def __init__(self, do):
            self.do = do

        def wait(self):
            do, self.do = self.do, lambda: None
            do()

    def _load(self, copier, job):
        if job.may_arrive and all(self.contains([key for part in job.parts for key in part.keys])):
            waited = threading.Event()
            self.announce(job, self.Arrival(lambda: self.bring(copier, job, waited)))
            waited.wait(PATIENCE_S)
        return super()._load(copier, job)

    def bring(self, copier, job, waited):
        super()._load(copier, job)
        waited.set()

    def announce(self, job, arrival):
        self._runner.announce(job.job_id, arrival)


class AnnouncesTooEarly(Arrives):
    def bring(self, copier, job, waited): ...


class AnnouncesTwice(Arrives):
    def announce(self, job, arrival):
        super().announce(job, arrival)
        super().announce(job, arrival)


class AnnouncesNothing(Arrives):
    def announce(self, job, arrival):
        super().announce(job, None)


class AnnouncesEverything(Broken):
    def _load(self, copier, job):
        self._runner.announce(job.job_id, Arrives.Arrival(lambda: None))
        return super()._load(copier, job)


class BreaksItsWord(Arrives):
    def _load(self, copier, job):
        result = super()._load(copier, job)
        return attrs.evolve(result, outcome=TransferOutcome.FAILED) if job.may_arrive else result


class CloseWaits(Broken):
    def close(self, timeout_s):
        super().close(10 * PATIENCE_S)


class CloseLosesJobs(Broken):
    def poll(self):
        return [result for result in super().poll() if result.reason != "closed"]


class CloseRunsJobs(Broken):
    def close(self, timeout_s):
        if not self._runner._stores:
            super().close(timeout_s)


class IgnoresCase(Broken):
    def contains(self, keys):
        return super().contains([key.lower() for key in keys])

    def store(self, job):
        parts = [attrs.evolve(part, keys=[key.lower() for key in part.keys]) for part in job.parts]
        super().store(attrs.evolve(job, parts=tuple(parts)))


class RaisesOnUnknownGroup(Broken):
    def store(self, job):
        for part in job.parts:
            self._layouts[part.group_index]
        super().store(job)


class IgnoresSize(Broken):
    only = None

    def _load(self, copier, job):
        if job.parts[0].group_index == self.only and self.contains(job.parts[0].keys)[0]:
            return JobResult(job.job_id, TransferOutcome.DONE)
        return super()._load(copier, job)


class LoadsTooShort(IgnoresSize):
    only = 0


class LoadsTooLong(IgnoresSize):
    only = 1


class ReplacesOtherSize(Broken):
    def _store(self, copier, job):
        for part in job.parts:
            pins = self._index.pin(part.keys, [self._layouts[part.group_index].object_bytes])
            self._index.unpin(pins)
            for key in pins.missing_keys:
                self._index._objects.pop(key, None)
        return super()._store(copier, job)


class MixesUpPartialStores(Broken):
    def _store(self, copier, job):
        parts = []
        for part in job.parts:
            new = [key for key in part.keys if not self.contains([key])[0]]
            parts.append(TransferPart(part.group_index, new, part.block_ids[: len(new)]))
        return super()._store(copier, attrs.evolve(job, parts=tuple(parts)))


class CountsExistingObjects(Broken):
    def _store(self, copier, job):
        sizes = [
            len(part.keys) * self._layouts[part.group_index].object_bytes for part in job.parts
        ]
        return attrs.evolve(super()._store(copier, job), bytes_moved=sum(sizes))


class ZeroesOtherBlocks(Broken):
    def register(self, memory):
        super().register(memory)
        self.memory = memory

    def _load(self, copier, job):
        for region in self.memory.regions[1:]:
            region.tensor.zero_()
        return super()._load(copier, job)


class IgnoresPrefix(Broken):
    def contains(self, keys):
        return super().contains([key[28:] or key for key in keys])

    def store(self, job):
        super().store(self.stripped(job))

    def load(self, job):
        super().load(self.stripped(job))

    def stripped(self, job):
        parts = [
            attrs.evolve(part, keys=[key[28:] or key for key in part.keys]) for part in job.parts
        ]
        return attrs.evolve(job, parts=tuple(parts))


class NeverEvicts(Broken):
    def _store(self, copier, job):
        needed = sum(self._layouts[part.group_index].object_bytes for part in job.parts)
        if self.stats().used_bytes + needed > self._capacity_bytes:
            return JobResult(job.job_id, TransferOutcome.FAILED, reason="full")
        return super()._store(copier, job)


class ServesWhatWasEvicted(Broken):
    def register(self, memory):
        super().register(memory)
        self.offsets = {}

    def _store(self, copier, job):
        result = super()._store(copier, job)
        for part in job.parts:
            sizes = [self._layouts[part.group_index].object_bytes] * len(part.keys)
            pins = self._index.pin(part.keys, sizes)
            self._index.unpin(pins)
            self.offsets.update(zip(part.keys, pins.offsets, strict=False))
        return result

    def _load(self, copier, job):
        for part in job.parts:
            offsets = np.array([self.offsets[key] for key in part.keys])
            copier.load(part.group_index, part.block_ids, offsets)
        return JobResult(job.job_id, TransferOutcome.DONE)


class DoesNotSayWhatIsGone(Broken):
    def _load(self, copier, job):
        return attrs.evolve(super()._load(copier, job), failed_keys=())


class HoldsEverything(Broken):
    capacity_factor = 100


class MixesUpQuestions(Broken):
    def contains(self, keys):
        self.asked = keys
        time.sleep(0.001)
        return super().contains(self.asked)


class SharesItsBuffer(Broken):
    def _load(self, copier, job):
        self.job = job
        time.sleep(0.001)
        super()._load(copier, self.job)
        return JobResult(job.job_id, TransferOutcome.DONE)


class TakesAnId(Broken):
    def store(self, job):
        with contextlib.suppress(UsageError):
            super().store(job)


class LosesObjects(Broken):
    def unregister(self):
        super().unregister()
        self._index.clear()


class KeepsOldMemory(Broken):
    memory = None

    def register(self, memory):
        self.memory = self.memory or memory
        super().register(self.memory)


class GoesOnWithoutMemory(Broken):
    def unregister(self):
        pass

    def register(self, memory):
        self._copier = None
        super().register(memory)

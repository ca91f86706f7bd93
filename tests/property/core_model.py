# SPDX-License-Identifier: Apache-2.0
"""The lifecycle once more, as plainly as can be: no table, no queue, everything looked through.

Numbers of questions and jobs are taken over from the core; all else is worked out anew.
"""

from types import SimpleNamespace
from typing import Any

from umbp.fsm import CoreLimits

NEVER = float("inf")


class Refused(Exception):
    """The event is illegal, or does not fit."""


class Model:
    """What a core should do, written as one would tell it."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self.unit = limits.unit_tokens
        self.requests: dict[str, Any] = {}
        self.leases: dict[int, Any] = {}
        self.epoch, self.tainted, self.now_s = 0, False, 0.0

    # ------------------------------------------------------------ requests

    def ask(self, name: str, local: int, end: int, stored: int, skip: bool) -> str:
        request = self.requests.get(name)
        self.need(skip or (local % self.unit == 0 and end - end % self.unit > local))
        self.need(skip or request is None or not request.load_barred)
        if request is None:
            request = self.requests[name] = SimpleNamespace(leases=0, load_barred=False)
            request.state = None
        if request.state != "LOOKUP":
            request.planned, request.store_barred = 0, False
        request.state, request.local, request.stored = "LOOKUP", local, stored
        request.asking, request.hit = not skip, local if skip else None
        request.answered_s, request.load, request.epoch = NEVER, None, self.epoch
        self.bound(request, self.limits.idle_timeout_s if skip else self.limits.lookup_timeout_s)
        return "skipped" if skip else "asked"

    def answer(self, name: str, hit: int) -> None:
        request = self.requests[name]
        request.asking, request.hit, request.answered_s = False, hit, self.now_s
        self.bound(request, self.limits.idle_timeout_s)

    def reply(self, name: str, local: int) -> Any:
        request = self.requests.get(name)
        if request is None or request.state != "LOOKUP" or local < request.local:
            return "ask"
        if request.asking:
            return "wait"
        if request.hit is None or self.now_s - request.answered_s > self.limits.answer_lifetime_s:
            return "ask"
        return max(0, request.hit - local)

    def load(self, name: str, begin: int, end: int, blocks: int, synchronous: bool) -> Any:
        request = self.find(name, "LOOKUP")
        self.need(request.local <= begin < end <= (request.hit or 0))
        self.need(blocks > 0 and (end - begin) % self.unit == 0)
        request.state, request.planned = "LOADING", end
        self.bar_if_tainted(request, begin)
        request.load = self.open(request, "load", blocks, begin, end)
        request.load.synchronous = synchronous
        self.bound(request, self.limits.transfer_timeout_s)
        return request.load

    def compute(self, name: str, computed: int) -> None:
        request = self.find(name, "LOOKUP", "RUNNING")
        if request.state == "LOOKUP":
            self.bar_if_tainted(request, computed)
        request.state, request.asking = "RUNNING", False
        request.planned = max(request.planned, computed // self.unit * self.unit)
        self.bound(request, self.limits.idle_timeout_s)

    def storable(self, name: str, computed: int) -> tuple[int, int] | None:
        request = self.requests.get(name)
        if request is None or request.state != "RUNNING" or request.store_barred:
            return None
        end = min(computed, request.stored) // self.unit * self.unit
        while end > request.planned and not self.has_room((end - request.planned) // self.unit):
            end -= self.unit
        if end <= request.planned or request.epoch != self.epoch:
            return None
        return request.planned, end

    def fill(self, name: str, begin: int, end: int, blocks: int) -> Any:
        request = self.find(name, "RUNNING")
        self.need((begin, end) == self.storable(name, end) and blocks > 0)
        request.planned = end
        self.bound(request, self.limits.idle_timeout_s)
        return self.open(request, "store", blocks, begin, end)

    def may_defer(self) -> bool:
        loading = any(one.synchronous for one in self.leases.values())
        return self.limits.lazy_blocks_max > 0 and not self.tainted and not loading

    def defer(self, name: str, begin: int, end: int) -> None:
        request = self.find(name, "RUNNING")
        storable = not request.store_barred and request.epoch == self.epoch
        self.need(storable and self.may_defer() and end % self.unit == 0)
        self.need(begin == request.planned < end <= request.stored)
        request.planned = end
        self.bound(request, self.limits.idle_timeout_s)

    def near_reuse(self, blocks: int) -> Any:
        self.need(blocks > 0 and not self.tainted and self.has_room(blocks))
        self.need(self.pinned() + blocks <= self.limits.lazy_blocks_max)
        return self.open(None, "store", blocks, 0, 0)

    def may_store_boundary(self, name: str, blocks: int) -> bool:
        request = self.requests[name]
        may_store = request.state == "RUNNING" and not request.store_barred
        return may_store and request.epoch == self.epoch and self.has_room(blocks)

    def offer_boundary(self, name: str, boundary: int, blocks: int) -> Any:
        request = self.find(name, "RUNNING")
        self.need(blocks > 0 and self.may_store_boundary(name, blocks))
        self.bound(request, self.limits.idle_timeout_s)
        return self.open(request, "store", blocks, boundary, boundary)

    def has_room(self, blocks: int) -> bool:
        return (
            not any(one.synchronous for one in self.leases.values())
            and len(self.leases) < self.limits.open_leases_max
            and self.pinned() + blocks <= self.limits.pinned_blocks_max
        )

    def pinned(self) -> int:
        return sum(one.blocks for one in self.leases.values() if one.pinned)

    def preempt(self, name: str) -> None:
        request = self.find(name, "LOADING", "RUNNING")
        request.state, request.load = "PREEMPTED", None
        self.bound(request, self.limits.idle_timeout_s)

    def finish(self, name: str) -> None:
        request = self.find(name, "LOOKUP", "LOADING", "RUNNING", "PREEMPTED")
        del self.requests[name]
        request.state, request.asking = ("STORING" if request.leases else "FINISHED"), False

    def reset(self, kept: bool, epoch: int | None) -> None:
        self.need(epoch != self.epoch)
        self.epoch, self.tainted = self.epoch + 1 if epoch is None else epoch, kept
        for request in self.requests.values():
            if request.state == "LOOKUP":
                request.asking, request.hit, request.epoch = False, None, self.epoch
                self.bound(request, self.limits.idle_timeout_s)

    # ------------------------------------------------------------ transfers

    def open(self, request: Any, kind: str, blocks: int, begin: int, end: int) -> Any:
        if request is not None:
            request.leases += 1
        lease = SimpleNamespace(request=request, kind=kind, blocks=blocks, begin=begin, end=end)
        lease.left, lease.failed = set(range(self.limits.rank_count)), False
        lease.sent, lease.synchronous = False, False
        lease.epoch = self.epoch if request is None else request.epoch
        lease.pinned, lease.stalled, lease.arriving = kind == "store", set(), set()
        lease.broken = False
        self.bound(lease, self.limits.transfer_timeout_s)
        return lease

    def send(self, job_id: int) -> None:
        self.need(job_id in self.leases and not self.leases[job_id].sent)
        self.leases[job_id].sent = True
        self.bound(self.leases[job_id], self.limits.transfer_timeout_s)

    def rank_answers(self, job_id: int, rank: int, succeeded: bool) -> list[Any]:
        lease = self.leases.get(job_id)
        if lease is None or rank not in lease.left:
            return []
        self.need(lease.sent)
        lease.left.discard(rank)
        lease.failed |= not succeeded
        lease.broken |= not succeeded and rank in lease.arriving
        self.leave(lease)
        return [] if lease.left else self.close(job_id)

    def rank_stalls(self, job_id: int, rank: int) -> list[Any]:
        lease, news = self.report(job_id, rank)
        if lease is not None:
            lease.stalled.add(rank)
            lease.failed = True
            self.bound(lease, self.limits.transfer_timeout_s)
            self.leave(lease)
        return news

    def rank_arrives(self, job_id: int, rank: int) -> list[Any]:
        lease, news = self.report(job_id, rank)
        if lease is not None:
            lease.arriving.add(rank)
            self.leave(lease)
        return news

    def report(self, job_id: int, rank: int) -> tuple[Any, list[Any]]:
        """Returns the load of which a rank speaks for the first time, now held, or None."""
        lease = self.leases.get(job_id)
        if lease is None or rank not in lease.left or rank in lease.stalled | lease.arriving:
            return None, []
        self.need(lease.sent and lease.kind == "load" and not lease.synchronous)
        news = [] if lease.pinned else [("pin", job_id)]
        lease.pinned = True
        return lease, news

    def leave(self, lease: Any) -> None:
        """Lets the request go on once every rank has answered or spoken, and some still work.

        It is computed if any of them has failed or stalled; else it has what was restored.
        """
        request = lease.request
        if not lease.left or not lease.left <= lease.stalled | lease.arriving:
            return
        if request.state == "LOADING" and request.load is lease:
            request.state, request.load = "RUNNING", None
            if lease.failed:
                request.state, request.load_barred = "LOOKUP", True
                request.hit, request.planned = None, 0
            self.bound(request, self.limits.idle_timeout_s)

    def close(self, job_id: int) -> list[Any]:
        lease = self.leases.pop(job_id)
        request = lease.request
        if request is None:
            return [("release", job_id)]
        request.leases -= 1
        if lease.broken or (lease.failed and lease.synchronous):
            for other in self.requests.values():
                other.store_barred = True
        if request.state == "LOADING" and request.load is lease:
            request.load, request.load_barred = None, request.load_barred or lease.failed
            request.state = "RUNNING"
            if lease.failed and not lease.synchronous:
                request.state, request.hit, request.planned = "LOOKUP", None, 0
            self.bound(request, self.limits.idle_timeout_s)
        elif request.state == "STORING" and not request.leases:
            request.state = "FINISHED"
        return [("release", job_id)] if lease.pinned else []

    # ------------------------------------------------------------ time

    def wait(self, now_s: float) -> list[Any]:
        self.now_s = now_s
        commands = []
        for job_id, lease in list(self.leases.items()):
            if lease.deadline_s <= now_s and lease.sent:
                commands.append(("cancel", job_id))
                self.bound(lease, self.limits.transfer_timeout_s)
            elif lease.deadline_s <= now_s:
                lease.failed = True
                commands += self.close(job_id)
        for name, request in list(self.requests.items()):
            if request.deadline_s > now_s:
                continue
            if request.state == "LOADING":
                self.bound(request, self.limits.transfer_timeout_s)
            elif request.state == "LOOKUP" and request.asking:
                commands.append(("drop", name))
                self.answer(name, request.local)
            else:
                self.finish(name)
        return commands

    # ------------------------------------------------------------ small things

    def bound(self, subject: Any, seconds: float) -> None:
        subject.deadline_s = self.now_s + seconds

    def bar_if_tainted(self, request: Any, local: int) -> None:
        request.store_barred = request.store_barred or bool(local and self.tainted)

    def find(self, name: str, *states: str) -> Any:
        self.need(name in self.requests and self.requests[name].state in states)
        return self.requests[name]

    @staticmethod
    def need(condition: bool) -> None:
        if not condition:
            raise Refused

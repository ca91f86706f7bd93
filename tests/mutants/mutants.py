# SPDX-License-Identifier: Apache-2.0
"""Mistakes that somebody could make in umbp, each a small change of its text.

Every one of them must be caught by the tests it names: a search of states, a property on vLLM's
real scheduler, or a case. ``make prove`` applies them one at a time and says which were caught;
``test_mutants_apply.py`` keeps the table in step with the code.
"""

from typing import Final

import attrs

SEARCH: Final = "tests/property/test_exhaustive.py"
SCHEDULER: Final = "tests/property/test_scheduler_machine.py"
LAZY: Final = "tests/unit/connector/test_lazy.py"
ARRIVALS: Final = "tests/unit/connector/test_worker_arrivals.py"


@attrs.frozen
class Mutant:
    """A mistake.

    Attributes:
        name: What is done wrong, in a few words.
        file: The file that it is in, from the project's root.
        before: Text that the file has exactly once.
        after: What stands there instead.
        tests: Files of tests of which at least one test must fail.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTANTS: Final = (
    Mutant(
        "preemption gives back the pins of stores that are still read",
        "umbp/fsm/effects.py",
        "    core.filling.pop(request.request_id, None)\n    core.counters.preemptions += 1\n",
        "    core.filling.pop(request.request_id, None)\n    core.counters.preemptions += 1\n"
        "    for lease in core.leases.values():\n"
        "        if lease.request is request and lease.pinned:\n"
        "            core.emit(commands.ReleasePins(lease))\n",
        (SEARCH,),
    ),
    Mutant(
        "an answer for an earlier life is taken for the present one's",
        "umbp/fsm/core.py",
        "        if request.state is not _LOADING or request.load_job_id != lease.job_id:\n"
        "            self._fire(request, _LEASE_CLOSED)\n",
        "        if request.state is not _LOADING:\n"
        "            self._fire(request, _LEASE_CLOSED)\n",
        (SEARCH,),
    ),
    Mutant(
        "a load that has ended is reported in every step from then on",
        "umbp/connector/worker.py",
        "        received, self._received = self._received, set()\n",
        "        received = set(self._received)\n",
        (SCHEDULER,),
    ),
    Mutant(
        "a transfer ends without the last rank",
        "umbp/fsm/core.py",
        "        self._all_ranks = (1 << limits.rank_count) - 1\n",
        "        self._all_ranks = (1 << max(1, limits.rank_count - 1)) - 1\n",
        (SEARCH,),
    ),
    Mutant(
        "keys do not carry the epoch",
        "umbp/keys.py",
        "        return _PREFIX.pack(self.namespace, epoch, group_index, rank)\n",
        "        return _PREFIX.pack(self.namespace, 0, group_index, rank)\n",
        (SCHEDULER,),
    ),
    Mutant(
        "all ranks share one object",
        "umbp/keys.py",
        "        return _PREFIX.pack(self.namespace, epoch, group_index, rank)\n",
        "        return _PREFIX.pack(self.namespace, epoch, group_index, 0)\n",
        (SCHEDULER,),
    ),
    Mutant(
        "a lookup has no deadline",
        "umbp/fsm/table.py",
        "effects.ask_lookup, QUESTION_DEADLINE),\n",
        "effects.ask_lookup),\n",
        (SCHEDULER, SEARCH),
    ),
    Mutant(
        "a boundary is keyed one unit off",
        "umbp/connector/groups.py",
        "            index = boundary // self.hash_tokens - 1\n",
        "            index = boundary // self.hash_tokens\n",
        (SCHEDULER,),
    ),
    Mutant(
        "blocks of a store are not pinned",
        "umbp/connector/scheduler.py",
        "                case StartStore(lease=lease):\n                    pins.pin(lease)\n",
        "                case StartStore(lease=lease):\n",
        (SCHEDULER,),
    ),
    Mutant(
        "blocks that a stalled load may still write are not pinned",
        "umbp/fsm/effects.py",
        "    lease.ranks_stalled |= 1 << event.rank\n    _hold(core, lease)\n",
        "    lease.ranks_stalled |= 1 << event.rank\n",
        (SEARCH,),
    ),
    Mutant(
        "a request whose load failed tries again",
        "umbp/fsm/effects.py",
        "    request.load_job_id = None\n    request.load_barred = True\n",
        "    request.load_job_id = None\n",
        (SEARCH, SCHEDULER),
    ),
    Mutant(
        "keys that failed a moment ago are looked up as if nothing had been",
        "umbp/fsm/quarantine.py",
        "        return {block_hash for block_hash in block_hashes if block_hash in self._until}\n",
        "        return set()\n",
        ("tests/cases/test_theme_03_load_failures.py",),
    ),
    Mutant(
        "tokens that asynchronous scheduling only expects count as computed",
        "umbp/connector/stores.py",
        "    return int(request.num_computed_tokens - request.num_output_placeholders)\n",
        "    return int(request.num_computed_tokens)\n",
        ("tests/cases/test_theme_04_planning.py",),
    ),
    Mutant(
        "a load that was on its way during a reset is good",
        "umbp/connector/worker.py",
        "        return epoch == self._epoch\n",
        "        return True\n",
        (SCHEDULER,),
    ),
    Mutant(
        "what a failed synchronous load left behind stays in the engine's cache",
        "umbp/connector/scheduler.py",
        "                if lease.synchronous and not answer.succeeded:\n",
        "                if False:\n",
        ("tests/cases/test_theme_03_load_failures.py",),
    ),
    Mutant(
        "after a failed synchronous load, lives that may share its blocks go on storing",
        "umbp/fsm/effects.py",
        "    if lease.broken or (lease.synchronous and lease.failed):\n",
        "    if lease.broken:\n",
        (SEARCH, SCHEDULER),
    ),
    Mutant(
        "one rank that holds an object is enough for a hit",
        "umbp/backends/lookup_client.py",
        "            self.masks = tuple(known & more for known, more in pairs)\n",
        "            self.masks = tuple(known | more for known, more in pairs)\n",
        ("tests/cases/test_theme_07_ranks.py",),
    ),
    Mutant(
        "null blocks are stored like others",
        "umbp/connector/groups.py",
        "            if NULL_BLOCK_ID in block_ids:\n",
        "            if False:\n",
        (SCHEDULER,),
    ),
    Mutant(
        "requests that have loaded may take all blocks, so that none can start",
        "umbp/connector/room.py",
        "        owed = self._owed_by_all - self._owed.get(request.request_id, 0)\n",
        "        owed = 0\n",
        ("tests/unit/connector/test_room.py",),
    ),
    Mutant(
        "a life that began before a reset stores under the new epoch",
        "umbp/fsm/store_rules.py",
        "        if request.state is not _RUNNING or request.epoch != self.epoch:\n"
        "            return None\n",
        "        if request.state is not _RUNNING:\n            return None\n",
        (SEARCH, SCHEDULER),
    ),
    Mutant(
        "free blocks are given back when the workers have heard of their store",
        "umbp/fsm/core.py",
        '            raise UsageError(f"transfer {event.job_id} is not open")\n'
        "        self._fire(lease, event)\n",
        '            raise UsageError(f"transfer {event.job_id} is not open")\n'
        "        self._fire(lease, event)\n"
        "        if lease.request is None:\n"
        "            lease.pinned = False\n"
        "            self.pinned_blocks -= lease.block_count\n"
        "            self.emit(commands.ReleasePins(lease))\n",
        (SEARCH, SCHEDULER),
    ),
    Mutant(
        "a free block is stored under the hash that it had when it was noted",
        "umbp/connector/lazy.py",
        "        key: bytes | None = block.block_hash\n",
        "        key = next((key for key, at in noted.items() if at == block_id), None)\n",
        (SCHEDULER, LAZY),
    ),
    Mutant(
        "any free block of a hash that was noted is stored",
        "umbp/connector/lazy.py",
        "        if noted.get(key) == block_id:\n",
        "        if key in noted:\n",
        (LAZY,),
    ),
    Mutant(
        "free blocks from before a reset are stored after it",
        "umbp/fsm/store_rules.py",
        '        if self.local_cache_tainted:\n            return "declined_stale_epoch"\n',
        "",
        (SEARCH,),
    ),
    Mutant(
        "blocks that admitted requests count on are pinned",
        "umbp/connector/lazy.py",
        "get_num_free_blocks()) - owed_blocks - self._step\n",
        "get_num_free_blocks())\n",
        (LAZY,),
    ),
    Mutant(
        "a step reads a load whose last bytes are still to come",
        "umbp/connector/worker.py",
        "        if not self._is_idle:\n            self._order_arrivals()\n",
        "",
        (SCHEDULER,),
    ),
    Mutant(
        "blocks that an arriving load still writes are not pinned",
        "umbp/fsm/effects.py",
        "    lease.ranks_arriving |= 1 << event.rank\n    _hold(core, lease)\n",
        "    lease.ranks_arriving |= 1 << event.rank\n",
        (SCHEDULER,),
    ),
    Mutant(
        "an arriving load gives its blocks back when the request goes on",
        "umbp/fsm/core.py",
        "            self._fire(request, _LOAD_STALLED if lease.failed else _LOAD_ARRIVED)\n",
        "            self._fire(request, _LOAD_STALLED if lease.failed else _LOAD_ARRIVED)\n"
        "            if not lease.failed:\n"
        "                lease.pinned = False\n"
        "                self.pinned_blocks -= lease.block_count\n"
        "                self.emit(commands.ReleasePins(lease))\n",
        (SCHEDULER,),
    ),
    Mutant(
        "a load from before a reset arrives after it",
        "umbp/connector/worker.py",
        "job.arrival is None or job.is_reported or not self._is_present(plan.epoch):\n",
        "job.arrival is None or job.is_reported:\n",
        (SCHEDULER,),
    ),
    Mutant(
        "a load that has arrived is reported again when it ends",
        "umbp/connector/worker.py",
        "            job.is_reported = job.is_arriving = True\n",
        "            job.is_arriving = True\n",
        (SCHEDULER,),
    ),
    Mutant(
        "a load that arrived before a reset has failed after it",
        "umbp/connector/worker.py",
        "if job.is_load and succeeded and not job.is_arriving and not self._is_present(",
        "if job.is_load and succeeded and not self._is_present(",
        (SCHEDULER,),
    ),
    Mutant(
        "a request goes on from what one rank restores and another does not",
        "umbp/fsm/core.py",
        "_LOAD_STALLED if lease.failed else _LOAD_ARRIVED)\n",
        "_LOAD_ARRIVED)\n",
        (SEARCH,),
    ),
    Mutant(
        "lives go on storing that may have read a load which could not fail, and did",
        "umbp/fsm/core.py",
        "        lease.broken = lease.broken or bool(lease.ranks_arriving >> event.rank & 1)\n",
        "",
        (SEARCH,),
    ),
    Mutant(
        "what is computed beside a load waits for it",
        "umbp/connector/worker.py",
        "            if self._is_idle:\n                self._report_arrivals()\n",
        "            self._report_arrivals()\n",
        (ARRIVALS,),
    ),
    Mutant(
        "stores of a step that computes nothing are not ordered after loads that arrive",
        "umbp/connector/worker.py",
        "        # A step that computes nothing has not waited for them yet.\n"
        "        self._order_arrivals()\n",
        "",
        (ARRIVALS,),
    ),
)

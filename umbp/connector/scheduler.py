# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: turns vLLM's hooks into events, and performs the commands that follow.

It decides nothing: what is looked up, loaded, stored, given up and released is said by
``umbp.fsm``. Nothing here raises into vLLM. A lookup without ``lookup_async`` is the only thing
that waits, for at most ``lookup_timeout_ms``.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from umbp.backends.base import EpochSource, LookupClient
from umbp.connector.answers import event_of
from umbp.connector.dry_watch import DryWatch
from umbp.connector.groups import GroupRules
from umbp.connector.lazy import LazyCounters, LazyStores, step_blocks
from umbp.connector.lookup_log import LookupLog
from umbp.connector.lookups import OpenLookups
from umbp.connector.metadata import StepMetadata, WorkerMetadata
from umbp.connector.outbox import Outbox
from umbp.connector.pins import BlockPins
from umbp.connector.room import Room
from umbp.connector.samples import LookupMeter
from umbp.connector.stores import StorePlanner
from umbp.connector.sync_loads import shares_open_load, uncache
from umbp.errors import BackendError, UmbpError, UsageError
from umbp.fsm import (
    CancelTransfer,
    Command,
    ComputeAdmitted,
    Core,
    DropLookup,
    EpochRaised,
    Event,
    LeaseKind,
    LeasePart,
    LeaseSent,
    LeaseState,
    LoadAdmitted,
    LookupAsked,
    LookupReply,
    LookupSkipped,
    PinBlocks,
    Preempted,
    ReleasePins,
    RequestContext,
    RequestFinished,
    RequestState,
    StartLoad,
    StartLookup,
    StartStore,
    TransferLease,
)

logger = logging.getLogger(__name__)


@attrs.frozen(eq=False)
class _Bound:
    """What depends on vLLM's cache manager.

    Attributes:
        rules: Cache-group rules.
        pins: Holds blocks.
        planner: Says what to store.
        lazy: Says what to store of what was put off; None: nothing is put off.
        room: Says which loads must wait.
        lookups: Questions that are open; None when nothing is ever looked up.
    """

    rules: GroupRules
    pins: BlockPins
    planner: StorePlanner
    lazy: LazyStores | None
    room: Room
    lookups: OpenLookups | None


class SchedulerSide:
    """Drives the core from vLLM's scheduler.

    Args:
        core: The lifecycle.
        lookups: Asks the backend; None when nothing is ever looked up.
        load_async: Load between steps.
        lookup_async: Let requests wait in the queue for their lookup.
        store: Store what is computed.
        save_decode_cache: Store blocks that decoding fills, too.
        lazy_step_tokens: Put stores off until KV memory is about to reuse the blocks; tokens that a
            step computes at most. None: store what is computed at once.
        shared_epoch: The epoch that this engine shares with others; None: it has its own.
        lookup_log: Takes what each lookup found; None: nobody wants to know.
        strict: Raise what would otherwise be logged and counted; for tests.
        clock: Seconds, monotonic.
    """

    def __init__(  # noqa: PLR0913 - keyword-only, each one option
        self,
        core: Core,
        lookups: LookupClient | None,
        *,
        load_async: bool = True,
        lookup_async: bool = False,
        store: bool = True,
        save_decode_cache: bool = False,
        lazy_step_tokens: int | None = None,
        shared_epoch: EpochSource | None = None,
        lookup_log: LookupLog | None = None,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self._client = lookups
        self._load_async = load_async
        self._lookup_async = lookup_async
        self._store = store
        self._save_decode_cache = save_decode_cache
        self._lazy_step_tokens = lazy_step_tokens
        self._shared_epoch = shared_epoch
        self._lookup_log = lookup_log
        self._strict = strict
        self._clock = clock
        self._unit = core.limits.unit_tokens
        self._bound_parts: _Bound | None = None
        self._answers_taken = False
        # The engine's own hit in its last question; admission follows in the same breath.
        self._local_tokens = 0
        # Until the step is planned.
        self._admitted: list[Any] = []
        self._outbox = Outbox()
        self._bytes = {"bytes_loaded": 0, "bytes_stored": 0}
        self._refused_events = 0
        self._admissions_put_off = 0
        self._lookups_put_off = 0
        self._dry_watch = DryWatch()
        self.lookup_meter = LookupMeter(clock)

    # ------------------------------------------------------------ hooks

    def bind(self, rules: GroupRules, block_pool: Any) -> None:
        """Takes what vLLM's cache manager decides: group rules, and the pool of blocks to pin."""
        if rules.hash_tokens != self._unit:
            raise UsageError(
                f"hits are in units of {rules.hash_tokens} tokens, transfers of {self._unit}"
            )
        lookups = None
        if self._client is not None:
            lookups = OpenLookups(
                self._client, rules, self.core.quarantine, self.lookup_meter, self._lookup_log
            )
        lazy = None
        if self._lazy_step_tokens is not None:
            step = step_blocks(rules.groups, self._lazy_step_tokens)
            lazy = LazyStores(self.core, block_pool, step)
        self._bound_parts = _Bound(
            rules,
            BlockPins(block_pool),
            StorePlanner(self.core, rules, lazy),
            lazy,
            Room(rules, block_pool),
            lookups,
        )

    @property
    def _bound(self) -> _Bound:
        if self._bound_parts is None:
            raise UsageError("vLLM's cache manager is not bound yet")
        return self._bound_parts

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Answers ``get_num_new_matched_tokens``."""
        self._follow_epoch()
        if self.core.sync_loads and shares_open_load(self.core, request, local_tokens):
            # Should the load fail, vLLM has one reader of the blocks compute them again, and lets
            # the others read them before that is done. The next step is soon enough.
            return None, False
        self._local_tokens = local_tokens
        room = self._bound.room
        room.leave(request.request_id)
        reply = self._reply(request, local_tokens)
        if reply is LookupReply.WAIT:
            return None, False
        if room.is_short(request):
            self._admissions_put_off += 1
            return None, False
        if not isinstance(reply, int) or reply == 0:
            return 0, False
        return reply, self._load_async

    def admitted(self, request: Any, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Answers ``update_state_after_alloc``."""
        request_id = request.request_id
        if external == 0:
            self._bound.room.leave(request_id)
        context = self.core.requests.get(request_id)
        if context is None:
            return
        if external == 0:
            # How many tokens it begins with, vLLM says only once the step is planned: its own hit
            # may end inside a block, which it does not mention when it asks.
            self._admitted.append(request)
            return
        begin, end = self._local_tokens, self._local_tokens + external
        parts = self._load_parts(context, block_ids, begin, end)
        if parts is None or not self._give(
            LoadAdmitted(request_id, begin, end, parts, not self._load_async)
        ):
            # vLLM counts on a load now. One that fails at once makes it compute the request.
            self._refuse(request_id, block_ids)
        if self._load_async:
            self._bound.room.take(request, block_ids)

    def step_metadata(self, output: Any) -> StepMetadata:
        """Answers ``build_connector_meta``: plans the stores of a step and hands all over."""
        now_s = self._clock()
        self._follow_epoch()
        self._answers_taken = False
        admitted, self._admitted = self._admitted, []
        for request in admitted:
            self._give(ComputeAdmitted(request.request_id, request.num_computed_tokens))
        self._perform(self.core.tick(now_s))
        gone = set(output.preempted_req_ids or ()) | output.finished_req_ids
        for request_id in output.preempted_req_ids or ():
            context = self.core.requests.get(request_id)
            if context is not None and _lost_its_blocks(context):
                if self._bound.lazy is not None:
                    first = context.planned_tokens // self._unit
                    hashes = context.source.block_hashes[first:]
                    self._bound.lazy.forget(hashes, self._bound.rules.groups)
                self._give(Preempted(request_id))
        block_state = output.kv_connector_block_state
        for context in list(self.core.filling.values()):
            scheduled = output.num_scheduled_tokens.get(context.request_id)
            if scheduled:
                self._give_if(self._bound.planner.filled(context, scheduled, block_state))
        for request_id, offers in block_state.boundary_state_offloads.items():
            context = self.core.requests.get(request_id)
            # Blocks of a request that has lost them may be somebody else's by now.
            if context is not None and request_id not in gone:
                scheduled = output.num_scheduled_tokens.get(request_id, 0)
                table = block_state.get_block_ids(request_id)
                self._give_if(self._bound.planner.boundaries(context, offers, table, scheduled))
        if self._bound.lazy is not None:
            # Last, when the step has taken its blocks and said what it computes.
            self._give_if(self._bound.lazy.due(self._bound.room.owed_blocks))
        return self._hand_over()

    def finished_boundaries(
        self,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        offers: Sequence[tuple[int, int, int]],
    ) -> None:
        """Answers ``register_finished_partial_tail``, which comes before ``finished``."""
        context = self.core.requests.get(request.request_id)
        if context is not None:
            self._give_if(self._bound.planner.boundaries(context, offers, block_ids, 0))

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Answers ``request_finished_all_groups``."""
        self._bound.room.leave(request.request_id)
        context = self.core.requests.get(request.request_id)
        if context is None:
            return
        if self._save_decode_cache and context.request_id in self.core.filling:
            self._give_if(self._bound.planner.filled_at_end(context, block_ids))
        self._give(RequestFinished(request.request_id))
        self._dry_watch.look(self.core.counters)

    def take_worker_answers(self, metadata: WorkerMetadata) -> None:
        """Answers ``update_connector_output``."""
        for answer in metadata.answers:
            lease = self.core.leases.get(answer.job_id)
            if lease is not None:
                self._bytes[f"bytes_{'loaded' if _is_load(lease) else 'stored'}"] += (
                    answer.bytes_moved
                )
                if lease.synchronous and not answer.succeeded:
                    uncache(lease, self._bound.rules, self._bound.pins)
            self._give(event_of(answer))

    def reset(self) -> bool:
        """Answers ``reset_cache``: nothing stored so far is found again.

        False when engines share an epoch, and it could not be raised.
        """
        # vLLM empties its own cache first, and cannot while any block is in use.
        kept = self._bound_parts is not None and self._bound_parts.pins.any_in_use()
        epoch = None
        if self._shared_epoch is not None:
            try:
                epoch = self._shared_epoch.advance()
            except BackendError as error:
                logger.error("the store was not reset: %s", error)
                return False
        self._give(EpochRaised(kept, epoch))
        return True

    def _follow_epoch(self) -> None:
        """Notices that another engine has reset the store."""
        if self._shared_epoch is None:
            return
        epoch = self._shared_epoch.current()
        if epoch != self.core.epoch:
            # vLLM's own cache still holds KV from before.
            self._give(EpochRaised(local_cache_kept=True, epoch=epoch))

    def has_open_transfers(self) -> bool:
        """Answers ``has_pending_push_work``: true exactly while a lease is open."""
        return bool(self.core.leases)

    def may_free_blocks_soon(self) -> bool:
        """Answers ``has_pending_block_frees``.

        True while a store, or a load that is arriving, is all that keeps a block from being free,
        and is not stalled, so that waiting for it beats preempting a request.
        """
        return any(
            lease.pinned
            and lease.state is LeaseState.IN_FLIGHT
            and self._bound.pins.holds_alone(lease)
            for lease in self.core.leases.values()
        )

    def counters(self) -> dict[str, int]:
        """Returns everything that was counted, by name."""
        of_client = getattr(self._client, "counters", dict)
        lazy = self._bound_parts.lazy if self._bound_parts is not None else None
        return {
            **of_client(),
            **self.core.counters.as_dict(),
            **self._bytes,
            **attrs.asdict(lazy.counters if lazy is not None else LazyCounters(), recurse=False),
            "events_refused": self._refused_events,
            "admissions_put_off": self._admissions_put_off,
            "lookups_put_off": self._lookups_put_off,
            "lookups_failed": self.lookup_meter.failed,
            "requests_live": len(self.core.requests),
            "leases_open": len(self.core.leases),
            "blocks_pinned": self.core.pinned_blocks,
        }

    def close(self) -> None:
        """Answers ``shutdown``."""
        if self._client is not None:
            self._client.close()

    # ------------------------------------------------------------ events and commands

    def _give(self, event: Event) -> bool:
        """Gives the core an event and performs what follows; says whether it was legal."""
        try:
            commands = self.core.step(event, self._clock())
        except UmbpError as error:
            # A refused event changed nothing. At worst a request is not restored or not stored.
            self._refused_events += 1
            if self._strict:
                raise
            logger.error("%s", error)
            return False
        if commands:
            self._perform(commands)
        return True

    def _give_if(self, event: Event | None) -> None:
        if event is not None:
            self._give(event)

    def _perform(self, commands: Sequence[Command]) -> None:
        if not commands:
            return
        pins, lookups = self._bound.pins, self._bound.lookups
        for command in commands:
            match command:
                case StartLookup():
                    if lookups is not None:
                        lookups.start(command)
                case DropLookup(question_id=question_id):
                    if lookups is not None:
                        lookups.drop(question_id)
                case StartLoad(lease=lease):
                    self._outbox.add(lease)
                case StartStore(lease=lease):
                    pins.pin(lease)
                    self._outbox.add(lease)
                case PinBlocks(lease=lease):
                    if lease.ranks_stalled:
                        logger.warning("%s has stalled; its blocks stay in use", lease.identity)
                    pins.pin(lease)
                case CancelTransfer(lease=lease):
                    logger.warning("%s is past its deadline and was cancelled", lease.identity)
                    self._outbox.cancel(lease.job_id)
                case ReleasePins(lease=lease):
                    pins.release(lease)
                    if lease.request is None and self._bound.lazy is not None:
                        self._bound.lazy.put_back(lease)

    # ------------------------------------------------------------ lookups

    def _reply(self, request: Any, local_tokens: int) -> "int | LookupReply":
        """Says what is known of a request, and asks when nothing is."""
        request_id = request.request_id
        reply = self.core.lookup_reply(request_id, local_tokens, self._clock())
        if reply is LookupReply.ASK:
            if not self._ask(request, local_tokens):
                return LookupReply.WAIT
            reply = self.core.lookup_reply(request_id, local_tokens, self._clock())
        if self._lookup_async:
            if reply is not LookupReply.WAIT or self._answers_taken:
                return reply
            # Once per step is enough: a thousand waiting requests must not poll a thousand times.
            self._answers_taken = True
            self._take_answers(0.0)
            return self.core.lookup_reply(request_id, local_tokens, self._clock())
        while reply is LookupReply.WAIT:
            left_s = self.core.requests[request_id].deadline_s - self._clock()
            if left_s > 0:
                self._take_answers(left_s)
            else:
                self._perform(self.core.tick(self._clock()))
            reply = self.core.lookup_reply(request_id, local_tokens, self._clock())
        return reply

    def _ask(self, request: Any, local_tokens: int) -> bool:
        """Asks, or says that there is nothing to ask; False: it must be put off."""
        lookups = self._bound.lookups
        # The last token is always computed: its logits are what the engine wants.
        limit = min(request.num_tokens - 1, len(request.block_hashes) * self._unit)
        store_end = request.num_prompt_tokens if self._store else 0
        if self._store and self._save_decode_cache:
            store_end += request.max_tokens
        useful = (
            lookups is not None
            and self.core.may_lookup(request.request_id)
            and limit - limit % self._unit > local_tokens
            and not request.skip_reading_prefix_cache
        )
        if useful and self._lookup_async and lookups is not None and lookups.are_many:
            self._lookups_put_off += 1
            return False
        kind = LookupAsked if useful else LookupSkipped
        self._give(kind(request.request_id, request, local_tokens, limit, store_end))
        return True

    def _take_answers(self, wait_s: float) -> None:
        lookups = self._bound.lookups
        if lookups is not None:
            for event in lookups.answers(wait_s, self._clock()):
                self._give(event)

    # ------------------------------------------------------------ loads

    def _load_parts(
        self, context: RequestContext, table: Sequence[Sequence[int]], begin: int, end: int
    ) -> tuple[LeasePart, ...] | None:
        hit = context.hit
        if hit is None or hit.end_tokens != end:
            logger.error("%s was given %d tokens, and %s were found", context.identity, end, hit)
            return None
        parts: tuple[LeasePart, ...] | None = hit.parts(table, begin)
        return parts

    def _refuse(self, request_id: str, table: Sequence[Sequence[int]]) -> None:
        self._outbox.refuse(
            self.core.next_id(), request_id, table=table, synchronous=not self._load_async
        )
        self._refused_events += 1

    # ------------------------------------------------------------ metadata

    def _hand_over(self) -> StepMetadata:
        metadata, sent = self._outbox.empty(self.core.epoch)
        for lease in sent:
            self._give(LeaseSent(lease.job_id))
        return metadata


def _is_load(lease: TransferLease) -> bool:
    return lease.kind is LeaseKind.LOAD


def _lost_its_blocks(context: RequestContext) -> bool:
    """Says whether a notice of preemption is about the present life.

    A reset preempts between steps; the request may be admitted again before the notice comes.
    """
    return (
        context.state in (RequestState.LOADING, RequestState.RUNNING)
        and context.source.status.name == "PREEMPTED"
    )

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

import numpy as np

from umbp.backends.base import LookupAnswer, LookupClient, LookupPart, LookupQuestion
from umbp.connector.metadata import PlanPart, StepMetadata, TransferPlan, WorkerMetadata, pack_ids
from umbp.connector.pins import BlockPins
from umbp.errors import UmbpError
from umbp.fsm import (
    BlocksFilled,
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
    LookupAnswered,
    LookupAsked,
    LookupReply,
    LookupSkipped,
    Preempted,
    RankFailed,
    RankSucceeded,
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

_GROUP = 0
"""The one KV cache group of the models that are supported."""


class SchedulerSide:
    """Drives the core from vLLM's scheduler.

    Args:
        core: The lifecycle.
        lookups: Asks the backend; None when nothing is ever looked up.
        load_async: Load between steps.
        lookup_async: Let requests wait in the queue for their lookup.
        store: Store what is computed.
        save_decode_cache: Store blocks that decoding fills, too.
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
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self._lookups = lookups
        self._load_async = load_async
        self._lookup_async = lookup_async
        self._store = store
        self._save_decode_cache = save_decode_cache
        self._strict = strict
        self._clock = clock
        self._unit = core.limits.unit_tokens
        self._pins: BlockPins | None = None
        # Open questions: id -> (request, first position asked for).
        self._questions: dict[int, tuple[str, int]] = {}
        self._answers_taken = False
        # The engine's own hit in its last question; admission follows in the same breath.
        self._local_tokens = 0
        # For the next metadata.
        self._loads: list[TransferLease] = []
        self._stores: list[TransferLease] = []
        self._cancels: list[int] = []
        self._refused: list[TransferPlan] = []
        self._bytes = {"bytes_loaded": 0, "bytes_stored": 0}
        self._refused_events = 0

    # ------------------------------------------------------------ hooks

    def bind_block_pool(self, block_pool: Any) -> None:
        """Takes vLLM's block pool, through which source blocks are pinned."""
        self._pins = BlockPins(block_pool)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Answers ``get_num_new_matched_tokens``."""
        if self.core.sync_loads and self._shares_open_load(request, local_tokens):
            # Should the load fail, vLLM has one reader of the blocks compute them again, and lets
            # the others read them before that is done. The next step is soon enough.
            return None, False
        now_s = self._clock()
        self._local_tokens = local_tokens
        reply = self.core.lookup_reply(request.request_id, local_tokens, now_s)
        if isinstance(reply, LookupReply):
            if reply is LookupReply.ASK:
                self._ask(request, local_tokens, now_s)
            reply = self._await_reply(request.request_id, local_tokens)
        if reply is LookupReply.WAIT:
            return None, False
        if not isinstance(reply, int) or reply == 0:
            return 0, False
        return reply, self._load_async

    def admitted(self, request: Any, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Answers ``update_state_after_alloc``."""
        context = self.core.requests.get(request.request_id)
        if context is None:
            return
        request_id = request.request_id
        if external == 0:
            # The call after an asynchronous load comes without a question before it.
            self._give(
                ComputeAdmitted(request_id, request.num_computed_tokens or self._local_tokens)
            )
            return
        span = (self._local_tokens, self._local_tokens + external)
        parts = self._parts(block_ids, span)
        admitted = self._give(LoadAdmitted(request_id, *span, parts, not self._load_async))
        if not admitted:
            # vLLM counts on a load now. One that fails at once makes it compute the request.
            self._refused.append(_refused_plan(self.core, request_id, parts, self._load_async))

    def step_metadata(self, output: Any) -> StepMetadata:
        """Answers ``build_connector_meta``: plans the stores of a step and hands all over."""
        now_s = self._clock()
        self._answers_taken = False
        self._perform(self.core.tick(now_s))
        for request_id in output.preempted_req_ids or ():
            context = self.core.requests.get(request_id)
            if context is not None and _lost_its_blocks(context):
                self._give(Preempted(request_id))
        for context in list(self.core.filling.values()):
            scheduled = output.num_scheduled_tokens.get(context.request_id)
            if scheduled:
                self._plan_store(context, scheduled, output.kv_connector_block_state)
        return self._hand_over()

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Answers ``request_finished_all_groups``."""
        context = self.core.requests.get(request.request_id)
        if context is None:
            return
        if self._save_decode_cache and context.request_id in self.core.filling:
            span = self._span(context, self._confirmed_tokens(context.source))
            if span is not None:
                self._give_filled(context, span, block_ids)
        self._give(RequestFinished(request.request_id))

    def take_worker_answers(self, metadata: WorkerMetadata) -> None:
        """Answers ``update_connector_output``."""
        for answer in metadata.answers:
            lease = self.core.leases.get(answer.job_id)
            if lease is not None:
                self._bytes[f"bytes_{'loaded' if _is_load(lease) else 'stored'}"] += (
                    answer.bytes_moved
                )
                if lease.synchronous and not answer.succeeded:
                    self._uncache(lease)
            if answer.succeeded:
                self._give(RankSucceeded(answer.job_id, answer.rank))
                continue
            logger.debug("job %d failed on rank %d: %s", answer.job_id, answer.rank, answer.reason)
            failed = tuple(answer.failed_hashes)
            self._give(RankFailed(answer.job_id, answer.rank, answer.attempted, failed))

    def _uncache(self, lease: TransferLease) -> None:
        """Takes what a failed synchronous load has left behind out of vLLM's prefix cache.

        That is the blocks of the load, and those that the same step computed from them. vLLM
        leaves all of them to be found until the request has computed them again, and for ever when
        it is aborted before.
        """
        if self._pins is not None:
            first = lease.begin_tokens // self._unit
            self._pins.uncache(lease.request.source.block_hashes[first:], _GROUP)

    def reset(self) -> bool:
        """Answers ``reset_cache``: nothing stored so far is found again."""
        # vLLM empties its own cache first, and cannot while any block is in use.
        kept = self._pins is not None and self._pins.any_in_use()
        self._give(EpochRaised(local_cache_kept=kept))
        return True

    def has_open_transfers(self) -> bool:
        """Answers ``has_pending_push_work``: true exactly while a lease is open."""
        return bool(self.core.leases)

    def may_free_blocks_soon(self) -> bool:
        """Answers ``has_pending_block_frees``.

        True while a store that is not stalled is all that keeps a block from being free, so that
        waiting for it beats preempting a request.
        """
        pins = self._pins
        return pins is not None and any(
            not _is_load(lease) and lease.state is LeaseState.IN_FLIGHT and pins.holds_alone(lease)
            for lease in self.core.leases.values()
        )

    def counters(self) -> dict[str, int]:
        """Returns everything that was counted, by name."""
        return {
            **self.core.counters.as_dict(),
            **self._bytes,
            "events_refused": self._refused_events,
            "requests_live": len(self.core.requests),
            "leases_open": len(self.core.leases),
            "blocks_pinned": self.core.pinned_blocks,
        }

    def close(self) -> None:
        """Answers ``shutdown``."""
        if self._lookups is not None:
            self._lookups.close()

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

    def _perform(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case StartLookup():
                    self._start_lookup(command)
                case DropLookup(question_id=question_id):
                    self._questions.pop(question_id, None)
                    if self._lookups is not None:
                        self._lookups.forget(question_id)
                case StartLoad(lease=lease):
                    self._loads.append(lease)
                case StartStore(lease=lease):
                    if self._pins is not None:
                        self._pins.pin(lease)
                    self._stores.append(lease)
                case CancelTransfer(lease=lease):
                    logger.warning("%s is past its deadline and was cancelled", lease.identity)
                    self._cancels.append(lease.job_id)
                case ReleasePins(lease=lease):
                    if self._pins is not None:
                        self._pins.release(lease)

    # ------------------------------------------------------------ lookups

    def _ask(self, request: Any, local_tokens: int, now_s: float) -> None:
        # The last token is always computed: its logits are what the engine wants.
        limit = min(request.num_tokens - 1, len(request.block_hashes) * self._unit)
        store_end = request.num_prompt_tokens if self._store else 0
        if self._store and self._save_decode_cache:
            store_end += request.max_tokens
        useful = (
            self._lookups is not None
            and self.core.may_lookup(request.request_id)
            and limit - limit % self._unit > local_tokens
            and not request.skip_reading_prefix_cache
        )
        kind = LookupAsked if useful else LookupSkipped
        self._give(kind(request.request_id, request, local_tokens, limit, store_end))

    def _shares_open_load(self, request: Any, local_tokens: int) -> bool:
        """Says whether the engine's own hit rests on blocks that this step is to load.

        vLLM puts the blocks of a synchronous load into its prefix cache before they are filled.
        """
        for lease in self.core.leases.values():
            first = lease.begin_tokens // self._unit
            if (
                lease.synchronous
                and lease.begin_tokens < local_tokens
                and lease.request.source.block_hashes[first] == request.block_hashes[first]
            ):
                return True
        return False

    def _start_lookup(self, command: StartLookup) -> None:
        context = command.request
        question_id = context.question_id
        if self._lookups is None or question_id is None:
            return
        first, last = command.begin_tokens // self._unit, command.end_tokens // self._unit
        hashes = context.source.block_hashes[first:last]
        count = self.core.quarantine.first_listed(hashes, self.core.now_s)
        if count == 0:
            self._give(LookupAnswered(context.request_id, question_id, command.begin_tokens))
            return
        part = LookupPart(_GROUP, len(hashes[0]), b"".join(hashes[:count]))
        self._questions[question_id] = (context.request_id, command.begin_tokens)
        self._lookups.ask(LookupQuestion(question_id, context.epoch, (part,)))

    def _await_reply(self, request_id: str, local_tokens: int) -> "int | LookupReply":
        """Takes answers that are there; without ``lookup_async``, waits for the one asked for."""
        if self._lookup_async:
            # Once per step is enough: a thousand waiting requests must not poll a thousand times.
            if not self._answers_taken:
                self._answers_taken = True
                self._take_answers(0.0)
            return self.core.lookup_reply(request_id, local_tokens, self._clock())
        self._take_answers(0.0)
        while True:
            now_s = self._clock()
            reply = self.core.lookup_reply(request_id, local_tokens, now_s)
            if reply is not LookupReply.WAIT:
                return reply
            left_s = self.core.requests[request_id].deadline_s - now_s
            if left_s > 0:
                self._take_answers(left_s)
            else:
                self._perform(self.core.tick(now_s))

    def _take_answers(self, wait_s: float) -> None:
        if self._lookups is None or not self._questions:
            return
        for answer in self._lookups.answers(wait_s):
            self._take_answer(answer)

    def _take_answer(self, answer: LookupAnswer) -> None:
        request_id, begin = self._questions.pop(answer.question_id, (None, 0))
        if request_id is None:
            return
        found = 0
        if answer.present is None:
            logger.warning("lookup of %s failed: %s", request_id, answer.reason)
        else:
            present = answer.present[0]
            found = len(present) if present.all() else int(np.argmin(present))
        self._give(LookupAnswered(request_id, answer.question_id, begin + found * self._unit))

    # ------------------------------------------------------------ stores

    def _plan_store(self, context: RequestContext, scheduled: int, block_state: Any) -> None:
        request = context.source
        # Positions past the prompt may hold draft tokens that are thrown away again.
        computed = min(request.num_computed_tokens + scheduled, request.num_prompt_tokens)
        computed = max(computed, self._confirmed_tokens(request))
        span = self._span(context, computed)
        if span is not None:
            # Only now: the table is resolved on demand, and most steps fill no block.
            block_ids = block_state.get_block_ids(context.request_id)
            self._give_filled(context, span, block_ids)

    def _span(self, context: RequestContext, computed: int) -> tuple[int, int] | None:
        # A block is storable once it has a hash; hashes of decoded blocks come a step later.
        computed = min(computed, len(context.source.block_hashes) * self._unit)
        return self.core.storable(context, computed)

    def _give_filled(
        self,
        context: RequestContext,
        span: tuple[int, int],
        block_ids: Sequence[Sequence[int]] | None,
    ) -> None:
        if block_ids is not None and len(block_ids[_GROUP]) * self._unit >= span[1]:
            parts = self._parts(block_ids, span)
            self._give(BlocksFilled(context.request_id, *span, parts))

    @staticmethod
    def _confirmed_tokens(request: Any) -> int:
        """Tokens whose KV is final: not the ones that asynchronous scheduling only expects."""
        return int(request.num_computed_tokens - request.num_output_placeholders)

    def _parts(
        self, block_ids: Sequence[Sequence[int]], span: tuple[int, int]
    ) -> tuple[LeasePart, ...]:
        first, last = span[0] // self._unit, span[1] // self._unit
        return (LeasePart(_GROUP, first, tuple(block_ids[_GROUP][first:last])),)

    # ------------------------------------------------------------ metadata

    def _hand_over(self) -> StepMetadata:
        loads, self._loads = self._loads, []
        stores, self._stores = self._stores, []
        cancels, self._cancels = self._cancels, []
        refused, self._refused = self._refused, []
        metadata = StepMetadata(
            self.core.epoch,
            [_plan(lease) for lease in loads],
            [_plan(lease) for lease in stores],
            cancels,
            refused,
        )
        for lease in (*loads, *stores):
            self._give(LeaseSent(lease.job_id))
        return metadata


def _is_load(lease: TransferLease) -> bool:
    return lease.kind is LeaseKind.LOAD


def _refused_plan(
    core: Core, request_id: str, parts: Sequence[LeasePart], load_async: bool
) -> TransferPlan:
    destinations = [PlanPart(part.group_index, 0, b"", pack_ids(part.block_ids)) for part in parts]
    return TransferPlan(core.next_id(), request_id, core.epoch, destinations, not load_async)


def _lost_its_blocks(context: RequestContext) -> bool:
    """Says whether a notice of preemption is about the present life.

    A reset preempts between steps; the request may be admitted again before the notice comes.
    """
    return (
        context.state in (RequestState.LOADING, RequestState.RUNNING)
        and context.source.status.name == "PREEMPTED"
    )


def _plan(lease: TransferLease) -> TransferPlan:
    block_hashes = lease.request.source.block_hashes
    parts = []
    for part in lease.parts:
        hashes = block_hashes[part.hash_begin : part.hash_begin + len(part.block_ids)]
        parts.append(
            PlanPart(part.group_index, len(hashes[0]), b"".join(hashes), pack_ids(part.block_ids))
        )
    return TransferPlan(
        lease.job_id, lease.request.request_id, lease.epoch, parts, lease.synchronous
    )

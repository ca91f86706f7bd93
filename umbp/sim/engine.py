# SPDX-License-Identifier: Apache-2.0
"""One engine: vLLM's scheduler, umbp's connector objects, and workers that only pretend.

A step is three calls: ``schedule`` plans it, ``execute`` does what the workers do, ``complete``
hands their results to the scheduler. With asynchronous scheduling two steps may be under way.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from umbp.errors import BackendStalled
from umbp.sim.audit import Audit
from umbp.sim.connector import SimStoreConnector
from umbp.sim.memory import OracleError, Work
from umbp.sim.requests import RequestId, SimRequest
from umbp.sim.site import SimSite, SimWorld, building_at
from umbp.sim.text import text_of
from umbp.sim.workers import Batch, Workers

STEP_S: Final = 0.01
"""How long a step takes."""


class SimEngine:
    """An engine in a simulated world.

    Every check of the simulation raises ``OracleError``; whatever else is raised comes from vLLM
    or umbp and is a fault, too.

    Args:
        world: Time, faults, objects and the model.

    Attributes:
        scheduler: vLLM's scheduler.
        requests: Clients' view of every request that was ever added, in order.
        steps: Steps scheduled so far.
        stopped: A pool has stalled; the engine is over.
        trace: Running checksum of every step: what was planned, in which blocks, what was reported.
    """

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        model, options = world.model, world.model.options
        self.options = options
        self.site = SimSite.make(world)
        scheduler_type = AsyncScheduler if options.async_scheduling else Scheduler
        with building_at(self.site):
            self.workers = Workers(self.site)
            self.scheduler = scheduler_type(
                vllm_config=model.vllm_config,
                kv_cache_config=model.kv_cache_config,
                structured_output_manager=model.structured_output,
                block_size=model.block_tokens,
                hash_block_size=model.unit_tokens,
                log_stats=False,
            )
        self.connector: SimStoreConnector = self.scheduler.connector
        self.audit = Audit(self.scheduler, self.connector, world.clock)
        self.requests: list[SimRequest] = []
        self.steps = 0
        self.stopped = False
        self.trace = 0
        self._live: dict[str, SimRequest] = {}
        self._batches: deque[Batch] = deque()
        # Nothing older than this may be read any more.
        self._oldest_epoch = 0

    # ------------------------------------------------------------ clients

    def add(
        self, prompt: Sequence[int], max_tokens: int, *, request_id: str | None = None
    ) -> SimRequest:
        """Adds a request.

        Args:
            prompt: Token ids.
            max_tokens: Length of the answer.
            request_id: Its id; one whose last owner is over may be used again.
        """
        if request_id is None:
            request_id = f"request-{next(self.world.request_numbers)}"
        name = RequestId(request_id)
        source = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            # Waiting requests are ordered by it.
            arrival_time=float(len(self.requests)),
            block_hasher=self.world.model.hasher,
        )
        request = SimRequest(name, source, text_of(tuple(prompt)), len(prompt))
        self.scheduler.add_request(source)
        self.requests.append(request)
        self._live[name] = request
        return request

    def may_add(self, request_id: str) -> bool:
        """Says whether vLLM is over with the last request of this id.

        It would take what a step under way says of the last one for the next one's.
        """
        under_way = any(
            work.request_id == request_id for batch in self._batches for work in batch.work
        )
        return not under_way and request_id not in self.scheduler.requests

    def live(self) -> list[SimRequest]:
        """Returns the requests whose clients wait, in order."""
        return list(self._live.values())

    def abort(self, request_id: str) -> None:
        """Lets a client go away."""
        request = self._live.pop(request_id, None)
        if request is not None:
            request.aborted = request.finished = True
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self, *, running: bool = False) -> bool:
        """Empties vLLM's prefix cache and the store; ``running`` starts all requests over.

        Returns:
            What vLLM says; False when blocks were in use.
        """
        try:
            succeeded = bool(
                self.scheduler.reset_prefix_cache(
                    reset_running_requests=running, reset_connector=True
                )
            )
        except RuntimeError:
            # vLLM raises when a transfer holds blocks after it has preempted everything.
            if not running:
                raise
            succeeded = False
        if succeeded:
            self._oldest_epoch = self.epoch
        self.audit.after_reset()
        return succeeded

    def forget(self) -> None:
        """Lets vLLM's prefix cache lose what no request uses; the store stays.

        Requests that need the blocks bring the same about.
        """
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if not block.ref_cnt})

    # ------------------------------------------------------------ steps

    @property
    def epoch(self) -> int:
        """Resets that the connector has heard of."""
        return self.connector.scheduler_side.core.epoch

    @property
    def pending(self) -> int:
        """Steps under way."""
        return len(self._batches)

    @property
    def loads_arriving(self) -> int:
        """Loads that vLLM takes for ended, or is about to, and whose last bytes are to come."""
        leases = self.connector.scheduler_side.core.leases.values()
        return sum(bool(lease.ranks_arriving) for lease in leases)

    def has_work(self) -> bool:
        """Says whether vLLM would go on stepping."""
        return bool(self._batches) or self.scheduler.has_requests()

    def counters(self) -> dict[str, int]:
        """Returns what umbp has counted."""
        return self.connector.counters()

    def schedule(self) -> Batch:
        """Plans a step."""
        output = self.scheduler.schedule()
        self.steps += 1
        work, sampling = [], []
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens
            text = self._live[request_id].text
            table = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            work.append(Work(request_id, text, end - count, end, table))
            self.world.oracle.learn(request.block_hashes, text)
            if not request.is_prefill_chunk:
                sampling.append(request_id)
        batch = Batch(self.steps, output, work, frozenset(sampling), self.epoch, self._oldest_epoch)
        self._batches.append(batch)
        tables = [(str(one.request_id), one.begin, one.end, one.table) for one in work]
        self.trace = zlib.crc32(repr(tables).encode(), self.trace)
        self.audit.after_schedule(batch)
        return batch

    def execute(self) -> None:
        """Lets the workers do the oldest step that they have not done."""
        for batch in self._batches:
            if batch.result is None:
                try:
                    self.workers.execute(batch)
                except BackendStalled:
                    self.stopped = True
                return

    def complete(self) -> None:
        """Hands the results of the oldest step to the scheduler."""
        if self._batches[0].result is None:
            self.execute()
        if self.stopped:
            return
        batch = self._batches.popleft()
        self.audit.before_update(batch)
        reported = [sorted(received) for received in batch.received]
        self.trace = zlib.crc32(repr(reported).encode(), self.trace)
        sources = [self._live.get(work.request_id) for work in batch.work]
        outputs = self.scheduler.update_from_output(batch.output, batch.result)
        self.workers.settle(batch, self.steps)
        for request in sources:
            if request is not None:
                # A request that ends may store what its last tokens have filled.
                self.world.oracle.learn(request.source.block_hashes, request.text)
        for output in (one for group in outputs.values() for one in group.outputs):
            self._receive(output)
        self.audit.after_update(batch)

    @property
    def depth(self) -> int:
        """Steps that may be under way at once."""
        return 2 if self.options.async_scheduling else 1

    def step(self) -> bool:
        """Goes one step on as vLLM would, and lets its time pass; says whether it did any work."""
        worked = self.turn()
        self.world.clock.advance(STEP_S)
        return worked

    def turn(self) -> bool:
        """Goes one step on and leaves the clock alone, which engines beside this one may share."""
        worked = False
        while len(self._batches) < self.depth and self.scheduler.has_requests():
            if not self.schedule().work:
                break
        if self._batches:
            worked = bool(self._batches[0].work)
            self.complete()
        return worked

    def drain(self, max_steps: int = 600) -> None:
        """Lets everything come to its end, and checks that nothing is left.

        Raises:
            OracleError: It does not within ``max_steps``, or something is left.
        """
        idle_steps = 0
        for _ in range(max_steps):
            if self.stopped or not self.has_work():
                break
            idle_steps = 0 if self.step() else idle_steps + 1
            if idle_steps:
                # Nothing to compute: only time brings it on.
                self.world.clock.rest(STEP_S)
        if self.stopped:
            return
        if self.has_work():
            raise OracleError(f"still at work after {max_steps} calm steps: {self.live()}")
        if self._live:
            raise OracleError(f"never finished: {list(self._live)}")
        self.audit.at_rest()

    def close(self) -> None:
        """Shuts the connector objects down."""
        self.workers.close()
        self.connector.shutdown()

    def _receive(self, output: Any) -> None:
        request = self._live.get(output.request_id)
        if request is None:
            raise OracleError(f"output for {output.request_id}, which has no client")
        for token in output.new_token_ids:
            wanted = request.text.token(request.prompt_tokens + request.received)
            if token != wanted:
                raise OracleError(
                    f"{request.request_id}: token {request.received} of the answer is {token}, "
                    f"not {wanted}"
                )
            request.received += 1
        if output.finish_reason is not None:
            request.finished = True
            del self._live[output.request_id]

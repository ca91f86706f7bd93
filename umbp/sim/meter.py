# SPDX-License-Identifier: Apache-2.0
"""An engine that keeps account of where the tokens of every prompt came from."""

from collections.abc import Sequence
from typing import Any

import attrs

from umbp.sim.cluster import ClusterWorld
from umbp.sim.engine import SimEngine
from umbp.sim.journal import Entry, Journal
from umbp.sim.memory import OracleError, Work
from umbp.sim.requests import SimRequest
from umbp.sim.workers import Batch


@attrs.define(eq=False)
class Account:
    """One request.

    The tokens of the prompt are local, restored or computed; these three are of the life that
    ends with the answer. ``recomputed`` is of all lives.

    Attributes:
        request: The request as its client sees it.
        arrived_s: When it came.
        local_tokens: Taken from vLLM's own prefix cache.
        restored_tokens: Loaded by umbp.
        computed_tokens: Computed.
        recomputed_tokens: Computed although an engine had computed the same before.
        end_tokens: Position up to which the present life has been planned; None before the first.
        first_token_s: When the answer began.
        finished_s: When it ended.
    """

    request: SimRequest
    arrived_s: float
    local_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    end_tokens: int | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def request_id(self) -> str:
        """Its id."""
        return str(self.request.request_id)

    @property
    def answered(self) -> bool:
        """Whether its client has got the whole answer."""
        return self.finished_s is not None

    def begin_life(self, begin_tokens: int, loaded: tuple[int, int] | None) -> None:
        """Takes where a life begins to compute, and what umbp was to load for it."""
        begin = min(begin_tokens, self.request.prompt_tokens)
        # Of a load that failed, vLLM begins before its end.
        restored = max(0, min(begin, loaded[1]) - loaded[0]) if loaded is not None else 0
        self.local_tokens, self.restored_tokens = begin - restored, restored
        self.computed_tokens = 0

    def check(self) -> None:
        """Checks that every token of the prompt has come from somewhere.

        Raises:
            OracleError: One has not.
        """
        total = self.local_tokens + self.restored_tokens + self.computed_tokens
        if total != self.request.prompt_tokens:
            raise OracleError(
                f"{self.request_id} has {self.request.prompt_tokens} tokens:"
                f" {self.local_tokens} local, {self.restored_tokens} restored,"
                f" {self.computed_tokens} computed"
            )


class MeteredEngine(SimEngine):
    """A simulated engine with accounts.

    Args:
        world: Its world.
        journal: Takes what vLLM does with each request.
        known_hashes: Block hashes of all that any engine has computed.

    Attributes:
        accounts: Of every request that was ever added, by its id as a plain string: the hash of
            vLLM's ids is another one here.
    """

    def __init__(self, world: ClusterWorld, journal: Journal, known_hashes: set[bytes]) -> None:
        super().__init__(world)
        self.accounts: dict[str, Account] = {}
        self._journal = journal
        self._known = known_hashes
        self._unit = world.model.unit_tokens

    def add(
        self, prompt: Sequence[int], max_tokens: int, *, request_id: str | None = None
    ) -> SimRequest:
        """Adds a request."""
        request = super().add(prompt, max_tokens, request_id=request_id)
        now_s = self.world.clock.now()
        self.accounts[str(request.request_id)] = Account(request, now_s)
        self._note(request, "arrives", (0, request.prompt_tokens), origin="client")
        return request

    def abort(self, request_id: str) -> None:
        """Lets a client go away."""
        request = self.accounts[str(request_id)].request
        super().abort(request_id)
        self._note(request, "goes away", None, origin="client")

    def schedule(self) -> Batch:
        """Plans a step."""
        batch = super().schedule()
        for request_id in batch.output.preempted_req_ids or ():
            self._note(self.accounts[str(request_id)].request, "preempts", None)
        for work in batch.work:
            self._enter(self.accounts[str(work.request_id)], work)
        return batch

    def complete(self) -> None:
        """Hands the results of the oldest step to the scheduler."""
        under_way = [self.accounts[str(work.request_id)] for work in self._batches[0].work]
        super().complete()
        now_s = self.world.clock.now()
        for account in under_way:
            request = account.request
            if request.received and account.first_token_s is None:
                account.first_token_s = now_s
                self._note(request, "first token", None, origin="client")
            if request.finished and not request.aborted and not account.answered:
                account.finished_s = now_s
                account.check()
                self._note(request, "has its answer", None, origin="client")

    def _enter(self, account: Account, work: Work) -> None:
        if work.begin != account.end_tokens:
            account.begin_life(work.begin, self._journal.loaded.get(account.request_id))
        account.end_tokens = work.end
        prompt = account.request.prompt_tokens
        begin, end = min(work.begin, prompt), min(work.end, prompt)
        account.computed_tokens += end - begin
        hashes: Sequence[bytes] = account.request.source.block_hashes
        for index in range(begin // self._unit, min(len(hashes), -(-end // self._unit))):
            first, last = index * self._unit, (index + 1) * self._unit
            if hashes[index] in self._known:
                account.recomputed_tokens += min(end, last) - max(begin, first)
            elif last <= end:
                self._known.add(hashes[index])
        event = "computes" if work.begin < prompt else "decodes"
        self._journal.note_computed(
            account.request_id,
            self._entry(account.request, event, (work.begin, work.end)),
        )

    def _entry(
        self,
        request: SimRequest,
        event: str,
        tokens: tuple[int, int] | None,
        origin: str = "vLLM",
    ) -> Entry:
        state: Any = request.source.status.name if origin == "vLLM" else ""
        return Entry(self.world.clock.now(), origin, event, tokens, state)

    def _note(
        self,
        request: SimRequest,
        event: str,
        tokens: tuple[int, int] | None,
        *,
        origin: str = "vLLM",
    ) -> None:
        self._journal.note(request.request_id, self._entry(request, event, tokens, origin))

# SPDX-License-Identifier: Apache-2.0
"""The one record of a request."""

import enum
import math
from typing import Any

import attrs


class RequestState(enum.Enum):
    """Where a request is in its lifecycle. ``umbp.fsm.table`` says what leads where."""

    LOOKUP = "lookup"
    """Not admitted yet: the backend is being asked, or its answer waits for the engine."""
    LOADING = "loading"
    """Admitted on a hit; objects are on their way into its blocks."""
    RUNNING = "running"
    """The engine computes it; blocks that fill are stored."""
    PREEMPTED = "preempted"
    """The engine took its blocks back; it starts over from a lookup."""
    STORING = "storing"
    """The engine is done with it; transfers are still open."""
    FINISHED = "finished"
    """Nothing is left of it."""

    # Enum's own hash is a Python function that hashes the name: a third of a dispatch.
    __hash__ = object.__hash__


@attrs.define(eq=False, weakref_slot=False)
class RequestContext:
    """Everything that umbp knows of one request.

    A request that is preempted and resumed keeps its context and begins a new life; transfers of
    an earlier life keep their own generation, so that their answers cannot touch the new one.

    Attributes:
        request_id: The engine's id.
        source: The engine's own request object; opaque to the core.
        generation: Number of this life, unique among all lives of all requests and all jobs.
        epoch: Epoch in which this life began; its keys carry it.
        state: State of the lifecycle; written by ``Core`` only.
        deadline_s: When the present state is left by its deadline.
        wake_s: When the deadline queue looks at this context next.
        local_tokens: Tokens that the engine had by itself when it last asked.
        question_id: The lookup that is open.
        hit_end_tokens: Position up to which the KV exists, from the last answer.
        hit: What that answer found, until it is admitted or out of date; opaque to the core.
        answered_s: When that answer came.
        load_job_id: The load that this life waits for.
        load_barred: A load failed; this request is not looked up again.
        store_barred: What this life computes may rest on KV that must not be stored.
        planned_tokens: Everything before this position is stored, on its way, or was not
            computed by this life.
        store_end_tokens: Nothing at or after this position is stored.
        open_leases: Transfers of all lives that have not been answered by every rank.
    """

    request_id: str
    source: Any
    generation: int
    epoch: int
    state: RequestState = RequestState.LOOKUP
    deadline_s: float = math.inf
    wake_s: float = math.inf
    local_tokens: int = 0
    question_id: int | None = None
    hit_end_tokens: int | None = None
    hit: Any = None
    answered_s: float = 0.0
    load_job_id: int | None = None
    load_barred: bool = False
    store_barred: bool = False
    planned_tokens: int = 0
    store_end_tokens: int = 0
    open_leases: int = 0

    @property
    def number(self) -> int:
        """Orders this request among others that are due at the same time."""
        return self.generation

    @property
    def identity(self) -> str:
        """How errors and logs name this request."""
        return f"request {self.request_id} (life {self.generation})"

# SPDX-License-Identifier: Apache-2.0
"""What an engine's process does under a fault: it answers, and notes how that went."""

import time
from collections.abc import Sequence
from typing import Any, Final

import attrs
from engine import Engine

REQUEST_TIMEOUT_S: Final = 60.0
"""A request that has not ended by then is lost."""


@attrs.frozen
class Served:
    """How one request was answered.

    Attributes:
        begun_s: When it was sent, by ``time.time()``.
        prompt_index: Which prompt it was.
        tokens: The answer; None: it was lost.
        restored_tokens: Prompt tokens that umbp restored.
    """

    begun_s: float
    prompt_index: int
    tokens: tuple[int, ...] | None
    restored_tokens: int


@attrs.frozen
class LoadReport:
    """What an engine did.

    Attributes:
        served: Requests, in order.
        longest_step_s: The longest of vLLM's scheduling steps.
        begun_s: When the first request was sent.
        ended_s: When the last one ended.
    """

    served: tuple[Served, ...]
    longest_step_s: float
    begun_s: float
    ended_s: float


def answer_in_turn(engine: Engine, prompts: Sequence[list[int]], until_s: float) -> LoadReport:
    """Answers prompts in turn until a time; before each, vLLM's own cache is emptied if it can be.

    Args:
        engine: The engine; its process calls this.
        prompts: Token ids.
        until_s: When to stop, by ``time.time()``.
    """
    timer = _StepTimer(engine.scheduler)
    begun_s = time.time()
    served = []
    while time.time() < until_s:
        index = len(served) % len(prompts)
        # It cannot while a stalled transfer pins a block.
        engine.reset_local()
        served.append(_serve(engine, prompts[index], index))
    timer.remove()
    return LoadReport(tuple(served), timer.longest_s, begun_s, time.time())


def _serve(engine: Engine, prompt: list[int], index: int) -> Served:
    begun_s = time.time()
    request_id = engine.submit(prompt)
    while not engine.has_finished(request_id):
        if time.time() - begun_s > REQUEST_TIMEOUT_S:
            engine.abort(request_id)
            return Served(begun_s, index, None, 0)
        engine.step()
    (answer,) = engine.finish(request_id)
    # Stores are answered within milliseconds, or not before the fault is over.
    for _ in range(20):
        engine.step()
    return Served(begun_s, index, answer.tokens, answer.external_tokens)


class _StepTimer:
    """Times vLLM's ``Scheduler.schedule``, and what it does with results."""

    def __init__(self, scheduler: Any) -> None:
        self.longest_s = 0.0
        self._scheduler = scheduler
        for name in ("schedule", "update_from_output"):
            setattr(scheduler, name, self._timed(getattr(scheduler, name)))

    def remove(self) -> None:
        del self._scheduler.schedule, self._scheduler.update_from_output

    def _timed(self, method: Any) -> Any:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            begun_s = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                self.longest_s = max(self.longest_s, time.perf_counter() - begun_s)

        return timed

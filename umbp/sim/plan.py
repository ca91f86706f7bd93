# SPDX-License-Identifier: Apache-2.0
"""What a run of ``umbp sim`` is made of, and whether that can work."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from umbp.connector.config import ConnectorOptions
from umbp.errors import ConfigError
from umbp.options import parse_options
from umbp.sim.models import MAX_TOKENS_LIMIT, EngineOptions, ModelKind, hybrid_may_run_ahead
from umbp.sim.schedule import Fault, check_faults
from umbp.sim.traffic import Traffic

_MORE_BLOCKS: Final = 2
"""Blocks for so many of the longest requests, where nothing else is said: some, but not all."""
_STEP_TOKENS_MIN: Final = 16
"""A step takes a whole block of recurrent state, and a token for each other request."""


@attrs.frozen(kw_only=True)
class SimPlan:
    """Everything that decides a run.

    Attributes:
        seed: Decides all that is drawn.
        engines: Number of engines.
        ranks: Workers of each, which share the heads of every layer.
        kind: KV cache groups of the model.
        blocks: KV blocks of an engine; None: for two of the longest requests.
        capacity_objects: Objects that the store of one rank holds.
        shared_store: All engines share one store; else each has its own.
        sticky: All turns of a conversation go to one engine; else each goes to any.
        async_scheduling: vLLM plans a step before the results of the last one are in.
        step_tokens: Tokens that a step computes at most.
        token_bytes: What the KV of one token, of all ranks, counts for in bytes moved.
        steps: Steps of the clock after which nobody asks any more; None: no such limit.
        seconds: Virtual seconds after which nobody asks any more; None: no such limit.
        traffic: Who asks what.
        faults: What goes wrong.
        options: Options of umbp's connector.
        trace_path: Where traces are written, the number of the engine added; None: nowhere.
    """

    seed: int = 0
    engines: int = 2
    ranks: int = 2
    kind: ModelKind = ModelKind.DENSE
    blocks: int | None = None
    capacity_objects: int = 4096
    shared_store: bool = True
    sticky: bool = False
    async_scheduling: bool = False
    step_tokens: int = 64
    token_bytes: int = 1 << 17
    steps: int | None = None
    seconds: float | None = None
    traffic: Traffic = attrs.field(factory=Traffic)
    faults: Sequence[Fault] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)
    trace_path: Path | None = None

    @property
    def num_blocks(self) -> int:
        """KV blocks of an engine."""
        if self.blocks is not None:
            return self.blocks
        return _MORE_BLOCKS * blocks_needed(self.kind, self.traffic.longest_tokens)

    def engine_options(self) -> EngineOptions:
        """Returns what each engine is started with."""
        return EngineOptions(
            kind=self.kind,
            ranks=self.ranks,
            async_scheduling=self.async_scheduling,
            num_blocks=self.num_blocks,
            max_tokens=self.traffic.longest_tokens,
            step_tokens=self.step_tokens,
            serialize=True,
            **self.options,
        )


def blocks_needed(kind: ModelKind, tokens: int) -> int:
    """Returns KV blocks with which a request of so many tokens can run alone, for sure."""
    if kind is ModelKind.HYBRID:
        return 3 * -(-tokens // 8) + 4
    return (2 if kind is ModelKind.WINDOW else 1) * -(-tokens // 4) + 4


def check_plan(plan: SimPlan) -> None:
    """Checks a plan.

    Raises:
        ConfigError: It cannot work.
    """
    longest = plan.traffic.longest_tokens
    if longest > MAX_TOKENS_LIMIT:
        raise ConfigError(
            f"conversations of up to {longest} tokens are longer than the {MAX_TOKENS_LIMIT} of the"
            " simulated model; lower --turns, --system-tokens, --question-tokens or --answer-tokens"
        )
    needed = blocks_needed(plan.kind, longest)
    if plan.num_blocks < needed:
        raise ConfigError(
            f"--blocks {plan.num_blocks} is too few for conversations of up to {longest} tokens;"
            f" give at least {needed}, or lower --turns"
        )
    if plan.kind is ModelKind.HYBRID and plan.async_scheduling and not hybrid_may_run_ahead():
        raise ConfigError(
            "--async-scheduling with --model hybrid needs vLLM 0.32 or later; leave one out"
        )
    if plan.step_tokens < _STEP_TOKENS_MIN:
        raise ConfigError(
            f"--step-tokens {plan.step_tokens} is too few; give at least {_STEP_TOKENS_MIN}"
        )
    check_options(plan.options)
    check_faults(
        plan.faults, engines=plan.engines, ranks=plan.ranks, shared_store=plan.shared_store
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Checks options of the connector.

    Raises:
        ConfigError: One is unknown here, or its value cannot work.
    """
    known = sorted(attrs.fields_dict(EngineOptions).keys() & attrs.fields_dict(ConnectorOptions))
    for name in options:
        if name not in known:
            raise ConfigError(f"--option {name} is not simulated; write one of {', '.join(known)}")
    parse_options(options, ConnectorOptions, where="--option")

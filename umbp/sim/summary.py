# SPDX-License-Identifier: Apache-2.0
"""What a run came to, in numbers and as JSON types."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from umbp.sim.journal import Entry
from umbp.sim.meter import Account
from umbp.sim.run import SimRun

_DIGITS: Final = 6
"""Virtual times are rounded to microseconds."""


@attrs.frozen(kw_only=True)
class Tally:
    """Numbers of one engine, or of all.

    Attributes:
        requests: Requests that clients sent.
        answered: Of these, answered; tokens and times below are of these alone.
        prompt_tokens: Tokens of their prompts.
        local_tokens: Taken from vLLM's own prefix cache.
        restored_tokens: Loaded by umbp.
        computed_tokens: Computed.
        recomputed_tokens: Computed although an engine had computed the same before, also in lives
            that ended by preemption.
        first_token_s: Sum of the times from arrival to first token.
        steps: Steps of vLLM's scheduler.
        preemptions: Requests that vLLM took blocks back from.
        lookups: Lookups.
        lookups_expired: Lookups that were not answered in time.
        loads_settled: Loads that every rank did.
        loads_failed: Loads that some rank could not do.
        stores_settled: Stores that every rank did.
        stores_failed: Stores that some rank could not do.
        loaded_bytes: Bytes moved from stores, as if objects had the plan's size.
        stored_bytes: Bytes moved to stores.
    """

    requests: int = 0
    answered: int = 0
    prompt_tokens: int = 0
    local_tokens: int = 0
    restored_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    first_token_s: float = 0.0
    steps: int = 0
    preemptions: int = 0
    lookups: int = 0
    lookups_expired: int = 0
    loads_settled: int = 0
    loads_failed: int = 0
    stores_settled: int = 0
    stores_failed: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0

    @property
    def hit_percent(self) -> float:
        """Share of prompt tokens that were not computed."""
        reused = self.local_tokens + self.restored_tokens
        return 100 * reused / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def first_token_ms(self) -> float:
        """Average time from arrival to first token."""
        return 1000 * self.first_token_s / self.answered if self.answered else 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns all numbers by name."""
        return {
            **attrs.asdict(self),
            "first_token_s": round(self.first_token_s, _DIGITS),
            "hit_percent": round(self.hit_percent, 2),
        }


def tallies(run: SimRun) -> list[Tally]:
    """Returns the numbers of each engine."""
    found = []
    for engine in run.engines:
        counters = engine.counters()
        accounts = list(engine.accounts.values())
        found.append(
            Tally(
                requests=len(accounts),
                **_token_sums(one for one in accounts if one.answered),
                steps=engine.steps,
                preemptions=sum(one.request.source.num_preemptions for one in accounts),
                loaded_bytes=counters["bytes_loaded"] * run.object_bytes,
                stored_bytes=counters["bytes_stored"] * run.object_bytes,
                **{
                    name: counters[name]
                    for name in (
                        "lookups",
                        "lookups_expired",
                        "loads_settled",
                        "loads_failed",
                        "stores_settled",
                        "stores_failed",
                    )
                },
            )
        )
    return found


def total(of: Sequence[Tally]) -> Tally:
    """Adds tallies up."""
    return Tally(
        **{field.name: sum(getattr(one, field.name) for one in of) for field in attrs.fields(Tally)}
    )


def _token_sums(answered: Iterable[Account]) -> dict[str, Any]:
    sums: dict[str, Any] = dict.fromkeys(
        (
            "answered",
            "prompt_tokens",
            "local_tokens",
            "restored_tokens",
            "computed_tokens",
            "recomputed_tokens",
            "first_token_s",
        ),
        0,
    )
    for account in answered:
        sums["answered"] += 1
        sums["prompt_tokens"] += account.request.prompt_tokens
        for name in ("local", "restored", "computed", "recomputed"):
            sums[f"{name}_tokens"] += getattr(account, f"{name}_tokens")
        if account.first_token_s is not None:
            sums["first_token_s"] += account.first_token_s - account.arrived_s
    return sums


def as_json(run: SimRun, request_id: str | None, failure: str | None) -> dict[str, Any]:
    """Returns a run as JSON types.

    Args:
        run: The run.
        request_id: The request whose time line is wanted.
        failure: What has failed; None: nothing.
    """
    of_engines = tallies(run)
    return {
        "plan": _plan_as_json(run),
        "failure": failure,
        "virtual_s": round(run.clock.now(), _DIGITS),
        "steps": run.rounds,
        "conversations_over": run.talks_over,
        "engines_ended": {str(index): round(at_s, _DIGITS) for index, at_s in run.ended.items()},
        "engines": [one.as_json() for one in of_engines],
        "total": total(of_engines).as_json(),
        "counters": [engine.counters() for engine in run.engines],
        "request": request_id,
        "time_line": [
            _entry_as_json(entry) for entry in run.journal.entries.get(request_id or "", [])
        ],
    }


def _plan_as_json(run: SimRun) -> dict[str, Any]:
    plan = run.plan
    return {
        **attrs.asdict(plan, recurse=False),
        "kind": plan.kind.value,
        "blocks": plan.num_blocks,
        "traffic": attrs.asdict(plan.traffic),
        "faults": [fault.text for fault in plan.faults],
        "options": dict(plan.options),
    }


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    return {**attrs.asdict(entry), "time_s": round(entry.time_s, _DIGITS)}

# SPDX-License-Identifier: Apache-2.0
"""What goes wrong when, and where: from words such as ``t=2..3 engine=0 rank=1 loads=late:0.5``.

Some effects last as long as their span of time, others happen at its beginning.
"""

import enum
import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from umbp.errors import ConfigError
from umbp.sim.faults import LOOKUPS, TRANSFERS, LookupFault, TransferFault


class EffectKind(enum.Enum):
    """What is affected."""

    LOADS = "loads"
    """Loads end as the named ``TransferFault`` says."""
    STORES = "stores"
    """The same for stores."""
    LOOKUPS = "lookups"
    """Lookups are answered as the named ``LookupFault`` says."""
    VANISH = "vanish"
    """Objects are evicted between the lookup that finds them and their load."""
    DEAD = "dead"
    """Nothing that is begun ends, and no lookup is answered, until the span of time is over."""
    RESET = "reset"
    """vLLM's prefix cache and the store are emptied."""
    FORGET = "forget"
    """vLLM's prefix cache loses what no request uses; the store stays."""
    EVICT = "evict"
    """The store evicts so many of its oldest objects."""
    SPOIL = "spoil"
    """The store's newest objects change; that must be found, and ends the run."""


_ONCE: Final = (EffectKind.RESET, EffectKind.FORGET, EffectKind.EVICT, EffectKind.SPOIL)
_COUNTED: Final = (EffectKind.EVICT, EffectKind.SPOIL)
_BARE: Final = (EffectKind.DEAD, EffectKind.RESET, EffectKind.FORGET)
_OF_ENGINES: Final = (EffectKind.LOOKUPS, EffectKind.VANISH, EffectKind.RESET, EffectKind.FORGET)
_NAMED: Final[dict[EffectKind, dict[str, Any]]] = {
    EffectKind.LOADS: TRANSFERS,
    EffectKind.STORES: TRANSFERS,
    EffectKind.LOOKUPS: LOOKUPS,
}
_HELD: Final = (TransferFault.HELD, TransferFault.HUNG)


@attrs.frozen
class Effect:
    """One thing that goes wrong.

    Attributes:
        kind: What.
        fault: How a transfer or a lookup ends.
        share: Share of jobs, lookups or objects that it hits.
        count: Objects that are hit at once.
    """

    kind: EffectKind
    fault: TransferFault | LookupFault | None = None
    share: float = 1.0
    count: int = 0

    @property
    def once(self) -> bool:
        """Whether it happens at one moment."""
        return self.kind in _ONCE

    @property
    def holds(self) -> bool:
        """Whether jobs stay open until it is over."""
        return self.kind is EffectKind.DEAD or self.fault in _HELD


@attrs.frozen(kw_only=True)
class Fault:
    """Effects in one place and one span of time.

    Attributes:
        text: How it was written.
        source: Where, for messages.
        begin_s: When it begins.
        end_s: When it ends; infinite: with the traffic.
        engine: The engine; None: all of them.
        rank: The rank; None: all of them.
        effects: What goes wrong.
    """

    text: str
    source: str = "--fault"
    begin_s: float = 0.0
    end_s: float = math.inf
    engine: int | None = None
    rank: int | None = None
    effects: tuple[Effect, ...]

    def concerns(self, engine: int, rank: int | None = None) -> bool:
        """Says whether it may hit an engine, or one rank of it."""
        if self.engine is not None and self.engine != engine:
            return False
        return rank is None or self.rank is None or self.rank == rank

    def lasts_at(self, now_s: float) -> bool:
        """Says whether it goes on."""
        return self.begin_s <= now_s < self.end_s


# ---------------------------------------------------------------- from words


def parse_fault(text: str, source: str = "--fault") -> Fault:
    """Reads a fault from its words.

    Args:
        text: The words, such as ``t=2..3 engine=0 loads=late:0.5``.
        source: Where it comes from, for messages.

    Raises:
        ConfigError: A word makes no sense; the message says what to write.
    """
    where: dict[str, Any] = {}
    effects: list[Effect] = []
    for word in text.split():
        name, equals, value = word.partition("=")
        try:
            if name == "t":
                where["begin_s"], where["end_s"] = _parse_time(value)
            elif name in ("engine", "rank"):
                where[name] = _parse_index(name, value)
            else:
                effects.append(_parse_effect(name, value, bool(equals)))
        except ValueError as error:
            raise ConfigError(f"{source} '{text}': {error}") from None
    fault = Fault(text=text, source=source, effects=tuple(effects), **where)
    problem = _contradiction(fault, timed="begin_s" in where)
    if problem is not None:
        raise ConfigError(f"{source} '{text}': {problem}")
    return fault


def _parse_time(value: str) -> tuple[float, float]:
    first, dots, last = value.partition("..")
    try:
        begin_s = float(first) if first or not dots else 0.0
        end_s = float(last) if last else math.inf
    except ValueError:
        begin_s = end_s = math.nan
    if not 0 <= begin_s < end_s:
        raise ValueError(f"t is '{value}'; write seconds, such as t=2..3, t=2.. or t=2")
    return begin_s, end_s


def _parse_index(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()):
        raise ValueError(f"{name} is '{value}'; write a number from 0, such as {name}=1")
    return int(value)


def _parse_effect(name: str, value: str, has_value: bool) -> Effect:
    try:
        kind = EffectKind(name)
    except ValueError:
        known = ", ".join(one.value for one in EffectKind)
        raise ValueError(f"'{name}' is unknown; write t, engine, rank, {known}") from None
    if kind in _BARE:
        if has_value:
            raise ValueError(f"{name} takes no value; write {name} alone")
        return Effect(kind)
    if kind in _COUNTED:
        if not (value.isascii() and value.isdecimal()) or int(value) == 0:
            raise ValueError(f"{name} is '{value}'; write a number of objects, such as {name}=8")
        return Effect(kind, count=int(value))
    if kind is EffectKind.VANISH:
        return Effect(kind, share=_parse_share(name, value, "vanish=0.3"))
    fault_name, colon, share = value.partition(":")
    known_faults = _NAMED[kind]
    if fault_name not in known_faults:
        listed = ", ".join(one for one in known_faults if one != "none")
        raise ValueError(f"{name} is '{value}'; write one of {listed}, such as {name}=silent:0.5")
    example = f"{name}={fault_name}:0.5"
    return Effect(
        kind, known_faults[fault_name], _parse_share(name, share, example) if colon else 1.0
    )


def _parse_share(name: str, value: str, example: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ValueError(f"the share of {name} is '{value}'; write one up to 1, such as {example}")
    return share


def _contradiction(fault: Fault, *, timed: bool) -> str | None:
    if not fault.effects:
        return "nothing goes wrong; write what, such as loads=late"
    for effect in fault.effects:
        name = effect.kind.value
        if effect.once and not timed:
            return f"{name} happens at one moment; write when, such as t=2"
        if effect.once and fault.end_s != math.inf:
            return f"{name} happens at one moment; write t={fault.begin_s:g} alone"
        if fault.rank is not None and effect.kind in _OF_ENGINES:
            return f"{name} concerns all ranks of an engine; leave rank={fault.rank} out"
    return None


def read_faults(path: Path) -> list[Fault]:
    """Reads faults from a JSON file: a list of strings, or of objects with the same names.

    Raises:
        ConfigError: The file cannot be read, or an entry makes no sense.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--faults {path}: {error.strerror}; name a JSON file, or write random"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--faults {path} is not JSON ({error}); write a list") from None
    if not isinstance(entries, list):
        raise ConfigError(f'--faults {path} is no list; write ["t=2..3 loads=late"]')
    return [
        parse_fault(_as_words(entry), f"--faults {path}, entry {number}:")
        for number, entry in enumerate(entries, 1)
    ]


def _as_words(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    return " ".join(name if value is True else f"{name}={value}" for name, value in entry.items())


def check_faults(faults: Iterable[Fault], *, engines: int, ranks: int, shared_store: bool) -> None:
    """Checks that faults fit the engines.

    Raises:
        ConfigError: One does not.
    """
    for fault in faults:
        for name, index, count in (("engine", fault.engine, engines), ("rank", fault.rank, ranks)):
            if index is not None and index >= count:
                raise ConfigError(
                    f"{fault.source} '{fault.text}': there is no {name} {index}; write {name}=0 to"
                    f" {name}={count - 1}, or ask for more with --{name}s"
                )
        resets = any(effect.kind is EffectKind.RESET for effect in fault.effects)
        if resets and shared_store and engines > 1:
            raise ConfigError(
                f"{fault.source} '{fault.text}': engines that share a store cannot be reset one"
                " by one; write --store own"
            )


# ---------------------------------------------------------------- at random

_RANDOM_SPANS: Final = (
    "loads=late:0.5",
    "loads=lost:0.5",
    "loads=partial:0.5",
    "loads=queue_full:0.5",
    "loads=silent:0.5",
    "loads=held:0.3",
    "stores=late:0.5",
    "stores=lost:0.5",
    "stores=queue_full:0.5",
    "stores=held:0.3",
    "lookups=silent:0.5",
    "lookups=slow",
    "lookups=unknown:0.5",
    "lookups=raise:0.3",
    "vanish=0.2",
    "dead",
)
_RANDOM_MOMENTS: Final = ("forget", "forget", "evict=16", "evict=64")
_MOMENT_SHARE: Final = 0.3
_RANK_SHARE: Final = 0.5


def random_faults(
    seed: int, *, duration_s: float, engines: int, ranks: int, shared_store: bool
) -> list[Fault]:
    """Draws faults, about two for each second; none of them ends an engine for good.

    Args:
        seed: Decides all of them.
        duration_s: How long the run is expected to take.
        engines: Number of engines.
        ranks: Ranks of each.
        shared_store: Engines share a store, and are never reset.
    """
    source = random.Random(seed)
    moments = _RANDOM_MOMENTS + (() if shared_store and engines > 1 else ("reset",))
    faults = []
    for _ in range(max(4, round(2 * duration_s))):
        begin_s = round(source.uniform(0, duration_s), 2)
        where = f"engine={source.randrange(engines)}"
        if source.random() < _MOMENT_SHARE:
            faults.append(parse_fault(f"t={begin_s:g} {where} {source.choice(moments)}"))
            continue
        end_s = round(begin_s + source.uniform(0.1, 1.0), 2)
        effect = source.choice(_RANDOM_SPANS)
        of_rank = effect == "dead" or effect.startswith(("loads", "stores"))
        if of_rank and source.random() < _RANK_SHARE:
            where += f" rank={source.randrange(ranks)}"
        faults.append(parse_fault(f"t={begin_s:g}..{end_s:g} {where} {effect}"))
    return sorted(faults, key=lambda fault: fault.begin_s)


def moments_of(faults: Sequence[Fault]) -> list[tuple[float, Fault, Effect]]:
    """Returns (time, fault, effect) of all that happens at one moment, in order."""
    moments = [
        (fault.begin_s, fault, effect)
        for fault in faults
        for effect in fault.effects
        if effect.once
    ]
    return sorted(moments, key=lambda moment: moment[0])

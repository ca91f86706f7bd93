# SPDX-License-Identifier: Apache-2.0
"""Reads the log of lookups that an engine with ``explain_lookups`` writes."""

import json
from pathlib import Path
from typing import Any

import attrs

from umbp.errors import ConfigError


@attrs.frozen
class LookupRow:
    """One lookup.

    Attributes:
        request_id: The request.
        prompt_tokens: Length of its prompt.
        local_tokens: What the engine had by itself.
        hit_end_tokens: Where the hit ends; None: the lookup failed.
        why: Why it does not end later, in a few words.
    """

    request_id: str
    prompt_tokens: int
    local_tokens: int
    hit_end_tokens: int | None
    why: str

    @property
    def is_hit(self) -> bool:
        """Whether anything could be loaded."""
        return self.hit_end_tokens is not None and self.hit_end_tokens > self.local_tokens


def read_lookups(path: Path) -> list[LookupRow]:
    """Reads a log, and the one before beside it.

    Raises:
        ConfigError: It cannot be read, or is something else.
    """
    lines: list[str] = []
    before = path.with_name(path.name + ".1")
    try:
        if before.exists():
            lines += before.read_text(encoding="utf-8").splitlines()
        lines += path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise ConfigError(f"{path} cannot be read: {reason}; name a lookups.jsonl") from error
    try:
        return [_row(json.loads(line)) for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is no log of lookups; name a file that an engine wrote in report_dir"
        ) from error


def _row(line: dict[str, Any]) -> LookupRow:
    return LookupRow(
        request_id=line["request"],
        prompt_tokens=line["prompt_tokens"],
        local_tokens=line["local_tokens"],
        hit_end_tokens=line.get("hit_end_tokens"),
        why=_why(line),
    )


def _why(line: dict[str, Any]) -> str:
    if "failure" in line:
        return str(line["failure"])
    missing = line["first_missing"]
    counts = ", ".join(
        f"{one['present']} of {one['asked']}"
        + (f" in group {one['group']}" if len(line["groups"]) > 1 else "")
        for one in line["groups"]
    )
    if missing is None:
        return f"nothing is missing: {counts} blocks"
    rank = "a rank" if missing["rank"] is None else f"rank {missing['rank']}"
    lacks = "failed to load lately" if missing["quarantined"] else f"{rank} lacks it"
    return (
        f"{counts} blocks; first without: group {missing['group']}, up to token "
        f"{missing['end_tokens']}, {lacks} ({missing['hash'][:16]})"
    )

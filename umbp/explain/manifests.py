# SPDX-License-Identifier: Apache-2.0
"""Compares the manifests of two engines, field by field.

Engines share objects only when all fields are equal (``umbp.connector.namespace``).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from umbp.errors import ConfigError
from umbp.explain.meanings import meaning_of

_SEED: Final = "hash.seed"


@attrs.frozen
class Row:
    """One field of two manifests.

    Attributes:
        path: Its path, with dots.
        first: Its value in the first, as JSON; None where that lacks it.
        second: The same of the second.
        what: What the field is.
        advice: What to do; empty where both are equal.
        is_equal: Whether blocks are the same as far as this field goes.
    """

    path: str
    first: str | None
    second: str | None
    what: str
    advice: str
    is_equal: bool


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads a file that an engine has written.

    Returns:
        All of it; the manifest itself is under ``manifest``.

    Raises:
        ConfigError: It cannot be read, or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path} cannot be read: {reason}; name a manifest.json") from error
    if not (isinstance(found, dict) and isinstance(found.get("manifest"), dict)):
        raise ConfigError(f"{path} is no manifest; name a file that an engine wrote in report_dir")
    return found


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Row]:
    """Compares two manifests.

    Args:
        first: What ``read_manifest`` returned for one engine.
        second: The same for the other.

    Returns:
        A row for each field of either, those of the first in order, then the others.
    """
    ours = dict(_leaves(first["manifest"]))
    theirs = dict(_leaves(second["manifest"]))
    is_random = _is_random(ours) or _is_random(theirs)
    rows = []
    for path in {**ours, **theirs}:
        meaning = meaning_of(path)
        is_equal = ours.get(path) == theirs.get(path) and not (path == _SEED and is_random)
        advice = meaning.advice if meaning is not None else "run the same version of umbp"
        rows.append(
            Row(
                path,
                ours.get(path),
                theirs.get(path),
                meaning.what if meaning is not None else "",
                "" if is_equal else advice,
                is_equal,
            )
        )
    return rows


def _is_random(leaves: Mapping[str, str]) -> bool:
    """Says whether vLLM draws the seed of block hashes anew in each process."""
    algorithm = leaves.get("hash.algorithm", "")
    return algorithm.startswith('"xxhash') and leaves.get(_SEED) == '""'


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields the path and the JSON of everything that is no object or list, or is an empty one."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(str(index), item) for index, item in enumerate(value)]
    if not items:
        yield path, json.dumps(value)
    for name, item in items:
        yield from _leaves(item, f"{path}.{name}" if path else name)

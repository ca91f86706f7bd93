# SPDX-License-Identifier: Apache-2.0
"""How much memory this machine, or the container around this process, has.

Source: ``/proc/meminfo`` (proc(5)); ``memory.max``, ``memory.current`` and ``memory.stat`` of
control groups v2, and ``memory.limit_in_bytes`` and ``memory.usage_in_bytes`` of v1.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import attrs


@attrs.frozen
class MemoryLimits:
    """Memory that processes here may use.

    Attributes:
        total_bytes: All of it, used or not.
        available_bytes: What can still be used without swapping.
    """

    total_bytes: int
    available_bytes: int


def memory_limits(root: Path = Path("/")) -> MemoryLimits | None:
    """Reads the limits of the machine and of every control group around this process.

    Args:
        root: Where ``/proc`` and ``/sys`` are found.

    Returns:
        The narrowest limits; None where the system does not tell.
    """
    try:
        meminfo = _fields(root / "proc/meminfo")
        total = meminfo["MemTotal:"] * 1024
        available = meminfo["MemAvailable:"] * 1024
    except (OSError, KeyError):
        return None
    for limit, used in _group_limits(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return MemoryLimits(total_bytes=total, available_bytes=available)


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields limit and use, in bytes, of each control group that limits memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount, names = (
                "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        # In a container the path may be the host's, and only its end or its root exists here.
        inner = PurePosixPath(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield from _group_limit(root / mount / folder, *names)


def _group_limit(
    folder: Path, limit_name: str, used_name: str, reclaimable_name: str
) -> Iterator[tuple[int, int]]:
    try:
        limit = int((folder / limit_name).read_text())
        used = int((folder / used_name).read_text())
        # The page cache counts as used and goes when memory is needed.
        reclaimable = _fields(folder / "memory.stat").get(reclaimable_name, 0)
    except (OSError, ValueError):
        return  # Not there, or "max": no limit.
    yield limit, used - reclaimable


def _fields(path: Path) -> dict[str, int]:
    """Reads lines of a name and a number."""
    fields = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in fields if len(words) > 1 and words[1].isdigit()}

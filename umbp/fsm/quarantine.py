# SPDX-License-Identifier: Apache-2.0
"""Keys that failed to load a moment ago, and so are misses for every request.

A backend may go on listing objects that are gone. Without this, each request that shares the
prefix pays for one failed load. A later store of the same key does not lift it: the backend may
still list the dead copy.
"""

from collections.abc import Iterable

from umbp.errors import UsageError


class Quarantine:
    """Block hashes, each until its time is over.

    Args:
        period_s: How long a hash stays; 0 switches the quarantine off.
    """

    def __init__(self, period_s: float) -> None:
        if period_s < 0:
            raise UsageError(f"period_s must not be negative, got {period_s!r}")
        self._period_s = period_s
        # Insertion order is order of expiry, since the period is one and the same.
        self._until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, block_hashes: Iterable[bytes], now_s: float) -> None:
        """Takes hashes in, or begins their time anew."""
        if not self._period_s:
            return
        self._expire(now_s)
        for block_hash in block_hashes:
            self._until.pop(block_hash, None)
            self._until[block_hash] = now_s + self._period_s

    def listed(self, block_hashes: Iterable[bytes], now_s: float) -> set[bytes]:
        """Returns those of the hashes that are in quarantine."""
        self._expire(now_s)
        if not self._until:
            return set()
        return {block_hash for block_hash in block_hashes if block_hash in self._until}

    def count(self, now_s: float) -> int:
        """Returns how many hashes are in quarantine."""
        self._expire(now_s)
        return len(self._until)

    def clear(self) -> None:
        """Forgets all: after a reset no old key is ever asked for."""
        self._until.clear()

    def _expire(self, now_s: float) -> None:
        while self._until:
            block_hash = next(iter(self._until))
            if self._until[block_hash] > now_s:
                return
            del self._until[block_hash]

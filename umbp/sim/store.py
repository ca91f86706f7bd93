# SPDX-License-Identifier: Apache-2.0
"""Where the objects are: a bounded dictionary that every rank, and every engine, may share."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import attrs

from umbp.sim.memory import StoredPage


class SimStore:
    """Objects by key; the least recently used one goes when it is full.

    Args:
        capacity_objects: How many it holds.
        on_insert: Called with each new key and its content.
    """

    def __init__(
        self,
        capacity_objects: int,
        on_insert: Callable[[bytes, StoredPage], None] | None = None,
    ) -> None:
        self._capacity = capacity_objects
        self._objects: OrderedDict[bytes, StoredPage] = OrderedDict()
        self._on_insert = on_insert
        self.evicted_count = 0

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: bytes) -> bool:
        return key in self._objects

    def get(self, key: bytes) -> StoredPage | None:
        """Returns an object and counts it as used; None when it is not there."""
        found = self._objects.get(key)
        if found is not None:
            self._objects.move_to_end(key)
        return found

    def put(self, key: bytes, content: StoredPage) -> None:
        """Stores an object; the first content of a key stays."""
        if self.get(key) is not None:
            return
        if self._on_insert is not None:
            self._on_insert(key, content)
        self._objects[key] = content
        if len(self._objects) > self._capacity:
            self._objects.popitem(last=False)
            self.evicted_count += 1

    def evict(self, keys: Sequence[bytes]) -> None:
        """Removes objects."""
        for key in keys:
            if self._objects.pop(key, None) is not None:
                self.evicted_count += 1

    def spoil_newest(self, count: int) -> None:
        """Changes the content of the ``count`` newest objects; only a check can notice."""
        for key in list(self._objects)[-count:]:
            content = self._objects[key]
            values = tuple(value + 1 for value in content.values)
            self._objects[key] = attrs.evolve(content, values=values)

    def evict_oldest(self, count: int) -> None:
        """Removes the ``count`` objects that were used least recently."""
        self.evict(list(self._objects)[:count])

# SPDX-License-Identifier: Apache-2.0
"""Which objects a pool holds, where they lie, and which goes when room is needed.

Bookkeeping only: bytes are copied by the caller, between ``reserve`` and ``publish`` for a store
and between ``pin`` and ``unpin`` for a load, so that the lock is never held while bytes move. An
object is in the index only from ``publish`` on; a reserved extent is nobody's to find or to evict.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Final

import attrs
import numpy as np

from umbp.backends.arena import Arena
from umbp.backends.base import Int64Array, PoolStats

EVICTIONS_KEPT_MAX: Final = 65_536
"""Evicted keys that wait to be taken; the oldest are forgotten first."""


@attrs.define(eq=False)
class _Object:
    """An extent of the arena, and who reads it.

    While reserved it is nobody's to find. When an object is evicted for one of the same size, the
    extent goes from hand to hand, and the arena does not hear of it.
    """

    offset: int
    object_bytes: int
    reader_count: int = 0


_offset_of = attrgetter("offset")


@attrs.frozen(eq=False)
class Reservation:
    """Room for the objects of one store that do not exist yet.

    Attributes:
        positions: int64[reserved], index of each object among the keys that were asked for.
        keys: The keys that got room, same order.
        objects: The records that they get, same order.
        rejected_keys: Keys that got no room.
    """

    positions: Int64Array
    keys: tuple[bytes, ...]
    objects: tuple[_Object, ...]
    rejected_keys: tuple[bytes, ...]

    @property
    def offsets(self) -> Int64Array:
        """int64[reserved], where each object goes; made anew by every access."""
        return _offsets(self.objects)


@attrs.frozen(eq=False)
class Pins:
    """Objects of one load that stay where they are until ``unpin``.

    Attributes:
        offsets: int64[objects], where each object lies; empty when a key is missing.
        missing_keys: Keys that no object of the right size has. If any, nothing is pinned.
        objects: The pinned records.
    """

    offsets: Int64Array
    missing_keys: tuple[bytes, ...]
    objects: tuple[_Object, ...]


@attrs.define(eq=False)
class ObjectIndex:
    """Objects by key in one arena, least recently loaded first. Thread-safe."""

    _arena: Arena
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _objects: OrderedDict[bytes, _Object] = attrs.field(factory=OrderedDict, init=False)
    _evicted_keys: deque[bytes] = attrs.field(
        factory=lambda: deque(maxlen=EVICTIONS_KEPT_MAX), init=False
    )
    _evicted_count: int = attrs.field(default=0, init=False)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Says which objects exist now, in order; no object counts as used by that.

        Never waits for a transfer.
        """
        # Without the lock: a store that evicts holds it for a microsecond per object, and for half
        # a second where it joins the room of 100,000 small objects for a large one. One look into
        # a dict is atomic, and each key stands for itself: what is found was published with all
        # its bytes, and may be evicted after the answer as well as during it.
        return list(map(self._objects.__contains__, keys))

    def reserve(self, keys: Sequence[bytes], object_bytes: int) -> Reservation:
        """Makes room for those keys that do not exist, evicting what was not used for longest.

        What finds no room is the end of the store: its first objects are those that a later lookup
        needs first. Those that exist already are not evicted for the others.
        """
        with self._lock:
            missing = [position for position, key in enumerate(keys) if key not in self._objects]
            existing = () if len(missing) == len(keys) else frozenset(keys)
            objects = self._take_room(object_bytes, len(missing), existing)
        # Ascending, so that neighbours in the job are neighbours in the pool where possible and
        # can be copied in one call.
        objects.sort(key=_offset_of)
        positions, left_over = missing[: len(objects)], missing[len(objects) :]
        return Reservation(
            np.array(positions, dtype=np.int64),
            tuple(keys[position] for position in positions),
            tuple(objects),
            tuple(keys[position] for position in left_over),
        )

    def publish(self, reservation: Reservation) -> None:
        """Makes stored objects visible. Their bytes must be in place."""
        with self._lock:
            # Last first: the blocks of a prompt are worth nothing without those before them, so
            # of one store, and of one load, the end is evicted before the beginning.
            for key, stored in zip(
                reversed(reservation.keys), reversed(reservation.objects), strict=True
            ):
                if self._objects.setdefault(key, stored) is not stored:
                    # Another thread stored the same key in the meantime; the first bytes stay.
                    self._arena.free(stored.offset)

    def abandon(self, reservation: Reservation) -> None:
        """Gives back the room of a store that failed."""
        with self._lock:
            self._arena.free_many([reserved.offset for reserved in reservation.objects])

    def pin(self, keys: Sequence[bytes], object_bytes: Sequence[int]) -> Pins:
        """Pins all objects of a load, or none; counts as a use.

        Args:
            keys: The objects.
            object_bytes: The size that each must have, same length.
        """
        with self._lock:
            objects: list[_Object] = []
            missing: list[bytes] = []
            for key, wanted_bytes in zip(keys, object_bytes, strict=True):
                found = self._objects.get(key)
                if found is None or found.object_bytes != wanted_bytes:
                    missing.append(key)
                else:
                    objects.append(found)
            if missing:
                return Pins(np.empty(0, dtype=np.int64), tuple(missing), ())
            for key, pinned in zip(reversed(keys), reversed(objects), strict=True):
                pinned.reader_count += 1
                self._objects.move_to_end(key)
        return Pins(_offsets(objects), (), tuple(objects))

    def unpin(self, pins: Pins) -> None:
        """Ends what ``pin`` began; called exactly once for each."""
        with self._lock:
            for pinned in pins.objects:
                pinned.reader_count -= 1

    def take_evictions(self) -> list[bytes]:
        """Returns keys evicted since the last call, at most ``EVICTIONS_KEPT_MAX``."""
        with self._lock:
            keys = list(self._evicted_keys)
            self._evicted_keys.clear()
            return keys

    def stats(self) -> PoolStats:
        """Says how full the pool is."""
        with self._lock:
            return PoolStats(
                capacity_bytes=self._arena.capacity_bytes,
                used_bytes=self._arena.used_bytes,
                object_count=len(self._objects),
                evicted_count=self._evicted_count,
            )

    def clear(self) -> None:
        """Forgets every object. Called when nothing is pinned or reserved any more."""
        with self._lock:
            self._arena.free_many([gone.offset for gone in self._objects.values()])
            self._objects.clear()

    def _take_room(self, object_bytes: int, count: int, kept: Collection[bytes]) -> list[_Object]:
        """Takes extents for objects, evicting others but ``kept`` while there are too few."""
        objects = self._allocate(object_bytes, count)
        while len(objects) < count:
            victims = self._evict((count - len(objects)) * object_bytes, kept)
            if not victims:
                break
            objects += [victim for victim in victims if victim.object_bytes == object_bytes]
            others = [victim for victim in victims if victim.object_bytes != object_bytes]
            if others:
                self._arena.free_many([victim.offset for victim in others])
                objects += self._allocate(object_bytes, count - len(objects))
        return objects

    def _allocate(self, object_bytes: int, count: int) -> list[_Object]:
        """Takes what room there is without evicting."""
        offsets = self._arena.allocate_many(object_bytes, count)
        return [_Object(offset, object_bytes) for offset in offsets]

    def _evict(self, size_bytes: int, kept: Collection[bytes]) -> list[_Object]:
        """Removes what was not loaded for longest and nobody reads; nothing when all is in use.

        Args:
            size_bytes: Stops when what was removed is as large as this.
            kept: Keys of objects that stay.
        """
        keys: list[bytes] = []
        victims: list[_Object] = []
        for key, candidate in self._objects.items():
            if size_bytes <= 0:
                break
            if candidate.reader_count or key in kept:
                continue
            size_bytes -= candidate.object_bytes
            keys.append(key)
            victims.append(candidate)
        for key in keys:
            del self._objects[key]
        self._evicted_keys.extend(keys)
        self._evicted_count += len(keys)
        return victims


def _offsets(objects: Sequence[_Object]) -> Int64Array:
    return np.fromiter(map(_offset_of, objects), dtype=np.int64, count=len(objects))

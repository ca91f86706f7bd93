# SPDX-License-Identifier: Apache-2.0
"""ObjectIndex: what is found, what is evicted, and that room is neither lost nor used twice."""

import pytest

from umbp.backends import object_index
from umbp.backends.arena import Arena
from umbp.backends.object_index import ObjectIndex

SIZE = 64


@pytest.fixture
def index():
    return ObjectIndex(Arena(4 * SIZE))


def store(index, *keys, size=SIZE):
    room = index.reserve(keys, size)
    index.publish(room)
    return room


def load(index, *keys, size=SIZE):
    pins = index.pin(keys, [size] * len(keys))
    index.unpin(pins)
    return pins


def found(index, *keys):
    return [key for key, here in zip(keys, index.contains(keys), strict=True) if here]


def test_a_reserved_object_is_found_only_once_published(index):
    room = index.reserve([b"a", b"b"], SIZE)
    assert found(index, b"a", b"b") == []
    index.publish(room)
    assert found(index, b"b", b"a", b"c") == [b"b", b"a"]


def test_a_lookup_does_not_wait_for_a_transfer(index):
    store(index, b"a")
    with index._lock:  # As a store holds it that evicts.
        assert found(index, b"a", b"b") == [b"a"]


def test_existing_keys_get_no_room(index):
    store(index, b"b")
    room = index.reserve([b"a", b"b", b"c"], SIZE)
    assert room.keys == (b"a", b"c")
    assert room.positions.tolist() == [0, 2]
    assert room.rejected_keys == ()


def test_neighbours_in_a_store_are_neighbours_in_the_pool_also_after_evictions(index):
    store(index, b"a", b"b", b"c", b"d")
    assert store(index, b"e", b"f", b"g").offsets.tolist() == [64, 128, 192]
    assert index.take_evictions() == [b"d", b"c", b"b"]


def test_the_end_of_a_store_or_load_is_evicted_before_its_beginning(index):
    store(index, b"a", b"b", b"c", b"d")
    load(index, b"c", b"d")
    store(index, b"e", b"f", b"g")
    assert index.take_evictions() == [b"b", b"a", b"d"]


def test_a_store_does_not_evict_what_it_finds_there(index):
    store(index, b"a", b"b", b"c", b"d")
    room = store(index, b"d", b"e", b"f", b"g", b"h")
    assert (room.keys, room.rejected_keys) == ((b"e", b"f", b"g"), (b"h",))
    assert index.take_evictions() == [b"c", b"b", b"a"]


def test_a_store_of_smaller_objects_evicts_no_more_than_it_needs():
    index = ObjectIndex(Arena(8 * SIZE))
    store(index, b"a", b"b", size=4 * SIZE)
    room = store(index, b"c", b"d")
    assert (room.keys, index.take_evictions()) == ((b"c", b"d"), [b"b"])
    store(index, *(b"%d" % number for number in range(3)))
    assert index.take_evictions() == [b"a"]


def test_a_store_of_larger_objects_evicts_until_neighbours_make_room():
    index = ObjectIndex(Arena(8 * SIZE))
    store(index, *(b"%d" % number for number in range(8)))
    pins = index.pin([b"5"], [SIZE])
    room = store(index, b"a", b"b", size=3 * SIZE)
    assert (room.keys, room.offsets.tolist()) == ((b"a",), [SIZE])
    index.unpin(pins)


def test_a_store_takes_the_room_of_objects_of_its_own_size_and_of_others():
    index = ObjectIndex(Arena(8 * SIZE))
    store(index, b"a", size=SIZE)
    store(index, b"b", size=4 * SIZE)
    store(index, b"c", b"d", b"e")
    room = store(index, *(b"%d" % number for number in range(7)))
    assert index.take_evictions() == [b"a", b"b", b"e", b"d"]
    assert sorted([*room.offsets, *load(index, b"c").offsets]) == list(range(0, 8 * SIZE, SIZE))
    assert index.stats().used_bytes == 8 * SIZE
    index.clear()
    assert (index.stats().used_bytes, index.stats().object_count) == (0, 0)


def test_lookups_do_not_count_as_a_use(index):
    for key in (b"a", b"b", b"c", b"d"):
        store(index, key)
    index.contains([b"a"])
    store(index, b"a")
    store(index, b"e")
    assert index.take_evictions() == [b"a"]


def test_pinned_and_reserved_objects_stay(index):
    store(index, b"a", b"b", b"c")
    pins = index.pin([b"a", b"b"], [SIZE, SIZE])
    reserved = index.reserve([b"d"], SIZE)
    room = index.reserve([b"e", b"f", b"g"], SIZE)
    assert room.keys == (b"e",)
    assert room.rejected_keys == (b"f", b"g")
    assert index.take_evictions() == [b"c"]
    index.unpin(pins)
    assert index.reserve([b"f", b"g", b"h"], SIZE).rejected_keys == (b"h",)
    index.publish(reserved)
    assert found(index, b"a", b"b", b"d") == [b"d"]


def test_an_object_that_two_loads_read_is_pinned_until_both_have_ended(index):
    store(index, b"a")
    first, second = (index.pin([b"a"], [SIZE]) for _ in range(2))
    index.unpin(first)
    store(index, *(b"%d" % number for number in range(4)))
    assert found(index, b"a") == [b"a"]
    index.unpin(second)
    store(index, *(b"%d" % number for number in range(4, 8)))
    assert found(index, b"a") == []


def test_a_load_with_a_missing_or_differently_sized_object_pins_nothing(index):
    store(index, b"a", b"b")
    pins = index.pin([b"a", b"b", b"c"], [SIZE, 2 * SIZE, SIZE])
    assert pins.missing_keys == (b"b", b"c")
    index.unpin(pins)
    store(index, *(b"%d" % number for number in range(4)))
    assert found(index, b"a", b"b") == []


def test_the_first_of_two_stores_of_one_key_stays(index):
    first = index.reserve([b"a"], SIZE)
    second = index.reserve([b"a"], SIZE)
    index.publish(first)
    index.publish(second)
    assert load(index, b"a").offsets.tolist() == first.offsets.tolist()
    assert index.stats().used_bytes == SIZE


def test_an_abandoned_store_gives_its_room_back(index):
    index.abandon(index.reserve([b"a", b"b"], SIZE))
    assert index.stats().used_bytes == 0
    assert found(index, b"a", b"b") == []


def test_evictions_are_kept_up_to_a_limit_and_counted_beyond(monkeypatch):
    monkeypatch.setattr(object_index, "EVICTIONS_KEPT_MAX", 3)
    index = ObjectIndex(Arena(SIZE))
    for number in range(6):
        store(index, b"%d" % number)
    assert index.take_evictions() == [b"2", b"3", b"4"]
    assert index.take_evictions() == []
    stats = index.stats()
    assert (stats.evicted_count, stats.object_count, stats.used_bytes) == (5, 1, SIZE)
    assert stats.capacity_bytes == SIZE


def test_clear_forgets_every_object_and_reports_no_eviction(index):
    store(index, b"a", b"b")
    index.clear()
    assert index.stats().used_bytes == index.stats().object_count == 0
    assert index.take_evictions() == []

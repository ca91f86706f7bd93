# SPDX-License-Identifier: Apache-2.0
"""The searches: what each is about, its bounds, and what it counts.

The counts are asserted, so that nobody makes the world smaller, or a rule of the core stricter,
without being told. Whoever changes either on purpose writes down the new counts.
"""

from typing import Final

import attrs
from exhaustive_world import Bounds


@attrs.frozen
class Expected:
    """A search and what it counts.

    Attributes:
        bounds: How large the world is.
        states: States that can be reached.
        transitions: Pairs of a state and what may happen in it.
        depth: Steps to the state that is farthest away.
    """

    bounds: Bounds
    states: int
    transitions: int
    depth: int


_PINS: Final = Bounds(
    requests=1, units=2, local_units=(0, 1), ranks=1, boundaries=True, pins=2, orderly=True
)
_ARRIVALS: Final = Bounds(requests=1, leases=1, stalls=True, arrivals=True, orderly=True)

EVERY_CHANGE: Final = {
    "two requests": Expected(Bounds(leases=1, ranks=1, orderly=True), 3442, 43558, 19),
    "engine in any order": Expected(Bounds(requests=1, ranks=1), 2728, 34598, 17),
    "synchronous loads": Expected(
        Bounds(leases=1, ranks=1, loads=(True,), orderly=True, deadlines=False), 5288, 50684, 25
    ),
    "three leases": Expected(Bounds(requests=1, leases=3, ranks=1, orderly=True), 3180, 40614, 24),
    "two requests, three leases, two ranks": Expected(
        Bounds(leases=3, orderly=True, resets=False, deadlines=False, hand_over_at_once=True),
        38052,
        446247,
        30,
    ),
    "two units, boundaries, loads of both kinds": Expected(
        Bounds(
            requests=1,
            units=2,
            local_units=(0, 1),
            leases=1,
            loads=(False, True),
            boundaries=True,
        ),
        3326,
        42248,
        13,
    ),
    "limit of pins": Expected(attrs.evolve(_PINS, resets=False, deadlines=False), 733, 5370, 16),
    "quarantine": Expected(
        Bounds(requests=1, ranks=1, quarantine=True, orderly=True), 2394, 29056, 21
    ),
    "ranks that stall": Expected(Bounds(requests=1, stalls=True, orderly=True), 6350, 78702, 20),
    "ranks that arrive": Expected(
        attrs.evolve(_ARRIVALS, leases=2, resets=False, deadlines=False), 3808, 31763, 24
    ),
    "ranks that arrive, three ranks": Expected(attrs.evolve(_ARRIVALS, ranks=3), 2150, 21994, 20),
    "ranks that arrive, two requests": Expected(
        attrs.evolve(_ARRIVALS, requests=2, resets=False, deadlines=False, hand_over_at_once=True),
        5011,
        46078,
        25,
    ),
    "clock": Expected(Bounds(requests=1, leases=1, ranks=1, clock=True), 2192, 17900, 15),
    "free blocks": Expected(Bounds(requests=1, ranks=1, lazy=True, orderly=True), 2218, 24366, 19),
}
"""What is searched on every change: about a minute."""

NIGHTLY: Final = {
    "two requests, engine in any order": Expected(Bounds(leases=1, ranks=1), 5026, 74572, 18),
    "two leases, two ranks, engine in any order": Expected(Bounds(requests=1), 12668, 169442, 19),
    "two requests, two leases, two ranks": Expected(
        Bounds(orderly=True, resets=False, deadlines=False), 11629, 110696, 30
    ),
    "synchronous loads and deadlines": Expected(
        Bounds(leases=1, ranks=1, loads=(True,), orderly=True), 7294, 91754, 23
    ),
    "three leases, two ranks": Expected(
        Bounds(requests=1, leases=3, orderly=True), 25688, 357738, 27
    ),
    "three leases, engine in any order": Expected(
        Bounds(requests=1, leases=3, ranks=1), 20298, 318414, 23
    ),
    "limit of pins, resets and deadlines": Expected(_PINS, 4947, 58442, 19),
    "quarantine, loads of both kinds": Expected(
        Bounds(requests=1, ranks=1, loads=(False, True), quarantine=True, orderly=True),
        5736,
        69046,
        21,
    ),
    "free blocks, engine in any order, two ranks": Expected(
        Bounds(requests=1, lazy=True), 23948, 320957, 20
    ),
    "ranks that arrive, two leases": Expected(attrs.evolve(_ARRIVALS, leases=2), 26320, 354658, 27),
    "clock, two ranks, loads of both kinds": Expected(
        Bounds(requests=1, leases=1, loads=(False, True), clock=True), 8052, 67248, 16
    ),
}
"""What is searched besides, where there is more time."""

# SPDX-License-Identifier: Apache-2.0
"""Breadth-first search of a finite space of states, with the shortest way to what is wrong.

It knows nothing of the lifecycle. A space names its first state, looks at a state and says what may
happen in it, and says what state follows. States are hashable values that mean all that they must.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeAlias

import attrs

Action: TypeAlias = tuple[Any, ...]
"""``(what happens, to what, how ...)``"""


class Violation(Exception):
    """Something is not as it must be.

    Args:
        message: What must hold, and does not.
        action: What was tried in the state; None when the state itself is wrong.
    """

    def __init__(self, message: str, action: Action | None = None) -> None:
        super().__init__(message)
        self.action = action


class Counterexample(AssertionError):
    """A violation, and the shortest way to it; its text is what a person reads.

    Args:
        message: What must hold, and does not.
        path: What happens from the first state on; the last of it is what goes wrong.
        story: The same, told line by line.
    """

    def __init__(self, message: str, path: Sequence[Action], story: Sequence[str]) -> None:
        super().__init__("\n".join([message, *story]))
        self.path = list(path)


class Space(Protocol):
    """What can be searched."""

    def first(self) -> Hashable:
        """Returns the first state."""

    def visit(self, state: Any) -> Sequence[Action]:
        """Returns what may happen in a state; raises ``Violation`` if the state is wrong."""

    def follow(self, state: Any, action: Action) -> Hashable:
        """Returns the state that follows; raises ``Violation`` if the way to it is wrong."""

    def tell(self, path: Sequence[Action]) -> Sequence[str]:
        """Tells a path in lines that a person can read."""


@attrs.define
class Searched:
    """A space that was searched to its end, and in which nothing is wrong.

    Attributes:
        numbers: Number of each state, in the order in which they were found.
        transitions: Pairs of a state and what may happen in it.
        depth: Steps to the state that is farthest from the first.
    """

    numbers: dict[Any, int]
    transitions: int
    depth: int

    @property
    def states(self) -> int:
        return len(self.numbers)


def search(space: Space, states_max: int) -> Searched:
    """Visits every state that can be reached.

    Args:
        space: What is searched.
        states_max: More than that, and the space is not what it was taken for.

    Raises:
        Counterexample: Something is wrong; no shorter way leads to a violation.
        OverflowError: There are more than ``states_max`` states.
    """
    first = space.first()
    numbers = {first: 0}
    found = [first]
    ways: list[tuple[int, Action]] = [(0, ())]
    transitions = depth = 0
    level_end = 1
    number = 0
    while number < len(found):
        if number == level_end:
            depth += 1
            level_end = len(found)
        state = found[number]
        action: Action | None = None
        try:
            for action in space.visit(state):
                transitions += 1
                after = space.follow(state, action)
                if after not in numbers:
                    numbers[after] = len(found)
                    found.append(after)
                    ways.append((number, action))
            if len(found) > states_max:
                raise OverflowError(f"more than {states_max} states")
        except Violation as violation:
            path = _path(ways, number)
            last = violation.action or action
            path += [last] if last is not None else []
            raise Counterexample(str(violation), path, space.tell(path)) from violation
        number += 1
    return Searched(numbers, transitions, depth)


def _path(ways: Sequence[tuple[int, Action]], number: int) -> list[Action]:
    path: list[Action] = []
    while number:
        number, action = ways[number]
        path.append(action)
    return path[::-1]

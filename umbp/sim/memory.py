# SPDX-License-Identifier: Apache-2.0
"""KV memory of one rank, and the check that every forward pass reads what it should.

A page is what a block id stands for: the bytes are one and the same for all KV cache groups, so a
page that changes hands loses its content. Beside the value of each token a page has a label, which
says whose it is (rank and group), and an age: the lowest epoch of any token that went into it.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from umbp.sim.models import GroupShape
from umbp.sim.text import Text

EMPTY: Final = 0
SCRIBBLED: Final = -1
NULL_BLOCK: Final = 0
"""The block that vLLM puts where a group needs none."""
_NO_VALUE: Final = -1


class OracleError(AssertionError):
    """Something was read, stored or reported that must not be. Never raised by umbp or vLLM."""


def page_label(rank: int, group_index: int, group_count: int) -> int:
    """Returns the label of pages of a rank and a group; 0 and less are no such label."""
    return rank * group_count + group_index + 1


@attrs.frozen
class StoredPage:
    """A copy of a page.

    Attributes:
        label: Whose it is.
        age: Lowest epoch of what went into it.
        values: One for each token; of recurrent state only the first is used.
    """

    label: int
    age: int
    values: tuple[int, ...]


@attrs.define
class _Page:
    label: int
    age: int
    values: list[int]


@attrs.frozen(eq=False)
class Work:
    """What one step computes of one request.

    Attributes:
        request_id: The request.
        text: What it says.
        begin: Position of the first token that is computed.
        end: Position after the last.
        table: Block ids for each group.
    """

    request_id: str
    text: Text
    begin: int
    end: int
    table: Sequence[Sequence[int]]


class RankMemory:
    """KV memory of one rank.

    Args:
        groups: KV cache groups.
        num_blocks: Blocks.
        rank: Index of the rank.
    """

    def __init__(self, groups: Sequence[GroupShape], num_blocks: int, rank: int) -> None:
        self._groups = groups
        self._rank = rank
        self._slots = max(group.block_tokens for group in groups)
        self._pages = [_Page(EMPTY, 0, [_NO_VALUE] * self._slots) for _ in range(num_blocks)]
        # Loads that write to a block now.
        self._loading: dict[int, int] = {}

    def label(self, group_index: int) -> int:
        """Returns the label of this rank's pages of a group."""
        return page_label(self._rank, group_index, len(self._groups))

    # ------------------------------------------------------------ transfers

    def read(self, block_id: int) -> StoredPage:
        """Copies a page out."""
        page = self._pages[block_id]
        return StoredPage(page.label, page.age, tuple(page.values))

    def write(self, block_id: int, content: StoredPage) -> None:
        """Copies a page in."""
        page = self._pages[block_id]
        page.label, page.age, page.values[:] = content.label, content.age, content.values

    def begin_load(self, block_id: int) -> None:
        """Overwrites a page with nonsense, as the first bytes of a load do."""
        self._loading[block_id] = self._loading.get(block_id, 0) + 1
        self.scribble(block_id)

    def end_load(self, block_id: int) -> None:
        """Says that a load does not write to a page any more."""
        self._loading[block_id] -= 1
        if not self._loading[block_id]:
            del self._loading[block_id]

    def scribble(self, block_id: int) -> None:
        """Overwrites a page with nonsense."""
        page = self._pages[block_id]
        page.label, page.values[:] = SCRIBBLED, [_NO_VALUE] * self._slots

    # ------------------------------------------------------------ the forward pass

    def prepare(
        self, zeroed: Iterable[int], copies: Iterable[tuple[int, int]], work: Sequence[Work]
    ) -> None:
        """Does what a worker does before the connector may load.

        Args:
            zeroed: Blocks that vLLM wants emptied.
            copies: (source, destination) of blocks that are copied before they are written.
            work: The requests of the step, whose recurrent state moves to where it is written.
        """
        for block_id in zeroed:
            self._guard(block_id, "zeroes")
            page = self._pages[block_id]
            page.label, page.values[:] = EMPTY, [_NO_VALUE] * self._slots
        for source, destination in copies:
            self._guard(destination, "copies into")
            self.write(destination, self.read(source))
        for one in work:
            self._move_states(one)

    def _move_states(self, work: Work) -> None:
        for index, group in enumerate(self._groups):
            if not group.is_state or not work.begin:
                continue
            source = work.table[index][(work.begin - 1) // group.block_tokens]
            page = self._pages[source]
            if page.label != self.label(index) or page.values[0] != work.text.state(work.begin):
                raise OracleError(
                    f"{work.request_id} on rank {self._rank}: block {source} of group {index} is "
                    f"not the state after {work.begin} tokens"
                )
            destination = work.table[index][(work.end - 1) // group.block_tokens]
            if destination != source:
                self._guard(destination, "moves state into")
                self.write(destination, self.read(source))

    def check(self, work: Work) -> str | None:
        """Compares what a step reads for a request with what it should.

        Returns:
            What is wrong; None when nothing is.
        """
        for index, group in enumerate(self._groups):
            if group.is_state:
                continue
            size, label, table = group.block_tokens, self.label(index), work.table[index]
            first = self._first_read(group, work)
            for place in range(first // size, -(-work.begin // size)):
                begin, end = max(first, place * size), min(work.begin, (place + 1) * size)
                page = self._pages[table[place]]
                found = page.values[begin - place * size : end - place * size]
                if page.label != label or found != work.text.values(begin, end):
                    return (
                        f"{work.request_id} on rank {self._rank}: block {table[place]} of group "
                        f"{index} is not the KV of tokens {begin} to {end}"
                    )
        return None

    def age(self, work: Work) -> int | None:
        """Returns the age of the oldest page that a step reads; None when it reads none."""
        ages = []
        for index, group in enumerate(self._groups):
            size, table = group.block_tokens, work.table[index]
            places = range(self._first_read(group, work) // size, -(-work.begin // size))
            if group.is_state:
                places = places[-1:]
            ages += [self._pages[table[place]].age for place in places]
        return min(ages, default=None)

    def compute(self, work: Work, age: int, *, poisoned: bool) -> None:
        """Writes what a step computes for a request.

        Args:
            work: The request.
            age: Lowest epoch of what it rests on.
            poisoned: It was computed from nonsense, on whatever rank.
        """
        for index, group in enumerate(self._groups):
            size, table = group.block_tokens, work.table[index]
            if group.is_state:
                page = self._take(table[(work.end - 1) // size], index, age)
                page.age = age
                page.values[0] = _NO_VALUE if poisoned else work.text.state(work.end)
                continue
            for place in range(work.begin // size, -(-work.end // size)):
                if table[place] == NULL_BLOCK:
                    # It has left the window before the step is over.
                    continue
                begin, end = max(work.begin, place * size), min(work.end, (place + 1) * size)
                page = self._take(table[place], index, age)
                page.age = age if begin == place * size else min(page.age, age)
                values = [_NO_VALUE] * (end - begin) if poisoned else work.text.values(begin, end)
                page.values[begin - place * size : end - place * size] = values

    @staticmethod
    def _first_read(group: GroupShape, work: Work) -> int:
        if group.window_tokens is None:
            return 0
        return max(0, work.begin - group.window_tokens + 1)

    def _take(self, block_id: int, index: int, epoch: int) -> _Page:
        self._guard(block_id, "computes into")
        page, label = self._pages[block_id], self.label(index)
        if page.label != label:
            page.label, page.age, page.values[:] = label, epoch, [_NO_VALUE] * self._slots
        return page

    def _guard(self, block_id: int, what: str) -> None:
        if block_id == NULL_BLOCK or block_id in self._loading:
            raise OracleError(
                f"rank {self._rank} {what} block {block_id}, which a load writes or nobody owns"
            )

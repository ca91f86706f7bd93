# SPDX-License-Identifier: Apache-2.0
"""What every stored object must contain, known from its key alone."""

from collections.abc import Sequence

from umbp.keys import PREFIX_BYTES, split_prefix
from umbp.sim.memory import OracleError, StoredPage, page_label
from umbp.sim.models import SimModel
from umbp.sim.text import Text


class ObjectOracle:
    """Checks objects when they are stored, long before anybody loads them.

    Args:
        model: The model.
    """

    def __init__(self, model: SimModel) -> None:
        self._groups = model.groups
        self._unit = model.unit_tokens
        self._meanings: dict[bytes, tuple[Text, int]] = {}

    def learn(self, block_hashes: Sequence[bytes], text: Text) -> None:
        """Takes what vLLM's block hashes of a text stand for."""
        for index in range(len(block_hashes) - 1, -1, -1):
            if block_hashes[index] in self._meanings:
                # A hash covers what is before it, so those are known, too.
                return
            self._meanings[block_hashes[index]] = (text, (index + 1) * self._unit)

    def check(self, key: bytes, content: StoredPage) -> None:
        """Checks an object that is about to be stored.

        Raises:
            OracleError: It is not what its key says, or older than its key's epoch.
        """
        epoch, group_index, rank = split_prefix(key)
        meaning = self._meanings.get(key[PREFIX_BYTES:])
        if meaning is None:
            raise OracleError(f"an object of group {group_index} has a hash that nobody knows")
        text, end = meaning
        group = self._groups[group_index]
        if group.is_state:
            wanted = [text.state(end)]
        else:
            wanted = text.values((end - 1) // group.block_tokens * group.block_tokens, end)
        what = f"object of tokens up to {end}, group {group_index}, rank {rank}"
        if content.label != page_label(rank, group_index, len(self._groups)):
            raise OracleError(f"{what}: the page is somebody else's (label {content.label})")
        if list(content.values[: len(wanted)]) != wanted:
            raise OracleError(f"{what}: wrong content")
        if content.age < epoch:
            raise OracleError(f"{what}: from epoch {content.age}, stored in epoch {epoch}")

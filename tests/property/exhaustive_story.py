# SPDX-License-Identifier: Apache-2.0
"""A path through the search, told with the engine's ids and the core's numbers."""

import itertools
from collections.abc import Sequence
from typing import Any

from core_engine import UNIT
from exhaustive import Action
from exhaustive_codec import Codec
from exhaustive_events import unfit_events
from exhaustive_world import World

from umbp.errors import UmbpError
from umbp.fsm import Event, LeaseState, TransferLease

_PHRASES = {
    "ask": "{0} is asked for with {1} tokens of its own: looked up",
    "skip": "{0} is asked for with {1} tokens of its own: not looked up",
    "answer": "the backend has found {0} up to token {1}",
    "load": "{0} is admitted to load from token {1}",
    "compute": "{0} is admitted to compute from token {1}",
    "fill": "{0} fills its blocks up to token {1}: they are stored",
    "defer": "{0} fills its blocks up to token {1}: their store is put off",
    "near_reuse": "a free block is about to be reused: it is stored",
    "offer_boundary": "{0} has reached a boundary: it is stored",
    "preempt": "{0} is preempted",
    "finish": "{0} is ended by the engine",
    "send": "{0} is handed to the workers",
    "succeed": "a rank succeeds with {0}",
    "fail": "a rank fails {0}",
    "stall": "a rank stalls in {0}",
    "arrive": "a rank can no more fail {0}",
    "expire_request": "the time of {0} is over",
    "expire_lease": "the time of {0} is over",
    "expire_storing": "the time of {0}, which has ended, is over",
    "end_quarantine": "the quarantine ends",
    "wait": "time passes",
}
_OF_LEASES = ("send", "succeed", "fail", "stall", "arrive", "expire_lease")
_WITH_TOKENS = ("ask", "skip", "answer", "load", "compute", "fill", "defer")


class Story:
    """Does a path again, in a world whose core was never taken apart.

    Args:
        world: A new world.
        codec: Puts it in the order in which actions name things.
    """

    def __init__(self, world: World, codec: Codec) -> None:
        self._world = world
        self._codec = codec

    def lines(self, path: Sequence[Action]) -> list[str]:
        """Tells a path: each step in a numbered line, and what is then in lines below it."""
        told = []
        for number, action in enumerate(path, 1):
            self._codec.encode(self._world)
            told.append(f"{number:3}. {self.phrase(action)}")
            told += [f"       {line}" for line in self._after(action)]
        return told

    def phrase(self, action: Action) -> str:
        """Says in words what happens."""
        kind, *arguments = action
        if kind == "reset":
            kept = "is kept" if arguments[0] else "is emptied"
            return f"the store is reset; the engine's own cache {kept}"
        if kind == "give":
            return f"the core is given {self._unfit(arguments[0])}"
        words: list[Any] = list(arguments)
        if kind in _OF_LEASES:
            words[0] = self._name_of(self._world.leases[words[0]])
        elif kind == "expire_storing":
            words[0] = self._world.storing[words[0]].identity
        elif kind not in ("wait", "end_quarantine", "near_reuse"):
            words[0] = self._world.names[words[0]]
        if kind in _WITH_TOKENS:
            words[1] *= UNIT
        phrase = _PHRASES[kind].format(*words)
        if kind == "load" and arguments[2]:
            phrase += ", synchronously"
        if kind == "fail" and not arguments[2]:
            phrase += " without having attempted it"
        return phrase

    def _unfit(self, number: int) -> Event:
        event, _ = next(itertools.islice(unfit_events(self._world), number, None))
        return event

    @staticmethod
    def _name_of(lease: TransferLease) -> str:
        return f"{lease.kind.value} {lease.job_id} of {lease.request_id or 'free blocks'}"

    def _after(self, action: Action) -> list[str]:
        try:
            if action[0] == "give":
                self._world.core.step(self._unfit(action[1]), self._world.now_s)
            else:
                self._world.do(action)
        except (UmbpError, AssertionError, LookupError) as error:
            return [f"{type(error).__name__}: {error}", *self.state()]
        return self.state()

    def state(self) -> list[str]:
        """Says in lines what is."""
        core = self._world.core
        lines = []
        for name, request in core.requests.items():
            facts = [f"{name} is {request.state.name}"]
            if request.question_id is not None:
                facts.append("its question is open")
            elif request.hit_end_tokens is not None:
                facts.append(f"found up to token {request.hit_end_tokens}")
            if request.planned_tokens:
                facts.append(f"planned up to token {request.planned_tokens}")
            facts += [bar for bar in ("load_barred", "store_barred") if getattr(request, bar)]
            lines.append(", ".join(facts))
        for transfer in self._world.transfers.values():
            lease = transfer.lease
            if lease.state is not LeaseState.RELEASED:
                text = f"{self._name_of(lease)} is {lease.state.name}, blocks {transfer.blocks}"
                if transfer.sent:
                    text += f", answered by ranks {sorted(transfer.answered)}"
                lines.append(text)
        lines.append(
            f"epoch {core.epoch}, pinned blocks: {core.pinned_blocks}, tables: {self._world.tables}"
        )
        return lines

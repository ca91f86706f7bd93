# SPDX-License-Identifier: Apache-2.0
"""When a link gives out its client, and when it looks for the master. Needs no MORI."""

import logging
from typing import Any

import attrs
import pytest

from umbp.backends.master_address import Presence
from umbp.backends.master_link import LOOK_INTERVAL_S, MasterLink
from umbp.errors import BackendUnavailable

ANSWERS, SILENT, GONE = Presence.ANSWERS, Presence.SILENT, Presence.GONE


@attrs.define
class FakeAddress:
    now: Presence = ANSWERS
    looks: int = 0

    def presence(self, _: float) -> Presence:
        self.looks += 1
        return self.now

    def __str__(self) -> str:
        return "m:1"


@attrs.define
class FakeClient:
    end: str = ""

    def close(self) -> None:
        self.end = "closed"

    def abandon(self) -> None:
        self.end = "abandoned"


@attrs.define
class Rig:
    address: FakeAddress = attrs.field(factory=FakeAddress)
    client: FakeClient = attrs.field(factory=FakeClient)
    now_s: float = 100.0

    def link(self) -> MasterLink:
        address: Any = self.address
        client: Any = self.client
        return MasterLink(address, client, clock=lambda: self.now_s)


@pytest.mark.parametrize("state", [SILENT, GONE])
def test_without_a_master_the_client_is_refused_until_there_is_one(
    state: Presence, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    link = rig.link()
    used = link.client()
    assert rig.address.looks == 0
    rig.address.now = state
    assert not link.doubt(used)
    for _ in range(5):
        with pytest.raises(BackendUnavailable, match=f"the master at m:1 {state.value}"):
            link.client()
    assert rig.address.looks == 1
    rig.now_s += LOOK_INTERVAL_S
    with pytest.raises(BackendUnavailable):
        link.client()
    assert rig.address.looks == 2
    rig.address.now = ANSWERS
    rig.now_s += LOOK_INTERVAL_S
    assert link.client().generation == used.generation + 1
    assert [record.getMessage() for record in caplog.records] == [
        f"the master at m:1 {state.value}; KV is computed until it is back",
        "the master at m:1 answers again",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_doubt_that_is_not_borne_out_changes_nothing_and_comes_seldom() -> None:
    rig = Rig()
    link = rig.link()
    for _ in range(5):
        assert not link.doubt(link.client())
    assert rig.address.looks == 1


def test_a_client_from_before_the_master_came_back_is_worth_another_try() -> None:
    rig = Rig()
    link = rig.link()
    used = link.client()
    rig.address.now = GONE
    link.doubt(used)
    rig.address.now = ANSWERS
    rig.now_s += LOOK_INTERVAL_S
    assert link.doubt(used)
    assert not link.doubt(link.client())


@pytest.mark.parametrize(
    ("state", "is_busy", "end"),
    [
        (ANSWERS, False, "closed"),
        (GONE, False, "closed"),
        (SILENT, False, "abandoned"),
        (ANSWERS, True, "abandoned"),
    ],
)
def test_a_client_is_destroyed_only_where_that_does_not_wait(
    state: Presence, is_busy: bool, end: str
) -> None:
    rig = Rig(FakeAddress(state))
    link = rig.link()
    link.close(is_busy=is_busy)
    assert rig.client.end == end
    rig.client.end = ""
    link.close()
    assert rig.client.end == ""
    with pytest.raises(BackendUnavailable, match="the client is closed"):
        link.client()

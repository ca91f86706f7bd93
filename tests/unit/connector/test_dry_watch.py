# SPDX-License-Identifier: Apache-2.0
"""An engine that stores and never restores is warned of, once."""

import pytest

from umbp.connector.dry_watch import LOADS, LOOKUPS, DryWatch
from umbp.fsm.counters import CoreCounters

from .bench import Bench
from .fakes import FakeRequest


def warnings(caplog: pytest.LogCaptureFixture, *states: CoreCounters) -> list[str]:
    watch = DryWatch()
    for state in states:
        watch.look(state)
    return [record.getMessage() for record in caplog.records]


DRY = CoreCounters(lookup_misses=LOOKUPS - 1, lookups_expired=1, stores_settled=7)


def test_lookups_that_never_find_anything_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (message,) = warnings(caplog, DRY, DRY)
    assert message.startswith(f"{LOOKUPS} lookups have found nothing, although 7 stores succeeded")
    assert "umbp explain" in message


@pytest.mark.parametrize(
    "state",
    [
        CoreCounters(lookup_misses=LOOKUPS - 1, stores_settled=7),
        CoreCounters(lookup_misses=LOOKUPS, stores_failed=7),
        CoreCounters(lookup_misses=LOOKUPS, stores_settled=7, lookup_hits=1),
        CoreCounters(loads_failed=LOADS - 1),
    ],
)
def test_less_than_that_is_not_warned_of(
    caplog: pytest.LogCaptureFixture, state: CoreCounters
) -> None:
    assert warnings(caplog, state) == []


def test_loads_that_never_succeed_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    failing = CoreCounters(lookup_hits=LOADS, loads_failed=LOADS)
    (message,) = warnings(caplog, failing, failing)
    assert message.startswith(f"{LOADS} loads have failed and none has succeeded")


def test_one_load_that_succeeded_ends_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever comes later is no matter of configuration."""
    restored = CoreCounters(lookup_hits=1, loads_settled=1)
    assert warnings(caplog, restored, DRY, CoreCounters(loads_failed=LOADS)) == []


def test_the_engine_looks_whenever_a_request_ends(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.core.counters.stores_settled = 1
    for number in range(LOOKUPS):
        assert not caplog.records
        request = FakeRequest.of(f"request-{number}", 40)
        bench.side.matched_tokens(request, 0)
        bench.side.finished(request, ([],))
    assert "lookups have found nothing" in caplog.text

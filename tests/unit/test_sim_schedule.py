# SPDX-License-Identifier: Apache-2.0
"""Faults on a schedule: how they are written, what is refused, and what is drawn."""

import json
import math
from pathlib import Path

import pytest

from umbp.errors import ConfigError
from umbp.sim.faults import LOOKUPS, TRANSFERS, LookupFault, TransferFault
from umbp.sim.schedule import (
    Effect,
    EffectKind,
    check_faults,
    moments_of,
    parse_fault,
    random_faults,
    read_faults,
)

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"


def test_a_fault_has_place_time_and_effects() -> None:
    fault = parse_fault("t=2.5..3 engine=1 rank=0 loads=late:0.25 stores=lost")
    assert (fault.begin_s, fault.end_s, fault.engine, fault.rank) == (2.5, 3.0, 1, 0)
    assert fault.effects == (
        Effect(EffectKind.LOADS, TransferFault.LATE, 0.25),
        Effect(EffectKind.STORES, TransferFault.LOST),
    )


def test_what_is_left_out_means_everywhere_and_always() -> None:
    fault = parse_fault("lookups=silent")
    assert (fault.begin_s, fault.end_s, fault.engine, fault.rank) == (0.0, math.inf, None, None)
    assert fault.effects[0].fault is LookupFault.SILENT


def test_a_fault_concerns_its_place_and_lasts_for_its_time() -> None:
    fault = parse_fault("t=1..2 engine=1 rank=0 dead")
    assert fault.concerns(1)
    assert fault.concerns(1, 0)
    assert not fault.concerns(1, 1)
    assert not fault.concerns(0, 0)
    assert [fault.lasts_at(now_s) for now_s in (0.9, 1.0, 1.9, 2.0)] == [False, True, True, False]


def test_moments_are_in_order_of_time() -> None:
    faults = [parse_fault(text) for text in ("t=3 reset", "loads=late", "t=1 evict=4 forget")]
    moments = [(time_s, effect.kind.value) for time_s, _, effect in moments_of(faults)]
    assert moments == [(1.0, "evict"), (1.0, "forget"), (3.0, "reset")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "nothing goes wrong; write what, such as loads=late"),
        ("t=2..3", "nothing goes wrong"),
        ("loots=late", "'loots' is unknown; write t, engine, rank, loads, stores"),
        ("t=3..2 dead", "t is '3..2'; write seconds, such as t=2..3"),
        ("t=soon dead", "t is 'soon'; write seconds"),
        ("t=-1 reset", "t is '-1'; write seconds"),
        ("engine=x dead", "engine is 'x'; write a number from 0, such as engine=1"),
        ("rank=² dead", "rank is '²'; write a number from 0"),
        ("loads=tardy", "loads is 'tardy'; write one of late, lost, partial"),
        ("lookups=late", "lookups is 'late'; write one of slow, silent, unknown"),
        (
            "loads=late:1.5",
            "the share of loads is '1.5'; write one up to 1, such as loads=late:0.5",
        ),
        ("stores=held:0", "the share of stores is '0'"),
        ("vanish", "the share of vanish is ''; write one up to 1, such as vanish=0.3"),
        ("dead=1", "dead takes no value; write dead alone"),
        ("t=1 evict=0", "evict is '0'; write a number of objects, such as evict=8"),
        ("reset", "reset happens at one moment; write when, such as t=2"),
        ("t=1..2 forget", "forget happens at one moment; write t=1 alone"),
        ("rank=1 lookups=silent", "lookups concerns all ranks of an engine; leave rank=1 out"),
    ],
)
def test_nonsense_is_refused_in_one_line(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault(text)
    message = str(caught.value)
    assert message.startswith(f"--fault '{text}': ")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine=2 dead", "there is no engine 2; write engine=0 to engine=1, or ask for more with"),
        ("rank=4 dead", "there is no rank 4; write rank=0 to rank=3"),
        ("t=1 reset", "engines that share a store cannot be reset one by one; write --store own"),
    ],
)
def test_a_fault_must_fit_the_engines(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_faults([parse_fault(text)], engines=2, ranks=4, shared_store=True)
    assert f"--fault '{text}': {expected}" in str(caught.value)


def test_files_hold_texts_or_objects(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    entries = ["t=1..2 dead", {"t": "1..2", "rank": 0, "dead": True}, {"loads": "late:0.5"}]
    path.write_text(json.dumps(entries))
    assert [fault.text for fault in read_faults(path)] == [
        "t=1..2 dead",
        "t=1..2 rank=0 dead",
        "loads=late:0.5",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory; name a JSON file, or write random"),
        ("{", "is not JSON"),
        ('"dead"', "is no list; write"),
        ('["dead", "ded"]', "entry 2: 'ded': 'ded' is unknown"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "faults.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_faults(path)
    assert str(caught.value).startswith(f"--faults {path}")
    assert expected in str(caught.value)


@pytest.mark.parametrize("shared_store", [True, False])
def test_drawn_faults_repeat_and_end_no_engine(shared_store: bool) -> None:
    def draw(seed: int) -> list[str]:
        faults = random_faults(seed, duration_s=20, engines=3, ranks=2, shared_store=shared_store)
        check_faults(faults, engines=3, ranks=2, shared_store=shared_store)
        return [fault.text for fault in faults]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    words = {text.split()[-1].partition(":")[0] for seed in range(20) for text in draw(seed)}
    assert not words & {"loads=hung", "stores=hung"}
    assert not any(word.startswith("spoil") for word in words)
    assert ("reset" in words) is not shared_store
    assert {"dead", "forget", "loads=late", "stores=held", "lookups=silent"} <= words


def test_the_page_names_every_effect_and_every_kind() -> None:
    rows = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    for effect in EffectKind:
        assert any(row.startswith((f"| `{effect.value}`", f"| `{effect.value}=")) for row in rows)
    for kind in (TRANSFERS.keys() | LOOKUPS.keys()) - {"none"}:
        assert any(row.startswith(f"| `{kind}` |") for row in rows)

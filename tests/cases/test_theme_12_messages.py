# SPDX-License-Identifier: Apache-2.0
"""What crosses from one process to another."""

import pickle
from typing import Any

import pytest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from umbp.connector.metadata import (
    PlanPart,
    RankAnswer,
    RankEvictions,
    StepMetadata,
    TransferPlan,
    WorkerMetadata,
    pack_ids,
)

PLAN = TransferPlan(
    1 << 40, "request ä", 2, [PlanPart(3, 32, bytes(range(64)), pack_ids([7, 1 << 30]))], True
)
MESSAGES: list[Any] = [
    StepMetadata(0),
    StepMetadata(3, loads=[PLAN], stores=[PLAN, PLAN], cancels=[1, 2], refused=[PLAN]),
    WorkerMetadata([]),
    WorkerMetadata([RankAnswer(5, 1, False, True, 1 << 40, [b"\x00\xff" * 16], "gone")]),
    WorkerMetadata([], [RankEvictions(1, [bytes(range(60)), b"\xff" * 60])]),
]


def same(first: Any, second: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(first) is not type(second):
        return False
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    if hasattr(first, "__attrs_attrs__"):
        names = [attribute.name for attribute in first.__attrs_attrs__]
        return all(same(getattr(first, name), getattr(second, name)) for name in names)
    return bool(first == second)


@pytest.mark.parametrize("message", MESSAGES)
def test_case_12_4_messages_keep_their_types_between_processes(message: Any) -> None:
    encoded = MsgpackEncoder().encode(message)
    assert same(MsgpackDecoder(type(message)).decode(encoded), message)
    assert same(pickle.loads(pickle.dumps(message, protocol=5)), message)


def test_case_12_4_answers_can_be_joined_after_the_way() -> None:
    sent = [
        WorkerMetadata([RankAnswer(1, rank, True)], [RankEvictions(rank, [b"key"])])
        for rank in range(2)
    ]
    first, second = (pickle.loads(pickle.dumps(message)) for message in sent)
    joined = first.aggregate(second)
    assert [answer.rank for answer in joined.answers] == [0, 1]
    assert [evictions.rank for evictions in joined.evictions] == [0, 1]

# SPDX-License-Identifier: Apache-2.0
"""Messages between the sides survive the ways in which vLLM carries them (case 12.4)."""

import pickle
from typing import Any

import numpy as np
import pytest

from umbp.connector.metadata import (
    PlanPart,
    RankAnswer,
    StepMetadata,
    TransferPlan,
    WorkerMetadata,
    pack_ids,
    unpack_ids,
)

PLAN = TransferPlan(
    5, "request", 2, [PlanPart(0, 32, bytes(range(64)), pack_ids([7, 1 << 30]))], True
)
MESSAGES: list[Any] = [
    StepMetadata(0),
    StepMetadata(3, loads=[PLAN], stores=[PLAN], cancels=[1, 2], refused=[PLAN]),
    WorkerMetadata([RankAnswer(5, 1, False, True, 1 << 40, [b"\x00\xff" * 16], "gone")]),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_survive_vllms_msgpack(message: Any) -> None:
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    decoded = MsgpackDecoder(type(message)).decode(MsgpackEncoder().encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_survive_the_message_queue(message: Any) -> None:
    """vLLM's queue between scheduler and workers pickles what it carries."""
    assert pickle.loads(pickle.dumps(message, protocol=5)) == message


def test_messages_are_never_falsy() -> None:
    """vLLM drops falsy messages."""
    assert all(MESSAGES)
    assert WorkerMetadata([])


def test_answers_of_workers_are_joined_without_changing_either() -> None:
    first = WorkerMetadata([RankAnswer(1, 0, True)])
    second = WorkerMetadata([RankAnswer(1, 1, True)])
    joined = first.aggregate(second)
    assert [answer.rank for answer in joined.answers] == [0, 1]
    assert len(first.answers) == len(second.answers) == 1


def test_answers_cannot_be_joined_with_another_connectors() -> None:
    with pytest.raises(TypeError, match="cannot join"):
        WorkerMetadata([]).aggregate("something else")  # type: ignore[arg-type]


def test_ids_are_columns_of_four_bytes() -> None:
    packed = pack_ids(list(range(512)))
    assert len(packed) == 4 * 512
    assert unpack_ids(packed).dtype == np.int64
    assert np.array_equal(unpack_ids(packed), np.arange(512))

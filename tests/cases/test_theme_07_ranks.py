# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline, data and context parallel ranks."""

import socket
import types
from pathlib import Path

import pytest
from connector.group_bench import config_of, full
from lookup_ranks import NAMESPACE, Rank, blocks_of, make_question, one_answer, serving
from vllm.config import ParallelConfig

from umbp.backends.lookup_client import SocketLookupClient
from umbp.backends.socket_path import claim, socket_path
from umbp.connector.config import ConnectorConfig
from umbp.connector.support import check_supported
from umbp.errors import ConfigError
from umbp.keys import KeySpace


def engine_of(parallel: object, **options: object) -> object:
    """vLLM's configuration, as far as parallelism goes."""
    return types.SimpleNamespace(
        parallel_config=parallel,
        kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config=options),
        cache_config=types.SimpleNamespace(enable_prefix_caching=True),
    )


def test_case_7_1_every_worker_is_asked(tmp_path: Path) -> None:
    parallel = ParallelConfig(tensor_parallel_size=4, decode_context_parallel_size=2)
    config = ConnectorConfig.from_vllm(engine_of(parallel, socket_dir=str(tmp_path)))
    assert config.rank_count == parallel.world_size == 4
    assert len(set(config.socket_paths(KeySpace(NAMESPACE)))) == 4
    assert config.core_limits(unit_tokens=16, block_count=10).rank_count == 4


@pytest.mark.parametrize("lacking", range(4))
def test_case_7_1_block_that_one_rank_lacks_is_a_miss(tmp_path: Path, lacking: int) -> None:
    with serving(tmp_path, 4) as ranks:
        for rank in ranks:
            blocks = (0, 2) if rank.index == lacking else (0, 1, 2)
            rank.hold(0, *blocks)
        client = SocketLookupClient(
            [rank.path for rank in ranks], namespace=NAMESPACE, lookup_timeout_ms=1000
        )
        client.ask(make_question())
        assert blocks_of(one_answer(client))[0] == [0, 2]
        client.close()


def test_case_7_3_pipeline_stages_are_refused_with_what_to_do() -> None:
    parallel = ParallelConfig(pipeline_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size is 2.*size 1") as refusal:
        check_supported(engine_of(parallel), config_of(full()))
    assert "\n" not in str(refusal.value)


def test_case_7_3_ranks_have_keys_of_their_own() -> None:
    keyspace = KeySpace(NAMESPACE)
    hashes = [bytes([index]) * 32 for index in range(4)]
    keys = [
        key
        for rank in range(4)
        for group in range(2)
        for key in keyspace.keys(hashes, epoch=0, group_index=group, rank=rank)
    ]
    assert len(set(keys)) == 32


def test_case_7_5_engines_that_differ_in_their_dp_index_do_not_meet(tmp_path: Path) -> None:
    paths = []
    for dp_index in range(3):
        parallel = ParallelConfig(tensor_parallel_size=2)
        parallel.data_parallel_index = dp_index
        config = ConnectorConfig.from_vllm(engine_of(parallel, socket_dir=str(tmp_path)))
        paths += config.socket_paths(KeySpace(NAMESPACE))
    assert len(set(paths)) == 6


def test_case_7_5_live_socket_is_refused_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    first = Rank(tmp_path, 0)
    first.start()
    second = Rank(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"is served by process .* lookup_instance"):
        second.start()
    # The first is not hurt by the attempt.
    client = SocketLookupClient([first.path], namespace=NAMESPACE, lookup_timeout_ms=1000)
    first.hold(0, 5)
    client.ask(make_question())
    assert blocks_of(one_answer(client)) == [[5], []]
    first.stop()
    stale = socket_path(tmp_path, namespace=NAMESPACE, dp_index=0, instance="t", rank=0)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    assert stale.exists()
    claim(stale).release()
    second.start()
    second.stop()
    client.close()

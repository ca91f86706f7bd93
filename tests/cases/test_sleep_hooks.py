# SPDX-License-Identifier: Apache-2.0
"""vLLM's own GPU worker puts the connector to sleep and wakes it; its memory calls are replaced."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scheduler_rig import Engine
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from umbp.connector.connector import UMBPStoreConnector

pytestmark = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "unregister_kv_caches"),
    reason="vLLM before 0.33 does not tell connectors that it sleeps",
)


class NotedMemory:
    """vLLM's sleep backend: notes whether the connector had let go of KV memory."""

    def __init__(self, connector: UMBPStoreConnector) -> None:
        self._connector = connector
        self.calls: list[tuple[str, bool]] = []

    def suspend(self, level: int) -> None:
        self._note("suspend")

    def resume(self, tags: list[str] | None) -> None:
        self._note("resume")

    def discard(self, tags: tuple[str, ...]) -> None:
        self._note("discard")

    def _note(self, name: str) -> None:
        self.calls.append((name, self._connector.worker_side.is_asleep))


def test_kv_memory_is_unmapped_only_while_the_connector_sleeps(
    rig_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    engine = Engine(rig_folder, options={"lookup_instance": "hooks"})
    connector = UMBPStoreConnector(
        engine.vllm_config(), KVConnectorRole.WORKER, engine.kv_cache_config()
    )
    connector.register_kv_caches({"layer": engine.kv_cache()})
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1, 1), raising=False)
    memory = NotedMemory(connector)
    worker = SimpleNamespace(
        sleep_mode_backend=memory,
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
        _sleep_saved_parameters={},
        _sleep_saved_buffers={},
        _sleep_saved_draft_buffers={},
        synchronize_device=lambda: None,
    )
    try:
        Worker.sleep(worker, 1)
        Worker.wake_up(worker, ["weights"])
        assert connector.worker_side.is_asleep
        Worker.wake_up(worker, ["kv_cache"])
        assert not connector.worker_side.is_asleep
        Worker.discard(worker, ("kv_cache",))
        Worker.wake_up(worker, None)
        assert not connector.worker_side.is_asleep
    finally:
        connector.shutdown()
    assert memory.calls == [
        ("suspend", True),
        ("resume", True),
        ("resume", True),
        ("discard", True),
        ("resume", True),
    ]

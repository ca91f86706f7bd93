# SPDX-License-Identifier: Apache-2.0
"""Reset, sleep, shutdown, and what a killed process leaves behind."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import scheduler_rig
from connector.bench import Bench
from connector.fakes import FakeRequest, step_output
from connector.worker_bench import KEYS, make_side, plan, step
from scheduler_rig import Engine, MakeRig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from umbp.backends.host_buffer import open_buffer
from umbp.backends.registry import find_backend
from umbp.backends.socket_path import SocketClaim, claim, socket_path
from umbp.connector.connector import UMBPStoreConnector
from umbp.connector.metadata import StepMetadata, TransferPlan
from umbp.connector.support import refuse_sleep_mode
from umbp.errors import ConfigError

PROMPT = list(range(100, 150))


def bring_to(bench: Bench, state: str) -> tuple[FakeRequest, list[TransferPlan]]:
    """Brings a request to a state; returns it and its open transfers."""
    request = FakeRequest.of("a", 52)
    if state == "LOOKUP":
        bench.lookups.is_silent = True
        assert bench.side.matched_tokens(request, 0) == (None, False)
        return request, []
    if state == "LOADING":
        bench.store_hashes(3)
        bench.admit(request)
        return request, bench.idle_step().loads
    table = bench.admit(request)
    plans = bench.run_prompt(request, table).stores
    if state != "RUNNING":
        bench.pool.free(table)
    if state == "PREEMPTED":
        request.status.name = "PREEMPTED"
        request.num_computed_tokens = 0
        bench.idle_step(preempted=["a"])
    elif state == "STORING":
        bench.side.finished(request, (table,))
    return request, plans


@pytest.mark.parametrize("succeeded", [True, False])
@pytest.mark.parametrize("state", ["LOOKUP", "LOADING", "RUNNING", "PREEMPTED", "STORING"])
def test_case_10_2_reset_in_any_state_succeeds_and_leaks_no_pin(
    state: str, succeeded: bool
) -> None:
    bench = Bench(lookup_async=True)
    request, plans = bring_to(bench, state)
    pinned = bench.core.pinned_blocks
    assert bench.side.reset() is True
    # What is being copied is still being copied.
    assert bench.core.pinned_blocks == pinned
    metadata = bench.idle_step()
    assert metadata.epoch == 1
    for one in plans:
        assert one.epoch == 0
        bench.answer(one.job_id, succeeded=succeeded)
    assert bench.core.pinned_blocks == 0
    assert not bench.side.has_open_transfers()
    # Its life goes on, and stores nothing of before.
    if state == "RUNNING":
        request.num_computed_tokens = 52
        request.num_tokens = request.num_prompt_tokens = 100
        table = {"a": list(range(1, 8))}
        assert bench.side.step_metadata(step_output({"a": 48}, table)).stores == []


def test_case_10_2_keys_of_before_are_asked_for_by_nobody() -> None:
    worker, pool = make_side()
    # A store of before that is handed over late is stored under its own epoch.
    step(worker, StepMetadata(1, stores=[plan(1, epoch=0)]))
    (part,) = pool.jobs[1].parts
    bench = Bench()
    bench.lookups.is_silent = True
    bench.side.reset()
    bench.side._lookup_async = True
    bench.side.matched_tokens(FakeRequest.of("a", 100), 0)
    (question,) = bench.lookups.questions
    assert question.epoch == 1
    hashes = [key[-32:] for key in part.keys]
    asked = KEYS.keys(hashes, epoch=question.epoch, group_index=0, rank=3)
    assert not set(asked) & set(part.keys)


def test_case_10_2_engine_that_is_reset_under_load_restores_nothing_of_before(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    cold = rig.serve("a", PROMPT, outputs=3)
    rig.forget_local()
    rig.pool.holds_loads = rig.pool.holds_stores = True
    loading = rig.add("b", PROMPT, outputs=3)
    rig.step()
    rig.add("c", range(300, 350), outputs=3)
    rig.step()
    assert rig.scheduler.connector.reset_cache() is True
    rig.pool.release()
    rig.run()
    # The load was overtaken: its bytes are of before, so the request was computed.
    assert list(loading.output_token_ids) == cold
    assert rig.side.counters()["tokens_restored"] == 0
    rig.forget_local()
    rig.serve("d", [*range(300, 350), 1])
    assert rig.side.counters()["tokens_restored"] == 0
    rig.check_at_rest()


def test_case_10_4_what_was_stored_before_a_sleep_is_not_found_after_it(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    cold = rig.serve("a", PROMPT, outputs=3)
    stored = rig.side.counters()["tokens_stored"]
    assert stored > 0
    rig.sleep()
    # The engine wakes with other weights: KV of before would be wrong.
    monkeypatch.setattr(scheduler_rig, "_mix", lambda before, token: hash((token, before)) >> 2)
    rig.wake_up()
    assert rig.serve("b", PROMPT, outputs=3) != cold
    assert rig.side.counters()["tokens_restored"] == 0
    rig.forget_local()
    rig.serve("c", PROMPT, outputs=3)
    assert rig.side.counters()["tokens_restored"] > 0
    rig.check_at_rest()


def test_case_10_4_request_that_was_kept_through_a_sleep_ends_right(make_rig: MakeRig) -> None:
    cold = make_rig().serve("a", PROMPT, outputs=6)
    rig = make_rig()
    kept = rig.add("a", PROMPT, outputs=6)
    while rig.side.has_open_transfers() or not kept.output_token_ids:
        rig.step()
    rig.sleep()
    rig.wake_up()
    rig.run()
    assert list(kept.output_token_ids) == cold
    rig.check_at_rest()


def test_case_10_4_worker_gives_memory_up_and_takes_it_again(rig_folder: Path) -> None:
    engine = Engine(rig_folder, options={"lookup_instance": "sleeper"})
    connector = UMBPStoreConnector(
        engine.vllm_config(), KVConnectorRole.WORKER, engine.kv_cache_config()
    )
    try:
        # Nothing is registered yet.
        connector.unregister_kv_caches()
        connector.restore_kv_caches()
        connector.register_kv_caches({"layer": engine.kv_cache()})
        for _ in range(2):
            connector.unregister_kv_caches()
            assert connector.worker_side.is_asleep
        for _ in range(2):
            connector.restore_kv_caches()
            assert not connector.worker_side.is_asleep
    finally:
        connector.shutdown()


def test_case_10_4_sleep_mode_is_refused_where_memory_would_not_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert UMBPStoreConnector.supports_sleep_mode(None)
    config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    memory, other = find_backend("memory"), find_backend("standalone")
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    with pytest.raises(ConfigError, match=r"enable_sleep_mode is set.*--enable-sleep-mode"):
        refuse_sleep_mode(config, "memory", memory)
    monkeypatch.setattr(
        KVConnectorBase_V1, "unregister_kv_caches", lambda self: None, raising=False
    )
    refuse_sleep_mode(config, "memory", memory)
    with pytest.raises(ConfigError, match=r"backend 'standalone'.*--enable-sleep-mode"):
        refuse_sleep_mode(config, "standalone", other)
    config.model_config.enable_sleep_mode = False
    refuse_sleep_mode(config, "standalone", other)


HOLDER = """
import socket, sys, time
from pathlib import Path
from umbp.backends.socket_path import claim

claim(Path(sys.argv[1]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
time.sleep(600)
"""


def test_case_10_6_killed_process_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    path = socket_path(tmp_path, namespace=bytes(16), dp_index=0, instance="", rank=0)
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    assert path.exists()
    held = claim(path)
    assert isinstance(held, SocketClaim)
    held.release()
    assert set(path.parent.iterdir()) == set()


def test_case_10_6_late_exit_of_the_old_owner_takes_nothing_from_the_new(tmp_path: Path) -> None:
    path = socket_path(tmp_path, namespace=bytes(16), dp_index=0, instance="", rank=0)
    old = claim(path)
    old.release()
    new = claim(path)
    path.write_text("of the new one")
    old.release()
    assert path.read_text() == "of the new one"
    new.release()


def test_case_10_6_pool_is_nobodys_file() -> None:
    buffer = open_buffer(1 << 20)
    address = buffer.tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(word, 16) for word in line.split()[0].split("-"))
        if first <= address < last:
            # Private and without a name: it goes with the process.
            assert line.split()[1][3] == "p"
            assert len(line.split()) == 5
            break
    else:
        pytest.fail("the pool is not mapped")
    buffer.close()

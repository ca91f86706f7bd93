# SPDX-License-Identifier: Apache-2.0
"""What the embedded backend does to its process: calls that never return, forks and exits."""

import gc
import subprocess
import sys
import threading
import types
import weakref

import pytest
from embedded_rig import GROUP, PATIENCE_S, OpenRig

from umbp.errors import BackendError, BackendStalled
from umbp.testing.kv_memory import KVShape, make_kv_memory

pytestmark = pytest.mark.mori


def test_a_call_that_does_not_return_is_a_stall_and_keeps_its_memory(open_rig: OpenRig) -> None:
    rig = open_rig(transfer_timeout_ms=50)
    may_return = threading.Event()
    opened = rig.pool._opened
    assert opened is not None
    native = opened.client._native
    opened.client._native = types.SimpleNamespace(
        batch_exists=lambda names: may_return.wait() and native.batch_exists(names),
    )
    kv_memory = weakref.ref(opened.memory)
    rig.pool.store(rig.job({b"a": 0}))
    with pytest.raises(BackendStalled, match=r"store job 1 has run for .* its memory stays in use"):
        rig.results(1)
    rig.pool.close(0.01)
    with pytest.raises(BackendError, match="closed"):
        rig.pool.contains([b"a"])
    rig.kv = make_kv_memory(KVShape.LBH, [GROUP], block_count=1)
    del opened
    gc.collect()
    assert kv_memory() is not None
    may_return.set()


PROCESS = """
import os, sys, threading, time
from umbp.backends.base import TransferJob, TransferPart, WorkerSite
from umbp.backends.embedded import EmbeddedBackend, EmbeddedOptions
from umbp.testing.kv_memory import GroupShape, KVShape, make_kv_memory

site = WorkerSite(
    rank=0, rank_count=1, device_type="cpu", device_index=None, instance="x",
    transfer_timeout_ms=60000,
)
pool = EmbeddedBackend.open_worker(EmbeddedOptions(capacity_bytes=64 << 20), site)
kv = make_kv_memory(KVShape.LBH, [GroupShape(1, (1 << 20,))], block_count=4)
pool.register(kv.memory)
job = TransferJob(1, (TransferPart(0, [b"a"], [0]),), time.monotonic() + 60)
pool.store(job)
while not pool.poll():
    time.sleep(0.001)
assert pool.contains([b"a"]) == [True]
"""

ENDINGS = {
    "by its end": "",
    "after close": "pool.close(10)",
    "with a call that never returns": """
class Stuck:
    def __init__(self, native):
        self.native = native
        self.is_called = threading.Event()

    def batch_exists(self, names):
        self.is_called.set()
        threading.Event().wait()

stuck = pool._opened.client._native = Stuck(pool._opened.client._native)
pool.store(TransferJob(2, (TransferPart(0, [b"b"], [0]),), time.monotonic() + 60))
stuck.is_called.wait()
pool.close(0.01)
""",
    "as a forked child": """
child = os.fork()
if child == 0:
    try:
        pool.contains([b"a"])
    except Exception as error:
        assert "closed" in str(error), error
        sys.exit(0)
    sys.exit("the child could use its parent's pool")
assert os.waitpid(child, 0)[1] == 0
assert pool.contains([b"a"]) == [True]
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends(ending: str) -> None:
    """Neither a live client nor a forked or stuck one keeps a process from its end."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROCESS + ENDINGS[ending]],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr

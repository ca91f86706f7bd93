# SPDX-License-Identifier: Apache-2.0
"""What a job of the standalone pool ends in, by what the link and the client say. Needs no MORI."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from umbp.backends import mori_server
from umbp.backends.base import JobResult, TransferJob, TransferOutcome, TransferPart, WorkerSite
from umbp.backends.job_runner import TransferKind
from umbp.backends.mori_client import Moved
from umbp.backends.mori_columns import group_columns
from umbp.backends.mori_transfers import DirectTransfers
from umbp.backends.server_address import ServerAddress
from umbp.backends.standalone import StandaloneBackend, StandalonePool
from umbp.backends.standalone_options import StandaloneOptions
from umbp.errors import BackendUnavailable, ConfigError
from umbp.testing.kv_memory import GroupShape, KVShape, make_kv_memory

ADDRESS = "unix:///run/umbp/s.grpc.sock"
ALL = (0, 1)
GONE = BackendUnavailable("no server listens")


@attrs.define
class FakeLink:
    """Gives out a client whose calls fail for these objects, or raises, in this order."""

    script: list[Sequence[int] | BackendUnavailable]
    may_do_better: bool = True
    doubts: int = 0

    def client(self) -> Any:
        step = self.script.pop(0)
        if isinstance(step, BackendUnavailable):
            raise step
        return _Linked(_Client(tuple(step)))

    def doubt(self, _: Any) -> bool:
        self.doubts += 1
        return self.may_do_better


@attrs.frozen
class _Linked:
    client: Any


@attrs.frozen
class _Client:
    failed: tuple[int, ...]

    def load(self, names: Sequence[str], *_: Any) -> Moved:
        return Moved(len(names) - len(self.failed), self.failed)

    def store(self, names: Sequence[str], *_: Any, objects_per_put: int) -> Moved:
        assert objects_per_put >= 1
        return self.load(names)


def site(device_type: str = "cpu") -> WorkerSite:
    return WorkerSite(
        rank=0,
        rank_count=1,
        device_type=device_type,
        device_index=None,
        instance="test",
        transfer_timeout_ms=1000,
    )


def run(link: FakeLink, kind: TransferKind = TransferKind.LOAD) -> JobResult:
    """Runs a job of two objects."""
    pool: Any = StandalonePool(StandaloneOptions(address=ADDRESS), site(), library=None)  # type: ignore[arg-type]
    kv = make_kv_memory(KVShape.LBH, [GroupShape(1, (64,))], block_count=2)
    pool._columns = group_columns(kv.memory)
    pool._transfers = DirectTransfers(kv.memory, pool._columns)
    pool._link = link
    result: JobResult = pool._run(kind, TransferJob(1, (TransferPart(0, [b"a", b"b"], ALL),), 0.0))
    return result


@pytest.mark.parametrize("kind", TransferKind)
@pytest.mark.parametrize(
    ("script", "outcome", "doubts"),
    [
        ([()], TransferOutcome.DONE, 0),
        ([(1,)], TransferOutcome.FAILED, 0),
        ([GONE], TransferOutcome.NOT_ATTEMPTED, 0),
        ([ALL, ()], TransferOutcome.DONE, 1),
        ([ALL, (0,)], TransferOutcome.FAILED, 1),
        # Bytes may have moved, so it was attempted.
        ([ALL, GONE], TransferOutcome.FAILED, 1),
    ],
)
def test_a_job_in_which_nothing_succeeded_is_tried_once_more(
    script: list[Any], outcome: TransferOutcome, doubts: int, kind: TransferKind
) -> None:
    link = FakeLink(list(script))
    assert run(link, kind).outcome is outcome
    assert (link.script, link.doubts) == ([], doubts)


def test_a_job_is_not_tried_again_where_that_is_of_no_use() -> None:
    assert run(FakeLink([ALL], may_do_better=False)).failed_keys == (b"a", b"b")


def test_other_devices_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="does not move memory of device type 'xpu'"):
        StandaloneBackend.open_worker(StandaloneOptions(address=ADDRESS), site("xpu"))


def test_the_lease_of_a_server_is_read_from_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = ServerAddress(Path("/run/umbp/s.grpc.sock"))
    content = {"lease": b"A=1\0UMBP_DRAM_READ_LEASE_MS=70\0", "zero": b"UMBP_DRAM_READ_LEASE_MS=0"}
    answers = []
    for process in ("lease", "zero", "none", 0, None):
        (tmp_path / "environ").write_bytes(content.get(str(process), b"B=2\0"))
        monkeypatch.setattr(ServerAddress, "listener", lambda _, process=process: process)
        monkeypatch.setattr(mori_server, "Path", lambda _: tmp_path / "environ")
        answers.append(mori_server.server_read_lease_ms(address))
    assert answers == [70, 500, 500, None, None]

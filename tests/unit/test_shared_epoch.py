# SPDX-License-Identifier: Apache-2.0
"""The epoch in a file: shared by processes, random, and never an old one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbp.backends import shared_epoch
from umbp.backends.base import EpochSource
from umbp.backends.shared_epoch import SharedEpoch
from umbp.errors import BackendError, ConfigError

PROCESS = """
import sys
from pathlib import Path
from umbp.backends.shared_epoch import SharedEpoch

epoch = SharedEpoch(Path(sys.argv[1]))
for command in sys.stdin:
    print(epoch.advance() if command.strip() == "advance" else epoch.current(), flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.epoch"


@pytest.fixture
def other(path: Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def tell(process: "subprocess.Popen[str]", command: str) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{command}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_it_is_an_epoch_source_in_eight_private_bytes(path: Path) -> None:
    epoch = SharedEpoch(path)
    assert isinstance(epoch, EpochSource)
    assert 0 < epoch.current() < 1 << 63
    assert path.read_bytes() == epoch.current().to_bytes(8, "little")
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_processes_see_one_epoch(path: Path, other: "subprocess.Popen[str]") -> None:
    epoch = SharedEpoch(path)
    seen = {epoch.current()}
    assert tell(other, "current") == epoch.current()
    for _ in range(3):
        advanced = tell(other, "advance")
        assert advanced not in seen
        assert epoch.current() == advanced
        seen.add(advanced)
        advanced = epoch.advance()
        assert advanced not in seen
        assert tell(other, "current") == epoch.current() == advanced
        seen.add(advanced)


def test_a_file_that_vanished_is_made_anew_for_all(
    path: Path, other: "subprocess.Popen[str]"
) -> None:
    epoch = SharedEpoch(path)
    before = epoch.current()
    assert tell(other, "current") == before
    path.unlink()
    after = tell(other, "current")
    assert after != before
    assert epoch.current() == after
    path.unlink()
    assert epoch.advance() not in (before, after)
    assert tell(other, "current") == epoch.current()


@pytest.mark.parametrize("content", [b"", b"\1\2\3", bytes(8), b"\xff" * 8, bytes(range(9))])
def test_what_is_no_epoch_becomes_a_new_one(path: Path, content: bytes) -> None:
    epoch = SharedEpoch(path)
    before = epoch.current()
    path.write_bytes(content)
    assert epoch.current() != before
    assert SharedEpoch(path).current() == epoch.current()
    assert path.stat().st_size == 8


def test_a_file_that_cannot_be_made_is_one_line(path: Path) -> None:
    path.symlink_to("elsewhere")
    with pytest.raises(ConfigError, match=f"epoch file {path} cannot be used: ") as raised:
        SharedEpoch(path)
    assert "\n" not in str(raised.value)


def test_without_its_folder_the_epoch_is_the_process_s_own(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    epoch = SharedEpoch(folder / "server.epoch")
    before = epoch.current()
    (folder / "server.epoch").unlink()
    folder.rmdir()
    own = epoch.current()
    assert own != before
    assert epoch.current() == own
    with pytest.raises(BackendError, match="cannot be written"):
        epoch.advance()
    folder.mkdir()
    assert epoch.current() not in (before, own)


def test_a_writer_that_holds_the_lock_for_ever_is_waited_for_only_so_long(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(shared_epoch, "_LOCK_TIMEOUT_S", 0.05)
    epoch = SharedEpoch(path)
    before = epoch.current()
    descriptor = os.open(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(BackendError, match="cannot be written"):
        epoch.advance()
    assert epoch.current() == before
    os.close(descriptor)
    assert epoch.advance() != before


def test_close_is_idempotent(path: Path) -> None:
    epoch = SharedEpoch(path)
    epoch.close()
    epoch.close()

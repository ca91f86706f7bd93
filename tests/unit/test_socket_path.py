# SPDX-License-Identifier: Apache-2.0
"""Socket paths: private, apart for each engine and rank, and owned by one live process."""

import contextlib
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbp.backends import socket_path as module
from umbp.backends.socket_path import PATH_BYTES_MAX, claim, private_directory, socket_path
from umbp.errors import ConfigError

NAMESPACE = bytes(range(16))

HOLDER = """
import sys, socket, time
from pathlib import Path
from umbp.backends.socket_path import claim

path = Path(sys.argv[1])
held = claim(path)
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(path))
listener.listen()
print("ready", flush=True)
sys.stdin.read()
held.release()
"""


def make_path(base: Path, instance: str = "", *, dp_index: int = 0, rank: int = 0) -> Path:
    return socket_path(base, namespace=NAMESPACE, dp_index=dp_index, instance=instance, rank=rank)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        claim(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_path(tmp_path)


@pytest.fixture
def holder(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that serves the path."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_engines_and_ranks_have_paths_of_their_own(tmp_path: Path) -> None:
    paths = {
        make_path(tmp_path, instance, dp_index=dp_index, rank=rank)
        for instance in ("", "a", "b")
        for dp_index in (0, 1)
        for rank in (0, 1)
    }
    assert len(paths) == 12


def test_namespaces_have_paths_of_their_own(tmp_path: Path) -> None:
    other = socket_path(tmp_path, namespace=bytes(16), dp_index=0, instance="", rank=0)
    assert other != make_path(tmp_path)


def test_computing_a_path_touches_nothing(tmp_path: Path) -> None:
    make_path(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("instance", ["../x", "a/b", "a b", "-x", ".x", "a\n", "ä"])
def test_an_instance_that_is_no_part_of_a_file_name_is_refused(
    tmp_path: Path, instance: str
) -> None:
    with pytest.raises(ConfigError, match="option lookup_instance is "):
        make_path(tmp_path, instance)


def test_the_longest_path_works_and_one_byte_more_is_refused(tmp_path: Path) -> None:
    room = PATH_BYTES_MAX - len(os.fsencode(make_path(tmp_path, "x"))) + 1
    path = make_path(tmp_path, "x" * room)
    held = claim(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    held.release()
    with pytest.raises(ConfigError, match=r"108 bytes.*shorter socket_dir or lookup_"):
        make_path(tmp_path, "x" * (room + 1))


def test_a_namespace_of_another_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        socket_path(tmp_path, namespace=b"x", dp_index=0, instance="", rank=0)


def test_the_directory_is_made_private(path: Path) -> None:
    held = claim(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    held.release()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_refused(path: Path, mode: int) -> None:
    path.parent.mkdir()
    path.parent.chmod(mode)
    assert f"has mode {mode:04o} and must have 0700" in refusal(path)


def test_a_directory_of_somebody_else_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_directory(path.parent)
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    assert f"belongs to user {us}, not {us + 1}; set socket_dir" in refusal(path)


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    # Nobody can make a directory there, not even root.
    message = refusal(make_path(Path("/proc")))
    assert message.startswith("lookup socket directory /proc/umbp-")
    assert "set socket_dir to a directory" in message


def test_a_directory_that_is_not_writable_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_directory(path.parent)
    # Root may write everywhere, so the kernel's answer is put in its mouth.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "is not writable; set socket_dir" in refusal(path)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_directory_that_is_something_else_is_refused(path: Path, kind: str) -> None:
    if kind == "file":
        path.parent.write_text("")
        assert "cannot be made" in refusal(path)
    else:
        target = path.parent.parent / "elsewhere"
        target.mkdir(mode=0o700)
        path.parent.symlink_to(target)
        assert "is not a directory" in refusal(path)


def test_a_claimed_path_is_refused_within_the_process(path: Path) -> None:
    held = claim(path)
    assert refusal(path) == (
        f"lookup socket {path} is served by process {os.getpid()}; "
        "end it, or set lookup_instance to a name of its own for each engine"
    )
    held.release()
    claim(path).release()


def test_a_path_that_another_process_serves_is_refused(
    path: Path, holder: "subprocess.Popen[str]"
) -> None:
    assert f"{path} is served by process {holder.pid};" in refusal(path)


def test_a_live_listener_is_found_when_its_lock_file_is_gone(
    path: Path, holder: "subprocess.Popen[str]"
) -> None:
    path.with_name(path.name + ".lock").unlink()
    assert f"{path} is served by process {holder.pid};" in refusal(path)
    assert path.exists()


def test_a_path_left_by_a_killed_process_is_replaced(
    path: Path, holder: "subprocess.Popen[str]"
) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert path.exists()
    held = claim(path)
    assert not path.exists()
    held.release()


def test_a_claim_that_outlived_its_path_removes_nothing_of_the_next_owner(path: Path) -> None:
    first = claim(path)
    first.release()
    second = claim(path)
    path.write_text("of the second")
    first.release()
    assert path.exists()
    second.release()


def test_release_leaves_the_directory_empty(path: Path) -> None:
    held = claim(path)
    held.release()
    held.release()
    assert list(path.parent.iterdir()) == []


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    private_directory(path.parent)
    path.write_text("precious")
    assert "is another kind of file; move it away" in refusal(path)
    assert path.read_text() == "precious"
    path.unlink()
    claim(path).release()  # The refusal gave the lock back.


def test_a_lock_file_that_cannot_be_opened_is_refused(path: Path) -> None:
    private_directory(path.parent)
    path.with_name(path.name + ".lock").symlink_to("/dev/null")
    assert "lock cannot be opened" in refusal(path)


def test_many_claims_at_once_have_one_winner(path: Path) -> None:
    outcomes: list[object] = []
    start = threading.Barrier(8)

    def contend() -> None:
        start.wait()
        try:
            outcomes.append(claim(path))
        except ConfigError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [held for held in outcomes if isinstance(held, module.SocketClaim)]
    assert len(winners) == 1
    winners[0].release()


def test_a_lock_file_removed_while_it_is_being_locked_is_not_taken_for_the_path(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = claim(path)
    flock = fcntl.flock

    def release_first(descriptor: int, operation: int) -> None:
        first.release()  # After the second has opened the file, which is gone now.
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", release_first)
    second = claim(path)
    with pytest.raises(ConfigError, match="is served by process"):
        claim(path)
    second.release()


def test_a_listener_with_a_full_backlog_is_live(path: Path) -> None:
    private_directory(path.parent)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        result = 0
        while result == 0:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            result = waiting.connect_ex(str(path))
        assert f"{path} is served by another process;" in refusal(path)
    assert path.exists()

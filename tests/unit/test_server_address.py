# SPDX-License-Identifier: Apache-2.0
"""Where a server listens: what is refused, and what can be seen without asking it."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbp.backends.server_address import ServerAddress, parse_address
from umbp.errors import BackendUnavailable, ConfigError


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerAddress:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "own"
    directory.mkdir(mode=0o700)
    return ServerAddress(directory / "s.grpc.sock")


@pytest.fixture
def listener(address: ServerAddress) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address.path))
        listener.listen(1)
        yield listener


def test_an_address_names_a_socket_and_what_lies_beside_it() -> None:
    address = parse_address("unix:///run/umbp/../umbp/a.grpc.sock")
    assert str(address) == "unix:///run/umbp/a.grpc.sock"
    assert address.beside(".epoch") == Path("/run/umbp/a.epoch")
    assert address.socket_files == (Path("/run/umbp/a.grpc.sock"), Path("/run/umbp/a.fd.sock"))


def test_no_address_is_the_user_s_default() -> None:
    assert parse_address("").path.parent.name == f"umbp-{os.getuid()}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://127.0.0.1:50051", "expected unix:///absolute/path.grpc.sock"),
        ("127.0.0.1:50051", "expected unix:///absolute/path.grpc.sock"),
        ("/run/a.grpc.sock", "expected unix:///absolute/path.grpc.sock"),
        ("unix://relative.grpc.sock", "expected unix:///absolute/path.grpc.sock"),
        ("unix:///run/a.sock", "expected a name that ends in .grpc.sock"),
        ("unix:///run/.grpc.sock", "expected a name that ends in .grpc.sock"),
        (f"unix:///{'x' * 91}.grpc.sock", "1 bytes longer than"),
    ],
)
def test_other_addresses_are_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        parse_address(text)
    assert f"option address is {text!r}" in str(raised.value)


def test_the_longest_path_can_be_spelled_in_every_way() -> None:
    address = parse_address(f"unix:///{'x' * 90}.grpc.sock")
    spellings = [address.spelled(number).removeprefix("unix://") for number in range(4)]
    assert len(set(spellings)) == 4
    assert address.spelled(4) == address.spelled(0) == str(address)
    assert {os.path.abspath(spelling) for spelling in spellings} == {str(address.path)}
    assert max(map(len, spellings)) == 107


def test_a_listener_is_seen_with_its_process_id(
    address: ServerAddress, listener: socket.socket
) -> None:
    assert address.listener() == os.getpid()
    # Nobody accepts: the backlog is full after this one or the next.
    assert [address.listener() is not None for _ in range(3)] == [True] * 3
    listener.close()
    assert address.listener() is None


def test_nobody_listens_without_a_file(address: ServerAddress) -> None:
    assert address.listener() is None
    assert address.identity() is None


def test_another_server_is_another_file(address: ServerAddress, listener: socket.socket) -> None:
    before = address.identity()
    assert before == address.identity()
    assert before is not None
    address.path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(address.path))
        assert address.identity() not in (None, before)


def test_a_directory_of_others_is_refused(address: ServerAddress) -> None:
    address.require_private()
    address.path.parent.chmod(0o770)
    with pytest.raises(ConfigError, match=r"server socket directory .* has mode 0770 and must"):
        address.require_private()
    address.path.parent.rmdir()
    with pytest.raises(BackendUnavailable, match="start one with `umbp serve standalone"):
        address.require_private()
    address.make_private()
    address.require_private()

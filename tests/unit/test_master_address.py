# SPDX-License-Identifier: Apache-2.0
"""A master's address, and what is said of who is there. Needs no MORI."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from umbp.backends.master_address import MasterAddress, Presence, parse_master_address
from umbp.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:15557", "10.0.0.1", 15557),
        ("host.example:1", "host.example", 1),
        ("[::1]:65535", "::1", 65535),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    address = parse_master_address(text)
    assert (address.host, address.port, str(address)) == (host, port, text)


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:1x", "host:\uff11",
     "::1:5", "[host]:5", "[]:5", "http://host:5", "a b:5", "host:5\n"],
)  # fmt: skip
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"option master_address is .*, expected HOST:PORT"
    ) as got:
        parse_master_address(text)
    assert "\n" not in str(got.value)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_only_this_host_reaches_loopback(host: str, is_loopback: bool) -> None:
    assert MasterAddress(host, 1).is_loopback is is_loopback


@pytest.fixture
def listen() -> Iterator[Callable[[Callable[[socket.socket], None]], MasterAddress]]:
    """Listens, and treats the first connection as it is told."""
    opened: list[socket.socket] = []

    def start(treat: Callable[[socket.socket], None]) -> MasterAddress:
        listener = socket.create_server(("127.0.0.1", 0))
        opened.append(listener)

        def accept() -> None:
            connection, _ = listener.accept()
            opened.append(connection)
            treat(connection)

        threading.Thread(target=accept, daemon=True).start()
        return MasterAddress("127.0.0.1", listener.getsockname()[1])

    yield start
    for one in opened:
        one.close()


def test_who_answers_a_greeting_is_there(
    listen: Callable[[Callable[[socket.socket], None]], MasterAddress],
) -> None:
    heard: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        heard.append(connection.recv(100))
        connection.sendall(b"\0\0\0\x04\0\0\0\0\0")

    assert listen(answer).presence(10.0) is Presence.ANSWERS
    assert heard[0].startswith(b"PRI * HTTP/2.0\r\n")
    assert listen(lambda connection: connection.close()).presence(10.0) is Presence.GONE
    assert listen(lambda _: None).presence(0.05) is Presence.SILENT


def test_where_nobody_listens_nobody_is() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert MasterAddress("127.0.0.1", port).presence(10.0) is Presence.GONE


def test_a_host_is_known_by_the_address_it_would_send_from() -> None:
    assert MasterAddress("127.0.0.1", 9).address_towards() == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"to which this host has no route .* node_address"):
        MasterAddress("host.invalid", 9).address_towards()

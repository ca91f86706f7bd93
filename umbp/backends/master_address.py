# SPDX-License-Identifier: Apache-2.0
"""Where a master listens, and whether anybody there answers.

A client of MORI's may wait for a stopped master without limit, and while it is constructed or
destroyed it holds the interpreter's lock, so that no other thread could give up for it. Whoever
does either asks here first: the greeting of HTTP/2, which gRPC speaks, is answered by the master
itself and not by the kernel.
"""

import enum
import ipaddress
import socket
from typing import Final

import attrs

from umbp.errors import ConfigError

PORT_MAX: Final = 65535

_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""Connection preface and an empty SETTINGS frame. Source: RFC 9113, 3.4 and 6.5."""

_FRAME_HEADER_BYTES: Final = 9


class Presence(enum.Enum):
    """What there is at an address."""

    ANSWERS = "answers"
    """A server that works."""
    SILENT = "does not answer"
    """Nothing came in time: the server is stopped, or the network loses what is sent."""
    GONE = "is gone"
    """The connection was refused or ended."""


@attrs.frozen
class MasterAddress:
    """The address of a master.

    Attributes:
        host: Name or IP address.
        port: TCP port.
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it. A name counts only if it is ``localhost``."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def presence(self, timeout_s: float) -> Presence:
        """Greets the master, and says what came back.

        Args:
            timeout_s: How long each of connecting and answering may take.
        """
        try:
            with socket.create_connection((self.host, self.port), timeout_s) as connection:
                connection.sendall(_GREETING)
                is_answer = len(connection.recv(_FRAME_HEADER_BYTES)) > 0
        except TimeoutError:
            return Presence.SILENT
        except OSError:
            return Presence.GONE
        return Presence.ANSWERS if is_answer else Presence.GONE

    def address_towards(self) -> str:
        """Returns the IP address of this host from which it would reach the master.

        Raises:
            ConfigError: It has none, or the master's name is not known.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, target = found[0]
            with socket.socket(family, kind, protocol) as unsent:
                # Chooses a route and sends nothing.
                unsent.connect(target)
                return str(unsent.getsockname()[0])
        except OSError as error:
            raise ConfigError(
                f"option master_address is {str(self)!r}, to which this host has no route "
                f"({error.strerror}); correct it, or set option node_address"
            ) from error


def parse_master_address(text: str, what: str = "option master_address") -> MasterAddress:
    """Reads ``HOST:PORT``; an IPv6 address goes in brackets.

    Args:
        text: What was given.
        what: Who gave it, for the message.

    Raises:
        ConfigError: It is something else.
    """
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_number = port.isascii() and port.isdecimal() and 1 <= int(port) <= PORT_MAX
    is_one_host = bool(bare) and not set(bare) & set("/[] \t\n") and (":" in bare) == is_bracketed
    if not (colon and is_number and is_one_host):
        raise ConfigError(
            f"{what} is {text!r}, expected HOST:PORT with a port from 1 to {PORT_MAX}, such as "
            "10.0.0.1:15557"
        )
    return MasterAddress(bare, int(port))

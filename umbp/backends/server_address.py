# SPDX-License-Identifier: Apache-2.0
"""Where a standalone server listens: a Unix socket in a private directory, and what lies beside it.

Two questions are answered without asking the server, which may be stopped and then never answers:
whether anybody listens, and whether it is still the same server. A server makes its socket file
anew when it starts, so another file means another server, with an empty pool, that knows no memory.
"""

import os
import socket
import stat
import struct
import tempfile
from pathlib import Path
from typing import Final

import attrs

from umbp.backends.socket_path import PATH_BYTES_MAX, private_directory
from umbp.errors import BackendUnavailable, ConfigError

SCHEME: Final = "unix://"
SUFFIX: Final = ".grpc.sock"
"""MORI puts a second socket beside this one, with ``.fd.sock`` in place of the suffix."""

_SPELLINGS: Final = 4
_CONNECT_TIMEOUT_S: Final = 0.2
_PEER_CREDENTIALS: Final = struct.Struct("3i")
"""struct ucred: pid, uid, gid. Source: unix(7)."""

FileIdentity = tuple[int, int, int]
"""Device, inode and time of change; inodes alone are used again."""


@attrs.frozen
class ServerAddress:
    """The address of a server.

    Attributes:
        path: The socket's path, absolute.
    """

    path: Path

    def __str__(self) -> str:
        return f"{SCHEME}{self.path}"

    def spelled(self, number: int) -> str:
        """Returns the address in one of several spellings, which mean the same file.

        gRPC keeps one connection per spelling in a process, and after failures waits, for up to two
        minutes, before it tries that one again. Another spelling is tried at once.
        """
        directory = str(self.path.parent).rstrip("/")
        return f"{SCHEME}{directory}{'/.' * (number % _SPELLINGS)}/{self.path.name}"

    def beside(self, suffix: str) -> Path:
        """Returns a path beside the socket, such as ``server.epoch`` for ``.epoch``."""
        return self.path.with_name(self.path.name.removesuffix(SUFFIX) + suffix)

    @property
    def socket_files(self) -> tuple[Path, Path]:
        """The files that a server makes."""
        return self.path, self.beside(".fd.sock")

    def identity(self) -> FileIdentity | None:
        """Tells one server from the next; None when there is no socket. Costs microseconds."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return (found.st_dev, found.st_ino, found.st_ctime_ns)

    def listener(self) -> int | None:
        """Returns the process id of who listens, 0 if that cannot be seen; None if nobody does.

        A stopped server listens, too: the kernel accepts for it.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_TIMEOUT_S)
            try:
                probe.connect(os.fspath(self.path))
            except (TimeoutError, BlockingIOError):
                return 0  # Its backlog is full, so it is there.
            except OSError:
                return None
            credentials = probe.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size
            )
        process_id: int = _PEER_CREDENTIALS.unpack(credentials)[0]
        return process_id

    def require_private(self) -> None:
        """Refuses a directory in which somebody else could put a server of theirs.

        Raises:
            BackendUnavailable: There is no such directory, so no server.
            ConfigError: Others may write there.
        """
        directory = self.path.parent
        try:
            found = directory.stat()
        except OSError as error:
            raise BackendUnavailable(
                f"no server at {self}: {directory}: {error.strerror}; {how_to_start(self)}"
            ) from error
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            private_directory(directory, what="server socket directory", advice=_ADVICE)

    def make_private(self) -> None:
        """Makes the directory where it is missing.

        Raises:
            ConfigError: It cannot be made, or others may enter it.
        """
        private_directory(self.path.parent, what="server socket directory", advice=_ADVICE)


_ADVICE: Final = "set option address to a path in a directory that umbp may make for itself alone"


def parse_address(text: str) -> ServerAddress:
    """Reads the option ``address``; an empty one is the user's default.

    Raises:
        ConfigError: It is no Unix socket, or its path is relative or too long.
    """
    if not text:
        return ServerAddress(default_path())
    path = Path(text.removeprefix(SCHEME))
    if not text.startswith(SCHEME) or not path.is_absolute():
        raise ConfigError(
            f"option address is {text!r}, expected unix:///absolute/path{SUFFIX}: a standalone "
            "server serves its own host, over a Unix socket"
        )
    path = Path(os.path.abspath(path))
    length = len(os.fsencode(path)) + 2 * (_SPELLINGS - 1)
    if not path.name.endswith(SUFFIX) or path.name == SUFFIX:
        raise ConfigError(f"option address is {text!r}, expected a name that ends in {SUFFIX}")
    if length > PATH_BYTES_MAX:
        raise ConfigError(
            f"option address is {text!r}, {length - PATH_BYTES_MAX} bytes longer than a Unix "
            "socket's path may be; choose a shorter one"
        )
    return ServerAddress(path)


def default_path() -> Path:
    """Returns where the one server of a user listens when no address is given."""
    return Path(tempfile.gettempdir()) / f"umbp-{os.getuid()}" / f"server{SUFFIX}"


def how_to_start(address: ServerAddress) -> str:
    """Says what to do when there is no server."""
    return (
        f"start one with `umbp serve standalone --address {address} --capacity-bytes ...`, or set "
        "option auto_start"
    )

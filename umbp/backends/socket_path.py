# SPDX-License-Identifier: Apache-2.0
"""Where a rank's lookup socket lies, and whose it is.

The sockets lie in one directory per user, ``umbp-<uid>`` under a base directory, that nobody else
may enter. A path belongs to at most one process: its owner holds an ``flock`` on a lock file beside
the socket for as long as it lives. The kernel drops the lock when the owner dies, however it dies,
so a socket file without a holder is stale and may be replaced. A forked child shares the lock.

The lock file alone is not trusted, since someone may have removed it: a socket that answers a
connection is live too.
"""

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import struct
from pathlib import Path
from typing import Final

from umbp.errors import ConfigError
from umbp.keys import NAMESPACE_BYTES

DIRECTORY_OPTION: Final = "socket_dir"
INSTANCE_OPTION: Final = "lookup_instance"
"""Options that messages name; the connector declares them."""

PATH_BYTES_MAX: Final = 107
"""sockaddr_un has 108 bytes, and the last one is a zero. Source: unix(7)."""

_DIRECTORY_ADVICE: Final = f"set {DIRECTORY_OPTION} to a directory in which umbp may create its own"
_INSTANCE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NAMESPACE_DIGITS: Final = 16
"""Hex digits of the namespace in a file name, for people; the protocol compares all of it."""

_CONNECT_TIMEOUT_S: Final = 1.0
"""A Unix socket's connect succeeds or fails at once, unless the listener's backlog is full."""

_PEER_CREDENTIALS: Final = struct.Struct("3i")
"""struct ucred: pid, uid, gid. Source: unix(7)."""


def socket_path(
    directory: Path | str, *, namespace: bytes, dp_index: int, instance: str, rank: int
) -> Path:
    """Computes where a rank serves its lookups. Touches no file.

    Args:
        directory: The base directory.
        namespace: Digest of the namespace.
        dp_index: Data-parallel index of the engine.
        instance: Name that sets engines of one namespace on one host apart; may be empty.
        rank: Index of the worker in its engine.

    Raises:
        ConfigError: The instance cannot be part of a file name, or the path is too long.
    """
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"namespace must have {NAMESPACE_BYTES} bytes, got {len(namespace)}")
    if instance and not _INSTANCE.fullmatch(instance):
        raise ConfigError(
            f"option {INSTANCE_OPTION} is {instance!r}, "
            "expected letters, digits, '_', '-' and '.', and no '-' or '.' first"
        )
    words = [namespace.hex()[:_NAMESPACE_DIGITS], f"dp{dp_index}", f"rank{rank}"]
    if instance:
        words.insert(2, instance)
    name = "-".join(words) + ".sock"
    path = private_directory_of(directory) / name
    length = len(os.fsencode(path))
    if length > PATH_BYTES_MAX:
        raise ConfigError(
            f"lookup socket {path} has {length} bytes, a Unix socket's path has at most "
            f"{PATH_BYTES_MAX}; set a shorter {DIRECTORY_OPTION} or {INSTANCE_OPTION}"
        )
    return path


def private_directory_of(directory: Path | str) -> Path:
    """Names the directory of this user's lookup sockets below a base directory. Touches no file."""
    return Path(os.path.abspath(directory)) / f"umbp-{os.getuid()}"


def private_directory(
    path: Path, *, what: str = "lookup socket directory", advice: str = _DIRECTORY_ADVICE
) -> None:
    """Makes sure that a directory is there, ours, writable, and closed to everyone else.

    Args:
        path: The directory; its parent must exist.
        what: What a message calls it.
        advice: What a message says to do.

    Raises:
        ConfigError: It cannot be made, or is not like that.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be made: {error.strerror}; {advice}") from error
    mode = stat.S_IMODE(found.st_mode)
    problem = None
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a directory"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}, not {os.geteuid()}"
    elif mode & 0o077:
        problem = f"has mode {mode:04o} and must have 0700 (chmod 700 {path})"
    elif not os.access(path, os.W_OK | os.X_OK):
        problem = "is not writable"
    if problem:
        raise ConfigError(f"{what} {path} {problem}; {advice}")


class SocketClaim:
    """The right to bind one path, held until ``release`` or the end of the process.

    Attributes:
        path: The socket's path; no file is there when the claim is made.
    """

    def __init__(self, path: Path, lock_descriptor: int) -> None:
        self.path = path
        self._lock_descriptor: int | None = lock_descriptor

    def release(self) -> None:
        """Removes the socket and the lock file, and gives the path up. Idempotent."""
        if self._lock_descriptor is None:
            return
        descriptor, self._lock_descriptor = self._lock_descriptor, None
        # Files go while the lock is held, so that they can be no one else's.
        self.path.unlink(missing_ok=True)
        _lock_path(self.path).unlink(missing_ok=True)
        os.close(descriptor)


def claim(path: Path) -> SocketClaim:
    """Takes a path for this process, and removes a stale socket from it.

    Raises:
        ConfigError: The directory is not private, or somebody serves the path.
    """
    private_directory(path.parent)
    descriptor = _lock(path)
    try:
        _remove_stale(path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return SocketClaim(path, descriptor)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock(path: Path) -> int:
    """Locks the lock file and returns its descriptor, which Python makes close-on-exec."""
    lock_path = _lock_path(path)
    while True:
        try:
            descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"lookup socket lock {lock_path} cannot be opened: {error.strerror}; remove it"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise _live(path, int(holder) if holder.isdecimal() else None) from None
        if _is_file(lock_path, descriptor):
            return descriptor
        # Its last holder removed the file between our open and our lock: a new one is needed.
        os.close(descriptor)


def _is_file(path: Path, descriptor: int) -> bool:
    """Whether a path still names the file that is open."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"lookup socket {path} is another kind of file; move it away")
    served, pid = _listener(path)
    if served:
        raise _live(path, pid)
    path.unlink(missing_ok=True)


def live_sockets(directory: Path) -> dict[Path, int | None]:
    """Returns the lookup sockets in a private directory that somebody serves, and their pids.

    Args:
        directory: The directory; it need not be there.
    """
    try:
        found = sorted(path for path in directory.glob("*-dp*rank*.sock") if path.is_socket())
    except OSError:
        return {}
    listeners = {path: _listener(path) for path in found}
    return {path: pid for path, (served, pid) in listeners.items() if served}


def _listener(path: Path) -> tuple[bool, int | None]:
    """Says whether somebody serves a socket, and the pid of who does where it can be seen."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        result = probe.connect_ex(os.fspath(path))
        if result == 0:
            return True, _peer(probe)
    # Otherwise somebody listens, for example with a full backlog.
    return result not in (errno.ECONNREFUSED, errno.ENOENT), None


def _peer(probe: socket.socket) -> int | None:
    """Returns the listener's pid; None when it is in a pid namespace that we do not see."""
    credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid: int = _PEER_CREDENTIALS.unpack(credentials)[0]
    return pid or None


def _live(path: Path, pid: int | None) -> ConfigError:
    owner = "another process" if pid is None else f"process {pid}"
    return ConfigError(
        f"lookup socket {path} is served by {owner}; "
        f"end it, or set {INSTANCE_OPTION} to a name of its own for each engine"
    )

# SPDX-License-Identifier: Apache-2.0
"""Starts ``umbp_standalone_server``: checked options, a private socket, the same HIP, a log.

What MORI 1.2.4 does and what is done about it:

* A second server takes the socket of a first one that lives, and clients of the two never meet. A
  start is refused while somebody listens, and starts of one address take turns.
* A server that is ended leaves its socket files. They are removed here, before and after.
* Variables that name a master turn it into a node of a cluster. They are left out.
"""

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs

from umbp.backends.child_process import ChildProcess, add_library_directories, log_tail, open_log
from umbp.backends.host_limits import memory_limits
from umbp.backends.mori_client import MoriClient, server_config
from umbp.backends.mori_library import (
    DEFAULT_READ_LEASE_MS,
    READ_LEASE_VARIABLE,
    MoriLibrary,
    load_mori,
    parse_read_lease_ms,
    runtime_directories,
    server_binary,
)
from umbp.backends.server_address import ServerAddress, how_to_start
from umbp.errors import BackendUnavailable, ConfigError

_BINARY: Final = "umbp_standalone_server"
_POLL_S: Final = 0.02
_LEFT_OUT: Final = (
    "UMBP_IO_ENGINE_HOST",
    "UMBP_MASTER_ADDRESS",
    "UMBP_NODE_ADDRESS",
    "UMBP_NODE_ID",
    # With the stand-in HIP runtime a server's own memory is no device's, whatever its clients' is.
    "UMBP_HIP_HOST_REMAP",
)


@attrs.frozen(kw_only=True)
class ServerSettings:
    """What a server is started with.

    Attributes:
        address: Where it listens.
        capacity_bytes: Host memory of its pool.
        read_lease_ms: How long a get protects its objects from eviction.
        high_watermark: Share of the pool at which a store evicts. No object may be larger than the
            rest.
        low_watermark: Share of the pool at which eviction ends.
        page_size_bytes: Size of a page; an object takes whole pages. None: MORI's, 64 KiB.
        prefault: Whether to touch all of the pool at start.
        log_level: Log level of MORI; None leaves it to the environment.
    """

    address: ServerAddress
    capacity_bytes: int
    read_lease_ms: int
    high_watermark: float = 0.9
    low_watermark: float = 0.8
    page_size_bytes: int | None = None
    prefault: bool = False
    log_level: str | None = None


def check_settings(settings: ServerSettings) -> None:
    """Refuses what MORI would take and then not work with.

    Raises:
        ConfigError: The watermarks are in the wrong order, or the memory is not there.
    """
    low, high = settings.low_watermark, settings.high_watermark
    if not 0 < low < high <= 1:
        raise ConfigError(
            f"option low_watermark is {low} and option high_watermark is {high}, expected "
            "0 < low_watermark < high_watermark <= 1"
        )
    limits = memory_limits()
    if limits is not None and settings.capacity_bytes > limits.available_bytes:
        raise ConfigError(
            f"option capacity_bytes is {settings.capacity_bytes}, but "
            f"{limits.available_bytes} bytes are available; set it to at most that"
        )


def server_environment(
    settings: ServerSettings, inherited: Mapping[str, str], library_directories: list[str]
) -> dict[str, str]:
    """Builds the environment of a server.

    Args:
        settings: What it is started with.
        inherited: The variables to start from.
        library_directories: Where its HIP runtime lies, if not where the system looks.
    """
    result = {name: value for name, value in inherited.items() if name not in _LEFT_OUT}
    add_library_directories(result, library_directories)
    result["UMBP_DRAM_CAPACITY"] = str(settings.capacity_bytes)
    result["UMBP_DRAM_HIGH_WM"] = str(settings.high_watermark)
    result["UMBP_DRAM_LOW_WM"] = str(settings.low_watermark)
    result["UMBP_DRAM_PREFAULT"] = "1" if settings.prefault else "0"
    result[READ_LEASE_VARIABLE] = str(settings.read_lease_ms)
    result["UMBP_SSD_ENABLED"] = "0"
    if settings.page_size_bytes is not None:
        result["UMBP_EMBEDDED_DRAM_PAGE_SIZE"] = str(settings.page_size_bytes)
    if settings.log_level is not None:
        result["MORI_UMBP_LOG_LEVEL"] = settings.log_level
    return result


@contextlib.contextmanager
def claimed(address: ServerAddress, give_up_s: float) -> Iterator[None]:
    """Holds the right to start a server at an address.

    Args:
        address: Where it will listen.
        give_up_s: Until when to wait for it, by ``time.monotonic()``.

    Raises:
        ConfigError: The directory is not private, or somebody else has held it all the time.
    """
    address.make_private()
    path = address.beside(".lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"server lock {path} cannot be opened: {error.strerror}; remove it"
        ) from error
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= give_up_s:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                raise ConfigError(
                    f"process {holder} has started or is starting the server at {address}; end it, "
                    "or set option address to another one"
                )
            time.sleep(_POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def refuse_listener(address: ServerAddress) -> None:
    """Refuses to start a server where one listens.

    Raises:
        ConfigError: One does.
    """
    process_id = address.listener()
    if process_id is not None:
        raise ConfigError(
            f"process {process_id} listens at {address}; end it, or set option address to another "
            "one"
        )


def remove_sockets(address: ServerAddress) -> None:
    """Removes the socket files of a server that has ended.

    Raises:
        ConfigError: Something else is there.
    """
    for path in address.socket_files:
        if path.exists() and not path.is_socket():
            raise ConfigError(f"server socket {path} is another kind of file; move it away")
        path.unlink(missing_ok=True)


class ServerProcess:
    """A server that is a child of this process. The address must be claimed.

    Args:
        settings: What to start.
        log_path: Where it logs; None for this process's own output.

    Raises:
        ConfigError: Somebody listens at the address.
        BackendUnavailable: MORI is missing.
    """

    def __init__(self, settings: ServerSettings, log_path: Path | None) -> None:
        refuse_listener(settings.address)
        self._address = settings.address
        command, environment = _command(settings)
        remove_sockets(self._address)
        self._child = ChildProcess(
            command, environment, log_path, what=f"the server at {settings.address}"
        )

    @property
    def process_id(self) -> int:
        """The server's process id."""
        return self._child.process_id

    def require_running(self) -> None:
        """Raises when the server has ended.

        Raises:
            BackendUnavailable: It has; the message ends with the end of its log.
        """
        self._child.require_running()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for the server's end, and returns its status; None when it runs on."""
        return self._child.wait(timeout_s)

    def stop(self) -> None:
        """Ends the server, also one that is stopped, and removes its sockets. Idempotent."""
        self._child.stop()
        if self._address.listener() is None:
            remove_sockets(self._address)


def ensure_started(settings: ServerSettings, give_up_s: float) -> None:
    """Starts a server that outlives this process, unless somebody listens already.

    Args:
        settings: What to start.
        give_up_s: Until when to wait, by ``time.monotonic()``.

    Raises:
        ConfigError: The settings or the address cannot work.
        BackendUnavailable: The server has not come up; the message ends with the end of its log.
    """
    if settings.address.listener() is not None:
        return
    check_settings(settings)
    with claimed(settings.address, give_up_s):
        if settings.address.listener() is not None:
            return  # Another rank or engine was first.
        command, environment = _command(settings)
        remove_sockets(settings.address)
        log_path = settings.address.beside(".log")
        with open_log(log_path) as log:
            # The shell ends at once, and so the server is no child of this process: nobody has to
            # wait for it, and a signal to the engine's group does not reach it.
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                check=True,
            )
        try:
            wait_until_listening(settings.address, give_up_s)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"{error}{log_tail(log_path)}") from error


def wait_until_listening(
    address: ServerAddress, give_up_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Waits until somebody listens at an address.

    Args:
        address: The address.
        give_up_s: Until when, by ``time.monotonic()``.
        check: Called between two looks; raises when there is no more hope.

    Raises:
        BackendUnavailable: Nobody does.
    """
    while address.listener() is None:
        check()
        if time.monotonic() >= give_up_s:
            raise BackendUnavailable(f"no server at {address}: {how_to_start(address)}")
        time.sleep(_POLL_S)


def server_read_lease_ms(address: ServerAddress) -> int | None:
    """Reads for how long the server that listens protects what is read, from its environment.

    Returns:
        Milliseconds; None where the process cannot be seen, as in another container.
    """
    process_id = address.listener()
    if not process_id:
        return None
    try:
        content = Path(f"/proc/{process_id}/environ").read_bytes()
    except OSError:
        return None
    prefix = f"{READ_LEASE_VARIABLE}=".encode()
    for entry in content.split(b"\0"):
        if entry.startswith(prefix):
            return parse_read_lease_ms(entry[len(prefix) :].decode(errors="replace"))
    return DEFAULT_READ_LEASE_MS


def shake_hands(library: MoriLibrary, address: ServerAddress, timeout_ms: int) -> None:
    """Connects a client of MORI's, which shows that it is MORI's server that listens.

    Raises:
        BackendUnavailable: It does not answer.
    """
    config = server_config(library, str(address), timeout_ms=timeout_ms)
    MoriClient(library, config, put_retries=0, read_lease_ms=timeout_ms).close()


def _command(settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
    """Returns the command line and the environment of a server.

    Raises:
        BackendUnavailable: MORI is missing.
    """
    load_mori(settings.log_level)
    directories = runtime_directories()
    environment = server_environment(settings, os.environ, directories)
    return [str(server_binary(_BINARY)), str(settings.address)], environment


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

# SPDX-License-Identifier: Apache-2.0
"""The epoch that all engines of one server share: a number in a small file beside its socket.

It cannot be in the pool, which evicts. The file holds eight bytes, little-endian, that every
process maps into memory. A new epoch is a random number of 63 bits, so none comes back, also when
the file was lost and is made anew. Writers take turns by ``flock``.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from umbp.errors import BackendError, ConfigError

logger = logging.getLogger(__name__)

EPOCH_BYTES: Final = 8
_NUMBER: Final = struct.Struct("<Q")
_EPOCH_BITS: Final = 63
_LOCK_TIMEOUT_S: Final = 2.0
"""A writer holds the lock for microseconds, unless it is stopped."""


class SharedEpoch:
    """An ``EpochSource`` in a file. Used by one thread.

    Args:
        path: The file; made when it is missing.

    Raises:
        ConfigError: It cannot be made or used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mapped: mmap.mmap | None = None
        self._identity = (0, 0)
        self._own_epoch: int | None = None
        try:
            self._open()
        except OSError as error:
            raise ConfigError(
                f"epoch file {path} cannot be used: {error.strerror or error}; make its directory "
                "writable for this user alone, or remove the file"
            ) from error

    def current(self) -> int:
        """Returns the present epoch. One ``stat``, no other system call, unless the file is new.

        When the file is gone and cannot be made anew, the epoch is one of this process alone:
        nothing that others store is found, and nothing old is.
        """
        try:
            found = os.stat(self._path)
            is_good = (found.st_dev, found.st_ino) == self._identity
            is_good = is_good and found.st_size == EPOCH_BYTES
        except OSError:
            is_good = False
        if not is_good or (epoch := self._read()) == 0:
            return self._reopen()
        self._own_epoch = None
        return epoch

    def advance(self) -> int:
        """Begins a new epoch for every engine, and returns it.

        Raises:
            BackendError: The file cannot be written; the epoch is where it was.
        """
        try:
            with self._locked() as descriptor:
                epoch = _write_new(descriptor)
                self._map(descriptor)
        except OSError as error:
            raise BackendError(
                f"epoch file {self._path} cannot be written: {error.strerror or error}"
            ) from error
        self._own_epoch = None
        return epoch

    def close(self) -> None:
        """Unmaps the file. Idempotent."""
        mapped, self._mapped = self._mapped, None
        self._identity = (0, 0)
        if mapped is not None:
            mapped.close()

    def _read(self) -> int:
        if self._mapped is None:
            return 0
        epoch: int = _NUMBER.unpack_from(self._mapped)[0]
        return epoch

    def _reopen(self) -> int:
        try:
            epoch = self._open()
        except OSError as error:
            if self._own_epoch is None:
                self._own_epoch = _new_epoch()
                logger.warning("epoch file %s is gone: %s; nothing is shared", self._path, error)
            return self._own_epoch
        self._own_epoch = None
        return epoch

    def _open(self) -> int:
        """Maps the file, and makes it or its content where that is missing."""
        with self._locked() as descriptor:
            content = os.pread(descriptor, EPOCH_BYTES + 1, 0)
            if len(content) != EPOCH_BYTES or not 0 < _NUMBER.unpack(content)[0] < 1 << _EPOCH_BITS:
                _write_new(descriptor)
            self._map(descriptor)
        return self._read()

    def _map(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) == self._identity:
            return
        self.close()
        self._mapped = mmap.mmap(descriptor, EPOCH_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        self._identity = (found.st_dev, found.st_ino)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Opens the file that is at the path now, and locks it.

        Raises:
            OSError: It cannot be opened, or stays locked.
        """
        give_up_s = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
            try:
                _lock(descriptor, give_up_s)
                if self._is_at_path(descriptor):
                    yield descriptor
                    return
                # Removed between our open and our lock: the next one is another file.
            finally:
                # Closing alone would not do: ``mmap`` keeps a duplicate, which shares the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def _is_at_path(self, descriptor: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        return False


def _lock(descriptor: int, give_up_s: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.001)


def _new_epoch() -> int:
    return secrets.randbelow((1 << _EPOCH_BITS) - 1) + 1


def _write_new(descriptor: int) -> int:
    """Writes a new number in one call, then cuts what is behind it."""
    epoch = _new_epoch()
    os.pwrite(descriptor, _NUMBER.pack(epoch), 0)
    os.ftruncate(descriptor, EPOCH_BYTES)
    return epoch

# SPDX-License-Identifier: Apache-2.0
"""A lock that many may share or one may have alone."""

import contextlib
import threading
from collections.abc import Iterator


class SharedLock:
    """Held by any number of sharers, or by one owner.

    Whoever waits to own it keeps new sharers out, so a stream of sharers cannot starve an owner.
    It is not reentrant.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharer_count = 0
        self._waiting_owner_count = 0
        self._is_owned = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the lock together with other sharers."""
        with self._changed:
            while self._is_owned or self._waiting_owner_count:
                self._changed.wait()
            self._sharer_count += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharer_count -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Holds the lock alone."""
        with self._changed:
            self._waiting_owner_count += 1
            try:
                while self._is_owned or self._sharer_count:
                    self._changed.wait()
            finally:
                self._waiting_owner_count -= 1
            self._is_owned = True
        try:
            yield
        finally:
            with self._changed:
                self._is_owned = False
                self._changed.notify_all()

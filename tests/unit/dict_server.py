# SPDX-License-Identifier: Apache-2.0
"""The other side of ``shared_dict``: a process that keeps objects in a dict.

Run with the path of its socket and its capacity in bytes. It says ``ready`` when it listens.
"""

import sys
import threading
from collections import OrderedDict
from multiprocessing.connection import Connection, Listener
from typing import Any


class Objects:
    """Objects by key, least recently loaded first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._objects: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def empty(self, capacity_bytes: int) -> None:
        """Begins anew, which is faster than a new process."""
        with self._lock:
            self._objects.clear()
            self._capacity_bytes = capacity_bytes

    def contains(self, keys: list[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._objects for key in keys]

    def load(self, sizes: dict[bytes, int]) -> list[bytes | None]:
        """Returns all objects, or, when one is missing or of another size, None for each such."""
        with self._lock:
            found = [self._objects.get(key) for key in sizes]
            found = [
                content if content is not None and len(content) == size else None
                for content, size in zip(found, sizes.values(), strict=True)
            ]
            if None not in found:
                for key in sizes:
                    self._objects.move_to_end(key)
            return found

    def store(self, content: dict[bytes, bytes]) -> int:
        """Stores what is new and returns how many bytes that were."""
        stored_bytes = 0
        with self._lock:
            for key, new in content.items():
                if key in self._objects:
                    continue
                while sum(map(len, self._objects.values())) + len(new) > self._capacity_bytes:
                    self._objects.popitem(last=False)
                self._objects[key] = new
                stored_bytes += len(new)
        return stored_bytes


def serve(connection: "Connection[Any, Any]", objects: Objects) -> None:
    try:
        while True:
            operation, argument = connection.recv()
            connection.send(getattr(objects, operation)(argument))
    except (EOFError, OSError):
        connection.close()


def main(path: str, capacity_bytes: str) -> None:
    objects = Objects(int(capacity_bytes))
    with Listener(path, "AF_UNIX") as listener:
        print("ready", flush=True)  # noqa: T201 - whoever started it waits for that
        while True:
            connection = listener.accept()
            threading.Thread(target=serve, args=(connection, objects), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])

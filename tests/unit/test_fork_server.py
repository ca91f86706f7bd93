# SPDX-License-Identifier: Apache-2.0
"""The fork servers of the tests stand beside each other."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
from fork_server import start_fork_server

PATIENCE_S = 30.0
_context = multiprocessing.get_context("forkserver")


@contextmanager
def a_process() -> Iterator[Connection]:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_tell, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(PATIENCE_S)
    assert process.exitcode == 0


def ask(connection: Connection, name: str) -> Any:
    connection.send(name)
    assert connection.poll(PATIENCE_S)
    return connection.recv()


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends a wait for ever as a failure, long before the suite's own limit would."""

    def ring(*_: Any) -> None:
        pytest.fail("a fork server waits for its processes to end")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(int(PATIENCE_S))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_another_server_starts_while_processes_of_the_first_live(alarm: None) -> None:
    start_fork_server(["wave"], {"UMBP_TEST_KIND": "first"})
    with a_process() as one:
        start_fork_server(["colorsys"], {"UMBP_TEST_KIND": "second"})
        with a_process() as two:
            start_fork_server(["wave"], {"UMBP_TEST_KIND": "first"})
            with a_process() as three:
                first, second, third = ask(one, "wave"), ask(two, "wave"), ask(three, "wave")
    assert first["kind"] == third["kind"] == "first"
    assert second["kind"] == "second"
    assert first["is_loaded"]
    assert third["is_loaded"]
    assert not second["is_loaded"]
    # Asked for again, a server is the one that was there.
    assert first["parent"] == third["parent"] != second["parent"]
    assert "UMBP_TEST_KIND" not in os.environ


def _tell(connection: Connection) -> None:
    while True:
        try:
            module = connection.recv()
        except EOFError:
            return
        connection.send(
            {
                "kind": os.environ.get("UMBP_TEST_KIND"),
                "is_loaded": module in sys.modules,
                "parent": os.getppid(),
            }
        )

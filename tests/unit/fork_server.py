# SPDX-License-Identifier: Apache-2.0
"""Processes that others are forked from, each with modules loaded and an environment of its own.

``multiprocessing`` has one such process. Tests of engines and tests of MORI's modes want different
ones, and each is asked for again while processes of the other live.
"""

import multiprocessing.forkserver
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

# Neither has a public name, and there is no other way to have two servers.
_ForkServer: Final = multiprocessing.forkserver.ForkServer
_server: Final = multiprocessing.forkserver._forkserver

_set_aside: Final[dict[str, dict[str, Any]]] = {}
_current: list[str] = []


def start_fork_server(preloaded: Sequence[str], environment: Mapping[str, str]) -> None:
    """Makes the fork server be the one with these modules and variables; starts it at first.

    The one that it was before is set aside, not stopped: to stop a server is to wait until every
    process that was forked from it has ended.

    Args:
        preloaded: Modules that it imports.
        environment: Variables that it has beside those of the tests.
    """
    wanted = repr((list(preloaded), sorted(environment.items())))
    if _current != [wanted]:
        if _current:
            _set_aside[_current.pop()] = _state_of(_server)
        vars(_server).update(_set_aside.pop(wanted, None) or _state_of(_ForkServer()))
        _current.append(wanted)
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        multiprocessing.forkserver.set_forkserver_preload(list(preloaded))
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _state_of(server: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(server).items() if name != "_lock"}

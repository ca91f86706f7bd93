# SPDX-License-Identifier: Apache-2.0
"""The process that others are forked from, with modules loaded and an environment of its own.

``multiprocessing`` has one such process. Tests of engines and tests of MORI's modes want different
ones, so whoever starts one ends the other's; processes that were forked from that live on.
"""

import multiprocessing.forkserver
import os
from collections.abc import Mapping, Sequence
from typing import Any

_started: list[Any] = []


def start_fork_server(preloaded: Sequence[str], environment: Mapping[str, str]) -> None:
    """Makes the fork server be one with these modules and variables.

    Args:
        preloaded: Modules that it imports.
        environment: Variables that it has beside those of the tests.
    """
    wanted = [list(preloaded), dict(environment)]
    if _started == wanted:
        multiprocessing.forkserver.ensure_running()
        return
    # Without a public name, and the only way to have another one.
    multiprocessing.forkserver._forkserver._stop()
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        multiprocessing.forkserver.set_forkserver_preload(list(preloaded))
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    _started[:] = wanted

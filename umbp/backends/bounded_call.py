# SPDX-License-Identifier: Apache-2.0
"""Calls what may never return, and waits only so long."""

import threading
from collections.abc import Callable
from typing import TypeVar

from umbp.errors import BackendUnavailable

T = TypeVar("T")


def bounded_call(call: Callable[[], T], timeout_s: float, what: str) -> T:
    """Runs a call on a thread of its own, which goes on alone when the time is over.

    Args:
        call: What to run.
        timeout_s: How long to wait.
        what: Says in the error what did not happen, and what to do.

    Returns:
        What the call returned.

    Raises:
        BackendUnavailable: It has not returned in time.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="umbp-bounded-call", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if raised:
        raise raised[0]
    if not returned:
        raise BackendUnavailable(f"{what} within {timeout_s:.1f} s")
    return returned[0]

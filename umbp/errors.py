# SPDX-License-Identifier: Apache-2.0
"""Every error that umbp raises on purpose.

    UmbpError
    ├── ConfigError            the user's configuration cannot work; one line says what to do
    ├── UsageError             a caller broke an interface's contract
    ├── IllegalTransition      a lifecycle was given an event that its state does not take
    └── BackendError           a backend could not do what it was asked
        ├── BackendUnavailable     its other side is not there, or its library is not installed
        └── BackendStalled         a native call outlived its deadline; its buffers are not safe

A cache failure is never an exception for vLLM: the connector turns what a backend raises into an
event. Two errors leave the connector on purpose: ``ConfigError`` at start, and ``BackendStalled``
when memory that a native call may still write would otherwise have to be reused.
"""


class UmbpError(Exception):
    """Base of all errors of umbp; never raised itself."""


class ConfigError(UmbpError, ValueError):
    """The configuration cannot work. The message names the option, its value and what to do."""


class UsageError(UmbpError, ValueError):
    """A caller broke the contract of an interface. The message shows the value."""


class IllegalTransition(UmbpError):
    """A lifecycle was given an event that its state does not take. Nothing was changed.

    Attributes:
        subject: The identity of the request or lease.
        state: Name of the state it is in, and stays in.
        event: Name of the event.
    """

    def __init__(self, subject: str, state: str, event: str) -> None:
        super().__init__(f"{subject}: event {event} is illegal in state {state}")
        self.subject = subject
        self.state = state
        self.event = event


class BackendError(UmbpError):
    """A backend could not do what it was asked. Always a miss or a store that did not happen."""


class BackendUnavailable(BackendError):
    """The backend's other side is not there, or a library that it needs is not installed."""


class BackendStalled(BackendError):
    """A native call outlived its deadline, so the memory it uses can never be called safe."""

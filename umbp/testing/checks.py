# SPDX-License-Identifier: Apache-2.0
"""The conformance checks as tests, for pytest: see ``umbp.testing.pytest_plugin``."""

from collections.abc import Callable


def test_backend(umbp_check: Callable[[], None]) -> None:
    """The backend keeps the rule; ``docs/write-a-backend.md`` says what each check checks."""
    umbp_check()

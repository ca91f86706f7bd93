# SPDX-License-Identifier: Apache-2.0
"""The conformance checks for a backend named on the command line of pytest:

    pytest -p umbp.testing.pytest_plugin --pyargs umbp.testing.checks --umbp-backend memory

It is no entry point of pytest: it would be imported, with numpy and torch, in every run of pytest
wherever umbp is installed, for an option that few runs use.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import pytest

from umbp.errors import BackendError, ConfigError
from umbp.testing.conformance import CHECKS, LOOKUP_CHECKS, OTHER_SIDE_CHECKS
from umbp.testing.conformance_rig import PATIENCE_S
from umbp.testing.harness import (
    HARNESS_FLAG,
    OPTIONS_FLAG,
    Harness,
    harness_by_name,
    load_harness,
)

BACKEND_FLAG: Final = "--umbp-backend"
PATIENCE_FLAG: Final = "--umbp-patience-s"

_HARNESS: Final = pytest.StashKey[Harness]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("umbp", "conformance of a backend of umbp")
    group.addoption(BACKEND_FLAG, metavar="NAME", help="check the installed backend of this name")
    group.addoption(
        OPTIONS_FLAG, metavar="JSON", default="{}", help="options of that backend, an object"
    )
    group.addoption(
        HARNESS_FLAG,
        metavar="MODULE:NAME",
        help="check what this umbp.testing.conformance.Harness opens, instead of a backend by name",
    )
    group.addoption(
        PATIENCE_FLAG,
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="how long an answer may take before it counts as lost (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Finds the backend, so that a wrong name or option is one line before any test.

    Raises:
        pytest.UsageError: It cannot be found or opened here.
    """
    name, target = config.getoption(BACKEND_FLAG), config.getoption(HARNESS_FLAG)
    if name is None and target is None:
        return
    if name is not None and target is not None:
        raise pytest.UsageError(f"{BACKEND_FLAG} and {HARNESS_FLAG} are both given; remove one")
    try:
        if target is not None:
            config.stash[_HARNESS] = load_harness(target)
        else:
            config.stash[_HARNESS] = harness_by_name(name, config.getoption(OPTIONS_FLAG))
    except (BackendError, ConfigError) as error:
        raise pytest.UsageError(" ".join(str(error).split())) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes one test of each check; those that do not apply are skipped, with the reason."""
    if "umbp_check" not in metafunc.fixturenames:
        return
    harness = metafunc.config.stash.get(_HARNESS, None)
    if harness is None:
        raise pytest.Collector.CollectError(f"{BACKEND_FLAG} is missing: name the backend to check")
    patience_s = metafunc.config.getoption(PATIENCE_FLAG)
    metafunc.parametrize("umbp_check", _parameters(harness, patience_s))


def _parameters(harness: Harness, patience_s: float) -> list[Any]:
    no_lookup = "" if harness.open_lookup else "the backend has no lookup client of its own"
    no_kill = "" if harness.kill_other_side else "the backend has no other side to kill"
    no_restart = no_kill or ("" if harness.restart_other_side else "it cannot be started anew")
    parameters = [_parameter(check, harness.open_pool, patience_s, "") for check in CHECKS]
    parameters += [_parameter(check, harness, patience_s, no_lookup) for check in LOOKUP_CHECKS]
    for check in OTHER_SIDE_CHECKS:
        reason = no_kill
        if check.__name__ == "check_lookup_after_kill":
            reason = no_kill or no_lookup
        elif check.__name__ == "check_restart":
            reason = no_restart
        parameters.append(_parameter(check, harness, patience_s, reason))
    return parameters


def _parameter(check: Callable[..., None], subject: Any, patience_s: float, reason: str) -> Any:
    marks = [pytest.mark.skip(reason=reason)] if reason else []
    call = functools.partial(check, subject, patience_s)
    return pytest.param(call, id=check.__name__, marks=marks)

# SPDX-License-Identifier: Apache-2.0
"""How hard property tests look for a counterexample, and where long tests run.

``UMBP_HYPOTHESIS_PROFILE`` names a profile. ``ci`` is the default where ``CI`` is ``true``, so that
a change is judged by the change alone; ``dev`` is it elsewhere. ``UMBP_PURE_TESTS=skip`` leaves out
tests marked ``pure``, for environments beside another one that runs them.
"""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

# Time says nothing on shared machines, and a blob reproduces a failure anywhere.
settings.register_profile("dev", max_examples=50, deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=500, derandomize=True)
# As ci, for tests that are to fail: making the counterexample small is no use then.
settings.register_profile(
    "mutant", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate)
)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=20_000)

settings.load_profile(
    os.environ.get("UMBP_HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") == "true" else "dev")
)


@pytest.fixture(scope="module")
def quiet_simulation() -> Iterator[None]:
    """Silences vLLM and umbp while a module's simulations run, and leaves loggers as they were."""
    from umbp.sim.driver import quiet

    loggers = [logging.getLogger(name) for name in ("vllm", "umbp")]
    levels = [logger.level for logger in loggers]
    quiet()
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what another environment of this machine runs."""
    if os.environ.get("UMBP_PURE_TESTS") != "skip":
        return
    skip = pytest.mark.skip(reason="the same in every environment; another one here runs it")
    for item in items:
        if item.get_closest_marker("pure"):
            item.add_marker(skip)

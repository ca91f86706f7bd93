# SPDX-License-Identifier: Apache-2.0
"""Tests on vLLM's real engine, with tiny models on a CPU.

Where ``UMBP_REQUIRE_MORI`` is 1 the tests of the ``embedded`` backend fail when MORI cannot be
loaded; elsewhere they are skipped.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import EngineSettings
from engine_process import EngineError, EngineProcess, Engines, load_mori
from hybrids import HYBRIDS, Hybrid, has_lfm

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Starts engines."""
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="module", autouse=True)
def no_engines_left(engines: Engines) -> Iterator[None]:
    """Ends the engines that a module has started for itself, after its own fixtures have ended."""
    yield
    engines.end_started()


@pytest.fixture(scope="session")
def mori_problem(engines: Engines) -> str | None:
    """Says why MORI cannot be loaded; found out elsewhere, since it stays loaded."""
    process = engines.process()
    try:
        process.run(load_mori)
    except EngineError as error:
        if error.kind != "BackendUnavailable":
            raise
        return error.message
    finally:
        process.close()
    return None


@pytest.fixture(scope="module", params=["memory", pytest.param("embedded", marks=pytest.mark.mori)])
def backend(request: pytest.FixtureRequest) -> str:
    """Name of the backend: every test that asks for it runs on each."""
    name: str = request.param
    if name == "embedded":
        problem = request.getfixturevalue("mori_problem")
        if problem is not None and os.environ.get("UMBP_REQUIRE_MORI") == "1":
            pytest.fail(f"UMBP_REQUIRE_MORI is 1, but {problem}", pytrace=False)
        if problem is not None:
            pytest.skip(problem)
    return name


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest) -> Hybrid:
    """A hybrid model: every test that asks for it runs on each."""
    if request.param == "lfm" and not has_lfm():
        pytest.skip("the CPU build of vLLM 0.31 does not run LFM2")
    return HYBRIDS[request.param]


@pytest.fixture
def settings(backend: str) -> EngineSettings:
    """What ``engine`` is started with; a module with other settings replaces this."""
    return EngineSettings(backend=backend)


@pytest.fixture
def engine(engines: Engines, settings: EngineSettings) -> Iterator[EngineProcess]:
    """An engine that has forgotten everything; it must be at rest after the test."""
    yield engines.shared(settings)
    problems = engines.release(settings)
    assert not problems, problems

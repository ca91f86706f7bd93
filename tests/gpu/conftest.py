# SPDX-License-Identifier: Apache-2.0
"""What tests on a GPU need of MORI. Without it they are skipped, or fail if UMBP_REQUIRE_MORI is 1.

MORI needs a HIP runtime that sees the GPU: ROCm's, or on an NVIDIA GPU ``native/hip_cuda``, which
``run.sh`` builds.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any, Final, NoReturn

import pytest
from gpu_engines import spawned_engines

from umbp.backends.mori_library import MoriLibrary, hip_device_count, load_mori
from umbp.errors import BackendUnavailable

_FAILURE_CHARS: Final = 3000


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Shows a failure at once: time on a GPU may end before pytest's own summary comes."""
    if report.failed:
        text = str(report.longrepr)
        if len(text) > 2 * _FAILURE_CHARS:
            text = f"{text[:_FAILURE_CHARS]}\n[...]\n{text[-_FAILURE_CHARS:]}"
        sys.__stderr__.write(f"\n-- {report.nodeid} ({report.when})\n{text}\n")
        sys.__stderr__.flush()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts engines on GPUs."""
    with spawned_engines(tmp_path_factory.mktemp("engines")) as engines:
        yield engines


@pytest.fixture(scope="session")
def mori() -> MoriLibrary:
    """MORI, with a HIP runtime that sees a GPU."""
    try:
        library = load_mori(default_read_lease_ms=1)
    except BackendUnavailable as error:
        _leave_out(str(error))
    if not hip_device_count():
        _leave_out("MORI's HIP runtime sees no GPU: run tests/gpu/run.sh")
    return library


def _leave_out(reason: str) -> NoReturn:
    if os.environ.get("UMBP_REQUIRE_MORI") == "1":
        pytest.fail(f"UMBP_REQUIRE_MORI is 1, but {reason}", pytrace=False)
    pytest.skip(reason)

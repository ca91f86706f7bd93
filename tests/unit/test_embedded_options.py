# SPDX-License-Identifier: Apache-2.0
"""Options of the embedded backend: what is refused, in one line, before MORI is touched."""

import subprocess
import sys
from typing import Any

import pytest

from umbp.backends import embedded
from umbp.backends.base import BACKEND_API, WorkerSite
from umbp.backends.embedded import EmbeddedBackend, EmbeddedOptions
from umbp.errors import BackendUnavailable, ConfigError
from umbp.options import option_table, parse_options


def parse(**raw: Any) -> EmbeddedOptions:
    (options,) = parse_options(raw, EmbeddedOptions)
    assert isinstance(options, EmbeddedOptions)
    return options


def site(device_type: str = "cpu", rank_count: int = 1) -> WorkerSite:
    return WorkerSite(
        rank=0,
        rank_count=rank_count,
        device_type=device_type,
        device_index=None,
        instance="test",
        transfer_timeout_ms=1000,
    )


@pytest.fixture
def no_mori(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when MORI would be imported."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("MORI was imported before the options were checked")

    monkeypatch.setattr(embedded, "load_mori", fail)


def test_it_is_a_backend_with_its_pool_in_the_worker() -> None:
    assert EmbeddedBackend.api == BACKEND_API
    assert EmbeddedBackend.pool_in_worker


def test_every_option_is_in_the_table() -> None:
    table = option_table(EmbeddedOptions)
    for name in (
        "total_capacity_bytes",
        "capacity_bytes",
        "high_watermark",
        "low_watermark",
        "page_size_bytes",
        "numa_node",
        "use_hugepages",
        "prefault",
        "use_shared_memory",
        "transfer_threads",
        "put_retries",
        "log_level",
    ):
        assert f"`{name}`" in table


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"high_watermark": 1.5}, "high_watermark is 1.5, expected from 0.05 to 1.0"),
        ({"low_watermark": 0}, "low_watermark is 0.0, expected from 0.01 to 1.0"),
        (
            {"high_watermark": 0.6, "low_watermark": 0.6},
            "low_watermark is 0.6, expected less than high_watermark, which is 0.6; lower it",
        ),
        (
            {"high_watermark": 0.8},
            "low_watermark is 0.9, expected less than high_watermark, which is 0.8; lower it",
        ),
        ({"page_size_bytes": 0}, "page_size_bytes is 0, expected"),
        ({"page_size_bytes": 4096.0}, "page_size_bytes is 4096.0, expected int"),
        ({"put_retries": 17}, "put_retries is 17, expected"),
        ({"log_level": "warning"}, "log_level is 'warning', expected one of"),
        ({"capacity_bytes": -1}, "capacity_bytes is -1, expected"),
        ({"capacity_bytes": 1, "total_capacity_bytes": 1}, "remove one of them"),
        ({"hugepages": True}, "did you mean use_hugepages"),
    ],
)
def test_a_bad_option_is_one_line(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**raw)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_mori")
def test_a_capacity_over_memory_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(ConfigError, match="option capacity_bytes is 1125899906842624"):
        EmbeddedBackend.open_worker(parse(capacity_bytes=1 << 50), site())


@pytest.mark.usefixtures("no_mori")
def test_a_numa_node_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="option numa_node is 4095, but"):
        EmbeddedBackend.open_worker(parse(numa_node=4095), site())


@pytest.mark.usefixtures("no_mori")
def test_a_device_that_mori_does_not_move_is_refused() -> None:
    with pytest.raises(ConfigError, match="device type 'xpu', only cpu and cuda"):
        EmbeddedBackend.open_worker(parse(), site(device_type="xpu"))


def test_mori_that_is_missing_is_said_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mori", "mori.cpp", "mori.umbp"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendUnavailable, match="pip install"):
        EmbeddedBackend.open_worker(parse(capacity_bytes=1 << 20), site())


def test_importing_the_backend_imports_neither_mori_nor_torch() -> None:
    code = (
        "import sys, umbp.backends.embedded as embedded; embedded.EmbeddedOptions(); "
        "print([name for name in ('mori', 'mori.cpp', 'libmori_pybinds', 'torch') "
        "if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"

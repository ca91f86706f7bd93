# SPDX-License-Identifier: Apache-2.0
"""Options of the standalone backend and of its server. Needs no MORI."""

from typing import Any

import attrs
import pytest

from umbp.backends.mori_server import ServerSettings, check_settings, server_environment
from umbp.backends.registry import find_backend
from umbp.backends.server_address import parse_address
from umbp.backends.standalone_options import StandaloneOptions
from umbp.errors import ConfigError
from umbp.options import parse_options

ADDRESS = "unix:///run/umbp/s.grpc.sock"
SETTINGS = ServerSettings(
    address=parse_address(ADDRESS), capacity_bytes=1 << 20, read_lease_ms=5000
)


def test_it_is_a_backend_whose_pool_is_elsewhere() -> None:
    backend = find_backend("standalone")
    assert not backend.pool_in_worker
    assert backend.options_type is StandaloneOptions


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"total_capacity_bytes": 1}, "no option 'total_capacity_bytes'; did you mean"),
        ({"capacity_bytes": 5}, "option capacity_bytes is 5, but the server's pool has the size"),
        ({"auto_start": True}, "auto_start is true and needs option capacity_bytes"),
        ({"address": "tcp://host:1"}, "option address is 'tcp://host:1', expected unix:///"),
        ({"prefault": True}, "no option 'prefault'"),
        ({"high_watermark": 0.5}, "no option 'high_watermark'"),
        ({"read_lease_ms": 0}, "option read_lease_ms is 0"),
    ],
)
def test_what_this_mode_would_ignore_is_an_error_that_names_it(
    raw: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        parse_options({"address": ADDRESS, **raw}, StandaloneOptions)
    assert "\n" not in str(raised.value)


def test_a_capacity_goes_with_a_server_that_is_started_here() -> None:
    options = StandaloneOptions(address=ADDRESS, auto_start=True, capacity_bytes=1 << 30)
    assert options.server_address() == parse_address(ADDRESS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"low_watermark": 0.9}, "option low_watermark is 0.9 and option high_watermark is 0.9"),
        ({"high_watermark": 1.5}, "option high_watermark is 1.5"),
        ({"capacity_bytes": 1 << 60}, "option capacity_bytes is .* bytes are available"),
    ],
)
def test_a_server_that_could_not_work_is_refused(changes: dict[str, Any], words: str) -> None:
    check_settings(SETTINGS)
    with pytest.raises(ConfigError, match=words):
        check_settings(attrs.evolve(SETTINGS, **changes))


def test_a_server_s_environment_is_made_of_its_settings() -> None:
    inherited = {
        "LD_LIBRARY_PATH": "/usr/lib",
        "PATH": "/bin",
        "UMBP_DRAM_CAPACITY": "1",
        "UMBP_HIP_HOST_REMAP": "1",
        "UMBP_MASTER_ADDRESS": "elsewhere:1",
    }
    settings = attrs.evolve(SETTINGS, page_size_bytes=4096, log_level="warn")
    assert server_environment(settings, inherited, ["/opt/hip"]) == {
        "LD_LIBRARY_PATH": "/opt/hip:/usr/lib",
        "MORI_UMBP_LOG_LEVEL": "warn",
        "PATH": "/bin",
        "UMBP_DRAM_CAPACITY": "1048576",
        "UMBP_DRAM_HIGH_WM": "0.9",
        "UMBP_DRAM_LOW_WM": "0.8",
        "UMBP_DRAM_PREFAULT": "0",
        "UMBP_DRAM_READ_LEASE_MS": "5000",
        "UMBP_EMBEDDED_DRAM_PAGE_SIZE": "4096",
        "UMBP_SSD_ENABLED": "0",
    }
    plain = server_environment(SETTINGS, {}, [])
    assert "UMBP_EMBEDDED_DRAM_PAGE_SIZE" not in plain
    assert plain["LD_LIBRARY_PATH"] == ""

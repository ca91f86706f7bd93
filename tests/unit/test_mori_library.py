# SPDX-License-Identifier: Apache-2.0
"""Each way in which MORI's import fails is one line that says what is missing."""

import os
import sys
from pathlib import Path

import pytest

from umbp.backends import mori_library
from umbp.backends.mori_library import hip_device_count, load_mori
from umbp.errors import BackendUnavailable

CALLS = (
    "batch_exists",
    "batch_get_ranges_into_ptr",
    "batch_put_ranges_from_ptr",
    "register_memory",
)
GOOD_CPP = """
class MemoryLocationType:
    CPU, GPU = "cpu", "gpu"
"""
GOOD_UMBP = """
class UMBPConfig: pass
class UMBPStandaloneProcessConfig: pass
class UMBPDistributedConfig: pass
class UMBPClient:
"""
GOOD_UMBP += "".join(f"    def {name}(self): pass\n" for name in CALLS)


@pytest.fixture
def fake_mori(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a MORI that imports; tests break it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "mori"]:
        monkeypatch.delitem(sys.modules, name)
    for name, text in (("", '__version__ = "9.9"'), ("cpp", GOOD_CPP), ("umbp", GOOD_UMBP)):
        module = tmp_path / "mori" / name / "__init__.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "mori"
    for name in [name for name in sys.modules if name.split(".")[0] == "mori"]:
        del sys.modules[name]


def test_a_library_that_imports_is_described(fake_mori: Path) -> None:
    library = load_mori()
    assert (library.version, library.cpu_location, library.gpu_location) == ("9.9", "cpu", "gpu")
    assert library.client_type.__name__ == "UMBPClient"
    assert library.config_type.__name__ == "UMBPConfig"


def test_mori_that_is_not_installed_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mori", None)
    with pytest.raises(BackendUnavailable, match=r"not installed: pip install 'amd-mori>=1\.2\.4'"):
        load_mori()


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (
            'OSError("libpci.so.3: cannot open shared object file: No such file or directory")',
            r"shared library libpci\.so\.3 is missing: install it or .*docs/setup\.md",
        ),
        (
            'ImportError("libgrpc++.so.1: cannot open shared object file: No such file")',
            r"shared library libgrpc\+\+\.so\.1 is missing",
        ),
        (
            'OSError("/lib/libc.so.6: version `GLIBC_2.35\' not found (required by x.so)")',
            r"installed but cannot be loaded: /lib/libc\.so\.6: version `GLIBC_2\.35' not found",
        ),
        ('RuntimeError("rocm_sdk is\\n broken")', "cannot be loaded: rocm_sdk is broken"),
        ('ModuleNotFoundError("No module named x", name="x")', "cannot be loaded: No module named"),
    ],
)
def test_an_import_that_fails_is_one_line(fake_mori: Path, raised: str, message: str) -> None:
    (fake_mori / "cpp" / "__init__.py").write_text(f"raise {raised}")
    with pytest.raises(BackendUnavailable, match=message) as caught:
        load_mori()
    assert "\n" not in str(caught.value)


def test_an_old_mori_is_refused_by_version(fake_mori: Path) -> None:
    old = GOOD_UMBP.replace("batch_put_ranges_from_ptr", "put")
    (fake_mori / "umbp" / "__init__.py").write_text(old)
    with pytest.raises(BackendUnavailable, match=r"MORI 9\.9 has no batch_put_ranges_from_ptr"):
        load_mori()


@pytest.mark.parametrize(("level", "expected"), [("warn", "warn"), (None, "info")])
def test_the_log_level_is_set_before_the_import(
    fake_mori: Path, monkeypatch: pytest.MonkeyPatch, level: str | None, expected: str
) -> None:
    monkeypatch.setenv("MORI_UMBP_LOG_LEVEL", "info")
    source = f"import os\nseen = os.environ['MORI_UMBP_LOG_LEVEL']\n{GOOD_CPP}"
    (fake_mori / "cpp" / "__init__.py").write_text(source)
    load_mori(level)
    assert sys.modules["mori.cpp"].seen == expected
    assert os.environ["MORI_UMBP_LOG_LEVEL"] == expected


@pytest.mark.parametrize(
    ("is_on_cuda", "before", "after"),
    [(True, None, "0"), (True, "1", "1"), (False, None, None)],
)
def test_the_gather_kernel_is_off_on_cuda_unless_somebody_wants_it(
    fake_mori: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_on_cuda: bool,
    before: str | None,
    after: str | None,
) -> None:
    variable = "UMBP_DRAM_GATHER_KERNEL"
    monkeypatch.setenv(variable, before or "")  # so that it is put back
    if before is None:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(mori_library, "_is_on_cuda", lambda: is_on_cuda)
    assert load_mori().is_on_cuda is is_on_cuda
    assert os.environ.get(variable) == after


def test_a_process_without_a_hip_runtime_has_no_device_count() -> None:
    assert hip_device_count() in (None, 0)

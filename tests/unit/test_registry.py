# SPDX-License-Identifier: Apache-2.0
"""The registry, against real distribution metadata in a folder on ``sys.path``."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from umbp.backends.base import BACKEND_API
from umbp.backends.registry import InstalledBackend, find_backend, installed_backends
from umbp.errors import ConfigError

BACKEND = f"""
import attrs

@attrs.frozen
class Options:
    pass

class Sample:
    api = {BACKEND_API}
    options_type = Options
    pool_in_worker = True

    @classmethod
    def open_worker(cls, options, site):
        raise NotImplementedError

    @classmethod
    def open_lookup(cls, options, site):
        raise NotImplementedError
"""

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution with one backend, and returns the name of its module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    serial = iter(range(100))

    def install(name: str, source: str, *, distribution: str = "sample-dist") -> str:
        # A name of its own each time, since an imported module stays imported.
        module = f"umbp_registry_sample_{tmp_path.name}_{next(serial)}"
        monkeypatch.delitem(sys.modules, module, raising=False)
        (tmp_path / f"{module}.py").write_text(source)
        metadata = tmp_path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n"
        )
        (metadata / "entry_points.txt").write_text(f"[umbp.backends]\n{name} = {module}:Sample\n")
        return module

    return install


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_backend(name)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_backend_is_found_by_name(install: Install) -> None:
    module = install("sample", BACKEND)
    assert find_backend("sample") is sys.modules[module].Sample


def test_listing_imports_nothing(install: Install) -> None:
    module = install("sample", "raise RuntimeError('imported')")
    listed = [backend for backend in installed_backends() if backend.name == "sample"]
    assert listed == [InstalledBackend("sample", "sample-dist", "1.5", f"{module}:Sample")]
    assert module not in sys.modules


def test_listing_is_sorted(install: Install) -> None:
    install("zz-last", BACKEND, distribution="one-dist")
    install("aa-first", BACKEND, distribution="two-dist")
    names = [backend.name for backend in installed_backends()]
    assert names == sorted(names)
    assert {"zz-last", "aa-first"} <= set(names)


def test_an_unknown_name_lists_the_installed_ones(install: Install) -> None:
    install("bb-sample", BACKEND, distribution="one-dist")
    install("aa-sample", BACKEND, distribution="two-dist")
    message = refusal("absent")
    assert message.startswith("option backend is 'absent', which is not installed; installed: ")
    assert re.search(r"aa-sample \(two-dist 1\.5\), .*bb-sample \(one-dist 1\.5\)", message)


def test_no_backend_at_all_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert refusal("memory").endswith("installed: none, so reinstall umbp")


def test_one_name_from_two_distributions_is_refused(install: Install) -> None:
    install("sample", BACKEND, distribution="one-dist")
    install("sample", BACKEND, distribution="two-dist")
    assert refusal("sample") == (
        "option backend is 'sample', which both one-dist 1.5 and two-dist 1.5 offer; "
        "uninstall one of them"
    )


def test_a_missing_library_says_what_to_install(install: Install) -> None:
    install("sample", "import library_that_nobody_has")
    assert refusal("sample") == (
        "backend sample (sample-dist 1.5) cannot be imported: "
        "No module named 'library_that_nobody_has'; "
        "install the module library_that_nobody_has, or reinstall sample-dist"
    )


def test_an_import_error_of_many_lines_becomes_one(install: Install) -> None:
    install("sample", "raise ImportError('libfoo.so:\\n  cannot open')")
    message = refusal("sample")
    assert "libfoo.so: cannot open; install what is missing, or reinstall" in message


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise OSError('no GPU')", "OSError: no GPU"),
        ("this is no python", "SyntaxError"),
        ("", "AttributeError"),
    ],
)
def test_a_module_that_fails_otherwise_is_refused(
    install: Install, source: str, expected: str
) -> None:
    install("sample", source)
    message = refusal("sample")
    assert "backend sample (sample-dist 1.5) cannot be loaded from" in message
    assert expected in message
    assert message.endswith("reinstall sample-dist")


@pytest.mark.parametrize("api", [f"api = {BACKEND_API + 1}", "pass"])
def test_another_version_of_the_contract_is_refused(install: Install, api: str) -> None:
    install("sample", BACKEND.replace(f"api = {BACKEND_API}", api))
    found = BACKEND_API + 1 if "=" in api else None
    assert f"has api {found}, this umbp needs api {BACKEND_API}" in refusal("sample")


def test_missing_attributes_are_named(install: Install) -> None:
    source = BACKEND.replace("def open_worker", "def close_worker")
    install("sample", source.replace("pool_in_worker = True", "pass"))
    assert "lacks pool_in_worker, open_worker; install a version" in refusal("sample")


def test_only_a_pool_elsewhere_needs_a_lookup_client(install: Install) -> None:
    source = BACKEND.replace("def open_lookup", "def close_lookup")
    install("here", source)
    assert find_backend("here").pool_in_worker
    elsewhere = source.replace("pool_in_worker = True", "pool_in_worker = False")
    install("elsewhere", elsewhere, distribution="other-dist")
    assert "lacks open_lookup; install a version" in refusal("elsewhere")


def test_options_that_are_no_attrs_class_are_refused(install: Install) -> None:
    install("sample", BACKEND.replace("options_type = Options", "options_type = dict"))
    assert "options_type" in refusal("sample")

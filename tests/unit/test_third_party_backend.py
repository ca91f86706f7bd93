# SPDX-License-Identifier: Apache-2.0
"""A backend that is a package of its own, with only an entry point, is used by its name."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import umbp
from umbp.testing.conformance import CHECKS, LOOKUP_CHECKS, OTHER_SIDE_CHECKS

THIRD_PARTY = Path(__file__).parents[1] / "third_party"
SOURCE = THIRD_PARTY / "umbp_example_backend"
GUIDE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"
USE = THIRD_PARTY / "use_dict_backend.py"

FIND = """
from umbp.backends.registry import find_backend, installed_backends
from umbp.errors import ConfigError
from umbp.options import parse_options

backend = find_backend("dict")
print([str(b) for b in installed_backends() if b.name == "dict"], backend.__module__)
print(parse_options({"capacity_bytes": 5000}, backend.options_type))
try:
    parse_options({"capacity": 5000}, backend.options_type)
except ConfigError as error:
    print(error)
"""

ABSENT = """
from umbp.backends.registry import find_backend
from umbp.errors import ConfigError

try:
    find_backend("dict")
except ConfigError as error:
    print(str(error).split(";")[0])
"""


@pytest.fixture(scope="module")
def site_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the example, as a user would but for the network."""
    base = tmp_path_factory.mktemp("third_party")
    # A build leaves files beside its source.
    source = shutil.copytree(SOURCE, base / "source")
    target = base / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check"]
    command += ["--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def run(site_directory: Path, *arguments: str) -> list[str]:
    """Runs Python with the installed example and returns the lines that it printed."""
    project = Path(umbp.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{site_directory}:{project}"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_package_has_nothing_but_an_entry_point(site_directory: Path) -> None:
    (metadata,) = site_directory.glob("*.dist-info")
    assert (metadata / "entry_points.txt").read_text().split("\n")[:2] == [
        "[umbp.backends]",
        "dict = umbp_example_backend:DictBackend",
    ]
    modules = [path.name for path in site_directory.glob("*.py")]
    assert modules == ["umbp_example_backend.py"]


def test_it_is_found_by_name_and_its_options_are_checked(site_directory: Path) -> None:
    assert run(site_directory, "-c", FIND) == [
        "['dict (umbp-example-backend 0.1)'] umbp_example_backend",
        "(DictOptions(capacity_bytes=5000, queue_limit=1024),)",
        "kv_connector_extra_config has no option 'capacity'; did you mean capacity_bytes?",
    ]


def test_it_stores_answers_lookups_and_loads(site_directory: Path, tmp_path: Path) -> None:
    printed = run(site_directory, str(USE), str(tmp_path))
    assert printed == ["stored, found and restored"]


def test_its_own_tests_pass_and_the_checks_by_its_name(
    site_directory: Path, tmp_path: Path
) -> None:
    tests = shutil.copy(SOURCE / "test_dict_backend.py", tmp_path)
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    options += ["-p", "umbp.testing.pytest_plugin", "--umbp-backend", "dict"]
    where = ["--pyargs", "umbp.testing.checks", str(tests)]
    printed = run(site_directory, "-m", "pytest", *options, *where)
    assert printed[-1].startswith(f"{2 * len(CHECKS)} passed, ")


def test_without_the_package_the_name_is_unknown(tmp_path: Path) -> None:
    assert run(tmp_path, "-c", ABSENT) == ["option backend is 'dict', which is not installed"]


def test_the_guide_shows_the_code_of_the_example() -> None:
    sources = "".join(path.read_text() for path in sorted(SOURCE.glob("*.*")))
    shown = re.findall(r"```(?:python|toml)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(shown) == 10
    for code in shown:
        assert code in sources


def test_the_guide_says_what_each_check_checks() -> None:
    described = re.findall(r"^\| `(check_\w+)` \|", GUIDE.read_text(), re.MULTILINE)
    assert described == [check.__name__ for check in (*CHECKS, *LOOKUP_CHECKS, *OTHER_SIDE_CHECKS)]

# SPDX-License-Identifier: Apache-2.0
"""The conformance checks by one command of pytest, and one line for what is wrong with it."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_dict import Server

from umbp.testing import conformance, harness
from umbp.testing.conformance import CHECKS, LOOKUP_CHECKS, OTHER_SIDE_CHECKS

pytest_plugins = ["pytester"]

TARGET = "harness_under_test"


# The module is imported already, which pytest notices when it loads it as a plugin.
PLUGIN = ["-p", "umbp.testing.pytest_plugin", "-W", "ignore::pytest.PytestAssertRewriteWarning"]


def check(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    where = ["-rs", "--pyargs", "umbp.testing.checks"]
    return pytester.runpytest_inprocess(*PLUGIN, *where, *options)


@pytest.fixture
def harness_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A module whose attributes are harnesses of a backend in another process."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        module = type(sys)(TARGET)
        module.whole = server.harness()
        module.no_restart = conformance.Harness(server.open_pool, None, server.kill)
        module.number = 7
        monkeypatch.setitem(sys.modules, TARGET, module)
        yield module
        server.kill()


def test_memory_passes(pytester: pytest.Pytester) -> None:
    result = check(pytester, "--umbp-backend", "memory")
    assert result.parseoutcomes() == {
        "passed": len(CHECKS),
        "skipped": len(LOOKUP_CHECKS) + len(OTHER_SIDE_CHECKS),
    }
    result.stdout.fnmatch_lines(["*the backend has no lookup client*", "*no other side to kill*"])


def test_a_harness_adds_checks(pytester: pytest.Pytester, harness_module: object) -> None:
    result = check(pytester, "--umbp-harness", f"{TARGET}:whole", "-k", "epoch or while_idle")
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] == 3
    assert "skipped" not in outcomes


def test_a_check_that_does_not_apply_says_why(
    pytester: pytest.Pytester, harness_module: object
) -> None:
    options = ["--umbp-harness", f"{TARGET}:no_restart", "-k", "restart or after_kill"]
    result = check(pytester, *options)
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["skipped"]) == (1, 2)
    result.stdout.fnmatch_lines(["*it cannot be started anew"])


def test_a_backend_that_breaks_a_rule_fails(pytester: pytest.Pytester) -> None:
    # It has 1 GiB whatever a check wants.
    given = ["--umbp-backend-options", '{"capacity_bytes": 1073741824}']
    result = check(pytester, "--umbp-backend", "memory", *given, "-k", "capacity or unknown_group")
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (1, 1)
    result.stdout.fnmatch_lines(["*ConformanceError: stats say*"])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--umbp-backend", "nope"], "option backend is 'nope', which is not installed; *memory*"),
        (
            ["--umbp-backend", "memory", "--umbp-backend-options", "{"],
            "--umbp-backend-options is '{', which is no JSON *",
        ),
        (
            ["--umbp-backend", "memory", "--umbp-backend-options", "[]"],
            "--umbp-backend-options is '*', expected a JSON object",
        ),
        (
            ["--umbp-backend", "memory", "--umbp-backend-options", '{"capacity": 1}'],
            "--umbp-backend-options has no option 'capacity'; did you mean *",
        ),
        (
            ["--umbp-backend", "memory", "--umbp-harness", "a:b"],
            "--umbp-backend and --umbp-harness are both given; remove one",
        ),
        (["--umbp-harness", "nothing"], "--umbp-harness is 'nothing', which cannot be imported *"),
        (["--umbp-harness", f"{TARGET}:none"], "--umbp-harness is *, which cannot be imported *"),
        (["--umbp-harness", f"{TARGET}:number"], "--umbp-harness is *, a int; name an instance *"),
    ],
    ids=lambda part: part[:25] if isinstance(part, str) else "",
)
def test_what_is_wrong_is_one_line(
    pytester: pytest.Pytester, harness_module: object, options: list[str], line: str
) -> None:
    result = check(pytester, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [text for text in result.errlines if text]
    assert len(errors) == 1
    result.stderr.fnmatch_lines([f"ERROR: {line}"])


def test_a_pool_elsewhere_needs_a_harness(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = type("Shared", (), {"pool_in_worker": False})
    monkeypatch.setattr(harness, "find_backend", lambda name: shared)
    result = check(pytester, "--umbp-backend", "remote")
    result.stderr.fnmatch_lines(["ERROR: backend 'remote' keeps its objects outside*--umbp-har*"])


def test_without_a_name_it_asks_for_one(pytester: pytest.Pytester) -> None:
    result = check(pytester)
    result.stdout.fnmatch_lines(["*--umbp-backend is missing: name the backend to check"])
    assert result.ret == pytest.ExitCode.INTERRUPTED


def test_other_tests_run_as_before(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_something(): pass")
    result = pytester.runpytest_inprocess(*PLUGIN)
    assert result.parseoutcomes() == {"passed": 1}

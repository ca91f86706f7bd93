# SPDX-License-Identifier: Apache-2.0
"""Creates the environments of this project in `.envs`: `python3 tools/setup.py`.

Run it again at any time: it does only what is missing or changed. docs/setup.md explains.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from setup_env import layout
from setup_env.console import Console, MoriUnavailableError, SetupError, run_logged
from setup_env.environment import Environment
from setup_env.interpreters import find_interpreters
from setup_env.mori_libraries import fetch_mori_libraries
from setup_env.profiles import Choice, Plan, choose, this_host, with_plain, write_profiles
from setup_env.runner import profile_environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Creates the environments in .envs.")
    parser.add_argument(
        "--require",
        default="",
        metavar="PROFILES",
        help='fail unless these profiles are made, such as "mori plain"',
    )
    required = parser.parse_args(arguments).require.split()
    console = Console()
    try:
        layout.ENVS.mkdir(exist_ok=True)
        with layout.LOCK.open("w", encoding="utf-8") as lock:
            _acquire(lock, console)
            made = _set_up(console)
        missing = [profile for profile in required if profile not in made]
        if missing:
            raise SetupError(f"the profile {' and '.join(missing)} is required and not available")
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted: run it again to go on", file=sys.stderr)
        return 130
    return 0


def _acquire(lock: TextIO, console: Console) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        console.say("another set-up of this folder is running: waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _set_up(console: Console) -> list[str]:
    """Builds what this machine can have. Returns the profiles that are ready."""
    found = find_interpreters()
    choice = choose(found, this_host())
    if choice.mori is not None:
        try:
            _build_mori(choice.mori, console)
        except MoriUnavailableError as error:
            choice = with_plain(found, None, str(error))
    if choice.plain is not None:
        Environment(choice.plain, console).build()
    elif choice.mori is None:
        raise SetupError(choice.plain_reason)
    plans = [plan for plan in (choice.mori, choice.plain) if plan is not None]
    write_profiles(plans)
    _report(choice, console)
    return [plan.profile for plan in plans]


def _build_mori(plan: Plan, console: Console) -> None:
    """Makes the environment with MORI, the stand-in HIP runtime and MORI's libraries."""
    for program in ("make", "gcc"):
        if shutil.which(program) is None:
            raise MoriUnavailableError(f"{program} is not installed: install gcc and make")
    environment = Environment(plan, console)
    environment_digest = environment.build()
    _build_hip_host(console)
    checked = layout.NATIVE / "checked"
    if checked.is_file() and checked.read_text(encoding="utf-8") == _native_digest(
        environment_digest
    ):
        return
    mori_folder = next(environment.folder.glob("lib/python*/site-packages/mori"))
    with console.step("fetch the libraries that MORI links to"):
        fetch_mori_libraries(mori_folder, plan.interpreter.version)
    try:
        with console.step("check that MORI works on the stand-in HIP runtime"):
            _check_mori(environment)
    except SetupError as error:
        raise MoriUnavailableError(str(error)) from error
    checked.write_text(_native_digest(environment_digest), encoding="utf-8")


def _build_hip_host(console: Console) -> None:
    command = ["make", "-C", str(layout.HIP_HOST_SOURCE), f"OUT={layout.HIP_HOST_LIBRARIES}"]
    if subprocess.run([*command, "-q"], capture_output=True, check=False).returncode == 0:
        return
    with console.step("build the stand-in HIP runtime"):
        run_logged(command, "hip-host", advice="the C compiler failed: is it gcc 9 or later?")


def _check_mori(environment: Environment) -> None:
    run_logged(
        [environment.python, layout.ROOT / "tools" / "setup_env" / "check_mori.py"],
        "mori-check",
        advice="MORI does not work here",
        environment=profile_environment("mori", environment.folder, os.environ),
    )


def _native_digest(environment_digest: str) -> str:
    """Changes with the environment, the stand-in's content and the set of fetched libraries."""
    digest = hashlib.sha256(environment_digest.encode())
    for library in sorted(layout.HIP_HOST_LIBRARIES.glob("*")):
        digest.update(library.read_bytes())
    for library in sorted(layout.MORI_LIBRARIES.glob("*")):
        digest.update(library.name.encode())
    return digest.hexdigest()


def _report(choice: Choice, console: Console) -> None:
    for plan in (choice.mori, choice.plain):
        if plan is not None:
            folder = layout.environment_folder(plan.interpreter.version).relative_to(layout.ROOT)
            console.say(f"profile {plan.profile}: {folder} is ready")
    if choice.mori is None:
        console.say(f"profile mori: no backend `embedded` on this machine: {choice.mori_reason}")
    if choice.plain is None:
        console.say(f"profile plain: not made: {choice.plain_reason}")


if __name__ == "__main__":
    sys.exit(main())

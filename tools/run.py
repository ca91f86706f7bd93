# SPDX-License-Identifier: Apache-2.0
"""Runs a command in an environment that `tools/setup.py` made.

    python3 tools/run.py --profile mori -- python -m pytest tests
    python3 tools/run.py --profile each -- python -m pytest tests

`best` is `mori` where there is one, else `plain`; `newest`, with the newer vLLM, is the other way
round. `each` runs the command in all profiles, one
after the other, also when one fails, and fails when any did. With `--together` all run at the same
time, and each line they print begins with the profile's name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from setup_env import layout
from setup_env.profiles import read_profiles
from setup_env.runner import profile_environment
from setup_env.together import run_together

if TYPE_CHECKING:
    from collections.abc import Sequence

PROFILES = ("mori", "plain")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status of the command, or 2 when it cannot be run."""
    parser = argparse.ArgumentParser(description="Runs a command in one of the environments.")
    parser.add_argument("--profile", choices=[*PROFILES, "best", "newest", "each"], default="best")
    parser.add_argument("--together", action="store_true", help="with each: all at the same time")
    parser.add_argument("command", nargs="+", help="after --: the program and its arguments")
    options = parser.parse_args(arguments)
    folders = read_profiles()
    available = [profile for profile in PROFILES if profile in folders]
    if not available:
        print("run: no environment is set up: run `make setup`", file=sys.stderr)
        return 2
    if options.profile == "each":
        return _run_each(folders, options.command, together=options.together)
    chosen = {"best": available[0], "newest": available[-1]}
    profile = chosen.get(options.profile, options.profile)
    if profile not in folders:
        print(
            f"run: this machine has no profile {profile}, only {available[0]}: "
            "`make setup` says why",
            file=sys.stderr,
        )
        return 2
    return _replace_process(profile, folders[profile], options.command)


def _replace_process(profile: str, folder: str, command: list[str]) -> int:
    environment = profile_environment(profile, layout.ROOT / folder, os.environ)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"run: {command[0]}: {error.strerror}", file=sys.stderr)
        return 2


def _run_each(folders: dict[str, str], command: list[str], *, together: bool) -> int:
    environments = {}
    for profile in PROFILES:
        if profile not in folders:
            print(f"== profile {profile}: not available on this machine", flush=True)
            continue
        print(f"== profile {profile} ({folders[profile]}): {' '.join(command)}", flush=True)
        environment = profile_environment(profile, layout.ROOT / folders[profile], os.environ)
        # Tests of the core alone take long and give the same everywhere: the last runs them.
        if environments:
            environments[next(reversed(environments))]["UMBP_PURE_TESTS"] = "skip"
        environments[profile] = environment
    results: dict[str, int] = {}
    if together:
        results = run_together(command, environments)
    else:
        for profile, environment in environments.items():
            print(f"== profile {profile}", flush=True)
            results[profile] = subprocess.run(command, env=environment, check=False).returncode
    for profile, status in results.items():
        print(f"== profile {profile}: exit status {status}", flush=True)
    return max(results.values(), key=abs)


if __name__ == "__main__":
    sys.exit(main())

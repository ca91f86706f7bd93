# SPDX-License-Identifier: Apache-2.0
"""Runs a command with the Python files of a newer vLLM than the environments have.

    python3 tools/next_vllm.py -- python -m pytest tests/cases

`tools/requirements/vllm-next.txt` names that vLLM. Its wheel is fetched once; of it only the Python
files are kept, in `.envs/vllm-next`. The command runs in the environment with the newer Python.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from typing import TYPE_CHECKING

from setup_env import layout
from setup_env.console import SetupError
from setup_env.profiles import read_profiles
from setup_env.python_sources import fetch
from setup_env.runner import profile_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

PROFILES = ("plain", "mori")
"""In order of preference: the newer Python first."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status of the command, or 2 when it cannot be run."""
    parser = argparse.ArgumentParser(description="Runs a command with a newer vLLM's Python files.")
    parser.add_argument("command", nargs="+", help="after --: the program and its arguments")
    command = parser.parse_args(arguments).command
    folders = read_profiles()
    profile = next((name for name in PROFILES if name in folders), None)
    if profile is None:
        print("next_vllm: no environment is set up: run `make setup`", file=sys.stderr)
        return 2
    folder = layout.ROOT / folders[profile]
    try:
        with layout.LOCK.open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            sources = fetch(layout.environment_python(folder))
    except SetupError as error:
        print(f"next_vllm: {error}", file=sys.stderr)
        return 2
    environment = profile_environment(profile, folder, os.environ)
    # In front of the environment's own vLLM, in this process and in those that it starts.
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(sources), environment.get("PYTHONPATH", "")) if part
    )
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"next_vllm: {command[0]}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Runs several commands at the same time and shows what they print, line by line, under a name."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def run_together(
    command: Sequence[str], environments: Mapping[str, Mapping[str, str]]
) -> dict[str, int]:
    """Runs a command once in each environment, all at the same time.

    Args:
        command: The program and its arguments.
        environments: Environment variables by name; the name is put before each line.

    Returns:
        Exit status by name, 127 where the program could not be started.
    """
    width = max(map(len, environments))
    statuses: dict[str, int] = {}
    lock = threading.Lock()

    def show(name: str, line: str) -> None:
        with lock:
            sys.stdout.write(f"{name:{width}} | {line}")
            sys.stdout.flush()

    def run(name: str, environment: Mapping[str, str]) -> None:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            show(name, f"run: {command[0]}: {error.strerror}\n")
            statuses[name] = 127
            return
        with process:
            for line in process.stdout or ():
                show(name, line if line.endswith("\n") else line + "\n")
        statuses[name] = process.returncode

    threads = [threading.Thread(target=run, args=item) for item in environments.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: statuses[name] for name in environments}

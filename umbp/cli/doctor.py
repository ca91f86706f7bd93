# SPDX-License-Identifier: Apache-2.0
"""``umbp doctor``: makes the checks and prints what they found."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from umbp.cli.console import open_console
from umbp.cli.report import new_table
from umbp.doctor.finding import Finding, Level
from umbp.doctor.host import Host
from umbp.doctor.plan import read_plan
from umbp.doctor.table import examine
from umbp.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_FILE: Final = "@"
_COLUMNS: Final = ("", "what", "found")
_STYLES: Final = {
    Level.OK: "green",
    Level.WARN: "yellow",
    Level.FAIL: "bold red",
    Level.SKIP: "dim",
}


def run_doctor(parsed: argparse.Namespace, host: Host | None = None) -> int:
    """Makes the checks.

    Args:
        parsed: The options.
        host: The machine; None: this one.

    Returns:
        Exit status: 1 when something failed, else 0.

    Raises:
        ConfigError: The configuration cannot be read.
    """
    plan = read_plan(
        read_config(parsed.config),
        ranks=parsed.tensor_parallel_size,
        hash_algorithm=parsed.prefix_caching_hash_algo,
    )
    findings = examine(host or Host(), plan)
    failed = any(finding.level is Level.FAIL for finding in findings)
    if parsed.json:
        print(json.dumps(as_json(findings), indent=2))
    elif sys.stdout.isatty():
        _print_table(open_console(sys.stdout), findings)
    else:
        print("\n".join(_lines(findings)))
    return 1 if failed else 0


def read_config(text: str) -> Mapping[str, Any]:
    """Reads the option ``--config``.

    Args:
        text: JSON, or ``@`` and the name of a file of it.

    Raises:
        ConfigError: The file cannot be read, or there is no JSON object in it.
    """
    where = "--config"
    if text.startswith(_FILE):
        where = f"--config {text}"
        try:
            text = Path(text.removeprefix(_FILE)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no text"
            raise ConfigError(f"{where}: cannot be read ({reason}); name another file") from error
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}; quote it as for vLLM") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is a JSON {type(found).__name__}, expected an object")
    return found


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the report for programs."""
    return {
        "ok": not any(finding.level is Level.FAIL for finding in findings),
        "findings": [
            {
                "level": finding.level.value,
                "subject": finding.subject,
                "what": finding.result.what,
                "advice": finding.result.advice,
            }
            for finding in findings
        ],
    }


def _lines(findings: Iterable[Finding]) -> Iterable[str]:
    found = list(findings)
    width = max(len(finding.subject) for finding in found)
    for finding in found:
        yield f"{finding.level.value:<4}  {finding.subject:<{width}}  {finding.result.what}"
        if finding.result.advice:
            yield f"{'':<4}  {'':<{width}}  -> {finding.result.advice}"
    yield _summary(found)


def _print_table(console: "Console", findings: Sequence[Finding]) -> None:
    from rich.text import Text

    table = new_table(gap=2)
    for heading in _COLUMNS:
        table.add_column(heading, overflow="fold")
    for finding in findings:
        found = Text(finding.result.what)
        if finding.result.advice:
            found.append(f"\n→ {finding.result.advice}", style="bold")
        table.add_row(
            Text(finding.level.value, style=_STYLES[finding.level]), finding.subject, found
        )
    console.print(table)
    console.print(_summary(findings))


def _summary(findings: Iterable[Finding]) -> str:
    counts = Counter(finding.level for finding in findings)
    return ", ".join(f"{counts[level]} {level.value}" for level in Level)

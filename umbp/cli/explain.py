# SPDX-License-Identifier: Apache-2.0
"""``umbp explain``: why engines do not find each other's objects, or lookups find nothing."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from umbp.cli.arguments import positive
from umbp.cli.console import open_console
from umbp.cli.report import new_table
from umbp.errors import ConfigError
from umbp.explain.lookups import LookupRow, read_lookups
from umbp.explain.manifests import Row, compare, read_manifest

if TYPE_CHECKING:
    from rich.console import Console

_LOG_SUFFIX: Final = ".jsonl"
_LAST: Final = 20


def add_explain(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    explain = commands.add_parser(
        "explain",
        help="say why prompts do not hit, from what engines have written",
        description="Of two manifests: shows both side by side and what to set where they differ."
        " Of a log of lookups: shows the last ones, and what each lacked. Engines write both into"
        " their report_dir (docs/explain.md). Exit status 0: the manifests are equal, or some"
        " lookup has found something; 1 otherwise.",
        allow_abbrev=False,
    )
    explain.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="two files *.manifest.json, or one *.lookups.jsonl",
    )
    explain.add_argument(
        "--last",
        type=positive,
        default=_LAST,
        metavar="N",
        help="of a log, how many lookups to show (default: %(default)s)",
    )
    explain.add_argument(
        "--all", action="store_true", help="of manifests, show fields that are equal, too"
    )
    explain.add_argument("--json", action="store_true", help="print JSON instead")
    explain.set_defaults(run=_run_explain)


def _run_explain(parsed: argparse.Namespace) -> int:
    files: Sequence[Path] = parsed.files
    if len(files) == 1 and files[0].name.endswith(_LOG_SUFFIX):
        return _explain_lookups(files[0], parsed)
    if len(files) == 2:
        return _explain_manifests(files[0], files[1], parsed)
    raise ConfigError("name two files *.manifest.json, or one *.lookups.jsonl")


def _explain_manifests(first: Path, second: Path, parsed: argparse.Namespace) -> int:
    ours, theirs = read_manifest(first), read_manifest(second)
    rows = compare(ours, theirs)
    different = [row for row in rows if not row.is_equal]
    shown = rows if parsed.all else different
    if parsed.json:
        print(json.dumps([attrs.asdict(row) for row in shown], indent=2))
    else:
        console = open_console(sys.stdout)
        if shown:
            _print_rows(console, shown, (_name(ours, first), _name(theirs, second)))
        verdict = f"{len(different)} of {len(rows)} fields differ: they share no objects"
        if not different:
            verdict = f"all {len(rows)} fields are equal: they share objects"
        console.print(verdict)
    return 1 if different else 0


def _name(report: dict[str, Any], path: Path) -> str:
    return str(report.get("instance", path.name))


def _print_rows(console: "Console", rows: Iterable[Row], names: tuple[str, str]) -> None:
    from rich.text import Text

    table = new_table(gap=2)
    for heading in ("", "field", *names):
        table.add_column(heading, overflow="fold")
    for row in rows:
        mark = "" if row.is_equal else "≠"
        field = Text(row.path)
        if not row.is_equal:
            field.append(f"\n{row.what}", style="dim")
        table.add_row(mark, field, Text(row.first or "(none)"), Text(row.second or "(none)"))
        if row.advice:
            table.add_row("", Text(f"→ {row.advice}", style="bold"), "", "")
    console.print(table)


def _explain_lookups(path: Path, parsed: argparse.Namespace) -> int:
    rows = read_lookups(path)
    hits = sum(row.is_hit for row in rows)
    shown = rows[-parsed.last :]
    if parsed.json:
        print(json.dumps([attrs.asdict(row) for row in shown], indent=2))
    else:
        console = open_console(sys.stdout)
        _print_lookups(console, shown)
        console.print(f"{hits} of the last {len(rows)} lookups found something to load")
    return 0 if hits else 1


def _print_lookups(console: "Console", rows: Iterable[LookupRow]) -> None:
    from rich.text import Text

    table = new_table(gap=2)
    table.add_column("request", overflow="fold")
    for heading in ("prompt", "local", "hit to"):
        table.add_column(heading, justify="right")
    table.add_column("why not further", overflow="fold")
    for row in rows:
        end = "failed" if row.hit_end_tokens is None else str(row.hit_end_tokens)
        table.add_row(
            Text(row.request_id),
            str(row.prompt_tokens),
            str(row.local_tokens),
            end,
            Text(row.why),
        )
    console.print(table)

# SPDX-License-Identifier: Apache-2.0
"""Walks docs/walkthrough.md as a stranger would: runs its commands, and compares what they print.

    python3 tools/run.py --profile mori -- python tools/walk

Ports and folders of the page are replaced by free ones. What this machine lacks is left out, with a
line that says why; the exit status is 1 at the first command that does not do what the page says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from browser import NO_BROWSER, find_browser
from page import PageError
from site_pages import browse
from steps import WITH_MORI, Walk, read_walk
from terminal import Terminals, WalkError

from umbp.cli.console import Progress, open_console

if TYPE_CHECKING:
    from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "walkthrough.md"
PORTS = ("8000", "8001", "9090", "9001", "5557", "15557")
SITE = ROOT / "build" / "site"
VIEWER_PORT = "9001"
FOLDER = "~/umbp-walk"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", choices=("site", "memory", *WITH_MORI), help="a part; the whole takes minutes"
    )
    parser.add_argument("--keep", action="store_true", help="leave the folder of the walk")
    options = parser.parse_args()
    console = open_console(sys.stdout)
    # Short: sockets lie below it.
    folder = Path(tempfile.mkdtemp(prefix="umbp-walk-"))
    try:
        if options.only in (None, "site"):
            _browse(folder, console)
        if options.only != "site":
            _walk(folder, options.only, console)
    except (PageError, WalkError) as error:
        console.print(f"[red]✗[/] {error}", soft_wrap=True, markup=True)
        print(getattr(error, "detail", ""))
        console.print(f"  what the walk has left: {folder}")
        return 1
    if options.keep:
        console.print(f"  what the walk has left: {folder}")
    else:
        shutil.rmtree(folder)
    return 0


def _browse(folder: Path, console: Console) -> None:
    browser = find_browser()
    if browser is None or not SITE.is_dir():
        why = f"no folder {SITE}: make site" if browser else f"no program {NO_BROWSER}"
        console.print(f"[yellow]-[/] the site in a browser: left out: {why}", soft_wrap=True)
        return
    with Progress(console).step("every page of the site opens in a browser, every link leads on"):
        count = browse(browser, SITE, folder)
    console.print(f"  {count} pages")


def _walk(folder: Path, only: str | None, console: Console) -> None:
    blocks = read_walk(PAGE)
    words = {**dict(zip(PORTS, _free_ports(len(PORTS)), strict=True)), FOLDER: str(folder / "w")}
    (folder / "tmp").mkdir()
    terminals = Terminals(
        ROOT,
        folder,
        blocks["variables"],
        words=words,
        environment={**os.environ, "TMPDIR": str(folder / "tmp")},
    )

    def skip(what: str, why: str) -> None:
        console.print(f"[yellow]-[/] {what}: left out: {why}", soft_wrap=True)

    walk = Walk(blocks, terminals, folder / "w", step=Progress(console).step, skip=skip)
    try:
        usable = walk.prepare()
        if only in (None, "memory"):
            walk.memory(find_browser(), f"http://localhost:{words[VIEWER_PORT]}")
        for backend in WITH_MORI:
            if only not in (None, backend):
                continue
            if backend not in usable:
                skip(backend, "`umbp backends` says that it cannot be used here")
                continue
            engine = walk.other(backend)
            if backend == "standalone":
                walk.second_engine()
            engine.stop()
    finally:
        terminals.close()


def _free_ports(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


if __name__ == "__main__":
    sys.exit(main())

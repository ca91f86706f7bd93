# SPDX-License-Identifier: Apache-2.0
"""Opens every page of the built site in a browser, as a reader does from the folder."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
from typing import TYPE_CHECKING
from urllib.parse import urldefrag

from browser import Browser, BrowserError
from terminal import WalkError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OUTSIDE = ("https://*",)
"""The site must be readable without a network, ..."""
_DIAGRAMS = "https://unpkg.com/mermaid"
"""... all but its diagrams, which a script from there draws (docs/setup.md)."""
_LINKS = "[...document.querySelectorAll('a[href]')].map(link => link.href)"
_ANCHORS = "[...document.querySelectorAll('[id], a[name]')].map(one => one.id || one.name)"
_BROKEN_PICTURES = """
[...document.images].filter(one => one.complete && !one.naturalWidth).map(one => one.src)
"""
_PAGES_MAX = 200
_SOUGHT = "breaker"
_FOUND = "document.querySelector('.md-search-result').innerText.includes('matching document')"


def browse(program: str, site: Path, pictures: Path) -> int:
    """Follows all links within the site from its first page on.

    Args:
        program: The browser.
        site: Folder of the site.
        pictures: Folder for a screenshot of each page.

    Returns:
        How many pages there are.

    Raises:
        WalkError: A page does not load, complains on its console, or has a link or picture that
            leads nowhere; or the search finds nothing.
    """
    first = (site / "index.html").resolve().as_uri()
    base = first.removesuffix("index.html")
    anchors: dict[str, set[str]] = {}
    wanted: dict[str, set[tuple[str, str]]] = {}
    waiting = [first]
    browser = Browser(program)
    browser.block(OUTSIDE)
    try:
        while waiting:
            url = waiting.pop(0)
            if url in anchors:
                continue
            if len(anchors) == _PAGES_MAX:
                raise WalkError(f"{site}: more than {_PAGES_MAX} pages")
            anchors[url] = _visit(browser, url)
            name = url.removeprefix(base).replace("/", "-").removesuffix(".html")
            browser.screenshot(pictures / f"site-{name}.png")
            for link in browser.evaluate(_LINKS):
                page, anchor = urldefrag(link)
                if page.startswith(base):
                    wanted.setdefault(page, set()).add((anchor, url))
                    waiting.append(page)
        with _served(site) as address:
            browser.open(f"{address}/index.html?q={_SOUGHT}")
            browser.await_true(_FOUND)
    except BrowserError as error:
        raise WalkError(f"the site: {error}") from error
    finally:
        browser.close()
    _check_anchors(anchors, wanted)
    return len(anchors)


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def _served(site: Path) -> Iterator[str]:
    """Serves the site, which the search needs: it must read its index."""
    handler = functools.partial(_Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _visit(browser: Browser, url: str) -> set[str]:
    """Opens a page; returns the anchors that it has."""
    browser.open(url)
    broken = browser.evaluate(_BROKEN_PICTURES)
    problems = [one for one in browser.problems if _DIAGRAMS not in one]
    problems += [f"no picture {one}" for one in broken]
    if problems:
        raise WalkError(f"{url}: {len(problems)} problems", "\n".join(problems))
    return set(browser.evaluate(_ANCHORS))


def _check_anchors(anchors: dict[str, set[str]], wanted: dict[str, set[tuple[str, str]]]) -> None:
    missing = [
        f"{source} links to {page}#{anchor}"
        for page, places in wanted.items()
        for anchor, source in sorted(places)
        if anchor and anchor not in anchors[page]
    ]
    if missing:
        raise WalkError("the site has links that lead nowhere", "\n".join(missing))

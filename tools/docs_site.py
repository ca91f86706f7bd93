# SPDX-License-Identifier: Apache-2.0
"""Turns links to files of the project into their names: the site has the pages of docs/ only.

A hook of MkDocs (mkdocs.yml). In the project itself such links work as they are.
"""

from __future__ import annotations

import re

_LINK_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by MkDocs with the text of each page; returns the text to render."""
    return _LINK_OUTSIDE.sub(lambda match: _named(match[1], match[2]), markdown)


def _named(text: str, path: str) -> str:
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

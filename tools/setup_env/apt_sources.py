# SPDX-License-Identifier: Apache-2.0
"""Reads the package sources of this machine's apt, in both of its formats.

Nothing here names a mirror: whatever the machine is set up to use is used.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ETC_APT = Path("/etc/apt")

# `deb [option=value ...] uri suite component ...`
ONE_LINE = re.compile(r"^deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<rest>\S.*)$")


class AptSource(NamedTuple):
    """One place to take packages from.

    Attributes:
        uri: Base address of the archive.
        suite: Release, such as a code name.
        components: Parts of the archive, such as "main".
        signed_by: Path of the key that signs it, or the key's own text on several lines as
            apt writes it in its newer format. Empty: any key that apt trusts.
        is_trusted: Whether it needs no signature.
    """

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str = ""
    is_trusted: bool = False

    def stanza(self) -> str:
        """This source in apt's newer format."""
        lines = [
            "Types: deb",
            f"URIs: {self.uri}",
            f"Suites: {self.suite}",
            f"Components: {' '.join(self.components)}",
        ]
        if self.signed_by:
            lines.append(f"Signed-By: {self.signed_by}")
        if self.is_trusted:
            lines.append("Trusted: yes")
        return "\n".join(lines) + "\n"


def parse_one_line(text: str) -> list[AptSource]:
    """Parses the older format (`sources.list`). Lines that are not understood are left out."""
    sources = []
    for line in text.splitlines():
        match = ONE_LINE.match(line.partition("#")[0].strip())
        if match is None:
            continue
        options = {}
        for option in (match["options"] or "").split():
            name, _, value = option.partition("=")
            options[name.lower()] = value
        words = match["rest"].split()
        if len(words) >= 3:
            sources.append(
                AptSource(
                    uri=words[0],
                    suite=words[1],
                    components=tuple(words[2:]),
                    signed_by=options.get("signed-by", ""),
                    is_trusted=options.get("trusted") == "yes",
                )
            )
    return sources


def parse_deb822(text: str) -> list[AptSource]:
    """Parses the newer format (`*.sources`): one source for each URI and suite."""
    sources = []
    for fields in _stanzas(text):
        if (
            fields.get("enabled", "yes").lower() == "no"
            or "deb" not in fields.get("types", "").split()
        ):
            continue
        sources += [
            AptSource(
                uri=uri,
                suite=suite,
                components=tuple(fields.get("components", "").split()),
                signed_by=fields.get("signed-by", ""),
                is_trusted=fields.get("trusted", "").lower() == "yes",
            )
            for uri in fields.get("uris", "").split()
            for suite in fields.get("suites", "").split()
        ]
    return sources


def _stanzas(text: str) -> list[dict[str, str]]:
    """Splits `Name: value` text at empty lines. Names are lower case; a value may go on."""
    stanzas: list[dict[str, str]] = [{}]
    name = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if not line.strip():
            stanzas.append({})
        elif line[0].isspace():
            # The lines of an embedded key: apt wants them back as they were.
            stanzas[-1][name] = f"{stanzas[-1].get(name, '')}\n{line.rstrip()}"
        else:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            stanzas[-1][name] = value.strip()
    return [stanza for stanza in stanzas if stanza]


def read_sources(folder: Path = ETC_APT) -> list[AptSource]:
    """All enabled binary sources below `folder`, in apt's order."""
    parts = sorted((folder / "sources.list.d").glob("*"))
    sources = []
    for path in [folder / "sources.list", *parts]:
        if path.suffix not in {".list", ".sources"} or not path.is_file():
            continue
        parse = parse_deb822 if path.suffix == ".sources" else parse_one_line
        sources += parse(path.read_text(encoding="utf-8", errors="replace"))
    return sources


def distribution_source(sources: list[AptSource], code_name: str) -> AptSource | None:
    """The source of the distribution itself: its release, component main.

    Other archives may use the same release name. The distribution's is the one that also has an
    updates suite; without such a one, the first.

    Args:
        sources: All sources of the machine.
        code_name: The release's, such as VERSION_CODENAME in /etc/os-release.
    """
    candidates = [
        source for source in sources if source.suite == code_name and "main" in source.components
    ]
    with_updates = {source.uri for source in sources if source.suite == f"{code_name}-updates"}
    preferred = [source for source in candidates if source.uri in with_updates]
    return next(iter(preferred or candidates), None)

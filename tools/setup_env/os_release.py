# SPDX-License-Identifier: Apache-2.0
"""Which distribution this is."""

from __future__ import annotations


def read_os_release() -> dict[str, str]:
    """The fields of /etc/os-release, unquoted. Empty when there is no such file."""
    fields = {}
    try:
        with open("/etc/os-release", encoding="utf-8") as file:
            for line in file:
                name, separator, value = line.strip().partition("=")
                if separator:
                    fields[name] = value.strip("\"'")
    except FileNotFoundError:
        return {}
    return fields

# SPDX-License-Identifier: Apache-2.0
"""Types of arguments that several commands take; what is wrong with one is said in one line."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any


def positive(text: str) -> int:
    """Reads a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def whole(text: str) -> int:
    """Reads a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0")
    return int(text)


def at_least(least: float) -> Callable[[str], float]:
    """Returns what reads a number that is not below ``least``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least):
            raise argparse.ArgumentTypeError(f"'{text}' is not a number from {least:g}")
        return value

    return read


def span(text: str) -> tuple[int, int]:
    """Reads a whole number above 0, or two with dots between: the least and the most."""
    first, dots, last = text.partition("..")
    try:
        found = positive(first), positive(last if dots else first)
    except argparse.ArgumentTypeError:
        found = 1, 0
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form N or LEAST..MOST")
    return found


def key_value(text: str) -> tuple[str, Any]:
    """Reads ``KEY=VALUE``, the value in JSON or as plain text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form KEY=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value

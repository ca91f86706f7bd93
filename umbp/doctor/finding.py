# SPDX-License-Identifier: Apache-2.0
"""What a check has found."""

import enum

import attrs


class Level(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    """As it should be."""
    WARN = "warn"
    """The engine starts, and something is slower, or hits less, than it could."""
    FAIL = "fail"
    """The engine does not start, or restores nothing."""
    SKIP = "skip"
    """Not looked at: it does not matter here, or what it depends on is not known."""


@attrs.frozen
class Result:
    """What a check says.

    Attributes:
        level: How much it matters.
        what: What was found, on one line.
        advice: What to do about it; empty where there is nothing to do.
    """

    level: Level
    what: str
    advice: str = ""


@attrs.frozen
class Finding:
    """One line of the report.

    Attributes:
        subject: What was looked at, in a word or two.
        result: What was found.
    """

    subject: str
    result: Result

    @property
    def level(self) -> Level:
        """How much it matters."""
        return self.result.level


def ok(what: str) -> Result:
    """Returns that something is as it should be."""
    return Result(Level.OK, what)


def warn(what: str, advice: str) -> Result:
    """Returns that something could be better."""
    return Result(Level.WARN, what, advice)


def fail(what: str, advice: str = "") -> Result:
    """Returns that something will not work; without advice, ``what`` says what to do."""
    return Result(Level.FAIL, what, advice)


def skip(what: str) -> Result:
    """Returns that something was not looked at."""
    return Result(Level.SKIP, what)

# SPDX-License-Identifier: Apache-2.0
"""Options: declared once as attrs fields, checked by name, type and range, listed in one table.

An option class is a frozen attrs class whose fields are made by ``option``:

    @attrs.frozen
    class MyOptions:
        depth: int = option(8, help="Transfers in flight.", minimum=1)

A user writes one flat JSON object, and several option classes share it: the connector's and the
backend's. ``parse_options`` splits it. Whatever is wrong with it is a ``ConfigError`` of one line;
whatever is wrong with an option class is a ``UsageError``.
"""

import difflib
import json
import math
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from umbp.errors import ConfigError, UsageError

DEFAULT_WHERE: Final = "kv_connector_extra_config"
"""What the user calls the object that the options are written in."""

REQUIRED: Final[Any] = attrs.NOTHING
"""The default of an option that the user must give."""

_SCALARS: Final = (bool, int, float, str)
_SIMILAR: Final = 0.6
"""Least ratio by difflib at which a known name is near an unknown one; difflib's own default."""

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 120


def option(  # noqa: PLR0913 - one keyword for each column of the table
    default: Any,
    *,
    help: str,  # noqa: A002 - the word of attrs metadata, argparse and click
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] | None = None,
) -> Any:
    """Declares one option, a keyword-only attrs field.

    Args:
        default: Value when the user gives none; ``REQUIRED`` when there is no sensible one.
        help: What it does, in one or two sentences, for the table.
        unit: Unit of the value, such as ``"bytes"``.
        minimum: Least value that is accepted.
        maximum: Greatest value that is accepted.
        choices: All values that are accepted.

    Returns:
        The field. Range and choices are checked however the class is constructed; the type is
        checked by ``parse_options``.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "minimum": minimum,
        "maximum": maximum,
        "choices": None if choices is None else tuple(choices),
    }
    return attrs.field(default=default, kw_only=True, validator=_validate, metadata=metadata)


def parse_options(
    raw: Mapping[str, Any], *option_types: type[Any], where: str = DEFAULT_WHERE
) -> tuple[Any, ...]:
    """Splits what the user wrote over several option classes.

    Args:
        raw: Option names and values, as JSON gives them.
        option_types: Classes of fields made by ``option``.
        where: What to call ``raw`` in a message.

    Returns:
        One instance of each class, in order.

    Raises:
        ConfigError: A name is unknown or missing, or a value has the wrong type or range.
        UsageError: An option class is malformed, or two of them have an option of the same name.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} is {_show(raw)}, expected an object with option names as keys")
    owners = _owners(option_types)
    _refuse_unknown(raw, owners, where)
    return tuple(_build(option_type, raw, where) for option_type in option_types)


def option_table(*option_types: type[Any]) -> str:
    """Renders option classes as one Markdown table, in order of declaration.

    Raises:
        UsageError: An option class is malformed.
    """
    lines = ["| Option | Type | Default | Unit | Meaning |", "|---|---|---|---|---|"]
    for option_type in option_types:
        for attribute, kinds in _options(option_type).values():
            cells = (
                f"`{attribute.name}`",
                _expectation(attribute, kinds),
                "required" if attribute.default is REQUIRED else f"`{_json(attribute.default)}`",
                attribute.metadata.get("unit", ""),
                attribute.metadata["help"],
            )
            lines.append("| " + " | ".join(_cell(text) for text in cells) + " |")
    return "\n".join(lines) + "\n"


_Option = tuple["attrs.Attribute[Any]", tuple[type, ...]]


def _options(option_type: type[Any]) -> dict[str, _Option]:
    """Reads a class: the field and the accepted types of each option, by name."""
    if not attrs.has(option_type):
        raise UsageError(f"{option_type!r} is no attrs class")
    hints = typing.get_type_hints(option_type)
    found = {}
    for attribute in attrs.fields(option_type):
        if not attribute.init:
            continue
        label = f"{option_type.__name__}.{attribute.name}"
        if "help" not in attribute.metadata:
            raise UsageError(f"{label} has no help; declare it with umbp.options.option()")
        found[attribute.name] = (attribute, _kinds(hints[attribute.name], label))
    return found


def _kinds(hint: Any, label: str) -> tuple[type, ...]:
    """Lists the types that an annotation accepts, such as int and NoneType for ``int | None``."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    for kind in kinds:
        if kind not in (*_SCALARS, types.NoneType):
            raise UsageError(f"{label}: {hint!r} is no union of bool, int, float, str and None")
    return tuple(kinds)


def _owners(option_types: Iterable[type[Any]]) -> dict[str, type[Any]]:
    """Says which class each option belongs to."""
    owners: dict[str, type[Any]] = {}
    for option_type in option_types:
        for name in _options(option_type):
            if name in owners:
                first, second = owners[name].__name__, option_type.__name__
                raise UsageError(f"option {name} is declared by both {first} and {second}")
            owners[name] = option_type
    return owners


def _refuse_unknown(raw: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    names = sorted(known)
    unknown = [name for name in raw if name not in names]
    if not unknown:
        return
    shown = ", ".join(_show(name) for name in unknown)
    near = {
        match
        for name in unknown
        for match in difflib.get_close_matches(str(name), names, n=3, cutoff=_SIMILAR)
    }
    hint = f"did you mean {' or '.join(sorted(near))}?" if near else f"known: {', '.join(names)}"
    raise ConfigError(f"{where} has no option {shown}; {hint}")


def _build(option_type: type[Any], raw: Mapping[str, Any], where: str) -> Any:
    values = {}
    for name, (attribute, kinds) in _options(option_type).items():
        if name in raw:
            values[name] = _typed(raw[name], attribute, kinds, where)
            _check_range(values[name], attribute, where)
        elif attribute.default is REQUIRED:
            expected = _expectation(attribute, kinds)
            raise ConfigError(f"{where}: option {name} is required, expected {expected}")
    return option_type(**values)


def _typed(value: Any, attribute: "attrs.Attribute[Any]", kinds: Iterable[type], where: str) -> Any:
    """Returns the value in its declared type; an int where a float is declared becomes one."""
    kinds = tuple(kinds)
    # type() and not isinstance(): a bool is an int to Python, never to a user.
    if type(value) in kinds:
        if isinstance(value, float) and not math.isfinite(value):
            raise _refusal(value, attribute, "a finite number", where)
        return value
    if type(value) is int and float in kinds:
        try:
            return float(value)
        except OverflowError:
            raise _refusal(value, attribute, "a smaller number", where) from None
    raise _refusal(value, attribute, _expectation(attribute, kinds), where)


def _validate(_: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    _check_range(value, attribute, DEFAULT_WHERE)


def _check_range(value: Any, attribute: "attrs.Attribute[Any]", where: str) -> None:
    metadata = attribute.metadata
    choices = metadata.get("choices")
    if choices is not None and value is not None and value not in choices:
        raise _refusal(value, attribute, _choices(choices), where)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    minimum, maximum = metadata.get("minimum"), metadata.get("maximum")
    too_small = minimum is not None and value < minimum
    too_great = maximum is not None and value > maximum
    if too_small or too_great:
        raise _refusal(value, attribute, _range(minimum, maximum), where)


def _refusal(
    value: Any, attribute: "attrs.Attribute[Any]", expected: str, where: str
) -> ConfigError:
    unit = attribute.metadata.get("unit", "")
    suffix = f" ({unit})" if unit else ""
    return ConfigError(
        f"{where}: option {attribute.name} is {_show(value)}, expected {expected}{suffix}"
    )


def _expectation(attribute: "attrs.Attribute[Any]", kinds: Iterable[type]) -> str:
    """Says what an option accepts, such as ``int from 1 to 16, or null``."""
    metadata = attribute.metadata
    choices = metadata.get("choices")
    if choices is not None:
        accepted = _choices(choices)
    else:
        names = [kind.__name__ for kind in kinds if kind is not types.NoneType]
        accepted = " or ".join(names)
        limits = _range(metadata.get("minimum"), metadata.get("maximum"))
        accepted = f"{accepted} {limits}" if limits else accepted
    return f"{accepted}, or null" if types.NoneType in kinds else accepted


def _choices(choices: Iterable[Any]) -> str:
    return "one of " + ", ".join(_json(choice) for choice in choices)


def _range(minimum: float | None, maximum: float | None) -> str:
    if minimum is not None and maximum is not None:
        return f"from {minimum} to {maximum}"
    if minimum is not None:
        return f"at least {minimum}"
    return f"at most {maximum}" if maximum is not None else ""


def _json(value: Any) -> str:
    return json.dumps(value)


def _show(value: Any) -> str:
    """Shows a value on one line, cut when it is long, in JSON's words as the user wrote it."""
    if value is None or isinstance(value, bool):
        return _json(value)
    return _shown.repr(value).replace("\n", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

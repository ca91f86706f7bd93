# SPDX-License-Identifier: Apache-2.0
"""Options: every mistake a user can make is one line that names the option and what is expected."""

import math
from typing import Any, Optional

import attrs
import pytest

from umbp.errors import ConfigError, UsageError
from umbp.options import REQUIRED, option, option_table, parse_options


@attrs.frozen
class Engine:
    backend: str = option("memory", help="Backend by name.")
    lookup_timeout_ms: int = option(100, help="Wait for a lookup.", unit="ms", minimum=1)
    lookup_async: bool = option(False, help="Look up in the background.")
    node: int | None = option(None, help="NUMA node.", minimum=0)


@attrs.frozen
class Pool:
    capacity_bytes: int = option(64, help="Size.", unit="bytes", minimum=1, maximum=1000)
    high: float = option(0.9, help="Watermark.", minimum=0, maximum=1)
    mode: str = option("fast", help="Way.", choices=("fast", "safe"))


def refusal(raw: Any, *option_types: type, **keywords: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_options(raw, *(option_types or (Engine, Pool)), **keywords)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_flat_mapping_is_split_over_the_classes() -> None:
    engine, pool = parse_options({"capacity_bytes": 7, "backend": "x", "node": 1}, Engine, Pool)
    assert engine == Engine(backend="x", node=1)
    assert pool == Pool(capacity_bytes=7)


def test_nothing_given_means_the_defaults() -> None:
    assert parse_options({}, Engine, Pool) == (Engine(), Pool())


def test_an_int_is_taken_for_a_float_and_becomes_one() -> None:
    (pool,) = parse_options({"high": 1}, Pool)
    assert type(pool.high) is float
    assert pool.high == 1.0


def test_null_is_taken_where_the_annotation_has_it() -> None:
    assert parse_options({"node": None}, Engine)[0].node is None
    assert "option backend is null" in refusal({"backend": None})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lookup_timeout_ms", True, "is true, expected int at least 1 (ms)"),
        ("lookup_timeout_ms", 1.0, "is 1.0, expected int at least 1 (ms)"),
        ("lookup_timeout_ms", "1", "is '1', expected int at least 1 (ms)"),
        ("lookup_timeout_ms", 0, "is 0, expected at least 1 (ms)"),
        ("lookup_async", 1, "is 1, expected bool"),
        ("lookup_async", "false", "is 'false', expected bool"),
        ("backend", b"memory", "is b'memory', expected str"),
        ("backend", ["memory"], "is ['memory'], expected str"),
        ("node", -1, "is -1, expected at least 0"),
        ("node", "0", "is '0', expected int at least 0, or null"),
        ("capacity_bytes", -4, "is -4, expected from 1 to 1000 (bytes)"),
        ("capacity_bytes", 1001, "is 1001, expected from 1 to 1000 (bytes)"),
        ("high", 1.5, "is 1.5, expected from 0 to 1"),
        ("high", math.nan, "is nan, expected a finite number"),
        ("high", math.inf, "is inf, expected a finite number"),
        ("high", 10**400, "expected a smaller number"),
        ("mode", "slow", 'is \'slow\', expected one of "fast", "safe"'),
        ("mode", 3, 'is 3, expected one of "fast", "safe"'),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_expected(
    name: str, value: object, expected: str
) -> None:
    message = refusal({name: value})
    assert message.startswith(f"kv_connector_extra_config: option {name} is ")
    assert message.endswith(expected)


def test_a_value_of_many_lines_or_great_length_is_shown_short() -> None:
    message = refusal({"mode": "a\nb" + "x" * 5000})
    assert len(message) < 300


def test_an_unknown_option_names_the_nearest() -> None:
    message = refusal({"capacity_byte": 5})
    assert message == (
        "kv_connector_extra_config has no option 'capacity_byte'; did you mean capacity_bytes?"
    )


def test_an_unknown_option_with_nothing_near_lists_all() -> None:
    message = refusal({"zzz": 5})
    assert message == (
        "kv_connector_extra_config has no option 'zzz'; known: backend, capacity_bytes, high, "
        "lookup_async, lookup_timeout_ms, mode, node"
    )


def test_a_name_that_is_no_string_is_refused() -> None:
    assert "has no option 3" in refusal({3: 1})


def test_what_is_no_mapping_is_refused() -> None:
    assert "expected an object" in refusal([("backend", "x")])
    assert refusal(None, Engine, where="--option").startswith("--option is null")


def test_the_place_is_named_as_the_caller_says() -> None:
    assert refusal({"high": 2}, Pool, where="--option").startswith("--option: option high")


def test_a_required_option_must_be_given() -> None:
    @attrs.frozen
    class Remote:
        address: str = option(REQUIRED, help="Where it is.")

    assert refusal({}, Remote).endswith("option address is required, expected str")
    assert parse_options({"address": "a"}, Remote) == (Remote(address="a"),)


def test_range_and_choices_hold_for_direct_construction_too() -> None:
    with pytest.raises(ConfigError, match="capacity_bytes is 0"):
        Pool(capacity_bytes=0)
    with pytest.raises(ConfigError, match="mode is 'slow'"):
        Pool(mode="slow")


def test_one_name_in_two_classes_is_the_programmers_error() -> None:
    @attrs.frozen
    class Other:
        high: int = option(1, help="Again.")

    with pytest.raises(UsageError, match="option high is declared by both Pool and Other"):
        parse_options({}, Pool, Other)


def test_optional_and_inherited_fields_are_options() -> None:
    @attrs.frozen
    class Child(Pool):
        extra: Optional[str] = option(None, help="More.")  # noqa: UP045 - what older code writes

    (child,) = parse_options({"extra": "x", "capacity_bytes": 3}, Child)
    assert (child.extra, child.capacity_bytes) == ("x", 3)


def test_an_attrs_field_that_is_no_option_is_the_programmers_error() -> None:
    @attrs.frozen
    class Bare:
        size: int = 3

    with pytest.raises(UsageError, match=r"Bare\.size has no help"):
        parse_options({}, Bare)


def test_a_type_that_json_options_cannot_have_is_the_programmers_error() -> None:
    @attrs.frozen
    class Deep:
        sizes: list[int] = option(None, help="Many.")  # noqa: RUF009

    with pytest.raises(UsageError, match=r"Deep\.sizes"):
        parse_options({}, Deep)
    with pytest.raises(UsageError, match="no attrs class"):
        parse_options({}, int)


def test_a_field_that_the_constructor_does_not_take_is_no_option() -> None:
    @attrs.frozen
    class Derived:
        size: int = option(3, help="Size.")
        double: int = attrs.field(init=False, default=6)

    assert "'double'" in refusal({"double": 1}, Derived)


def test_the_table_has_one_row_for_each_option() -> None:
    table = option_table(Engine, Pool)
    rows = table.splitlines()
    assert rows[0] == "| Option | Type | Default | Unit | Meaning |"
    assert len(rows) == 2 + len(attrs.fields(Engine)) + len(attrs.fields(Pool))
    assert rows[2] == '| `backend` | str | `"memory"` |  | Backend by name. |'
    assert rows[3] == "| `lookup_timeout_ms` | int at least 1 | `100` | ms | Wait for a lookup. |"
    assert rows[5] == "| `node` | int at least 0, or null | `null` |  | NUMA node. |"
    assert rows[8] == '| `mode` | one of "fast", "safe" | `"fast"` |  | Way. |'


def test_the_table_survives_bars_and_line_ends() -> None:
    @attrs.frozen
    class Odd:
        size: int = option(REQUIRED, help="a|b\nc")

    row = option_table(Odd).splitlines()[2]
    assert row == "| `size` | int | required |  | a\\|b c |"

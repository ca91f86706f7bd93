# SPDX-License-Identifier: Apache-2.0
"""Bounds are positive, and cannot be changed under a running core."""

import attrs
import pytest

from umbp.errors import UsageError
from umbp.fsm import Core, CoreLimits

MAY_BE_ZERO = ("quarantine_s", "lazy_blocks_max")
POSITIVE = [field.name for field in attrs.fields(CoreLimits) if field.name not in MAY_BE_ZERO]


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_a_bound_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"^{name} must be positive, got {value}$"):
        CoreLimits(**({"unit_tokens": 16} | {name: value}))


def test_a_negative_quarantine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^period_s must not be negative, got -1$"):
        Core(CoreLimits(unit_tokens=16, quarantine_s=-1))


def test_bounds_do_not_change() -> None:
    limits = CoreLimits(unit_tokens=16)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        limits.unit_tokens = 32

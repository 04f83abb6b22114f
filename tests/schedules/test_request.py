"""Memory limits as a user gives them."""

from __future__ import annotations

import pytest

from megatron_zb.errors import UsageError
from megatron_zb.schedules.request import MemoryLimit


@pytest.mark.parametrize("fraction", [0.0, -0.5, float("inf"), float("nan")])
def test_a_limit_is_a_positive_finite_fraction(fraction: float) -> None:
    with pytest.raises(UsageError, match="is not a fraction of 1F1B's memory"):
        MemoryLimit.of(fraction, None, 4)


def test_a_limit_is_of_one_kind() -> None:
    with pytest.raises(UsageError, match="not both"):
        MemoryLimit.of(0.5, 1e9, 4)

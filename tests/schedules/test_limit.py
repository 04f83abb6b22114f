"""Limits of memory, as shares and in bytes."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest
from measured_runs import profile

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules import Costs
from megatron_zb.schedules.request import Limit

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("40GiB", 40 * GIB),
        ("1.5gib", 1.5 * GIB),
        ("512MB", 512e6),
        ("2TiB", 2**41),
        ("3KB", 3e3),
        ("5kib", 5120),
        ("40 GiB", 40 * GIB),
        ("7B", 7.0),
    ],
)
def test_bytes_have_a_unit(text: str, number: float) -> None:
    found = Limit.parse(text)
    assert found == Limit(bytes=number)
    assert str(found) == text


def test_a_share_has_none() -> None:
    assert Limit.parse("0.5") == Limit(0.5) == Limit.given(0.5) == Limit.given("0.5")
    assert str(Limit.parse("0.50")) == "0.50"
    assert str(Limit(5 / 3)) == str(5 / 3)
    for text in ("GiB", "40G", "40GiBs", "-1GiB", "half", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="neither a share"):
            Limit.parse(text)


def test_bytes_are_a_share_of_what_the_profile_says_of_1f1b() -> None:
    ran = profile()
    total = sum(stage.activation for stage in ran.stages)
    given = Limit.parse("1KB")
    assert given.with_share("--limit", total) == Limit(1000 / total, 1000.0)
    assert Limit(0.5).with_share("--limit", None) == Limit(0.5)
    with pytest.raises(UsageError, match="--limit 1KB is in bytes, and only a profile tells"):
        given.with_share("--limit", None)


def test_a_limit_is_bytes_where_costs_are_measured() -> None:
    costs = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.0, weight=1.0)
    assert Limit(0.5, 1000.0).in_unit_of(costs, is_measured=False) == 2.0
    assert Limit(0.5, 1000.0).in_unit_of(costs, is_measured=True) == 1000.0
    assert Limit(0.5).in_unit_of(costs, is_measured=True) == 2.0


@pytest.mark.parametrize("fraction", [0.0, -0.5, float("inf"), float("nan")])
def test_a_limit_is_a_positive_finite_fraction(fraction: float) -> None:
    with pytest.raises(UsageError, match="is not a fraction of 1F1B's memory"):
        Limit.of(fraction, 4)


def test_a_limit_is_of_one_kind() -> None:
    with pytest.raises(UsageError, match="not both"):
        Limit.of(Limit(0.5, 1e9), 4)


@pytest.mark.parametrize("activation", [1.0, 1.3, 0.7, 3.3333333, 1e9 / 7])
def test_the_smallest_limit_that_is_named_is_served(activation: float) -> None:
    """The number is rounded up: 1.4444 is named 1.445, not 1.444."""
    costs = Costs.of_slices(
        pipeline_size=3,
        forward=[1.0] * 3,
        backward=[1.0] * 3,
        weight=[1.0] * 3,
        activation=[activation, activation / 7, activation / 3],
    )
    given: dict[str, Any] = {"pipeline_size": 3, "num_microbatches": 6, "costs": costs, "chunks": 3}
    with pytest.raises(UsageError, match="needs at least") as raised:
        schedules.build("interleaved", memory_limit=0.01, **given)
    named = re.search(r"at least (\S+) of 1F1B", str(raised.value))
    assert named is not None
    schedules.build("interleaved", memory_limit=float(named[1]), **given)

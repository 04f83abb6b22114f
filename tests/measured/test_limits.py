"""Limits of memory, as shares and in bytes."""

from __future__ import annotations

import argparse

import pytest
from measured_runs import profile

from megatron_zb.errors import UsageError
from megatron_zb.measured.limits import Limit
from megatron_zb.parsing import Bytes, share_or_bytes
from megatron_zb.schedules import Costs

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "number"),
    [("40GiB", 40 * GIB), ("1.5gib", 1.5 * GIB), ("512MB", 512e6), ("2TiB", 2**41), ("3KB", 3e3)],
)
def test_bytes_have_a_unit(text: str, number: float) -> None:
    found = share_or_bytes(text)
    assert isinstance(found, Bytes)
    assert found.number == number
    assert str(found) == text


def test_a_share_has_none() -> None:
    assert share_or_bytes("0.5") == 0.5
    for text in ("40 GiB", "GiB", "40G", "40GiBs", "-1GiB", "half", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="neither a share"):
            share_or_bytes(text)


def test_bytes_are_a_share_of_what_the_profile_says_of_1f1b() -> None:
    ran = profile()
    total = sum(stage.activation for stage in ran.stages)
    given = Bytes("1KB")
    assert Limit.of("--limit", given, ran) == Limit(1000 / total, 1000.0)
    assert Limit.of("--limit", given, ran, scale=2.0) == Limit(500 / total, 1000.0)
    assert Limit.of("--limit", 0.5, None) == Limit(0.5)
    assert Limit.of("--limit", None, ran) is None
    with pytest.raises(UsageError, match="--limit 1KB is in bytes, and only a profile tells"):
        Limit.of("--limit", given, None)


def test_a_limit_is_bytes_where_costs_are_measured() -> None:
    costs = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.0, weight=1.0)
    assert Limit(0.5, 1000.0).in_unit_of(costs, is_measured=False) == 2.0
    assert Limit(0.5, 1000.0).in_unit_of(costs, is_measured=True) == 1000.0
    assert Limit(0.5).in_unit_of(costs, is_measured=True) == 2.0

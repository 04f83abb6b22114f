"""Strategies as text, and the states of a rank added up."""

from __future__ import annotations

import pytest

from megatron_zb.plan.byte_counts import StateBytes
from megatron_zb.plan.strategy import Strategy, _neighbours


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "TP2 PP4 DP8 b=1"),
        ({"context": 2}, "TP2 CP2 PP4 DP8 b=1"),
        ({"expert": 4}, "TP2 PP4 DP8 EP4 b=1"),
        ({"expert": 4, "expert_tensor": 2}, "TP2 PP4 DP8 EP4 ETP2 b=1"),
        ({"precision": "fp8"}, "TP2 PP4 DP8 b=1 fp8"),
        ({"recompute": "full"}, "TP2 PP4 DP8 b=1 recompute full"),
    ],
)
def test_a_strategy_names_what_is_not_usual(changes: dict[str, int | str], text: str) -> None:
    usual = {"tensor": 2, "pipeline": 4, "data": 8, "expert": 1, "microbatch": 1}
    values: dict[str, int | str] = {**usual, "recompute": "none", **changes}
    assert str(Strategy(**values)) == text  # type: ignore[arg-type]


def test_states_are_added_part_by_part() -> None:
    one, other = StateBytes(1, 2, 3, 4, 5), StateBytes(10, 20, 30, 40, 50)
    assert one + other == StateBytes(11, 22, 33, 44, 55)


def test_numbers_of_gpus_that_are_tried_instead_are_the_nearest() -> None:
    assert list(_neighbours(2))[:3] == [1, 3, 4]

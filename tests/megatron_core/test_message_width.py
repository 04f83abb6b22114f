"""Stages that exchange more than one hidden state: the residual streams of hyper-connections."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpt_cases import SEQUENCE, GPTCase, _compare, _references, run
from ranks import RankPools

M = 4


def beside_megatron(streams: str, schedule: str) -> list[str]:
    """Compare with Megatron's own schedule, which sends wide messages only if it exchanges shapes.

    Ours knows the width from the config.
    """
    case = GPTCase(changes=(streams,), options=(("moe_token_dispatcher_type", "alltoall"),))
    expected = _references(replace(case, lengths=(SEQUENCE,)), [M], False)[0]
    return _compare(run(case, schedule, [M])[M], expected)


@pytest.mark.parametrize(
    ("streams", "schedule"),
    [
        ("mhc streams", "1f1b"),
        ("mhc streams", "zb-h1"),
        ("mhc streams", "v-half"),
        ("mhc streams", "v-zb"),
        ("hyper streams", "interleaved"),
    ],
)
def test_residual_streams_travel_side_by_side(
    ranks: RankPools, streams: str, schedule: str
) -> None:
    assert ranks(2).run(beside_megatron, streams=streams, schedule=schedule) == [[], []]

"""Check of losses for NaN and infinity."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPools

from megatron_zb.train.finite import NotFinite, check_loss, said_in_a_sentence


def said_of(value: float) -> str:
    check_loss(torch.tensor(1.0))
    try:
        with said_in_a_sentence(3):
            check_loss(torch.tensor(value))
    except NotFinite as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("value", "what"), [("nan", "NaN"), ("inf", "Inf"), ("-inf", "Inf"), ("1", "")]
)
def test_a_loss_is_checked_at_once(ranks: RankPools, value: str, what: str) -> None:
    (said,) = ranks(1).run(said_of, value=float(value))
    if not what:
        assert said == ""
        return
    assert said.startswith(f"rank 0 found {what} in local forward loss calculation, in iteration 3")

"""Small orders whose memory can be counted by hand, and a schedule without backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_zb import schedules
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.simulator import peak_held_chunks

F, B, W, BW = (PassKind(kind) for kind in ("F", "B", "W", "BW"))


@pytest.mark.parametrize(
    ("order", "held"),
    [
        ([], 0),
        ([F], 1),
        ([F, F], 2),
        ([F, B, F], 2),  # B's operands are held until W
        ([F, B, W, F], 1),
        ([F, BW, F, BW], 1),
        ([F, F, BW, F, F], 3),
    ],
)
def test_chunks_are_held_from_f_until_nothing_needs_them(order: list[PassKind], held: int) -> None:
    assert peak_held_chunks([Pass(kind, 0, 0) for kind in order]) == held


def test_a_schedule_without_backward_has_no_backward() -> None:
    whole = schedules.build("zb-h1", pipeline_size=2, num_microbatches=2)
    with pytest.raises(
        schedules.InvalidSchedule, match="forward-only schedule has no passes but F"
    ):
        replace(whole, forward_only=True).validate()

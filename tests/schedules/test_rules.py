"""Orders that break one rule of a training step each, and the place that is named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron_zb import schedules
from megatron_zb.schedules.passes import Pass, PassKind


def passes(text: str) -> tuple[Pass, ...]:
    """Passes of stage 1 from words such as F0 and BW1."""
    return tuple(
        Pass(PassKind(kind), 1, int(microbatch))
        for kind, microbatch in (re.findall(r"\D+|\d+", word) for word in text.split())
    )


@pytest.mark.parametrize(
    ("order", "rule", "position"),
    [
        ("F0 W0 B0 F1 B1 W1", "order", 1),
        ("B0 F0 W0 F1 B1 W1", "order", 0),
        ("F0 BW0 BW1 F1", "order", 2),
        ("F1 F0 B0 W0 B1 W1", "microbatch order", 0),
        ("F0 F1 B1 W1 B0 W0", "microbatch order", 2),
        ("F0 F1 B0 B1 W1 W0", "microbatch order", 4),
        ("F0 F0 B0 W0", "microbatch order", 1),
    ],
)
def test_a_broken_rule_is_named_at_its_first_place(order: str, rule: str, position: int) -> None:
    whole = schedules.build("zb-h1", pipeline_size=2, num_microbatches=2)
    broken = replace(whole, ranks=(whole.ranks[0], passes(order)))
    with pytest.raises(schedules.InvalidSchedule) as raised:
        broken.validate()
    assert f"rank 1, position {position}, " in str(raised.value)
    assert f"rule '{rule}'" in str(raised.value)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("F0 F1 B0 B1 W0", "1 of 2 W passes are listed"),
        ("F0 B0 W0", "1 of 2 F passes are listed"),
        ("F0 F1 B0 W0", "1 of 2 B passes are listed"),
    ],
)
def test_what_is_missing_is_counted(order: str, said: str) -> None:
    whole = schedules.build("zb-h1", pipeline_size=2, num_microbatches=2)
    broken = replace(whole, ranks=(whole.ranks[0], passes(order)))
    with pytest.raises(schedules.InvalidSchedule, match=said):
        broken.validate()

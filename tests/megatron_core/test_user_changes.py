"""Models that users have changed: gradients equal Megatron's, unsplit layers are named."""

from __future__ import annotations

import random
from contextlib import redirect_stdout
from io import StringIO

import pytest
from gpt_cases import GPTCase, differences
from ranks import RankPools
from user_changes import CHANGES

SCHEDULES = ("zb-h1", "zb-2p", "v-half", "v-zb", "auto")
SPLITTING = (*SCHEDULES, "1f1b")


def said_and_different(case: GPTCase, schedule: str) -> tuple[str, list[str]]:
    """What a rank says, and where its losses and gradients are not Megatron's to the last bit."""
    with redirect_stdout(StringIO()) as said:
        found = differences(case, schedule, [4])
    return said.getvalue(), found


def whole_layers(said: str) -> set[str]:
    """The layers that lines name, without their numbers: ``decoder.layers.3.mlp.linear_fc1``."""
    lines = [line for line in said.splitlines() if ": not split, " in line]
    named = [name for line in lines for name in line.split(": ")[1].split(", ")]
    return {name.split(".", 3)[3] for name in named}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_equals_megatrons(ranks: RankPools, name: str) -> None:
    """Under a schedule with two chunks per rank, whose first passes are split."""
    late = name in ("hook", "post-accumulate hook", "multi hook", "penalty")
    case = GPTCase(changes=() if late else (name,), late_changes=(name,) if late else ())
    for said, found in ranks(2).run(said_and_different, case=case, schedule="v-half"):
        assert found == []
        assert whole_layers(said) == CHANGES[name][1]


def drawn(number: int) -> tuple[GPTCase, str]:
    """A combination of two or three changes, a schedule and a way to take gradients, by a seed."""
    rng = random.Random(number)
    names = tuple(rng.sample(sorted(CHANGES), rng.choice((2, 2, 3))))
    early = rng.randint(0, len(names))
    dtype, data_parallel, overlap = rng.choice(
        (("float32", 1, False), ("float32", 1, True), ("bfloat16", 1, True), ("float32", 2, True))
    )
    schedule = rng.choice(SPLITTING)
    return (
        GPTCase(
            tied=rng.random() < 0.5,
            dtype=dtype,
            data_parallel=data_parallel,
            overlap_grad_reduce=overlap,
            wrapped=data_parallel > 1 or overlap or dtype != "float32" or rng.random() < 0.7,
            changes=names[:early],
            late_changes=names[early:],
        ),
        schedule,
    )


@pytest.mark.parametrize(
    "number", [*range(15), *(pytest.param(n, marks=pytest.mark.full) for n in range(15, 60))]
)
def test_mixtures_equal_megatrons(ranks: RankPools, number: int) -> None:
    case, schedule = drawn(number)
    expected = set().union(*(CHANGES[name][1] for name in (*case.changes, *case.late_changes)))
    for said, found in ranks(2 * case.data_parallel).run(
        said_and_different, case=case, schedule=schedule
    ):
        assert found == [], (case, schedule)
        if said:
            assert whole_layers(said) <= expected

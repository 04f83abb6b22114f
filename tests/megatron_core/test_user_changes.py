"""Models that users have changed: gradients equal Megatron's, unsplit layers are named."""

from __future__ import annotations

import random
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import drawn_sizes
import pytest
import torch
from gpt_cases import GPTCase, built, differences, forward_backward, microbatches, run
from ranks import RankPool, RankPools
from recompute_offload import with_recompute_offload
from user_changes import CHANGES

from megatron_zb import schedules
from megatron_zb.measured.profile import read_profile
from megatron_zb.megatron_core.profiling import ITERATIONS
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.passes import PassKind

SCHEDULES = ("zb-h1", "zb-2p", "v-half", "v-zb", "auto")
SPLITTING = (*SCHEDULES, "1f1b")
WITH_REENTRY = ("checkpoint with reentry", "checkpoint of Megatron")


def said_and_different(case: GPTCase, schedule: str | Schedule) -> tuple[str, list[str]]:
    """What a rank says, and where its losses and gradients are not Megatron's to the last bit."""
    with redirect_stdout(StringIO()) as said:
        found = differences(case, schedule, [4])
    return said.getvalue(), found


def whole_layers(said: str) -> set[str]:
    """The layers that lines name, without their numbers: ``decoder.layers.3.mlp.linear_fc1``."""
    lines = [line for line in said.splitlines() if ": not split, " in line]
    named = [name for line in lines for name in line.split(": ")[1].split(", ")]
    return {name.split(".", 3)[3] for name in named}


@pytest.mark.long
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
    tensor_parallel = 2 if data_parallel == 1 and rng.random() < 0.25 else 1
    schedule = rng.choice(SPLITTING)
    return (
        GPTCase(
            tied=rng.random() < 0.5,
            dtype=dtype,
            data_parallel=data_parallel,
            tensor_parallel=tensor_parallel,
            overlap_grad_reduce=overlap,
            wrapped=data_parallel > 1 or overlap or dtype != "float32" or rng.random() < 0.7,
            changes=names[:early],
            late_changes=names[early:],
        ),
        schedule,
    )


def hides_a_use(case: GPTCase) -> bool:
    """Whether another use of a weight is in no graph of a forward, but in one of a backward."""
    changes = {*case.changes, *case.late_changes}
    uses = {"penalty", "direct product", "gradient penalty"}
    return not changes.isdisjoint(WITH_REENTRY) and not changes.isdisjoint(uses)


@pytest.mark.slow
@pytest.mark.parametrize("number", drawn_sizes.first(10, range(60)))
def test_mixtures_equal_megatrons(ranks: RankPools, number: int) -> None:
    case, schedule = drawn(number)
    expected = set().union(*(CHANGES[name][1] for name in (*case.changes, *case.late_changes)))
    pool = ranks(2 * case.data_parallel * case.tensor_parallel)
    if hides_a_use(case):
        assert_close_to_megatrons(pool, case, schedule)
        return
    for said, found in pool.run(said_and_different, case=case, schedule=schedule):
        assert found == [], (case, schedule)
        if said:
            assert whole_layers(said) <= expected


STATES = [("hook", "checkpoint"), ("weight norm", "penalty"), ("multi hook", "saved on the host")]


@pytest.mark.parametrize("names", STATES, ids=" and ".join)
def test_changes_beside_recomputation_and_offload(ranks: RankPools, names: tuple[str, ...]) -> None:
    """An order in which some units run R, and others D and H."""
    kept = schedules.build("v-half", pipeline_size=2, num_microbatches=4)
    order = with_recompute_offload(kept, seed=1, recompute=0.4, offload=0.4)
    assert order.recomputed and order.offloaded
    case = GPTCase(changes=names)
    for _, found in ranks(2).run(said_and_different, case=case, schedule=order):
        assert found == []


def test_the_share_of_each_stage_is_counted(ranks: RankPools) -> None:
    """By hand: fc1 has 128 x 32 of the 12,288 numbers of a layer, the output layer 64 x 32."""
    told = ranks(2).run(shares_and_said, case=GPTCase(late_changes=("hook",)), schedule="v-half")
    for shares, before, after, _ in told:
        assert shares == [0.3333, 0.3333, 0.3333, 0.2857]
        assert before == 1.0
        assert after == pytest.approx([2 / 3, (2 / 3 + 5 / 7) / 2], abs=1e-4)
    assert "33% of stage 2, 29% of stage 3: the expected bubble is" in told[0][3]


def shares_and_said(case: GPTCase, schedule: str) -> tuple[list[float], float, list[float], str]:
    """The shares that B computes, W of a rank in the costs before and after, and what is said."""
    with redirect_stdout(StringIO()) as said, built(case, schedule, 4) as (adapter, chunks):
        assert adapter is not None
        before = adapter.costs.seconds[PassKind.W][0]
        data = [microbatches(case, 4) for _ in chunks]
        forward_backward(adapter.forward_backward_func, chunks, data, 4)
        return (
            list(adapter.current.unsplit_shares),
            before,
            list(adapter.costs.seconds[PassKind.W]),
            said.getvalue(),
        )


def gradients_of(case: GPTCase, schedule: str | None) -> tuple[str, dict[str, torch.Tensor]]:
    with redirect_stdout(StringIO()) as said:
        outcome = run(case, schedule, [4])[4]
    return said.getvalue(), outcome.gradients


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_use_that_begins_later_is_found(ranks: RankPools, wrapped: bool) -> None:
    """It is in no graph of the first microbatch."""
    case = GPTCase(wrapped=wrapped, overlap_grad_reduce=wrapped, late_changes=("late penalty",))
    for said in assert_close_to_megatrons(ranks(2), case, "v-half"):
        assert whole_layers(said) == {"mlp.linear_fc2"}


def assert_close_to_megatrons(pool: RankPool, case: GPTCase, schedule: str) -> list[str]:
    """Compare gradients whose sums are in another order, once; return what each rank says."""
    upstream = pool.run(gradients_of, case=case, schedule=None)
    expected = {name: gradient for _, of in upstream for name, gradient in of.items()}
    ours = pool.run(gradients_of, case=case, schedule=schedule)
    for _, found in ours:
        assert found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
    return [said for said, _ in ours]


def test_fused_accumulation_keeps_the_gradient_of_another_use(ranks: RankPools) -> None:
    """Megatron's own, with its fused kernel, drops it: the reference is without that."""
    case = GPTCase(changes=("penalty",))
    pool = ranks(2)
    expected = {
        n: g for _, of in pool.run(gradients_of, case=case, schedule=None) for n, g in of.items()
    }
    fused = replace(case, fused_accumulation=True)
    for said, found in pool.run(gradients_of, case=fused, schedule="v-half"):
        assert whole_layers(said) == {"mlp.linear_fc2"}
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def unsplit_in_profile(case: GPTCase, path: Path) -> list[float]:
    with built(case, "v-half", 4) as (adapter, chunks):
        assert adapter is not None
        adapter.profile(path, None)
        for _ in range(ITERATIONS):
            data = [microbatches(case, 4) for _ in chunks]
            forward_backward(adapter.forward_backward_func, chunks, data, 4)
        torch.distributed.barrier()
    return [stage.unsplit for stage in read_profile(path).stages]


def test_a_profile_says_what_b_computes(ranks: RankPools, tmp_path: Path) -> None:
    case, path = GPTCase(late_changes=("hook",)), tmp_path / "run.yaml"
    assert (
        ranks(2).run(unsplit_in_profile, case=case, path=path)
        == [[0.3333, 0.3333, 0.3333, 0.2857]] * 2
    )

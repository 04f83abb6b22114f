"""Optimizer post-validation against Megatron's synchronous step, in runs that take every branch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import drawn_sizes
import pytest
import torch
from gpt_cases import GPTCase
from ranks import RankPools
from torch.overrides import TorchFunctionMode
from validated_training import Run, Training, both, train

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.post_validation import OptimizerSnapshot

FULL = pytest.mark.full
FP32 = GPTCase(layers=4)
BF16 = GPTCase(dtype="bfloat16", layers=4)
FP16 = GPTCase(dtype="float16", layers=4)


def check(found: list[tuple[Run, Run]]) -> None:
    """Losses, skipped steps, learning rates and weights to the last bit, on every rank.

    The norm of a step that was right at once is summed up in another order than Megatron's.
    """
    for synchronous, validated in found:
        assert validated.losses == synchronous.losses
        for step, expected in zip(validated.steps, synchronous.steps, strict=True):
            assert step._replace(norm=None) == expected._replace(norm=None)
            if expected.norm is None:
                assert step.norm is None
            else:
                assert step.norm == pytest.approx(expected.norm, rel=1e-6)
        for name, parameter in validated.parameters.items():
            assert torch.equal(parameter, synchronous.parameters[name]), name


@pytest.mark.parametrize(
    ("case", "schedule"),
    [(FP32, "v-half"), (BF16, "zb-h1"), (FP16, "1f1b"), (FP16, "interleaved")],
    ids=["fp32-v-half", "bf16-zb-h1", "fp16-1f1b", "fp16-interleaved"],
)
def test_without_clipping_every_step_is_right_at_once(
    ranks: RankPools, case: GPTCase, schedule: str
) -> None:
    training = Training(case, schedule, clip=1e6, iterations=4)
    found = ranks(2).run(both, training=training)
    check(found)
    assert all(validated.mended == [] for _, validated in found)


def fitting(case: GPTCase, pipeline: int) -> GPTCase:
    """Give every stage of a V a layer."""
    return replace(case, layers=2 * pipeline)


def clipped_and_infinite(case: GPTCase, schedule: str, **more: Any) -> Training:
    """Some steps are clipped; two in a row and another are skipped where there is a loss scale."""
    infinite = ((1, 1), (2, 3), (4, 0)) if case.dtype == "float16" else ()
    clip = CLIP_SOME_TIED if case.tied else CLIP_SOME
    return Training(case, schedule, clip=clip, infinite=infinite, **more)


# Between the norms of the iterations.
CLIP_SOME = 1.2
CLIP_SOME_TIED = 1.25
PARALLEL = {
    "tensor-parallel": replace(FP16, tensor_parallel=2),
    "data-parallel": replace(FP16, data_parallel=2, overlap_grad_reduce=True),
    "distributed-optimizer": replace(FP16, data_parallel=2, distributed_optimizer=True),
    "distributed-optimizer-overlapped": replace(
        BF16, data_parallel=2, distributed_optimizer=True, overlap_grad_reduce=True
    ),
    "distributed-optimizer-fp32": replace(FP32, data_parallel=2, distributed_optimizer=True),
    "tied": replace(FP16, tied=True),
}
FURTHER = ("data-parallel", "distributed-optimizer", "distributed-optimizer-fp32", "tied")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "schedule", "pipeline"),
    [
        (FP32, "1f1b", 2),
        pytest.param(BF16, "v-half", 2, marks=FULL),
        pytest.param(BF16, "zb-h1", 4, marks=FULL),
        (FP16, "v-half", 4),
        pytest.param(FP16, "zb-h1", 2, marks=FULL),
    ],
    ids=["fp32-1f1b", "bf16-v-half", "bf16-zb-h1", "fp16-v-half", "fp16-zb-h1"],
)
def test_wrong_steps_are_mended(
    ranks: RankPools, case: GPTCase, schedule: str, pipeline: int
) -> None:
    training = clipped_and_infinite(fitting(case, pipeline), schedule)
    found = ranks(pipeline).run(both, training=training)
    check(found)
    check_mended(found, CLIP_SOME)
    if training.infinite:
        skipped = [i for i, step in enumerate(found[0][1].steps) if step.skipped]
        assert skipped == [1, 2, 4]


def check_mended(found: list[tuple[Run, Run]], clip: float) -> None:
    """The same steps on all ranks: those that Megatron has skipped or clipped, and no others."""
    for _, validated in found:
        wrong = [
            i for i, step in enumerate(found[0][0].steps) if step.norm is None or step.norm > clip
        ]
        assert validated.mended == wrong
        assert 0 < len(wrong) < len(validated.steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("tensor-parallel", "v-half"),
        ("distributed-optimizer-overlapped", "v-half"),
        *(pytest.param(name, "v-half", marks=FULL) for name in FURTHER),
        pytest.param("tied", "zb-h1", marks=FULL),
        pytest.param("tensor-parallel", "zb-h1", marks=pytest.mark.full),
    ],
)
def test_wrong_steps_are_mended_in_parallel(ranks: RankPools, name: str, schedule: str) -> None:
    world_size = 2 if name == "tied" else 4
    training = clipped_and_infinite(PARALLEL[name], schedule)
    found = ranks(world_size).run(both, training=training)
    check(found)
    check_mended(found, training.clip)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"dropout": 0.2},
        {"optimizer": "sgd"},
        {"on_host": True},
        {"settled": (0, 1, 2, 4)},
        {"settled": tuple(range(6))},
    ],
    ids=["dropout", "sgd", "on-host", "settled", "always-settled"],
)
def test_wrong_steps_are_mended_whatever_else(ranks: RankPools, more: dict[str, Any]) -> None:
    found = ranks(2).run(both, training=clipped_and_infinite(FP16, "v-half", **more))
    check(found)
    check_mended(found, CLIP_SOME)


MANY = 60 if drawn_sizes.IS_FULL else 18
# Alone, two and three in a row, on each rank, and on two ranks in one iteration.
INFINITE = ((2, 1), (3, 3), (6, 0), (9, 2), (9, 0), (10, 1), (11, 2), (14, 3), (MANY - 1, 1))
# What a run does before an evaluation, a checkpoint and its end: after right and wrong steps.
SETTLED = (5, 6, 7, 8, 10, 13, 15, MANY - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "mended"),
    [
        (Training(FP32, "v-zb", clip=1e6, iterations=6), "none"),
        (Training(FP32, "v-half", clip=0.01, iterations=6), "all"),
        pytest.param(Training(BF16, "v-half", clip=CLIP_SOME, iterations=10), "some", marks=FULL),
        pytest.param(
            Training(FP16, "v-zb", iterations=MANY, infinite=INFINITE), "some", marks=FULL
        ),
        (
            Training(
                FP16,
                "v-half",
                clip=CLIP_SOME,
                iterations=MANY,
                infinite=INFINITE,
                settled=SETTLED,
            ),
            "some",
        ),
    ],
    ids=["not-clipped", "always-clipped", "some-clipped", "infinite", "infinite-and-clipped"],
)
def test_many_iterations(ranks: RankPools, training: Training, mended: str) -> None:
    found = ranks(2).run(both, training=training)
    check(found)
    for synchronous, validated in found:
        skipped = {i for i, step in enumerate(validated.steps) if step.skipped}
        assert skipped >= {i for i, _ in training.infinite}  # a loss scale may grow too large
        assert bool(skipped) == bool(training.infinite)
        clipped = {
            i
            for i, step in enumerate(synchronous.steps)
            if training.clip and step.norm is not None and step.norm > training.clip
        }
        assert set(validated.mended) == skipped | clipped
        counted = {"none": 0, "all": training.iterations}.get(mended, len(skipped | clipped))
        assert len(validated.mended) == counted
        assert mended != "some" or 0 < counted < training.iterations


def test_the_size_of_what_is_kept(ranks: RankPools) -> None:
    """Adam in single precision: a parameter, two averages, and the count of its steps."""
    for iterations, count in ((0, 0), (1, 4)):  # it is made in the first step
        training = Training(FP32, clip=1e6, iterations=iterations)
        for run in ranks(2).run(train, training=training, validated=True):
            expected = sum(12 * p.numel() + count for p in run.parameters.values())
            assert run.snapshot_nbytes == expected


class Copies(TorchFunctionMode):
    """Which copies from tensor to tensor the host may go on without, and which it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.copy_:
            self.waits.append(not (kwargs or {}).get("non_blocking", False))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("on_host", [False, True])
def test_the_host_waits_for_no_copy_of_a_snapshot(on_host: bool) -> None:
    """On a GPU they follow the optimizer's step on its stream; here, that none asks the host."""
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    inner = torch.optim.Adam(parameters, lr=0.1)
    snapshot = OptimizerSnapshot([SimpleNamespace(optimizer=inner)], on_host=on_host)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        inner.step()

    step()
    before = [p.detach().clone() for p in parameters]
    average = inner.state[parameters[0]]["exp_avg"].clone()
    with Copies() as copies:
        snapshot.take()
    assert copies.waits == [False] * 2 * (1 + 3)  # of each, itself, two averages and a count
    step()
    assert not torch.equal(parameters[0], before[0])
    with Copies() as copies:
        snapshot.restore()
    assert copies.waits == [False] * 2 * (1 + 3)
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert torch.equal(inner.state[parameters[0]]["exp_avg"], average)


class Heavy:
    """An optimizer that nobody knows."""


def test_an_optimizer_that_cannot_be_taken_back_is_refused() -> None:
    from megatron_zb.megatron_core.post_validation import check_optimizer

    for optimizer in (Heavy(), SimpleNamespace(optimizer=Heavy())):
        with pytest.raises(UsageError, match="cannot take back a step of"):
            check_optimizer(optimizer)


def test_a_setting_that_cannot_be_taken_back_is_refused() -> None:
    from megatron_zb.megatron_core.refusals import STEP, check_steps_taken_back, rows

    settings = {
        name: row.why
        for row in rows()
        if STEP in row.stage and "post_validation" in row.with_
        for name in row.when
    }
    assert len(settings) == 9
    for setting, why in settings.items():
        with pytest.raises(UsageError, match=f"^{setting} cannot be combined .*{why}$"):
            check_steps_taken_back(SimpleNamespace(**{setting: 1}))
    check_steps_taken_back(SimpleNamespace(**dict.fromkeys(settings)))

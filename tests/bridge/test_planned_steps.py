"""Steps of unequal microbatches, planned from their lengths in a trainer that knows them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import drawn_sizes
import pytest
import torch
import torch.distributed as dist
from found_on_ranks import same, whole
from ranks import RankPools

from megatron_zb.bridge import Settings, install
from megatron_zb.errors import UsageError
from megatron_zb.measured.profile import read_profile
from megatron_zb.megatron_core.connections import ChannelsPart
from megatron_zb.megatron_core.profiling import ITERATIONS
from megatron_zb.schedules.step_plan import NO_ATTENTION, AttentionWork

STEPS = (8, 3, 5, 8, 3, 5)
"""Microbatches of each step."""


class Run(NamedTuple):
    """What a rank finds: results and weights, and the orders in which its microbatches were fed."""

    results: list[Any]
    weights: dict[str, torch.Tensor]
    orders: list[list[int]]


def trained(
    args: Any,
    settings: Settings | None,
    orders: list[list[int]] | None = None,
    gives_shapes: bool = False,
    scores: bool = True,
) -> Run:
    """Log-probabilities and losses of some steps in planned orders, or in those that are given."""
    import trainers

    pipeline = install(settings, args) if settings else None
    with pipeline or nullcontext():
        process = trainers.Actor(args, pipeline.builder if pipeline else None)
        results: list[Any] = []
        taken: list[list[int]] = []
        given = iter(orders or [])
        for step, count in enumerate(STEPS):
            tokens = trainers.drawn_lengths(step, count)
            for forward_only in (True, False) if scores else (False,):
                if orders is not None:
                    order = next(given)
                else:
                    assert pipeline is not None
                    shapes = [(t, trainers.BATCH) for t in tokens] if gives_shapes else None
                    order = pipeline.order(tokens, shapes=shapes, forward_only=forward_only)
                taken.append(order)
                run = process.log_probs if forward_only else process.train_one_step
                results.append(run(step, count, order))
        if gives_shapes:
            assert pipeline is not None
            assert pipeline.adapter.part(ChannelsPart).exchanges_no_shapes
        return Run(results, trainers.weights_of(process.models), taken)


def trained_beside_upstream(
    p: int, settings: Settings, gives_shapes: bool = False, **more: Any
) -> tuple[Run, Run]:
    """The planned run and Megatron's own, of the same microbatches in the same orders."""
    import trainers
    from megatron.core import parallel_state

    args = trainers.arguments(p, **more)
    planned = trained(args, settings, gives_shapes=gives_shapes)
    parallel_state.destroy_model_parallel()
    return planned, trained(
        trainers.arguments(p, **{**more, "overlap": False}), None, planned.orders
    )


def assert_equal_to_megatrons(found: list[tuple[Run, Run]]) -> None:
    """Assert that losses and weights of the job are equal to the last bit."""
    ours, upstream = (
        [(run.results, run.weights) for run in runs] for runs in zip(*found, strict=True)
    )
    (losses, weights), (expected, upstream_weights) = whole(ours), whole(upstream)
    assert losses
    assert same(losses, expected)
    assert same(weights, upstream_weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks_of_job", "p", "name", "more"),
    [
        pytest.param(4, 2, "v-half", {}, marks=pytest.mark.full),
        pytest.param(4, 2, "v-half", {"overlap": True}, marks=pytest.mark.full),
        pytest.param(4, 2, "v-zb", {"overlap": True}, marks=pytest.mark.full),
        (4, 2, "v-zb", {"experts": 2, "gives_shapes": True}),
        pytest.param(4, 4, "v-zb", {"gives_shapes": True}, marks=pytest.mark.full),
        pytest.param(2, 2, "zb-h1", {"tied": True}, marks=pytest.mark.full),
        pytest.param(2, 2, "v-half", {"tied": True}, marks=pytest.mark.full),
        (2, 2, "1f1b-v", {"gives_shapes": True}),
        (2, 2, "interleaved", {}),
    ],
    ids=str,
)
def test_a_planned_step_is_megatrons_step_of_the_same_order(
    ranks: RankPools, ranks_of_job: int, p: int, name: str, more: dict[str, Any]
) -> None:
    """Replicas have other lengths, and so other orders, unless their experts are shared."""
    settings = Settings(pipeline_schedule=name, num_microbatches=8)
    found = ranks(ranks_of_job).run(trained_beside_upstream, p=p, settings=settings, **more)
    assert any(order != sorted(order) for planned, _ in found for order in planned.orders)
    assert_equal_to_megatrons(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"pipeline_recompute": "auto", "pipeline_memory_limit": 0.8},
        pytest.param(
            {"pipeline_offload": "auto", "pipeline_memory_limit": 0.8}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_a_planned_step_keeps_what_the_schedule_recomputes_and_offloads(
    ranks: RankPools, more: dict[str, Any]
) -> None:
    settings = Settings(pipeline_schedule="v-zb", num_microbatches=8, **more)
    found = ranks(2).run(trained_beside_upstream, p=2, settings=settings, gives_shapes=True)
    assert_equal_to_megatrons(found)


def with_and_without_shapes(settings: Settings) -> tuple[Run, Run]:
    import trainers
    from megatron.core import parallel_state

    without = trained(trainers.arguments(2), settings, scores=False)
    parallel_state.destroy_model_parallel()
    args = trainers.arguments(2)
    return without, trained(args, settings, gives_shapes=True, scores=False)


@pytest.mark.full
def test_a_vocabulary_that_is_sharded_needs_no_shapes_either(ranks: RankPools) -> None:
    settings = Settings(pipeline_schedule="v-half", num_microbatches=8, pipeline_vocabulary="on")
    for without, shaped in ranks(2).run(with_and_without_shapes, settings=settings):
        assert without.orders == shaped.orders
        assert same(without.weights, shaped.weights)
        assert same(without.results, shaped.results)


# --- microbatches that are read ahead


class Fed(NamedTuple):
    """What a rank finds of steps in the trainer's own order."""

    losses: list[list[float]]
    weights: dict[str, torch.Tensor]


def fed_by_iterators(settings: Settings | None, p: int, reads_at_ends: bool, biased: bool) -> Fed:
    import trainers

    args = trainers.arguments(p)
    args.add_bias_linear = biased
    pipeline = install(settings, args) if settings else None
    with pipeline or nullcontext():
        process = trainers.Actor(args, pipeline.builder if pipeline else None)
        if pipeline:
            process.reads_at_ends = reads_at_ends
            pipeline.read_ahead(lambda tokens: (tokens.numel(), tokens.numel() ** 2))
        losses = [process.train_one_step(step, count) for step, count in enumerate(STEPS)]
        if pipeline:
            planned = pipeline.adapter.planned
            assert not planned.has_next
            assert pipeline.steps_done == len(STEPS)
        return Fed(losses, trainers.weights_of(process.models))


def read_ahead_beside_megatrons(
    settings: Settings, p: int, reads_at_ends: bool, biased: bool
) -> Any:
    from megatron.core import parallel_state

    ours = fed_by_iterators(settings, p, reads_at_ends, biased)
    parallel_state.destroy_model_parallel()
    return ours, fed_by_iterators(None, p, False, biased)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "name", "reads_at_ends", "biased"),
    drawn_sizes.first(1, [(2, "v-half", True, False), (4, "zb-h1", False, True)]),
)
def test_steps_that_are_read_ahead_keep_the_order_of_results(
    ranks: RankPools, p: int, name: str, reads_at_ends: bool, biased: bool
) -> None:
    settings = Settings(pipeline_schedule=name, num_microbatches=8)
    case: dict[str, Any] = {
        "settings": settings,
        "p": p,
        "reads_at_ends": reads_at_ends,
        "biased": biased,
    }
    found = ranks(p).run(read_ahead_beside_megatrons, **case)
    ours, megatrons = map(list, zip(*found, strict=True))
    ([losses], weights), ([expected], megatrons_weights) = whole(ours), whole(megatrons)
    assert losses[0] == expected[0]  # before the first update
    assert losses[0] != sorted(losses[0])
    for step, its in zip(losses, expected, strict=True):
        assert step == pytest.approx(its, rel=1e-6)
    assert biased is any(name.endswith("bias") and "qkv" in name for name in weights)
    for name, weight in weights.items():
        if not name.endswith("linear_qkv.bias"):  # a softmax cancels keys' biases: noise for Adam
            torch.testing.assert_close(weight, megatrons_weights[name], rtol=1e-6, atol=1e-6)


def losses_with_dropout(settings: Settings, ahead: bool) -> list[float]:
    import trainers

    args = trainers.arguments(2)
    args.hidden_dropout = 0.2
    with install(settings, args) as pipeline:
        process = trainers.Actor(args, pipeline.builder)
        if ahead:
            pipeline.read_ahead(lambda tokens: (tokens.numel(), tokens.numel() ** 2))
        return process.train_one_step(0, 8)


def test_masks_of_dropout_keep_the_order_of_the_iterator(ranks: RankPools) -> None:
    settings = Settings(
        pipeline_schedule="v-half", num_microbatches=8, pipeline_random_streams="layer", seed=1
    )
    fed = ranks(2).run(losses_with_dropout, settings=settings, ahead=False)
    assert any(fed)
    assert ranks(2).run(losses_with_dropout, settings=settings, ahead=True) == fed


def reordered(global_loss: bool, counts: bool) -> tuple[list[int] | None, str]:
    """The order in which a step feeds its microbatches, and its refusal."""
    import trainers
    from megatron.core.utils import unwrap_model
    from user_changes import change

    args = trainers.arguments(2)
    with install(Settings(pipeline_schedule="v-half", num_microbatches=8), args) as pipeline:
        process = trainers.Actor(args, pipeline.builder)
        if counts:
            change(unwrap_model(process.models), ("counter",))
        pipeline.read_ahead(lambda tokens: (tokens.numel(), tokens.numel() ** 2))
        orders: list[list[int] | None] = []
        plan = pipeline.adapter.planned.plan

        def planned(*arguments: Any, **options: Any) -> Any:
            orders.append(list(plan(*arguments, **options)))
            return orders[-1]

        if global_loss:
            process.config.moe_router_load_balancing_type = "global_aux_loss"
        with patch.object(pipeline.adapter.planned, "plan", planned):
            try:
                process.train_one_step(0, 8)
            except UsageError as error:
                return orders[0], str(error)
        return orders[0], ""


def test_a_step_keeps_the_order_that_a_balancing_loss_depends_on(ranks: RankPools) -> None:
    usual = ranks(2).run(reordered, global_loss=False, counts=False)
    assert all(order != list(range(8)) and not refusal for order, refusal in usual)
    kept = ranks(2).run(reordered, global_loss=True, counts=False)
    assert kept == [(list(range(8)), "")] * 2


def test_a_users_state_is_refused_where_microbatches_are_reordered(ranks: RankPools) -> None:
    for _, refusal in ranks(2).run(reordered, global_loss=False, counts=True):
        assert "forwards update decoder.layers.0.mlp.calls" in refusal
        assert refusal.endswith("do not read ahead for this model")


def short_of_data() -> str:
    import trainers
    from megatron.core.pipeline_parallel import schedules

    args = trainers.arguments(2)
    with install(Settings(pipeline_schedule="v-half", num_microbatches=4), args) as pipeline:
        process = trainers.Actor(args, pipeline.builder)
        pipeline.read_ahead(lambda tokens: (tokens.numel(), 1.0))
        with pytest.raises(UsageError) as caught:
            schedules.get_forward_backward_func()(
                forward_step_func=None,
                data_iterator=[iter([torch.zeros(2)] * 3) for _ in process.models],
                model=process.models,
                num_microbatches=4,
                seq_length=1,
                micro_batch_size=1,
            )
        return str(caught.value)


def test_data_that_ends_within_a_step_is_refused(ranks: RankPools) -> None:
    for found in ranks(2).run(short_of_data):
        assert found.startswith("the data ended after 3 of 4 microbatches of a step")


# --- profiles


def profiled_in_planned_steps(path: Path) -> tuple[list[int], AttentionWork, AttentionWork]:
    """The order of the step after a profile, and attention's work before and after it."""
    import trainers

    args = trainers.arguments(2, experts=2)
    settings = Settings(pipeline_schedule="auto", num_microbatches=8, pipeline_profile=str(path))
    with install(settings, args) as pipeline:
        process = trainers.Actor(args, pipeline.builder)
        current = pipeline.adapter.planned._current
        counted, order = current.attention, []
        for step in range(ITERATIONS + 1):
            order = pipeline.order(trainers.drawn_lengths(step, 8))
            process.train_one_step(step, 8, order)
        return order, counted, current.attention


@pytest.mark.full
def test_planned_steps_are_profiled_and_then_planned_by_it(
    ranks: RankPools, tmp_path: Path
) -> None:
    """All ranks plan with the same work of attention, also replicas with other lengths."""
    path = tmp_path / "profile.yaml"
    found = ranks(4).run(profiled_in_planned_steps, path=path)
    orders, counted, measured = zip(*found, strict=True)
    attention = read_profile(path).attention
    assert attention is not None
    assert attention.tokens**2 < attention.squares  # unequal lengths
    assert measured[0] not in (counted[0], NO_ATTENTION)
    assert set(measured) == {read_profile(path).attention_work}
    assert any(order != sorted(order) for order in orders)


# --- replicas that share experts


def places_of_sizes(experts: int | None) -> list[list[int]]:
    """At which place of each step the longest microbatch of this rank runs, the next and so on."""
    import trainers

    args = trainers.arguments(2, experts=experts)
    settings = Settings(pipeline_schedule="v-zb", num_microbatches=8)
    with install(settings, args) as pipeline:
        trainers.Actor(args, pipeline.builder)
        found = []
        for step, count in enumerate(STEPS):
            tokens = trainers.drawn_lengths(step, count)
            order = pipeline.order(tokens)
            falling = sorted(range(count), key=lambda j: (-tokens[j], j))
            found.append([order.index(j) for j in falling])
        return found


@pytest.mark.slow
def test_replicas_that_share_experts_run_their_longest_microbatches_together(
    ranks: RankPools,
) -> None:
    alone = ranks(4).run(places_of_sizes, experts=None)
    assert any(found != alone[0] for found in alone)
    together = ranks(4).run(places_of_sizes, experts=2)
    assert all(found == together[0] for found in together)


# --- what is refused


def refused(case: str) -> str:
    import trainers

    args = trainers.arguments(2)
    limit = 0.6 if case == "too long" else None
    settings = Settings(pipeline_schedule="v-half", num_microbatches=4, pipeline_memory_limit=limit)
    with install(settings, args) as pipeline:
        process = trainers.Actor(args, pipeline.builder)
        try:
            if case == "another number":
                pipeline.order([1.0, 2.0, 3.0, 4.0])
                process.train_one_step(0, 6)
            elif case == "another kind":
                pipeline.lengths([1.0, 2.0, 3.0, 4.0])
                process.log_probs(0, 4)
            elif case == "other lengths":
                pipeline.order([1.0, 2.0, 3.0, 4.0 + dist.get_rank()])
            elif case == "no tokens":
                pipeline.order([1.0, 0.0, 3.0])
            elif case == "squares":
                pipeline.order([1.0, 1.0, 3.0], [1.0, 1.0])
            elif case == "too long":
                pipeline.order([1.0, 1.0, 1.0, 99.0])
        except UsageError as error:
            return str(error)
    return "nothing is refused"


REFUSED = {
    "another number": "the step that was planned has 4 microbatches of training, but this one has "
    "6 microbatches of training: plan each step right before it",
    "another kind": "the step that was planned has 4 microbatches of training, but this one has 4 "
    "microbatches of forwards alone: plan each step right before it",
    "other lengths": "pipeline ranks 0 and 1 were given other lengths of microbatches, or plan "
    "with other installations: give all ranks of a model the same",
    "no tokens": "lengths: tokens are [1.0, 0.0, 3.0] and squares [1.0, 0.0, 9.0]: give positive "
    "numbers, and leave out microbatches that have no tokens",
    "squares": "lengths: 3 tokens and 2 squares: give one of each for every microbatch",
    "too long": "v-half cannot run these microbatches within 0.6 of 1F1B's memory: the longest "
    "alone takes 0.99 of it; raise the memory limit, or pack the sequences more evenly",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_fits_no_step_is_refused(ranks: RankPools, case: str) -> None:
    assert set(ranks(2).run(refused, case=case)) == {REFUSED[case]}

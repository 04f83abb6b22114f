"""Several LoRA adapters in one pipeline: each is, bit for bit, what it is alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from brief_searches import briefly
from gpt_cases import GPTCase, built, forward_backward, microbatches
from lora_layers import LoRALayers
from megatron import core
from model_options import WHOLE_LAYERS
from ranks import RankPools

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.job.settings import ScheduleSettings
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.current_schedule import CurrentSchedule
from megatron_zb.megatron_core.planned_steps import ReadAhead
from megatron_zb.megatron_core.shared_pipeline import SharedPipelinePart
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.adapters import Adapter, AdapterRules, Adapters
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.schedule import Schedule

WINDOW = Adapters(tuple(Adapter(name, m) for name, m in zip("abcd", (4, 2, 3, 4), strict=True)))
STREAM = Adapters((Adapter("a", 4, 3), Adapter("b", 2, 3), Adapter("c", 3, 2), Adapter("d", 2, 4)))
CALLS = 2
"""Calls of the schedule: a window or a part of a stream each."""


@dataclass(frozen=True)
class Trained:
    """What a rank has of each adapter: weights by name, losses by step, and updates in order."""

    weights: dict[str, dict[str, torch.Tensor]]
    losses: dict[str, list[list[float]]]
    updates: list[tuple[int, str]]


def of_adapters(name: str, p: int, adapters: Adapters, *, recomputes: bool = False) -> Schedule:
    costs = Costs.uniform(pipeline_size=p, forward=1.0, backward=1.0, weight=0.02)
    limit = None
    if recomputes:
        costs, limit = costs.having(Recomputation(kept_input=0.05)), 0.5
    with briefly():
        return schedules.build(
            name, pipeline_size=p, adapters=adapters, costs=costs, memory_limit=limit
        )


def train(
    case: GPTCase,
    schedule: Schedule,
    broken: str = "",
    *,
    verifies: bool = False,
    steps_done: dict[str, int] | None = None,
    reads_ahead: bool = False,
) -> Trained:
    """Train the adapters of a schedule, one of them on losses that are no numbers."""
    assert isinstance(schedule.rules, AdapterRules)
    adapters = schedule.rules.adapters
    names = [adapter.name for adapter in adapters.each]
    with built(case, schedule, adapters.num_units, lambda: 0) as (pipeline, chunks):
        assert pipeline is not None
        model = LoRALayers(chunks, names, case.grad_scale)
        part = pipeline.train_adapters(model, steps_done)
        if verifies:
            pipeline.verify()
        if reads_ahead:
            pipeline.part(ReadAhead).lengths_of = _lengths_of
        losses: dict[str, list[list[float]]] = {name: [] for name in names}
        data = [part.merged(_data(case, adapters, broken)) for _ in chunks]
        for _ in range(CALLS):
            records = forward_backward(
                pipeline.forward_backward_func, chunks, data, adapters.num_units
            )
            values = [float(record["lm loss"]) for record in records]
            for adapter, of_steps in part.by_adapter(values).items() if values else ():
                losses[adapter] += of_steps
    return Trained({name: model.values(name) for name in names}, losses, model.updates)


def _lengths_of(batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    length = batch["tokens"].size(1)
    return length, length**2


def _data(case: GPTCase, adapters: Adapters, broken: str) -> dict[str, Iterator[Any]]:
    """The microbatches of each adapter in all calls."""
    return {it.name: _data_of(case, it, nan if it.name == broken else 1.0) for it in adapters.each}


def _data_of(case: GPTCase, adapter: Adapter, factor: float) -> Iterator[Any]:
    count = CALLS * adapter.microbatches * adapter.steps
    for batch in microbatches(case, count, 100 * ord(adapter.name)):
        yield {**batch, "loss_mask": factor * batch["loss_mask"]}


def check_each_is_as_alone(
    pools: RankPools,
    world: int,
    case: GPTCase,
    name: str,
    adapters: Adapters,
    *,
    recomputes: bool = False,
    broken: str = "",
) -> None:
    p = world // (case.data_parallel * case.tensor_parallel)
    schedule = of_adapters(name, p, adapters, recomputes=recomputes)
    assert bool(schedule.recomputed) == recomputes
    together = pools(world).run(train, case=case, schedule=schedule, broken=broken)
    for adapter in adapters.each:
        if adapter.name == broken:
            continue
        own = of_adapters(name, p, Adapters((adapter,)), recomputes=recomputes)
        alone = pools(world).run(train, case=case, schedule=own)
        losses = [of.losses[adapter.name] for of in alone]
        assert losses == [of.losses[adapter.name] for of in together]
        for of_rank in filter(None, losses):
            assert len({*map(tuple, of_rank)}) == CALLS * adapter.steps
        for ours, theirs in zip(together, alone, strict=True):
            check_equal(ours.weights[adapter.name], theirs.weights[adapter.name])
            for chunk in {chunk for chunk, _ in ours.updates}:
                assert ours.updates.count((chunk, adapter.name)) == CALLS * adapter.steps


def check_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours and ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
        assert value.isfinite().all()


BASE = GPTCase(wrapped=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        pytest.param("v-half", WINDOW, id="v-half-window"),
        pytest.param("v-zb", STREAM, id="v-zb-stream"),
        pytest.param("1f1b", STREAM, id="1f1b-stream"),
        pytest.param("1f1b", WINDOW, id="1f1b-window", marks=pytest.mark.slow),
        pytest.param("v-half", STREAM, id="v-half-stream", marks=pytest.mark.slow),
        pytest.param("v-zb", WINDOW, id="v-zb-window", marks=pytest.mark.slow),
        pytest.param("interleaved", WINDOW, id="interleaved-window", marks=pytest.mark.slow),
        pytest.param("interleaved", STREAM, id="interleaved-stream", marks=pytest.mark.slow),
    ],
)
def test_each_adapter_is_what_it_is_alone(ranks: RankPools, name: str, adapters: Adapters) -> None:
    check_each_is_as_alone(ranks, 2, BASE, name, adapters)


EXPERTS = (
    ("num_moe_experts", 4),
    ("moe_router_topk", 2),
    ("moe_ffn_hidden_size", 32),
    ("moe_aux_loss_coeff", 0.5),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "v-half", "v-zb", "interleaved"])
@pytest.mark.parametrize(
    ("world", "case"),
    [
        (4, replace(BASE, layers=8)),
        (2, replace(BASE, options=WHOLE_LAYERS)),
        (2, replace(BASE, dropout=0.1, drawn=True)),
        (4, replace(BASE, data_parallel=2)),
        (4, replace(BASE, tensor_parallel=2)),
        (2, replace(BASE, options=EXPERTS)),
        (2, replace(BASE, dtype="bfloat16")),
        (2, replace(BASE, dtype="float16", grad_scale=1024.0)),
        (2, replace(BASE, lengths=(16, 8, 12))),
    ],
    ids=["4", "recompute", "dropout", "DP", "TP", "MoE", "bf16", "fp16", "lengths"],
)
def test_each_is_with_other_models_what_it_is_alone(
    ranks: RankPools, world: int, case: GPTCase, name: str
) -> None:
    check_each_is_as_alone(ranks, world, case, name, STREAM)


@pytest.mark.long
@pytest.mark.parametrize("name", ["v-zb", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_microbatches_that_are_read_ahead_stay_with_their_adapter(
    ranks: RankPools, name: str
) -> None:
    """A step of one training would begin with its shortest microbatches, whose they are."""
    case, schedule = replace(BASE, lengths=(16, 8, 12)), of_adapters(name, 2, STREAM)
    plain = ranks(2).run(train, case=case, schedule=schedule)
    planned = ranks(2).run(train, case=case, schedule=schedule, reads_ahead=True)
    assert any(of_rank.losses["a"] for of_rank in plain)
    for ours, theirs in zip(planned, plain, strict=True):
        assert ours.losses == theirs.losses
        for adapter, weights in theirs.weights.items():
            check_equal(ours.weights[adapter], weights)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [replace(BASE, options=EXPERTS), replace(BASE, multi_token=1, rotary=True)],
    ids=["experts", "predictions"],
)
def test_an_auxiliary_loss_counts_for_a_step_of_its_adapter(
    ranks: RankPools, case: GPTCase
) -> None:
    """Steps have other numbers of microbatches, and the B of one follows the F of another."""
    check_each_is_as_alone(ranks, 2, case, "1f1b", STREAM)


@pytest.mark.long
@pytest.mark.parametrize("name", ["v-half", pytest.param("v-zb", marks=pytest.mark.slow)])
def test_a_recomputed_forward_runs_with_its_adapter(ranks: RankPools, name: str) -> None:
    check_each_is_as_alone(ranks, 2, BASE, name, STREAM, recomputes=True)


@pytest.mark.long
def test_losses_that_are_no_numbers_stay_with_their_adapter(ranks: RankPools) -> None:
    check_each_is_as_alone(ranks, 2, BASE, "v-zb", STREAM, broken="b")
    for of_rank in ranks(2).run(
        train, case=BASE, schedule=of_adapters("v-zb", 2, STREAM), broken="b"
    ):
        losses = [loss for of_step in of_rank.losses["b"] for loss in of_step]
        assert all(map(isnan, losses))
        assert not any(it.isfinite().all() for it in of_rank.weights["b"].values())


def test_an_adapter_draws_the_numbers_of_its_own_steps(ranks: RankPools) -> None:
    """One that goes on from its fifth step has other dropout than at its start; others do not."""
    case, schedule = replace(BASE, dropout=0.1, drawn=True), of_adapters("1f1b", 2, WINDOW)
    start = ranks(2).run(train, case=case, schedule=schedule)[-1].losses
    later = ranks(2).run(train, case=case, schedule=schedule, steps_done={"a": 5})[-1].losses
    assert {name for name, losses in start.items() if losses != later[name]} == {"a"}
    assert start["a"][0][0] != later["a"][0][0]


def test_all_scales_of_auxiliary_losses_are_known_to_this_megatron() -> None:
    """One that is renamed would be left as the F of another adapter has set it."""
    names = [scaler.__name__ for scaler in versions.auxiliary_scalers()]
    of_core = Path(core.__file__).parent.rglob("*.py")
    found = {
        name
        for path in of_core
        for name in re.findall(r"^class (\w+LossAutoScaler)\b", path.read_text(), re.M)
    }
    assert found
    assert {*names} == found
    assert all(hasattr(it, "main_loss_backward_scale") for it in versions.auxiliary_scalers())


def refused() -> list[str]:
    """What is said of a schedule for one training, and of features of one training."""
    plain = schedules.build("1f1b", pipeline_size=2, num_microbatches=4)
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    settings = ScheduleSettings(pipeline_schedule="1f1b")
    with pytest.raises(UsageError) as error:
        SharedPipelinePart(CurrentSchedule(plain, costs, settings), LoRALayers([], []))
    said = [str(error.value)]
    window = of_adapters("1f1b", 2, WINDOW)
    overlapped = replace(BASE, wrapped=True, overlap_grad_reduce=True)
    for case, verifies in (
        (replace(BASE, per_token_loss=True), False),
        (overlapped, False),
        (BASE, True),
    ):
        with pytest.raises(UsageError) as error:
            train(case, window, verifies=verifies)
        said.append(str(error.value))
    with pytest.raises(UsageError) as error:
        train(replace(BASE, changes=("running average",)), window)
    said.append(str(error.value))
    return said


def test_what_is_of_one_training_is_refused_in_a_sentence(ranks: RankPools) -> None:
    for said in ranks(2).run(refused):
        assert "1f1b: the schedule was built for one training" in said[0]
        names = ["calculate_per_token_loss", "overlap_grad_reduce", "verification"]
        assert "forwards update decoder.layers.0.mlp.average, in which the microb" in said[-1]
        for name, sentence in zip(names, said[1:-1], strict=True):
            assert f"adapters in one pipeline: {name} would take the microbatches" in sentence

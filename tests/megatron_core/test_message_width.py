"""Stages that exchange more than one hidden state: residual streams, outputs of earlier layers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import earlier_outputs as model
import pytest
import torch
from adapters import scheduled
from gpt_cases import SEQUENCE, GPTCase, _compare, _enter_parallel_groups, _references, run
from ranks import RankPools

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.step import check_widths
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.placement import looped

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


def earlier_outputs(schedule: str, stages_of_a_rank: int) -> dict[str, Any]:
    """Losses and gradients of this rank's stages, and what all stages have on one rank."""
    p = torch.distributed.get_world_size()
    num_stages = p * stages_of_a_rank
    adapter = scheduled(
        schedule, pipeline_size=p, num_microbatches=M, layers=Layers(num_stages, multi_token=0)
    )
    _enter_parallel_groups(GPTCase(), adapter, p)
    placement, rank = adapter.physical.placement, torch.distributed.get_rank()
    config, kept = model.config_of(placement), model.Kept()
    chunks: list[Any] = [
        model.Chunk(config, placement, adapter.physical.stage(rank, chunk), kept)
        for chunk in range(adapter.chunks)
    ]
    adapter.prepare_model(chunks)
    records = adapter.forward_backward_func(
        forward_step_func=model.forward_step,
        data_iterator=[iter(range(M)) for _ in chunks],
        model=chunks,
        num_microbatches=M,
        seq_length=model.SEQUENCE,
        micro_batch_size=model.BATCH,
    )
    adapter.forward_backward_func.close()
    assert not len(kept)
    losses, gradients = model.on_one_rank(placement, M)
    _, plain = model.on_one_rank(looped(num_stages), M)  # which adds gradients in another order
    for name, gradient in plain.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12)
    return {
        "wrong": [
            name
            for name, gradient in model.gradients_of(chunks)
            if not torch.equal(gradient, gradients[name])
        ],
        "stages": [chunk.stage for chunk in chunks],
        "losses": [float(record["loss"]) for record in records],
        "expected": losses,
        "widths": model.widths_of(placement),
    }


@pytest.mark.parametrize(
    ("schedule", "stages_of_a_rank"),
    [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("v-half", 2), ("v-zb", 2), ("wave", 4)],
)
def test_outputs_of_earlier_layers_travel_as_far_as_they_are_read(
    ranks: RankPools, schedule: str, stages_of_a_rank: int
) -> None:
    """Bit-equal to one rank; in a V no rank is sent what it has seen before."""
    found = ranks(2).run(earlier_outputs, schedule=schedule, stages_of_a_rank=stages_of_a_rank)
    assert sorted(stage for of in found for stage in of["stages"]) == list(
        range(2 * stages_of_a_rank)
    )
    assert [of["wrong"] for of in found] == [[], []]
    [losses] = [of["losses"] for of in found if of["losses"]]
    assert losses == found[0]["expected"]
    if schedule in ("v-half", "v-zb"):
        assert found[0]["widths"] == (2 * model.HIDDEN, model.HIDDEN, 2 * model.HIDDEN)


def test_widths_are_one_for_each_message() -> None:
    config = SimpleNamespace(pipeline_message_widths=(8, 16))
    check_widths(config, 3)
    with pytest.raises(UsageError, match=r"\[8, 16\]: give a positive width .* first 3 stages"):
        check_widths(config, 4)
    with pytest.raises(UsageError, match=r"\[8, 0\]"):
        check_widths(SimpleNamespace(pipeline_message_widths=(8, 0)), 3)

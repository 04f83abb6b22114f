"""A frozen encoder that runs one step ahead gives the same training as one in the first stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from brief_searches import briefly
from gpt_cases import (
    GPTCase,
    _zero_gradients,
    as_hybrid,
    built,
    forward_backward,
    microbatches,
    skip_without_hybrids,
)
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from model_options import LAYERS_OF_EXPERTS, WHOLE_LAYERS
from ranks import RankPools

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.model_calls import inner_model, recorded
from megatron_zb.megatron_core.random_streams import global_parameters
from megatron_zb.schedules.features.second_model import SecondModel, SecondRole

SIZES = (5, 5, 4, 7, 7)
"""Microbatches of the steps; more, fewer and as many as have been encoded before."""
FIRST = GPTCase(images=(1, 0, 2, 0, 0, 0, 1, 1), layers=8, frozen="vision_model")
"""Images of changing number, and microbatches without any."""
AHEAD = replace(FIRST, second_model=SecondModel(SecondRole.AHEAD, forward=0.1, copies=True))


class Counted:
    """An iterator that counts what has been read."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self.read = items, 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        self.read += 1
        return next(self._items)


def steps(
    case: GPTCase, name: str, stops: tuple[int, ...] = (), *, verifies: bool = False
) -> tuple[list[Any], dict[str, torch.Tensor], list[int]]:
    """Losses of steps and of evaluations between them, weights, and runs of the encoder in steps.

    Steps of ``stops`` may not read ahead, nor may the last one.
    """
    now = 0
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        clip_grad=0.1,
        use_distributed_optimizer=case.distributed_optimizer,
        bf16=case.dtype == "bfloat16",
        params_dtype=getattr(torch, case.dtype),
    )
    with briefly(), built(case, name, SIZES[0], lambda: now) as (adapter, chunks):
        assert adapter is not None
        if verifies:
            adapter.verify()
            adapter.warm_up(always=True)
        if case.second_model is not None:
            adapter.encode_ahead(lambda: now + 1 < len(SIZES) and now not in stops)
        adam = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        data = [Counted(microbatches(case, sum(SIZES))) for _ in chunks]
        runs, losses, encoder = [], [], getattr(inner_model(chunks[0]), "vision_model", None)
        found: list[Any] = []
        for now, m in enumerate(SIZES):  # noqa: B007, may_read_ahead asks for it
            _zero_gradients(chunks)
            outputs: list[Any] = []
            with ExitStack() as stack:
                if encoder is not None:
                    outputs = stack.enter_context(recorded(encoder))
                records = forward_backward(adapter.forward_backward_func, chunks, data, m)
            runs.append(len(outputs))
            _, norm, _ = adam.step()
            losses += [float(it["lm loss"]) for it in records]
            found += [*(float(it["lm loss"]) for it in records), float(norm)]
            _zero_gradients(chunks)
            held = [microbatches(case, 4, 100) for _ in chunks]
            for chunk in chunks:
                chunk.eval()
            later = forward_backward(
                adapter.forward_backward_func, chunks, held, 4, forward_only=True
            )
            for chunk in chunks:
                chunk.train()
            found += [float(it["lm loss"]) for it in later]
        assert case.second_model is None or data[0].read == sum(SIZES)
        named = (pair for it in chunks for pair in global_parameters(it).items())
        shard = parallel_state.get_tensor_model_parallel_rank()
        weights = {f"{name}, shard {shard}": weight.detach() for name, weight in named}
        return found if losses else [], weights, runs


def check_equal(first: list[Any], ahead: list[Any]) -> None:
    """Losses, norms and all weights are equal to the last bit."""
    assert [found for found, _, _ in ahead] == [found for found, _, _ in first]
    expected = {name: it for _, weights, _ in first for name, it in weights.items()}
    for _, weights, _ in ahead:
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
    assert {name for _, weights, _ in ahead for name in weights} == expected.keys()


@pytest.mark.long
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "v-zb", "interleaved"])
def test_trainings_are_those_of_an_encoder_in_the_first_stage(
    ranks: RankPools, name: str, p: int
) -> None:
    first = ranks(p).run(steps, case=FIRST, name=name)
    check_equal(first, ranks(p).run(steps, case=AHEAD, name=name))


CASES: dict[str, dict[str, Any]] = {
    "all but the language model is frozen": {"frozen": "vision_"},
    "dropout": {"dropout": 0.1},
    "replicas": {"data_parallel": 2},
    "distributed optimizer": {"data_parallel": 2, "distributed_optimizer": True},
    "reduced early": {"data_parallel": 2, "overlap_grad_reduce": True},
    "tensors": {"tensor_parallel": 2},
    "bf16": {"dtype": "bfloat16"},
    "no images": {"images": (0,)},
    "experts": {"options": LAYERS_OF_EXPERTS},
    "recomputed layers": {"options": WHOLE_LAYERS},
    "untied": {"tied": False},
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_features_run_with_an_encoder_one_step_ahead(ranks: RankPools, name: str) -> None:
    first, ahead = (replace(case, **CASES[name]) for case in (FIRST, AHEAD))
    pool = ranks(2 * first.data_parallel * first.tensor_parallel)
    expected = pool.run(steps, case=first, name="v-half")
    check_equal(expected, pool.run(steps, case=ahead, name="v-half"))


def test_a_verified_step_is_encoded_ahead(ranks: RankPools) -> None:
    first = ranks(2).run(steps, case=FIRST, name="v-half")
    check_equal(first, ranks(2).run(steps, case=AHEAD, name="v-half", verifies=True))


@pytest.mark.long
def test_hybrid_models_run_with_an_encoder_one_step_ahead(ranks: RankPools) -> None:
    first, ahead = (as_hybrid(replace(it, layers=4)) for it in (FIRST, AHEAD))
    skip_without_hybrids(first)
    expected = ranks(2).run(steps, case=first, name="v-zb")
    check_equal(expected, ranks(2).run(steps, case=ahead, name="v-zb"))


@pytest.mark.parametrize("stops", [(), (1,), (0, 1)], ids=["", "one stop", "two stops"])
def test_every_rank_encodes_its_part_of_the_next_step(
    ranks: RankPools, stops: tuple[int, ...]
) -> None:
    """The first stage encodes what no step before has encoded; nothing is encoded twice."""
    case = replace(AHEAD, images=(1,))
    first = ranks(2).run(steps, case=replace(FIRST, images=(1,)), name="1f1b")
    ahead = ranks(2).run(steps, case=case, name="1f1b", stops=stops)
    check_equal(first, ahead)
    expected: list[list[int]] = [[], []]
    there = 0
    for now, m in enumerate(SIZES):
        reads = now + 1 < len(SIZES) and now not in stops
        own = max(m - there, 0)
        expected[0].append(own + (m + 1) // 2 * reads)
        expected[1].append(m // 2 * reads)
        there = m * reads
    assert [runs for _, _, runs in ahead] == expected


def said_of(case: GPTCase, change: str) -> str:
    """What is said of a step or a model whose encoder cannot run ahead."""
    with (
        pytest.raises(UsageError) as error,
        briefly(),
        built(case, "v-half", 4) as (pipeline, chunks),
    ):
        assert pipeline is not None
        if change != "untold":
            pipeline.encode_ahead(lambda: change == "other iterator")
        if change == "weights" and torch.distributed.get_rank() == 1:
            next(inner_model(chunks[0]).vision_model.parameters()).data += 1.0
        data = [microbatches(case, 4)] * len(chunks)
        if change != "one iterator":
            data = [microbatches(case, 8) for _ in chunks]
        if change == "other iterator":
            forward_backward(pipeline.forward_backward_func, chunks, data, 4)
            data = [microbatches(case, 4) for _ in chunks]
        forward_backward(pipeline.forward_backward_func, chunks, data, 4)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("untold", "v-half: the encoder runs for the next step: call encode_ahead first"),
        ("trains", "v-half: the encoder has weights that train, so it cannot run before their"),
        ("one iterator", "v-half: all chunks of a rank read from one iterator, of which the"),
        ("other iterator", "v-half: a step reads from another iterator than the one before, which"),
        ("weights", "v-half: the copies of the encoder begin with other weights on some pipeline"),
        ("own step", "v-half: the schedule has no passes of an encoder that runs ahead: give"),
    ],
    ids=["untold", "trains", "one iterator", "other iterator", "weights", "own step"],
)
def test_what_cannot_run_ahead_is_refused(ranks: RankPools, change: str, said: str) -> None:
    case = replace(AHEAD, frozen=None) if change == "trains" else AHEAD
    if change == "own step":
        case = replace(FIRST, second_model=SecondModel(SecondRole.ENCODER, 0.1, copies=True))
    for found in ranks(2).run(said_of, case=case, change=change):
        assert found.startswith(said)

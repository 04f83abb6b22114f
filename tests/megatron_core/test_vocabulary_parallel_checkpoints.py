"""Checkpoints with vocabulary parallelism and without it hold the same, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import gpt_cases
import pytest
import torch
from brief_searches import briefly
from checkpoint_jobs import Job
from gpt_cases import GPTCase, as_hybrid, skip_without_hybrids
from ranks import RankPools

FULL = pytest.mark.full
OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Leg:
    """A job that loads what the one before has saved, and saves it; the first trains it.

    ``schedule`` is None for upstream, else the output layer is vocabulary parallel, ``rows`` are
    those of the vocabulary with padding; what is no data parallelism is pipeline.
    """

    schedule: str | None
    data_parallel: int = 1
    rows: int = 64


def handed_on(case: GPTCase, legs: list[Leg], folder: Path) -> list[str]:
    """How the checkpoints differ from the first, and losses and weights of a step after them."""
    contents, weights, losses = [], [], []
    for number, leg in enumerate(legs):
        (folder / str(number)).mkdir(exist_ok=True)
        one = replace(case, data_parallel=leg.data_parallel, vocabulary=leg.schedule is not None)
        with (
            briefly(),
            mock.patch.object(gpt_cases, "VOCABULARY", leg.rows),
            gpt_cases.built(one, leg.schedule, 4) as (adapter, chunks),
        ):
            job = Job(one, adapter, chunks)
            if number:
                job.load(folder / str(number - 1))
            else:
                job.train(2)
            job.save(folder / str(number))
            contents.append(job.contents(folder / str(number)))
            losses.append(job.train(1))
            weights.append(job.weights())
    first, *others = contents
    rows = min(leg.rows for leg in legs)
    names = _names(EMBEDDING if case.tied else OUTPUT) + _names(EMBEDDING)
    found = [f"no {name} in the first" for name in names if name not in first]
    for leg, content in zip(legs[1:], others, strict=True):
        found += [f"{leg}: {text}" for text in _differences(first, content, rows)]
    for leg, ours in zip(legs, losses, strict=True):
        alike = (leg.data_parallel, leg.rows) == (legs[0].data_parallel, legs[0].rows)
        if alike and ours != pytest.approx(
            losses[0], rel=1e-2 if case.dtype == "bfloat16" else 1e-5
        ):
            found.append(f"{leg}: goes on with losses {ours}, not {losses[0]}")
    if legs[0] == legs[-1]:
        found += [f"then: {text}" for text in _differences(weights[0], weights[-1], rows)]
    return found


def _names(weight: str) -> list[str]:
    return [weight, *(f"optimizer.state.{state}.{weight}" for state in STATES)]


def _differences(
    first: dict[str, torch.Tensor], other: dict[str, torch.Tensor], rows: int
) -> list[str]:
    found = [f"only one has {name}" for name in first.keys() ^ other.keys()]
    for name in first.keys() & other.keys():
        one, two = first[name], other[name]
        if name.endswith((OUTPUT, EMBEDDING)):
            one, two = one[:rows], two[:rows]
        if not torch.equal(one, two):
            found.append(f"{name} is another")
    return found


V, H = Leg("v-half"), Leg("zb-h1")
UPSTREAM = Leg(None)
JOURNEYS = {
    "upstream-shards-upstream": [UPSTREAM, V, UPSTREAM],
    "from-order-to-order": [V, H, V],
    "four-shards-two-shards-upstream": [UPSTREAM, H, Leg("v-half", data_parallel=2), UPSTREAM],
    "padding": [UPSTREAM, Leg("v-half", rows=68), Leg("zb-h1", 2, rows=66), UPSTREAM],
}
OPTIMIZERS = {
    "plain": GPTCase(layers=8),
    "tied": GPTCase(layers=8, tied=True),
    "prediction": GPTCase(layers=8, multi_token=1, rotary=True),
    "distributed": GPTCase(layers=8, distributed_optimizer=True, overlap_grad_reduce=True),
    "bf16": GPTCase(layers=8, dtype="bfloat16"),
    "distributed-bf16": GPTCase(layers=8, dtype="bfloat16", distributed_optimizer=True),
    "hybrid": as_hybrid(GPTCase(layers=4, distributed_optimizer=True)),
    "hybrid-tied": as_hybrid(GPTCase(layers=4, tied=True)),
    "hybrid-prediction": as_hybrid(GPTCase(layers=4, multi_token=1, rotary=True)),
}


QUICK = [
    ("distributed-bf16", "four-shards-two-shards-upstream"),
    ("hybrid-prediction", "upstream-shards-upstream"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "journey"),
    [
        pytest.param(optimizer, journey, marks=() if (optimizer, journey) in QUICK else FULL)
        for optimizer in OPTIMIZERS
        for journey in JOURNEYS
    ],
)
def test_a_checkpoint_is_handed_on_bit_for_bit(
    ranks: RankPools, tmp_path: Path, optimizer: str, journey: str
) -> None:
    """Weights and the optimizer's states; and a step of the last is one of the first."""
    skip_without_hybrids(OPTIMIZERS[optimizer])
    found = ranks(4).run(
        handed_on, case=OPTIMIZERS[optimizer], legs=JOURNEYS[journey], folder=tmp_path
    )
    assert found == [[]] * 4

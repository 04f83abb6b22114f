"""An output layer and an embedding cut along the vocabulary over all ranks, beside Megatron's."""

from __future__ import annotations

from dataclasses import replace

import gpt_cases
import pytest
import torch
from gpt_cases import GPTCase, Outcome
from megatron.core import parallel_state
from ranks import RankPools

from megatron_zb.errors import UsageError

FULL = pytest.mark.full
OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
SHARD_OF_EMBEDDING = "embedding_shard.weight"
CASES = {
    "plain": (4, GPTCase()),
    "two-ranks": (2, GPTCase()),
    "bf16": (2, GPTCase(dtype="bfloat16", fused_accumulation=True)),
    "per-token-loss": (2, GPTCase(per_token_loss=True, wrapped=True)),
    "tensor-parallel": (4, GPTCase(tensor_parallel=2)),
    "sequence-parallel": (4, GPTCase(tensor_parallel=2, sequence_parallel=True)),
    "tied-rotary-sequence-parallel": (
        4,
        GPTCase(tied=True, rotary=True, tensor_parallel=2, sequence_parallel=True),
    ),
    "tied": (2, GPTCase(tied=True)),
    "data-parallel": (4, GPTCase(data_parallel=2, overlap_grad_reduce=True)),
    "tied-data-parallel": (4, GPTCase(tied=True, data_parallel=2, overlap_grad_reduce=True)),
    "tied-bf16": (2, GPTCase(tied=True, dtype="bfloat16", fused_accumulation=True)),
}
ON_REQUEST = ("two-ranks", "tensor-parallel", "sequence-parallel", "data-parallel", "bf16")
# Of the largest number. The sum of the exponentials is formed in another order.
TOLERANCE = 2e-6


def outcomes(case: GPTCase, schedules: list[str]) -> list[Outcome]:
    """Of Megatron's own schedule, and of others with the output layer cut."""
    found = [gathered(gpt_cases.run(case, None, [4])[4])]
    for name in schedules:
        run = gpt_cases.run(replace(case, vocabulary=True), name, [4], iterations=2)
        found.append(gathered(run[4], name))
    return found


def gathered(outcome: Outcome, schedule: str | None = None) -> Outcome:
    """Of all pipeline ranks, with the shards of the output layer put together."""
    group = parallel_state.get_pipeline_model_parallel_group()
    all_ranks = [outcome] * group.size()
    torch.distributed.all_gather_object(all_ranks, outcome, group=group)
    gradients = {name: g for one in all_ranks for name, g in one.gradients.items()}
    if schedule is not None:
        order = all_ranks[::-1] if schedule.startswith("v-") else all_ranks
        gradients[OUTPUT] = torch.cat([one.gradients[OUTPUT] for one in order])
        if gradients.pop(SHARD_OF_EMBEDDING, None) is None:  # tied: one weight
            gradients[EMBEDDING] = gradients[OUTPUT]
        else:
            gradients[EMBEDDING] = torch.cat([one.gradients[SHARD_OF_EMBEDDING] for one in order])
    return Outcome(all_ranks[-1].losses, gradients)


def differences(case: GPTCase, schedules: list[str]) -> list[str]:
    """Differences of the first schedule from stock, and of the others from the first."""
    stock, first, *others = outcomes(case, schedules)
    found = [f"only one has {name}" for name in stock.gradients.keys() ^ first.gradients.keys()]
    if case.dtype == "float32":
        found += unequal(stock, first)
    else:
        found += less_exact(case, stock, first)
    for name, other in zip(schedules[1:], others, strict=True):
        for key, value in first.gradients.items():
            if not torch.equal(value, other.gradients[key]):
                found.append(f"{name}: gradient of {key} is not that of {schedules[0]}")
        if other.losses != first.losses:
            found.append(f"{name}: losses {other.losses} are not {first.losses}")
    return found


def unequal(stock: Outcome, ours: Outcome) -> list[str]:
    found = []
    for name, gradient in stock.gradients.items():
        off = (ours.gradients[name] - gradient).abs().max().item()
        if not off <= TOLERANCE * gradient.abs().max().item():
            found.append(f"gradient of {name} is off by {off}")
    if not torch.tensor(ours.losses).allclose(torch.tensor(stock.losses), rtol=TOLERANCE):
        found.append(f"losses {ours.losses} are not {stock.losses}")
    return found


def less_exact(case: GPTCase, stock: Outcome, ours: Outcome) -> list[str]:
    """Whether gradients in 16 bits are farther from those in 32 than 1.2 times stock's."""
    single = replace(case, dtype="float32", fused_accumulation=False)
    exact = gathered(gpt_cases.run(single, None, [4])[4])
    ratio = distance(ours, exact) / distance(stock, exact)
    losses, exactly = torch.tensor(ours.losses), torch.tensor(exact.losses)
    found = [] if ratio <= 1.2 else [f"gradients are {ratio} times as far off as stock's"]
    return found if losses.allclose(exactly, rtol=5e-3) else [*found, f"{losses} are the losses"]


def distance(one: Outcome, other: Outcome) -> float:
    pairs = [(one.gradients[name], gradient) for name, gradient in other.gradients.items()]
    return sum((a.double() - b.double()).square().sum().item() for a, b in pairs) ** 0.5


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=FULL if name in ON_REQUEST else ()) for name in CASES],
)
@pytest.mark.parametrize("others", [["zb-h1"], pytest.param(["1f1b", "v-zb"], marks=FULL)], ids=str)
def test_a_cut_output_layer_trains_as_megatrons(
    ranks: RankPools, name: str, others: list[str]
) -> None:
    """And in every schedule alike, to the last bit."""
    count, case = CASES[name]
    found = ranks(count).run(
        differences, case=replace(case, layers=8), schedules=["v-half", *others]
    )
    assert found == [[]] * count


def evaluations(case: GPTCase) -> list[list[float]]:
    stock = gpt_cases.run(case, None, [4], forward_only=True)[4]
    ours = gpt_cases.run(replace(case, vocabulary=True), "v-half", [4], forward_only=True)[4]
    return [gathered(stock).losses, gathered(ours, "v-half").losses]


def test_an_evaluation_has_the_same_losses(ranks: RankPools) -> None:
    for stock, ours in ranks(2).run(evaluations, case=GPTCase(layers=4)):
        assert len(stock) == 4
        assert ours == pytest.approx(stock, rel=1e-6)


def steps(case: GPTCase) -> dict[str, float]:
    """How far each weight is from stock's after 3 steps, relative to its norm.

    Biases begin at 0, and Adam divides by gradients of keys' biases that are nothing but rounding.
    """
    case = replace(case, optimizer_steps=3)
    stock, ours = (
        gathered(gpt_cases.run(one, name, [4])[4], name)
        for one, name in ((case, None), (replace(case, vocabulary=True), "v-half"))
    )
    assert stock.gradients.keys() == ours.gradients.keys()
    return {
        name: ((ours.gradients[name] - weight).norm() / weight.norm()).item()
        for name, weight in stock.gradients.items()
    }


def test_the_distributed_optimizer_steps_every_shard(ranks: RankPools) -> None:
    case = GPTCase(
        data_parallel=2,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        layers=4,
    )
    for found in ranks(4).run(steps, case=case):
        assert {name: off for name, off in found.items() if off > 5e-4} == {}


def refused(case: GPTCase) -> str:
    try:
        gpt_cases.run(replace(case, vocabulary=True), "v-half", [4])
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (GPTCase(multi_token=1, layers=5), "it is run again for multi-token prediction"),
    ],
    ids=["multi-token"],
)
def test_what_cannot_be_cut_is_refused_on_all_ranks(
    ranks: RankPools, case: GPTCase, said: str
) -> None:
    for text in ranks(2).run(refused, case=case):
        assert text == (
            f"the output layer cannot be cut along the vocabulary: {said}; give "
            "--pipeline-vocabulary off"
        )

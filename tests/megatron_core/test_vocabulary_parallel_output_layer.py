"""Vocabulary-parallel output layer and embedding over all ranks, beside Megatron's."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import gpt_cases
import pytest
import torch
from brief_searches import briefly
from gpt_cases import GPTCase, Outcome, as_hybrid, skip_without_hybrids
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from model_options import ROUTED
from rank_process import Kind
from ranks import RankFailure, RankPools
from vocabulary_parallel_outcomes import Gradients, gathered, whole, with_shards

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.connections import WatchPart
from megatron_zb.megatron_core.vocabulary import HANDLERS
from megatron_zb.schedules.passes import PassKind

FULL = pytest.mark.full
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
    "bf16-data-parallel": (4, GPTCase(dtype="bfloat16", data_parallel=2, overlap_grad_reduce=True)),
    "tied-bf16-sequence-parallel": (
        4,
        GPTCase(tied=True, dtype="bfloat16", tensor_parallel=2, sequence_parallel=True),
    ),
    "hybrid": (2, as_hybrid(GPTCase())),
    "hybrid-tied-rotary-sequence-parallel": (
        4,
        as_hybrid(GPTCase(tied=True, rotary=True, tensor_parallel=2, sequence_parallel=True)),
    ),
    "hybrid-tied-bf16-data-parallel": (
        4,
        as_hybrid(GPTCase(tied=True, dtype="bfloat16", data_parallel=2, overlap_grad_reduce=True)),
    ),
    "hybrid-tied-experts": (2, as_hybrid(GPTCase(tied=True, options=tuple(ROUTED.items())))),
}
ON_REQUEST = (
    "hybrid",
    "hybrid-tied-rotary-sequence-parallel",
    "hybrid-tied-bf16-data-parallel",
    "two-ranks",
    "tensor-parallel",
    "sequence-parallel",
    "data-parallel",
    "bf16",
    "tied-bf16",
    "bf16-data-parallel",
    "tied-rotary-sequence-parallel",
    "tied-data-parallel",
)
# Of the largest number. The sum of the exponentials is formed in another order.
TOLERANCE = 2e-6


def outcomes(case: GPTCase, schedules: list[str]) -> list[Outcome]:
    """Of Megatron's own schedule, and of others with the output layer sharded."""
    found = [gathered(gpt_cases.run(case, None, [4])[4])]
    for name in schedules:
        run = gpt_cases.run(replace(case, vocabulary=True), name, [4], iterations=2)
        found.append(gathered(run[4], name))
    return found


def differences(case: GPTCase, schedules: list[str]) -> list[str]:
    """Differences of the first schedule from upstream, and of the others from the first."""
    upstream, first, *others = outcomes(case, schedules)
    found = [f"only one has {name}" for name in upstream.gradients.keys() ^ first.gradients.keys()]
    found += unequal(upstream, first, within_rounding if case.dtype == "bfloat16" else all_close)
    for name, other in zip(schedules[1:], others, strict=True):
        for key, value in first.gradients.items():
            if not torch.equal(value, other.gradients[key]):
                found.append(f"{name}: gradient of {key} is not that of {schedules[0]}")
        if other.losses != first.losses:
            found.append(f"{name}: losses {other.losses} are not {first.losses}")
    return found


def unequal(upstream: Outcome, ours: Outcome, compare: Callable[..., list[str]]) -> list[str]:
    found = compare(upstream.gradients, ours.gradients)
    if not torch.tensor(ours.losses).allclose(torch.tensor(upstream.losses), rtol=TOLERANCE):
        found.append(f"losses {ours.losses} are not {upstream.losses}")
    return found


def all_close(upstream: Gradients, ours: Gradients) -> list[str]:
    off = {name: (ours[name] - g).abs().max() / g.abs().max() for name, g in upstream.items()}
    return [f"gradient of {name} is off by {by}" for name, by in off.items() if not by <= TOLERANCE]


def within_rounding(upstream: Gradients, ours: Gradients) -> list[str]:
    """Compare norms of 16-bit gradients, whose roundings differ from the loss downwards.

    The most that was seen is 2.0 % of a vector of 32 numbers, 0.86 % of a matrix and 0.7 % of all;
    half as much again is for processors that add in another order.
    """
    errors, norms = (
        {name: of(name).double().norm() for name in upstream}
        for of in (lambda name: ours[name] - upstream[name], lambda name: upstream[name])
    )
    off = {name: (error / norms[name]).item() for name, error in errors.items()}
    all_off = (
        torch.stack([*errors.values()]).norm() / torch.stack([*norms.values()]).norm()
    ).item()
    most = {name: 0.03 if gradient.dim() == 1 else 0.0125 for name, gradient in upstream.items()}
    found = [f"gradient of {name} is off by {x}" for name, x in off.items() if not x <= most[name]]
    return found if all_off <= 0.01 else [*found, f"all gradients are off by {all_off}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=FULL if name in ON_REQUEST else ()) for name in CASES],
)
@pytest.mark.parametrize("others", [["zb-h1"], pytest.param(["1f1b", "v-zb"], marks=FULL)], ids=str)
def test_a_sharded_output_layer_trains_as_megatrons(
    ranks: RankPools, name: str, others: list[str]
) -> None:
    """And in every schedule alike, to the last bit."""
    count, case = CASES[name]
    skip_without_hybrids(case)
    found = ranks(count).run(
        differences,
        case=case if case.hybrid else replace(case, layers=8),
        schedules=["v-half", *others],
    )
    assert found == [[]] * count


def evaluations(case: GPTCase) -> list[list[float]]:
    upstream = gpt_cases.run(case, None, [4], forward_only=True)[4]
    ours = gpt_cases.run(replace(case, vocabulary=True), "v-half", [4], forward_only=True)[4]
    return [gathered(upstream).losses, gathered(ours, "v-half").losses]


def test_an_evaluation_has_the_same_losses(ranks: RankPools) -> None:
    for upstream, ours in ranks(2).run(evaluations, case=GPTCase(layers=4)):
        assert len(upstream) == 4
        assert ours == pytest.approx(upstream, rel=1e-6)


class Step(NamedTuple):
    """One call of a schedule; in an evaluation no gradients."""

    forward_only: bool
    losses: list[float]
    gradients: dict[str, torch.Tensor]


CALLS = ((4, True), (4, False), (3, True), (6, False), (4, False), (4, True))
"""Microbatches of each call, and whether it is an evaluation."""


def calls(case: GPTCase, schedule: str | None) -> list[Step]:
    """Training and evaluation in turns, over the same channels, as in a run."""
    found = []
    with briefly(), gpt_cases.built(case, schedule, CALLS[0][0]) as (adapter, chunks):
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        for m, forward_only in CALLS:
            for chunk in chunks:
                chunk.zero_grad_buffer()
            data = [gpt_cases.microbatches(case, m) for _ in chunks]
            records = gpt_cases.forward_backward(
                function, chunks, data, m, forward_only=forward_only
            )
            losses = [float(record["lm loss"]) for record in records]
            gradients = {} if forward_only else dict(gpt_cases.gradients(chunks))
            found.append(Step(forward_only, losses, gradients))
        mirrored = adapter is not None and adapter.physical.mirrored
    return [_of_all_ranks(step, schedule is not None, mirrored) for step in found]


def _of_all_ranks(step: Step, is_cut: bool, mirrored: bool) -> Step:
    group = parallel_state.get_pipeline_model_parallel_group()
    all_ranks = [step] * group.size()
    torch.distributed.all_gather_object(all_ranks, step, group=group)
    parts = [one.gradients for one in all_ranks]
    gradients = whole(parts)
    if is_cut and gradients:
        gradients = with_shards(parts[::-1] if mirrored else parts)
    return Step(step.forward_only, next(one.losses for one in all_ranks if one.losses), gradients)


def off_in_calls(case: GPTCase, schedule: str) -> list[str]:
    """How calls differ from upstream's."""
    found = []
    upstream = calls(case, None)
    for number, (ours, theirs) in enumerate(
        zip(calls(replace(case, vocabulary=True), schedule), upstream, strict=True)
    ):
        if not torch.tensor(ours.losses).allclose(torch.tensor(theirs.losses), rtol=1e-6):
            found.append(f"call {number}: losses {ours.losses} are not {theirs.losses}")
        if ours.gradients.keys() != theirs.gradients.keys():
            found.append(f"call {number}: other gradients")
        for name, gradient in theirs.gradients.items():
            off = (ours.gradients[name] - gradient).abs().max().item()
            if not off <= TOLERANCE * gradient.abs().max().item():
                found.append(f"call {number}: gradient of {name} is off by {off}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "p"),
    [
        pytest.param(name, p, marks=() if (name, p) in (("v-half", 4), ("zb-h1", 2)) else FULL)
        for name in ("v-half", "zb-h1", "auto")
        for p in (2, 4)
    ],
)
def test_training_and_evaluation_take_turns_by_the_rules_of_a_gpu(
    ranks: RankPools, name: str, p: int
) -> None:
    """Of hostile.py; with other numbers of microbatches, so that orders change, too."""
    found = ranks(p, Kind.HOSTILE).run(off_in_calls, case=GPTCase(layers=8), schedule=name)
    assert found == [[]] * p


SLOW = 0.4
"""Seconds for which a pass is held up, so that others wait for it."""


def words_while_held_up(case: GPTCase, kind: PassKind, rank: int, count: int) -> set[str]:
    """What the watchdog would say of this rank while a rank's passes of a kind take their time."""
    said, done, usual = set[str](), threading.Event(), HANDLERS[kind]
    with gpt_cases.built(replace(case, vocabulary=True), "zb-h1", count) as (adapter, chunks):
        assert adapter is not None
        function = adapter.forward_backward_func

        def look() -> None:
            while not done.wait(SLOW / 10):
                progress = adapter.part(WatchPart).progress
                said.add(re.sub("microbatch [0-9]", "microbatch j", progress.state().doing))

        def held_up(*given: Any) -> Any:
            time.sleep(SLOW * (torch.distributed.get_rank() == rank))
            return usual(*given)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            with mock.patch.dict(HANDLERS, {kind: held_up}):
                data = [gpt_cases.microbatches(case, count) for _ in chunks]
                gpt_cases.forward_backward(function, chunks, data, count)
        finally:
            done.set()
            looking.join()
    return said


@pytest.mark.parametrize(
    ("kind", "rank", "doing", "waits"),
    [
        pytest.param("F", 1, "F of stage 1", "the output of the last stage", marks=FULL),
        ("E", 1, "E of its rows of the vocabulary", "a part of the embedding"),
        ("O", 0, "O of its rows of the vocabulary", "a part of the loss"),
        pytest.param("P", 1, "P of stage 1", "the gradient of the loss", marks=FULL),
    ],
)
def test_the_watchdog_tells_what_a_rank_waits_for(
    ranks: RankPools, kind: str, rank: int, doing: str, waits: str
) -> None:
    """Rank 1 has the loss: it waits for the part of rank 0, and rank 0 for what comes of it.

    Rank 0 has the embedding's sum, and waits for the part of rank 1. It would wait to send a second
    microbatch to an F that is held up.
    """
    count = 1 if kind == "F" else 4
    held_up: dict[str, Any] = {"kind": PassKind(kind), "rank": rank, "count": count}
    said = ranks(2).run(words_while_held_up, case=GPTCase(), **held_up)
    assert f"is in {doing}, microbatch j" in said[rank]
    source = f"from pipeline rank {rank}"
    assert f"waits for {waits}, microbatch j, {source}" in said[1 - rank]


def refusal_of_post_validation(case: GPTCase) -> str:
    case = replace(case, vocabulary=True)
    with gpt_cases.built(case, "v-half", 4) as (adapter, chunks):
        assert adapter is not None
        try:
            adapter.post_validate(gpt_cases.optimizer(case, chunks), None, chunks)
        except UsageError as error:
            return str(error)
    return ""


def test_post_validation_is_refused_by_a_program_of_its_own_too(ranks: RankPools) -> None:
    """Megatron-LM's flags are refused before: see refusals.yaml."""
    for text in ranks(2).run(refusal_of_post_validation, case=GPTCase()):
        assert text == (
            "optimizer post-validation cannot be combined with a vocabulary-parallel output layer: "
            "the forwards that run again have no passes of it"
        )


def steps(case: GPTCase) -> dict[str, float]:
    """How far each weight is from upstream's after 3 steps, relative to its norm.

    Biases begin at 0, and Adam divides by gradients of keys' biases that are nothing but rounding.
    """
    case = replace(case, optimizer_steps=3)
    upstream, ours = (
        gathered(gpt_cases.run(one, name, [4])[4], name)
        for one, name in ((case, None), (replace(case, vocabulary=True), "v-half"))
    )
    assert upstream.gradients.keys() == ours.gradients.keys()
    return {
        name: ((ours.gradients[name] - weight).norm() / weight.norm()).item()
        for name, weight in upstream.gradients.items()
    }


@pytest.mark.long
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
        (GPTCase(frozen="output_layer"), "its weight is frozen"),
        (GPTCase(changes=("hook on output",)), "its weight has a hook"),
        (GPTCase(changes=("scaled output",)), "its weight is computed from other tensors"),
    ],
    ids=["frozen", "hook", "parametrization"],
)
def test_what_cannot_be_sharded_is_refused_on_all_ranks(
    ranks: RankPools, case: GPTCase, said: str
) -> None:
    for text in ranks(2).run(refused, case=case):
        assert text == (
            f"the output layer cannot be vocabulary parallel: {said}; give "
            "--pipeline-vocabulary off"
        )


def test_an_embedding_that_a_user_has_changed_is_refused_on_all_ranks(ranks: RankPools) -> None:
    for text in ranks(2).run(refused, case=GPTCase(frozen="word_embeddings")):
        assert text == (
            "the embedding cannot be vocabulary parallel: its weight is frozen; give "
            "--pipeline-vocabulary off"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("hook on shard", "a shard of the vocabulary has a hook on its weight"),
        ("penalty on shard", "the model or its loss uses the weight of the output layer by itself"),
    ],
)
def test_a_later_change_of_a_shard_ends_the_step(ranks: RankPools, change: str, said: str) -> None:
    """On the rank that finds it; torchrun ends the others."""
    with pytest.raises(RankFailure, match=f"UsageError: {said}"):
        ranks(2).run(gpt_cases.run, case=late(change), schedule="v-half", num_microbatches=[4])


def mean_in_step(data: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    """Compute the loss in the forward step, on the last stage of what are hidden states."""
    output, usual = gpt_cases._forward_step(data, model)
    if not get_attr_wrapped_model(model, "post_process"):
        return output, usual
    return output.mean(), lambda loss: (loss, {"lm loss": loss.detach()})


def run_with_mean(case: GPTCase) -> None:
    with gpt_cases.built(replace(case, vocabulary=True), "zb-h1", 4) as (adapter, chunks):
        assert adapter is not None
        data = [gpt_cases.microbatches(case, 4) for _ in chunks]
        function = adapter.forward_backward_func
        gpt_cases.forward_backward(function, chunks, data, 4, step=mean_in_step)


def test_a_loss_in_the_forward_step_is_refused(ranks: RankPools) -> None:
    """It would be one of hidden states. On the rank that finds it; torchrun ends the others."""
    said = "UsageError: the forward step uses the output of the model of the last stage \\(mean\\)"
    with pytest.raises(RankFailure, match=said):
        ranks(2).run(run_with_mean, case=GPTCase())


def contiguous_in_step(data: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    output, loss = gpt_cases._forward_step(data, model)
    return output.contiguous().float(), loss


def losses_of_step(step: Any) -> list[float]:
    case = GPTCase(vocabulary=True)
    with gpt_cases.built(case, "zb-h1", 4) as (adapter, chunks):
        assert adapter is not None
        data = [gpt_cases.microbatches(case, 4) for _ in chunks]
        function = adapter.forward_backward_func
        records = gpt_cases.forward_backward(function, chunks, data, 4, step=step)
        return [float(record["lm loss"]) for record in records]


def test_a_forward_step_may_return_the_losses_in_float32(ranks: RankPools) -> None:
    usual = ranks(2).run(losses_of_step, step=None)
    assert any(usual)
    assert ranks(2).run(losses_of_step, step=contiguous_in_step) == usual


def late(change: str) -> GPTCase:
    return GPTCase(vocabulary=True, late_changes=(change,))

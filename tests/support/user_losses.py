"""Loss functions and metrics as users write them, of which only some are means over tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import gpt_cases
import pytest
import torch
from gpt_cases import VOCABULARY, GPTCase, built, forward_backward, microbatches
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import unwrap_model
from vocabulary_parallel_outcomes import whole, with_shards

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.planned_steps import ReadAhead

Loss: TypeAlias = tuple[torch.Tensor, ...]
MICROBATCHES = 3


def mean(mask: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def by_sample(mask: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    return (losses * mask).sum(1) / mask.sum(1).clamp(min=1)


def at_places(mask: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    """Weigh losses by their places in the sequence."""
    weights = mask * torch.linspace(0.5, 2.0, mask.size(1))
    return (losses * weights).sum() / weights.sum()


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], Loss]] = {
    "mean over tokens": lambda mask, losses: (mean(mask, losses),),
    "sum, and number of tokens": lambda mask, losses: ((losses * mask).sum(), mask.sum().int()),
    "mean over samples": lambda mask, losses: (by_sample(mask, losses).mean(),),
    "sum of samples, and their number": lambda mask, losses: (
        by_sample(mask, losses).sum(),
        torch.tensor(len(mask)),
    ),
    "sum over tokens": lambda mask, losses: (0.01 * (losses * mask).sum(),),
    "mean of all tokens, masked or not": lambda mask, losses: (losses.mean(),),
    "mean and a constant": lambda mask, losses: (mean(mask, losses) + 0.5,),
    "squared mean": lambda mask, losses: (mean(mask, losses) ** 2,),
    "perplexity": lambda mask, losses: (mean(mask, losses).exp(),),
    "largest loss of a token": lambda mask, losses: ((losses * mask).max(),),
    "smallest loss of a token": lambda mask, losses: (losses.min(),),
    "weights by place": lambda mask, losses: (at_places(mask, losses),),
}
"""Each returns a loss, or a loss and a number of tokens."""

METRICS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": mean,
    "pair of a sum and a count": lambda mask, losses: torch.stack(
        [(losses * mask).sum(), mask.sum()]
    ),
    "largest": lambda mask, losses: (losses * mask).max(),
    "smallest": lambda mask, losses: losses.min(),
    "count": lambda mask, losses: mask.sum(),
    "perplexity of the mean": lambda mask, losses: mean(mask, losses).exp(),
    "share of losses above 4": lambda mask, losses: (losses > 4).float().mean(),
    "constant": lambda mask, losses: torch.tensor(3.0),
}

OTHER_STEPS = ("output changed behind the model", "cross entropy of logits", "hidden states")
"""Forward steps whose loss is not one of the losses of tokens that the model returns."""


def forward_step(what: str, iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
    """Run the forward step of a user with a loss function or a metric by its name."""
    batch = next(iterator)
    tokens, mask, labels = batch["tokens"], batch["loss_mask"], batch["labels"]
    length = tokens.size(1)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    call = partial(model, tokens, batch["positions"], causal)
    if what == "cross entropy of logits":
        return call(), partial(_of_logits, mask, labels)
    if what == "hidden states":
        return _with_penalty(call, unwrap_model(model), labels, mask)
    output = call(labels=labels)
    if what == "output changed behind the model":
        output = 2 * output
    return output, partial(loss_of, what, mask)


def loss_of(
    what: str, mask: torch.Tensor, losses: torch.Tensor, non_loss_data: bool = False
) -> Any:
    """Return a loss with what it reports, or the shape of the losses as data that is no loss."""
    if non_loss_data:
        return [*losses.shape]
    with torch.no_grad():
        metric = METRICS.get(what, mean)(mask, losses)
    loss, *tokens = LOSSES.get(what, LOSSES["mean over tokens"])(mask, losses)
    return 1 * loss, *tokens, {what: metric}  # Megatron divides a loss in place


def _of_logits(mask: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor) -> Any:
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), labels.flatten(), reduction="none"
    )
    return loss_of("cross entropy of logits", mask, losses.view(mask.shape))


def _with_penalty(call: Any, model: Any, labels: Any, mask: torch.Tensor) -> tuple[Any, Any]:
    """Add a penalty on the hidden states that a hook keeps."""
    kept: list[torch.Tensor] = []
    hook = model.decoder.register_forward_hook(lambda *_: kept.append(_[-1]))
    output = call(labels=labels)
    hook.remove()

    def loss(losses: torch.Tensor) -> tuple[Any, ...]:
        found = mean(mask, losses) + sum(0.01 * x.pow(2).mean() for x in kept)
        return found, {"hidden states": found.detach()}

    return output, loss


def records_and_gradients(
    case: GPTCase, schedule: str | None, what: str, forward_only: bool = False, **more: Any
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What a step of all ranks reports, and its gradients under Megatron's names."""
    with built(case, schedule, MICROBATCHES) as (adapter, chunks):
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        if adapter is not None and case.lengths:
            adapter.part(ReadAhead).lengths_of = _lengths
        data = [microbatches(case, MICROBATCHES) for _ in chunks]
        step = partial(forward_step, what)
        more |= {"forward_only": forward_only, "step": step}
        records = forward_backward(function, chunks, data, MICROBATCHES, **more)
        own = (records, dict(gpt_cases.gradients(chunks)))
        logical = adapter.physical.logical if adapter else int
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, own)
    parts = [of_ranks[logical(rank)][1] for rank in range(len(of_ranks))]
    gradients = with_shards(parts) if case.vocabulary else whole(parts)
    return [record for found, _ in of_ranks for record in found], gradients


def refusal(case: GPTCase, schedule: str, what: str) -> str:
    """The sentence with which this rank refuses a step."""
    with built(case, schedule, MICROBATCHES) as (adapter, chunks):
        assert adapter is not None
        data = [microbatches(case, MICROBATCHES) for _ in chunks]
        step, function = partial(forward_step, what), adapter.forward_backward_func
        with pytest.raises(UsageError) as refused:
            forward_backward(function, chunks, data, MICROBATCHES, step)
    return str(refused.value)


def _lengths(microbatch: dict[str, torch.Tensor]) -> tuple[float, float]:
    samples, length = microbatch["tokens"].shape
    return samples * length, samples * length**2


def differences(
    case: GPTCase, upstream: GPTCase, schedule: str, what: str, most: float, **more: Any
) -> list[str]:
    """Differences of a step from Megatron's own."""
    expected, reference = records_and_gradients(upstream, None, what, **more)
    found, gradients = records_and_gradients(case, schedule, what, **more)
    if [record.keys() for record in found] != [{what} | record.keys() for record in expected]:
        return [f"{len(found)} records, not {len(expected)}"]
    differ = [
        f"{name} of microbatch {j} is {found[j][name]}, not {value}"
        for j, record in enumerate(expected)
        for name, value in record.items()
        if not torch.allclose(found[j][name].double(), value.double(), rtol=most)
    ]
    off = {n: (gradients[n] - of).abs().max() / of.abs().max() for n, of in reference.items()}
    differ += [f"gradient of {name} is off by {by:.1e}" for name, by in off.items() if by > most]
    return differ + [f"{n} is missing" for n in reference.keys() ^ gradients.keys()]

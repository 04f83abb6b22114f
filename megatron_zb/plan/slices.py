"""Token slices in a plan: models that have them, how their costs grow, and what they hold.

A strategy with n slices is counted as follows:

- The scores of a slice go back to the first token: :class:`Slicing` has how they grow. Keys and
  values are copied into a buffer. In B, gradients of all keys up to the slice are added up in 32
  bits, and stay until the slice before takes them.
- Context-parallel ranks have keys and values of whole samples, and their gradients. They gather
  those of a slice in F, and scatter sums of gradients, in 32 bits, in B; nothing hides either.
- Kernels, collectives and messages are n times as many, each with its latency.
- W runs for each slice, as in training. Each but the first reads and writes the gradient of its
  weight once more.
- Every slice visits all experts of a rank, and reads their weights. Products of few tokens take as
  long as that.
- Logits, messages and what B holds while it runs are those of one slice. Activations are those of
  all slices under way, as simulated.

The share of scores is that of the whole model, the same for all stages, as in training. Slices are
equally long, or take equally long, by :attr:`Workload.slicing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_zb.plan.byte_counts import ActivationBytes, keys_and_values
from megatron_zb.plan.mixers import RECURRENT
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.strategy import (
    MEGATRON_CONTEXT,
    MEGATRON_FULL,
    ScheduleCandidate,
    sliced,
)
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Pass, PassKind
from megatron_zb.schedules.features.slices import Slicing


def why_not_sliced(model: ModelConfig, *, post_validation: bool) -> str | None:
    """Return why microbatches of a model cannot be cut into slices; None if they can."""
    recurrent = _named(kind for kind in RECURRENT if kind in model.kinds)
    reasons = {
        f"{model.name} has layers {recurrent}, whose state passes to the next slice": recurrent,
        f"{model.name} has an encoder, whose images are whole": model.encoder,
        f"{model.name} predicts tokens of the next slice": model.prediction_layers,
        f"the masks of dropout in {model.name} are for whole microbatches": model.dropout,
        f"{model.name} stores its scores, which grow with every slice": not model.flash_attention,
        "steps with --post-validation are of whole microbatches": post_validation,
    }
    return next((why for why, holds in reasons.items() if holds), None)


def _named(kinds: Iterable[str]) -> str:
    return " and ".join(f"{kind} ({RECURRENT[kind]})" for kind in kinds)


def with_slices(
    whole: Sequence[ScheduleCandidate], slices: Sequence[int], *, named: bool
) -> list[ScheduleCandidate]:
    """Return candidates, and those that have slices with them, for these numbers of slices.

    Unless schedules are ``named``, 1F1B and interleaved 1F1B of slices take part. Beside slices
    stand Megatron's own remedies for long samples.
    """
    if max(slices) == 1:
        return list(whole)
    own = [candidate for candidate in whole if candidate.megatron]
    own += [replace(own[0], name=name) for name in (MEGATRON_CONTEXT, MEGATRON_FULL)]
    others = [candidate for candidate in whole if not candidate.megatron]
    return [*own, *(others if 1 in slices else ()), *sliced(others, named=named)]


def are_long(load: Workload, least: int) -> bool:
    """Return whether every slice has ``least`` tokens on a rank that shares it; whole ones do."""
    slicing = load.slicing
    return slicing is None or min(slicing.lengths) >= least * load.strategy.spread


def unrolled(passes: Sequence[Pass], slicing: Slicing) -> Iterator[Pass]:
    """Yield passes on units with slice i of stage s as stage s * n + i, as in :func:`held_by`.

    A joined W becomes one W for each slice.
    """
    n = slicing.slices
    for kind, stage, unit in passes:
        j, i = slicing.microbatch_and_slice(unit)
        yield Pass(kind, stage * n + i, j)
        if slicing.joins_weight and kind in (PassKind.W, PassKind.BW):
            yield from (Pass(PassKind.W, stage * n + other, j) for other in range(1, n))


def held_by(held: Sequence[ActivationBytes], slicing: Slicing) -> list[ActivationBytes]:
    """Return the bytes of each slice of each stage."""
    shares = [scale.tokens for scale in slicing.scales]
    return [of * share for of in held for share in shares]


def prefix(load: Workload, layers: int) -> float:
    """Count the bytes of prefixes beside activations, in the layers that attend.

    Keys and values have a place for all slices before their F has run. Their gradients, in 32 bits,
    are kept until B of the first slice; that of the layer whose B runs has 10 bytes more, and with
    context parallelism, which has two runs of queries, 12.
    """
    if load.strategy.slices == 1 or not layers:
        return 0.0
    return keys_and_values(load) * (layers * (1 + 2) + 5 + load.strategy.gathers)

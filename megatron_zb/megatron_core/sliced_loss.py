"""Losses of microbatches whose output has been computed in token slices.

A user's loss function gets the output of whole microbatches, as Megatron gives it: F of the last
slice ends with it, and the gradient of the output is kept for B of all slices, which follow in
reverse. So any loss and any metric is that of a step without slices. The function comes from the
user's forward step, which runs once more with the whole microbatch. The model's call then returns
the output of the slices.

With a vocabulary-parallel output layer, all ranks need the gradient of a slice right after its O,
before the loss of the microbatch can be known. It is then taken from the loss function of the
slice, as that of a mean over the tokens that count in the loss mask, and compared with that of the
whole microbatch, in every step: see :class:`ComparedGradients`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.sliced_documents import Cut, all_reduced_max
from megatron_zb.megatron_core.sliced_reading import FLAG, SlicedReading
from megatron_zb.megatron_core.step import Step, device

LOSS_MASK = "loss_mask"
TOLERANCE = 1e-4
"""The most by which a gradient of a token's loss may differ, in units of the slice's largest."""


@dataclass
class SliceOutputs:
    """Outputs (batch, tokens, ...) of the slices of a stage, and their gradients, by unit."""

    cut: Cut
    _outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    _gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    def put(self, output: torch.Tensor) -> None:
        """Keep the output of the slice that has just run.

        Raises:
            UsageError: it has no axis of tokens where Megatron's models have it.
        """
        start, end = self.cut.tokens
        tokens = (end - start) // self.cut.context.size
        if output.ndim < 2 or output.shape[1] != tokens:
            raise UsageError(
                f"{FLAG}: the model returns a tensor of shape {list(output.shape)} for a slice, "
                f"which has no axis of {tokens} tokens behind its first: leave the flag out"
            )
        self._outputs[self.cut.unit] = output.detach()

    @property
    def _units(self) -> range:
        first = self.cut.microbatch * self.cut.slices
        return range(first, first + self.cut.slices)

    def whole(self) -> torch.Tensor:
        """Return this rank's tokens of the microbatch's output, as a leaf. Collective over CP."""
        context, outputs = self.cut.context, [self._outputs.pop(unit) for unit in self._units]
        if context.size == 1:
            return torch.cat(outputs, dim=1)
        rows = [output.transpose(0, 1) for output in outputs]
        whole = rows[0].new_empty(self.cut.borders[-1], *rows[0].shape[1:])
        for (start, end), own in zip(pairwise(self.cut.borders), rows, strict=True):
            context.gather(own.contiguous(), whole[start:end])
        return context.own(whole).transpose(0, 1).contiguous()

    def split(self, gradient: torch.Tensor) -> None:
        """Keep the gradient of what :meth:`whole` has returned. Collective over CP."""
        context, borders = self.cut.context, self.cut.borders
        if context.size == 1:
            lengths = [end - start for start, end in pairwise(borders)]
            parts = gradient.split(lengths, dim=1)
        else:
            rows = gradient.transpose(0, 1)
            whole = rows.new_zeros(borders[-1], *rows.shape[1:])
            runs = context.runs(0, borders[-1])
            for (start, end), own in zip(runs, rows.chunk(len(runs)), strict=True):
                whole[start:end] = own
            summed = [context.summed(whole[start:end]) for start, end in pairwise(borders)]
            parts = tuple(part.transpose(0, 1) for part in summed)
        self._gradients.update(zip(self._units, (p.contiguous() for p in parts), strict=True))

    def gradient(self, unit: int) -> torch.Tensor:
        """Return the gradient of the output of a slice, once."""
        return self._gradients.pop(unit)


# --- slices of a vocabulary-parallel output layer


class TokenCounts:
    """Numbers of tokens of each slice that count in the loss, the same on all tensor ranks."""

    def __init__(self, reading: SlicedReading | None, cut: Cut, step: Step) -> None:
        self._reading, self._cut = reading, cut
        self._group = step.pg_collection.tp
        self._found: dict[int, torch.Tensor] = {}

    def of(self, unit: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the numbers of this rank's tokens of a slice, of all of it, and of its microbatch.

        Collective over the tensor-parallel ranks, of which the first reads the data.

        Raises:
            UsageError: the data has no loss mask.
        """
        j, i = divmod(unit, self._cut.slices)
        if j not in self._found:
            self._found[j] = self._counted(j)
        own, of_group = self._found[j]
        return own[i], of_group[i], of_group.sum()

    def _counted(self, microbatch: int) -> torch.Tensor:
        counts = torch.zeros(2, self._cut.slices, dtype=torch.float64, device=device())
        if self._reading is not None:
            mask = self._reading.kept[microbatch].get(LOSS_MASK)
            if mask is None:
                raise UsageError(
                    f"{FLAG} with --pipeline-vocabulary on weighs losses of slices by the tokens "
                    f"in {LOSS_MASK}, which the data does not have: add it to the microbatches"
                )
            slices = [mask[:, start:end] for start, end in pairwise(self._reading.borders)]
            for row, parts in enumerate(([self._cut.context.own(s, 1) for s in slices], slices)):
                counts[row].copy_(torch.stack([part.sum() for part in parts]))
        if self._group.size() > 1:
            dist.broadcast(counts, dist.get_global_rank(self._group, 0), group=self._group)
        return counts

    def weighed(
        self, loss_func: Callable[..., Any], per_token: bool, output: torch.Tensor
    ) -> tuple[Any, ...]:
        """Return a slice's loss as a part of its microbatch's, by the tokens that count.

        A mean over no tokens is no number: the loss of such a slice, and its gradient, are 0.
        Context-parallel ranks return sums of their tokens, which Megatron averages, or their parts
        of a mean over the group, which Megatron adds up.
        """
        ranks = self._cut.context.size
        own, of_group, all_slices = self.of(self._cut.unit)
        output.register_hook(lambda gradient: _if_any(own, gradient))
        result = loss_func(output)
        if len(result) == 3:
            loss, num_tokens, _ = result
            if not per_token:
                loss, num_tokens = loss * ranks, all_slices.to(num_tokens.dtype)
            return loss, num_tokens, {}
        loss, _ = result
        share = (of_group / all_slices.clamp(min=1)).to(loss.dtype)
        return _if_any(of_group, loss * share), {}


def _if_any(count: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value, or zeros if nothing was counted; without asking a GPU for the count."""
    return torch.where(count > 0, value, torch.zeros_like(value))


class ComparedGradients:
    """Gradients of the losses of tokens by slice, compared with those of whole microbatches.

    Whether any differs is found on the device, and read once a step.
    """

    def __init__(self) -> None:
        self._by_slice: dict[int, torch.Tensor] = {}
        self._differ: torch.Tensor | None = None

    def put(self, unit: int, gradient: torch.Tensor) -> None:
        """Keep the gradient by which a slice goes on."""
        self._by_slice[unit] = gradient.detach()

    def compare(self, unit: int, whole: torch.Tensor) -> None:
        """Compare the gradient of a slice with its part of the microbatch's."""
        own = self._by_slice.pop(unit)
        both = ~(own.isfinite() | whole.isfinite())
        differ = (own - whole).masked_fill(both, 0.0).abs().max()
        found = ~(differ <= TOLERANCE * torch.maximum(own.abs().max(), whole.abs().max()))
        self._differ = found if self._differ is None else self._differ | found

    def check(self, step: Step) -> None:
        """Compare on all ranks. Collective over the model and its replicas.

        Raises:
            UsageError: a gradient differs.
        """
        found = torch.zeros(1, dtype=torch.int)
        if self._differ is not None:
            found += int(self._differ)
        self._differ = None
        groups = [getattr(step.pg_collection, name, None) for name in ("tp", "pp", "dp_cp")]
        if bool(all_reduced_max(found, [group for group in groups if group is not None])):
            raise UsageError(
                f"{FLAG} with --pipeline-vocabulary on computes the gradient of each slice as that "
                f"of a mean over the tokens of {LOSS_MASK}, which the loss function of this step "
                "has not: give --pipeline-vocabulary off, with which any loss is possible"
            )

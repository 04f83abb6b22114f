"""Training of two copies of every stage, for microbatches that come in from either end.

A microbatch passes the stages of one copy. Both copies of a stage begin with the same weights. When
the last W of a stage has run, X hands its gradient over to the rank of the copy, and Y adds what
has come from there. So both have the same gradient before it is reduced over data-parallel ranks,
and take the same optimizer step. The second copy is left out of gradient norms and of checkpoints:
a checkpoint is that of one model, for any schedule.

See :mod:`megatron_zb.schedules.features.two_directions` for the order of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch.utils._pytree import tree_map_only

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.checkpoints import as_replicas, sums_of
from megatron_zb.megatron_core.data_iterators import Passing
from megatron_zb.megatron_core.data_parallel import gradients_of, overlaps_grad_reduce
from megatron_zb.megatron_core.model_ends import gradient_of
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.step import Step, StepPart, device
from megatron_zb.runtime.channels import new_groups
from megatron_zb.runtime.executor import Allocate, Handler
from megatron_zb.schedules.features.two_directions import X, Y
from megatron_zb.schedules.passes import Message, PassKind


class CopiesPart(StepPart):
    """Feeds each copy of the model its microbatches, and adds up the gradients of both.

    Args:
        physical: the stages of the ranks.
    """

    handlers: Mapping[PassKind, Handler] = {
        X: lambda stage, microbatch: _handed_over(stage.model_chunk),
        Y: lambda stage, microbatch, received: _add(stage.model_chunk, received),
    }

    def __init__(self, physical: PhysicalPlacement) -> None:
        self._physical, self._placement = physical, physical.placement
        self._pipeline: Any = None
        """Group of the ranks of a pipeline, for objects of the host."""
        self._are_checked = False

    # --- the model

    def prepare_model(self, chunks: list[Any]) -> None:
        """Leave the second copy of every stage out of norms and checkpoints."""
        for number, chunk in enumerate(chunks):
            if self._stage(number) >= self._placement.stages_of_model:
                for parameter in chunk.parameters():
                    parameter.shared = True  # what Megatron leaves out of norms
                chunk.sharded_state_dict = partial(_not_saved, chunk.sharded_state_dict)

    def _stage(self, chunk: int) -> int:
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        return self._physical.stage(pp_rank, chunk)

    def _place(self, chunk: int) -> int:
        """Return the place in the model of the stage of a chunk."""
        return self._placement.stage_of_model(self._stage(chunk))

    # --- a step

    def before_step(self, step: Step) -> None:
        """Let each chunk read the microbatches that pass it.

        Raises:
            UsageError: the copies of a stage have other weights, gradients are reduced before the
                copies are added up, or the step was planned for unequal microbatches.
        """
        if any(map(overlaps_grad_reduce, step.model)):
            raise UsageError(
                f"{step.program.schedule.name}: overlap_grad_reduce reduces gradients before those "
                "of both copies are added: leave it out"
            )
        if step.order is not None or step.lengths is not None:
            raise UsageError(
                f"{step.program.schedule.name}: steps of two copies are not planned for unequal "
                "microbatches: do not give their lengths, or choose a schedule with one copy"
            )
        if self._pipeline is None:
            ranks = step.physical.pipeline_ranks(step.pg_collection.pp)
            (self._pipeline,) = new_groups([ranks], "gloo")
        if not self._are_checked and not step.forward_only:
            self._are_checked = True
            self._check_equal(step.model)
        step.data_iterators = [
            iterator and Passing(iterator, _units_on(step, self._stage(chunk)))
            for chunk, iterator in enumerate(step.data_iterators)
        ]

    def wrap_stage(self, number: int, stage: Any, step: Step) -> None:
        stage.model_chunk = step.model[stage.chunk]

    def allocation(self, usual: Allocate, step: Step) -> Allocate:
        def allocate(message: Message) -> torch.Tensor:
            if message.made_by is not X:
                return usual(message)
            gradients = _gradients(step.model[self._placement.chunk_of(message.stage)])
            dtype = reduce(torch.promote_types, [it.dtype for it in gradients])
            numbers = sum(it.numel() for it in gradients)
            return torch.empty(numbers, dtype=dtype, device=gradients[0].device)

        return allocate

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        yield
        if step.is_warm_up:
            return
        for iterator in step.data_iterators:
            if iterator is not None:
                iterator.finish(step.num_microbatches)
        self._gather_records(step)

    def _check_equal(self, model: Sequence[Any]) -> None:
        """Compare the weights of the copies of each stage, by two sums of each weight.

        Raises:
            UsageError: they differ.
        """
        weights = [list(unwrap_model(chunk).parameters()) for chunk in model]
        own = [(self._place(n), sums_of(of_chunk)) for n, of_chunk in enumerate(weights)]
        seen: dict[int, list[float]] = {}
        for place, sums in (it for of_rank in self._of_all(own) for it in of_rank):
            if seen.setdefault(place, sums) != sums:
                raise UsageError(
                    f"the two copies of stage {place} of the model begin with other weights: load "
                    "one checkpoint into both, or give --pipeline-random-streams layer"
                )

    def _of_all(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self._pipeline.size()
        dist.all_gather_object(found, value, group=self._pipeline)
        return found

    def _gather_records(self, step: Step) -> None:
        """Put the records of both output layers, and their tokens, together on the last rank.

        Megatron looks for them there, and no other rank has any.
        """
        last = self._placement.stages_of_model - 1
        ends = (n for n in range(self._placement.chunks) if self._place(n) == last)
        units = [unit for n in ends for unit in _units_on(step, self._stage(n))]
        records = dict(zip(units, step.forward_data_store, strict=True))
        on_host = tree_map_only(torch.Tensor, lambda it: it.detach().cpu(), records)
        of_all = self._of_all((on_host, int(step.total_num_tokens)))
        found = {unit: it for records, _ in of_all for unit, it in records.items()}
        step.total_num_tokens.zero_()
        step.forward_data_store.clear()
        if step.pp_rank == self._placement.pipeline_size - 1:
            step.total_num_tokens += sum(tokens for _, tokens in of_all)
            in_order = [found[unit] for unit in sorted(found)]
            here = device()
            step.forward_data_store += tree_map_only(torch.Tensor, lambda it: it.to(here), in_order)


def _units_on(step: Step, stage: int) -> Sequence[int]:
    """Return the microbatches that pass a stage, in the order of its F."""
    rules = step.program.schedule.rules
    forward = rules.kind(PassKind.F)
    assert forward is not None, "every step has forwards"
    found = rules.visits(forward, stage)
    return range(step.num_microbatches) if found is None else found


# --- gradients


def _gradients(chunk: Any) -> list[torch.Tensor]:
    """Return the gradients of a chunk: buffers of data parallelism, or those of each weight."""
    if hasattr(chunk, "finish_grad_sync"):
        return gradients_of(chunk)
    return [gradient_of(weight) for weight in chunk.parameters() if weight.requires_grad]


def _flat(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([it.reshape(-1) for it in gradients])


def _handed_over(chunk: Any) -> torch.Tensor:
    """Run X: return the gradients of a chunk in a tensor of their own, as Y will change them."""
    return _flat(_gradients(chunk))


def _add(chunk: Any, received: torch.Tensor) -> None:
    """Run Y: add the gradients of the copy."""
    gradients = _gradients(chunk)
    parts = received.split([it.numel() for it in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.add_(part.view_as(gradient))


# --- checkpoints


def _not_saved(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Return what a checkpoint reads into a copy of a stage, and what the other one writes."""
    return as_replicas(original(*arguments, **keywords))

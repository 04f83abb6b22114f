"""Training of two copies of every stage, for microbatches that come in from either end.

A microbatch passes the stages of one copy. Both copies of a stage begin with the same weights. At
the end of a step their gradients are added up on both, before the reduction over data-parallel
ranks, so that both take the same optimizer step. The second copy is left out of gradient norms and
of checkpoints: a checkpoint is that of one model, for any schedule.

See :mod:`megatron_zb.schedules.features.two_directions` for the order of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.utils import unwrap_model
from torch.utils._pytree import tree_map_only

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.model_ends import gradient_of
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.step import Step, StepPart, device
from megatron_zb.runtime.channels import new_groups
from megatron_zb.schedules.passes import PassKind


class _Held(NamedTuple):
    """A stage of this rank: its chunk, its place in the model, and the ranks of its copies."""

    chunk: int
    stage: int
    place: int
    ranks: tuple[int, ...]


class CopiesPart(StepPart):
    """Feeds each copy of the model its microbatches, and adds up the gradients of both.

    Args:
        physical: the stages of the ranks.
    """

    fact = "has_copies"

    def __init__(self, physical: PhysicalPlacement) -> None:
        self._placement = physical.placement
        self._physical = physical
        self._pairs: dict[int, Any] = {}
        """Process groups of the copies of a stage, by its chunk on this rank."""
        self._ends: Any = None
        """Group of the ranks with an output layer, for objects."""
        self._are_checked = False

    # --- the model

    def prepare_model(self, chunks: list[Any]) -> None:
        """Leave the second copy of every stage out of norms and checkpoints.

        Raises:
            UsageError: the output layer is tied to the embedding.
        """
        from megatron.core import parallel_state

        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        for number, chunk in enumerate(chunks):
            if getattr(chunk, "share_embeddings_and_output_weights", False):
                raise UsageError(
                    "two copies of every stage need an output layer with its own weights: give "
                    "--untie-embeddings-and-output-weights, or a schedule with one copy"
                )
            if self._physical.stage(pp_rank, number) >= self._placement.stages_of_model:
                for parameter in chunk.parameters():
                    parameter.shared = True  # what Megatron leaves out of norms
                chunk.sharded_state_dict = partial(_not_saved, chunk.sharded_state_dict)

    # --- a step

    def before_step(self, step: Step) -> None:
        """Let each chunk read the microbatches that pass it.

        Raises:
            UsageError: the copies of a stage have other weights.
        """
        if not self._pairs:
            self._connect(step)
        if not self._are_checked and not step.forward_only:
            self._check_equal(step.model)
            self._are_checked = True
        iterators = list(step.data_iterators)
        for held in self._held(step):
            if iterators[held.chunk] is not None:
                units = _units_on(step, held.stage)
                iterators[held.chunk] = _Passing(iterators[held.chunk], units)
        step.data_iterators = iterators

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        yield
        if step.is_warm_up:
            return
        for held in self._held(step):
            iterator = step.data_iterators[held.chunk]
            if isinstance(iterator, _Passing):
                iterator.finish(step.num_microbatches)
        self._gather_records(step)
        if not step.forward_only:
            for held in self._held(step):
                self._add_up(step.model, held)

    def _held(self, step: Step) -> list[_Held]:
        """Return the stages of this rank in the order of the model, which its copies share."""
        placement, n = self._placement, self._placement.stages_of_model
        ranks = step.physical.pipeline_ranks(step.pg_collection.pp)
        found = []
        for chunk in range(placement.chunks):
            stage = step.physical.stage(step.pp_rank, chunk)
            place = placement.stage_of_model(stage)
            copies = range(place, placement.num_stages, n)
            of_copies = tuple(ranks[placement.rank_of[s]] for s in copies)
            found.append(_Held(chunk, stage, place, of_copies))
        return sorted(found, key=lambda it: it.place)

    def _connect(self, step: Step) -> None:
        """Make the groups of this rank; collective over the job."""
        placement, n = self._placement, self._placement.stages_of_model
        ranks = step.physical.pipeline_ranks(step.pg_collection.pp)
        held = self._held(step)
        apart = [it for it in held if len(set(it.ranks)) > 1]
        made = new_groups([sorted(it.ranks) for it in apart])
        self._pairs = {it.chunk: group for it, group in zip(apart, made, strict=True)}
        ends = sorted({ranks[placement.rank_of[s]] for s in range(n - 1, placement.num_stages, n)})
        mine = [ends] if dist.get_rank() in ends else []
        self._ends = next(iter(new_groups(mine, "gloo")), None)

    # --- gradients

    def _add_up(self, model: Sequence[Any], held: _Held) -> None:
        """Add up the gradients of the copies of a stage, on each of them."""
        if held.chunk in self._pairs:
            for gradients in _gradients(model[held.chunk]):
                dist.all_reduce(gradients, group=self._pairs[held.chunk])
            return
        if held.stage != held.place:
            return  # done with the first copy, which this rank has, too
        other = self._chunk_of_copy(held)
        for one, copy in zip(_gradients(model[held.chunk]), _gradients(model[other]), strict=True):
            one.add_(copy)
            copy.copy_(one)

    def _chunk_of_copy(self, held: _Held) -> int:
        return self._placement.chunk_of(held.place + self._placement.stages_of_model)

    def _check_equal(self, model: Sequence[Any]) -> None:
        """Compare the weights of the copies of each stage, by two sums of each weight.

        Raises:
            UsageError: they differ.
        """
        for chunk, group in sorted(self._pairs.items(), key=lambda it: self._place_of(it[0])):
            own = _fingerprint(model[chunk])
            smallest, largest = own.clone(), own.clone()
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            if not torch.equal(smallest, largest):
                raise UsageError(
                    f"the two copies of stage {self._place_of(chunk)} of the model begin with "
                    "other weights: load one checkpoint into both, or let layers draw their "
                    "weights with --pipeline-random-streams layer"
                )

    def _place_of(self, chunk: int) -> int:
        from megatron.core import parallel_state

        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        return self._physical.stage_of_model(pp_rank, chunk)

    # --- losses

    def _gather_records(self, step: Step) -> None:
        """Put the records of both output layers together on Megatron's last rank, with tokens.

        Another rank with an output layer gives its own away, as Megatron's ranks before the last
        one have none.
        """
        if self._ends is None:
            return
        n = self._placement.stages_of_model
        own = next(it.stage for it in self._held(step) if it.place == n - 1)
        units = _units_on(step, own)
        records = dict(zip(units, step.forward_data_store, strict=True))
        on_host = tree_map_only(torch.Tensor, lambda it: it.detach().cpu(), records)
        of_all: list[Any] = [None] * self._ends.size()
        dist.all_gather_object(of_all, (on_host, int(step.total_num_tokens)), group=self._ends)
        found = {unit: it for records, _ in of_all for unit, it in records.items()}
        is_last = step.pp_rank == self._placement.pipeline_size - 1
        back: Callable[[Any], Any] = lambda it: it.to(device())  # noqa: E731
        step.forward_data_store[:] = (
            [tree_map_only(torch.Tensor, back, found[unit]) for unit in sorted(found)]
            if is_last
            else []
        )
        step.total_num_tokens.fill_(sum(tokens for _, tokens in of_all) if is_last else 0)


def _units_on(step: Step, stage: int) -> Sequence[int]:
    """Return the microbatches that pass a stage, in the order of its F."""
    rules = step.program.schedule.rules
    forward = rules.kind(PassKind.F)
    assert forward is not None, "every step has forwards"
    found = rules.visits(forward, stage)
    return range(step.num_microbatches) if found is None else found


class _Passing:
    """The microbatches of an iterator that pass a stage; all else is asked of the iterator."""

    def __init__(self, iterator: Any, units: Sequence[int]) -> None:
        self._iterator, self._units = iterator, iter(units)
        self._read = 0

    def __iter__(self) -> _Passing:
        return self

    def __next__(self) -> Any:
        self._skip(next(self._units))
        self._read += 1
        return next(self._iterator)

    def finish(self, num_microbatches: int) -> None:
        """Leave the iterator at the first microbatch of the next step, if any has been read."""
        if self._read:
            self._skip(num_microbatches)

    def _skip(self, unit: int) -> None:
        while self._read < unit:
            next(self._iterator)
            self._read += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


def _gradients(chunk: Any) -> list[torch.Tensor]:
    """Return the gradients of a chunk: buffers of data parallelism, or those of each weight."""
    if hasattr(chunk, "buffers") and hasattr(chunk, "finish_grad_sync"):
        return [it.grad_data for it in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return [gradient_of(weight) for weight in chunk.parameters() if weight.requires_grad]


def _fingerprint(chunk: Any) -> torch.Tensor:
    weights = [it.detach().double() for it in unwrap_model(chunk).parameters()]
    return torch.stack([s for it in weights for s in (it.sum(), it.square().sum())])


def _not_saved(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Return what a checkpoint reads into a copy of a stage, and what the other one writes."""
    found = original(*arguments, **keywords)
    return tree_map_only((ShardedTensor, ShardedObject), _as_replica, found)


def _as_replica(sharded: Any) -> Any:
    replica = sharded.replica_id
    first = replica + 1 if isinstance(replica, int) else (replica[0] + 1, *replica[1:])
    sharded.replica_id = first
    return sharded

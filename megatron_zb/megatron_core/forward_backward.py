"""The replacement of Megatron's ``forward_backward_func``.

The contract is that of ``megatron.core.pipeline_parallel.schedules``: the same keywords, the same
duties, the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_zb.megatron_core import graphs, refusals, versions
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.stages import MegatronStage
from megatron_zb.megatron_core.step import (
    Passes,
    Step,
    StepPart,
    activation_shape,
    check_widths,
    device,
    timed,
)
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.executor import (
    TRAINING,
    Allocate,
    PairHandler,
    one_after_the_other,
    run_program,
)
from megatron_zb.runtime.observer import NOBODY, Observer, Observers
from megatron_zb.schedules.lowering import Program
from megatron_zb.schedules.passes import Message


class ForwardBackward:
    """A pipeline schedule with the calling contract of Megatron's ``forward_backward_func``.

    Args:
        physical: the stages of the ranks.
        program_for: returns the program for a number of microbatches, for training or for forwards
            only, and for a step that is captured into a CUDA graph or not.
        splits: one for each chunk of this rank.
        parts: the features of the steps, whose hooks are called in this order.
    """

    def __init__(
        self,
        physical: PhysicalPlacement,
        program_for: Callable[[int, bool, bool], Program],
        splits: list[SplitBackward],
        parts: Iterable[StepPart],
    ) -> None:
        self._physical, self._program_for, self._splits = physical, program_for, splits
        self._parts = list(parts)
        self._memory: ActivationMemory | None = None

    def add(self, part: StepPart) -> None:
        """Add a part behind all others."""
        self._parts.append(part)

    def track(self, memory: ActivationMemory | None) -> None:
        """Count the activations of the steps from the next one on; None to stop."""
        self._memory = memory

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run all microbatches; see Megatron's ``get_forward_backward_func`` for the arguments.

        Returns:
            One entry for each microbatch on the rank that computes the loss, else an empty list.
        """
        del p2p_communicator  # the schedule has its own channels
        chunks = model if isinstance(model, list) else [model]
        config, groups = get_model_config(chunks[0]), pg_collection or versions.process_groups()
        sequence = seq_length if decoder_seq_length is None else decoder_seq_length
        step = Step(
            parts=self._parts,
            physical=self._physical,
            pp_rank=groups.pp.rank(),
            config=config,
            pg_collection=groups,
            forward_step_func=forward_step_func,
            data_iterators=data_iterator if isinstance(data_iterator, list) else [data_iterator],
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            force_all_reduce=force_all_reduce,
            shape=activation_shape(sequence, micro_batch_size, config, groups),
            captured=graphs.is_capturing(device()),
            program_for=self._program_for,
            run=self._run,
            make_stages=self._stages,
            total_num_tokens=torch.zeros([], dtype=torch.int, device=device()),
            memory=self._memory,
        )
        check_widths(config, self._physical.placement.num_stages)
        for part in self._parts:
            part.before_step(step)
        schedule = step.program.schedule
        placement = schedule.placement
        refusals.check_step(config, schedule.name, adjust_tensor_shapes_fn, placement)
        with timed(config, "forward-backward", log_level=1, barrier=config.barrier_with_L1_time):
            self._run(step)
        for part in reversed(self._parts):
            part.after_step(step)
        return step.forward_data_store

    def close(self) -> None:
        """Release what the parts hold for the steps, collectively; the next call recreates it."""
        for part in reversed(self._parts):
            part.close()

    def _run(self, step: Step) -> None:
        """Run the passes within the contexts of all parts, then reduce the gradients."""
        with ExitStack() as contexts:
            for part in self._parts:
                contexts.enter_context(part.around(step))
            assert step.transport is not None, "one of the parts connects the ranks"
            stages, allocate = self._stages(step), self._allocation(step)
            passes = Passes(stages, step.transport, allocate, self._observer(step))
            if not any(part.run_passes(passes, step) for part in self._parts):
                self._run_passes(passes, step)
        finalize = step.config.finalize_model_grads_func
        is_training = not (step.forward_only or step.is_warm_up)
        if finalize is not None and is_training and step.reduces:
            finalize(
                step.model,
                step.total_num_tokens if step.config.calculate_per_token_loss else None,
                pg_collection=step.pg_collection,
                force_all_reduce=step.force_all_reduce,
            )

    def _run_passes(self, passes: Passes, step: Step) -> None:
        handlers = dict(TRAINING)
        pairs: PairHandler = one_after_the_other
        for part in self._parts:
            handlers |= part.handlers
            pairs = part.pair_handler or pairs
        stages, transport, allocate, observer = passes
        run_program(
            step.program,
            step.logical,
            stages,
            transport,
            allocate,
            observer,
            handlers=handlers,
            pairs=pairs,
        )

    def _stages(self, step: Step) -> dict[int, Any]:
        """Create the stages of this rank, each by the part that replaces it, if any."""
        count = step.physical.placement.num_stages
        # Asked for the stages of all ranks, so that an error ends all of them at the same place.
        types = [self._type_of_stage(number, step) for number in range(count)]
        stages: dict[int, Any] = {}
        for chunk, split in enumerate(self._splits):
            number = step.physical.stage(step.pp_rank, chunk)
            stages[number] = types[number](step, chunk, split)
        for part in self._parts:
            stages |= part.more_stages(stages, step)
        for part in self._parts:
            for number, stage in stages.items():
                part.wrap_stage(number, stage, step)
        return stages

    def _type_of_stage(self, number: int, step: Step) -> Callable[..., Any]:
        found = [t for p in self._parts if (t := p.stage_type(number, step)) is not None]
        if len(found) <= 1:
            return found[0] if found else MegatronStage
        makers = [each if isinstance(each, partial) else partial(each) for each in found]
        options = {name: value for maker in makers for name, value in maker.keywords.items()}
        return partial(_joined(*(maker.func for maker in makers)), **options)

    def _allocation(self, step: Step) -> Allocate:
        def allocate(message: Message) -> torch.Tensor:
            return step.empty(message)

        found: Allocate = allocate
        for part in self._parts:
            found = part.allocation(found, step)
        return found

    def _observer(self, step: Step) -> Observer:
        """Return the observer of the passes; nobody observes a step that is captured."""
        if step.captured:
            return NOBODY
        # Without Observers around a single one: it is entered at every pass and every wait.
        found = [observer for part in self._parts for observer in part.observers(step)]
        return found[0] if len(found) == 1 else Observers(found)


@lru_cache(maxsize=16)
def _joined(*types: Any) -> type[MegatronStage]:
    """Return the type of a stage that is of all these types, the first one's methods first."""
    return type("And".join(each.__name__ for each in types), types, {})

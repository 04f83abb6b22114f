"""A step of training or evaluation, and the interface of the parts that take part in it.

A feature of the runtime, such as profiling or vocabulary parallelism, is a :class:`StepPart`: an
object with its own state and a few optional hooks. ``ForwardBackward`` calls the hooks of all parts
in the order of its list and names no feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.versions import message_width
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import Allocate, Handler, PairHandler, Transport
from megatron_zb.runtime.observer import NOTHING, Observer
from megatron_zb.schedules.lowering import Program
from megatron_zb.schedules.passes import Message, PassKind
from megatron_zb.schedules.step_plan import Lengths

Shape = tuple[int, int, int]
"""Sequence, batch and width of an activation between stages."""

WIDTHS = "pipeline_message_widths"
"""Attribute of a model's config: the width of what each stage but the last hands on, in order.

A model needs it whose stages hand on more than one hidden state, side by side, such as the outputs
of earlier layers. All ranks of a pipeline have the same widths.
"""


def check_widths(config: Any, num_stages: int) -> None:
    """Check the widths that a model's config gives for its messages, if it gives any.

    Raises:
        UsageError: they are not a positive number for each stage but the last.
    """
    widths = getattr(config, WIDTHS, None)
    if widths is None:
        return
    if len(widths) != num_stages - 1 or not all(isinstance(w, int) and w > 0 for w in widths):
        raise UsageError(
            f"the model's config has {WIDTHS} {list(widths)}: give a positive width for what each "
            f"of the first {num_stages - 1} stages hands on"
        )


def activation_shape(sequence: int, batch: int, config: Any, groups: Any) -> Shape:
    """Return the shape of an activation between stages on a rank.

    Megatron's own ``get_tensor_shapes`` has none with ``variable_seq_lengths`` since 0.19.

    Args:
        sequence: tokens of a sequence, before context and sequence parallelism divide it.
        batch: sequences of a microbatch.
        config: of the model.
        groups: process groups of the rank.
    """
    sequence //= groups.cp.size()
    if config.sequence_parallel:
        sequence //= groups.tp.size()
    return sequence, batch, message_width(config)


@dataclass
class Step:
    """The arguments of one call of ``forward_backward_func``, its state and its results.

    Stages refer to their step, so a step must not refer to its stages: a reference cycle would keep
    activations alive after an exception.
    """

    parts: Sequence[StepPart]
    physical: PhysicalPlacement
    pp_rank: int
    config: Any
    pg_collection: Any
    forward_step_func: Callable[..., Any]
    data_iterators: list[Any]
    model: list[Any]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    force_all_reduce: bool | None
    shape: Shape
    """Shape of an activation between stages, where all are alike."""
    captured: bool
    """Whether the step is captured into a CUDA graph: then nothing may ask the device."""
    program_for: Callable[[int, bool, bool], Program]
    run: Callable[[Step], None]
    """Function that runs the passes of this step, and reduces its gradients."""
    make_stages: Callable[[Step], dict[int, Any]]
    """Function that creates the stages of this rank for a step."""
    total_num_tokens: torch.Tensor
    memory: ActivationMemory | None = None
    """Counter of the step's activations, if any."""
    shapes: Sequence[Shape] | None = None
    """Shape of an activation of each microbatch, where they differ and all ranks know them."""
    lengths: Lengths | None = None
    """Lengths of the microbatches, where the step was planned for them."""
    order: Sequence[int] | None = None
    """Place of each microbatch in the caller's order, where they are fed in another one."""
    is_rehearsal: bool = False
    """Whether this run precedes the step and is undone: nothing is measured. Nothing is reduced in
    it; a run that gives gradients to compare with starts all reductions at its end.
    """
    reduces: bool = True
    """Whether the gradients of all microbatches are reduced together, at the end."""
    made_up: Transport | None = None
    """Messages of a warm-up, in which the rank runs without the others and reduces nothing."""
    profiles_pairs: bool = False
    """Whether a profile of overlapped passes needs stages that can run them."""
    channels: Channels | None = None
    """Channels to the other ranks of the pipeline, once they are connected."""
    transport: Transport | None = None
    """Interface to those channels for the executor."""
    forward_data_store: list[Any] = field(default_factory=list)

    @cached_property
    def program(self) -> Program:
        """Program of this step, chosen at its first use.

        A profile switches the schedule in its ``before_step``. So no part before it in the list may
        request the program in that hook.
        """
        return self.program_for(self.num_microbatches, self.forward_only, self.captured)

    @property
    def shapes_vary(self) -> bool:
        """Whether only the sender of a message knows its shape."""
        return self.shapes is None and (
            self.config.variable_seq_lengths or any(it.sends_other_shapes for it in self.parts)
        )

    @property
    def is_warm_up(self) -> bool:
        """Whether the rank runs without the others."""
        return self.made_up is not None

    @property
    def logical(self) -> int:
        """The logical rank of this process in its pipeline."""
        return self.physical.logical(self.pp_rank)

    def shape_of(self, microbatch: int) -> Shape:
        """Return the shape of a microbatch's activation between stages."""
        return self.shape if self.shapes is None else self.shapes[microbatch]

    def shape_of_message(self, message: Message) -> Shape:
        """Return the shape of a message between two stages of the model.

        A gradient has the shape of the activation that it belongs to.
        """
        shape, widths = self.shape_of(message.microbatch), getattr(self.config, WIDTHS, None)
        if widths is None:
            return shape
        return *shape[:2], widths[message.stage - (not message.is_gradient)]

    def place_of(self, microbatch: int) -> int:
        """Return the place of a microbatch in the caller's order."""
        return microbatch if self.order is None else self.order[microbatch]

    def empty(self, message: Message | None = None) -> torch.Tensor:
        """Return an empty tensor for a message between stages, by default the first activation."""
        shape = self.shape_of(0) if message is None else self.shape_of_message(message)
        return torch.empty(shape, dtype=self.config.pipeline_dtype, device=self._device)

    def placeholder(self, microbatch: int) -> torch.Tensor:
        """Return zeros in the shape of an activation between stages, in the memory of one."""
        zero = torch.zeros((), dtype=self.config.pipeline_dtype, device=self._device)
        return zero.expand(self.shape_of(microbatch))

    @cached_property
    def _device(self) -> torch.device | int:
        return device()


class Passes(NamedTuple):
    """Everything that the passes of a step run with."""

    stages: dict[int, Any]
    transport: Transport
    allocate: Allocate
    observer: Observer


class StepPart:
    """One feature of the steps. All hooks are optional.

    ``ForwardBackward`` calls a hook for all parts in the order of its list, and ``after_step`` in
    the reverse order. A part keeps its own state: what it sets in a step is visible to the parts
    behind it.
    """

    handlers: Mapping[PassKind, Handler] = {}
    """Functions that run kinds of passes, in addition to those of training."""
    pair_handler: PairHandler | None = None
    """Function that runs two overlapped passes."""
    fact: str | None = None
    """What this part makes true of a step, by its name in ``refusals.yaml``."""

    @property
    def reads_on_every_stage(self) -> bool:
        """Whether stages between the first and the last also need data."""
        return False

    @property
    def sends_other_shapes(self) -> bool:
        """Whether the part lets ranks send what only its sender knows the shape of."""
        return False

    def prepare_model(self, chunks: list[Any]) -> None:
        """Prepare the model chunks of this rank, before data parallelism wraps them."""

    def finish_model(self, chunks: list[Any]) -> None:
        """Prepare what layers do whose backward has been split."""

    def before_step(self, step: Step) -> None:
        """Prepare for a call, before anything runs; called once, also if the step is rehearsed."""

    def stage_type(self, number: int, step: Step) -> Callable[..., Any] | None:
        """Return the type of a stage in place of the usual one, None to leave it.

        It is called for all stages of the model on every rank. A stage that several parts replace
        is of all their types, in the order of the list: each calls ``super`` for what it does not
        do.
        """
        return None

    def wrap_stage(self, number: int, stage: Any, step: Step) -> None:
        """Set attributes of a stage of this rank."""

    def more_stages(self, stages: Mapping[int, Any], step: Step) -> Mapping[int, Any]:
        """Return stages of this rank in addition to those of the model, by number."""
        return {}

    def allocation(self, usual: Allocate, step: Step) -> Allocate:
        """Return the function that gives an empty tensor for a message."""
        return usual

    def observers(self, step: Step) -> Sequence[Observer]:
        """Return the observers of the passes, which a captured step does not have."""
        return ()

    def around(self, step: Step) -> AbstractContextManager[None]:
        """Return the context of a run of the passes, entered before the stages are created."""
        return NOTHING

    def run_passes(self, passes: Passes, step: Step) -> bool:
        """Run the passes in place of the executor, or return False to leave them to it."""
        return False

    def after_step(self, step: Step) -> None:
        """Finish a call whose passes and reductions have succeeded."""

    def close(self) -> None:
        """Release process groups and threads, collectively; the next step creates new ones."""

    def abandon(self) -> None:
        """Stop threads without the other ranks, where no step follows; waits for nothing."""


def device() -> Any:
    """Return the device on which Megatron creates its tensors."""
    return torch.cuda.current_device()


def on_gpu() -> bool:
    """Return whether that device is a GPU."""
    return torch.device(device()).type == "cuda"


def say_on_first_rank(line: str) -> None:
    """Print a line about the job."""
    if torch.distributed.get_rank() == 0:
        print(f"megatron_zb: {line}", flush=True)


def timed(
    config: Any, name: str, *, log_level: int, barrier: bool = False
) -> AbstractContextManager[None]:
    """Return the context of one of Megatron's timers, if the user has requested them."""
    return NOTHING if config.timers is None else _timer(config, name, log_level, barrier)


@contextmanager
def _timer(config: Any, name: str, log_level: int, barrier: bool) -> Iterator[None]:
    timer = config.timers(name, log_level=log_level)
    timer.start(barrier=barrier)
    yield
    timer.stop()

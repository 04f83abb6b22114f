"""Training of a model whose encoder runs on every rank, between the passes of its language model.

Every rank has a copy of the encoder, and runs it for every p-th microbatch: F before the first
stage needs the output, BW when its gradient has come back. When all passes have run, the gradients
of the copies are added, before they are reduced over data-parallel ranks. So the copies stay equal.
Those outside the first stage's rank are left out of gradient norms and of checkpoints, which are
the same as with the encoder in the first stage.

See :mod:`megatron_zb.schedules.features.second_model` for the order of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.checkpoints import as_replicas, sums_of
from megatron_zb.megatron_core.data_iterators import TwiceRead
from megatron_zb.megatron_core.data_parallel import overlaps_grad_reduce
from megatron_zb.megatron_core.encoders import ENCODERS, EncoderOfModel, converted, encoder_of
from megatron_zb.megatron_core.model_calls import ModelCall, calls_replaced, inner_model
from megatron_zb.megatron_core.model_ends import gradient_of
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.stages import MegatronStage
from megatron_zb.megatron_core.step import Step, StepPart, device
from megatron_zb.runtime.autograd_stage import AutogradStage
from megatron_zb.schedules.features.second_model import SecondModelRules

CHUNK = 0
"""The chunk of every rank that has the encoder, as the first stage is the first chunk of its rank.
"""

_NOT_IN_NORMS = "shared"
"""Attribute of the weights that Megatron leaves out of gradient norms."""

_ADDED_AT_ONCE = 2**26  # numbers; the sum of more gradients would need as much memory again


class EncoderStage(MegatronStage):
    """The encoder of a rank in one step.

    Args:
        part: the part of the step to which it belongs.
        encoder: how it runs.
    """

    def __init__(
        self, step: Step, split: SplitBackward, part: EncoderPart, encoder: EncoderOfModel
    ) -> None:
        self._part, self._encoder = part, encoder
        self._iterator = len(step.model)  # behind those of the chunks
        self._output: torch.Tensor | None = None
        self._is_first = True
        super().__init__(step, CHUNK, split)

    @property
    def _ends_in_loss(self) -> bool:
        return False

    @property
    def _rules(self) -> SecondModelRules:
        rules = self._step.program.schedule.rules
        assert isinstance(rules, SecondModelRules)
        return rules

    def _forward_step(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        """Call the user's forward step, with the encoder in place of the model."""
        step = self._step
        self._choose_streams(self._rules.microbatch_of(microbatch))
        model, config = step.model[self.chunk], step.config
        if self._is_first:
            self._is_first = False
            self._encoder.begin_step(inner_model(model))
        with (
            torch.autocast("cuda", dtype=config.autocast_dtype)
            if config.enable_autocast
            else nullcontext(),
            calls_replaced(model, partial(self._encode, model, model._compiled_call_impl)),
            self._part.encoding(),
        ):
            step.forward_step_func(step.data_iterators[self._iterator], model)
        output, self._output = self._output, None
        if output is None:
            raise UsageError(
                "the forward step did not call the model, so its encoder cannot run on every "
                "rank: leave the encoder in the first stage"
            )
        return output

    def _encode(self, chunk: Any, usual: Any, *arguments: Any, **options: Any) -> Any:
        model = inner_model(chunk)
        call = converted(ModelCall(arguments, options), model.config.params_dtype)
        with calls_replaced(chunk, usual):  # the chunk may be the model, without a wrapper
            output, returned = self._encoder.encode(model, call)
        self._output = output.to(self._step.config.pipeline_dtype)
        return returned

    def _start_of_backward(self, output: torch.Tensor) -> Any:
        return AutogradStage._start_of_backward(self, output)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run BW; its gradients are added to those of the other copies behind all passes."""
        self._choose_streams(self._rules.microbatch_of(microbatch))
        return AutogradStage.backward(self, microbatch, gradient)


class EncodedStage(MegatronStage):
    """The first stage of a model, which is given what its encoder has computed elsewhere."""

    def __init__(self, *arguments: Any, encoder: EncoderOfModel) -> None:
        self._encoder = encoder
        super().__init__(*arguments)

    def _forward_step(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        assert activation is not None, "every microbatch has passed the encoder"
        with self._encoder.given(inner_model(self._step.model[self.chunk]), activation):
            return super()._forward_step(microbatch, activation)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient of the encoder's output: zeros if the model has not used it."""
        output, _ = self._live[microbatch]
        found = super().backward(microbatch, gradient)
        return torch.zeros_like(output) if found is None and output is not None else found


class EncoderPart(StepPart):
    """Runs the encoder on every rank, and adds up the gradients of its copies.

    Args:
        physical: the stages of the ranks.
        splits: those of the rank's chunks.
    """

    fact = "spreads_encoder"
    sends_other_shapes = True
    reads_on_every_stage = True
    kinds: ClassVar[Mapping[str, EncoderOfModel]] = ENCODERS
    """The encoders that it runs, by the class of the model."""

    def __init__(self, physical: PhysicalPlacement, splits: Sequence[SplitBackward]) -> None:
        self._physical, self._splits = physical, splits
        self._readings = TwiceRead()
        self._encoder: EncoderOfModel | None = None
        self._are_checked = False
        self.is_encoding = False
        """Whether the forward step runs for the encoder, which reads what a first stage reads."""

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Say that the forward step inside runs for the encoder."""
        self.is_encoding = True
        try:
            yield
        finally:
            self.is_encoding = False

    @cached_property
    def _home(self) -> int:
        """The pipeline rank of the first stage."""
        return self._physical.logical(self._physical.placement.rank_of[0])

    # --- the model

    def prepare_model(self, chunks: list[Any]) -> None:
        """Give the copies the weights of the first stage's, and count them once.

        Raises:
            UsageError: the encoder cannot run on every rank, or a rank has no copy of it.
        """
        model = inner_model(chunks[CHUNK])
        self._encoder = encoder_of(model, self.kinds)
        parts = dict(self._encoder.parts(model))
        if not parts:
            raise UsageError(
                f"the {type(model).__name__} of a rank has no encoder, which is to run on every "
                "rank: build the first chunk of every rank with its encoder"
            )
        self.prepare_forwards(chunks)
        group = parallel_state.get_pipeline_model_parallel_group()
        source = dist.get_process_group_ranks(group)[self._home]
        for module in parts.values():
            for tensor in (*module.parameters(), *module.buffers()):
                there = tensor.detach().to(device())  # it may be moved there later
                dist.broadcast(there, source, group=group)
                tensor.detach().copy_(there)
        if parallel_state.get_pipeline_model_parallel_rank() != self._home:
            for weight in self._encoder.parameters(model):
                setattr(weight, _NOT_IN_NORMS, True)
            own = model.sharded_state_dict
            model.sharded_state_dict = partial(_with_replicas, own, tuple(parts))

    def prepare_forwards(self, chunks: list[Any]) -> None:
        """Let forwards of chunks run their layers alone, where the model has a switch for that."""
        for model in map(inner_model, chunks):
            if hasattr(model, "add_encoder"):
                model.add_encoder = False

    # --- a step

    def before_step(self, step: Step) -> None:
        """Let the encoder read beside the chunk that has it.

        Raises:
            UsageError: gradients are reduced before the copies are added up, the schedule has no
                backward of an encoder that trains, a CUDA graph captures the step, or the copies
                have other weights.
        """
        name = step.program.schedule.name
        if any(map(overlaps_grad_reduce, step.model)):
            raise UsageError(
                f"{name}: overlap_grad_reduce reduces gradients before those of all copies of the "
                "encoder are added: leave it out"
            )
        rules = step.program.schedule.rules
        assert isinstance(rules, SecondModelRules)
        if rules.second.is_frozen and not step.forward_only and self.trained(step):
            raise UsageError(
                f"{name}: the encoder has weights that train, but the schedule has no backward of "
                "it: freeze them, or give the second model the seconds of its backward"
            )
        if step.captured:
            raise UsageError(
                f"{name}: a CUDA graph has no messages of an encoder on every rank, whose shapes "
                "vary: leave the encoder in the first stage"
            )
        self.check_copies(step)
        self._readings.share(step, self.microbatches(step))

    def check_copies(self, step: Step) -> None:
        """Compare the weights of the copies before the first step.

        Raises:
            UsageError: they differ.
        """
        if not self._are_checked:
            self._are_checked = True
            self._check_equal(step)

    def _check_equal(self, step: Step) -> None:
        """Compare the weights of the copies, which a program may have loaded into some alone.

        Raises:
            UsageError: they differ.
        """
        assert self._encoder is not None, "the model has been prepared"
        own = sums_of(self._encoder.parameters(inner_model(step.model[CHUNK])))
        sums = torch.tensor(own, dtype=torch.float64, device=device())
        of_all = [torch.empty_like(sums) for _ in range(step.pg_collection.pp.size())]
        dist.all_gather(of_all, sums, group=step.pg_collection.pp)
        if any(not torch.equal(other, of_all[0]) for other in of_all):
            raise UsageError(
                f"{step.program.schedule.name}: the copies of the encoder begin with other weights "
                "on some pipeline ranks: load the same ones into the encoder of each rank"
            )

    def microbatches(self, step: Step) -> list[int]:
        """Return the microbatches that the encoder of this rank runs, in their order."""
        rules = step.program.schedule.rules
        assert isinstance(rules, SecondModelRules)
        units = rules.columns.on(self.stage(step))
        return [rules.microbatch_of(unit) for unit in units]

    def stage(self, step: Step) -> int:
        """Return the number of the stage that is the encoder of this rank."""
        return step.program.schedule.placement.stages_of[step.logical][-1]

    def stage_type(self, number: int, step: Step) -> Callable[..., Any] | None:
        assert self._encoder is not None, "the model has been prepared"
        return partial(EncodedStage, encoder=self._encoder) if number == 0 else None

    def more_stages(self, stages: Mapping[int, Any], step: Step) -> Mapping[int, Any]:
        assert self._encoder is not None, "the model has been prepared"
        own = EncoderStage(step, self._splits[CHUNK], self, self._encoder)
        return {self.stage(step): own}

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        yield
        if not (step.forward_only or step.is_warm_up):
            self._add_gradients(step)

    def after_step(self, step: Step) -> None:
        self._readings.finish(step.num_microbatches)

    def trained(self, step: Step) -> list[torch.nn.Parameter]:
        """Return the weights of the encoder that have gradients."""
        assert self._encoder is not None, "the model has been prepared"
        weights = self._encoder.parameters(inner_model(step.model[CHUNK]))
        return [weight for weight in weights if weight.requires_grad]

    def _add_gradients(self, step: Step) -> None:
        """Add up the gradients of the copies over the ranks of the pipeline."""
        for some in _batches(self.trained(step)):
            gradients = [_gradient(weight) for weight in some]
            flat = torch.cat([it.reshape(-1) for it in gradients])
            dist.all_reduce(flat, group=step.pg_collection.pp)
            for gradient, part in zip(
                gradients, flat.split([it.numel() for it in gradients]), strict=True
            ):
                gradient.copy_(part.view_as(gradient))


def _gradient(weight: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of a weight, which may not have had any on this rank."""
    if gradient_of(weight) is None:
        weight.grad = torch.zeros_like(weight)
    found: torch.Tensor = gradient_of(weight)
    return found


def _batches(weights: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Yield weights of one type of gradients, and of not too many numbers, together."""
    some: list[torch.nn.Parameter] = []
    numbers = 0
    for weight in weights:
        is_other = bool(some) and _gradient(weight).dtype != _gradient(some[0]).dtype
        if some and (is_other or numbers + weight.numel() > _ADDED_AT_ONCE):
            yield some
            some, numbers = [], 0
        some.append(weight)
        numbers += weight.numel()
    if some:
        yield some


def _with_replicas(
    original: Callable[..., Any],
    names: tuple[str, ...],
    prefix: str = "",
    *more: Any,
    **keywords: Any,
) -> Any:
    """Return what a checkpoint reads into a stage, of which the encoder is written elsewhere."""
    found = original(prefix, *more, **keywords)
    of_encoder = tuple(f"{prefix}{name}." for name in names)
    return {
        key: as_replicas(value) if key.startswith(of_encoder) else value
        for key, value in found.items()
    }

"""Updates of the optimizer one step late, beside passes of the next group of microbatches.

:class:`DelayedPart` runs the calls of :mod:`megatron_zb.schedules.call_programs`: the rest of one
group, and as much of the next as has begun. :class:`LateUpdates` takes the place of the functions
that a training loop calls between two calls, since the gradients then belong to a group that has
not ended:

1. When the last W of a group has run on a chunk, its gradients are put aside: the next W is of
   another group.
2. The rank starts to reduce them over the replicas at once, and goes on with passes.
3. Where all ranks may meet before the update, it waits for that reduction. It ends what Megatron
   does with gradients, which other ranks of the pipeline may take part in, and starts the sum of
   their squares over the model.
4. At the update it waits for that sum, clips, and steps the optimizer on the newest weights. With
   gradients that are not finite in fp16 it skips that step, as all other ranks do. The distributed
   optimizer starts to gather its weights, and the first pass waits that computes with them.
5. ``optimizer.step`` reports the update that the call has made, and ``zero_grad`` does nothing.

Before anything else reads weights, such as an evaluation, :meth:`DelayedPart.drain` ends the group
that has begun and makes its update. At a checkpoint, :meth:`DelayedPart.restart` also forgets the
older weights. A training that goes on from there and one that loads the checkpoint then do the
same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.data_parallel import gradients_of, overlaps_grad_reduce
from megatron_zb.megatron_core.delayed_state import LossScales, RouterBiases
from megatron_zb.megatron_core.post_validation import (
    PostValidationPart,
    bring_to_model,
    is_stub,
)
from megatron_zb.megatron_core.profiled_steps import ProfilePart
from megatron_zb.megatron_core.started_gathers import StartedGathers
from megatron_zb.megatron_core.started_reductions import StartedReductions
from megatron_zb.megatron_core.step import Passes, Step, StepPart
from megatron_zb.megatron_core.verification import Verification
from megatron_zb.megatron_core.warm_up import WarmUp
from megatron_zb.runtime.channels import new_groups
from megatron_zb.runtime.executor import TRAINING, Execution, Handler
from megatron_zb.runtime.update_rules import (
    ErrorFeedback,
    LinearPrediction,
    PlainUpdate,
    UpdateRule,
    WeightPrediction,
)
from megatron_zb.runtime.weight_banks import WeightBanks
from megatron_zb.schedules.call_programs import Call, CallPrograms
from megatron_zb.schedules.lowering import Instruction, Program, Send
from megatron_zb.schedules.passes import Message, PassKind

PREDICTIONS: Mapping[str, Callable[[], UpdateRule]] = {
    "linear": LinearPrediction,
    "momentum": WeightPrediction,
}
"""Rules by which the next group computes with predicted weights."""

_SERVED = ("FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer")

_COUNTING = ("global_aux_loss", "quantile_balancing")
"""Ways to balance experts whose routers add up what they see of all microbatches of a step."""

_WHOLE_STEPS: Mapping[type[StepPart], str] = {
    Verification: "verification",
    ProfilePart: "a profile",
    PostValidationPart: "optimizer post-validation",
    WarmUp: "a warm-up",
}
"""Parts that take a call for one whole step, and what errors call them."""


class _Started(NamedTuple):
    """Gradients of a group that are being reduced over the replicas."""

    aside: dict[int, Sequence[torch.Tensor]]
    reductions: list[StartedReductions]


class _Reduced(NamedTuple):
    """Gradients of a group, put aside until its update, and the sum of their squares.

    ``gradients`` has those of each optimizer, beside its parameters; None for one without.
    ``is_skipped`` says that they are not finite on some rank, which a loss scale can lead to.
    """

    gradients: list[list[torch.Tensor | None]]
    squares: torch.Tensor
    works: list[Any]
    is_skipped: bool


class LateUpdates:
    """The optimizer of a training whose updates come one step late.

    It replaces ``step`` and ``zero_grad`` of the optimizer, ``zero_grad_buffer`` of the chunks and
    ``step`` of the scheduler on these objects. Creating it is collective over the job.

    Args:
        optimizer: Megatron's.
        scheduler: of the learning rate, None without.
        chunks: of this rank, wrapped for data parallelism.
        feedback: strength of the error feedback, 0 for none; None for 1 with Muon and 0 with
            others, and 0 with a prediction.
        prediction: one of :data:`PREDICTIONS`, by which groups compute with predicted weights.

    Raises:
        UsageError: the optimizer, or its data parallelism, is of a kind that is not served.
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: Any,
        chunks: Sequence[Any],
        feedback: float | None = None,
        prediction: str | None = None,
    ) -> None:
        self._optimizer, self._chunks = optimizer, list(chunks)
        self._each = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        self._check()
        if feedback is None:
            feedback = float(any(map(_is_muon, self._each)) and prediction is None)
        self.feedback = feedback
        """Strength of the error feedback."""
        self._new_rule = _rule_of(feedback, prediction)
        self._rules = [self._new_rule() for _ in self._each]
        for optimizer_of_some, rule in zip(self._each, self._rules, strict=True):
            if not is_stub(optimizer_of_some):
                rule.check(optimizer_of_some.optimizer)
        parameters = {id(it): it for chunk in chunks for it in chunk.parameters()}
        is_distributed, predicts = any(map(_is_distributed, self._each)), prediction is not None
        self._gathers = StartedGathers() if is_distributed and not predicts else None
        self.banks = WeightBanks(parameters.values(), keeps_home=is_distributed or predicts)
        self._states = (LossScales(self._each), RouterBiases(chunks))
        ranks = [dist.get_process_group_ranks(_group_of(it)) for it in self._each]
        self._groups = new_groups(ranks)
        self._started: dict[int, _Started] = {}
        self._reduced: dict[int, _Reduced] = {}
        self.norm: float | None = None
        """Norm of the gradients of the last update, None before the first one."""
        self._has_updated, self._was_skipped = False, False
        self._owed: list[Callable[[], Any]] = []
        self._zero_optimizer = optimizer.zero_grad
        self._zero_chunks = [chunk.zero_grad_buffer for chunk in self._chunks]
        optimizer.step, optimizer.zero_grad = self._report, _nothing
        for chunk in self._chunks:
            chunk.zero_grad_buffer = _nothing
        if scheduler is not None:
            self._schedule, scheduler.step = scheduler.step, self._step_scheduler
        self._clear()

    def _check(self) -> None:
        names = [type(it).__name__ for it in self._each if not is_stub(it)]
        for name in names:
            if name not in _SERVED:
                raise UsageError(
                    f"an update delay is not possible with {name}: leave it out, or use one of "
                    f"{', '.join(_SERVED)}"
                )
        if any(map(overlaps_grad_reduce, self._chunks)):
            raise UsageError(
                "an update delay starts the reductions of a whole group itself: leave "
                "overlap_grad_reduce out"
            )

    # --- what a training loop calls

    def _report(self) -> tuple[bool, float | None, None]:
        """Return what ``optimizer.step`` returns, for the update of the last call."""
        return not (self._has_updated and self._was_skipped), self.norm, None

    def _step_scheduler(self, *arguments: Any, **keywords: Any) -> None:
        """Step the scheduler once the update that it follows has been made."""
        step = partial(self._schedule, *arguments, **keywords)
        if self._has_updated:
            step()
        else:
            self._owed.append(step)

    # --- what the passes call

    def begin_call(self) -> None:
        """Take note that a call begins, in which no update has been made."""
        self._has_updated = False

    def select(self, group: int) -> None:
        """Let the chunks compute with the weights of a group: after one update fewer than it."""
        self.banks.select(max(group - 1, 0))
        for state in self._states:
            state.select(group)

    def keep(self, kind: PassKind, group: int) -> None:
        """Keep what a pass of a group has made, behind it."""
        for state in self._states:
            state.keep(kind, group)

    def end_call(self) -> None:
        """Have the newest state in place, and weights unless they are on their way."""
        if not self.banks.are_arriving:
            self.banks.rest()
        for state in self._states:
            state.rest()

    def rest(self) -> None:
        """Have the newest weights in place."""
        self.banks.rest()
        self.end_call()

    def put_aside(self, group: int, chunk: int) -> None:
        """Put the gradients of a chunk aside: the last W of a group has run on it."""
        aside = self._started.setdefault(group, _Started({}, [])).aside
        aside[chunk] = [it.clone() for it in gradients_of(self._chunks[chunk])]
        self._zero_chunks[chunk]()

    def start_reduction(self, group: int, chunk: int, step: Step) -> None:
        """Start to reduce gradients over the replicas: those of a chunk that were put aside."""
        aside, reductions = self._started[group]
        own = {chunk: aside[chunk]}
        reductions.append(
            StartedReductions(self._chunks, own, force_all_reduce=step.force_all_reduce)
        )

    def finish_reductions(self, group: int, step: Step) -> None:
        """Wait for the reductions of a group, end what Megatron does with them, and start a norm.

        Gradients of the next group, as far as its W have run, stay where they are.
        """
        aside, reductions = self._started.pop(group)
        with ExitStack() as stack:
            for each in reductions:
                each.wait()
                stack.enter_context(each.not_again())
            stack.enter_context(self._put_back(aside))
            for state in self._states:
                stack.enter_context(state.reducing(group))
            self._reduced[group] = self._reduce(step)

    @contextmanager
    def _put_back(self, aside: Mapping[int, Sequence[torch.Tensor]]) -> Iterator[None]:
        """Have the gradients in place that had been put aside."""
        later = {n: [it.clone() for it in gradients_of(self._chunks[n])] for n in aside}
        self._set(aside)
        yield
        self._clear()
        self._set(later)

    def _set(self, gradients: Mapping[int, Sequence[torch.Tensor]]) -> None:
        for number, own in gradients.items():
            for to, of in zip(gradients_of(self._chunks[number]), own, strict=True):
                to.copy_(of)

    def _reduce(self, step: Step) -> _Reduced:
        finalize = step.config.finalize_model_grads_func
        if finalize is not None:
            finalize(
                step.model,
                None,
                pg_collection=step.pg_collection,
                force_all_reduce=step.force_all_reduce,
            )
        gradients, works, is_skipped = [], [], False
        squares = torch.zeros(
            len(self._each), dtype=torch.float32, device=torch.cuda.current_device()
        )
        for number, (optimizer, process_group) in enumerate(
            zip(self._each, self._groups, strict=True)
        ):
            own = list[torch.Tensor | None]()
            is_skipped |= optimizer.prepare_grads()
            if not is_stub(optimizer):
                for found in versions.gradients_for_norm(optimizer):
                    squares[number] += found.float().square().sum()
                for parameter in optimizer.get_parameters():
                    own.append(None if parameter.grad is None else parameter.grad.clone())
                    parameter.grad = None
            gradients.append(own)
            works.append(dist.all_reduce(squares[number], group=process_group, async_op=True))
        return _Reduced(gradients, squares, works, is_skipped)

    @torch.no_grad()
    def update(self, group: int) -> None:
        """Apply the update of a group to the newest weights."""
        reduced = self._reduced.pop(group)
        for work in reduced.works:
            work.wait()
        self._was_skipped = reduced.is_skipped
        if reduced.is_skipped:
            self.norm = None
            self.banks.update(_nothing)
        else:
            self._clip(reduced)
            self._step_banks()
        for state in self._states:
            state.update(group)
        self._zero_optimizer()
        self._has_updated = True

    def _step_banks(self) -> None:
        """Step the newest weights, and start what gathers them from the replicas."""
        if self._gathers is None:
            self.banks.update(self._step_all, self._ahead)
            return
        with self._gathers.behind(self._chunks):
            self.banks.update(self._step_all, arrive=self._gathers.wait)

    def _clip(self, reduced: _Reduced) -> None:
        """Give the gradients of a group to the optimizers, clipped by their norm."""
        self.norm = math.sqrt(reduced.squares.sum().item())
        for optimizer, gradients in zip(self._each, reduced.gradients, strict=True):
            if is_stub(optimizer):
                continue
            own = optimizer.get_parameters()
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient
            most = optimizer.config.clip_grad
            if most > 0 and own:
                clip_grad_by_total_norm_fp32(own, most, self.norm)

    def _step_all(self) -> None:
        for optimizer, rule in zip(self._each, self._rules, strict=True):
            if not is_stub(optimizer):
                with _by_rule(optimizer, rule):
                    optimizer.step_with_ready_grads()

    @contextmanager
    def _ahead(self) -> Iterator[None]:
        """Have the predicted weights in place of the newest ones, if a rule predicts some."""
        moved = list[tuple[Any, list[torch.Tensor]]]()
        for optimizer, rule in zip(self._each, self._rules, strict=True):
            if is_stub(optimizer):
                continue
            own = optimizer.get_parameters()
            ahead = rule.ahead(own, optimizer.optimizer)
            if ahead is not None:
                moved.append((optimizer, [it.detach().clone() for it in own]))
                _place(optimizer, ahead)
        yield
        for optimizer, newest in moved:
            _place(optimizer, newest)

    def forget(self) -> None:
        """Forget the older weights, and what the rules remember of earlier updates."""
        self.banks.forget_older()
        self._rules = [self._new_rule() for _ in self._each]
        for state in self._states:
            state.forget()

    def end_drain(self) -> None:
        """Step the scheduler for the update of a drain, unless it was skipped."""
        owed, self._owed = self._owed, []
        for step in owed:
            if not self._was_skipped:
                step()

    def _clear(self) -> None:
        for zero in self._zero_chunks:
            zero()


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """Leave gradients alone: those of a group that has not ended are among them."""


def _rule_of(feedback: float, prediction: str | None) -> Callable[[], UpdateRule]:
    """Return what makes the rule of an optimizer.

    Raises:
        UsageError: there is both a feedback and a prediction.
    """
    if feedback and prediction is not None:
        raise UsageError(
            "error feedback and a prediction both make up for the delay: leave one of them out"
        )
    if prediction is not None:
        return PREDICTIONS[prediction]
    return partial(ErrorFeedback, feedback) if feedback else PlainUpdate


def _is_distributed(optimizer: Any) -> bool:
    return type(optimizer).__name__ == "DistributedOptimizer"


@torch.no_grad()
def _place(optimizer: Any, weights: Sequence[torch.Tensor]) -> None:
    """Give other weights to an optimizer and to its model, on all replicas alike."""
    for parameter, weight in zip(optimizer.get_parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    bring_to_model([optimizer])


def _is_muon(optimizer: Any) -> bool:
    """Return whether an optimizer orthogonalizes its updates, by the names of its classes."""
    inner = getattr(optimizer, "optimizer", None)
    return any("muon" in cls.__name__.lower() for cls in type(inner).__mro__)


@contextmanager
def _by_rule(optimizer: Any, rule: UpdateRule) -> Iterator[None]:
    """Let a rule correct the step of torch's optimizer, before Megatron copies the weights."""
    inner = optimizer.optimizer
    own, step = vars(inner).get("step"), inner.step

    def corrected(*arguments: Any, **keywords: Any) -> None:
        rule.step(optimizer.get_parameters(), partial(step, *arguments, **keywords))

    inner.step = corrected
    try:
        yield
    finally:
        del inner.step
        if own is not None:
            inner.step = own


def _group_of(optimizer: Any) -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = optimizer.get_grad_stats_parallel_group()
    world = dist.group.WORLD
    assert world is not None
    return world if group is None else group


@dataclass
class _Begun:
    """A group of which passes have run: its stages on this rank, its step, and what is left.

    ``weights_left`` counts W of each stage. ``number`` is that of its step in the random streams of
    the layers, if they have any.
    """

    stages: Mapping[int, Any]
    step: Step
    weights_left: Counter[int]
    number: int | None = None
    is_updated: bool = False


class DelayedPart(StepPart):
    """Runs calls in place of whole steps, and the drain between them and anything else.

    Args:
        programs: of the calls.
        updates: the optimizer.
        may_read_ahead: returns whether the step that begins may read data of the next one.
    """

    fact = "updates_late"

    def __init__(
        self,
        programs: CallPrograms,
        updates: LateUpdates,
        may_read_ahead: Callable[[], bool],
    ) -> None:
        self._programs, self._updates, self._may_read_ahead = programs, updates, may_read_ahead
        self._begun: dict[int, _Begun] = {}
        self._here: dict[Message, torch.Tensor | None] = {}
        self._complete: list[tuple[int, int]] = []
        self._reducing: list[int] = []
        self._call: Call | None = None
        self._next = 0
        self._is_open = False
        self._drains = False
        self._has_dropped = False

    def before_step(self, step: Step) -> None:
        """Choose the call; an evaluation begins when nothing is under way.

        Raises:
            UsageError: the step cannot be a call.
        """
        if step.forward_only:
            self.drain()
            return
        if self._has_dropped:
            raise UsageError(
                "microbatches of this step were read ahead, and dropped by a checkpoint that "
                "may_read_ahead had not announced: load that checkpoint to go on"
            )
        self._check(step)
        step.reduces = False  # each update reduces its own gradients
        self._call = Call(
            group=self._next,
            follows=self._is_open,
            has_begun=self._next in self._begun,
            reads_ahead=self._programs.reads_ahead and self._may_read_ahead(),
        )
        step.program = self._programs.of(self._call)

    def _check(self, step: Step) -> None:
        names = [_WHOLE_STEPS[type(part)] for part in step.parts if type(part) in _WHOLE_STEPS]
        names += ["calculate_per_token_loss"] if step.config.calculate_per_token_loss else []
        names += ["mtp_num_layers"] if getattr(step.config, "mtp_num_layers", None) else []
        balancing = getattr(step.config, "moe_router_load_balancing_type", None) or ""
        names += [name for name in _COUNTING if name in balancing]
        names += ["unequal microbatches"] if step.lengths is not None or step.shapes_vary else []
        names += ["CUDA graphs"] if step.captured else []
        if names:
            raise UsageError(
                f"an update delay: {' and '.join(names)} would take the passes of a call for one "
                "whole step: leave it out"
            )
        if step.num_microbatches != self._programs.group:
            raise UsageError(
                f"a step has {step.num_microbatches} microbatches, but the schedule with an update "
                f"delay was built for {self._programs.group}: keep to one number"
            )

    @property
    def norm(self) -> float | None:
        """Norm of the gradients of the last update, None before the first one."""
        return self._updates.norm

    @property
    def feedback(self) -> float:
        """Strength of the error feedback, 0 for none."""
        return self._updates.feedback

    @property
    def num_bytes(self) -> int:
        """Bytes of weights on this rank beside those of a training without a delay."""
        return self._updates.banks.num_bytes

    def run_passes(self, passes: Passes, step: Step) -> bool:
        """Run a call, or the drain."""
        if step.forward_only:
            return False
        call = self._call
        assert call is not None
        if self._drains:
            self._run(self._programs.drain(call), passes, step)
            passes.transport.finish()
            return True
        self._updates.begin_call()
        self._begin(call.group, passes.stages, step)
        step.forward_data_store = self._begun[call.group].step.forward_data_store
        if call.reads_ahead:
            ahead = replace(step, forward_data_store=[])
            ahead.program = step.program
            self._begin(call.group + 1, step.make_stages(ahead), ahead)
        self._run(step.program, passes, step)
        self._is_open, self._next = True, call.group + 1
        self._begun.pop(call.group - 1, None)
        self._updates.end_call()
        return True

    def _begin(self, group: int, stages: Mapping[int, Any], step: Step) -> None:
        """Take note of the stages of a group, unless the call before has begun it."""
        if group in self._begun:
            return
        held = self._programs.calls.ranks[step.logical]
        weights = Counter(p.stage for p in held if p.kind in (PassKind.W, PassKind.BW))
        streams = next((it.streams for it in stages.values()), None)
        number = None
        if streams is not None and streams.step is not None:
            number = streams.step + group - self._next
        self._begun[group] = _Begun(stages, step, weights, number)

    def _run(self, program: Program, passes: Passes, step: Step) -> None:
        stages = {number: number for number in passes.stages}
        handlers: dict[PassKind, Handler] = {
            kind: partial(self._run_pass, kind, TRAINING[kind])
            for kind in (PassKind.F, PassKind.B, PassKind.BW, PassKind.W)
        }
        handlers[PassKind.U] = self._update
        execution = Execution(
            program.send_slots,
            stages,
            passes.transport,
            passes.allocate,
            passes.observer,
            handlers=handlers,
            here=self._here,
        )
        streams = next((it.streams for it in passes.stages.values()), None)
        number = None if streams is None else streams.step
        execution.run(self._with_reductions(program, step.logical))
        if streams is not None:
            streams.start_step(number)

    def _with_reductions(self, program: Program, rank: int) -> Iterator[Instruction]:
        """Yield the instructions of a rank, and reduce gradients between them.

        Reductions of a chunk start behind the last W of a group on it, and behind the message of
        that pass. They end where all ranks may meet.
        """
        meets = program.meets[rank]
        for position, at in enumerate(program.ranks[rank]):
            if not isinstance(at, Send):
                self._start_complete()
            if position in meets:
                self._finish_first()
            yield at
        self._start_complete()
        if len(program.ranks[rank]) in meets:
            self._finish_first()

    def _run_pass(
        self, kind: PassKind, handler: Handler, stage: int, unit: int, *received: Any
    ) -> torch.Tensor | None:
        """Run a pass on the stage of its group, with the weights of its group."""
        group, microbatch = divmod(unit, self._programs.group)
        begun = self._begun[group]
        own = begun.stages[stage]
        self._updates.select(group)
        if begun.number is not None:
            own.streams.start_step(begun.number)
        result = handler(own, microbatch, *received)
        self._updates.keep(kind, group)
        if kind in (PassKind.W, PassKind.BW):
            self._count_weight(group, begun, stage)
        return result

    def _count_weight(self, group: int, begun: _Begun, stage: int) -> None:
        begun.weights_left[stage] -= 1
        if not begun.weights_left[stage]:
            chunk = begun.stages[stage].chunk
            self._updates.put_aside(group, chunk)
            self._complete.append((group, chunk))

    def _start_complete(self) -> None:
        """Start the reduction of a chunk, whose last pass of a group has sent its message."""
        while self._complete:
            group, chunk = self._complete.pop()
            begun = self._begun[group]
            self._updates.start_reduction(group, chunk, begun.step)
            if not any(begun.weights_left.values()):
                self._reducing.append(group)

    def _finish_first(self) -> None:
        """End the reductions that have been under way for longest."""
        group = self._reducing.pop(0)
        self._updates.finish_reductions(group, self._begun[group].step)

    def _update(self, stage: int, unit: int) -> None:
        """Update all stages of the rank, at the first U of them."""
        group = unit // self._programs.group
        begun = self._begun[group]
        if not begun.is_updated:
            begun.is_updated = True
            self._updates.update(group)

    def drain(self) -> None:
        """End the group that has begun, and make its update; collective over the job.

        First passes of the next group stay as they are: they computed with weights that have not
        changed for them.
        """
        if not self._is_open:
            return
        call = self._call
        assert call is not None
        step = self._begun[call.group].step
        self._drains = True
        try:
            step.run(step)
        finally:
            self._drains = False
        self._is_open = False
        self._begun.pop(call.group, None)
        self._updates.rest()
        self._updates.end_drain()

    def restart(self) -> None:
        """Drain, and begin anew from the newest weights, as a training that loads them does.

        Collective over the job. The call before has to be one that may not read ahead. Otherwise
        what has been read for the next group is dropped, and the training has to end: another step
        is refused.
        """
        self.drain()
        self._has_dropped = bool(self._begun)
        self._begun.clear()
        self._here.clear()
        self._updates.forget()

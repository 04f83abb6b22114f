"""Optimizer post-validation with Megatron's optimizers.

Replaces ``optimizer.step`` and the functions that zero gradients: a step is made on the state of
the pipeline so far, and validated in the next iteration's warm-up or by ``settle``. See
:mod:`megatron_zb.runtime.post_validation` for the path of the state. Serves Megatron's
FP32Optimizer, Float16OptimizerWithFloat16Params and DistributedOptimizer, chained or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.utils import get_model_config

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.data_iterators import Start
from megatron_zb.megatron_core.refusals import check_steps_taken_back
from megatron_zb.megatron_core.step import Passes, Step, StepPart
from megatron_zb.runtime.channels import new_groups
from megatron_zb.runtime.post_validation import StateExchange, run_from_cut
from megatron_zb.schedules.lowering import Program, Rollback, rollback

# Where the numbers of a state are; the rest of it counts infinite gradients, for each optimizer.
_HELD_BACK, _SQUARES, _ZEROS, _INFINITE = range(4)

_SERVED = ("FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer")
# Of torch, and Transformer-Engine's or apex's fused one.
_SERVED_INNER = ("Adam", "AdamW", "SGD", "FusedAdam", "FusedSGD")


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step, as Megatron's training loop reports it."""

    skipped: bool
    grad_norm: float | None
    num_zeros: float | None
    loss_scale: float
    learning_rate: float


class PostValidation:
    """Optimizer steps before the state of the whole pipeline is known, with repair of wrong ones.

    Creating it is collective over all ranks of the job. It replaces methods of the optimizer and
    of the model chunks, permanently.

    Args:
        optimizer: the result of ``get_megatron_optimizer``.
        scheduler: Megatron's OptimizerParamScheduler. It is stepped after every step, as if each
            succeeded, and set back where one did not.
        chunks: the model chunks of this rank, as data parallelism wraps them.
        pipeline_ranks: the global ranks of the pipeline, in logical order.
        on_host: keep the snapshot for taking a step back in host memory.

    Raises:
        UsageError: an optimizer, or a setting, whose steps cannot be taken back.
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: Any,
        chunks: Sequence[Any],
        pipeline_ranks: Sequence[int],
        *,
        on_host: bool,
    ) -> None:
        self.optimizer = optimizer
        self._scheduler = scheduler
        self._optimizers: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
        for config in (optimizer.config, get_model_config(chunks[0])):
            check_steps_taken_back(config)
        for each in self._optimizers:
            check_optimizer(each)
        self._clip: float = optimizer.config.clip_grad
        self._counts_zeros = bool(optimizer.config.log_num_zeros_in_grad)
        self._snapshot = OptimizerSnapshot(self._optimizers, on_host=on_host)
        self._exchange = StateExchange(pipeline_ranks, _INFINITE + len(self._optimizers))
        self._groups = _StatisticsGroups(self._optimizers)
        self._before: _Before | None = None
        self._put_off: list[Callable[[], None]] = []
        self.outcome: StepOutcome | None = None
        """Outcome of the latest step that has been validated."""
        self._take_over(chunks)

    def _take_over(self, chunks: Sequence[Any]) -> None:
        self.optimizer.step = self.step
        self.optimizer.zero_grad = self._once_validated(self.optimizer.zero_grad)
        for chunk in chunks:
            chunk.zero_grad_buffer = self._once_validated(chunk.zero_grad_buffer)

    @property
    def is_open(self) -> bool:
        """Whether there is a step that has not been validated yet."""
        return self._before is not None

    @property
    def snapshot_nbytes(self) -> int:
        """Bytes that this rank needs to be able to take a step back."""
        return self._snapshot.nbytes

    # --- a step

    def step(self) -> tuple[bool, None, None]:
        """Step in place of ``optimizer.step``; assume success, with norm and zeros unknown yet."""
        self.settle()
        before = _Before(
            ParamGroupOptions(self._optimizers),
            [dict(vars(s)) if s else {} for s in map(_scaler, self._optimizers)],
            None if self._scheduler is None else self._scheduler.num_steps,
        )
        state = self._exchange.partial(self._own_state())
        before.stepped = self._judge(state).is_plain
        state[_HELD_BACK] += not before.stepped
        self._exchange.pass_on(state)
        self._before = before
        if before.stepped:
            self._snapshot.take()
            self.optimizer.step_with_ready_grads()
        return True, None, None

    def _own_state(self) -> torch.Tensor:
        """Return this stage's state by Megatron's functions, which omit copies of parameters."""
        infinite = [bool(optimizer.prepare_grads()) for optimizer in self._optimizers]
        state = torch.zeros(_INFINITE + len(infinite), dtype=torch.float64, device="cpu")
        state[_INFINITE:] = torch.tensor(infinite, device="cpu")
        if not any(infinite):
            state[_SQUARES] = float(self.optimizer.get_grad_norm()) ** 2
            if self._counts_zeros:
                state[_ZEROS] = float(self.optimizer.count_zeros())
        return state

    def _judge(self, state: torch.Tensor) -> _Judgement:
        norm = state[_SQUARES].float().item() ** 0.5
        return _Judgement(
            infinite=[count > 0 for count in state[_INFINITE:].tolist()],
            norm=norm,
            clips=self._clip > 0.0 and self._clip / (norm + 1.0e-6) < 1.0,
            zeros=state[_ZEROS].item(),
        )

    # --- its validation

    def settle(self) -> None:
        """Validate the step at once, if that has not been done, and repair it if it was wrong."""
        if self.is_open:
            if not self.was_right():
                self.mend()
            self._exchange.finish()

    def was_right(self) -> bool:
        """Wait for the full state; return whether the step was right. If not, call :meth:`mend`."""
        full = self._exchange.full()
        right = full[_HELD_BACK].item() == 0
        if right:
            self._close(self._judge(full))
        return right

    def mend(self) -> None:
        """Undo a wrong step, and make the right one; collective over the job."""
        before = self._before
        assert before is not None
        judgement = self._judge(self._exchange.full())
        self._mend_scalers(before, judgement)
        ahead = ParamGroupOptions(self._optimizers)
        before.options.restore()
        if before.stepped:
            self._snapshot.restore()
        if judgement.skips:
            if before.stepped:
                bring_to_model(self._optimizers)
            self._set_scheduler_back(before)
        else:
            judgement = replace(judgement, norm=self._clip_all())
            self.optimizer.step_with_ready_grads()
            ahead.restore("lr", "weight_decay")  # the scheduler has gone on meanwhile
        self._close(judgement)

    def _close(self, judgement: _Judgement) -> None:
        known = not judgement.skips
        self.outcome = StepOutcome(
            skipped=judgement.skips,
            grad_norm=_in_single_precision(judgement.norm) if known else None,
            num_zeros=_in_single_precision(judgement.zeros)
            if known and self._counts_zeros
            else None,
            loss_scale=self.optimizer.get_loss_scale().item(),
            learning_rate=self._learning_rate(),
        )
        self._before = None
        while self._put_off:
            self._put_off.pop(0)()

    def _clip_all(self) -> float:
        """Clip as the synchronous step does, by a norm that is reduced over all ranks.

        The sum of the stages' norms differs from it in the last digit, which may be enough to round
        a weight the other way. Another wait does not matter in a repair.
        """
        with self._groups.whole():
            norm = float(self.optimizer.get_grad_norm())
        for optimizer in self._optimizers:
            if (
                self._clip > 0.0
                and not is_stub(optimizer)
                and (all_of := optimizer.get_parameters())
            ):
                clip_grad_by_total_norm_fp32(all_of, max_norm=self._clip, total_norm=norm)
        return norm

    def _mend_scalers(self, before: _Before, judgement: _Judgement) -> None:
        """Correct the loss scalers, which were updated only with the state of this stage."""
        for optimizer, values, infinite in zip(
            self._optimizers, before.scalers, judgement.infinite, strict=True
        ):
            if (scaler := _scaler(optimizer)) is not None:
                vars(scaler).update(values)
                scaler.update(infinite)

    def _set_scheduler_back(self, before: _Before) -> None:
        if self._scheduler is not None:
            self._scheduler.num_steps = before.num_steps
            self._scheduler.step(increment=0)

    def _learning_rate(self) -> float:
        rate = get_canonical_lr_for_logging(self.optimizer.param_groups)
        if rate is None:  # nothing is trained on this rank
            rate = 0.0 if self._scheduler is None else self._scheduler.get_lr({})
        return float(rate)

    def _once_validated(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function that zeroes gradients only once the step is validated.

        A step that must be repeated needs its gradients.
        """

        def call(*args: Any, **keywords: Any) -> None:
            if self.is_open:
                self._put_off.append(partial(function, *args, **keywords))
            else:
                function(*args, **keywords)

        return call


class PostValidationPart(StepPart):
    """Lets every step also validate the optimizer's last one where that is still open."""

    fact = "is_validated_later"

    def __init__(self, validation: PostValidation) -> None:
        self._validation = validation
        self._cuts: dict[int, tuple[Program, Rollback]] = {}

    def run_passes(self, passes: Passes, step: Step) -> bool:
        """Run the passes up to the cut; run them again if the optimizer's step was wrong."""
        validation = self._validation
        if step.forward_only:
            validation.settle()
        if not validation.is_open:
            return False
        start = Start(step.data_iterators)
        step.data_iterators = start.data_iterators

        def was_right() -> bool:
            right = validation.was_right()
            if right:
                start.forget()
            return right

        def start_anew() -> None:
            validation.mend()
            start.go_back()
            step.forward_data_store.clear()
            step.total_num_tokens.zero_()

        run_from_cut(
            step.program,
            self._cut(step.program),
            step.logical,
            passes.stages,
            passes.transport,
            passes.allocate,
            is_right=was_right,
            start_anew=start_anew,
            observer=passes.observer,
        )
        return True

    def _cut(self, program: Program) -> Rollback:
        count = program.schedule.num_microbatches
        if count not in self._cuts or self._cuts[count][0] is not program:
            self._cuts[count] = (program, rollback(program))
        return self._cuts[count][1]


@dataclass
class _Before:
    """The state before a step, to undo it, and whether this rank has made the step."""

    options: ParamGroupOptions
    scalers: list[dict[str, Any]]
    num_steps: int | None
    stepped: bool = False


@dataclass(frozen=True)
class _Judgement:
    """The optimizer's action for a state: skip, clip or plain step."""

    infinite: list[bool]
    norm: float
    clips: bool
    zeros: float

    @property
    def skips(self) -> bool:
        return any(self.infinite)

    @property
    def is_plain(self) -> bool:
        """Whether the step uses the gradients as they are."""
        return not self.skips and not self.clips


def check_optimizer(optimizer: Any) -> None:
    """Refuse optimizers whose steps cannot be undone.

    Raises:
        UsageError: names the class.
    """
    if is_stub(optimizer):
        return
    inner = getattr(optimizer, "optimizer", None)
    for found, served in ((optimizer, _SERVED), (inner, _SERVED_INNER)):
        name = type(found).__name__
        if name not in served:
            raise UsageError(
                f"--enable-optimizer-post-validation cannot take back a step of {name}: leave it "
                f"out, or use one of {', '.join(served)}"
            )


class _StatisticsGroups:
    """The process groups over which Megatron's functions add up an optimizer's gradient statistics.

    They span one pipeline stage, or all stages while :meth:`whole` is active. Creating it is
    collective over all ranks of the job.
    """

    def __init__(self, optimizers: list[Any]) -> None:
        stages: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(stages, parallel_state.get_pipeline_model_parallel_rank())
        mine = stages[dist.get_rank()]
        self._optimizers = optimizers
        self._whole = [_group(optimizer) for optimizer in optimizers]
        members = [dist.get_process_group_ranks(group) for group in self._whole]
        self._stage = new_groups([[r for r in m if stages[r] == mine] for m in members])
        self._set(self._stage)

    @contextmanager
    def whole(self) -> Iterator[None]:
        self._set(self._whole)
        yield
        self._set(self._stage)

    def _set(self, groups: list[dist.ProcessGroup]) -> None:
        for optimizer, group in zip(self._optimizers, groups, strict=True):
            optimizer.grad_stats_parallel_group = group


def _group(optimizer: Any) -> dist.ProcessGroup:
    group: dist.ProcessGroup | None = optimizer.get_grad_stats_parallel_group()
    world = dist.group.WORLD
    assert world is not None
    return world if group is None else group


def _scaler(optimizer: Any) -> Any:
    return getattr(optimizer, "grad_scaler", None)


def _in_single_precision(number: float) -> float:
    """Round to float32, as Megatron's reduction over the ranks does."""
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()


class OptimizerSnapshot:
    """A copy of the parameters and states of optimizers; its memory is reused every step.

    On a GPU the host waits for no copy: taking, the optimizer's step and restoring follow one
    another on the current stream, and nothing but a later copy on it reads the host's memory, which
    is pinned.

    Args:
        optimizers: Megatron's, each around one of torch's; those around none are left out.
        on_host: keep the copies in host memory.
    """

    def __init__(self, optimizers: list[Any], *, on_host: bool) -> None:
        self._optimizers = [o for o in optimizers if not is_stub(o)]
        self._on_host = on_host
        self._copies: dict[tuple[int, str], torch.Tensor] = {}
        self._states: list[dict[str, Any] | None] = []

    def take(self) -> None:
        """Copy parameters and states, over the copies of the previous step."""
        self._states = []
        for parameter, states in self._parameters():
            self._copy(parameter, "", parameter.data)
            state = states.get(parameter)  # it has none before its first step
            self._states.append(
                None
                if state is None
                else {
                    name: self._copy(parameter, name, value) if torch.is_tensor(value) else value
                    for name, value in state.items()
                }
            )

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied parameters and states; the model's copies of them are not updated."""
        for (parameter, states), values in zip(self._parameters(), self._states, strict=True):
            parameter.data.copy_(self._copies[id(parameter), ""], non_blocking=True)
            if values is None:
                states.pop(parameter, None)
            else:
                _restore_state(states[parameter], values)

    @property
    def nbytes(self) -> int:
        """Bytes of a copy, including the states that the first step will create."""
        total = 0
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    states = optimizer.optimizer.state.get(parameter)
                    own = _nbytes(parameter)
                    total += own + (
                        _averages(group) * own
                        if states is None
                        else sum(map(_nbytes, states.values()))
                    )
        return total

    def _parameters(self) -> Iterator[tuple[torch.Tensor, dict[torch.Tensor, dict[str, Any]]]]:
        """Yield every parameter, with the mapping that may hold its state."""
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, optimizer.optimizer.state

    def _copy(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get((id(parameter), name))
        if copy is None:
            device = torch.device("cpu") if self._on_host else value.device
            pinned = self._on_host and value.device.type == "cuda"
            copy = torch.empty_like(value, device=device, pin_memory=pinned)
            self._copies[id(parameter), name] = copy
        copy.copy_(value, non_blocking=True)
        return copy


def _averages(group: dict[str, Any]) -> int:
    """Count the tensors an optimizer will keep for a parameter, of its size: Adam two, SGD one."""
    return 2 if "betas" in group else int(bool(group.get("momentum")))


def _nbytes(value: Any) -> int:
    return value.numel() * value.element_size() if torch.is_tensor(value) else 0


def _restore_state(state: dict[str, Any], values: dict[str, Any]) -> None:
    for name in state.keys() - values.keys():
        del state[name]
    for name, value in values.items():
        if torch.is_tensor(value):
            state[name].copy_(value, non_blocking=True)
        else:
            state[name] = value


class ParamGroupOptions:
    """A copy of the options of the parameter groups: learning rate, steps, ..."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._groups = [g for o in optimizers if not is_stub(o) for g in o.optimizer.param_groups]
        self._values = [
            {name: _own(value) for name, value in group.items() if name != "params"}
            for group in self._groups
        ]

    def restore(self, *names: str) -> None:
        """Restore the options of these names in all groups, or all options without names."""
        for group, values in zip(self._groups, self._values, strict=True):
            for name in names or values:
                if torch.is_tensor(group.get(name)) and torch.is_tensor(values[name]):
                    group[name].copy_(values[name])
                else:
                    group[name] = _own(values[name])
            for name in [] if names else [n for n in group if n not in values and n != "params"]:
                del group[name]


def is_stub(optimizer: Any) -> bool:
    """Return whether there is nothing to optimize, as on a rank where everything is frozen."""
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def bring_to_model(optimizers: list[Any]) -> None:
    """Copy the optimizers' parameters to the model, and gather them, as after a step."""
    for optimizer in optimizers:
        if not is_stub(optimizer):
            with _idle(optimizer.optimizer):
                optimizer.step_with_ready_grads()


@contextmanager
def _idle(optimizer: Any) -> Iterator[None]:
    """Let Megatron do everything in a step except for the step of torch's optimizer."""
    own = vars(optimizer).get("step")
    optimizer.step = lambda: None
    try:
        yield
    finally:
        del optimizer.step
        if own is not None:
            optimizer.step = own


def _own(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value

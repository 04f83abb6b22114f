"""Trainings of small GPTs with an optimizer: Megatron's synchronous step, and post-validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from gpt_cases import GPTCase, built, forward_backward, microbatches
from megatron.core import parallel_state

from megatron_zb.megatron_core.random_streams import global_parameters

MICROBATCHES = 4


@dataclass(frozen=True)
class Training:
    """One run: a model, a schedule, and what is to go wrong.

    ``infinite`` says in which iterations which pipeline rank finds an infinite gradient;
    ``settled`` after which iterations the run settles, as it does before a checkpoint.
    """

    case: GPTCase
    schedule: str = "v-half"
    clip: float = 0.0
    iterations: int = 6
    infinite: tuple[tuple[int, int], ...] = ()
    settled: tuple[int, ...] = ()
    dropout: float = 0.0
    on_host: bool = False
    optimizer: str = "adam"
    loss_scale: float = 2.0**10


class Step(NamedTuple):
    """What the optimizer has done in one iteration."""

    skipped: bool
    norm: float | None
    zeros: float | None
    loss_scale: float
    learning_rate: float


@dataclass
class Run:
    """What one rank saw; ``mended`` are the iterations whose step was taken back or made late."""

    losses: list[list[float]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    mended: list[int] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    snapshot_nbytes: int = 0


def train(training: Training, validated: bool) -> Run:
    """Train in the way of Megatron-LM's loop."""
    torch.manual_seed(7)
    case, run = training.case, Run()
    with built(case, training.schedule, MICROBATCHES) as (adapter, chunks):
        assert adapter is not None
        _set_dropout(chunks, training.dropout)
        optimizer, scheduler = _optimizer(training, chunks)
        chunks[0].config.grad_scale_func = optimizer.scale_loss
        validation = None
        if validated:
            validation = adapter.post_validate(
                optimizer, scheduler, chunks, on_host=training.on_host
            )
            _take_notes(validation, run)
        for iteration in range(training.iterations):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            data = [_batches(case, iteration) for _ in chunks]
            records = forward_backward(adapter.forward_backward_func, chunks, data, MICROBATCHES)
            run.losses.append([float(record["lm loss"]) for record in records])
            _make_infinite(training, chunks, iteration)
            success, norm, zeros = optimizer.step()
            if success:
                scheduler.step(increment=1)
            if validation is None:
                run.steps.append(_step(optimizer, success, norm, zeros))
            elif iteration in training.settled:
                validation.settle()
        if validation is not None:
            validation.settle()
            run.snapshot_nbytes = validation.snapshot_nbytes
        for chunk in chunks:
            for name, parameter in global_parameters(chunk).items():
                run.parameters[name.replace("module.", "")] = parameter.detach().clone()
    return run


def _take_notes(validation: Any, run: Run) -> None:
    """Take down every step when it is validated."""
    was_right, mend = validation.was_right, validation.mend

    def noted_right() -> bool:
        right: bool = was_right()
        if right:
            run.steps.append(Step(*dataclasses.astuple(validation.outcome)))
        return right

    def noted_mend() -> None:
        mend()
        run.mended.append(len(run.steps))
        run.steps.append(Step(*dataclasses.astuple(validation.outcome)))

    validation.was_right, validation.mend = noted_right, noted_mend


def _step(optimizer: Any, success: bool, norm: Any, zeros: Any) -> Step:
    rate = optimizer.param_groups[0]["lr"]
    return Step(not success, norm, zeros, optimizer.get_loss_scale().item(), rate)


def _batches(case: GPTCase, iteration: int) -> Iterator[dict[str, torch.Tensor]]:
    """Other tokens in every iteration."""
    for batch in microbatches(case, MICROBATCHES):
        yield {**batch, "tokens": (batch["tokens"] + iteration) % 64}


def _set_dropout(chunks: list[Any], probability: float) -> None:
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = probability
        if hasattr(module, "hidden_dropout"):
            module.hidden_dropout = probability


def _optimizer(training: Training, chunks: list[Any]) -> tuple[Any, Any]:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    case = training.case
    config = OptimizerConfig(
        optimizer=training.optimizer,
        lr=0.01,
        min_lr=0.0,
        weight_decay=0.1,
        bf16=case.dtype == "bfloat16",
        fp16=case.dtype == "float16",
        params_dtype=case.torch_dtype,
        use_distributed_optimizer=case.distributed_optimizer,
        clip_grad=training.clip,
        log_num_zeros_in_grad=True,
        initial_loss_scale=training.loss_scale,
        min_loss_scale=1.0,
        loss_scale_window=3,
        hysteresis=1,
    )
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.01,
        min_lr=0.0,
        lr_warmup_steps=2,
        lr_decay_steps=2 * training.iterations + 8,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=2 * training.iterations + 8,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def _make_infinite(training: Training, chunks: list[Any], iteration: int) -> None:
    for at, number in training.infinite:
        stage = number % parallel_state.get_pipeline_model_parallel_world_size()
        if (at, stage) == (iteration, parallel_state.get_pipeline_model_parallel_rank()):
            weight: Any = next(chunks[-1].parameters())
            weight.main_grad.view(-1)[0] = torch.inf


def both(training: Training) -> tuple[Run, Run]:
    """The same training with Megatron's synchronous step, and with post-validation."""
    return train(training, validated=False), train(training, validated=True)

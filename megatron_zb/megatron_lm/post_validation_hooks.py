"""Optimizer post-validation in Megatron-LM's training loop.

In the loop every step has succeeded, without a norm. Its log is held back until the step
has been validated: at its next log, or earlier, where anything reads the weights. Queries that
would make all ranks wait for one another between two iterations are answered only from this rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_zb.errors import UsageError, end_with
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_core.post_validation import PostValidation
from megatron_zb.megatron_core.step import say_on_first_rank
from megatron_zb.megatron_lm.replacing import replace, when

# Functions of the training loop that read, store or compare what a step has made, or end the job.
_READERS = (
    "evaluate_and_print_results",
    "save_checkpoint_and_time",
    "save_checkpoint",
    "check_param_hashes_across_dp_replicas",
    "print_datetime",
)
# What the loop's log reads from its arguments, and what has moved on when it is written.
_COUNTED = ("consumed_train_samples", "skipped_train_samples")


def prepare(args: Any) -> list[str]:
    """Change settings that make all ranks wait between two iterations; return lines about them."""
    lines = []
    if getattr(args, "barrier_with_L1_time", False):
        args.barrier_with_L1_time = False
        if args.timing_log_level > 0:
            lines.append("--enable-optimizer-post-validation: timers start without a barrier")
    if getattr(args, "rerun_mode", "disabled") != "disabled":
        args.rerun_mode = "disabled"
        lines.append(
            "--enable-optimizer-post-validation sets --rerun-mode disabled: a NaN loss ends the "
            "job at once, without a second try"
        )
    return lines


@dataclass
class _HeldLog:
    """A delayed call of Megatron's training_log, and the values it would have read."""

    write: Callable[..., Any]
    call: inspect.BoundArguments
    counted: dict[str, int]
    num_microbatches: int
    elapsed: float | None


class PostValidationHooks:
    """The hooks of one training run; they do nothing until they are enabled."""

    def __init__(self) -> None:
        self._adapter: PipelineAdapter | None = None
        self._on_host = False
        self._loop: _ValidatedLoop | None = None
        """The training loop from its first step on."""

    def enable(self, adapter: PipelineAdapter, args: Any) -> None:
        """Validate the steps of the adapter's optimizer later."""
        self._adapter = adapter
        self._on_host = args.post_validation_snapshot == "host"

    def forget(self) -> None:
        """Validate nothing until it is enabled again."""
        self._adapter = self._loop = None

    def install(self) -> None:
        from megatron.core import num_microbatches_calculator
        from megatron.training import training

        replace(training, "train", self._train)
        replace(training, "train_step", when(self._not_started, self._start_and_step))
        validated = partial(when, lambda: self._loop)
        for name in _READERS:
            replace(training, name, validated(_ValidatedLoop.settle_first))
        for module, name, hook in (
            (training, "training_log", _ValidatedLoop.training_log),
            (training, "logical_and_across_model_parallel_group", _ValidatedLoop.from_this_rank),
            (
                training,
                "reduce_max_stat_across_model_parallel_group",
                _ValidatedLoop.from_this_rank,
            ),
            (
                num_microbatches_calculator,
                "get_num_microbatches",
                _ValidatedLoop.get_num_microbatches,
            ),
        ):
            replace(module, name, validated(hook))

    def _not_started(self) -> PipelineAdapter | None:
        return self._adapter if self._loop is None else None

    def _start_and_step(
        self, adapter: PipelineAdapter, original: Any, *args: Any, **keywords: Any
    ) -> Any:
        call = inspect.signature(original).bind(*args, **keywords).arguments
        optimizer, scheduler, model = call["optimizer"], call["opt_param_scheduler"], call["model"]
        try:
            validation = adapter.post_validate(optimizer, scheduler, model, on_host=self._on_host)
        except UsageError as error:
            end_with(error, dist.get_rank())
        say_on_first_rank(
            "to take a step of the optimizer back, rank 0 keeps "
            f"{validation.snapshot_nbytes / 2**20:.1f} MiB in "
            f"{'host' if self._on_host else 'device'} memory"
        )
        self._loop = _ValidatedLoop(validation)
        return original(*args, **keywords)

    def _train(self, original: Any, *args: Any, **keywords: Any) -> Any:
        result = original(*args, **keywords)
        if self._loop is not None:
            self._loop.settle()
        return result


class _ValidatedLoop:
    """A training loop whose steps are validated later, and logged then."""

    def __init__(self, validation: PostValidation) -> None:
        self._validation = validation
        self._held: _HeldLog | None = None
        self._writing: _HeldLog | None = None
        self._report_memory: bool | None = None

    # --- the loop

    def from_this_rank(self, original: Any, value: Any, *args: Any, **keywords: Any) -> Any:
        """Return a flag or number of this rank: it is equal, or still unknown, on all ranks."""
        return value

    def settle_first(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Validate the last step before anything reads what it has made."""
        self.settle()
        return original(*args, **keywords)

    def settle(self) -> None:
        """Validate the last step now, and log it."""
        self._validation.settle()
        self._write_held()

    # --- the log

    def training_log(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Write the line of the step before, and hold that of this one back."""
        from megatron.training import get_args

        self._write_held()
        call = inspect.signature(original).bind(*args, **keywords)
        call.apply_defaults()
        if self._report_memory is None:
            self._report_memory = call.arguments["report_memory_flag"]
        self._held = self._hold(original, call)
        if call.arguments["iteration"] >= get_args().train_iters:
            self.settle()
        return self._report_memory

    def _hold(self, original: Any, call: inspect.BoundArguments) -> _HeldLog:
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.training import get_args, get_timers

        args, is_first = get_args(), call.arguments["is_first_iteration"]
        elapsed = None
        if is_first or call.arguments["iteration"] % args.log_interval == 0:
            elapsed = get_timers()("interval-time").elapsed(reset=not is_first)
        return _HeldLog(
            original,
            call,
            {name: getattr(args, name) for name in _COUNTED},
            get_num_microbatches(),
            elapsed,
        )

    def _write_held(self) -> None:
        """Make the delayed call, with the outcome of the step."""
        held, self._held = self._held, None
        if held is None:
            return
        outcome = self._validation.outcome
        assert outcome is not None, "a line is held until its step has been validated"
        held.call.arguments.update(
            skipped_iter=int(outcome.skipped),
            grad_norm=outcome.grad_norm,
            num_zeros_in_grad=outcome.num_zeros,
            loss_scale=outcome.loss_scale,
            learning_rate=outcome.learning_rate,
            report_memory_flag=self._report_memory,
        )
        with self._as_it_was(held):
            self._report_memory = held.write(*held.call.args, **held.call.kwargs)

    @contextmanager
    def _as_it_was(self, held: _HeldLog) -> Iterator[None]:
        from megatron.training import get_args, get_timers

        args, timer = get_args(), get_timers()("interval-time")
        now = {name: getattr(args, name) for name in held.counted}
        vars(args).update(held.counted)
        self._writing = held
        if held.elapsed is not None:
            timer.elapsed = lambda *args, **keywords: held.elapsed
        try:
            yield
        finally:
            if held.elapsed is not None:
                del timer.elapsed
            self._writing = None
            vars(args).update(now)

    def get_num_microbatches(self, original: Any) -> Any:
        """Return the number of the step whose line is written, if any is."""
        return original() if self._writing is None else self._writing.num_microbatches

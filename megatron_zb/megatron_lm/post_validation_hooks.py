"""Optimizer post-validation in Megatron-LM's training loop.

The loop is told that every step has succeeded, without a norm. Its log is held back until the step
has been validated: at its next log, or earlier, where anything reads the weights. Queries that
would make all ranks wait for one another between two iterations are answered from this rank alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.megatron_lm.ending import end_with
from megatron_zb.megatron_lm.replacing import replace

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
    """The hooks and their state in one training run; they do nothing until there is a ``plan``."""

    def __init__(self) -> None:
        self.plan: Any = None
        """Adapter whose optimizer is to be validated later."""
        self._on_host = False
        self._validation: Any = None
        self._held: _HeldLog | None = None
        self._writing: _HeldLog | None = None
        self._report_memory: bool | None = None

    def enable(self, plan: Any, args: Any) -> None:
        self.plan = plan
        self._on_host = args.post_validation_snapshot == "host"

    def install(self) -> None:
        from megatron.core import num_microbatches_calculator
        from megatron.training import training

        for name in _READERS:
            replace(training, name, self._settle_first)
        for name, hook in (
            ("train", self._train),
            ("train_step", self._train_step),
            ("training_log", self._training_log),
            ("logical_and_across_model_parallel_group", self._from_this_rank),
            ("reduce_max_stat_across_model_parallel_group", self._from_this_rank),
        ):
            replace(training, name, hook)
        replace(num_microbatches_calculator, "get_num_microbatches", self._get_num_microbatches)

    # --- the loop

    def _train_step(self, original: Any, *args: Any, **keywords: Any) -> Any:
        if self.plan is not None and self._validation is None:
            call = inspect.signature(original).bind(*args, **keywords).arguments
            self._start(call["optimizer"], call["opt_param_scheduler"], call["model"])
        return original(*args, **keywords)

    def _start(self, optimizer: Any, scheduler: Any, model: list[Any]) -> None:
        import torch

        try:
            self._validation = self.plan.post_validate(
                optimizer, scheduler, model, on_host=self._on_host
            )
        except UsageError as error:
            end_with(error, torch.distributed.get_rank())
        self._tell_size()

    def _from_this_rank(self, original: Any, value: Any, *args: Any, **keywords: Any) -> Any:
        """Return a flag or number of this rank: it is equal, or still unknown, on all ranks."""
        return original(value, *args, **keywords) if self._validation is None else value

    def _settle_first(self, original: Any, *args: Any, **keywords: Any) -> Any:
        self.settle()
        return original(*args, **keywords)

    def _train(self, original: Any, *args: Any, **keywords: Any) -> Any:
        result = original(*args, **keywords)
        self.settle()
        return result

    def settle(self) -> None:
        """Validate the last step now, and log it."""
        if self._validation is not None:
            self._validation.settle()
            self._write_held()

    # --- the log

    def _training_log(self, original: Any, *args: Any, **keywords: Any) -> Any:
        if self._validation is None:
            return original(*args, **keywords)
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

    def _get_num_microbatches(self, original: Any) -> Any:
        return original() if self._writing is None else self._writing.num_microbatches

    def _tell_size(self) -> None:
        import torch

        if torch.distributed.get_rank() == 0:
            mebibytes = self._validation.snapshot_nbytes / 2**20
            where = "host" if self._on_host else "device"
            print(
                f"megatron_zb: to take a step of the optimizer back, rank 0 keeps {mebibytes:.1f} "
                f"MiB in {where} memory",
                flush=True,
            )

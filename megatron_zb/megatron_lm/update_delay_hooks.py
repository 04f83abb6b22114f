"""``--pipeline-update-delay``: late updates in Megatron-LM's training loop.

The loop calls the schedule, the optimizer and the scheduler of the learning rate as always, and the
last two report what they have done for the step before. Its log has the losses of each step, with
the gradient norm and the learning rate of the last update. Before anything reads the weights the
step that has begun is ended. A checkpoint is written of weights with all updates, and training goes
on from these alone, as one that loads them does.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_zb.errors import UsageError, end_with
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_core.late_updates import DelayedPart
from megatron_zb.megatron_core.step import say_on_first_rank
from megatron_zb.megatron_lm.replacing import replace, when
from megatron_zb.parsing import flag_of

FLAG = "--pipeline-update-delay 1"

_READERS = (
    "evaluate_and_print_results",
    "check_param_hashes_across_dp_replicas",
    "print_datetime",
)
"""Functions of the training loop that read what a step has made, or end the job."""
_WRITERS = ("save_checkpoint_and_time", "save_checkpoint")
_OVERLAPS = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step",
)
"""Settings that change when gradients are reduced and weights gathered, and no number."""
_INTERVALS = ("save_interval", "non_persistent_save_interval", "exit_interval")
"""Steps behind which the loop saves, or ends."""


def prepare(args: Any) -> list[str]:
    """Change settings that make all ranks wait between two iterations; return lines about them."""
    lines = []
    if getattr(args, "barrier_with_L1_time", False):
        args.barrier_with_L1_time = False
        if args.timing_log_level > 0:
            lines.append(f"{FLAG}: timers start without a barrier")
    if getattr(args, "rerun_mode", "disabled") != "disabled":
        args.rerun_mode = "disabled"
        lines.append(
            f"{FLAG} sets --rerun-mode disabled: a NaN loss ends the job at once, without a second "
            "try"
        )
    overlaps = [name for name in _OVERLAPS if getattr(args, name, False)]
    for name in overlaps:
        setattr(args, name, False)
    if overlaps:
        flags = " and ".join(flag_of(name) for name in overlaps)
        lines.append(f"{FLAG} turns {flags} off: it has an overlap of its own, with the next step")
    if "muon" not in args.optimizer:
        lines.append(
            f"{FLAG} changes the training, and {args.optimizer} loses more by it than Muon: the "
            "published gap of AdamW is over 0.2 in validation loss, that of Muon 0.01 "
            "(arXiv 2606.30634)"
        )
    return lines


class UpdateDelayHooks:
    """The hooks of one training run; they do nothing until they are enabled."""

    def __init__(self) -> None:
        self._adapter: PipelineAdapter | None = None
        self._feedback: float | None = None
        self._prediction: str | None = None
        self._part: DelayedPart | None = None

    def enable(self, adapter: PipelineAdapter, args: Any) -> None:
        """Let the updates of an adapter's training come late."""
        self._adapter = adapter
        asked = args.pipeline_update_feedback
        self._feedback = None if asked is None else float(asked == "on")
        self._prediction = args.pipeline_update_prediction

    def forget(self) -> None:
        """Delay nothing until it is enabled again."""
        self._adapter = self._part = None

    def install(self) -> None:
        from megatron.training import training

        replace(training, "train", when(lambda: self._adapter, self._train))
        late = partial(when, lambda: self._part)
        for name in _READERS:
            replace(training, name, late(_drained))
        for name in _WRITERS:
            replace(training, name, late(_restarted))
        for name in (
            "logical_and_across_model_parallel_group",
            "reduce_max_stat_across_model_parallel_group",
        ):
            replace(training, name, late(_of_this_rank))

    def _train(self, adapter: PipelineAdapter, original: Any, *args: Any, **keywords: Any) -> Any:
        call = inspect.signature(original).bind(*args, **keywords).arguments
        try:
            part = adapter.delay_updates(
                call["optimizer"],
                call["opt_param_scheduler"],
                call["model"],
                _may_read_ahead,
                feedback=self._feedback,
                prediction=self._prediction,
            )
        except UsageError as error:
            end_with(error, dist.get_rank())
        what = (
            f"groups compute with weights of {self._prediction} prediction"
            if self._prediction
            else f"error feedback is {'on' if part.feedback else 'off'}"
        )
        say_on_first_rank(
            f"every update comes one step late; rank 0 keeps {part.num_bytes / 2**20:.1f} MiB of "
            f"further weights, and {what}"
        )
        self._part = part
        result = original(*args, **keywords)
        part.drain()
        return result


def _may_read_ahead() -> bool:
    """Return whether another step follows, with no checkpoint between."""
    from megatron.training import get_args

    args = get_args()
    done = args.curr_iteration + 1
    ends = any(every and done % every == 0 for every in (getattr(args, n, 0) for n in _INTERVALS))
    return done < args.train_iters and not ends


def _drained(part: DelayedPart, original: Any, *args: Any, **keywords: Any) -> Any:
    """End the step that has begun before anything reads what it makes."""
    part.drain()
    return original(*args, **keywords)


def _restarted(part: DelayedPart, original: Any, *args: Any, **keywords: Any) -> Any:
    """Save the weights with all updates, and go on from these."""
    part.restart()
    return original(*args, **keywords)


def _of_this_rank(part: DelayedPart, original: Any, value: Any, *args: Any, **keywords: Any) -> Any:
    """Return a value of this rank: it is equal on all ranks of a model."""
    return value

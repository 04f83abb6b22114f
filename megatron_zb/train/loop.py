"""The training loop."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.errors import UsageError
from megatron_zb.job.settings import asks_for_layer_streams
from megatron_zb.train import checkpoint, data
from megatron_zb.train.checkpoint import Progress
from megatron_zb.train.finite import check_loss, said_in_a_sentence
from megatron_zb.train.log import RunLog
from megatron_zb.train.model import Trainee, build
from megatron_zb.train.ranks import is_log_rank

if TYPE_CHECKING:
    from megatron_zb.megatron_core.adapter import PipelineAdapter

_MEASURED_ITERATIONS = (2, 3)  # of this run: the first allocates what then stays


def train(
    args: argparse.Namespace,
    adapter: PipelineAdapter | None,
    agree: Callable[[UsageError | None], object],
) -> None:
    """Train from the start or the loaded checkpoint to the end.

    Args:
        adapter: None for Megatron's own schedule.
        agree: returns if every rank has been able to build its part of the model.

    Raises:
        UsageError: data, log or checkpoint cannot be used.
    """
    progress = Progress(0, 0)
    if adapter is not None and asks_for_layer_streams(
        args.pipeline_random_streams, adapter.placed.keeps_places
    ):
        adapter.draw_by_layer(args.seed, lambda: progress.iteration)
    trainee = build(args, adapter, agree)
    train_data, valid_data = data.build_datasets(args)
    if args.load:
        progress = checkpoint.load(args, trainee)
    log = RunLog(args, enabled=is_log_rank(), append=progress.iteration > 0)
    _announce(args, adapter, trainee, progress, log)
    if args.skip_train:
        loss = _evaluate(args, trainee, valid_data, progress.iteration)
        log.evaluation(progress.iteration, loss)
        return
    if adapter is not None:
        from megatron_zb.megatron_core.profiled_steps import iterations_left

        adapter.count_iterations(
            lambda: iterations_left(progress.iteration, args.train_iters, args.exit_interval)
        )
    sources = _sources(args, trainee, train_data, progress.consumed_samples)
    memory = _ActivationPeak(args, adapter, trainee)
    seconds, saved = [], progress.iteration
    for count in range(1, args.train_iters - progress.iteration + 1):
        start = time.perf_counter()
        with memory.watching(count):
            losses = _forward_backward(args, trainee, sources, progress.iteration + 1)
        pipeline_seconds = time.perf_counter() - start
        record = _update(args, trainee, progress, losses)
        record["pipeline_seconds"] = pipeline_seconds
        record["seconds"] = time.perf_counter() - start
        if count > 1 and not memory.watches(count):
            seconds.append(record["seconds"])
        progress = Progress(record["iteration"], record["consumed_samples"])
        done = progress.iteration
        log.iteration(record)
        if valid_data is not None and done % args.eval_interval == 0:
            log.evaluation(done, _evaluate(args, trainee, valid_data, done))
        if args.save_interval and done % args.save_interval == 0:
            checkpoint.save(args, trainee, progress)
            saved = done
        if args.exit_interval and done % args.exit_interval == 0:
            break
    if args.save and saved != progress.iteration:
        checkpoint.save(args, trainee, progress)
    log.write(
        {
            "pipeline_schedule": args.pipeline_schedule,
            "seconds_per_iteration": statistics.median(seconds) if seconds else None,
            "peak_activation_bytes": memory.per_pipeline_rank(),
            "predicted_bubble_rate": adapter.predicted_bubble_rate if adapter else None,
        }
    )


def _announce(
    args: argparse.Namespace,
    adapter: PipelineAdapter | None,
    trainee: Trainee,
    progress: Progress,
    log: RunLog,
) -> None:
    own = [p for c in trainee.chunks for p in c.parameters() if not getattr(p, "shared", False)]
    parameters = torch.tensor(
        sum(parameter.numel() for parameter in own), device="cpu" if args.cpu else "cuda"
    )
    dist.all_reduce(parameters, group=parallel_state.get_model_parallel_group())
    if adapter is not None:
        log.say(adapter.describe())
    log.say(
        f"{args.num_layers} layers, {parameters.item() / 1e6:.2f} million parameters on "
        f"{args.pipeline_model_parallel_size} pipeline x {args.tensor_model_parallel_size} tensor "
        f"x {args.data_parallel_size} data-parallel ranks, {args.num_microbatches} microbatches"
    )
    if args.load:
        log.say(f"continuing from {args.load} after iteration {progress.iteration}")


def _sources(
    args: argparse.Namespace, trainee: Trainee, dataset: Any, first_sample: int
) -> list[Iterator[data.Batch | None]]:
    """Return an iterator per chunk; chunks without embedding and output layer need no data."""
    return [
        data.batches(dataset, args, first_sample)
        if get_attr_wrapped_model(chunk, "pre_process")
        or get_attr_wrapped_model(chunk, "post_process")
        else itertools.repeat(None)
        for chunk in trainee.chunks
    ]


def _forward_backward(
    args: argparse.Namespace,
    trainee: Trainee,
    sources: list[Iterator[data.Batch | None]],
    iteration: int,
    forward_only: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Run all microbatches of one iteration; the losses are on the last pipeline rank.

    Raises:
        NotFinite: a loss or a gradient is NaN or infinite, and that is checked.
    """
    if not forward_only:
        for chunk in trainee.chunks:
            chunk.zero_grad_buffer()
        trainee.optimizer.zero_grad()
    single = len(trainee.chunks) == 1
    with said_in_a_sentence(iteration):
        return trainee.forward_backward(
            forward_step_func=partial(_forward_step, args.check_for_nan_in_loss_and_grad),
            data_iterator=sources[0] if single else sources,
            model=trainee.chunks[0] if single else trainee.chunks,
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=forward_only,
        )


def _forward_step(
    checks: bool, source: Iterator[data.Batch | None], model: Any
) -> tuple[torch.Tensor, Any]:
    """Run one microbatch through one chunk; return its output, and the function for its loss."""
    batch = next(source) or {}
    output = model(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
    return output, partial(_loss, batch.get("loss_mask"), checks)


def _loss(
    mask: torch.Tensor | None, checks: bool, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the loss over unmasked tokens, their number, and both for the report.

    `mask` and `losses` have the shape (micro-batch-size, seq-length).
    """
    assert mask is not None, "the chunk with the output layer is given batches"
    counts = mask.reshape(-1).float()
    total = (losses.reshape(-1).float() * counts).sum()
    tokens = counts.sum()
    if checks:
        check_loss(total)
    report = torch.stack([total.detach().clone(), tokens])
    return total, tokens.to(torch.int), {"lm loss": report}


def _mean_loss(losses: list[dict[str, torch.Tensor]]) -> float:
    """Return the loss per token over all microbatches and data-parallel ranks; 0 if not known."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return 0.0
    total = torch.stack([loss["lm loss"] for loss in losses]).sum(dim=0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(total[0] / total[1])


def _update(
    args: argparse.Namespace,
    trainee: Trainee,
    before: Progress,
    losses: list[dict[str, torch.Tensor]],
) -> dict[str, Any]:
    """Step optimizer and learning rate; return the log record, with the loss on the last rank."""
    rate = trainee.optimizer.param_groups[0]["lr"] if trainee.optimizer.param_groups else None
    updated, norm, _ = trainee.optimizer.step()
    if not args.clip_grad:  # Megatron computes the norm only to clip by it
        norm = trainee.optimizer.get_grad_norm()
    if updated:
        trainee.scheduler.step(increment=args.global_batch_size)
    return {
        "iteration": before.iteration + 1,
        "consumed_samples": before.consumed_samples + args.global_batch_size,
        "learning_rate": rate,
        "global_batch_size": args.global_batch_size,
        "lm_loss": _mean_loss(losses),
        "grad_norm": float(norm),
        "loss_scale": float(trainee.optimizer.get_loss_scale()),
        "skipped": not updated,
    }


def _evaluate(args: argparse.Namespace, trainee: Trainee, dataset: Any, iteration: int) -> float:
    """Return the loss on the first --eval-iters batches of the evaluation split."""
    sources = _sources(args, trainee, dataset, first_sample=0)
    for chunk in trainee.chunks:
        chunk.eval()
    losses = []
    with torch.no_grad():
        for _ in range(args.eval_iters):
            losses += _forward_backward(args, trainee, sources, iteration, forward_only=True)
    for chunk in trainee.chunks:
        chunk.train()
    return _mean_loss(losses)


class _ActivationPeak:
    """The peak activation memory of this rank in the measured iterations, in bytes."""

    def __init__(
        self, args: argparse.Namespace, adapter: PipelineAdapter | None, trainee: Trainee
    ) -> None:
        self._tracker: Any = None
        self.peak_bytes = 0
        if args.measure_activation_memory:
            from megatron_zb.runtime.activation_memory import ActivationMemory

            parameters = [p for chunk in trainee.chunks for p in chunk.parameters()]
            self._tracker = ActivationMemory(exclude=parameters)
            if adapter is not None:
                adapter.track(self._tracker)

    def watches(self, count: int) -> bool:
        """Return whether the run's `count`-th iteration is measured, and so slower than others."""
        return self._tracker is not None and count in _MEASURED_ITERATIONS

    @contextlib.contextmanager
    def watching(self, count: int) -> Iterator[None]:
        """Measure while this context is active, if this iteration is one to measure."""
        if not self.watches(count):
            yield
            return
        with self._tracker.watching():
            yield
        self.peak_bytes = max(self.peak_bytes, self._tracker.peak_bytes)

    def per_pipeline_rank(self) -> list[int] | None:
        """Return the peak bytes by pipeline rank, the highest of replicas; None if not measured."""
        if self._tracker is None:
            return None
        mine = (parallel_state.get_pipeline_model_parallel_rank(), self.peak_bytes)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        peaks = [0] * parallel_state.get_pipeline_model_parallel_world_size()
        for rank, peak in gathered:
            peaks[rank] = max(peaks[rank], peak)
        return peaks

"""The training loop of a distillation, from the start or a checkpoint to the end."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb.distill import block_times, checkpoint
from megatron_zb.distill.evaluation import compare
from megatron_zb.distill.flags import BEST
from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.last_steps import LastSteps
from megatron_zb.distill.place import Place, check_distribution, parse_distribution
from megatron_zb.distill.relay_steps import Exchange, relay_steps
from megatron_zb.distill.replanning import Replanner
from megatron_zb.distill.report import Board, BusyTime, DistillReport, Steps
from megatron_zb.distill.schedule.distribution import Distribution, distribute
from megatron_zb.distill.schedule.step_by_step import step_by_step
from megatron_zb.distill.stage import StageBlocks, batch_of, empty_activation, open_stage_blocks
from megatron_zb.distill.stitching import choose, save_student
from megatron_zb.distill.student import Library
from megatron_zb.distill.teacher import Teacher
from megatron_zb.errors import UsageError
from megatron_zb.parsing import size_in_bytes
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.observer import Observer, Observers
from megatron_zb.runtime.progress import RankProgress
from megatron_zb.runtime.watchdog import Watchdog, WatchedRank
from megatron_zb.schedules.passes import Message
from megatron_zb.train import data
from megatron_zb.train.log import Records


@dataclass(frozen=True)
class Job:
    """A distillation job: arguments, teacher, candidates and the checkpoint to resume from."""

    args: argparse.Namespace
    teacher: Teacher
    library: Library
    resume: tuple[Path, str] | None
    """The checkpoint to continue from, and its distribution."""


def distil(job: Job, store: dist.Store) -> None:
    """Run a job; collective over all ranks.

    Raises:
        UsageError: data, log or a checkpoint cannot be used, or a block does not learn.
    """
    args = job.args
    replanner = None
    if args.redistribute:
        replanner = Replanner(args, job.library, job.teacher.shape, microbatches_of(args))
    run = open_job(job, distribution_of(job), store, replanner)
    run.announce(job)
    step = run.first_step
    while not _is_end(args, step) or step == run.first_step < args.train_iters:
        end = _end_of_run(args, step)
        run.steps(step, end)
        step = end
        if args.save and (_divides(args.save_interval, step) or _is_end(args, step)):
            checkpoint.save(args, job.library, run.distribution, run.stage_blocks, step)
            distribution = None if _is_end(args, step) else _redistributed(run, step, replanner)
            if distribution is not None:
                run.close()
                del run  # the memory of its blocks, before others are built
                own = dist.PrefixStore(f"from step {step}", store)
                run = open_job(_continued(job), distribution, own, replanner)
    run.report.finish()
    run.draw()
    _finish(args, run, step)
    run.close()


def _redistributed(run: DistillRun, step: int, replanner: Replanner | None) -> Distribution | None:
    """Return a distribution with which further steps should be faster; None if there is none."""
    if replanner is None:
        return None
    found = replanner.find(run.distribution, *run.place, steps=step - run.since)
    run.since = step
    if found is None:
        return None
    distribution, gain = found
    run.report.finish()
    run.report.say(f"steps should take {gain:.0%} less with {distribution}: continuing there")
    return distribution


def _continued(job: Job) -> Job:
    """Return the job that continues from the checkpoint that was just written."""
    loaded = argparse.Namespace(**{**vars(job.args), "load": job.args.save})
    return replace(job, resume=checkpoint.stored_distribution(loaded, job.library))


def open_job(
    job: Job, distribution: Distribution, store: dist.Store, replanner: Replanner | None = None
) -> DistillRun:
    """Build everything that this rank needs for its steps; collective over all ranks.

    Raises:
        UsageError: data, log or a checkpoint cannot be used.
    """
    lanes = Lanes.of(job.args)
    check_distribution(distribution, microbatches_of(job.args))
    place = Place.of_this_rank(distribution, lanes)
    stage_blocks = open_stage_blocks(job.args, job.teacher, job.library, place)
    datasets = data.build_datasets(job.args)
    step = 0 if job.resume is None else checkpoint.load(job.resume[0], stage_blocks)
    run = DistillRun(job.args, distribution, stage_blocks, store, datasets, step)
    if replanner is not None:
        run.observe(replanner.busy)
    return run


def distribution_of(job: Job) -> Distribution:
    """Return the distribution: as given, the checkpoint's if its ranks match, or the fastest."""
    args, blocks, ranks = job.args, len(job.library), dist.get_world_size()
    lanes = Lanes.of(args)
    if args.distribution is not None:
        return parse_distribution(args.distribution, blocks, ranks, lanes=lanes)
    if job.resume is not None:
        stored = parse_distribution(job.resume[1], blocks, None)
        if stored.num_ranks * lanes.size == ranks:
            return stored
    times = block_times.measure(args, list(enumerate(job.library)), job.teacher.shape)
    return distribute(block_times.costs(times), lanes.place_of(ranks), microbatches_of(args))


def microbatches_of(args: argparse.Namespace) -> int:
    """Return the microbatches of a step in the relay, each of one for every expert-parallel lane.

    Raises:
        UsageError: the lanes do not divide those of a step.
    """
    lanes, number = Lanes.of(args), int(args.num_microbatches)
    if number % lanes.expert:
        raise UsageError(
            f"the {number} microbatches of a step cannot be dealt out evenly to "
            f"--expert-model-parallel-size {lanes.expert} ranks: change --global-batch-size or "
            "--micro-batch-size"
        )
    return number // lanes.expert


def _most_waiting(args: argparse.Namespace, distribution: Distribution) -> int | None:
    """Return the untaken sends of each channel that --relay-memory-limit has room for.

    Raises:
        UsageError: there is no room for one to each rank of the next stage.
    """
    if args.relay_memory_limit is None:
        return None
    channels = max((len(places) for _, places in distribution.ranges[1:]), default=1)
    each = channels * empty_activation(args).nbytes
    limit = size_in_bytes(args.relay_memory_limit, "--relay-memory-limit")
    if limit < each:
        raise UsageError(
            f"--relay-memory-limit {args.relay_memory_limit}: one activation for every rank of the "
            f"next stage takes {each / 2**20:.3g} MiB: give that, or more"
        )
    return int(limit // each)


def _divides(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0


def _is_exit(args: argparse.Namespace, step: int) -> bool:
    return _divides(args.exit_interval, step)


def _is_end(args: argparse.Namespace, step: int) -> bool:
    return step >= args.train_iters or _is_exit(args, step)


def _end_of_run(args: argparse.Namespace, step: int) -> int:
    """Return the next step after which all ranks meet, to write a checkpoint or to end."""
    intervals = [i for i in (args.save_interval, args.exit_interval) if i]
    return min([args.train_iters, *(step - step % i + i for i in intervals)])


class DistillRun:
    """Consecutive training steps on this rank."""

    def __init__(
        self,
        args: argparse.Namespace,
        distribution: Distribution,
        stage_blocks: StageBlocks,
        store: dist.Store,
        datasets: tuple[Any, Any],
        first_step: int,
    ) -> None:
        """Connect the ranks; ``datasets`` are those for training and for evaluation."""
        self._args = args
        self.distribution = distribution
        self.stage_blocks = stage_blocks
        self.first_step = first_step
        self._dataset, self.held_out = datasets
        self._device = "cpu" if args.cpu else "cuda"
        rank = dist.get_rank()
        self._lanes = lanes = Lanes.of(args)
        self._place = lanes.place_of(rank)
        in_lane = [lanes.rank_at(p, rank) for p in range(lanes.place_of(dist.get_world_size()))]
        self._channels = Channels(in_lane, distribution.placement, self._device)
        waiting = _most_waiting(args, distribution)
        self._steps = step_by_step(distribution, microbatches_of(args), args.run_ahead, waiting)
        self._progress = RankProgress(on_gpu=not args.cpu, schedule=self._steps.schedule)
        self._channels.until_taken = self._progress.until_taken
        self._watch(dist.PrefixStore("watchdog", store), in_lane)
        busy = BusyTime(on_gpu=not args.cpu)
        records = None
        if rank == 0 and args.log_file:
            records = Records(args.log_file, append=first_step > 0 or bool(args.save_library))
        self.report = DistillReport(
            Board.of(dist.PrefixStore("report", store), lanes, distribution.num_ranks),
            Steps(first_step, args.train_iters, args.log_interval, args.global_batch_size),
            list(stage_blocks.all_student_blocks()),
            busy,
            records,
        )
        self._observers: list[Observer] = [self._progress, busy]
        self._picture: LastSteps | None = None
        if args.picture:
            self._picture = LastSteps(not args.cpu, microbatches_of(args), args.run_ahead)
            self._observers.append(self._picture)
        self.since = first_step
        """The step after which the busy time of the steps counts."""

    @property
    def place(self) -> tuple[int, int]:
        """This rank's place, and the number of places."""
        return self._place, self._lanes.place_of(dist.get_world_size())

    def observe(self, busy: BusyTime) -> None:
        """Let another observer see the passes."""
        self._observers.append(busy)

    def announce(self, job: Job) -> None:
        """Print the start-up lines of the job."""
        args = self._args
        candidates = sum(len(candidates) for candidates in job.library)
        self.report.say(
            f"{candidates} student blocks learn from the {args.num_layers} blocks of "
            f"{job.teacher.path}: {self.distribution}"
        )
        if job.resume is not None:
            self.report.say(f"continuing from {job.resume[0]}")
        idle = dist.get_world_size() - self.distribution.num_ranks * self._lanes.size
        if idle:
            self.report.say(f"{idle} of the ranks gain nothing and idle")

    def steps(self, first: int, end: int) -> None:
        """Train from the state after `first` steps to that after `end`."""
        if self._place >= self.distribution.num_ranks:
            return
        self.report.ends_with(_last_step(self._args, end))
        self._record_before(first, end)
        with self._progress.step():
            done = relay_steps(
                self._steps,
                self._place,
                self.stage_blocks.stage(self._embedded),
                Exchange(self._channels, self._buffer, Observers(self._observers)),
                first=first,
                until=end,
            )
            for step in done:
                self.report.after(step + 1)
                self._record_before(step + 1, end)

    def _record_before(self, step: int, end: int) -> None:
        """Record the passes from here on if a picture is requested, and few steps are left."""
        if self._picture is not None:
            self._picture.before(step, _last_step(self._args, end))

    def draw(self) -> None:
        """Write the picture of the last steps, if one is requested; collective over all ranks."""
        if self._picture is not None:
            path = Path(self._args.picture)
            if self._picture.draw(self.distribution, self._lanes, path):
                self.report.say(f"the picture of the last steps is in {path}")

    def close(self) -> None:
        """Stop the watchdog and destroy the groups of this run; collective over all ranks.

        Others follow where blocks are distributed anew, and in every round of a library.
        """
        if self._watchdog is not None:
            self._watchdog.stop()
        self._channels.close()
        self.stage_blocks.place.copies.close()

    def _embedded(self, number: int) -> torch.Tensor:
        """Return the embedding of a microbatch, counted through the whole training."""
        batch = batch_of(self._args, self._dataset, number)
        assert self.stage_blocks.embedding is not None, "only the first stage reads data"
        embedded: torch.Tensor = self.stage_blocks.embedding(batch["tokens"], batch["position_ids"])
        return embedded

    def _buffer(self, message: Message) -> torch.Tensor:
        args = self._args
        if message.is_step_done:
            return torch.empty(1, device=self._device)
        return empty_activation(args)

    def _watch(self, store: dist.Store, in_lane: Sequence[int]) -> None:
        seconds = self._args.pipeline_timeout
        if seconds is None:
            seconds = 0.9 * 60 * self._args.distributed_timeout_minutes
        self._watchdog: Watchdog | None = None
        if seconds:
            job = tuple(range(dist.get_world_size()))
            place = WatchedRank(self._place, tuple(in_lane), job)
            self._watchdog = Watchdog(self._progress, place, store, seconds)


def _last_step(args: argparse.Namespace, end: int) -> int:
    """Return the step that is reported in any case, which is the last of the training."""
    return end if _is_end(args, end) else args.train_iters


def _finish(args: argparse.Namespace, run: DistillRun, step: int) -> None:
    """Evaluate and write the stitched student, and report the result."""
    told = [run.report.last]
    dist.broadcast_object_list(told, src=0)
    losses = {
        (block, name): loss for block, named in told[0].items() for name, loss in named.items()
    }
    if args.candidate == BEST and not losses:
        raise UsageError("--candidate best needs a step to compare by, and this run had none")
    chosen = choose(args.candidate, run.stage_blocks, losses)
    if run.held_out is not None:
        compared = compare(args, run.distribution, run.stage_blocks, chosen, run.held_out)
        run.report.say(
            f" held-out loss at step {step} | teacher: {compared.teacher:.6f} | stitched student: "
            f"{compared.student:.6f} |"
        )
        run.report.write(
            {
                "iteration": step,
                "teacher_eval_loss": compared.teacher,
                "student_eval_loss": compared.student,
            }
        )
    if args.save_student:
        save_student(args, run.stage_blocks, chosen, step)
        run.report.say(f"the student is in {args.save_student}")

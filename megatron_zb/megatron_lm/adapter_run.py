"""What a run with ``--pipeline-adapters`` is asked for: its adapters, and their steps so far."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatron_zb.errors import UsageError
from megatron_zb.lora.adapter_file import FLAG, AdapterJob, jobs_of
from megatron_zb.lora.checkpoint import steps_saved
from megatron_zb.megatron_core.refusals import COPIES
from megatron_zb.schedules.features.adapters import Adapter, Adapters

_GIVEN_UP = "check_for_nan_in_loss_and_grad", "check_for_spiky_loss", "check_for_large_grads"
"""Checks that would end the training of all adapters for a fault in one."""


@dataclass
class AdapterRun:
    """The adapters of a run, and the steps that each has done."""

    jobs: list[AdapterJob]
    done: dict[str, int]
    steps: int = 1
    """Of each adapter in a step of the pipeline."""

    @property
    def going(self) -> list[AdapterJob]:
        """The adapters with steps left."""
        return [job for job in self.jobs if self.done[job.name] < job.steps]

    @property
    def adapters(self) -> Adapters:
        """The next steps of each adapter that has steps left, or of all where none has."""
        jobs = self.going or self.jobs
        left = {job.name: max(job.steps - self.done[job.name], 1) for job in jobs}
        each = (Adapter(it.name, it.microbatches, min(self.steps, left[it.name])) for it in jobs)
        return Adapters(tuple(each))


def prepare(args: argparse.Namespace) -> AdapterRun | None:
    """Read the file of adapters, and set the arguments of the whole run; None without a file.

    Raises:
        UsageError: the file is wrong, there is no base, or an adapter cannot be continued.
    """
    if args.pipeline_adapters is None:
        if args.pipeline_adapter_steps is not None:
            raise UsageError(f"--pipeline-adapter-steps is for adapters: give {FLAG}")
        return None
    steps = 1 if args.pipeline_adapter_steps is None else args.pipeline_adapter_steps
    if steps < 1:
        raise UsageError(f"--pipeline-adapter-steps is {steps}: it must be 1 or greater")
    if not (args.load or args.pretrained_checkpoint):
        raise UsageError(f"{FLAG} trains adapters of a base model: give its checkpoint as --load")
    if args.micro_batch_size is None:
        raise UsageError(f"{FLAG} needs --micro-batch-size, which all adapters have")
    model_parallel = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    replicas = max(args.world_size // model_parallel, 1)
    jobs = jobs_of(args, replicas)
    setattr(args, COPIES, any(job.is_whole for job in jobs))
    folder = None if args.save is None else Path(args.save)
    done = {job.name: steps_saved(folder, job, args.tensor_model_parallel_size) for job in jobs}
    run = AdapterRun(jobs, done, steps)
    args.global_batch_size = args.micro_batch_size * replicas * run.adapters.num_units
    args.train_iters = max(job.steps for job in jobs)
    args.lr = args.lr or max(job.arguments["lr"] for job in jobs)
    for name in _GIVEN_UP:
        setattr(args, name, False)
    return run

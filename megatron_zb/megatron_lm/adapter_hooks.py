"""Train several LoRA adapters in Megatron-LM's ``pretrain``, which otherwise trains the model.

``pretrain`` builds the model and loads the base as it does to evaluate, with neither gradients nor
an optimizer. What depends on the arguments, such as data and optimizers, is then built by
Megatron-LM's own functions once for each adapter, with the arguments of this adapter.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb.errors import UsageError, end_with
from megatron_zb.lora import peft_folder
from megatron_zb.lora.adapter_file import FLAG, AdapterJob
from megatron_zb.lora.checkpoint import AdapterCheckpoints
from megatron_zb.lora.layers import LoRALayers, LoRAShape
from megatron_zb.lora.streamed import StreamedOptimizers
from megatron_zb.lora.training import AdapterOptimizer, AdapterOptimizers, Stepped, wrapped
from megatron_zb.lora.whole import CopyBytes, WholeModels, check_fits, free_bytes
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_core.shared_pipeline import SharedPipelinePart
from megatron_zb.megatron_lm.adapter_log import AdapterProgress, log, say
from megatron_zb.megatron_lm.adapter_run import AdapterRun
from megatron_zb.megatron_lm.replacing import replace, when
from megatron_zb.schedules.features.adapters import Adapters

_OF_BASE = {
    "finetune": True,
    "no_load_optim": True,
    "no_load_rng": True,
    "skip_train": True,
}
"""Arguments with which ``pretrain`` loads the base."""

MODEL_FOLDER = "model"
"""Folder of a trained copy, beside the checkpoints that it goes on from."""


class AdapterHooks:
    """The hooks of one training of adapters; they do nothing until they are enabled."""

    def __init__(self) -> None:
        self._training: _Training | None = None

    def enable(self, pipeline: PipelineAdapter, run: AdapterRun) -> None:
        """Train adapters in place of the model."""
        self._training = _Training(pipeline, run)

    @property
    def to_agree_on(self) -> dict[str, str]:
        """Values of the adapter file, which all ranks compare, by their names in errors."""
        return {} if self._training is None else self._training.to_agree_on

    def forget(self) -> None:
        """Train no adapters until it is enabled again."""
        self._training = None

    def install(self) -> None:
        from megatron.training import training

        enabled = partial(when, lambda: self._training)
        for name, hook in (
            ("setup_model_and_optimizer", _Training.set_up),
            ("build_train_valid_test_data_iterators", _Training.build_iterators),
            ("train", _Training.train),
        ):
            replace(training, name, enabled(hook))


class _Training:
    """The training of the adapters of a run."""

    def __init__(self, pipeline: PipelineAdapter, run: AdapterRun) -> None:
        self._pipeline, self._run = pipeline, run
        self._optimizers: AdapterOptimizers | None = None
        self._part: SharedPipelinePart | None = None
        self._failed: dict[str, str] = {}
        self._names: list[str] = []
        """Losses that the user's loss function reports, in their order."""

    @property
    def to_agree_on(self) -> dict[str, str]:
        run = self._run
        return {
            f"adapter {job.name} of {FLAG}": f"{job.entry!r} after {run.done[job.name]} steps"
            for job in run.jobs
        }

    # --- what pretrain builds

    def set_up(self, original: Any, *args: Any, **keywords: Any) -> tuple[Any, None, None]:
        """Build the model, load the base, and add the adapters."""
        arguments = _arguments()
        with changed(arguments, _OF_BASE):
            model = original(*args, **keywords)[0]
        arguments.iteration, arguments.curr_iteration = 0, 0
        try:
            self._add_adapters(model, arguments)
        except UsageError as error:
            end_with(error, dist.get_rank())
        return model, None, None

    def _add_adapters(self, model: Sequence[Any], arguments: Any) -> None:
        from megatron.core.utils import get_model_config

        config = get_model_config(model[0])
        shapes = {job.name: _shape_of(job) for job in self._run.jobs if not job.is_whole}
        whole = self._copies(model, arguments)
        layers = LoRALayers(model, shapes)
        each = {}
        for job in self._run.jobs:
            of_job = (whole if job.is_whole else layers).weights[job.name]
            with changed(arguments, self._alone(job)):
                each[job.name] = _optimizer_of(of_job, arguments, job)
        weights = (layers, whole)
        self._optimizers = (
            StreamedOptimizers(weights, each, config, len(model))
            if self._run.steps > 1
            else AdapterOptimizers(weights, each, config)
        )
        checkpoints = self._checkpoints(arguments)
        for job in self._run.jobs:
            if checkpoints is not None and (step := self._run.done[job.name]):
                checkpoints.load(job, each[job.name], step)
                say(f"adapter {job.name}: going on after {step} of {job.steps} steps")
        of_base = sum(w.numel() * w.element_size() for c in model for w in c.parameters())
        of_adapters = sum(own.num_bytes for own in each.values())
        say(
            f"{len(each)} adapters take {of_adapters / 2**20:.2f} MiB on rank 0 for weights and "
            f"gradients, beside {of_base / 2**20:.2f} MiB of the base, and the states of their "
            "optimizers"
        )
        self._part = self._pipeline.train_adapters(self._optimizers, self._run.done)
        config.timers = None

    def _copies(self, model: Sequence[Any], arguments: Any) -> WholeModels:
        """Copy the weights of the base for each adapter that trains all of them.

        Raises:
            UsageError: a rank has no room for them.
        """
        names = [job.name for job in self._run.jobs if job.is_whole]
        if names:
            bytes_of_one = CopyBytes.of(model, arguments, arguments.data_parallel_size)
            check_fits(names, bytes_of_one, free_bytes(model[0]))
        return WholeModels(model, names)

    def build_iterators(
        self, original: Any, *args: Any, **keywords: Any
    ) -> tuple[dict[str, Any], dict[str, Any], None]:
        """Build the data iterators of every adapter for one chunk; return them by its name."""
        arguments = _arguments()
        train, valid = {}, {}
        for job in self._run.jobs:
            with changed(arguments, self._alone(job)):
                train[job.name], valid[job.name], _ = original(*args, **keywords)
        arguments.do_train, arguments.do_valid, arguments.do_test = True, False, False
        return train, valid, None

    def _alone(self, job: AdapterJob) -> dict[str, Any]:
        """Return the arguments of Megatron-LM that train an adapter in a separate run."""
        done = self._run.done[job.name]
        return {
            **job.arguments,
            "eval_global_batch_size": job.batch,
            "iteration": done,
            "consumed_train_samples": done * job.batch,
            "consumed_valid_samples": 0,
        }

    # --- the loop

    def train(self, original: Any, *args: Any, **keywords: Any) -> tuple[int, int]:
        """Train all adapters to their ends; return that no iteration of the model was done."""
        call = inspect.signature(original).bind(*args, **keywords).arguments
        arguments = _arguments()
        checkpoints = self._checkpoints(arguments)
        windows = 0
        for chunk in call["model"]:
            chunk.train()
        per_chunk = call["train_data_iterator"]
        per_chunk = per_chunk if isinstance(per_chunk, list) else [per_chunk]
        data = [self._merged(of_chunk) for of_chunk in per_chunk]
        while going := self._run.going:
            self._use(self._run.adapters)
            arguments.curr_iteration = windows
            before = dict(self._run.done)
            self._step(going, data, call, arguments)
            windows += 1
            is_last = windows == arguments.exit_interval or _is_told_to_end(arguments)
            for job in going:
                self._after_step(job, before[job.name], call, checkpoints, is_last=is_last)
            if is_last:
                break
        if self._failed:
            end_with(UsageError("; ".join(self._failed.values())), dist.get_rank())
        return 0, 0

    def _use(self, adapters: Adapters) -> None:
        """Build the schedule anew where it is for others."""
        if adapters == self._adapters:
            return
        try:
            self._pipeline.current.use_adapters(adapters)
        except UsageError as error:
            end_with(error, dist.get_rank())

    @property
    def _adapters(self) -> Adapters:
        assert self._part is not None, "the adapters have been added"
        return self._part.rules.adapters

    def _step(
        self,
        going: Sequence[AdapterJob],
        data: list[Iterator[Any] | None],
        call: Mapping[str, Any],
        arguments: Any,
    ) -> None:
        """Run one step of every adapter that has steps left."""
        from megatron.training import training

        part, optimizers = self._part, self._optimizers
        assert part is not None and optimizers is not None
        order, start = self._adapters.each, time.perf_counter()
        for job in going:
            optimizers.each[job.name].clear()
        records = training.get_forward_backward_func()(
            forward_step_func=call["forward_step_func"],
            data_iterator=list(data),
            model=call["model"],
            num_microbatches=self._adapters.num_units,
            seq_length=arguments.seq_length,
            micro_batch_size=arguments.micro_batch_size,
            decoder_seq_length=arguments.decoder_seq_length,
            forward_only=False,
        )
        for job in going:
            optimizers.end_step(job.name)
        losses, broken = self._losses(going, records)
        done = {job.name: self._update(job, job.name in broken) for job in going}
        seconds = (time.perf_counter() - start) / max(it.steps for it in order)
        for job in going:
            for stepped, of_step in zip(done[job.name], losses[job.name], strict=False):
                self._run.done[job.name] += 1
                step = self._run.done[job.name]
                scale = optimizers.each[job.name].optimizer.get_loss_scale().item()
                log(AdapterProgress(job, step, stepped, of_step, scale, seconds), arguments)

    def _merged(self, of_chunk: Mapping[str, Any]) -> Iterator[Any] | None:
        assert self._part is not None
        if any(iterator is None for iterator in of_chunk.values()):
            return None
        return self._part.merged(of_chunk)

    def _losses(
        self, going: Sequence[AdapterJob], records: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, list[dict[str, float]]], set[str]]:
        """Return the losses of every step of the adapters, and those with one that is no number.

        Each rank brings its part of the sums; the same call tells all ranks of bad gradients.
        """
        part, optimizers = self._part, self._optimizers
        assert part is not None and optimizers is not None
        if not self._names:
            self._names = _agreed([*records[0]] if records else [])
        of_jobs = part.by_adapter(records) if records else {}
        rows = [(it.name, step) for it in self._adapters.each for step in range(it.steps)]
        table = torch.zeros(len(rows), 2 * len(self._names) + 1, device=_device())
        for row, (adapter, step) in zip(table, rows, strict=True):
            for i, name in enumerate(self._names):
                values = [_pair(it[name]) for it in of_jobs[adapter][step]] if of_jobs else []
                if values:
                    row[2 * i : 2 * i + 2] = torch.stack(values).sum(dim=0)
            if not optimizers.is_finite(adapter):
                row[-1] = 1
        dist.all_reduce(table)
        arguments = _arguments()
        scales = arguments.fp16 and arguments.loss_scale is None  # and may be too large
        found: dict[str, list[dict[str, float]]] = {job.name: [] for job in going}
        broken = set()
        for row, (adapter, _) in zip(table.tolist(), rows, strict=True):
            pairs = zip(self._names, row[::2], row[1::2], strict=False)
            found[adapter].append({name: x / n if n else math.nan for name, x, n in pairs})
            is_finite = all(map(math.isfinite, found[adapter][-1].values()))
            if not is_finite or (row[-1] and not scales):
                broken.add(adapter)
        return found, broken

    def _update(self, job: AdapterJob, is_broken: bool) -> list[Stepped]:
        """Step the optimizer of an adapter; return the steps that count.

        One whose loss or gradient is no number ends here. With a loss scale that is too large the
        optimizer leaves the step out.
        """
        optimizers = self._optimizers
        assert optimizers is not None
        if is_broken:
            done = optimizers.stepped(job.name) if self._run.steps > 1 else []
            counted = list(itertools.takewhile(lambda it: it.is_finite, done))
            step = self._run.done[job.name] + len(counted) + 1
            self._failed[job.name] = (
                f"adapter {job.name} ended in step {step}, whose loss or gradient is no number: "
                "look at its data and its learning rate"
            )
            self._run.jobs.remove(job)
            say(self._failed[job.name])
            return counted
        return optimizers.stepped(job.name)

    def _after_step(
        self,
        job: AdapterJob,
        before: int,
        call: Mapping[str, Any],
        checkpoints: AdapterCheckpoints | None,
        *,
        is_last: bool,
    ) -> None:
        """Save and evaluate an adapter where it is time to, and at its end.

        Args:
            before: its steps before this step of the pipeline.
        """
        if job.name in self._failed:
            return
        arguments = _arguments()
        step = self._run.done[job.name]
        is_done = step == job.steps

        def is_due(every: int | None) -> bool:
            return is_done or (every is not None and step // every > before // every)

        if checkpoints is not None and (is_last or is_due(arguments.save_interval)):
            assert self._optimizers is not None
            own = self._optimizers.each[job.name]
            checkpoints.save(job, own, step, arguments.tensor_model_parallel_size)
            say(f"adapter {job.name} is saved after {step} steps")
            if is_done and job.is_whole:
                self._write_model(job, call["model"], arguments)
            elif is_done:
                self._write_peft(job, own, call["config"], Path(arguments.save))
        if arguments.eval_iters and is_due(arguments.eval_interval):
            self._evaluate(job, call, arguments)

    def _write_peft(
        self, job: AdapterJob, own: AdapterOptimizer, config: Any, folder: Path
    ) -> None:
        why = peft_folder.why_not(config)
        if why is not None:
            say(f"adapter {job.name} is not written as a PEFT folder: {why}")
            return
        peft_folder.write(folder, job, own, config)
        say(f"adapter {job.name} is in {folder / job.name / peft_folder.FOLDER} for PEFT")

    def _write_model(self, job: AdapterJob, model: Sequence[Any], arguments: Any) -> None:
        """Write the weights as a checkpoint of Megatron-LM, which any of its scripts loads."""
        from megatron.training import checkpointing

        assert self._optimizers is not None
        self._optimizers.select_everywhere(len(model), job.name)
        into = Path(arguments.save) / job.name / MODEL_FOLDER
        only_weights = {"save": str(into), "no_save_optim": True, "no_save_rng": True}
        with changed(arguments, {**self._alone(job), **only_weights}):
            checkpointing.save_checkpoint(job.steps, model, None, None, 0)
        say(f"adapter {job.name} is in {into} as a checkpoint of the model")

    def _evaluate(self, job: AdapterJob, call: Mapping[str, Any], arguments: Any) -> None:
        from megatron.training import training

        assert self._optimizers is not None
        model, step = call["model"], self._run.done[job.name]
        self._optimizers.select_everywhere(len(model), job.name)
        valid = call["valid_data_iterator"]
        own = [it[job.name] for it in valid] if isinstance(valid, list) else valid[job.name]
        with changed(arguments, self._alone(job)):
            training.evaluate_and_print_results(
                f"iteration {step} of adapter {job.name}",
                call["forward_step_func"],
                own,
                model,
                step,
                call["process_non_loss_data_func"],
                call["config"],
                verbose=False,
                write_to_tensorboard=False,
            )

    def _checkpoints(self, arguments: Any) -> AdapterCheckpoints | None:
        from megatron.training import checkpointing

        if arguments.save is None:
            return None
        metadata = checkpointing._build_sharded_state_dict_metadata(arguments)
        return AdapterCheckpoints(Path(arguments.save), metadata)


def _shape_of(job: AdapterJob) -> LoRAShape:
    entry, seed = job.entry, job.arguments["seed"]
    return LoRAShape(entry.rank, entry.alpha, tuple(entry.modules), seed, entry.dropout)


def _optimizer_of(weights: Sequence[Any], arguments: Any, job: AdapterJob) -> AdapterOptimizer:
    """Wrap the weights of an adapter, and build its optimizer from the arguments that count."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.training import training

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=arguments.accumulate_allreduce_grads_in_fp32,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
        average_in_collective=arguments.ddp_average_in_collective,
    )
    chunks = wrapped(weights, ddp_config, job.name)
    config, overrides = training.get_megatron_optimizer_config(arguments)
    optimizer = get_megatron_optimizer(config, chunks, config_overrides=overrides)
    scheduler = training.get_optimizer_param_scheduler(optimizer)
    return AdapterOptimizer(chunks, optimizer, scheduler, job.batch)


# --- small parts


def _arguments() -> Any:
    from megatron.training import get_args

    return get_args()


@contextmanager
def changed(args: argparse.Namespace, values: Mapping[str, Any]) -> Iterator[None]:
    """Let arguments have other values, and put all of them back, whatever changes them."""
    before = dict(vars(args))
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).clear()
        vars(args).update(before)


def _is_told_to_end(arguments: Any) -> bool:
    """Return whether the job has got a signal to save and end."""
    if not arguments.exit_signal_handler:
        return False
    from megatron.training.global_vars import get_signal_handler

    return any(get_signal_handler().signals_received())


def _pair(value: Any) -> torch.Tensor:
    """Return a reported loss as a sum and what it is divided by."""
    flat = value.detach().float().reshape(-1)
    return flat if flat.numel() == 2 else torch.stack([flat.sum(), flat.new_ones(())])


def _agreed(names: list[str]) -> list[str]:
    """Return the names of the losses, which only ranks of the output layer know."""
    of_all: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, names)
    return next(filter(None, of_all))


def _device() -> Any:
    return torch.cuda.current_device()

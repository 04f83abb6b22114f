"""Megatron-LM's training loop with a schedule: the functions of it that ask this package.

Every hook calls what it replaces until the arguments choose a schedule; so a job without
``--pipeline-schedule`` runs as if nothing had been installed. A replaced function is replaced
wherever Megatron's modules hold it, whatever they call it, and before a pretrain script copies it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_zb.agreement import agree
from megatron_zb.errors import UsageError
from megatron_zb.megatron_lm import (
    conflicts,
    fingerprint,
    flags,
    post_validation_hooks,
    stored_placement,
)
from megatron_zb.megatron_lm.ending import end_with
from megatron_zb.megatron_lm.plan import make_plan
from megatron_zb.megatron_lm.post_validation_hooks import PostValidationHooks
from megatron_zb.megatron_lm.replacing import replace, replace_method, replace_static
from megatron_zb.schedules import catalog
from megatron_zb.shared_build import Build, SharedBuild, is_in_a_job, job_store, kept

_LONGEST_START = 30.0  # seconds that a rank may let the others wait, once all are connected
_MARK = "_installed_by_megatron_zb"


def install(prepare: Callable[[Any], None] | None = None) -> None:
    """Hook this process's Megatron-LM; a second call hooks nothing more.

    Args:
        prepare: is given the parsed arguments first, before they are checked.
    """
    from megatron.training import arguments

    hooks = getattr(arguments, _MARK, None)
    if hooks is None:
        hooks = _Hooks()
        setattr(arguments, _MARK, hooks)
        hooks.install()
    if prepare is not None:  # a patched checkout has been there before
        hooks.prepare = prepare


class _Hooks:
    """What is installed, and the plan of this process once there is one."""

    def __init__(self) -> None:
        self.prepare: Callable[[Any], None] | None = None
        self._plan: Any = None
        self._chunks: list[Any] = []
        self._fingerprint: dict[str, Any] = {}
        self._post_validation = PostValidationHooks()

    def install(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )
        from megatron.training import arguments, checkpointing, initialize, training, utils

        from megatron_zb.megatron import versions

        del initialize  # imported so that what it holds is replaced, too
        replace(arguments, "add_megatron_arguments", self._add_arguments)
        replace(arguments, "validate_args", self._validate_args)
        with suppress(ModuleNotFoundError):  # it needs a package that not every checkout needs
            replace(import_module("megatron.training.yaml_arguments"), "load_yaml", _load_yaml)
        replace(parallel_state, "initialize_model_parallel", self._initialize_model_parallel)
        for module, name in versions.chunk_builders():
            replace(module, name, self._build_chunks)
        replace(training, "get_forward_backward_func", self._get_forward_backward_func)
        replace(training, "finalize_model_grads", self._finalize_model_grads)
        replace(utils, "is_first_or_last_pipeline_stage", self._is_first_or_last_stage)
        replace(*versions.batch_broadcast(), self._get_batch_on_this_tp_rank)
        replace(checkpointing, "_load_base_checkpoint", self._load_base_checkpoint)
        replace_method(BlendedMegatronDatasetBuilder, "__init__", self._dataset_builder)
        replace_static(PipelineParallelLayerLayout, "from_str", self._layout_from_str)
        self._post_validation.install()

    # --- arguments

    def _add_arguments(self, original: Any, parser: Any) -> Any:
        return flags.add_arguments(original(parser))

    def _validate_args(self, original: Any, args: Any, *rest: Any, **defaults: Any) -> Any:
        try:
            if self.prepare is not None:
                self.prepare(args)
            lines = flags.translate_older(args)
            self._plan = make_plan(args, _build_for_all(args))
        except UsageError as error:
            end_with(error, args.rank)
        if args.enable_optimizer_post_validation:
            self._post_validation.enable(self._plan, args)
            lines += post_validation_hooks.prepare(args)
        for line in lines:
            _say(f"megatron_zb: {line}", args.rank)
        result = original(args, *rest, **defaults)
        if self._plan is not None:
            stored_placement.mark(args, self._plan)
            self._fingerprint = fingerprint.of_run(args, self._plan)
            _say(self._plan.describe(), args.rank)
        return result

    # --- processes, layers and chunks

    def _initialize_model_parallel(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """The first thing that would hang where ranks disagree."""
        if self._plan is not None:
            self._agree()
        if self._plan is not None and self._plan.embedding_ranks is not None:
            keywords["get_embedding_ranks"] = self._plan.embedding_ranks
        return original(*args, **keywords)

    def _agree(self) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        rank = dist.get_rank()
        store = dist.PrefixStore("megatron_zb/start", _get_default_store())
        try:
            agree(store, rank, dist.get_world_size(), self._fingerprint, seconds=_LONGEST_START)
        except UsageError as error:
            end_with(error, rank)

    def _layout_from_str(self, original: Any, layout: str, *rest: Any, **sizes: Any) -> Any:
        if self._plan is not None and layout == str(self._plan.layer_layout):
            return self._plan.layer_layout
        return original(layout, *rest, **sizes)

    def _build_chunks(self, original: Any, build: Any, *rest: Any, **keywords: Any) -> Any:
        if self._plan is None:
            return original(build, *rest, **keywords)
        self._chunks = []
        return original(self._placed(build), *rest, **keywords)

    def _placed(self, build: Any) -> Any:
        """A builder of one chunk that gives embedding and output layer to the right chunks."""
        from megatron.core import parallel_state

        plan = self._plan

        def build_placed(*args: Any, **keywords: Any) -> Any:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
            vp_stage = keywords.get("vp_stage")
            keywords["pre_process"] = plan.pre_process(pp_rank, vp_stage)
            keywords["post_process"] = plan.post_process(pp_rank, vp_stage)
            chunk = build(*args, **keywords)
            self._check_model(chunk)
            self._chunks.append(chunk)
            if len(self._chunks) == plan.chunks:
                plan.prepare_model(self._chunks)
            return chunk

        return build_placed

    def _check_model(self, chunk: Any) -> None:
        import torch

        try:
            conflicts.check_model(chunk, self._plan.schedule.name, self._plan.physical.mirrored)
        except UsageError as error:
            end_with(error, torch.distributed.get_rank())

    # --- data

    def _is_first_or_last_stage(self, original: Any, vp_stage: int | None) -> Any:
        if self._plan is None or not self._plan.physical.mirrored:
            return original(vp_stage)
        from megatron.core import parallel_state

        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        chunks = range(self._plan.chunks) if vp_stage is None else (vp_stage,)
        return any(
            self._plan.pre_process(pp_rank, c) or self._plan.post_process(pp_rank, c)
            for c in chunks
        )

    def _get_batch_on_this_tp_rank(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """In a V, one rank needs tokens and labels: so Megatron broadcasts a batch for MTP."""
        if self._plan is not None and self._plan.physical.mirrored:
            keywords["mtp_on_this_rank"] = True
        return original(*args, **keywords)

    def _dataset_builder(
        self, original: Any, builder: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any
    ) -> None:
        """The first rank of the job tells all others whether there is data: it must have some."""
        if self._plan is not None and self._plan.physical.mirrored:
            inner = is_built_on_rank

            def is_built_on_rank() -> bool:
                import torch

                return inner() or torch.distributed.get_rank() == 0

        original(builder, cls, sizes, is_built_on_rank, config)

    # --- the step

    def _get_forward_backward_func(self, original: Any, *args: Any, **keywords: Any) -> Any:
        if self._plan is None:
            return original(*args, **keywords)
        return self._plan.forward_backward_func

    def _finalize_model_grads(self, original: Any, *args: Any, **keywords: Any) -> Any:
        if self._plan is None or not self._plan.physical.mirrored:
            return original(*args, **keywords)
        return self._plan.finalize_model_grads(*args, **keywords)

    # --- checkpoints

    def _load_base_checkpoint(
        self, original: Any, load_dir: Any, args: Any, *rest: Any, **keywords: Any
    ) -> Any:
        loaded = original(load_dir, args, *rest, **keywords)
        try:
            stored_placement.check(loaded, args, self._plan)
        except UsageError as error:
            end_with(error, args.rank)
        return loaded


def _build_for_all(args: Any) -> Build:
    """What builds schedules: one rank for all, where they were started together.

    Megatron-LM has no process groups yet when it checks its arguments, so the ranks meet at the
    store that these will use.
    """
    build: Build = catalog.build
    if args.pipeline_schedule_cache is not None:
        say = partial(_say, rank=args.rank)
        folder = Path(args.pipeline_schedule_cache)
        build = kept(folder, lambda line: say(f"megatron_zb: {line}"), build)
    if not is_in_a_job():
        return build
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    connect = partial(job_store, args.rank, args.world_size, timeout)
    return SharedBuild(connect, args.rank, args.world_size, build)


def _load_yaml(original: Any, path: str) -> Any:
    """It replaces the command line, and is not checked as that is: a schedule would be lost."""
    loaded = original(path)
    chosen = flags.choice_in(sys.argv[1:])
    if chosen is None and getattr(loaded, "pipeline_schedule", None):
        chosen = f"pipeline_schedule: {loaded.pipeline_schedule} in it"
    if chosen is not None:
        end_with(conflicts.of_yaml(path, chosen), int(os.environ.get("RANK", "0")))
    return loaded


def _say(text: str, rank: int) -> None:
    if rank == 0:
        print(text, flush=True)

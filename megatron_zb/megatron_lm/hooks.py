"""Hooks in Megatron-LM's training loop, by which it runs a schedule.

Every hook calls what it replaces until the arguments choose a schedule; so a job without
``--pipeline-schedule`` runs as if nothing had been installed. A replaced function is replaced
wherever Megatron's modules hold it, whatever they call it, and before a pretrain script copies it.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.job import data_contents, settings
from megatron_zb.job.agreement import Rendezvous
from megatron_zb.job.ending import end_with
from megatron_zb.job.shared_build import SharedBuild, build_with_cache
from megatron_zb.megatron_core import checkpoints, refusals, versions
from megatron_zb.megatron_core.refusals import Asked
from megatron_zb.megatron_lm import (
    argument_table,
    fingerprint,
    flags,
    post_validation_hooks,
    stored_placement,
)
from megatron_zb.megatron_lm.adapter_of_arguments import (
    adapter_of,
    prepare_overlap,
    without_bulk_overlap,
)
from megatron_zb.megatron_lm.post_validation_hooks import PostValidationHooks
from megatron_zb.megatron_lm.replacing import (
    always,
    replace,
    replace_method,
    replace_static,
    when,
)
from megatron_zb.megatron_lm.scheduled_run import START, ScheduledRun
from megatron_zb.megatron_lm.stage_data import StageData
from megatron_zb.parsing import flag_of
from megatron_zb.schedules.catalog import Build

_ARGUMENTS = "arguments"
_MARK = "_installed_by_megatron_zb"


def install(prepare: Callable[[Any], None] | None = None) -> None:
    """Install the hooks in this process's Megatron-LM; a second call does nothing.

    Args:
        prepare: called with the parsed arguments first, before they are checked.
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
    """The installed hooks, and the run of this process once a schedule is chosen."""

    def __init__(self) -> None:
        self.prepare: Callable[[Any], None] | None = None
        self._run: ScheduledRun | None = None
        self._shared_build: SharedBuild | None = None
        self._flags: frozenset[str] | None = None
        self._new: dict[str, Any] = {}
        self._post_validation = PostValidationHooks()

    def install(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.strategies import fully_parallel
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
        from megatron.core.transformer import transformer_block
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )
        from megatron.training import arguments, checkpointing, initialize, training

        del initialize  # imported so that what it holds is replaced, too
        replace(arguments, "add_megatron_arguments", self._add_arguments)
        replace(arguments, "validate_args", self._validate_args)
        with suppress(ModuleNotFoundError):  # it needs a package that not every checkout needs
            replace(import_module("megatron.training.yaml_arguments"), "load_yaml", _load_yaml)
        replace(checkpointing, "_load_base_checkpoint", self._load_base_checkpoint)

        module: Any
        hook: Callable[..., Any]
        scheduled = partial(when, lambda: self._run)
        for module, name, hook in (
            (parallel_state, "initialize_model_parallel", ScheduledRun.initialize_model_parallel),
            (training, "get_forward_backward_func", ScheduledRun.get_forward_backward_func),
            (transformer_block, "get_num_layers_to_build", ScheduledRun.num_layers_to_build),
            *((*place, ScheduledRun.build_chunks) for place in versions.chunk_builders()),
        ):
            replace(module, name, scheduled(hook))
        for module, name in versions.hybrid_segments():
            replace(module, name, scheduled(ScheduledRun.select_segment))
        layout_from_str = scheduled(ScheduledRun.layout_from_str)
        replace_static(PipelineParallelLayerLayout, "from_str", layout_from_str)
        create_graphs = scheduled(ScheduledRun.create_graphs)
        replace_method(TECudaGraphHelper, "create_cudagraphs", create_graphs)
        for cls, name, hook in (
            (DistributedOptimizer, checkpoints.RESHARDABLE, checkpoints.save_without_padding),
            (DistributedOptimizer, checkpoints.BOUND, checkpoints.load_bound),
            (Float16OptimizerWithFloat16Params, "load_state_dict", checkpoints.load_empty_groups),
        ):
            replace_method(cls, name, scheduled(always(hook)))

        in_a_v = partial(when, self._run_in_a_v)
        replace(training, "finalize_model_grads", in_a_v(ScheduledRun.finalize_model_grads))
        replace(fully_parallel, checkpoints.SHARING, in_a_v(always(checkpoints.share_out)))
        masters = in_a_v(always(checkpoints.leave_out_empty_groups))
        replace_method(Float16OptimizerWithFloat16Params, "sharded_state_dict", masters)
        load_apart = in_a_v(always(checkpoints.load_apart))
        replace_method(fully_parallel.FullyParallelLoadStrategyWrapper, "load", load_apart)
        self._install_in_data()
        self._post_validation.install()

    def _install_in_data(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.training import training, utils

        every = partial(when, lambda: self._stage_data(lambda run: True))
        in_a_v = partial(when, lambda: self._stage_data(_is_mirrored))
        placed = partial(when, lambda: self._stage_data(lambda run: run.stage_data.is_placed))
        for module, name, hook in (
            (parallel_state, "is_pipeline_first_stage", in_a_v(StageData.is_first_stage)),
            (utils, "is_first_or_last_pipeline_stage", placed(StageData.is_first_or_last_stage)),
            (*versions.batch_broadcast(), placed(StageData.get_batch_on_this_tp_rank)),
            (training, "dummy_train_step", every(StageData.skip_step)),
            (training, "evaluate_and_print_results", every(StageData.evaluate)),
            *((*each, every(StageData.sums_of_lengths)) for each in versions.sums_of_lengths()),
        ):
            replace(module, name, hook)
        dataset_builder = placed(StageData.dataset_builder)
        replace_method(BlendedMegatronDatasetBuilder, "__init__", dataset_builder)

    def _stage_data(self, concerned: Callable[[ScheduledRun], bool]) -> StageData | None:
        run = self._run
        return run.stage_data if run is not None and concerned(run) else None

    def _run_in_a_v(self) -> ScheduledRun | None:
        run = self._run
        return run if run is not None and _is_mirrored(run) else None

    # --- arguments

    def _add_arguments(self, original: Any, parser: Any) -> Any:
        parser = original(parser)
        self._new = argument_table.new_arguments(parser)
        flags.add_arguments(parser)
        self._flags = frozenset(parser._option_string_actions)
        return parser

    def _validate_args(self, original: Any, args: Any, *rest: Any, **defaults: Any) -> Any:
        """Let the ranks agree on the arguments, before anything that hangs where they disagree."""
        seconds = 60 * args.distributed_timeout_minutes
        end = partial(end_with, rank=args.rank)
        rendezvous = Rendezvous(args.rank, args.world_size, seconds, end=end)
        values = fingerprint.of_arguments(args, self._flags)
        validate = partial(original, args, *rest, **defaults)
        if flags.choice(args) is None:
            rendezvous.stay_away(_ARGUMENTS, values)
            self._check_unscheduled(args)
            return validate()
        rendezvous.agree(_ARGUMENTS, values, None)
        result, run, failure = None, None, None
        try:
            run = self._run = self._scheduled_run(args, rendezvous)
            result = validate()
            run.data = fingerprint.data_of(args)
            values |= fingerprint.of_run(args, run.adapter, run.data)
        except Exception as error:
            failure = error
            if self._shared_build is not None:
                self._shared_build.abandon(error)
        has_met = rendezvous.agree(START, values, failure)
        assert run is not None, "ranks do not agree on what one cannot do"
        run.not_agreed = None if has_met else values
        stored_placement.mark(args, run.adapter)
        setattr(args, data_contents.RECORD, run.data)
        _say(run.adapter.describe(), args.rank)
        return result

    def _check_unscheduled(self, args: Any) -> None:
        """End the job if an argument needs a schedule, and none is chosen."""
        try:
            self._translate(args)
            settings.check_unscheduled(args, settings.MEGATRON_LM)
        except UsageError as error:
            end_with(error, args.rank)

    def _translate(self, args: Any) -> None:
        """Prepare the arguments, and set the new ones that older ones stand for."""
        if self.prepare is not None:
            self.prepare(args)
        for line in flags.translate_older(args):
            _say(f"megatron_zb: {line}", args.rank)

    def _scheduled_run(self, args: Any, rendezvous: Rendezvous) -> ScheduledRun:
        self._translate(args)
        self._say_what_is_new(args)
        adapter = adapter_of(args, self._build_for_all(args, rendezvous))
        for line in without_bulk_overlap(args, adapter) + prepare_overlap(args):
            _say(f"megatron_zb: {line}", args.rank)
        if args.enable_optimizer_post_validation:
            self._post_validation.enable(adapter, args)
            for line in post_validation_hooks.prepare(args):
                _say(f"megatron_zb: {line}", args.rank)
        return ScheduledRun(adapter, rendezvous, args)

    def _say_what_is_new(self, args: Any) -> None:
        """Say which arguments no version that is known here has, if they are used."""
        for name, default in self._new.items():
            if getattr(args, name, default) != default:
                _say(
                    f"megatron_zb: {flag_of(name)} is new: {argument_table.UNKNOWN.why}", args.rank
                )

    def _build_for_all(self, args: Any, rendezvous: Rendezvous) -> Build:
        """Return the function that builds schedules, on one rank for all if they can meet yet."""
        build = build_with_cache(args.pipeline_schedule_cache, args.rank)
        if args.world_size == 1 or not rendezvous.is_possible:
            return build
        self._shared_build = SharedBuild(rendezvous.store, args.rank, args.world_size, build)
        return self._shared_build

    # --- checkpoints

    def _load_base_checkpoint(
        self, original: Any, load_dir: Any, args: Any, *rest: Any, **keywords: Any
    ) -> Any:
        try:
            loaded = original(load_dir, args, *rest, **keywords)
        except ValueError as error:
            why = None if self._run is None else stored_placement.other_groups(error, load_dir)
            if why is None:
                raise
            end_with(why, args.rank, speaks=True)  # rank 0 may have loaded its own
        run = self._run
        try:
            stored_placement.check(loaded, args, None if run is None else run.adapter)
            if run is not None:
                run.check_states(args, loaded[1])
                _check_data(loaded, args, run.data)
        except UsageError as error:
            end_with(error, args.rank)
        return loaded


def _is_mirrored(run: ScheduledRun) -> bool:
    return run.adapter.physical.mirrored


def _check_data(loaded: Any, args: Any, data: data_contents.Record) -> None:
    """Check that a resumed run has the same data, unless other data is allowed."""
    goes_on = not (args.finetune or args.skip_train or args.pipeline_allow_other_data)
    state, name = loaded[:2]
    if goes_on and isinstance(state, dict):
        stored = getattr(state.get("args"), data_contents.RECORD, None)
        data_contents.check_resume(stored, data, str(name))


def _load_yaml(original: Any, path: str) -> Any:
    """Load the YAML arguments, and refuse a schedule: they replace the command line unchecked."""
    loaded = original(path)
    chosen = flags.choice_in(sys.argv[1:])
    if chosen is None and getattr(loaded, "pipeline_schedule", None):
        chosen = f"pipeline_schedule: {loaded.pipeline_schedule} in it"
    if chosen is not None:
        asked = Asked(args=Namespace(yaml_cfg=path), choice=chosen, splits=False)
        for refusal in refusals.refusals(asked):
            end_with(refusal.error, int(os.environ.get("RANK", "0")))
    return loaded


def _say(text: str, rank: int) -> None:
    if rank == 0:
        print(text, flush=True)

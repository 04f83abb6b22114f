"""Hooks in Megatron-LM's training loop, by which it runs a schedule.

Every hook calls what it replaces until the arguments choose a schedule; so a job without
``--pipeline-schedule`` runs as if nothing had been installed. A replaced function is replaced
wherever Megatron's modules hold it, whatever they call it, and before a pretrain script copies it.

A method of :class:`StageData` or :class:`ScheduledRun` whose first argument is ``original`` takes
the place of that function of Megatron-LM once there is a schedule.
"""

from __future__ import annotations

import argparse
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import PrefixStore, Store

from megatron_zb.errors import UsageError, end_with
from megatron_zb.job import data_contents, settings
from megatron_zb.job.agreement import Rendezvous
from megatron_zb.job.data_contents import Record
from megatron_zb.job.shared_build import SharedBuild, build_with_cache
from megatron_zb.megatron_core import checkpoints, refusals, versions
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_core.refusals import Asked
from megatron_zb.megatron_lm import (
    adapter_run,
    argument_table,
    fingerprint,
    models,
    post_validation_hooks,
    spread_encoder,
    stored_placement,
    update_delay_hooks,
)
from megatron_zb.megatron_lm.adapter_hooks import AdapterHooks
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
from megatron_zb.megatron_lm.update_delay_hooks import UpdateDelayHooks
from megatron_zb.parsing import flag_of
from megatron_zb.schedules.catalog import Build

# --- data of the stages: which chunks read batches, and loops over them


class StageData:
    """The data of this rank's chunks."""

    def __init__(self, adapter: PipelineAdapter, args: argparse.Namespace) -> None:
        self._adapter = adapter
        self._args = args

    @property
    def is_placed(self) -> bool:
        """Whether other stages read data than those that Megatron-LM expects to."""
        return self._adapter.physical.has_other_ends or self._on_every_stage

    @property
    def _on_every_stage(self) -> bool:
        """Return whether inner stages also need batches.

        Megatron-LM leaves them without: their attention would go across documents, or they would
        read the ends of documents from nothing, and they could not count the batches of a whole
        validation set.
        """
        args = self._args
        if self._adapter.reads_on_every_stage:
            return True
        resets = args.reset_attention_mask and args.create_attention_mask_in_dataloader
        has_ends = getattr(args, "dataloader_inter_document_masking", False)  # new in 0.19
        return bool(resets or has_ends or args.full_validation)

    # --- which stages read

    def is_first_stage(
        self, original: Any, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        """Return whether this stage has the embedding, which is on the last rank in a V."""
        del original
        return self._holds(self._adapter.pre_process, None if ignore_virtual else vp_stage)

    def is_first_or_last_stage(self, original: Any, vp_stage: int | None) -> bool:
        """Return whether this stage reads data: first, last, or all stages."""
        del original
        if self._on_every_stage:
            return True
        adapter = self._adapter
        return self._holds(adapter.pre_process, vp_stage) or self._holds(
            adapter.post_process, vp_stage
        )

    def _holds(self, part: Callable[[int, int], bool], vp_stage: int | None) -> bool:
        """Return whether a chunk, or with None any chunk, of this rank has a part of the model."""
        from megatron.core import parallel_state

        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        chunks = range(self._adapter.chunks) if vp_stage is None else (vp_stage,)
        return any(part(pp_rank, chunk) for chunk in chunks)

    def get_batch_on_this_tp_rank(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Broadcast a batch as for MTP, since one rank needs tokens, labels and mask."""
        keywords["mtp_on_this_rank"] = True
        return original(*args, **keywords)

    def dataset_builder(
        self, original: Any, builder: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any
    ) -> None:
        """Build data sets also on the job's first rank, which announces whether there is data."""
        is_first = self._args.rank == 0
        original(builder, cls, sizes, lambda: is_built_on_rank() or is_first, config)

    def sums_of_lengths(self, original: Any) -> tuple[float | None, ...]:
        """Return sums over the packed sequences of a step, each counted once.

        Megatron-LM counts each in every chunk, and its log would show twice the throughput.
        """
        return tuple(each and each / self._adapter.chunks for each in original())

    # --- loops over batches

    def skip_step(self, original: Any, data_iterator: Any) -> None:
        """Read the batches of a step without a model; Megatron-LM reads only one iterator."""
        del original
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        while get_rerun_state_machine().should_run_forward_backward(data_iterator):
            for iterator in (each for each in iterators if each is not None):
                for _ in range(get_num_microbatches()):
                    next(iterator)

    def evaluate(
        self, original: Any, prefix: Any, forward_step: Any, iterators: Any, *rest: Any, **more: Any
    ) -> Any:
        """Evaluate each of several validation sets on all chunks.

        Megatron-LM makes a list of sets for each chunk, and expects a list of chunks for each set.
        """
        several = self._args.multiple_validation_sets and self._adapter.chunks > 1
        if several and None not in iterators:
            iterators = [list(of_one_set) for of_one_set in zip(*iterators, strict=True)]
        return original(prefix, forward_step, iterators, *rest, **more)


# --- the training loop in a job with a schedule


START = "start"


def name_place(build: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """Move a chunk's place from ``args`` to ``keywords`` for a builder; return the rest.

    Megatron-LM names it; mcore-bridge passes it in order.
    """
    named = list(signature(build).parameters)
    first = next((i for i, name in enumerate(named) if name in _PLACE), len(args))
    keywords |= zip(named[first:], args[first:], strict=False)
    return args[:first]


_PLACE = ("pre_process", "post_process", "vp_stage")


def _takes_stage(build: Any) -> bool:
    taken = signature(build).parameters.values()
    return any(p.name == "vp_stage" or p.kind is p.VAR_KEYWORD for p in taken)


def read_for_stages(original: Any, *args: Any, **keywords: Any) -> Any:
    """Run Megatron-LM's pretrain with a builder of datasets that also takes the chunk's stage."""
    given = signature(original).bind(*args, **keywords)
    datasets = given.arguments[_DATASETS]
    if not _takes_stage(datasets):

        def build(samples: Any, vp_stage: int | None = None) -> Any:
            return datasets(samples)

        vars(build).update(getattr(datasets, "__dict__", {}))  # whether every rank has data
        given.arguments[_DATASETS] = build
    return original(*given.args, **given.kwargs)


_DATASETS = "train_valid_test_dataset_provider"


class ScheduledRun:
    """The part of this rank in a job with a schedule."""

    def __init__(
        self, adapter: PipelineAdapter, rendezvous: Rendezvous, args: argparse.Namespace
    ) -> None:
        self.adapter = adapter
        self.stage_data = StageData(adapter, args)
        self.data: Record = {}
        """Record of the training data, once the arguments have been checked."""
        self.not_agreed: dict[str, Any] | None = None
        """Values that the ranks have not agreed on yet."""
        self._rendezvous = rendezvous
        self._args = args
        self._chunks: list[Any] = []
        self._builds = 0
        self._loads = 0
        self._failure: Exception | None = None

    # --- processes, layers and chunks

    def initialize_model_parallel(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Let the ranks agree, where they could not before, and set the embedding ranks."""
        if self.not_agreed is not None:
            self._rendezvous.agree(START, self.not_agreed, None)
        if self.adapter.embedding_ranks is not None:
            keywords["get_embedding_ranks"] = self.adapter.embedding_ranks
        return original(*args, **keywords)

    def layout_from_str(self, original: Any, layout: str, *rest: Any, **sizes: Any) -> Any:
        """Return the layout of the schedule for its own text."""
        if layout == str(self.adapter.layer_layout):
            return self.adapter.layer_layout
        return original(layout, *rest, **sizes)

    def select_segment(
        self, original: Any, pattern: str, pp_group: Any, vp_stage: int | None, **more: Any
    ) -> tuple[list[str], int]:
        """Return the layers of a hybrid model's chunk where the schedule has it."""
        del original, pp_group, more
        return self.adapter.layer_layout.segment(pattern, vp_stage)

    def num_layers_to_build(self, original: Any, config: Any, *rest: Any, **keywords: Any) -> int:
        """Return the layers of a block; an encoder is on one stage, whatever the layout."""
        if config.pipeline_model_parallel_size == 1:
            return int(config.num_layers)
        return int(original(config, *rest, **keywords))

    def build_chunks(self, original: Any, build: Any, *rest: Any, **keywords: Any) -> Any:
        """Let every chunk be built where the schedule has it."""
        self._chunks, self._failure = [], None
        self._builds += 1
        return original(self._placed(build), *rest, **keywords)

    def _placed(self, build: Any) -> Any:
        """Wrap the builder of a chunk to give embedding and output layer to the right chunks."""
        from megatron.core import parallel_state

        adapter, takes_stage = self.adapter, _takes_stage(build)

        def build_placed(*args: Any, **keywords: Any) -> Any:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
            args = name_place(build, args, keywords)
            vp_stage = keywords.get("vp_stage") if takes_stage else keywords.pop("vp_stage", None)
            keywords["pre_process"] = adapter.pre_process(pp_rank, vp_stage)
            keywords["post_process"] = adapter.post_process(pp_rank, vp_stage)
            before = [(built, models.plain_settings(built)) for built in self._chunks[-1:]]
            place = vp_stage, None if takes_stage else keywords
            with self._building_chunk(*place):
                chunk = build(*args, **keywords)
            if getattr(chunk, "vp_stage", vp_stage) is None:
                chunk.vp_stage = vp_stage
            self._check_model(chunk, before)
            if adapter.holds_encoder(pp_rank, vp_stage) and not keywords["pre_process"]:
                assert adapter.encoder is not None, "it is built into the first stage alone"
                with self._building_chunk(*place):
                    kinds = adapter.encoder.kinds
                    spread_encoder.give_encoder(chunk, build, args, keywords, kinds)
            self._chunks.append(chunk)
            if len(self._chunks) == adapter.chunks:
                self._prepare_model()
            return chunk

        return build_placed

    @contextmanager
    def _building_chunk(self, vp_stage: int | None, place: dict[str, Any] | None) -> Iterator[None]:
        """Let a builder that takes no place of a chunk ask for it, and tell others of a failure."""
        asks = vp_stage is not None and place is not None
        answering = models.answering(place or {}) if asks else nullcontext()
        naming, drawing = models.naming_chunk(vp_stage), self.adapter.drawing_weights()
        with self._failing(), drawing, naming, answering:
            yield

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Tell the other ranks of a failure to build here, so that no rank waits for another."""
        try:
            yield
        except UsageError as error:
            self._rendezvous.leave(self._building, error)
            self._rendezvous.end(error)
        except Exception as error:
            self._rendezvous.leave(self._building, error)
            raise

    def _check_model(self, chunk: Any, before: Sequence[tuple[Any, dict[str, Any]]] = ()) -> None:
        """Check a chunk, and the settings of the one built before it.

        A refusal is kept until all is built, since other ranks build along.
        """
        try:
            models.check_model(
                chunk,
                self.adapter.schedule.name,
                self.adapter.physical.has_other_ends,
                self.adapter.draws_by_layer,
            )
            for built, settings in before:
                models.check_settings(built, settings, self.adapter.schedule.name)
        except UsageError as error:
            self._failure = self._failure or error

    def _prepare_model(self) -> None:
        try:
            if self._failure is None:
                self.adapter.prepare_model(self._chunks)
        except Exception as error:
            self._failure = error
        self._rendezvous.agree(self._building, {}, self._failure)

    @property
    def _building(self) -> str:
        return f"build {self._builds}"

    # --- checkpoints

    def check_states(self, args: Any, path: str) -> None:
        """Let the first rank check the optimizer's state in a checkpoint, for all."""
        failure = None
        self._loads += 1
        if self._args.rank == 0:
            try:
                stored_placement.check_states(args, Path(path))
            except UsageError as error:
                failure = error
        self._rendezvous.agree(f"load {self._loads}", {}, failure)

    # --- the step

    def get_forward_backward_func(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Return the function that runs the schedule."""
        return self._forward_backward

    def _forward_backward(self, **arguments: Any) -> Any:
        try:
            return self.adapter.forward_backward_func(**arguments)
        except UsageError as error:
            self._rendezvous.end(error)

    def create_graphs(self, original: Any, helper: Any) -> None:
        """Capture the graphs of layers in the order of the schedule."""
        self.adapter.create_graphs(helper, original)

    def finalize_model_grads(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Also add up the gradients of the tied embedding, which are on one rank in a V."""
        return self.adapter.finalize_model_grads(*args, **keywords)


# --- the hooks


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
        self._update_delay = UpdateDelayHooks()
        self._adapters = AdapterHooks()
        self._store: Store | None = None
        """Where the ranks meet after an in-process restart."""

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
            (transformer_block, "get_num_layers_to_build", ScheduledRun.num_layers_to_build),
            *((*place, ScheduledRun.build_chunks) for place in versions.chunk_builders()),
        ):
            replace(module, name, scheduled(hook))
        replace(training, "get_forward_backward_func", self._get_forward_backward_func)
        for module, name in versions.hybrid_segments():
            replace(module, name, scheduled(ScheduledRun.select_segment))
        layout_from_str = scheduled(ScheduledRun.layout_from_str)
        replace_static(PipelineParallelLayerLayout, "from_str", layout_from_str)
        create_graphs = scheduled(ScheduledRun.create_graphs)
        replace_method(TECudaGraphHelper, "create_cudagraphs", create_graphs)
        for cls, name, hook in (
            (DistributedOptimizer, versions.RESHARDABLE, checkpoints.save_without_padding),
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
        self._update_delay.install()
        self._adapters.install()

    def _install_in_data(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.training import training, utils

        every = partial(when, lambda: self._stage_data(lambda run: True))
        in_a_v = partial(when, lambda: self._stage_data(_has_other_ends))
        placed = partial(when, lambda: self._stage_data(lambda run: run.stage_data.is_placed))
        for module, name, hook in (
            (parallel_state, "is_pipeline_first_stage", in_a_v(StageData.is_first_stage)),
            (utils, "is_first_or_last_pipeline_stage", placed(StageData.is_first_or_last_stage)),
            (*versions.batch_broadcast(), placed(StageData.get_batch_on_this_tp_rank)),
            (training, "pretrain", self._pretrain),
            (training, "dummy_train_step", every(StageData.skip_step)),
            (training, "evaluate_and_print_results", every(StageData.evaluate)),
            *((*each, every(StageData.sums_of_lengths)) for each in versions.sums_of_lengths()),
        ):
            replace(module, name, hook)
        dataset_builder = placed(StageData.dataset_builder)
        replace_method(BlendedMegatronDatasetBuilder, "__init__", dataset_builder)

    def _pretrain(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Run Megatron-LM's pretrain; at its end, say which requested profile is missing."""
        given = signature(original).bind(*args, **keywords).arguments
        restart = given.get("inprocess_call_wrapper")
        if restart is not None:
            self._begin(restart.iteration, given["store"])
        try:
            result = read_for_stages(original, *args, **keywords)
        except SystemExit:  # as at an interval after which the run ends
            self._say_what_is_missing()
            raise
        except BaseException:  # of another rank, too, where the process begins again
            if restart is not None and self._run is not None:
                self._run.adapter.abandon()
            raise
        self._say_what_is_missing()
        return result

    def _begin(self, restarts: int, store: Store) -> None:
        """Forget the run that an in-process restart has ended; the next one meets apart from it.

        Args:
            restarts: how often ``pretrain`` has been called before; it parses the arguments itself.
            store: of the job, which stands through all restarts.
        """
        self._run, self._shared_build = None, None
        self._post_validation.forget()
        self._update_delay.forget()
        self._adapters.forget()
        self._store = PrefixStore(f"megatron_zb/restart/{restarts}", store)

    def _get_forward_backward_func(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Return the function that runs the schedule; Megatron's own only if none was chosen."""
        if self._run is not None:
            return self._run.get_forward_backward_func(original, *args, **keywords)
        self._check_not_lost()
        return original(*args, **keywords)

    def _check_not_lost(self) -> None:
        """End a job that chose a schedule and has none: it would train in Megatron's own order."""
        from megatron.training.global_vars import get_args

        with suppress(AssertionError):  # a script without global arguments has chosen none
            args = get_args()
            flag = settings.chosen_flag(args) if hasattr(args, "pipeline_schedule") else None
            if flag is not None:
                lost = (
                    f"{flag} was given, but this process has lost its schedule and would train in "
                    "Megatron's own order: start the job anew, and report this as a bug"
                )
                end_with(UsageError(lost), args.rank)

    def _say_what_is_missing(self) -> None:
        line = None if self._run is None else self._run.adapter.missing_profile()
        if line is not None:
            _say(f"megatron_zb: {line}", int(os.environ.get("RANK", "0")))

    def _stage_data(self, concerned: Callable[[ScheduledRun], bool]) -> StageData | None:
        run = self._run
        return run.stage_data if run is not None and concerned(run) else None

    def _run_in_a_v(self) -> ScheduledRun | None:
        run = self._run
        return run if run is not None and _has_other_ends(run) else None

    # --- arguments

    def _add_arguments(self, original: Any, parser: Any) -> Any:
        parser = original(parser)
        self._new = argument_table.new_arguments(parser)
        settings.add_megatron_lm_arguments(parser)
        parser.error = partial(_end_for_mistake, parser, parser.error)
        self._flags = frozenset(parser._option_string_actions)
        return parser

    def _validate_args(self, original: Any, args: Any, *rest: Any, **defaults: Any) -> Any:
        """Let the ranks agree on the arguments, before anything that hangs where they disagree."""
        seconds = 60 * args.distributed_timeout_minutes
        end = partial(end_with, rank=args.rank)
        rendezvous = Rendezvous(args.rank, args.world_size, seconds, end=end, store=self._store)
        values = fingerprint.of_arguments(args, self._flags)
        validate = partial(original, args, *rest, **defaults)
        if settings.chosen_flag(args) is None:
            rendezvous.stay_away(_ARGUMENTS, values)
            self._check_unscheduled(args)
            return validate()
        rendezvous.agree(_ARGUMENTS, values, None)
        result, run, failure = None, None, None
        try:
            run = self._run = self._scheduled_run(args, rendezvous)
            result = validate()
            run.data = fingerprint.data_of(args)
            values |= fingerprint.of_run(args, run.adapter, run.data) | self._adapters.to_agree_on
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
        for line in settings.translate_older(args):
            _say(f"megatron_zb: {line}", args.rank)

    def _scheduled_run(self, args: Any, rendezvous: Rendezvous) -> ScheduledRun:
        self._translate(args)
        for name, default in self._new.items():  # arguments that no supported version has
            if getattr(args, name, default) != default:
                why = argument_table.UNKNOWN.why
                _say(f"megatron_zb: {flag_of(name)} is new: {why}", args.rank)
        run = adapter_run.prepare(args)
        adapters = None if run is None else run.adapters
        adapter = adapter_of(args, self._build_for_all(args, rendezvous), adapters=adapters)
        if run is not None:
            self._adapters.enable(adapter, run)
        for line in without_bulk_overlap(args, adapter) + prepare_overlap(args):
            _say(f"megatron_zb: {line}", args.rank)
        if args.enable_optimizer_post_validation:
            self._post_validation.enable(adapter, args)
            for line in post_validation_hooks.prepare(args):
                _say(f"megatron_zb: {line}", args.rank)
        if args.pipeline_update_delay:
            self._update_delay.enable(adapter, args)
            for line in update_delay_hooks.prepare(args):
                _say(f"megatron_zb: {line}", args.rank)
        return ScheduledRun(adapter, rendezvous, args)

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


def _has_other_ends(run: ScheduledRun) -> bool:
    return run.adapter.physical.has_other_ends


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
    chosen = settings.chosen_flag_in(sys.argv[1:])
    if chosen is None and getattr(loaded, "pipeline_schedule", None):
        chosen = f"pipeline_schedule: {loaded.pipeline_schedule} in it"
    if chosen is not None:
        asked = Asked(args=Namespace(yaml_cfg=path), choice=chosen, splits=False)
        for refusal in refusals.refusals(asked):
            end_with(refusal.error, int(os.environ.get("RANK", "0")))
    return loaded


def _end_for_mistake(
    parser: argparse.ArgumentParser, original: Callable[[str], NoReturn], message: str
) -> NoReturn:
    """End the job with one sentence for a mistyped flag of a schedule.

    Argparse would print hundreds of lines on each rank.
    """
    mistake = settings.mistake(parser, message)
    if mistake is None:
        original(message)
    end_with(mistake, int(os.environ.get("RANK", "0")))


def _say(text: str, rank: int) -> None:
    if rank == 0:
        print(text, flush=True)

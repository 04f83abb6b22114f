"""Hooks in Megatron-LM's training loop, by which it runs a schedule.

Every hook calls what it replaces until the arguments choose a schedule; so a job without
``--pipeline-schedule`` runs as if nothing had been installed. A replaced function is replaced
wherever Megatron's modules hold it, whatever they call it, and before a pretrain script copies it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.job import data_contents
from megatron_zb.job.shared_build import Build, SharedBuild, kept
from megatron_zb.megatron_lm import (
    conflicts,
    fingerprint,
    flags,
    post_validation_hooks,
    stored_placement,
)
from megatron_zb.megatron_lm.ending import end_with
from megatron_zb.megatron_lm.meeting import Meeting
from megatron_zb.megatron_lm.plan import make_plan
from megatron_zb.megatron_lm.post_validation_hooks import PostValidationHooks
from megatron_zb.megatron_lm.replacing import replace, replace_method, replace_static
from megatron_zb.schedules import catalog

_ARGUMENTS, _START = "arguments", "start"
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
    """The installed hooks, and the plan of this process once there is one."""

    def __init__(self) -> None:
        self.prepare: Callable[[Any], None] | None = None
        self._plan: Any = None
        self._shared_build: SharedBuild | None = None
        self._chunks: list[Any] = []
        self._builds = 0
        self._failure: Exception | None = None
        self._flags: frozenset[str] | None = None
        self._values: dict[str, Any] | None = None
        """Values that the ranks have not agreed on yet."""
        self._data: data_contents.Record = {}
        self._meeting: Meeting | None = None
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

        from megatron_zb.megatron_core import versions

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
        replace(parallel_state, "is_pipeline_first_stage", self._is_first_stage)
        replace(utils, "is_first_or_last_pipeline_stage", self._is_first_or_last_stage)
        replace(*versions.batch_broadcast(), self._get_batch_on_this_tp_rank)
        replace(checkpointing, "_load_base_checkpoint", self._load_base_checkpoint)
        replace_method(BlendedMegatronDatasetBuilder, "__init__", self._dataset_builder)
        replace_static(PipelineParallelLayerLayout, "from_str", self._layout_from_str)
        self._post_validation.install()

    # --- arguments

    def _add_arguments(self, original: Any, parser: Any) -> Any:
        parser = flags.add_arguments(original(parser))
        self._flags = frozenset(parser._option_string_actions)
        return parser

    def _validate_args(self, original: Any, args: Any, *rest: Any, **defaults: Any) -> Any:
        """Let the ranks agree on the arguments, before anything that hangs where they disagree."""
        self._meeting = Meeting(args.rank, args.world_size, 60 * args.distributed_timeout_minutes)
        values = fingerprint.of_arguments(args, self._flags)
        if flags.choice(args) is None:
            self._meeting.stay_away(_ARGUMENTS, values)
            self._make_plan_or_end(args)
            return original(args, *rest, **defaults)
        self._meeting.agree(_ARGUMENTS, values, None)
        result, failure = None, None
        try:
            self._make_plan(args)
            result = original(args, *rest, **defaults)
            self._data = fingerprint.data_of(args)
            values |= fingerprint.of_run(args, self._plan, self._data)
        except Exception as error:
            failure = error
            if self._shared_build is not None:
                self._shared_build.abandon(error)
        has_met = self._meeting.agree(_START, values, failure)
        self._values = None if has_met else values
        stored_placement.mark(args, self._plan)
        setattr(args, data_contents.RECORD, self._data)
        _say(self._plan.describe(), args.rank)
        return result

    def _make_plan_or_end(self, args: Any) -> None:
        try:
            self._make_plan(args)
        except UsageError as error:
            end_with(error, args.rank)

    def _make_plan(self, args: Any) -> None:
        if self.prepare is not None:
            self.prepare(args)
        lines = flags.translate_older(args)
        self._plan = make_plan(args, self._build_for_all(args))
        if args.enable_optimizer_post_validation:
            self._post_validation.enable(self._plan, args)
            lines += post_validation_hooks.prepare(args)
        for line in lines:
            _say(f"megatron_zb: {line}", args.rank)

    def _build_for_all(self, args: Any) -> Build:
        """Return the function that builds schedules, on one rank for all if they can meet yet."""
        build: Build = catalog.build
        if args.pipeline_schedule_cache is not None:
            say = partial(_say, rank=args.rank)
            folder = Path(args.pipeline_schedule_cache)
            build = kept(folder, lambda line: say(f"megatron_zb: {line}"), build)
        assert self._meeting is not None, "ranks meet before they plan"
        if args.world_size == 1 or not self._meeting.is_possible:
            return build
        self._shared_build = SharedBuild(self._meeting.store, args.rank, args.world_size, build)
        return self._shared_build

    # --- processes, layers and chunks

    def _initialize_model_parallel(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Let the ranks agree, where they could not before, and set the embedding ranks."""
        if self._values is not None and self._meeting is not None:
            self._meeting.agree(_START, self._values, None)
        if self._plan is not None and self._plan.embedding_ranks is not None:
            keywords["get_embedding_ranks"] = self._plan.embedding_ranks
        return original(*args, **keywords)

    def _layout_from_str(self, original: Any, layout: str, *rest: Any, **sizes: Any) -> Any:
        if self._plan is not None and layout == str(self._plan.layer_layout):
            return self._plan.layer_layout
        return original(layout, *rest, **sizes)

    def _build_chunks(self, original: Any, build: Any, *rest: Any, **keywords: Any) -> Any:
        if self._plan is None:
            return original(build, *rest, **keywords)
        self._chunks, self._failure = [], None
        self._builds += 1
        return original(self._placed(build), *rest, **keywords)

    def _placed(self, build: Any) -> Any:
        """Wrap the builder of a chunk to give embedding and output layer to the right chunks."""
        from megatron.core import parallel_state

        plan = self._plan

        def build_placed(*args: Any, **keywords: Any) -> Any:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
            vp_stage = keywords.get("vp_stage")
            keywords["pre_process"] = plan.pre_process(pp_rank, vp_stage)
            keywords["post_process"] = plan.post_process(pp_rank, vp_stage)
            with self._failing(), plan.drawing_weights():
                chunk = build(*args, **keywords)
            self._check_model(chunk)
            self._chunks.append(chunk)
            if len(self._chunks) == plan.chunks:
                self._prepare_model()
            return chunk

        return build_placed

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Tell the other ranks of a failure to build here, so that no rank waits for another."""
        assert self._meeting is not None, "arguments come before models"
        try:
            yield
        except UsageError as error:
            self._meeting.leave(self._building, error)
            end_with(error, int(os.environ.get("RANK", "0")))
        except Exception as error:
            self._meeting.leave(self._building, error)
            raise

    def _check_model(self, chunk: Any) -> None:
        """Check a chunk; keep a refusal until all is built, since other ranks build along."""
        try:
            conflicts.check_model(
                chunk,
                self._plan.schedule.name,
                self._plan.physical.mirrored,
                self._plan.draws_by_layer,
            )
        except UsageError as error:
            self._failure = self._failure or error

    def _prepare_model(self) -> None:
        try:
            if self._failure is None:
                self._plan.prepare_model(self._chunks)
        except Exception as error:
            self._failure = error
        assert self._meeting is not None, "arguments come before models"
        self._meeting.agree(self._building, {}, self._failure)

    @property
    def _building(self) -> str:
        return f"build {self._builds}"

    # --- data

    def _is_first_stage(
        self, original: Any, ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> Any:
        """Return whether this stage has the embedding, which is on the last rank in a V."""
        if self._plan is None or not self._plan.physical.mirrored:
            return original(ignore_virtual=ignore_virtual, vp_stage=vp_stage)
        return self._holds(self._plan.pre_process, None if ignore_virtual else vp_stage)

    def _is_first_or_last_stage(self, original: Any, vp_stage: int | None) -> Any:
        if self._plan is None or not self._plan.physical.mirrored:
            return original(vp_stage)
        plan = self._plan
        return self._holds(plan.pre_process, vp_stage) or self._holds(plan.post_process, vp_stage)

    def _holds(self, part: Callable[[int, int], bool], vp_stage: int | None) -> bool:
        """Return whether a chunk, or with None any chunk, of this rank has a part of the model."""
        from megatron.core import parallel_state

        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        chunks = range(self._plan.chunks) if vp_stage is None else (vp_stage,)
        return any(part(pp_rank, chunk) for chunk in chunks)

    def _get_batch_on_this_tp_rank(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Broadcast a batch as for MTP in a V, where one rank needs tokens and labels."""
        if self._plan is not None and self._plan.physical.mirrored:
            keywords["mtp_on_this_rank"] = True
        return original(*args, **keywords)

    def _dataset_builder(
        self, original: Any, builder: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any
    ) -> None:
        """Build data sets on the job's first rank, too, which tells all others if there is data."""
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
        return self._forward_backward

    def _forward_backward(self, **arguments: Any) -> Any:
        try:
            return self._plan.forward_backward_func(**arguments)
        except UsageError as error:
            end_with(error, int(os.environ.get("RANK", "0")))

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
            self._check_data(loaded, args)
        except UsageError as error:
            end_with(error, args.rank)
        return loaded

    def _check_data(self, loaded: Any, args: Any) -> None:
        """Check that a resumed run has the same data, unless other data is allowed."""
        goes_on = not (args.finetune or args.skip_train or args.pipeline_allow_other_data)
        state, name = loaded[:2]
        if self._plan is not None and goes_on and isinstance(state, dict):
            stored = getattr(state.get("args"), data_contents.RECORD, None)
            data_contents.check_resume(stored, self._data, str(name))


def _load_yaml(original: Any, path: str) -> Any:
    """Load the YAML arguments, and refuse a schedule: they replace the command line unchecked."""
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

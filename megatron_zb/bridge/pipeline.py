"""A schedule in a process whose program builds its model and calls Megatron's schedules itself.

The hooks are those of Megatron-LM's training loop, as far as they are Megatron core's: the same
code places and checks a model and runs a step. They can be taken back, and errors are raised.

When Megatron-Bridge imports weights, it looks for the output layer in the last chunk of the last
rank and for its tied embedding in the same chunk or on another rank. In a V the embedding is in the
first chunk, so the output layer would get memory that nothing has written.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from megatron.core import distributed, parallel_state
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.bridge import hybrid
from megatron_zb.bridge.settings import Settings
from megatron_zb.bridge.throughput import count_whole
from megatron_zb.errors import UsageError
from megatron_zb.job.agreement import Rendezvous
from megatron_zb.megatron_core import checkpoints, refusals, versions
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_core.frozen_model import FrozenModel
from megatron_zb.megatron_core.model_ends import tie_embeddings, tied_weights
from megatron_zb.megatron_core.placement import StageLayout
from megatron_zb.megatron_core.planned_steps import LengthsOf, ReadAhead
from megatron_zb.megatron_core.refusals import Asked
from megatron_zb.megatron_lm import fingerprint
from megatron_zb.megatron_lm.adapter_of_arguments import (
    DIVISION,
    adapter_of,
    asked_of,
    prepare_overlap,
)
from megatron_zb.megatron_lm.hooks import ScheduledRun, StageData
from megatron_zb.megatron_lm.replacing import (
    Undo,
    is_anybodys,
    replace,
    replace_method,
    replace_static,
)
from megatron_zb.schedules import catalog
from megatron_zb.schedules.step_plan import Lengths

IMPORTER_MODULE = "megatron.bridge.models.conversion.model_bridge"
_CLASS, _METHOD = "MegatronModelBridge", "_broadcast_shared_embeddings"


def tie_after_imports() -> Undo | None:
    """Replace how the importer ties weights; return what undoes that, nothing without importer.

    A process that has not imported Megatron-Bridge has none.
    """
    importer = getattr(sys.modules.get(IMPORTER_MODULE), _CLASS, None)
    if not hasattr(importer, _METHOD):
        return None
    return replace_method(importer, _METHOD, _tie)


def _tie_imports(adapter: PipelineAdapter) -> Undo | None:
    return tie_after_imports() if adapter.physical.mirrored else None


def _tie(original: Any, importer: Any, model: Any) -> None:
    chunks = model if isinstance(model, list) else [model]
    if tied_weights(chunks) is None:
        original(importer, model)
    else:
        tie_embeddings(chunks)


_INSTALLED = "_installed_by_megatron_zb_bridge"

# Settings of arguments and configs for the layers of a stage; a layout takes their place.
_DIVISION = (
    *DIVISION,
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)

_GROUP = "microbatch_group_size_per_vp_stage"


class Pipeline:
    """A schedule in this process, made by :func:`megatron_zb.bridge.install`.

    It is in force until it is taken back; as a context, to the context's end.
    """

    def __init__(self, settings: Settings, model: Any) -> None:
        _check_time()
        self.settings = settings
        self.steps_done = 0
        """Steps of training until now; to be set after a resume if layers have random streams."""
        args = settings.as_arguments(model, **hybrid.sizes_of(model))
        self._pattern = hybrid.pattern_of(model)
        self.adapter = adapter_of(args, steps_done=lambda: self.steps_done)
        for line in prepare_overlap(args):
            self.adapter.say(line)
        self._run = _Run(self, args)
        self.prepare(model)
        self._late = [_tie_imports, count_whole]
        self._undo = list(self._hooks())
        setattr(schedules.get_forward_backward_func, _INSTALLED, True)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is None:
            self.uninstall()
        else:  # other ranks may never come to a collective call
            self._take_back()

    def uninstall(self) -> None:
        """Take everything back that has been replaced; all ranks call it.

        The model stays the schedule's: Megatron's own schedules refuse to run it.
        """
        self._take_back()
        self.adapter.forward_backward_func.close()

    def _take_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    @property
    def is_hybrid(self) -> bool:
        """Whether a pattern gives the kinds of the model's layers."""
        return self._pattern is not None

    @property
    def virtual_pipeline_size(self) -> int | None:
        """Value for ``virtual_pipeline_model_parallel_size``, wherever a trainer requests it."""
        return self.adapter.virtual_pipeline_size

    def prepare(self, model: Any) -> None:
        """Set what Megatron's config, or what a config is made from, needs for the schedule.

        Args:
            model: as for :func:`megatron_zb.bridge.install`, of the same sizes.

        Raises:
            UsageError: its sizes are others, or it cannot be combined with the schedule.
        """
        args = self.settings.as_arguments(model, **hybrid.sizes_of(model))
        prepare_overlap(args)
        self._check_sizes(args)
        adapter, schedule = self.adapter, self.adapter.schedule
        placement = schedule.placement.of_trained
        placements, draws = (placement,), adapter.draws_by_layer
        refusals.check(asked_of(args).known(placements, draws_by_layer=draws))
        refusals.check_step(args, schedule.name, placement=placement)
        model.virtual_pipeline_model_parallel_size = adapter.virtual_pipeline_size
        if hasattr(model, _GROUP) and not _takes_group_size(schedule.name):
            setattr(model, _GROUP, 1)  # trainers round the number of microbatches up to it
        if getattr(model, "delay_wgrad_compute", False):
            model.delay_wgrad_compute = False
        if adapter.placed.needs_layout and not self.is_hybrid:
            self._set_layout(model)
        if not isinstance(model, argparse.Namespace):
            model.finalize_model_grads_func = adapter.finalize_model_grads

    def _set_layout(self, model: Any) -> None:
        """Set the layout in place of Megatron's own division of layers."""
        for name in _DIVISION:
            if hasattr(model, name):
                setattr(model, name, False if isinstance(getattr(model, name), bool) else None)
        layout = self.adapter.layer_layout
        is_namespace = isinstance(model, argparse.Namespace)  # which is written into checkpoints
        model.pipeline_model_parallel_layout = str(layout) if is_namespace else layout

    def order(
        self,
        tokens: Sequence[float],
        squares: Sequence[float] | None = None,
        *,
        shapes: Sequence[tuple[int, int]] | None = None,
        forward_only: bool = False,
    ) -> list[int]:
        """Plan the next step for the lengths of its microbatches; return the order to feed them in.

        The trainer puts its microbatches into that order: ``[batches[i] for i in order]``. What the
        step returns is in the order of feeding. Every rank calls it right before the step.

        Args:
            tokens: of each microbatch, all of its sequences together.
            squares: the sum of the squares of its sequences' lengths, for attention; if left out,
                each microbatch is one sequence.
            shapes: the sequence length and the batch size that the model computes with, for each
                microbatch, before context and sequence parallelism divide it: ``(tokens, 1)`` where
                sequences are packed, ``(longest, sequences)`` where they are padded. With them,
                ranks exchange no shapes in the step, which makes it faster.
            forward_only: the step runs no backward, such as for log-probabilities.

        Raises:
            UsageError: a length is wrong, ranks disagree, or no order keeps the memory limit.
        """
        lengths = Lengths.of(tokens, squares, shapes)
        planned = self.adapter.planned
        return list(planned.plan(lengths, keeps_order=False, forward_only=forward_only))

    def lengths(
        self,
        tokens: Sequence[float],
        squares: Sequence[float] | None = None,
        *,
        shapes: Sequence[tuple[int, int]] | None = None,
        forward_only: bool = False,
    ) -> None:
        """Plan the next step for microbatches that are fed in this order; see :meth:`order`."""
        lengths = Lengths.of(tokens, squares, shapes)
        self.adapter.planned.plan(lengths, keeps_order=True, forward_only=forward_only)

    def read_ahead(self, lengths_of: LengthsOf | None) -> None:
        """Plan every step that is not planned otherwise, from microbatches read before it.

        For trainers that pass iterators and cannot put their microbatches into an order. Results
        and random streams of layers keep the order of the iterators; gradients are summed in the
        order of the plan.

        Args:
            lengths_of: returns a microbatch's tokens, and the sum of the squares of its sequences'
                lengths; None to stop. Ranks whose iterator is None get them from the others.
        """
        self.adapter.part(ReadAhead).lengths_of = lengths_of

    def teach_with(self, teacher: FrozenModel) -> FrozenModel:
        """Run the forwards of a frozen model beside training; before the first step.

        Returns:
            The teacher, whose ``output`` the forward step of the last stage reads.

        Raises:
            UsageError: the settings have no share of a teacher.
        """
        return self.adapter.teach_with(teacher)

    def builder(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what builds one chunk, so that it is placed, checked and split.

        The result is called once for each chunk of this rank, with ``vp_stage`` where there are
        several; ``pre_process`` and ``post_process`` follow from the schedule. Data parallelism
        wraps chunks afterwards. It may build several models.
        """
        return self._run.placed(build)

    def prepare_provider(self, provider: Any) -> None:
        """Prepare a model provider of Megatron-Bridge, before or after it is finalised.

        Raises:
            UsageError: it is none, or see :meth:`prepare`.
        """
        if not callable(getattr(provider, "provide", None)):
            raise UsageError(
                f"a {type(provider).__name__} has no provide(): give a model provider, such as "
                "GPTModelProvider"
            )
        self.prepare(provider)
        provide = provider.provide
        if self.is_hybrid:
            provide = hybrid.by_chunks(provider, provide)
        provider.provide = self.builder(provide)

    def _check_sizes(self, args: argparse.Namespace) -> None:
        pattern = hybrid.pattern_of(args)
        if pattern != self._pattern:
            raise UsageError(
                f"the hybrid layer pattern of the model is {pattern}, but the schedule was "
                f"installed for {self._pattern}: install it with a model that has the same pattern"
            )
        layers = "".join(self.adapter.layer_layout.letters)
        sizes = {
            "num_layers": (args.num_layers, layers.count("t")),
            "mtp_num_layers": (args.mtp_num_layers or 0, layers.count("m")),
            "pipeline_model_parallel_size": (
                args.pipeline_model_parallel_size,
                self.adapter.schedule.placement.pipeline_size,
            ),
        }
        for name, (found, expected) in sizes.items():
            if found != expected:
                raise UsageError(
                    f"{name} of the model is {found}, but the schedule was installed for {expected}"
                )

    def _hook_late(self) -> None:
        """Replace parts of Megatron-Bridge, which may be here only by now."""
        undone = {hook: hook(self.adapter) for hook in self._late}
        self._late = [hook for hook, undo in undone.items() if undo is None]
        self._undo += [undo for undo in undone.values() if undo is not None]

    def _hooks(self) -> Iterator[Undo]:
        run = self._run
        everywhere = partial(replace, holds=is_anybodys)
        yield everywhere(schedules, "get_forward_backward_func", run.get_forward_backward_func)
        yield everywhere(parallel_state, "initialize_model_parallel", run.initialize_model_parallel)
        yield replace_static(PipelineParallelLayerLayout, "from_str", run.layout_from_str)
        yield replace_method(TECudaGraphHelper, "create_cudagraphs", run.create_graphs)
        for module, name in versions.hybrid_segments() if self.is_hybrid else ():
            yield everywhere(module, name, run.select_segment)
        yield replace_method(
            DistributedOptimizer, versions.RESHARDABLE, checkpoints.save_without_padding
        )
        yield replace_method(DistributedOptimizer, checkpoints.BOUND, checkpoints.load_bound)
        mirrored, encodes = self.adapter.physical.mirrored, self.adapter.second_model is not None
        if mirrored or encodes:
            yield replace(
                pipeline_utils,
                "is_pp_first_stage",
                partial(_reads_as_first, self.adapter, run.stage_data),
                _asks_for_embedding,
            )
        if mirrored:
            stages = run.stage_data
            yield everywhere(distributed, "finalize_model_grads", run.finalize_model_grads)
            yield everywhere(parallel_state, "is_pipeline_first_stage", stages.is_first_stage)
            yield replace(fully_parallel, checkpoints.SHARING, checkpoints.share_out)
            wrapper = fully_parallel.FullyParallelLoadStrategyWrapper
            yield replace_method(wrapper, "load", checkpoints.load_apart)


def _reads_as_first(adapter: PipelineAdapter, stages: StageData, original: Any, group: Any) -> bool:
    """Return whether a rank reads what the first stage reads: it has that, or runs an encoder."""
    if adapter.is_encoding:
        return True
    return stages.is_first_stage(original) if adapter.physical.mirrored else original(group)


def _asks_for_embedding(module: str) -> bool:
    """Return whether a module lets the first stage find the rank of the embedding.

    Megatron core's own also ask it for the neighbours of a rank.
    """
    return is_anybodys(module) and (
        module == pipeline_utils.__name__ or not module.startswith("megatron.core.")
    )


def _takes_group_size(name: str) -> bool:
    """Return whether the number of microbatches must be divisible by a group size."""
    return name not in catalog.names() or catalog.family(name).takes_group_size


def _check_time() -> None:
    if parallel_state.is_initialized():
        raise UsageError(
            "the schedule was installed after initialize_model_parallel, which has to know of it: "
            "install it before"
        )
    if hasattr(schedules.get_forward_backward_func, _INSTALLED):
        raise UsageError(
            "a schedule is installed in this process already: take it back before installing "
            "another"
        )


# Wrappers of a chunk, by the arguments of Megatron-LM that ask for them.
_WRAPPERS = {
    "FullyShardedDataParallel": "use_megatron_fsdp",
    "TorchFullyShardedDataParallel": "use_torch_fsdp2",
}


class _Run(ScheduledRun):
    """The part of this rank: as in Megatron-LM's loop, and nothing else may run its chunks."""

    def __init__(self, pipeline: Pipeline, args: argparse.Namespace) -> None:
        adapter = pipeline.adapter
        rendezvous = Rendezvous(-1, -1, 60 * args.distributed_timeout_minutes)
        super().__init__(adapter, rendezvous, args)
        self._pipeline = pipeline
        self.not_agreed = pipeline.settings.as_values() | fingerprint.of_run(args, adapter, {})
        self._placed_chunks: WeakSet[Any] = WeakSet()
        self._is_running = False

    def initialize_model_parallel(self, original: Any, *args: Any, **keywords: Any) -> Any:
        """Let the ranks agree; set the embedding ranks and the number of chunks."""
        p = self.adapter.schedule.placement.pipeline_size
        given = inspect.signature(original).bind(*args, **keywords).arguments
        if given.get("pipeline_model_parallel_size", 1) != p:
            raise UsageError(
                "initialize_model_parallel has the pipeline_model_parallel_size "
                f"{given.get('pipeline_model_parallel_size', 1)}, but the schedule was installed "
                f"for {p}"
            )
        given["virtual_pipeline_model_parallel_size"] = self.adapter.virtual_pipeline_size
        self._rendezvous.begin("megatron_zb/bridge")
        result = super().initialize_model_parallel(original, **given)
        self.not_agreed = None
        return result

    def placed(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the builder of a chunk."""
        return self._placed(build)

    def _check_model(self, chunk: Any, before: Sequence[tuple[Any, dict[str, Any]]] = ()) -> None:
        super()._check_model(chunk, before)
        layout, ours = chunk.config.pipeline_model_parallel_layout, self.adapter.layer_layout
        if self._failure is not None or self._pipeline.is_hybrid:
            return  # of a hybrid model, the schedule itself has chosen the layers
        if not self.adapter.placed.needs_layout:
            self._check_division(chunk.config)
        elif (type(layout), str(layout)) != (StageLayout, str(ours)):
            self._failure = UsageError(
                f"the model was built with the layer layout {layout}, not with that of the "
                f"schedule, {ours}: prepare its config before it is built"
            )

    def _check_division(self, config: Any) -> None:
        """Check that Megatron's own division of layers is the one that the schedule expects."""
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        expected = self.adapter.layer_layout.letters[pp_rank].count("t")
        found = get_num_layers_to_build(config)
        if found != expected:
            self._failure = UsageError(
                f"the model was built with {found} layers, but the schedule was installed for "
                f"{expected} on this rank: prepare its config before it is built"
            )

    def _prepare_model(self) -> None:
        super()._prepare_model()
        self._pipeline._hook_late()
        for chunk in self._chunks:
            self._placed_chunks.add(chunk)
            chunk.register_forward_pre_hook(self._refuse_others)
        self._chunks, self._builds = [], self._builds + 1

    def _refuse_others(self, chunk: Any, inputs: Any) -> None:
        if not self._is_running:
            raise UsageError(
                f"a chunk of the pipeline schedule {self.adapter.schedule.name} was run by "
                "something else, which has its stages in another order: run it with what "
                "get_forward_backward_func() returns while the schedule is installed"
            )

    def _forward_backward(self, **arguments: Any) -> Any:
        model = arguments["model"]
        self._check_chunks(model if isinstance(model, list) else [model])
        self._is_running = True
        try:
            result = super()._forward_backward(**arguments)
        finally:
            self._is_running = False
        self._pipeline.steps_done += not arguments.get("forward_only", False)
        return result

    def _check_chunks(self, chunks: list[Any]) -> None:
        """Check that the chunks are those of a model of the schedule, and how they are wrapped."""
        for chunk in chunks:
            wrapper = type(chunk).__name__
            if wrapper in _WRAPPERS:
                args = argparse.Namespace(**{_WRAPPERS[wrapper]: True})
                choice = f"the pipeline schedule {self.adapter.schedule.name}"
                refusals.check(Asked(args=args, choice=choice))
        found = [get_attr_wrapped_model(c, "pre_process", return_model_obj=True) for c in chunks]
        if len(found) != self.adapter.chunks or any(c not in self._placed_chunks for c in found):
            raise UsageError(
                f"the pipeline schedule {self.adapter.schedule.name} runs the "
                f"{self.adapter.chunks} chunks of a model whose builder was wrapped: wrap the "
                "builder of every model of this process, or take the schedule back"
            )

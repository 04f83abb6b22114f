"""Megatron-LM's training loop in a job with a schedule: each method takes the place of a function.

Its first argument is the function that it replaces.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.job.agreement import Rendezvous
from megatron_zb.job.data_contents import Record
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_lm import models, stored_placement
from megatron_zb.megatron_lm.stage_data import StageData

START = "start"


def name_place(build: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    """Move what tells a builder of a chunk's place from ``args`` to ``keywords``; return the rest.

    Megatron-LM names it; mcore-bridge passes it in order.
    """
    named = list(signature(build).parameters)
    first = next((i for i, name in enumerate(named) if name in _PLACE), len(args))
    keywords |= zip(named[first:], args[first:], strict=False)
    return args[:first]


_PLACE = ("pre_process", "post_process", "vp_stage")


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
        """Return the layers of a block; an encoder has all of its own, whatever the layout."""
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

        adapter = self.adapter
        with self._failing():
            self._check_builder(build)

        def build_placed(*args: Any, **keywords: Any) -> Any:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
            args = name_place(build, args, keywords)
            vp_stage = keywords.get("vp_stage")
            keywords["pre_process"] = adapter.pre_process(pp_rank, vp_stage)
            keywords["post_process"] = adapter.post_process(pp_rank, vp_stage)
            with self._failing(), adapter.drawing_weights():
                chunk = build(*args, **keywords)
            self._check_model(chunk)
            self._chunks.append(chunk)
            if len(self._chunks) == adapter.chunks:
                self._prepare_model()
            return chunk

        return build_placed

    def _check_builder(self, build: Any) -> None:
        name, chunks = self.adapter.schedule.name, self.adapter.chunks
        taken = signature(build).parameters.values()
        if chunks > 1 and not any(p.name == "vp_stage" or p.kind is p.VAR_KEYWORD for p in taken):
            raise UsageError(
                f"--pipeline-schedule {name} has {chunks} chunks per rank, and the script's model "
                "provider takes no vp_stage to tell them apart: use a schedule with one chunk per "
                "rank, such as zb-h1"
            )

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

    def _check_model(self, chunk: Any) -> None:
        """Check a chunk; keep a refusal until all is built, since other ranks build along."""
        try:
            models.check_model(
                chunk,
                self.adapter.schedule.name,
                self.adapter.physical.mirrored,
                self.adapter.draws_by_layer,
            )
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
        """Add up the gradients of the tied embedding, too, which are on one rank in a V."""
        return self.adapter.finalize_model_grads(*args, **keywords)

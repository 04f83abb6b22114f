"""Logical stages on Megatron's ranks and virtual stages.

Megatron reports the loss from its last pipeline rank. A V ends where it begins, on logical rank 0,
so it is laid onto the ranks in mirror image: logical rank i is physical rank p-1-i. Then the
embedding, the output layer and the loss all live on physical rank p-1, and the last chunk has
Megatron's own mapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_zb.errors import UsageError
from megatron_zb.schedules.placement import Placement


@dataclass(frozen=True)
class PhysicalPlacement:
    """A placement on Megatron's pipeline ranks; ``vp_stage`` is the chunk index."""

    placement: Placement

    @property
    def mirrored(self) -> bool:
        return self.placement.rank_of[-1] != self.placement.pipeline_size - 1

    def logical(self, pp_rank: int) -> int:
        """The logical rank of a physical pipeline rank, and the other way round."""
        return self.placement.pipeline_size - 1 - pp_rank if self.mirrored else pp_rank

    def stage(self, pp_rank: int, vp_stage: int | None) -> int:
        """The stage that a chunk of a physical rank holds."""
        return self.placement.stages_of[self.logical(pp_rank)][vp_stage or 0]

    def holds_embedding(self, pp_rank: int, vp_stage: int | None) -> bool:
        return self.stage(pp_rank, vp_stage) == 0

    def holds_output(self, pp_rank: int, vp_stage: int | None) -> bool:
        return self.stage(pp_rank, vp_stage) == self.placement.num_stages - 1


class StageLayout(PipelineParallelLayerLayout):
    """Megatron's layer layout for any placement: ``segments[s]`` are the layers of stage s."""

    def __init__(self, segments: list[list[LayerType]], physical: PhysicalPlacement) -> None:
        placement = physical.placement
        self._physical = physical
        self._segments = segments
        by_virtual_stage = [
            list(segments[physical.stage(pp_rank, vp_stage)])
            for vp_stage in range(placement.chunks)
            for pp_rank in range(placement.pipeline_size)
        ]
        super().__init__(by_virtual_stage, placement.pipeline_size)
        self.flatten_layout = [layer for segment in segments for layer in segment]

    def __repr__(self) -> str:
        return layout_text(self._segments)

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Layers of a type before the given chunk, in model order."""
        if pp_rank is None:
            from megatron.core import parallel_state

            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        stage = self._physical.stage(pp_rank, vp_stage)
        return sum(segment.count(layer_type) for segment in self._segments[:stage])


_LETTERS = {
    LayerType.embedding: "E",
    LayerType.decoder: "t",
    LayerType.mtp: "m",
    LayerType.loss: "L",
}


def layout_text(segments: list[list[LayerType]]) -> str:
    """The layers of every stage in model order, such as ``Ett|tt|tt|ttL``."""
    return "|".join("".join(_LETTERS[layer] for layer in segment) for segment in segments)


@dataclass(frozen=True)
class Layers:
    """What has to be placed on the stages of a pipeline.

    ``embedding`` and ``output`` say for how many decoder layers the embedding and the output layer
    count when layers are shared out; ``first`` and ``last`` fix the layers of the first and the
    last stage. ``multi_token`` prediction layers stand before the output layer.
    """

    decoder: int
    multi_token: int = 0
    embedding: int = 0
    output: int = 0
    first: int | None = None
    last: int | None = None


def spread(layers: Layers, placement: Placement) -> list[list[LayerType]]:
    """The layers of every stage, in model order, as evenly as they go.

    Where they do not divide, the ranks that hold the embedding and the output layer have less.

    Raises:
        UsageError: there are fewer layers than stages, or ``first`` and ``last`` leave a stage
            without any.
    """
    counts = _share_out(layers, placement)
    if min(counts) < 1 or sum(counts) != layers.decoder:
        raise UsageError(
            f"{layers.decoder} layers cannot be placed on {placement.num_stages} stages with at "
            f"least one on each{_said_ends(layers)}: give more layers, or say the layers of each "
            "stage with a pipeline layer layout"
        )
    return segments_of(counts, layers)


def segments_of(counts: Sequence[int], layers: Layers) -> list[list[LayerType]]:
    """The layers of every stage, of which each has so many decoder layers."""
    segments = [[LayerType.decoder] * count for count in counts]
    segments[0].insert(0, LayerType.embedding)
    segments[-1] += [LayerType.mtp] * layers.multi_token + [LayerType.loss]
    return segments


def is_stock(segments: list[list[LayerType]], layers: Layers, placement: Placement) -> bool:
    """Whether Megatron by itself has these layers on these ranks.

    It has one chunk on a rank, and as many layers on one as on another, where the ends of the model
    count as ``layers`` says; if those of the first or last rank are fixed, the others are alike.
    """
    load = [segment.count(LayerType.decoder) for segment in segments]
    load[0] += layers.embedding
    load[-1] += layers.output
    fixed = {0: layers.first, len(load) - 1: layers.last}
    alike = {n for stage, n in enumerate(load) if fixed.get(stage) is None}
    return placement.chunks == 1 and len(alike) <= 1


def _share_out(layers: Layers, placement: Placement) -> list[int]:
    """Decoder layers of each stage: one at a time, to the stage that counts for the least."""
    last = placement.num_stages - 1
    fixed = {s: n for s, n in ((0, layers.first), (last, layers.last)) if n is not None}
    counts = [fixed.get(stage, 0) for stage in range(placement.num_stages)]
    load = [0] * placement.num_stages
    load[0] += layers.embedding
    load[last] += layers.output
    open_stages = [s for s in range(placement.num_stages) if s not in fixed]
    ends = {placement.rank_of[0], placement.rank_of[last]}
    on_rank = [0] * placement.pipeline_size

    def preference(stage: int) -> tuple[int, bool, int, int]:
        rank = placement.rank_of[stage]
        return load[stage], rank in ends, on_rank[rank], stage

    for _ in range(layers.decoder - sum(counts) if open_stages else 0):
        stage = min(open_stages, key=preference)
        load[stage] += 1
        counts[stage] += 1
        on_rank[placement.rank_of[stage]] += 1
    return counts


def _said_ends(layers: Layers) -> str:
    ends = (("first", layers.first), ("last", layers.last))
    said = [f"{count} on the {name}" for name, count in ends if count is not None]
    return f" and {' and '.join(said)}" if said else ""


def segments_from_layout(layout: str, layers: Layers, num_stages: int) -> list[list[LayerType]]:
    """Read a layout such as ``Ett|tt|tt|ttL``: one segment for each stage, in model order.

    Raises:
        UsageError: a letter is unknown, or stages, layers, embedding or loss do not add up.
    """
    try:
        segments = PipelineParallelLayerLayout.parse_str_to_list(layout)
    except (AssertionError, ValueError) as error:
        raise UsageError(
            f"pipeline layer layout '{layout}': use E, t, m, L and |, such as 'Ett|tt|tt|ttL'"
        ) from error
    flat = [layer for segment in segments for layer in segment]
    problem = None
    if len(segments) != num_stages:
        problem = f"it names {len(segments)} stages and the schedule has {num_stages}"
    elif flat.count(LayerType.decoder) != layers.decoder:
        problem = (
            f"it names {flat.count(LayerType.decoder)} layers and the model has {layers.decoder}"
        )
    elif flat.count(LayerType.mtp) != layers.multi_token:
        problem = (
            f"it names {flat.count(LayerType.mtp)} multi-token prediction layers (m) and the model "
            f"has {layers.multi_token}"
        )
    elif segments[-1].count(LayerType.mtp) != layers.multi_token:
        problem = "multi-token prediction layers (m) must be on the last stage, before L"
    elif not flat or flat[0] is not LayerType.embedding or flat[-1] is not LayerType.loss:
        problem = "it must begin with E and end with L"
    elif flat.count(LayerType.embedding) != 1 or flat.count(LayerType.loss) != 1:
        problem = "E and L must each stand in it once"
    if problem:
        raise UsageError(f"pipeline layer layout '{layout}': {problem}")
    return segments

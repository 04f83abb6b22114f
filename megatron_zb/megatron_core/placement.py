"""Logical stages on Megatron's ranks and virtual stages, and what a job prints of them.

Megatron reports the loss from its last pipeline rank. A V ends where it begins, on logical rank 0,
so it is laid onto the ranks in mirror image: logical rank i is physical rank p-1-i. Then the
embedding, the output layer and the loss all live on physical rank p-1, and the last chunk has
Megatron's own mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_zb.measured.balance import TRANSFER, Balance, balanced
from megatron_zb.megatron_core.current_schedule import JobSizes
from megatron_zb.schedules import layout
from megatron_zb.schedules.costs import Costs, filled
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.second_model import SecondModelRules
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.layout import Letters
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import Timeline

_F, _B, _W = PassKind.F, PassKind.B, PassKind.W


@dataclass(frozen=True, slots=True)
class PhysicalPlacement:
    """A placement on Megatron's pipeline ranks; ``vp_stage`` is the chunk index.

    It has slots, since Megatron-Bridge assigns anew whatever a config holds in a ``__dict__``,
    before it sends the config to other ranks.
    """

    placement: Placement

    @property
    def mirrored(self) -> bool:
        return self.placement.mirrored

    @property
    def has_other_ends(self) -> bool:
        """Whether an end of the model is on a rank where Megatron does not look for it."""
        return self.mirrored or self.placement.copies > 1

    def logical(self, pp_rank: int) -> int:
        """Return the logical rank of a physical pipeline rank, or the physical of a logical one."""
        return self.placement.pipeline_rank(pp_rank)

    def pipeline_ranks(self, pp_group: dist.ProcessGroup) -> list[int]:
        """Return the global ranks of a pipeline in logical order."""
        ranks = dist.get_process_group_ranks(pp_group)
        return ranks[::-1] if self.mirrored else ranks

    def stage(self, pp_rank: int, vp_stage: int | None) -> int:
        """Return the stage that a chunk of a physical rank holds."""
        return self.placement.stages_of[self.logical(pp_rank)][vp_stage or 0]

    def stage_of_model(self, pp_rank: int, vp_stage: int | None) -> int:
        """Return the place in the model of the stage that a chunk of a physical rank holds."""
        return self.placement.stage_of_model(self.stage(pp_rank, vp_stage))

    def holds_embedding(self, pp_rank: int, vp_stage: int | None) -> bool:
        return self.stage_of_model(pp_rank, vp_stage) == 0

    def holds_output(self, pp_rank: int, vp_stage: int | None) -> bool:
        return self.stage_of_model(pp_rank, vp_stage) == self.placement.stages_of_model - 1


_TYPES = {
    "E": LayerType.embedding,
    "t": LayerType.decoder,
    "m": LayerType.mtp,
    "L": LayerType.loss,
}


class StageLayout(PipelineParallelLayerLayout):
    """Megatron's layer layout for any placement: ``letters[s]`` are the layers of stage s.

    Copies of the model have the same layers.
    """

    def __init__(self, letters: Letters, physical: PhysicalPlacement) -> None:
        placement = physical.placement
        self.physical = physical
        self.letters = letters
        segments = [[_TYPES[letter] for letter in of_stage] for of_stage in letters]
        by_virtual_stage = [
            list(segments[physical.stage_of_model(pp_rank, vp_stage)])
            for vp_stage in range(placement.chunks)
            for pp_rank in range(placement.pipeline_size)
        ]
        super().__init__(by_virtual_stage, placement.pipeline_size)
        self._segments = segments
        self.flatten_layout = [layer for segment in segments for layer in segment]

    def __repr__(self) -> str:
        return layout.text(self.letters * self.physical.placement.copies)

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Count the layers of a type before the given chunk, in model order."""
        if pp_rank is None:
            from megatron.core import parallel_state

            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        stage = self.physical.stage_of_model(pp_rank, vp_stage)
        return sum(segment.count(layer_type) for segment in self._segments[:stage])

    def segment(self, pattern: str, vp_stage: int | None) -> tuple[list[str], int]:
        """Cut the layers of a chunk of this rank out of a hybrid model's pattern.

        Returns:
            The letters of its layers, and how many layers come before them in the model.
        """
        offset = self.get_layer_offset(vp_stage=vp_stage)
        count: int = self.get_num_layers_to_build(vp_stage=vp_stage)
        return list(pattern.replace("|", "")[offset : offset + count]), offset


class ModelPlacement:
    """The layers of a model on the stages of a schedule, and the stages on Megatron's ranks.

    Args:
        letters: the layers of every stage.
        balance: the balance by which they were placed, if any.
        keeps_places: every rank holds the layers that it has in Megatron without a schedule.
        needs_layout: Megatron places the layers so only with a layout in its config.
    """

    def __init__(
        self,
        placement: Placement,
        letters: Letters,
        balance: Balance | None = None,
        *,
        keeps_places: bool = False,
        needs_layout: bool = True,
    ) -> None:
        self.physical = PhysicalPlacement(placement)
        self.layout = StageLayout(letters, self.physical)
        self.balance, self.keeps_places = balance, keeps_places
        self.needs_layout = needs_layout

    @classmethod
    def of(cls, sizes: JobSizes, schedule: Schedule) -> ModelPlacement:
        """Place the layers of a model on a schedule.

        Raises:
            UsageError: they cannot be placed.
        """
        layers, written, placement = sizes.layers, sizes.layer_layout, schedule.placement.of_trained
        letters = placed_letters(sizes, placement.of_one_copy)
        if isinstance(written, str):
            return cls(placement, letters, keeps_places=placement.chunks == 1)
        balance = None if written is None else balanced(layers.decoder, schedule, written)
        if balance is not None:
            letters = layout.lettered(balance.layers, layers.multi_token)
        keeps_places = layout.is_megatrons(letters, layers, placement)
        return cls(
            placement,
            letters,
            balance,
            keeps_places=keeps_places,
            needs_layout=not keeps_places,
        )

    @property
    def chunks(self) -> int:
        """The number of model chunks of a rank."""
        return self.physical.placement.chunks


def placed_letters(sizes: JobSizes, placement: Placement) -> Letters:
    """Return the layers of each stage as they are written, or else evenly spread.

    Raises:
        UsageError: there are too few layers, or those written are not those of the model.
    """
    layers, written = sizes.layers, sizes.layer_layout
    if isinstance(written, str):
        return layout.read(written, layers, placement.num_stages)
    share = layout.spread if written is None else layout.balanced
    return layout.lettered(share(layers, placement), layers.multi_token)


# --- the lines that a job prints at its start: its schedule, its ranks and what to expect


@dataclass(frozen=True)
class StartReport:
    """A schedule on the ranks of a job, in words."""

    timeline: Timeline
    costs: Costs
    layout: StageLayout
    bubble_rate: float

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    def text(self, balance: Balance | None, more: Sequence[str]) -> str:
        """Return all lines.

        Args:
            balance: the balance by which layers were placed, if any.
            more: lines to add at the end.
        """
        schedule, placement = self.schedule, self.schedule.placement.of_trained
        sizes = schedule.rules.sizes_in_words(schedule)
        head = (
            f"pipeline schedule {schedule.name}: {placement.pipeline_size} ranks x "
            f"{placement.chunks} chunks, {sizes}, expected "
            f"bubble {100 * self.bubble_rate:.1f} % at {self._known_costs()}"
        )
        lines = [
            *self._ranks(),
            *([str(balance)] if balance else ()),
            *self._describe_passes(),
            *more,
        ]
        return "\n".join([head, *(f"  {line}" for line in lines)])

    def _ranks(self) -> Iterator[str]:
        placement, physical = self.schedule.placement.of_trained, self.layout.physical
        p = placement.pipeline_size
        for pp_rank in range(p):
            held = " + ".join(
                self._stage(physical.stage(pp_rank, chunk)) for chunk in range(placement.chunks)
            )
            peak = self.timeline.peak_microbatches[physical.logical(pp_rank)]
            yield (
                f"pipeline rank {pp_rank}: {held}; activations of at most {peak:.6g} microbatches "
                f"({peak / p:.2f} of 1F1B's first rank)"
            )
        if self.costs.feature(Vocabulary) is not None:
            yield "every pipeline rank: its rows of the embedding and the output layer"
        if isinstance(self.schedule.rules, SecondModelRules):
            yield self.schedule.rules.second.place_in_words

    def _stage(self, stage: int) -> str:
        letters = self.layout.letters
        stage = self.schedule.placement.of_trained.stage_of_model(stage)
        first = "".join(letters[:stage]).count("t") + 1
        count = letters[stage].count("t")
        parts = [f"layers {first}-{first + count - 1}"] if count else []
        if self.costs.feature(Vocabulary) is None:
            parts = ["embedding"] * ("E" in letters[stage]) + parts
            parts += ["output layer"] * ("L" in letters[stage])
        return f"stage {stage} ({', '.join(parts) or 'empty'})"

    def _describe_passes(self) -> Iterator[str]:
        """Describe the pairs of passes, and the recomputed and offloaded activations."""
        schedule, costs = self.schedule, self.costs
        forwards = schedule.num_microbatches * schedule.placement.num_stages
        if costs.feature(Communication):
            yield f"{len(schedule.pairs)} of {forwards} forwards run in one pass with a backward"
        if costs.feature(Recomputation) or schedule.recomputed:
            yield (
                f"{len(schedule.recomputed)} of {forwards} forwards keep their input alone; their "
                "activations are computed again"
            )
        offload = costs.feature(Offload)
        if offload or schedule.offloaded:
            line = f"{len(schedule.offloaded)} of {forwards} activations move to the host and back"
            if offload:
                passes = sum(sum(costs.seconds[kind]) for kind in (_F, _B, _W))
                share = sum(filled(offload.seconds)) / passes
                line += f"; a copy counts as {share:.0%} of its passes"
            yield line

    def _known_costs(self) -> str:
        costs = self.costs
        known = "equal costs" if len(set(costs.seconds[_F])) == 1 else "costs counted from sizes"
        if self.schedule.name == "auto":
            known += f" and transfers of {TRANSFER:.0%} of a forward"
        if communication := costs.feature(Communication):
            share = sum(filled(communication.forward)) / sum(costs.seconds[_F])
            known += f" and an expert all-to-all of {share:.0%} of a forward"
        return known

"""The parts of the steps of a job, in the order in which steps call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.connections import ChannelsPart, WatchPart
from megatron_zb.megatron_core.copies import CopiesPart
from megatron_zb.megatron_core.current_schedule import CurrentSchedule
from megatron_zb.megatron_core.data_iterators import ReadingsPart
from megatron_zb.megatron_core.data_parallel import DataParallelPart
from megatron_zb.megatron_core.encoder_ahead import EncoderAheadPart
from megatron_zb.megatron_core.experts import ExpertMetricsPart, OverlapPart, PagedStashPart
from megatron_zb.megatron_core.forward_state import StatePart
from megatron_zb.megatron_core.frozen_model import FrozenModelPart
from megatron_zb.megatron_core.graphs import GraphsPart
from megatron_zb.megatron_core.late_updates import DelayedPart
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.planned_steps import PlannedLengths, ReadAhead
from megatron_zb.megatron_core.profiled_steps import ProfilePart
from megatron_zb.megatron_core.shared_pipeline import SharedPipelinePart
from megatron_zb.megatron_core.slices import SlicesPart
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.spread_encoder import EncoderPart
from megatron_zb.megatron_core.stages import OffloadPart, StreamsPart
from megatron_zb.megatron_core.step import StepPart
from megatron_zb.megatron_core.telemetry import SpansPart
from megatron_zb.megatron_core.verification import UnsplitLayers, Verification
from megatron_zb.megatron_core.vocabulary import VocabularyPart
from megatron_zb.megatron_core.warm_up import WarmUp
from megatron_zb.schedules.features.second_model import SecondModel, SecondRole
from megatron_zb.schedules.features.vocabulary import Vocabulary

_Part = TypeVar("_Part", bound=StepPart)

# Contexts nest in this order, and the calls after a step come in the reverse order.
_ORDER: tuple[type[StepPart], ...] = (
    ReadAhead,  # plans the step: no part above may ask for the program before it
    PlannedLengths,
    ExpertMetricsPart,
    UnsplitLayers,
    WarmUp,  # runs passes before the first step, outside of the contexts of the parts below
    Verification,  # rehearses the first step, outside of the contexts of the parts below
    ProfilePart,  # switches the schedule: no part above may ask for the program before a step
    StreamsPart,
    GraphsPart,
    PagedStashPart,
    ReadingsPart,
    CopiesPart,  # chooses of what the readings give; adds up what the parts below have summed
    EncoderPart,  # as the part above
    EncoderAheadPart,  # likewise
    FrozenModelPart,
    VocabularyPart,  # its stages run the forwards of the stages of the parts below
    SlicesPart,  # cuts what the readings give
    SharedPipelinePart,
    DelayedPart,  # chooses the call: no part above may ask for the program before a step
    ChannelsPart,  # passes on the counter of activations, which a profile may have replaced
    WatchPart,
    SpansPart,
    DataParallelPart,
    OverlapPart,
    OffloadPart,
    StatePart,  # for the stages that recompute, which the part above tells
)


def _part_of_second(
    second: SecondModel, physical: PhysicalPlacement, splits: Sequence[SplitBackward]
) -> StepPart:
    """Return the part that runs a second model.

    Raises:
        UsageError: such a model is shown and simulated, and cannot be trained with.
    """
    if second.role is SecondRole.ENCODER and second.copies:
        return EncoderPart(physical, splits)
    if second.role is SecondRole.AHEAD and second.copies and second.pieces == 1:
        return EncoderAheadPart(physical, splits)
    if second.role is SecondRole.TEACHER and not second.copies and second.pieces == 1:
        return FrozenModelPart(physical)
    raise UsageError(
        f"training runs no {second.role.value} as {second.layout_in_words}: give an encoder "
        "with a copy on each rank, or a teacher whose layers are cut over the ranks in "
        "one piece each"
    )


class PartList:
    """At most one part of each type; those that need no option are there from the beginning."""

    def __init__(
        self,
        physical: PhysicalPlacement,
        current: CurrentSchedule,
        splits: Sequence[SplitBackward] = (),
    ) -> None:
        self._found: dict[type[StepPart], StepPart] = {}
        without_options = (
            ExpertMetricsPart,
            GraphsPart,
            PagedStashPart,
            ReadingsPart,
            ChannelsPart,
            WatchPart,
            SpansPart,
            DataParallelPart,
            OverlapPart,
            OffloadPart,
            StatePart,
        )
        for kind in without_options:
            self.add(kind())
        shares_output = current.costs.feature(Vocabulary) is not None
        if shares_output:
            vocabulary = VocabularyPart(physical)
            self.add(vocabulary)
            self.add(DataParallelPart(vocabulary.weight_passes))
        if physical.placement.copies > 1:
            self.add(CopiesPart(physical))
        second = current.second_model
        if second is not None:
            self.add(_part_of_second(second, physical, splits))
        if current.slicing is not None:
            self.add(SlicesPart(current.slicing, shares_output=shares_output))

    def add(self, part: StepPart) -> None:
        """Add a part, in place of one of the same type."""
        self._found[type(part)] = part

    def __contains__(self, kind: type[StepPart]) -> bool:
        return kind in self._found

    def __getitem__(self, kind: type[_Part]) -> _Part:
        found = self._found[kind]
        assert isinstance(found, kind)
        return found

    def in_order(self) -> list[StepPart]:
        """Return all parts in the order in which steps call them."""
        unknown = self._found.keys() - set(_ORDER)
        assert not unknown, f"{sorted(it.__name__ for it in unknown)}: give each a place in _ORDER"
        return [self._found[kind] for kind in _ORDER if kind in self._found]

"""What this rank holds of teacher and students."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_zb.distillation import weights
from megatron_zb.distillation.blocks import Embedding, OutputHead, rotary, teacher_layer
from megatron_zb.distillation.place import Place
from megatron_zb.distillation.pupil import Pupil
from megatron_zb.distillation.shapes import BlockShape
from megatron_zb.distillation.stage import BlockwiseStage, Teaching
from megatron_zb.distillation.teacher import FLAG, Teacher


@dataclass(frozen=True)
class Classroom:
    """The blocks of one stage: teacher's layers and candidates, by the place of a block in it."""

    place: Place
    layers: Sequence[Any]
    pupils: Sequence[Sequence[Pupil]]
    embedding: Embedding | None
    head: OutputHead | None
    rotary: torch.Tensor | None

    def stage(self, read: Callable[[int], torch.Tensor] | None) -> BlockwiseStage:
        """The stage as the executor runs it; `read` is for the first one, see :class:`Teaching`."""
        teaching = Teaching(self.layers, self.rotary, read, self.place.is_last)
        return BlockwiseStage(teaching, self.pupils, self.place.partners)

    def all_pupils(self) -> Iterator[Pupil]:
        """Every candidate of every block of this rank."""
        for candidates in self.pupils:
            yield from candidates


def open_classroom(
    args: argparse.Namespace,
    teacher: Teacher,
    library: Sequence[Sequence[BlockShape]],
    place: Place,
) -> Classroom:
    """Build this rank's blocks, with the teacher's weights; collective over all ranks.

    Raises:
        UsageError: the teacher's checkpoint is damaged.
    """
    layers = {block: teacher_layer(args, block) for block in place.blocks}
    embedding = Embedding(args) if place.is_first else None
    head = OutputHead(args) if place.is_last else None
    weights.load_teacher(
        teacher.path,
        layers,
        args.num_layers,
        embedding,
        head,
        args.untie_embeddings_and_output_weights,
        place.group,
        FLAG,
    )
    pupils = [
        [Pupil(args, block, shape, layers[block], teacher.shape) for shape in library[block]]
        for block in place.blocks
    ]
    return Classroom(place, list(layers.values()), pupils, embedding, head, rotary(args))

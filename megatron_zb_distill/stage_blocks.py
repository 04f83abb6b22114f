"""The teacher's layers and the student blocks on this rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_zb_distill import weights
from megatron_zb_distill.blocks import Embedding, OutputHead, rotary, teacher_layer
from megatron_zb_distill.place import Place
from megatron_zb_distill.shapes import BlockShape
from megatron_zb_distill.stage import BlockwiseStage, Teaching
from megatron_zb_distill.student_block import StudentBlock
from megatron_zb_distill.teacher import FLAG, Teacher


@dataclass(frozen=True)
class StageBlocks:
    """The blocks of one stage: teacher's layers and candidates, by position in the stage."""

    place: Place
    layers: Sequence[Any]
    student_blocks: Sequence[Sequence[StudentBlock]]
    embedding: Embedding | None
    head: OutputHead | None
    rotary: torch.Tensor | None

    def stage(self, read: Callable[[int], torch.Tensor] | None) -> BlockwiseStage:
        """Build the stage for the executor; `read` is for the first one, see :class:`Teaching`."""
        teaching = Teaching(self.layers, self.rotary, read, self.place.is_last)
        return BlockwiseStage(teaching, self.student_blocks, self.place.partners)

    def all_student_blocks(self) -> Iterator[StudentBlock]:
        """Yield every candidate of every block of this rank."""
        for candidates in self.student_blocks:
            yield from candidates


def open_stage_blocks(
    args: argparse.Namespace,
    teacher: Teacher,
    library: Sequence[Sequence[BlockShape]],
    place: Place,
) -> StageBlocks:
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
    student_blocks = [
        [StudentBlock(args, block, shape, layers[block], teacher.shape) for shape in library[block]]
        for block in place.blocks
    ]
    return StageBlocks(place, list(layers.values()), student_blocks, embedding, head, rotary(args))

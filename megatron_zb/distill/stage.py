"""A contiguous range of blocks, teacher and students, as the executor runs it on one rank."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_zb.distill import weights
from megatron_zb.distill.blocks import Embedding, OutputHead, rotary, taught, teacher_layer
from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.place import Holders, Place
from megatron_zb.distill.student import BlockShape
from megatron_zb.distill.student_block import StudentBlock
from megatron_zb.distill.teacher import Teacher
from megatron_zb.train import data


class Target(NamedTuple):
    """The input and the output of a teacher block, (sequence, batch, hidden) each."""

    given: torch.Tensor
    wanted: torch.Tensor


@dataclass(frozen=True)
class Teaching:
    """The teacher's part of a stage."""

    layers: Sequence[Any]
    """Frozen TransformerLayers, in the order of the blocks."""
    rotary: torch.Tensor | None
    read: Callable[[int], torch.Tensor] | None
    """Function from a microbatch's number to the embedding of its tokens, on the first stage."""
    is_last: bool
    shares_last: bool
    """Whether the next stage begins with this one's last block, and so with its input."""

    def forward(self, layer: Any, given: torch.Tensor) -> torch.Tensor:
        """Run the forward of one block, without gradients."""
        made: torch.Tensor = taught(layer, given, self.rotary)
        return made


class BlockwiseStage:
    """Teacher forward, student training and update of a stage (Pipe-BD, arXiv 2301.12443, 4).

    With a data-parallel degree k the stage is on k ranks: microbatches go to them in turn, and
    :meth:`update` sums the gradients over them.
    """

    def __init__(
        self,
        teaching: Teaching,
        student_blocks: Sequence[Sequence[StudentBlock]],
        copies: Holders | None,
    ) -> None:
        """Create a stage at the start of a run of steps.

        Args:
            teaching: the teacher's blocks.
            student_blocks: the candidates of each block.
            copies: the ranks that hold the same; None for one rank.
        """
        self._teaching = teaching
        self._student_blocks = student_blocks
        self._copies = copies
        self._targets: deque[tuple[int, list[Target]]] = deque()

    def teach(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        """Run T: the teacher's blocks on the relayed activation.

        Args:
            microbatch: its number, counted through all steps.
            activation: from the previous stage, (sequence, batch, hidden); None for the first
                stage, which reads the data.

        Returns:
            The activation for the next stage, (sequence, batch, hidden); None on the last stage.
        """
        if activation is None:
            assert self._teaching.read is not None, "only the first stage reads data"
            activation = self._teaching.read(microbatch)
        targets = []
        for layer in self._teaching.layers:
            made = self._teaching.forward(layer, activation)
            targets.append(Target(activation, made))
            activation = made
        self._targets.append((microbatch, targets))
        if self._teaching.is_last:
            return None
        return targets[-1].given if self._teaching.shares_last else activation

    def study(self, microbatch: int) -> None:
        """Run S: forward, loss and backward of every student block, after T of the microbatch."""
        taught, targets = self._targets.popleft()
        assert taught == microbatch, f"microbatch {taught} was taught, {microbatch} is studied"
        for target, candidates in zip(targets, self._student_blocks, strict=True):
            for student_block in candidates:
                student_block.study(target.given, target.wanted, self._teaching.rotary)

    def update(self, step: int) -> None:
        """Run U: step the optimizer of every student block; collective over the stage's ranks."""
        for candidates in self._student_blocks:
            for student_block in candidates:
                student_block.update(self._copies)


def batch_of(args: argparse.Namespace, dataset: Any, number: int) -> dict[str, torch.Tensor]:
    """Return the batch of this rank's lane in a microbatch of the relay."""
    lanes = Lanes.of(args)
    mine = number * lanes.expert + lanes.expert_lane(dist.get_rank())
    return data.microbatch(dataset, args, mine * args.micro_batch_size)


def empty_activation(args: argparse.Namespace, *outer: int) -> torch.Tensor:
    """Return an empty (sequence, batch, hidden) for this rank's part of a sequence."""
    sequence = args.seq_length
    if args.sequence_parallel:
        sequence //= args.tensor_model_parallel_size
    shape = (*outer, sequence, args.micro_batch_size, args.hidden_size)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return torch.empty(shape, dtype=dtype, device="cpu" if args.cpu else "cuda")


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
        place = self.place
        teaching = Teaching(self.layers, self.rotary, read, place.is_last, place.shares_last)
        return BlockwiseStage(teaching, self.student_blocks, place.copies)

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
    untied = args.untie_embeddings_and_output_weights
    part = weights.TeacherPart(layers, args.num_layers, embedding, head, untied)
    weights.load_teacher(teacher.path, part, place.copies)
    student_blocks = [
        [StudentBlock(args, block, shape, layers[block], teacher.shape) for shape in library[block]]
        for block in place.blocks
    ]
    return StageBlocks(place, list(layers.values()), student_blocks, embedding, head, rotary(args))

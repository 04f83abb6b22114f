"""A contiguous range of blocks, teacher and students, as the executor runs it on one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_zb.distillation.pupil import Pupil


class Lesson(NamedTuple):
    """What a teacher block was given and what it made of it, (sequence, batch, hidden) each."""

    given: torch.Tensor
    wanted: torch.Tensor


@dataclass(frozen=True)
class Teaching:
    """The teacher's part of a stage."""

    layers: Sequence[Any]
    """Frozen TransformerLayers, in the order of the blocks."""
    rotary: torch.Tensor | None
    read: Callable[[int], torch.Tensor] | None
    """On the first stage: from the number of a microbatch to the embedding of its tokens."""
    is_last: bool

    def forward(self, layer: Any, given: torch.Tensor) -> torch.Tensor:
        """One block, without gradients."""
        with torch.no_grad():
            made, _ = layer(given, attention_mask=None, rotary_pos_emb=self.rotary)
        output: torch.Tensor = made
        return output


class BlockwiseStage:
    """Teacher forward, student training and update of a stage (Pipe-BD, arXiv 2301.12443, 4).

    With a data-parallel degree k the stage lives on k ranks: microbatches go to them in turn, and
    :meth:`update` sums the gradients over them.
    """

    def __init__(
        self,
        teaching: Teaching,
        pupils: Sequence[Sequence[Pupil]],
        group: dist.ProcessGroup | None,
    ) -> None:
        """A stage that begins a run of steps.

        Args:
            teaching: the teacher's blocks.
            pupils: the candidates of each block.
            group: the ranks of the stage; None for one rank alone.
        """
        self._teaching = teaching
        self._pupils = pupils
        self._group = group
        self._lessons: deque[tuple[int, list[Lesson]]] = deque()

    def teach(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        """T: the relayed activation through the teacher's blocks.

        Args:
            microbatch: its number, counted through all steps.
            activation: of the stage before, (sequence, batch, hidden); None for the first stage,
                which reads the data.

        Returns:
            what the next stage is given; None on the last stage.
        """
        if activation is None:
            assert self._teaching.read is not None, "only the first stage reads data"
            activation = self._teaching.read(microbatch)
        lessons = []
        for layer in self._teaching.layers:
            made = self._teaching.forward(layer, activation)
            lessons.append(Lesson(activation, made))
            activation = made
        self._lessons.append((microbatch, lessons))
        return None if self._teaching.is_last else activation

    def study(self, microbatch: int) -> None:
        """S: forward, loss and backward of every student block on a microbatch that was taught."""
        taught, lessons = self._lessons.popleft()
        assert taught == microbatch, f"microbatch {taught} was taught, {microbatch} is studied"
        for lesson, candidates in zip(lessons, self._pupils, strict=True):
            for pupil in candidates:
                pupil.study(lesson.given, lesson.wanted, self._teaching.rotary)

    def update(self, step: int) -> None:
        """U: every student block steps its own optimizer; collective over the stage's ranks."""
        for candidates in self._pupils:
            for pupil in candidates:
                pupil.update(self._group)

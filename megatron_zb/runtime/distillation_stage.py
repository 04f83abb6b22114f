"""What the executor knows of a stage of blockwise distillation."""

from __future__ import annotations

from typing import Protocol

import torch


class DistillationStage(Protocol):
    """The teacher's blocks of a stage and their students, on one rank.

    Microbatches are counted through all steps: microbatch j of step n is n * m + j, with m
    microbatches per step. A rank sees those of its own alone, in rising order. Source: Pipe-BD,
    arXiv 2301.12443.
    """

    def teach(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        """T: the teacher's forward, from the relayed activation to the next stage's.

        The first stage gets None and reads the data itself. What is returned is sent on without a
        copy, and must not be changed afterwards; the last stage's is dropped. What the students
        need is for the stage to keep until :meth:`study`.
        """

    def study(self, microbatch: int) -> None:
        """S: forward, loss and backward of the students, on what :meth:`teach` has kept."""

    def update(self, step: int) -> None:
        """U: sum the students' gradients over the ranks of the stage, if many, and step.

        All ranks of the stage come to it after the same microbatches, so it may be collective over
        them; it must wait for no other rank.
        """

"""One candidate for one block, in training."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb_distill.blocks import student_layer
from megatron_zb_distill.initialisation import inherit
from megatron_zb_distill.losses import LOSSES
from megatron_zb_distill.optimizer import BlockOptimizer
from megatron_zb_distill.shapes import BlockShape, TeacherShape


class StudentBlock:
    """A student layer with its own loss and optimizer."""

    def __init__(
        self,
        args: argparse.Namespace,
        block: int,
        shape: BlockShape,
        teacher_layer: Any,
        sizes: TeacherShape,
    ) -> None:
        """Build the layer and initialise it from the teacher's layer of the same block."""
        self.block = block
        self.shape = shape
        self.layer = student_layer(args, shape, block)
        inherit(self.layer, teacher_layer, shape, sizes)
        self.optimizer = BlockOptimizer(
            args, dict(self.layer.named_parameters()), shape.learning_rate
        )
        self._loss = LOSSES[args.loss]
        self._per_microbatch = 1 / args.num_microbatches
        self._total: torch.Tensor | None = None
        self._count = 0

    def study(self, given: torch.Tensor, wanted: torch.Tensor, rotary: torch.Tensor | None) -> None:
        """Run forward, loss and backward of a microbatch; tensors are (sequence, batch, hidden)."""
        made = self.forward(given, rotary)
        loss = self._loss(made, wanted)
        if loss.requires_grad:  # a block of no-ops has nothing to learn
            (loss * self._per_microbatch).backward()
        self.optimizer.collect()
        loss = loss.detach()
        self._total = loss if self._total is None else self._total + loss
        self._count += 1

    def forward(self, given: torch.Tensor, rotary: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's output for an input, both (sequence, batch, hidden)."""
        output: torch.Tensor
        output, _ = self.layer(given, attention_mask=None, rotary_pos_emb=rotary)
        return output

    def update(self, group: dist.ProcessGroup | None) -> None:
        """Step the optimizer; see :meth:`BlockOptimizer.step`."""
        self.optimizer.step(group)

    def take_losses(self) -> tuple[float, int]:
        """Return sum and number of the losses of this rank's microbatches since the last call."""
        total = 0.0 if self._total is None else float(self._total)
        count, self._total, self._count = self._count, None, 0
        return total, count

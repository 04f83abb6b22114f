"""One candidate for one block, in training: its layer, its loss and its optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_zb.distill.blocks import student_layer
from megatron_zb.distill.initialisation import inherit
from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.place import Holders
from megatron_zb.distill.shards import ShardedGradients, Tensors, mean_of_shards
from megatron_zb.distill.student import BlockShape, TeacherShape
from megatron_zb.train.model import scheduler

Mean = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor, Mean], torch.Tensor]


def mse(student: torch.Tensor, teacher: torch.Tensor, mean: Mean = torch.mean) -> torch.Tensor:
    """Return the mean squared difference of two tensors of one shape; a scalar in float32."""
    return mean((student.float() - teacher.float()).square())


def normalised_mse(
    student: torch.Tensor, teacher: torch.Tensor, mean: Mean = torch.mean
) -> torch.Tensor:
    """Return the mean squared difference over the teacher's mean square; 1 for an output of zeros.

    Puzzle, arXiv 2411.19146, section 3.
    """
    return mse(student, teacher, mean) / mean(teacher.float().square())


def cosine(student: torch.Tensor, teacher: torch.Tensor, mean: Mean = torch.mean) -> torch.Tensor:
    """Return one minus the cosine of each token's two vectors, averaged over (sequence, batch)."""
    similar = torch.nn.functional.cosine_similarity(student.float(), teacher.float(), dim=-1)
    return 1 - mean(similar)


LOSSES: dict[str, Loss] = {"mse": mse, "normalised-mse": normalised_mse, "cosine": cosine}

_MOMENTS = ("exp_avg", "exp_avg_sq")


class BlockOptimizer:
    """Adam with decoupled weight decay, in float32; Megatron's schedule of the learning rate.

    Parameters of fewer bits get a copy in float32 that is stepped, and gradients that are summed in
    float32. Vectors, which are norms and biases, do not decay, as in Megatron.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        parameters: Mapping[str, torch.nn.Parameter],
        learning_rate: float | None,
    ) -> None:
        self._parameters = dict(parameters)
        self._masters = {name: _master(p) for name, p in parameters.items()}
        self._sharded = ShardedGradients(Lanes.of(args), self._parameters)
        self._clip = args.clip_grad
        self._batch = args.global_batch_size
        groups = [
            {"params": [m for m in self._masters.values() if (m.dim() > 1) is decays], "wd_mult": w}
            for decays, w in ((True, 1.0), (False, 0.0))
        ]
        peak = args.lr if learning_rate is None else learning_rate
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": [_nothing()]}],
            lr=peak,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
        )
        self._scheduler = scheduler(args, self._adam, peak)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self._adam.param_groups[0]["lr"])

    def collect(self) -> None:
        """Add the gradients that a backward left in lower precision to the sums in float32."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            master.grad += parameter.grad
            parameter.grad = None

    def gradients(self) -> Tensors:
        """Return the gradients summed over the microbatches so far, zeros where there was none."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return {name: m.grad for name, m in self._masters.items() if m.grad is not None}

    def step(self, copies: Holders | None) -> None:
        """Sum the gradients over the ranks of a stage, step the optimizer, and drop the gradients.

        Args:
            copies: the ranks that hold this block; None for one rank.
        """
        gradients = self.gradients()
        self._sharded.sum(gradients, copies)
        if self._clip and gradients:
            norm = self._sharded.norm(gradients)
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._clip, norm)
        self._adam.step()
        self._scheduler.step(increment=self._batch)
        self._adam.zero_grad(set_to_none=True)
        self._to_parameters()

    def _to_parameters(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])

    def state(self) -> Tensors:
        """Return all tensors that a resume needs besides the parameters and the number of steps."""
        tensors: Tensors = {}
        for name, master in self._masters.items():
            known = self._adam.state[master]
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = known.setdefault(moment, torch.zeros_like(master))
            if master is not self._parameters[name]:
                tensors[f"master.{name}"] = master.detach()
        return tensors

    def resume(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Restore the result of :meth:`state` after `steps` steps."""
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(tensors[name])
        for master in self._masters.values():
            self._adam.state[master]["step"] = torch.tensor(float(steps))
        self._scheduler.step(increment=steps * self._batch)


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return torch.nn.Parameter(parameter.detach().float())


def _nothing() -> torch.nn.Parameter:
    """Return an empty parameter for a block without any, since Adam refuses an empty list."""
    return torch.nn.Parameter(torch.zeros(0))


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
        self._mean: Mean = mean_of_shards if args.sequence_parallel else torch.mean
        self._per_microbatch = 1 / args.num_microbatches
        self._total: torch.Tensor | None = None
        self._count = 0

    def study(self, given: torch.Tensor, wanted: torch.Tensor, rotary: torch.Tensor | None) -> None:
        """Run forward, loss and backward of a microbatch; tensors are (sequence, batch, hidden)."""
        made = self.forward(given, rotary)
        loss = self._loss(made, wanted, self._mean)
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

    def update(self, copies: Holders | None) -> None:
        """Step the optimizer; see :meth:`BlockOptimizer.step`."""
        self.optimizer.step(copies)

    def take_losses(self) -> tuple[float, int]:
        """Return sum and number of the losses of this rank's microbatches since the last call."""
        total = 0.0 if self._total is None else float(self._total)
        count, self._total, self._count = self._count, None, 0
        return total, count

"""The optimizer of one student block, independent of all other blocks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron_zb_train.model import scheduler

Tensors = dict[str, torch.Tensor]

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

    def step(self, group: dist.ProcessGroup | None) -> None:
        """Sum the gradients over the ranks of a stage, step the optimizer, and drop the gradients.

        Args:
            group: the ranks that hold this block; None for one rank alone.
        """
        gradients = list(self.gradients().values())
        if group is not None and gradients:
            flat = _flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=group)
            for gradient, total in zip(
                gradients, _unflatten_dense_tensors(flat, gradients), strict=True
            ):
                gradient.copy_(total)
        if self._clip and gradients:
            torch.nn.utils.clip_grad_norm_(list(self._masters.values()), self._clip)
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

"""In place of the package emerging-optimizers, which is in no registry: Muon's step in torch.

Megatron's own optimizer, over it, decides what Muon steps, what Adam, and which rank steps what.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Weight decay, a momentum, and a step along what ``orthogonalize`` makes of it."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        use_nesterov: bool,
        weight_decay: float,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
        **_more: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": momentum_beta, "weight_decay": weight_decay})
        self.scaled_orthogonalize_fn, self.nesterov = scaled_orthogonalize_fn, use_nesterov

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(gradient))
        momentum.lerp_(gradient, 1 - group["beta"])
        way = gradient.lerp(momentum, group["beta"]) if self.nesterov else momentum
        p.mul_(1 - group["lr"] * group["weight_decay"])
        options = {name: value for name, value in group.items() if name != "params"}
        p.add_(self.orthogonalize(p, way, **options), alpha=-group["lr"])

    def orthogonalize(self, p: torch.Tensor, gradient: torch.Tensor, **_: Any) -> torch.Tensor:
        raise NotImplementedError


def newton_schulz_tp(
    x: torch.Tensor, steps: int, tp_group: Any, partition_dim: int | None, **_options: Any
) -> torch.Tensor:
    """The iteration (arXiv 2502.16982, section 2) on the matrix of all tensor-parallel ranks."""
    if partition_dim is None or tp_group.size() == 1:
        return _newton_schulz(x, steps)
    parts = [torch.empty_like(x) for _ in range(tp_group.size())]
    torch.distributed.all_gather(parts, x.contiguous(), group=tp_group)
    whole = _newton_schulz(torch.cat(parts, partition_dim), steps)
    return whole.chunk(tp_group.size(), partition_dim)[tp_group.rank()]


def _newton_schulz(x: torch.Tensor, steps: int) -> torch.Tensor:
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def get_muon_scale_factor(rows: int, columns: int, mode: str) -> float:
    assert mode == "spectral", mode
    return max(1.0, rows / columns) ** 0.5


def muon(chunks: list[Any], config: Any, *, layer_wise: bool) -> Any:
    """Build Megatron's optimizer: Muon for matrices, Adam for the rest, of a rank's layers."""
    install()
    torch.distributed.all_gather = all_gather  # type: ignore[assignment]
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    whole: Any = get_megatron_muon_optimizer(
        config,
        chunks,
        use_gloo_process_groups=False,
        layer_wise_distributed_optimizer=layer_wise,
    )
    kinds = [type(one.optimizer).__name__ for one in whole.chained_optimizers]
    assert kinds[0] == "TensorParallelMuon" and kinds[1].startswith("Adam"), kinds
    return whole


_of_equal_sizes = torch.distributed.all_gather


def all_gather(
    parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None, **more: Any
) -> Any:
    """Gather parts of several sizes, too, as NCCL does and gloo does not."""
    if len({part.numel() for part in parts}) == 1:
        return _of_equal_sizes(parts, mine, group=group, **more)
    parts[torch.distributed.get_rank(group)].copy_(mine)
    for rank, part in enumerate(parts):
        torch.distributed.broadcast(part, group=group, group_src=rank)
    return None


def install() -> None:
    """Let ``import emerging_optimizers`` find this where the package is not there."""
    if importlib.util.find_spec("emerging_optimizers") is not None:
        return
    names = ("emerging_optimizers", "orthogonalized_optimizers", "muon_utils")
    for depth in range(1, len(names) + 1):
        module: Any = ModuleType(".".join(names[:depth]))
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.OrthogonalizedOptimizer = OrthogonalizedOptimizer
        module.get_muon_scale_factor = get_muon_scale_factor
        module.newton_schulz_tp = newton_schulz_tp
        sys.modules[module.__name__] = module

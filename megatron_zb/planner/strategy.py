"""What can be chosen: how the GPUs are shared out, the microbatch and what is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_zb.planner.device import DeviceConfig
from megatron_zb.planner.model import ModelConfig

_MICROBATCHES = (1, 2, 3, 4, 6, 8)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Strategy:
    """One way to share out the GPUs; ``expert`` ranks lie within the ``data`` ranks."""

    tensor: int
    pipeline: int
    data: int
    expert: int
    microbatch: int
    recompute: str

    def num_microbatches(self, global_batch: int) -> int:
        """Microbatches of each pipeline in an iteration."""
        return global_batch // (self.data * self.microbatch)

    def __str__(self) -> str:
        expert = f" EP{self.expert}" if self.expert > 1 else ""
        size = f"TP{self.tensor} PP{self.pipeline} DP{self.data}{expert} b={self.microbatch}"
        return size if self.recompute == "none" else f"{size} recompute {self.recompute}"


@dataclass(frozen=True)
class Choices:
    """What the user allows; None is everything that fits."""

    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    microbatch: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None


def strategies(
    model: ModelConfig, device: DeviceConfig, gpus: int, global_batch: int, choices: Choices
) -> Iterator[Strategy]:
    """Everything that divides: heads by TP, layers over PP, the batch by DP and microbatch."""
    for tensor in _tensor(model, device, gpus, choices.tensor):
        for pipeline in choices.pipeline or _divisors(gpus // tensor):
            if gpus // tensor % pipeline:
                continue
            data = gpus // tensor // pipeline
            if pipeline > model.layers or global_batch % data:
                continue
            expert = _expert(model, device, tensor, data)
            for microbatch in choices.microbatch or _MICROBATCHES:
                if global_batch // data % microbatch == 0:
                    for recompute in _recompute(model, choices.recompute):
                        yield Strategy(tensor, pipeline, data, expert, microbatch, recompute)


def _divisors(whole: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, whole + 1) if whole % d == 0)


def _tensor(
    model: ModelConfig, device: DeviceConfig, gpus: int, asked: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Within a node, and such that heads, their groups and the MLP can be divided."""
    inner = [model.ffn, model.attention_heads, model.vocabulary]
    if model.latent_attention is None:
        inner.append(model.groups)
    return tuple(
        t
        for t in (asked or _divisors(device.node.gpus))
        if gpus % t == 0 and t <= device.node.gpus and not any(size % t for size in inner)
    )


def _expert(model: ModelConfig, device: DeviceConfig, tensor: int, data: int) -> int:
    """As many expert ranks as stay in a node, or as there must be to give each some experts."""
    if model.experts is None:
        return 1
    most = [d for d in _divisors(data) if model.experts.experts % d == 0]
    near = [d for d in most if d * tensor <= device.node.gpus]
    # Where a node cannot hold the experts' states, only more ranks help: eight nodes at most.
    large = model.experts.experts > 8 * device.node.gpus
    return max([d for d in most if d * tensor <= 8 * device.node.gpus] if large else near)


def _recompute(model: ModelConfig, asked: tuple[str, ...] | None) -> tuple[str, ...]:
    """Recomputing the attention scores saves nothing where they are not stored."""
    useful = [r for r in RECOMPUTE if r != "selective" or not model.flash_attention]
    return tuple(r for r in useful if asked is None or r in asked)

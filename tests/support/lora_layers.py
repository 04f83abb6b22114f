"""LoRA adapters on the linear layers of small models, with an optimizer for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.parallel_state import get_data_parallel_group
from megatron.core.utils import unwrap_model

LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
RANK, SCALE = 4, 2.0


class LoRALayers:
    """LoRA adapters in the model chunks of a rank, with one optimizer for each adapter and chunk.

    The base is frozen. Weights of an adapter follow from its name and the names of its layers.

    Args:
        chunks: the model chunks.
        names: of the adapters.
        grad_scale: the factor of all losses, if any.
    """

    def __init__(
        self, chunks: Sequence[Any], names: Sequence[str], grad_scale: float | None = None
    ) -> None:
        self._grad_scale = grad_scale or 1.0
        self.selected: dict[int, str] = {}
        self.updates: list[tuple[int, str]] = []
        self.weights: dict[str, list[dict[str, torch.nn.Parameter]]] = {
            name: [{} for _ in chunks] for name in names
        }
        for number, chunk in enumerate(chunks):
            for parameter in chunk.parameters():
                parameter.requires_grad = False
            if unwrap_model(chunk).pre_process:  # layers that are recomputed need an input with one
                unwrap_model(chunk).embedding.register_forward_hook(_with_gradient)
            for place, module in unwrap_model(chunk).named_modules():
                if place.rpartition(".")[2] in LAYERS:
                    self._add(number, _global_place(unwrap_model(chunk), place), module, names)
        self._optimizers = {
            (number, name): torch.optim.Adam(list(weights.values()), lr=0.01, eps=1e-4)
            for name in names
            for number, weights in enumerate(self.weights[name])
        }

    def select(self, chunk: int, adapter: str) -> None:
        self.selected[chunk] = adapter

    def update(self, chunk: int, adapter: str) -> None:
        self.updates.append((chunk, adapter))
        optimizer, replicas = self._optimizers[chunk, adapter], get_data_parallel_group()
        for parameter in self.weights[adapter][chunk].values():
            assert parameter.grad is not None, f"{adapter} has an update, and no gradients"
            torch.distributed.all_reduce(parameter.grad, group=replicas)
            parameter.grad /= replicas.size() * self._grad_scale
        optimizer.step()
        optimizer.zero_grad()

    def gradients_ready(self, chunk: int, adapter: str) -> None:
        """Nothing: every stage has its optimizer."""

    def catch_up(self, adapter: str) -> None:
        """Nothing: updates have been done."""

    def values(self, adapter: str) -> dict[str, torch.Tensor]:
        """Return the weights of an adapter on this rank, by name."""
        chunks = self.weights[adapter]
        return {name: it.detach().clone() for chunk in chunks for name, it in chunk.items()}

    def _add(self, chunk: int, place: str, module: Any, names: Sequence[str]) -> None:
        rows, columns = module.weight.shape
        for name in names:
            drawn = torch.Generator().manual_seed(sum(map(ord, f"{name} {place}")))
            down = torch.randn(RANK, columns, generator=drawn) / columns**0.5
            up = 0.1 * torch.randn(rows, RANK, generator=drawn)
            of_chunk = self.weights[name][chunk]
            of_chunk[f"{place}.down"] = torch.nn.Parameter(down.to(module.weight.dtype))
            of_chunk[f"{place}.up"] = torch.nn.Parameter(up.to(module.weight.dtype))

        def with_adapter(_module: Any, arguments: tuple[Any, ...], output: Any) -> Any:
            of_chunk = self.weights[self.selected[chunk]][chunk]
            low = torch.nn.functional.linear(arguments[0], of_chunk[f"{place}.down"])
            more = SCALE * torch.nn.functional.linear(low, of_chunk[f"{place}.up"])
            return output[0] + more, output[1]

        module.register_forward_hook(with_adapter)


def _with_gradient(_module: Any, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
    return output.detach().requires_grad_()


def _global_place(model: Any, place: str) -> str:
    """Return the name of a module with the number of its layer in the whole model."""
    words = place.split(".")
    at = words.index("layers") + 1
    words[at] = str(model.decoder.layers[int(words[at])].layer_number - 1)
    return ".".join(words)

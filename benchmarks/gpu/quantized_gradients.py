#!/usr/bin/env python3
"""Are weight gradients in fp8 and fp4 the same when W computes them later, with a GPU's kernels?

Every linear module of Transformer-Engine runs three microbatches in every recipe that the GPU has:
once with whole backwards, once with B first and every W afterwards. All gradients, and the maxima
and scales of delayed scaling, must be equal to the last bit. Also counts the bytes that wait for W.

Prints one JSON line, and ends with exit status 1 when something was unequal or failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import one_device
import torch

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.transformer_engine import split_transformer_engine
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.autograd_stage import WeightGradQueue

WHOLE = "F0 F1 F2 BW0 BW1 BW2"
DEFERRED = "F0 F1 F2 B0 B1 B2 W0 W1 W2"
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")
RECIPES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
EXPERTS = 2


def main() -> None:
    args = _arguments()
    device = one_device.choose(args.device)
    if device.type == "cpu":
        raise UsageError("the kernels of Transformer-Engine need a GPU and torch sees none")
    one_device.start(device)
    results = list(_results(args.sizes, device))
    one_device.finish()
    line = {"benchmark": "quantized_gradients", "machine": one_device.describe(device)}
    print(json.dumps({**line, "sizes": args.sizes, "results": results}), flush=True)
    sys.exit(any(found.get("unequal") or "failed" in found for found in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--sizes",
        nargs=3,
        type=one_device.at_least_one,
        default=[2048, 1024, 2048],
        metavar=("TOKENS", "INPUTS", "OUTPUTS"),
        help="of a module, each a multiple of 256 (default 2048 1024 2048)",
    )
    return parser.parse_args()


def _results(sizes: list[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """One result of every module in every recipe; what this GPU or TE has not is said to miss."""
    for recipe in RECIPES:
        missing = _missing(recipe)
        if missing is not None:
            yield {"recipe": recipe, "not_measured": missing}
            continue
        for kind in KINDS:
            for fused in (False, True):
                found = {"recipe": recipe, "kind": kind, "fused": fused}
                try:
                    yield found | compare(kind, recipe, fused, sizes, device)
                except Exception as error:  # the others are still of interest
                    yield found | {"failed": f"{type(error).__name__}: {error}"}


def _missing(recipe: str) -> str | None:
    from transformer_engine.common import recipe as recipes

    if not hasattr(recipes, RECIPES[recipe]):
        return "this Transformer-Engine does not have it"
    asked = {"blockwise": "fp8_block_scaling", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
    manager = _manager()
    available: Callable[[], tuple[bool, str]]
    available = getattr(manager, f"is_{asked.get(recipe, 'fp8')}_available")
    has_it, reason = available()
    return None if has_it else reason


def _manager() -> Any:
    """Return the state of quantization, which newer versions have in another module."""
    try:
        module = import_module("transformer_engine.pytorch.quantization")
    except ModuleNotFoundError:
        module = import_module("transformer_engine.pytorch.fp8")
    return module.FP8GlobalStateManager


def _quantizing(te: Any, recipe: Any) -> Any:
    if hasattr(te, "autocast"):
        return te.autocast(recipe=recipe)
    return te.fp8_autocast(fp8_recipe=recipe)


def compare(
    kind: str, recipe: str, fused: bool, sizes: list[int], device: torch.device
) -> dict[str, Any]:
    """Run a module in both ways: the names of what is unequal, and the most bytes held for W."""
    whole = Run(kind, recipe, fused, sizes, device).run(WHOLE)
    deferred = Run(kind, recipe, fused, sizes, device).run(DEFERRED)
    expected, found = whole.state(), deferred.state()
    unequal = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    finite = all(value.isfinite().all() for value in expected.values())
    return {
        "unequal": unequal if finite else [*unequal, "gradients are not finite"],
        "compared": len(expected),
        "held_bytes": deferred.memory.peak_bytes,
    }


class Run:
    """One module with its queue, run as the runtime would; its weight is quantised once."""

    def __init__(
        self, kind: str, recipe: str, fused: bool, sizes: list[int], device: torch.device
    ) -> None:
        from transformer_engine import pytorch as te
        from transformer_engine.common import recipe as recipes

        _manager().reset()
        torch.manual_seed(1)
        self._sizes, self._device = sizes, device
        _, inputs, outputs = sizes
        self._experts = EXPERTS if kind == "GroupedLinear" else 0
        options = {"params_dtype": torch.bfloat16, "device": device.type}
        if kind == "LayerNormMLP":
            options["activation"] = "relu"
        counts = (EXPERTS,) if self._experts else ()
        module = getattr(te, kind)
        self._module = module(*counts, inputs, outputs, fuse_wgrad_accumulation=fused, **options)
        self._queue = WeightGradQueue()
        self._queue.activation_memory = self.memory = ActivationMemory()
        chunk = torch.nn.ModuleDict({"layer": self._module})
        split_transformer_engine(chunk, SplitBackward(self._queue), "v-half")
        for parameter in self._module.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, device=device)
        made = getattr(recipes, RECIPES[recipe])()
        self._quantizing = lambda: _quantizing(te, made)
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}

    def run(self, passes: str) -> Run:
        for one in passes.split():
            getattr(self, one[:-1])(int(one[-1]))
        return self

    def F(self, microbatch: int) -> None:
        tokens, inputs, _ = self._sizes
        generator = torch.Generator(self._device).manual_seed(microbatch)
        x = torch.randn(tokens, inputs, device=self._device, generator=generator)
        self._inputs[microbatch] = x = x.bfloat16().requires_grad_()
        more = [[tokens // self._experts] * self._experts] if self._experts else []
        with self._quantizing():
            self._outputs[microbatch] = self._module(x, *more, is_first_microbatch=False)

    def BW(self, microbatch: int) -> None:
        self._outputs.pop(microbatch).float().square().sum().backward()
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None

    def B(self, microbatch: int) -> None:
        with self._queue.collecting(microbatch):
            self.BW(microbatch)

    def W(self, microbatch: int) -> None:
        self._queue.run(microbatch)

    def state(self) -> dict[str, torch.Tensor]:
        """Return gradients of parameters and inputs, and what delayed scaling remembers."""
        found = {name: p.main_grad for name, p in self._module.named_parameters()}
        found |= {f"input {m}": x.grad for m, x in self._inputs.items()}
        for way in ("scaling_fwd", "scaling_bwd"):
            kept = self._module.fp8_meta.get(way)
            for name in ("amax_history", "scale"):
                if isinstance(getattr(kept, name, None), torch.Tensor):
                    found[f"{way} {name}"] = getattr(kept, name)
        return found


if __name__ == "__main__":
    one_device.run(main)

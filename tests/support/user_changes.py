"""What users do to the layers of a model that Megatron has built, by name.

Each change is made to every decoder layer that a chunk has, and draws nothing at random, so that a
model is the same however its layers are placed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

Change = Callable[[Any], None]


class _Scaled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 0.5 * weight


class _Rounded(torch.nn.Module):
    """Fake quantization, whose gradient passes straight through."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + ((weight * 64).round() / 64 - weight).detach()


class _LowRank(torch.nn.Module):
    """A LoRA that is merged into its frozen weight in every forward."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        spread = torch.linspace(-0.1, 0.1, 2 * max(rows, columns)).to(weight.dtype)
        self.a = torch.nn.Parameter(spread[: 2 * rows].view(rows, 2).clone())
        self.b = torch.nn.Parameter(spread[: 2 * columns].view(2, columns).clone())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.a @ self.b


def scaled_fc2(layer: Any) -> None:
    register_parametrization(layer.mlp.linear_fc2, "weight", _Scaled())


def rounded_qkv(layer: Any) -> None:
    register_parametrization(layer.self_attention.linear_qkv, "weight", _Rounded())


def merged_lora(layer: Any) -> None:
    linear = layer.self_attention.linear_proj
    linear.weight.requires_grad = False
    register_parametrization(linear, "weight", _LowRank(linear.weight))


def weight_norm(layer: Any) -> None:
    parametrizations.weight_norm(layer.mlp.linear_fc1)


def hook(layer: Any) -> None:
    layer.mlp.linear_fc1.weight.register_hook(lambda gradient: 3 * gradient)


def multi_hook(layer: Any) -> None:
    weights = [layer.mlp.linear_fc1.weight, layer.mlp.linear_fc2.weight]
    torch.autograd.graph.register_multi_grad_hook(weights, lambda gradients: None)


def post_accumulate_hook(layer: Any) -> None:
    def halve(weight: torch.Tensor) -> None:
        if weight.grad is not None:
            weight.grad *= 0.5

    layer.self_attention.linear_proj.weight.register_post_accumulate_grad_hook(halve)


def hook_on_bias(layer: Any) -> None:
    layer.mlp.linear_fc1.bias.register_hook(lambda gradient: 2 * gradient)


def penalty(layer: Any) -> None:
    def add(module: Any, _inputs: Any, output: Any) -> Any:
        return output[0] + 0.01 * module.weight.square().mean(), *output[1:]

    layer.mlp.linear_fc2.register_forward_hook(add)


def late_penalty(layer: Any) -> None:
    """From the second microbatch on."""
    calls: list[None] = []

    def add(module: Any, _inputs: Any, output: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            return output
        return output[0] + 0.01 * module.weight.square().mean(), *output[1:]

    layer.mlp.linear_fc2.register_forward_hook(add)


def direct_product(layer: Any) -> None:
    def add(_module: Any, inputs: Any, output: Any) -> Any:
        used = layer.self_attention.linear_proj.weight  # tensor parallel: a part of it
        read = inputs[0][..., : used.size(1)]
        return output[0] + 0.1 * torch.nn.functional.linear(read, used), *output[1:]

    layer.mlp.register_forward_hook(add)


def gradient_penalty(layer: Any) -> None:
    """The gradient of an MLP with respect to its input, as a part of what the MLP gives."""

    def add(_module: Any, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not inputs[0].requires_grad:
            return output
        (slope,) = torch.autograd.grad(output[0].sum(), inputs[0], create_graph=True)
        return output[0] + 0.01 * slope, *output[1:]

    layer.mlp.register_forward_hook(add)


def used_twice(layer: Any) -> None:
    """The same MLP one after the other."""
    once = layer.mlp.forward

    def twice(hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
        first = once(hidden, *more, **named)
        return once(first[0], *more, **named)

    layer.mlp.forward = twice


def frozen_weight(layer: Any) -> None:
    layer.mlp.linear_fc2.weight.requires_grad = False


def frozen_attention(layer: Any) -> None:
    for parameter in layer.self_attention.parameters():
        parameter.requires_grad = False


def own_function(layer: Any) -> None:
    """A custom function around an MLP that scales the gradient."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * 0.25

    layer.mlp.register_forward_hook(lambda module, args, out: (Scale.apply(out[0]), *out[1:]))


def own_module(layer: Any) -> None:
    """A layer of torch's beside the MLP."""
    width = layer.mlp.linear_fc1.weight.size(1)
    adapter = torch.nn.Linear(width, width)
    with torch.no_grad():
        adapter.weight.copy_(torch.linspace(-0.1, 0.1, width * width).view(width, width))
        adapter.bias.zero_()
    layer.mlp.adapter = adapter.to(layer.mlp.linear_fc1.weight.dtype)
    layer.mlp.register_forward_hook(
        lambda module, args, out: (out[0] + module.adapter(args[0]), *out[1:])
    )


def own_forward(layer: Any) -> None:
    """A projection whose forward calls torch's linear function."""
    linear = layer.self_attention.linear_proj
    linear.forward = lambda x: (torch.nn.functional.linear(x, linear.weight), linear.bias)


def _checkpointed(module: Any, run: Callable[..., Any]) -> None:
    once = module.forward
    module.forward = lambda *args, **named: run(once, *args, **named)


def checkpoint_without_reentry(layer: Any) -> None:
    _checkpointed(layer.mlp, lambda once, *a, **k: checkpoint(once, *a, use_reentrant=False, **k))


def checkpoint_with_reentry(layer: Any) -> None:
    _checkpointed_without_bias(layer, lambda run, x: checkpoint(run, x, use_reentrant=True))


def _checkpointed_without_bias(layer: Any, run: Callable[..., Any]) -> None:
    """Checkpoint an MLP but for its bias, a parameter, which no function of autograd may return."""
    once = layer.mlp.forward

    def forward(hidden: torch.Tensor, **_named: Any) -> Any:
        return run(lambda x: once(x)[0], hidden), layer.mlp.linear_fc2.bias

    layer.mlp.forward = forward


def checkpoint_of_attention(layer: Any) -> None:
    _checkpointed(
        layer.self_attention,
        lambda once, *a, **k: checkpoint(once, *a, use_reentrant=False, **k),
    )


def checkpoint_of_megatron(layer: Any) -> None:
    _checkpointed_without_bias(layer, lambda run, x: tensor_parallel.checkpoint(run, False, x))


def saved_on_the_host(layer: Any) -> None:
    def run(once: Any, *args: Any, **named: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return once(*args, **named)

    _checkpointed(layer.mlp, run)


def kept_in_32_bits(layer: Any) -> None:
    """Norms and routers stay as they are in a model of 16 bits; Megatron has it after 0.19."""
    from megatron.core.transformer.module import mark_keep_in_fp32

    for name, weight in layer.named_parameters():
        if "norm" in name or "router" in name:
            weight.data = weight.data.float()
            mark_keep_in_fp32(weight)


def read_ahead(layer: Any) -> None:
    """A weight is read before its module runs, which awaits its gather; Megatron: after 0.19."""
    from megatron.core.utils import ensure_params_ready

    weight = next(weight for weight in layer.parameters() if weight.dim() == 2)

    def scale(_layer: Any, positional: Any, named: Any) -> Any:
        ensure_params_ready([weight])
        scaled = named["hidden_states"] * (1 + weight.detach().float().mean())
        return positional, named | {"hidden_states": scaled}

    layer.register_forward_pre_hook(scale, with_kwargs=True)


# Each with the layers, as they are called in a decoder layer, whose weight gradient B computes.
CHANGES: dict[str, tuple[Change, set[str]]] = {
    "scaled fc2": (scaled_fc2, {"mlp.linear_fc2"}),
    "rounded qkv": (rounded_qkv, {"self_attention.linear_qkv"}),
    "merged LoRA": (merged_lora, {"self_attention.linear_proj"}),
    "weight norm": (weight_norm, {"mlp.linear_fc1"}),
    "hook": (hook, {"mlp.linear_fc1"}),
    "multi hook": (multi_hook, {"mlp.linear_fc1", "mlp.linear_fc2"}),
    "post-accumulate hook": (post_accumulate_hook, {"self_attention.linear_proj"}),
    "hook on bias": (hook_on_bias, set()),
    "penalty": (penalty, {"mlp.linear_fc2"}),
    "direct product": (direct_product, {"self_attention.linear_proj"}),
    "gradient penalty": (gradient_penalty, {"mlp.linear_fc1", "mlp.linear_fc2"}),
    "used twice": (used_twice, set()),
    "frozen weight": (frozen_weight, set()),
    "frozen attention": (frozen_attention, set()),
    "own function": (own_function, set()),
    "own module": (own_module, set()),
    "own forward": (own_forward, set()),
    "checkpoint": (checkpoint_without_reentry, set()),
    "checkpoint with reentry": (checkpoint_with_reentry, set()),
    "checkpoint of attention": (checkpoint_of_attention, set()),
    "checkpoint of Megatron": (checkpoint_of_megatron, set()),
    "saved on the host": (saved_on_the_host, set()),
}


def hook_on_output(model: Any) -> None:
    if model.post_process:
        model.output_layer.weight.register_hook(lambda gradient: gradient)


def scaled_output(model: Any) -> None:
    if model.post_process:
        register_parametrization(model.output_layer, "weight", _Scaled())


def hook_on_shard(model: Any) -> None:
    if getattr(model, "output_layer", None) is not None:
        model.output_layer.weight.register_hook(lambda gradient: gradient)


def penalty_on_shard(model: Any) -> None:
    """In the last hidden states, of the weight that the model calls its output layer's."""

    def add(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.01 * model.output_layer.weight.square().mean()

    if model.post_process:
        model.decoder.register_forward_hook(add)


# --- messages of another width


def residual_streams(model: Any, switch: str, count: str) -> None:
    """Two residual streams in every layer, as hyper-connections have them: (s, b, 2 h) between all.

    A layer reads their mean and writes into one of them, in turns.
    """
    setattr(model.config, switch, True)
    setattr(model.config, count, 2)
    decoder = model.decoder
    if model.pre_process:
        decoder.register_forward_pre_hook(_expand, with_kwargs=True)
    for layer in decoder.layers:
        layer.forward = _StreamedLayer(layer.forward)
    if decoder.final_layernorm is not None:
        decoder.final_layernorm.register_forward_pre_hook(lambda _norm, given: _contract(given[0]))


def _expand(_decoder: Any, positional: Any, named: Any) -> Any:
    x = named["hidden_states"]
    return positional, named | {"hidden_states": torch.cat([x, 0.5 * x], -1)}


def _contract(streams: torch.Tensor) -> torch.Tensor:
    first, second = streams.chunk(2, -1)
    return 0.5 * (first + second)


class _StreamedLayer:
    def __init__(self, whole: Callable[..., Any]) -> None:
        self._whole = whole

    def __call__(self, hidden_states: torch.Tensor, *rest: Any, **options: Any) -> Any:
        _, second = hidden_states.chunk(2, -1)
        output, context = self._whole(_contract(hidden_states), *rest, **options)
        return torch.cat([second, output], -1), context


OF_MODELS: dict[str, Change] = {
    "hook on output": hook_on_output,
    "scaled output": scaled_output,
    "hook on shard": hook_on_shard,
    "penalty on shard": penalty_on_shard,
    "mhc streams": partial(
        residual_streams, switch="enable_mhc_connections", count="mhc_num_residual_streams"
    ),
    "hyper streams": partial(
        residual_streams, switch="enable_hyper_connections", count="num_residual_streams"
    ),
}
"""Those to a whole chunk: refused beside a vocabulary that is sharded over the ranks, and wider."""
OTHERS: dict[str, Change] = {"late penalty": late_penalty}
"""Those whose sums W and B form in another order than Megatron, once."""


# --- state that forwards read and update


def running_average(layer: Any) -> None:
    """Of an MLP's output, in a buffer that is changed in place, as norms of a batch have it."""
    layer.mlp.register_buffer("average", torch.zeros(()))

    def shift(module: Any, _inputs: Any, output: Any) -> Any:
        before = module.average.clone()
        module.average.mul_(0.9).add_(0.1 * output[0].detach().float().mean())
        return output[0] + before, *output[1:]

    layer.mlp.register_forward_hook(shift)


def new_average(layer: Any) -> None:
    """The same in an attribute that every forward sets anew."""
    layer.mlp.average = torch.zeros(())

    def shift(module: Any, _inputs: Any, output: Any) -> Any:
        before, mean = module.average, output[0].detach().float().mean()
        module.average = 0.9 * before + 0.1 * mean
        return output[0] + before, *output[1:]

    layer.mlp.register_forward_hook(shift)


def counter(layer: Any) -> None:
    """The number of forwards with gradients, as Megatron's routers count them."""
    layer.mlp.calls = 0

    def scale(module: Any, _inputs: Any, output: Any) -> Any:
        module.calls += torch.is_grad_enabled()
        return output[0] * (1 + 0.01 * module.calls), *output[1:]

    layer.mlp.register_forward_hook(scale)


def history(layer: Any) -> None:
    """A list of means, and sums by name, which a closure has."""
    means: list[float] = []
    sums = {"sum": torch.zeros(())}

    def scale(_module: Any, _inputs: Any, output: Any) -> Any:
        means.append(float(output[0].detach().float().mean()))
        sums["sum"] += means[-1]
        return output[0] * (1 + sum(means[-3:]) + 0.1 * sums["sum"]), *output[1:]

    layer.mlp.register_forward_hook(scale)


class _Tracker:
    """A user's object that a module holds, with a state that its first use makes."""

    def update(self, mean: float) -> float:
        self.total = mean + getattr(self, "total", 0.0)
        return self.total


def object_with_state(layer: Any) -> None:
    tracker = _Tracker()

    def shift(_module: Any, _inputs: Any, output: Any) -> Any:
        return output[0] + tracker.update(float(output[0].detach().mean())), *output[1:]

    layer.mlp.register_forward_hook(shift)


_FORWARDS = 0


def global_counter(layer: Any) -> None:
    """The number of forwards of all layers of a rank."""
    global _FORWARDS
    _FORWARDS = 0

    def scale(_module: Any, _inputs: Any, output: Any) -> Any:
        global _FORWARDS
        _FORWARDS += 1
        return output[0] * (1 + 0.01 * (_FORWARDS % 7)), *output[1:]

    layer.mlp.register_forward_hook(scale)


def scratch(layer: Any) -> None:
    """An activation that every forward sets anew, for someone who looks at it later."""

    def keep(module: Any, _inputs: Any, output: Any) -> None:
        module.latest = output[0].detach().repeat(2000, 1, 1)

    layer.mlp.register_forward_hook(keep)


def cache(layer: Any) -> None:
    """A mask that the first forward makes."""
    layer.mlp.mask = None

    def keep(module: Any, _inputs: Any, output: Any) -> Any:
        if module.mask is None:
            module.mask = torch.ones(output[0].shape[-1], dtype=output[0].dtype)
        return output[0] * module.mask, *output[1:]

    layer.mlp.register_forward_hook(keep)


STATEFUL: dict[str, Change] = {
    "running average": running_average,
    "new average": new_average,
    "counter": counter,
    "history": history,
    "object with state": object_with_state,
    "scratch": scratch,
    "cache": cache,
}
"""Those whose forwards read what earlier ones of their layer have left."""
OTHERS |= STATEFUL | {"global counter": global_counter}
OTHERS |= {"in 32 bits": kept_in_32_bits, "read ahead": read_ahead}


def change(chunks: list[Any], names: tuple[str, ...]) -> None:
    """Make some changes to chunks, or to the layers of each, in their order."""
    for name in names:
        for chunk in chunks:
            if name in OF_MODELS:
                OF_MODELS[name](chunk)
                continue
            for layer in chunk.decoder.layers:
                (OTHERS[name] if name in OTHERS else CHANGES[name][0])(layer)

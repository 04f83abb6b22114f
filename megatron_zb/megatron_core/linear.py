"""Megatron's column- and row-parallel linear layers with their backward split.

Each layer's own ``_forward_impl`` is replaced, on the instance, by one that runs Megatron's forward
unchanged and, while its chunk's queue collects, leaves the weight gradient to W. The output layer
and the local experts are such layers too.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.layers import (
    LinearWithGradAccumulationAndAsyncCommunication as MegatronLinear,
)

from megatron_zb.megatron_core.random_streams import global_modules
from megatron_zb.megatron_core.split_backward import (
    SequenceShard,
    SplitBackward,
    Unsplit,
    gathering,
    held,
    whole,
)
from megatron_zb.runtime.weight_grad import WeightGradQueue

_ARGUMENTS = list(inspect.signature(MegatronLinear.forward).parameters)[1:]
# Of all arguments after the input, the weight and the bias.
_NO_GRADIENTS = (None,) * (len(_ARGUMENTS) - 3)


_BASES = (ColumnParallelLinear, RowParallelLinear)
_OVERRIDDEN = "its class has a forward of its own"


def split_linear_layers(chunk: torch.nn.Module, split: SplitBackward) -> None:
    """Let every column- and row-parallel layer of a chunk use the queue."""
    for name, module in global_modules(chunk).items():
        if isinstance(module, VocabParallelEmbedding):
            split.keep_lookup(module.weight)
        elif isinstance(module, _BASES):
            if _runs_megatrons_forward(module):
                layer = _Layer(name, module, split, module._forward_impl)
                module._forward_impl = partial(_forward, layer)
            elif module.weight is not None:
                split.unsplit[name] = Unsplit(_OVERRIDDEN, module.weight.numel())


def _runs_megatrons_forward(module: Any) -> bool:
    """Return whether neither the class of a layer nor the layer itself replaces the forward."""
    own = "_forward_impl" in vars(module)
    return not own and any(type(module)._forward_impl is base._forward_impl for base in _BASES)


class _Layer(NamedTuple):
    """A layer by its global name, with its own forward."""

    name: str
    module: Any
    split: SplitBackward
    stock: Any


def _forward(layer: _Layer, *given: Any, **named: Any) -> torch.Tensor:
    """Run the forward with a split backward, or Megatron's own if the layer is not to be split."""
    _, module, split, stock = layer
    arguments = dict(zip(_ARGUMENTS, given, strict=False)) | named
    weight, fused = arguments["weight"], bool(arguments.get("gradient_accumulation_fusion"))
    if (
        not weight.requires_grad
        or arguments.get("grad_output_buffer") is not None
        or not split.takes(layer.name, module, weight, fused=fused)
    ):
        result: torch.Tensor = stock(**arguments)
        return result
    if arguments.get("tp_group") is None:
        arguments["tp_group"] = parallel_state.get_tensor_model_parallel_group()
    return SplitLinear.apply(layer, _gathers_gradient(module), *map(arguments.get, _ARGUMENTS))


def _gathers_gradient(module: Any) -> torch.distributed.ProcessGroup | None:
    """Return the group that gathers a layer's output gradient along the sequence, if any."""
    scatters_output = (
        isinstance(module, RowParallelLinear)
        and module.sequence_parallel
        and not module.explicit_expert_comm
        and module.tp_group.size() > 1
    )
    return module.tp_group if scatters_output else None


class SplitLinear(torch.autograd.Function):
    """Megatron's linear function with a backward that defers to the queue."""

    splits_backward = True

    @staticmethod
    def forward(
        ctx: Any,
        layer: _Layer,
        gathers_gradient: torch.distributed.ProcessGroup | None,
        *arguments: Any,
    ) -> torch.Tensor:
        ctx.layer, ctx.gathers_gradient = layer, gathers_gradient
        # saved tensors may come back as other objects, without what Megatron hangs on a weight
        ctx.parameter = arguments[1]
        return MegatronLinear.forward(ctx, *arguments)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        weight, queue = ctx.parameter, ctx.layer.split.queue
        if not ctx.layer.split.defers((weight,)):
            return (None, None, *MegatronLinear.backward(ctx, grad_output))
        input_ = ctx.saved_tensors[0]  # asked for once: a checkpoint without reentry allows no more
        grad_input = _input_gradient(ctx, grad_output, input_)
        grad_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
        call = _Call(ctx.gradient_accumulation_fusion, ctx.main_grad, _uses(queue, weight))
        operands = _operands(ctx, input_, grad_output)
        add = partial(_add_weight_gradient, call, weight, *operands)
        prepare, name = gathering(operands), ctx.layer.name
        queue.defer(add, *map(held, operands), weights=(weight,), prepare=prepare, layer=name)
        return (None, None, grad_input, None, grad_bias, *_NO_GRADIENTS)


def _uses(queue: WeightGradQueue, weight: torch.Tensor) -> _Uses:
    """Return the uses of a weight in the graph whose backward runs, with one more."""
    key = torch._C._current_graph_task_id(), id(weight)
    uses: _Uses = queue.scratch.setdefault(key, _Uses())
    uses.left += 1
    return uses


@dataclass(slots=True)
class _Uses:
    """The uses of one weight in a graph: multi-token prediction runs the output layer again.

    Autograd sums the gradients of a graph before it adds them to the weight's: so does W. What is
    recomputed in a backward is a graph of its own.
    """

    left: int = 0
    gradient: torch.Tensor | None = None

    def add(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        self.left -= 1
        self.gradient = gradient if self.gradient is None else self.gradient + gradient
        if not self.left:
            accumulate(weight, self.gradient)
            self.gradient = None


class _Call(NamedTuple):
    """The data of a forward that its deferred weight gradient needs, without the graph."""

    fused: bool
    main_grad: torch.Tensor | None
    uses: _Uses


def _operands(
    ctx: Any, input_: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor | SequenceShard, torch.Tensor | SequenceShard]:
    """Return the operands of W; those gathered along the sequence are kept as shards until W."""
    group = ctx.gathers_gradient
    input_ = input_.detach()  # with its graph, it would keep the input of the whole stage
    return (
        SequenceShard(input_, ctx.tp_group) if ctx.sequence_parallel else input_,
        grad_output if group is None else SequenceShard.of(grad_output, group),
    )


def _input_gradient(ctx: Any, grad_output: torch.Tensor, input_: torch.Tensor) -> torch.Tensor:
    grad_input = grad_output.matmul(ctx.parameter)
    if ctx.allreduce_dgrad:
        torch.distributed.all_reduce(grad_input, group=ctx.tp_group)
    if ctx.sequence_parallel:
        scattered = grad_input.new_empty(input_.size())
        torch.distributed.reduce_scatter_tensor(scattered, grad_input, group=ctx.tp_group)
        return scattered
    return grad_input


def _add_weight_gradient(
    call: _Call,
    weight: torch.Tensor,
    kept_input: torch.Tensor | SequenceShard,
    kept_gradient: torch.Tensor | SequenceShard,
    *_held: torch.Tensor,
) -> None:
    input_, grad_output = whole(kept_input), whole(kept_gradient)
    input_ = input_.reshape(-1, input_.size(-1))
    grad_output = grad_output.reshape(-1, grad_output.size(-1))
    if call.fused:
        accumulate_fused(input_, grad_output, call.main_grad)
    else:
        call.uses.add(weight, grad_output.t().matmul(input_))


def accumulate_fused(
    input_: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor | None
) -> None:
    """Add a weight gradient to ``main_grad`` with apex's kernel."""
    import fused_weight_gradient_mlp_cuda as kernels

    assert main_grad is not None
    if main_grad.dtype is torch.float32:
        kernels.wgrad_gemm_accum_fp32(input_, grad_output, main_grad)
    else:
        kernels.wgrad_gemm_accum_fp16(input_, grad_output, main_grad)


def accumulate(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a weight gradient to the buffer that Megatron's optimizer reads."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)

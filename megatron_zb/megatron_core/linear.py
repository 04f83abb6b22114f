"""Megatron's column- and row-parallel linear layers with their backward split.

Each layer's own ``_forward_impl`` is replaced, on the instance, by one that runs Megatron's forward
unchanged and, while its chunk's queue collects, leaves the weight gradient to W. The output layer
and the local experts are such layers too.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
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

from megatron_zb.megatron_core.shards import Shard, gathering, held, whole
from megatron_zb.runtime.weight_grad import WeightGradQueue

_ARGUMENTS = list(inspect.signature(MegatronLinear.forward).parameters)[1:]
# Of all arguments after the input, the weight and the bias.
_NO_GRADIENTS = (None,) * (len(_ARGUMENTS) - 3)


@dataclass
class SplitBackward:
    """Settings by which the layers of one chunk split their backward.

    ``hooks_need_gradients``: see :func:`_placeholder`. ``whole``: weights whose gradient stays in
    B, see :func:`split_linear_layers`.
    """

    queue: WeightGradQueue
    hooks_need_gradients: bool = False
    whole: list[torch.Tensor] = field(default_factory=list)

    def splits(self, weight: torch.Tensor) -> bool:
        if self.whole and any(weight is w for w in self.whole):
            return False
        return weight.requires_grad


def split_linear_layers(chunk: torch.nn.Module, split: SplitBackward) -> None:
    """Let every trainable column- and row-parallel layer of a chunk use the queue.

    An output layer may have its weight from an embedding of the same chunk: tied weights and
    multi-token prediction together. The lookup leaves its part of the gradient in B, and the sum
    must be formed there, too. ``zero_out_wgrad`` is Megatron's word for such a weight: without it,
    fused accumulation loses the part of the lookup.
    """
    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module._forward_impl = partial(_forward, module._forward_impl, split, module)
        elif isinstance(module, VocabParallelEmbedding):
            split.whole.append(module.weight)
            module.weight.zero_out_wgrad = True


def _forward(stock: Any, split: SplitBackward, module: Any, **arguments: Any) -> torch.Tensor:
    """Run the forward with a split backward, or ``stock``, Megatron's own, if nothing is split."""
    if not split.splits(arguments["weight"]) or arguments.get("grad_output_buffer") is not None:
        result: torch.Tensor = stock(**arguments)
        return result
    if arguments.get("tp_group") is None:
        arguments["tp_group"] = parallel_state.get_tensor_model_parallel_group()
    return SplitLinear.apply(split, _gathers_gradient(module), *map(arguments.get, _ARGUMENTS))


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

    @staticmethod
    def forward(
        ctx: Any,
        split: SplitBackward,
        gathers_gradient: torch.distributed.ProcessGroup | None,
        *arguments: Any,
    ) -> torch.Tensor:
        ctx.split, ctx.gathers_gradient = split, gathers_gradient
        # saved tensors may come back as other objects, without what Megatron hangs on a weight
        ctx.parameter = arguments[1]
        return MegatronLinear.forward(ctx, *arguments)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        input_, weight = ctx.saved_tensors[0], ctx.parameter
        if not ctx.split.queue.deferring:
            if not ctx.gradient_accumulation_fusion:
                weight.grad_added_to_main_grad = False
            return (None, None, *MegatronLinear.backward(ctx, grad_output))
        grad_input = _input_gradient(ctx, grad_output, weight)
        grad_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
        scratch = ctx.split.queue.scratch
        uses = scratch.get(id(weight))
        if uses is None:
            uses = scratch[id(weight)] = _Uses()
        uses.left += 1
        call = _Call(ctx.gradient_accumulation_fusion, ctx.main_grad, uses)
        operands = _operands(ctx, input_, grad_output)
        add = partial(_add_weight_gradient, call, weight, *operands)
        prepare = gathering(operands)
        ctx.split.queue.defer(add, *map(held, operands), weights=(weight,), prepare=prepare)
        gradients = grad_input, _placeholder(weight, ctx.split), grad_bias
        return (None, None, *gradients, *_NO_GRADIENTS)


@dataclass(slots=True)
class _Uses:
    """The uses of one weight in one microbatch: multi-token prediction runs the output layer again.

    Autograd sums the gradients of a microbatch before it adds them to the weight's: so does W.
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
) -> tuple[torch.Tensor | Shard, torch.Tensor | Shard]:
    """Return the operands of W; those gathered along the sequence are kept as shards until W."""
    group = ctx.gathers_gradient
    input_ = input_.detach()  # with its graph, it would keep the input of the whole stage
    return (
        Shard(input_, ctx.tp_group) if ctx.sequence_parallel else input_,
        grad_output if group is None else Shard.of(grad_output, group),
    )


def _input_gradient(ctx: Any, grad_output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    grad_input = grad_output.matmul(weight)
    if ctx.allreduce_dgrad:
        torch.distributed.all_reduce(grad_input, group=ctx.tp_group)
    if ctx.sequence_parallel:
        scattered = grad_input.new_empty(ctx.saved_tensors[0].size())
        torch.distributed.reduce_scatter_tensor(scattered, grad_input, group=ctx.tp_group)
        return scattered
    return grad_input


def _placeholder(weight: Any, split: SplitBackward) -> torch.Tensor | None:
    """Return the result of B for a weight whose gradient comes later.

    Megatron's data-parallel hook fires even when there is no gradient; with overlapping reduction
    it requires one, and leaves ``main_grad`` alone where ``grad_added_to_main_grad`` is set.
    """
    if not hasattr(weight, "main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight) if split.hooks_need_gradients else None


def _add_weight_gradient(
    call: _Call,
    weight: torch.Tensor,
    kept_input: torch.Tensor | Shard,
    kept_gradient: torch.Tensor | Shard,
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

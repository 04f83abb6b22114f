"""Split backward of linear layers: B returns the input gradient and defers the weight gradient.

B puts the weight gradient of a layer into a queue, and W runs the queue. W computes the gradient of
one use of a weight: its product with the layer's input. So a layer is split only where that is the
whole gradient, and where B does not need it:

- the weight is a leaf parameter of the layer, not the result of a parametrization;
- it has no hooks, which would get nothing in B and would not run in W;
- no other operation uses it, such as a penalty in the loss.

Each is decided from what is there when a forward or a backward runs, since users change models
after they are built. A layer that is not split computes its weight gradient in B, by Megatron's own
function.

Sequence parallelism gathers the input of a column-parallel layer and the output gradient of a
row-parallel one along their first dimension, over the tensor-parallel group. A weight gradient
needs them gathered, but from B to W a rank keeps only its own :class:`SequenceShard`, and gathers
again in W, concurrently with the weight gradient before it.

Of Megatron's column- and row-parallel linear layers, the output layer and the local experts among
them, ``_forward_impl`` is replaced, on the instance, by one that runs Megatron's forward unchanged
and, while its chunk's queue collects, leaves the weight gradient to W.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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
from megatron_zb.runtime.autograd_stage import WeightGradQueue

COMPUTED = "its weight is computed from other tensors"
FOREIGN = "its weight is no parameter of its own"
HOOKED = "its weight has a hook"
USED_ELSEWHERE = "another operation uses its weight, too"


class Unsplit(NamedTuple):
    """Why a layer is not split, and how many numbers its weight has."""

    reason: str
    size: int


class SplitBackward:
    """The layers of one chunk whose weight gradients go to a queue.

    ``hooks_need_gradients`` says that Megatron's data-parallel hook requires a gradient of every
    weight: it overlaps the reduction. Nothing is split while ``is_off``.
    """

    def __init__(self, queue: WeightGradQueue, *, hooks_need_gradients: bool = False) -> None:
        self.queue = queue
        self.hooks_need_gradients = hooks_need_gradients
        self.is_off = False
        self.unsplit: dict[str, Unsplit] = {}
        """The layers that are not split, by global name."""
        self.has_looked = False
        """Whether :meth:`look_at` has seen the graph of a forward."""
        self._weights: dict[int, DeferredWeight] = {}
        self._lookups: list[torch.Tensor] = []
        self._told: set[str] = set()

    def keep_lookup(self, weight: Any) -> None:
        """Let B compute the gradient of a word embedding, also where an output layer uses it.

        The lookup leaves its part of the gradient in B, and the sum must also be formed there.
        ``zero_out_wgrad`` is Megatron's word for such a weight: without it, fused accumulation
        loses the part of the lookup.
        """
        self._lookups.append(weight)
        weight.zero_out_wgrad = True

    def takes(
        self,
        layer: str,
        module: torch.nn.Module,
        weight: Any,
        *,
        fused: bool = False,
        is_bias: bool = False,
    ) -> bool:
        """Return whether W may compute the gradient of a weight; to be asked in every forward.

        Args:
            layer: global name of the layer.
            module: the layer.
            weight: the tensor that the layer multiplies with, which requires a gradient.
            fused: its gradient is added to ``main_grad`` by the product itself.
            is_bias: it is a bias, whose gradient may be computed in B as well.
        """
        known = self._weights.get(id(weight))
        if known is None or known.weight is not weight:
            if any(weight is lookup for lookup in self._lookups):
                return False
            reason = _why_not(module, weight)
            if reason is not None:
                self.leave(layer, reason, weight)
                return False
            known = DeferredWeight(self, layer, weight, Traits(fused, is_bias))
            self._weights[id(weight)] = known
        return known.can_wait and not self.is_off

    def leave(self, layer: str, reason: str, weight: torch.Tensor) -> None:
        """Remember that B computes the weight gradient of a layer, with the first reason for it."""
        self.unsplit.setdefault(layer, Unsplit(reason, weight.numel()))

    def defers(self, weights: Iterable[Any]) -> bool:
        """Return whether W computes the gradients of these weights, to be asked in a backward."""
        if not self.queue.deferring or self.is_off:
            return False
        known = [self._weights.get(id(weight)) for weight in weights]
        for one in known:
            if one is not None and one.can_wait and has_hooks(one.weight):
                self._keep_in_b(one, HOOKED)
        return all(one is not None and one.can_wait for one in known)

    def look_at(self, output: torch.Tensor) -> None:
        """Find the weights that other operations also use, in the graph of a forward."""
        self.has_looked = True
        for node, leaf in uses_of_leaves(output.grad_fn):
            known = self._weights.get(id(leaf))
            if known is not None and known.weight is leaf and not _is_layer(node):
                self.found_elsewhere(known)

    def found_elsewhere(self, weight: DeferredWeight) -> None:
        """Leave the gradient of a weight in B from now on: a part of it has come there."""
        self._keep_in_b(weight, USED_ELSEWHERE)
        weight.weight.zero_out_wgrad = True  # or fused accumulation loses that part

    def _keep_in_b(self, weight: DeferredWeight, reason: str) -> None:
        weight.can_wait = False
        self.leave(weight.layer, reason, weight.weight)

    def news(self) -> list[str]:
        """Return a line for each reason why layers are not split, with those not named before."""
        by_reason: dict[str, list[str]] = {}
        for layer, unsplit in self.unsplit.items():
            if layer not in self._told:
                by_reason.setdefault(unsplit.reason, []).append(layer)
        self._told |= self.unsplit.keys()
        return [
            f"{', '.join(layers)}: not split, B computes the weight gradient, since {reason}"
            for reason, layers in by_reason.items()
        ]

    @property
    def split_layers(self) -> set[str]:
        """The global names of the layers whose weight gradients go to W."""
        return {weight.layer for weight in self._weights.values() if weight.can_wait}

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers in the weights whose gradients B computes, and in those that are left to W."""
        unsplit = sum(layer.size for layer in self.unsplit.values())
        split = sum(w.weight.numel() for w in self._weights.values() if w.can_wait)
        return unsplit, split


class Traits(NamedTuple):
    """See :meth:`SplitBackward.takes`."""

    fused: bool
    is_bias: bool


class DeferredWeight:
    """A weight whose gradient W computes, and the hook that prepares for data parallelism's.

    Megatron's data-parallel hook fires after each backward, also where there is no gradient. With
    overlapping reduction it requires one, and leaves ``main_grad`` alone where
    ``grad_added_to_main_grad`` is set. A gradient that has come is added, although an earlier B may
    have set that. Fused accumulation sets it itself: its gradient is but a dummy.
    """

    def __init__(self, split: SplitBackward, layer: str, weight: Any, traits: Traits) -> None:
        self.layer, self.weight = layer, weight
        self.can_wait = True
        self._split, self._traits = split, traits
        weight.register_hook(self)

    def __call__(self, gradient: torch.Tensor | None) -> None:
        split, weight = self._split, self.weight
        waits = split.queue.deferring and split.queue.awaits(weight)
        if gradient is None:
            if split.hooks_need_gradients and (waits or self._traits.fused):
                self._give_dummy()
            return
        if self._traits.fused:
            return
        weight.grad_added_to_main_grad = False
        if waits and not self._traits.is_bias:
            split.found_elsewhere(self)

    def _give_dummy(self) -> None:
        """Give the hook the gradient that it requires; ``main_grad`` has or will have the real one.

        Where nothing waits, the weight's fused product has run and has left no dummy: before 2.15,
        Transformer-Engine does not see a parameter in what saved-tensor hooks give back. Megatron
        adds the dummy of a weight with ``zero_out_wgrad``.
        """
        weight = self.weight
        make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        shape, device = weight.shape, weight.device  # the weight may be quantised
        weight.grad = make(shape, dtype=weight.dtype, device=device)
        weight.grad_added_to_main_grad = True


def has_hooks(weight: Any) -> bool:
    """Return whether a user has registered a hook on a weight."""
    hooks = weight._backward_hooks
    if hooks and any(not isinstance(hook, DeferredWeight) for hook in hooks.values()):
        return True
    return bool(weight._post_accumulate_grad_hooks)


def uses_of_leaves(start: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each node of an autograd graph that uses a leaf, with the leaf."""
    seen, left = {start}, [start]
    while left:
        node = left.pop()
        for other, _ in () if node is None else node.next_functions:
            if type(other).__name__ == "AccumulateGrad":
                yield node, other.variable
            elif other not in seen:
                seen.add(other)
                left.append(other)


def _why_not(module: torch.nn.Module, weight: torch.Tensor) -> str | None:
    if not weight.is_leaf:
        return COMPUTED
    if not any(weight is parameter for parameter in module._parameters.values()):
        return FOREIGN
    return HOOKED if has_hooks(weight) else None


def _is_layer(node: Any) -> bool:
    """Return whether a node is that of a layer which can leave its weight gradient to W."""
    function = getattr(type(node), "_forward_cls", None)
    if function is None:
        return False
    splits: bool = getattr(function, "splits_backward", False)
    return splits or function.__module__.startswith("transformer_engine.")


class SequenceShard:
    """One rank's part of a tensor that W needs whole; only ``own`` is held until then.

    All ranks of ``group`` run the same W in the same order, so that their gathers meet.
    """

    def __init__(self, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.own = own
        self._group = group
        self._whole: torch.Tensor | None = None
        self._work: Any = None

    @classmethod
    def of(cls, whole: torch.Tensor, group: dist.ProcessGroup) -> SequenceShard:
        """Copy this rank's part of a tensor, so that the whole may be freed or reused."""
        return cls(whole.chunk(group.size())[group.rank()].clone(), group)

    def start(self) -> None:
        """Start the gather, which runs concurrently until :meth:`whole`."""
        if self._whole is None:
            own = self.own.contiguous()
            self._whole = own.new_empty((own.size(0) * self._group.size(), *own.shape[1:]))
            self._work = dist.all_gather_into_tensor(
                self._whole, own, group=self._group, async_op=True
            )

    def whole(self) -> torch.Tensor:
        """Return the gathered tensor, for one use."""
        self.start()
        self._work.wait()
        whole, self._whole, self._work = self._whole, None, None
        assert whole is not None
        return whole


def held(operand: Any) -> Any:
    """Return the part of an operand that is kept until W; other than shards, the operand itself."""
    return operand.own if isinstance(operand, SequenceShard) else operand


def whole(operand: Any) -> Any:
    """Return the operand of a weight gradient, with a shard gathered; others as they are."""
    return operand.whole() if isinstance(operand, SequenceShard) else operand


def gathering(operands: Iterable[Any]) -> Callable[[], None] | None:
    """Return the function that starts to gather the shards among operands; None without any."""
    shards = [operand for operand in operands if isinstance(operand, SequenceShard)]
    return partial(_start_gathers, shards) if shards else None


def _start_gathers(shards: list[SequenceShard]) -> None:
    for shard in shards:
        shard.start()


# --- Megatron's linear layers


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
    upstream: Any


def _forward(layer: _Layer, *given: Any, **named: Any) -> torch.Tensor:
    """Run the forward with a split backward, or Megatron's own if the layer is not to be split."""
    _, module, split, upstream = layer
    arguments = dict(zip(_ARGUMENTS, given, strict=False)) | named
    weight, fused = arguments["weight"], bool(arguments.get("gradient_accumulation_fusion"))
    if (
        not weight.requires_grad
        or arguments.get("grad_output_buffer") is not None
        or not split.takes(layer.name, module, weight, fused=fused)
    ):
        result: torch.Tensor = upstream(**arguments)
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
        grad_output = grad_output.to(input_.dtype)  # logits may have another type than their input
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

"""Transformer-Engine's linear layers with their backward split.

Transformer-Engine (TE) delays weight gradients itself: in backward, a module whose
``wgrad_store`` says so hands the store the operands of its weight gradient and the function that
computes it. TE's own store keeps them until ``module.backward_dw()``. Here every module of a chunk
gets a store that hands them to the chunk's queue instead, so that W runs them in B's order.

The store is replaced on modules that exist, so models are built as always: no construction flag,
which megatron-core accepts only together with other features, and which marks parameters
so that data parallelism leaves them alone. ``backward_dw()`` stays unused because of what it does
with the result: it overwrites ``weight.grad``, drops every bias gradient but the first, and
ignores ``main_grad``. The interface of a store has been the same in every version of TE that has
one, see ``versions.OLDEST_TRANSFORMER_ENGINE``.

In fp8 and fp4 the operands are quantised in F and B, with scales of their own: W quantises nothing
and updates no scale, so it makes no difference to the histories of delayed scaling when it runs.
TE quantises each weight once in a step, in F of the first microbatch, as without a split.

Nothing here imports TE before a model has imported it: it is optional.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.random_streams import global_modules
from megatron_zb.megatron_core.refusals import reason
from megatron_zb.megatron_core.split_backward import (
    COMPUTED,
    SequenceShard,
    SplitBackward,
    accumulate,
    gathering,
    held,
    whole,
)
from megatron_zb.parsing import flag_of


def split_transformer_engine(chunk: torch.nn.Module, split: SplitBackward, schedule: str) -> None:
    """Let every linear layer of TE in a chunk use the queue.

    Raises:
        UsageError: this TE, or a setting of the model, cannot have its weight gradients deferred.
    """
    _refuse_operations(chunk, schedule)
    modules = {name: m for name, m in global_modules(chunk).items() if is_linear(m)}
    if not modules:
        return
    _refuse_old_version(schedule)
    for name, module in modules.items():
        _refuse_bulk_overlap(module, schedule)
        if _can_split(module):
            _split(name, module, split)
    for module in chunk.modules():
        if getattr(module, "_with_fused_impl", False):
            _refuse_zero_copy(module, schedule)
            _split_operations(module, split)


def is_linear(module: Any) -> bool:
    """Return whether a module is one of TE's whose backward has a weight gradient."""
    if "transformer_engine.pytorch" not in sys.modules:
        return False  # then there is no such module
    from transformer_engine import pytorch as te

    return isinstance(module, te.Linear | te.LayerNormLinear | te.LayerNormMLP | te.GroupedLinear)


def _can_split(module: Any) -> bool:
    """Return whether the module's W would do all that its B leaves out; else B stays whole.

    It would not where parameters are parts of what TE computes with: a weight that was split into
    several parameters, experts in one parameter, a weight that is sharded over other ranks. With
    ``use_grouped_tensor`` it has not been shown: that path hands other operands to the store, and
    its kernels need a GPU.
    """
    grouped = ("single_grouped_weight", "use_grouped_tensor")
    if any(getattr(module, name, False) for name in grouped):
        return False
    if len(getattr(module, "weight_names", [])) > 1:
        return False
    weights = [weight for results in _results(module) for weight in results.weights]
    return not any(getattr(weight, "is_distributed_weight", False) for weight in weights)


@dataclass(frozen=True)
class _Results:
    """The parameters whose gradients one deferred function returns; ``biases`` may be missing.

    ``gathered`` is the operand, 0 the input and 1 the output gradient, that B has gathered.
    """

    weights: list[Any]
    biases: list[Any]
    grouped: bool = False
    gathered: int | None = None


def _results(module: Any) -> list[_Results]:
    """Return the results that a module's backward hands to its store, in that order."""
    if hasattr(module, "fc1_weight"):
        names = [("fc2_weight", "fc2_bias", "row"), ("fc1_weight", "fc1_bias", "column")]
    elif hasattr(module, "num_gemms"):
        experts = range(module.num_gemms)
        weights = [getattr(module, f"weight{i}") for i in experts]
        return [_Results(weights, [getattr(module, f"bias{i}") for i in experts], grouped=True)]
    else:
        mode = module.parallel_mode
        names = [(w, b, mode) for w, b in zip(module.weight_names, module.bias_names, strict=True)]
    return [
        _Results(
            [getattr(module, weight)],
            [getattr(module, bias, None)],
            gathered=_GATHERED.get(mode) if _gathers_sequence(module) else None,
        )
        for weight, bias, mode in names
    ]


# By how a layer is parallel: the operand of its W that sequence parallelism gathers in B.
_GATHERED = {"column": 0, "row": 1}


def _gathers_sequence(module: Any) -> bool:
    return module.sequence_parallel and module.tp_size > 1 and module.tp_group is not None


def _split(name: str, module: Any, split: SplitBackward) -> None:
    store = _Store(name, module, split)
    module.wgrad_store = store
    module.forward = partial(_forward, store, module.forward)


def _split_operations(experts: Any, split: SplitBackward) -> None:
    """Let the operations that grouped experts fuse defer weight gradients, as their layers would.

    Megatron builds them in the first F, with the layers' parameters; a bias gets its gradient in B.
    What a paged stash has saved of them is in memory of its own when B hands it over.
    """
    build = experts._make_fused_ops

    def build_and_split() -> Any:
        operations = build()
        layers = experts.linear_fc1, experts.linear_fc2
        for operation, layer in zip(list(operations)[::2], layers, strict=True):
            if isinstance(layer.wgrad_store, _Store):
                name, (results,) = layer.wgrad_store.layer, layer.wgrad_store.results
                store = _Store(name, layer, split, [replace(results, biases=[])])
                store.takes()
                operation.wgrad_store = store
        return operations

    experts._make_fused_ops = build_and_split


def _forward(store: _Store, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run TE's forward, marked in the store: TE delays if set in forward *and* in backward."""
    store.in_forward = store.takes()
    quantize_weights_anew(store.module)
    try:
        return whole(*args, **kwargs)
    finally:
        store.in_forward = False


def quantize_weights_anew(module: Any) -> None:
    """Let a step's first F quantise the weights again, which later microbatches then use as well.

    TE would do so for the first microbatch, but then let its weight gradient
    overwrite ``main_grad``, although a BW of another microbatch may come before its W. Without its
    copies it makes new ones. Where no gradient will follow, as in an evaluation, TE is told: it
    writes into its copies, which CUDA graphs of the module may also write into.
    """
    if getattr(module, "is_first_microbatch", False) and torch.is_grad_enabled():
        module.is_first_microbatch = False
        module._fp8_workspaces.clear()


class _Store:
    """The replacement of a TE module's own ``WeightGradStore``."""

    def __init__(
        self,
        layer: str,
        module: Any,
        split: SplitBackward,
        results: list[_Results] | None = None,
    ) -> None:
        self.layer, self.module = layer, module
        self.results = results or _results(module)
        self.in_forward = False
        self._split = split
        self._next = cycle(self.results)

    def takes(self) -> bool:
        """Return whether W may compute the gradients of all of the module's parameters."""
        own = set(map(id, self.module._parameters.values()))
        fused = self.module.fuse_wgrad_accumulation
        for parameter, is_bias in self._parameters():
            if id(parameter) not in own:  # a parametrization has taken its place
                self._split.leave(self.layer, COMPUTED, parameter)
                return False
            traits = {"fused": fused and not is_bias, "is_bias": is_bias}
            if not self._split.takes(self.layer, self.module, parameter, **traits):
                return False
        return self._is_trainable()

    def _parameters(self) -> Iterator[tuple[Any, bool]]:
        """Yield the trainable parameters, each with whether it is a bias."""
        for results in self.results:
            for is_bias, parameters in enumerate((results.weights, results.biases)):
                for parameter in parameters:
                    if parameter is not None and parameter.requires_grad:
                        yield parameter, bool(is_bias)

    def delay_wgrad_compute(self) -> bool:
        """Return whether W computes the weight gradient: not in a BW, nor for a frozen weight."""
        return self.in_forward or (
            self._split.queue.deferring
            and self._is_trainable()
            and self._split.defers(parameter for parameter, _ in self._parameters())
        )

    def put(self, operands: list[Any], compute: Callable[..., Any]) -> None:
        """Defer ``compute(*operands)`` to W."""
        results = next(self._next)
        operands = [*map(_kept, operands[:2]), *operands[2:]]
        if results.grouped and not self.module.fuse_wgrad_accumulation:
            compute = _with_buffers_of_its_own(operands, compute)
        if results.gathered is not None:
            operands = _with_shard(operands, results.gathered, self.module)
        add = partial(self._add, results, operands, compute)
        parameters = [p for p in (*results.weights, *results.biases) if p is not None]
        prepare = gathering(operands)
        tensors, queue = _tensors(operands[:2]), self._split.queue
        queue.defer(add, *tensors, weights=parameters, prepare=prepare, layer=self.layer)

    def _is_trainable(self) -> bool:
        return all(weight.requires_grad for results in self.results for weight in results.weights)

    def _add(
        self,
        results: _Results,
        operands: list[Any],
        compute: Callable[..., Any],
        *_held: torch.Tensor,
    ) -> None:
        computed = compute(*map(whole, operands))
        if results.grouped:
            gradients, bias_gradients = operands[2], computed[1] if results.biases else []
        else:
            gradients, bias_gradients = [computed[0]], [computed[1]]
        if not self.module.fuse_wgrad_accumulation:
            _add_gradients(results.weights, gradients)
        _add_gradients(results.biases, bias_gradients)


def _with_buffers_of_its_own(
    operands: list[Any], compute: Callable[..., Any]
) -> Callable[..., Any]:
    """Allocate the buffers of the experts' gradients in W instead of B.

    They would be held from B to W, as large as the weights, once for every microbatch; and B
    returns them, with nothing in them yet, as the weights' gradients. Emptied, it returns none.
    """
    buffers = operands[2]
    like = buffers[0]
    count = len(buffers)
    buffers[:] = [None] * count
    shape, dtype, device = like.shape, like.dtype, like.device

    def compute_into_new(inputs: Any, grad_outputs: Any, gradients: list[Any]) -> Any:
        gradients[:] = torch.empty(count, *shape, dtype=dtype, device=device).unbind()
        return compute(inputs, grad_outputs, gradients)

    return compute_into_new


def _with_shard(operands: list[Any], gathered: int, module: Any) -> list[Any]:
    """Replace the operand that B has gathered by a shard in memory of its own.

    The gathered tensor may be in a communication buffer of TE's (``tp_comm_bulk_dgrad`` and
    ``tp_comm_overlap_ag``), which the next layer's B fills anew. A quantised one stays whole: its
    blocks and their scales do not divide by ranks.
    """
    kept = list(operands)
    if not _is_quantized(operands[gathered]):
        kept[gathered] = SequenceShard.of(operands[gathered], module.tp_group)
    elif any(value is True for name, value in vars(module).items() if name.startswith("ub_")):
        _leave_buffers(operands[gathered])
    return kept


def _is_quantized(operand: Any) -> bool:
    """Return whether an operand is one of TE's containers: of one tensor, or of the experts'."""
    return hasattr(operand, "update_usage") or hasattr(operand, "get_data_tensors")


def _leave_buffers(operand: Any) -> None:
    """Move the data and scales of a quantised operand to memory of its own."""
    for name, value in list(vars(operand).items()):
        if isinstance(value, torch.Tensor):
            setattr(operand, name, value.clone())


def _kept(operand: Any) -> Any:
    """Return what W needs of an operand, the part of it that must not be freed until then.

    Its graph would keep the input of the whole stage. The row-wise data of a tensor that the
    module itself has quantised is for B alone: the weight gradient multiplies columns.
    """
    if isinstance(operand, list | tuple):
        return [_kept(one) for one in operand]
    if isinstance(operand, torch.Tensor):
        return operand.detach()
    if hasattr(operand, "update_usage"):
        operand.update_usage(rowwise_usage=False, columnwise_usage=True)
    return operand


def _tensors(operands: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors held until W: the operands of each GEMM, or the data of quantised ones."""
    for operand in map(held, operands):
        if _is_quantized(operand):
            yield from _tensors(vars(operand).values())
        elif isinstance(operand, torch.Tensor):
            yield operand
        elif isinstance(operand, list | tuple):
            yield from _tensors(operand)


def _add_gradients(parameters: list[Any], gradients: list[Any]) -> None:
    """Add the gradients of W; one that is missing or empty was added by B, as of some biases."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.numel() and parameter.requires_grad:
            accumulate(parameter, gradient.to(parameter.dtype).view(parameter.shape))


def _refuse_old_version(schedule: str) -> None:
    import transformer_engine

    found = transformer_engine.__version__
    if not versions.transformer_engine_is_supported(found):
        oldest = ".".join(map(str, versions.OLDEST_TRANSFORMER_ENGINE))
        raise UsageError(
            f"--pipeline-schedule {schedule} needs Transformer-Engine {oldest} or newer, which can "
            f"defer weight gradients, but {found} is installed"
        )


def _refuse_operations(chunk: Any, schedule: str) -> None:
    """Refuse TE's operations, and dense layers of Megatron's that fuse them out of sight."""
    fuses = getattr(getattr(chunk, "config", None), _OPERATIONS, False)
    operations = [m for m in chunk.modules() if _is_operation(type(m))]
    if operations:
        said = f"a {type(operations[0]).__name__}"
        raise UsageError(_refused(_OPERATIONS, schedule, None if fuses else said))


def _refuse_zero_copy(experts: Any, schedule: str) -> None:
    if getattr(experts.config, _ZERO_COPY, False):
        raise UsageError(_refused(_ZERO_COPY, schedule))


_OPERATIONS, _ZERO_COPY = "use_transformer_engine_op_fuser", "moe_ncclep_zero_copy"


def _refused(name: str, schedule: str, said: str | None = None) -> str:
    """Return the refusal of an argument, or of the class ``said``, that stands for it."""
    why = reason(name, "split")
    return f"{said or flag_of(name)} cannot be combined with --pipeline-schedule {schedule}: {why}"


def _is_operation(kind: type) -> bool:
    is_linear = kind.__module__.startswith("transformer_engine.pytorch.ops.") and (
        "Linear" in kind.__name__
    )
    return is_linear or kind.__name__.startswith("TEFusedMLP")


def _refuse_bulk_overlap(module: Any, schedule: str) -> None:
    if getattr(module, "ub_bulk_wgrad", False):
        raise UsageError(
            f"--tp-comm-overlap cannot be combined with --pipeline-schedule {schedule} while it "
            "overlaps communication of B with the weight gradient: add --disable-tp-comm-bulk-wgrad"
        )

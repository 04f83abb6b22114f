"""Parts of Megatron core that a CPU needs otherwise: norms, experts, predictions, messages."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch


def share_norms() -> None:
    """Let torch's norms run beside sequence parallelism; imports megatron-core.

    Each rank normalises its part of the sequence, so that the gradients of a norm are summed over
    the tensor-parallel ranks, as Megatron does for weights that are marked so.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def marked(cls: Any, config: Any, *args: Any, **keywords: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = build(cls, plain, *args, **keywords)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = marked


def redirect_experts() -> None:
    """Let experts run without a GPU and without Transformer-Engine; imports megatron-core."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu  # leaves tensors that are no CUDA tensors
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 asks for it, but does not define it then
        moe_utils.te_general_gemm = None


def redirect_predictions() -> None:
    """Let multi-token prediction be built without Transformer-Engine; imports megatron-core.

    After 0.19 it asks whether its layers are those for inference over Transformer-Engine's, whose
    classes are mocks where Transformer-Engine cannot be imported: then no layer is one.
    """
    from megatron.core.transformer import multi_token_prediction

    name = "is_inference_column_parallel_linear"
    if hasattr(multi_token_prediction, name):
        from megatron.core.tensor_parallel import inference_layers

        if not isinstance(inference_layers.InferenceColumnParallelLinear, type):
            setattr(multi_token_prediction, name, lambda module: False)


def sum_norms_in_single_precision() -> None:
    """Sum norms of 16-bit weights in 32 bits, as a GPU's kernels do; imports megatron-core.

    Megatron's substitute for them rounds the norm of every tensor, and that of a rank, to the type
    of the weights, so that ``--log-params-norm`` would differ between placements.
    """
    from megatron.core import utils

    usual = utils.local_multi_tensor_l2_norm
    if hasattr(usual, "__wrapped__"):
        return

    @functools.wraps(usual)
    def of_single_precision(chunk: Any, flag: Any, lists: Any, *options: Any) -> Any:
        return usual(chunk, flag, [[each.float() for each in of] for of in lists], *options)

    utils.local_multi_tensor_l2_norm = of_single_precision


def keep_messages() -> None:
    """Keep what Megatron's own schedules send in memory until it is sent; imports megatron-core.

    Interleaved 1F1B gives an activation away right after it has begun to send it. A stream of a GPU
    keeps it; gloo would read memory that has something else in it by then.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    usual = p2p_communication._p2p_ops
    if hasattr(usual, "__wrapped__"):
        return

    @functools.wraps(usual)
    def on_aliases(**options: Any) -> Any:
        for name in ("tensor_send_prev", "tensor_send_next"):
            if options[name] is not None:
                options[name] = options[name].detach()  # keeps the memory, whatever the other does
        return usual(**options)

    p2p_communication._p2p_ops = on_aliases

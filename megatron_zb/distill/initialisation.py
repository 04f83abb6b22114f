"""Initial weights of student blocks, derived from the teacher's.

All weights follow only from the teacher's, so that every placement begins with the same student.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_zb.distill import shards
from megatron_zb.distill.student import BlockShape, TeacherShape

Weights = dict[str, torch.Tensor]

_ATTENTION, _MLP = "self_attention.", "mlp."
_QKV, _PROJECTION = "self_attention.linear_qkv.", "self_attention.linear_proj."
_FC1, _FC2 = "mlp.linear_fc1.", "mlp.linear_fc2."
_ROUTER, _EXPERT = "mlp.router.", "mlp.experts.local_experts."


def inherit(student: Any, teacher: Any, shape: BlockShape, sizes: TeacherShape) -> None:
    """Initialise a student layer from the weights of its teacher's layer.

    Norms and parts of the teacher's shape are copied. A narrower MLP keeps the channels with the
    largest products of norms of their weights in and out. Fewer heads of keys and values are means
    of the teacher's (GQA, Ainslie et al., arXiv 2305.13245, section 2.1). A linear layer is the
    product of the matrices that it stands for (Puzzle, arXiv 2411.19146, section 3). Of experts,
    those with the largest sums of these products are kept. Collective over the ranks that share the
    block.

    Args:
        student: a TransformerLayer of `shape`.
        teacher: the TransformerLayer of the same block.
        sizes: the sizes of the teacher.
    """
    weights = shards.whole(teacher)
    buffers = dict(teacher.named_buffers())  # what balances experts, which stays
    in_layer = shape.mlp == "mlp" and shape.num_experts < _experts(teacher)
    if in_layer:
        weights = shards.with_all_experts(teacher, weights)
        kept = _strongest_experts(weights, shape.num_experts)
        weights = _only_experts(weights, kept)
        buffers = {
            name: value[kept] if _is_of_router(name) else value for name, value in buffers.items()
        }
    weights |= _attention(weights, shape, sizes) | _mlp(weights, shape)
    with torch.no_grad():
        for name, buffer in student.named_buffers():
            buffer.copy_(buffers[name])
        for name, parameter in student.named_parameters():
            given = shards.name_in_layer(student, name) if in_layer else name
            parameter.copy_(shards.shard_of(student, name, parameter, weights[given]))


def _attention(weights: Weights, shape: BlockShape, sizes: TeacherShape) -> Weights:
    if shape.attention == "no_op":
        return {}
    if shape.attention == "linear":
        return _linear_attention(weights, sizes)
    if shape.num_query_groups == sizes.num_query_groups:
        return {}
    return {
        name: _fewer_groups(value, shape.num_query_groups, sizes)
        for name, value in weights.items()
        if name.startswith(_QKV)
    }


def _by_group(rows: torch.Tensor, sizes: TeacherShape) -> torch.Tensor:
    """Reshape rows of queries, keys and values to (groups, queries of a group + 2, head, ...)."""
    queries = sizes.num_attention_heads // sizes.num_query_groups
    return rows.reshape(sizes.num_query_groups, queries + 2, sizes.head_size, *rows.shape[1:])


def _fewer_groups(rows: torch.Tensor, groups: int, sizes: TeacherShape) -> torch.Tensor:
    whole = _by_group(rows, sizes)
    merged = whole.reshape(groups, -1, *whole.shape[1:])  # (groups, merged, queries + 2, head, ...)
    queries = merged[:, :, :-2].flatten(1, 2)
    keys_and_values = merged[:, :, -2:].mean(dim=1)
    return torch.cat([queries, keys_and_values], dim=1).flatten(0, 2)


def _linear_attention(weights: Weights, sizes: TeacherShape) -> Weights:
    """Return the weights of attention in which every token attends only to itself."""
    queries = sizes.num_attention_heads // sizes.num_query_groups
    projection = weights[f"{_PROJECTION}weight"]

    def values(rows: torch.Tensor) -> torch.Tensor:
        return _by_group(rows, sizes)[:, -1].repeat_interleave(queries, dim=0).flatten(0, 1)

    linear = {f"{_ATTENTION}weight": projection @ values(weights[f"{_QKV}weight"])}
    if f"{_PROJECTION}bias" in weights:
        bias = projection @ values(weights[f"{_QKV}bias"]) if f"{_QKV}bias" in weights else 0
        linear[f"{_ATTENTION}bias"] = weights[f"{_PROJECTION}bias"] + bias
    return linear


def _mlp(weights: Weights, shape: BlockShape) -> Weights:
    if shape.mlp == "no_op":
        return {}
    if shape.mlp == "linear":
        return _linear_mlp(weights)
    narrow: Weights = {}
    for name in weights:
        mlp, found, _ = name.partition("linear_fc1.weight")
        if found and "shared_experts" not in mlp:
            narrow |= _narrow(weights, mlp, shape.ffn_hidden_size)
    return narrow


def _experts(layer: Any) -> int:
    """Return the number of experts of a layer, 0 if it has none."""
    return layer.config.num_moe_experts or 0


def _is_of_router(name: str) -> bool:
    return name.startswith(_ROUTER)


def _strongest_experts(weights: Weights, count: int) -> torch.Tensor:
    """Return the numbers of the `count` strongest experts, in ascending order.

    The strength of an expert is the sum of its channels', whatever the router makes of it.
    """
    strengths: list[torch.Tensor] = []
    while (out := f"{_EXPERT}{len(strengths)}.linear_fc2.weight") in weights:
        into = weights[out.replace("linear_fc2", "linear_fc1")]
        strengths.append(_strengths(into, weights[out]).sum())
    order = torch.stack(strengths).argsort(descending=True, stable=True)
    return order[:count].sort().values


def _only_experts(weights: Weights, kept: torch.Tensor) -> Weights:
    """Return a layer's weights with the kept experts, numbered anew, and the router's rows."""
    numbers = {int(old): new for new, old in enumerate(kept)}
    found: Weights = {}
    for name, value in weights.items():
        number, _, rest = name.removeprefix(_EXPERT).partition(".")
        if not name.startswith(_EXPERT):
            found[name] = value[kept] if _is_of_router(name) else value
        elif int(number) in numbers:
            found[f"{_EXPERT}{numbers[int(number)]}.{rest}"] = value
    return found


def _narrow(weights: Weights, mlp: str, count: int) -> Weights:
    """Return the weights of an MLP, or of an expert, with its strongest channels."""
    into, out = f"{mlp}linear_fc1.", f"{mlp}linear_fc2.weight"
    width = weights[out].shape[1]
    if width == count:
        return {}
    kept = _strongest(weights[f"{into}weight"], weights[out], count)
    parts = weights[f"{into}weight"].shape[0] // width  # 2: a gate and a value
    rows = torch.cat([kept + part * width for part in range(parts)])
    narrow = {name: value[rows] for name, value in weights.items() if name.startswith(into)}
    return narrow | {out: weights[out][:, kept]}


def _strongest(into: torch.Tensor, out: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` strongest channels of an MLP, in ascending order."""
    order = _strengths(into, out).argsort(descending=True, stable=True)
    return order[:count].sort().values


def _strengths(into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the product of the norms of each channel's weights, in and out, (channels,)."""
    strength = into.float().norm(dim=1).view(-1, out.shape[1]).prod(dim=0)
    return strength * out.float().norm(dim=0)


def _linear_mlp(weights: Weights) -> Weights:
    """Return the MLP without non-linearity and gate: half the product of up and down projection."""
    out = weights[f"{_FC2}weight"]
    width = out.shape[1]
    into = weights[f"{_FC1}weight"][-width:]
    linear = {f"{_MLP}weight": 0.5 * (out @ into)}
    if f"{_FC2}bias" in weights:
        bias = 0.5 * (out @ weights[f"{_FC1}bias"][-width:])
        linear[f"{_MLP}bias"] = weights[f"{_FC2}bias"] + bias
    return linear

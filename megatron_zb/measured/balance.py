"""Balanced layers of each stage, where the two ends of the model also count for some layers.

The cost of the ends comes from a profile of the user's own run, or from the sizes of the model
alone. The gain is that of the schedule that will run, simulated with either layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.job.settings import AUTO_LAYOUT, LAYOUT_FLAG
from megatron_zb.measured.fit import Fit
from megatron_zb.measured.profile import Profile, read_profile
from megatron_zb.measured.usual_gpu import ShardOverhead
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import Costs, PassKind, Schedule, layout, simulate
from megatron_zb.schedules.layout import Layers, Layout
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.step_plan import NO_ATTENTION, AttentionWork

_SIZES = {
    "layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "sequence_length": "--seq-length",
    "tensor": "--tensor-model-parallel-size",
}


TRANSFER = 0.05
"""Time of a transfer as a share of a rank's forward of one microbatch, until it is measured."""


@dataclass(frozen=True)
class Ends:
    """Number of layers that the embedding and the output layer count for, and its source.

    ``shard_overhead`` is what it takes besides to shard the output layer over all ranks, and
    ``kept`` the part of ``output`` that stays on the last stage then: layers of multi-token
    prediction.
    """

    embedding: float
    output: float
    known: str
    profile: Profile | None = None
    shard_overhead: ShardOverhead = field(default_factory=ShardOverhead)
    kept: float = 0.0

    def __str__(self) -> str:
        return (
            f"an embedding that counts for {self.embedding:.2f} layers and an output layer that "
            f"counts for {self.output:.2f} ({self.known})"
        )


@dataclass(frozen=True)
class Balance:
    """Layers of each stage, and the share of the time of an even layout that they save."""

    layers: Layout
    gain: float
    ends: Ends

    def __str__(self) -> str:
        return f"layers are balanced for {self.ends}: {self.gain:.1%} less time than evenly spread"


def measured(path: Path, sizes: Mapping[str, int]) -> Ends:
    """Read the ends from a file of ``--pipeline-profile``.

    Args:
        sizes: layers, hidden_size, sequence_length and tensor of the run.

    Raises:
        UsageError: the file is wrong, or of another model.
    """
    profile = read_profile(path)
    for name, flag in _SIZES.items():
        found = getattr(profile.model, name)
        if found != sizes[name]:
            raise UsageError(
                f"{LAYOUT_FLAG} {path}: the profile is of a run with {flag} {found}, this one has "
                f"{flag} {sizes[name]}: profile this model"
            )
    fit = Fit.of(profile)
    kept = fit.in_layers(sharded=True)[1] if profile.multi_token else 0.0
    return Ends(*fit.in_layers(), f"measured, {path}", profile, kept=kept)


def costs_of(layers: int, pipeline_size: int, ends: Ends) -> Costs:
    """Build the costs of equal layers and the ends; F, B and W of a layer take p / layers each.

    A transfer takes :data:`TRANSFER`.
    """
    work = [pipeline_size / layers] * layers
    work[0] *= 1 + ends.embedding
    work[-1] *= 1 + ends.output
    return Costs.of_slices(
        pipeline_size=pipeline_size, forward=work, backward=work, weight=work, p2p=TRANSFER
    )


def costs_beside(placement: Placement, layers: Layout, ends: Ends, *, sharded: bool) -> Costs:
    """Build the costs by which an output layer is compared, whole and sharded over all ranks.

    Measured ones where the ends come from a profile of as many ranks. Else F, B and W of a layer
    take p / layers each, the products of O of all shards together as long as F and B of the output
    layer, that of V as long as its W, E and G of every rank as long as the whole embedding, and a
    transfer :data:`TRANSFER`.
    """
    p, profile = placement.pipeline_size, ends.profile
    if profile is not None and profile.pipeline_size == p:
        fit = Fit.of(profile)
        if sharded:
            return fit.sharded_costs(placement, layers, ends.shard_overhead)
        return fit.costs(placement, layers)
    layer = p / max(sum(layers), 1)
    work = [layer * count for count in layers]
    embedding, output = layer * ends.embedding, layer * (ends.output - ends.kept)
    work[-1] += layer * ends.kept
    if not sharded:
        work[0] += embedding
        work[-1] += output
    costs = Costs.of_slices(pipeline_size=p, forward=work, backward=work, weight=work, p2p=TRANSFER)
    if not sharded:
        return costs
    costs = ends.shard_overhead.costs(
        costs, layer, products=2 * output, weight=output, embedding=3 * embedding, held=0.0
    )
    return costs.with_prediction() if ends.kept else costs


def with_counted_vocabulary(
    costs: Costs, layers: int, output: float, *, predicts: bool = False
) -> Costs:
    """Return equal costs with an output layer, of so many layers, sharded over all ranks.

    Its logits and its part of the input gradient are O's, its weight gradient is V's. A run builds
    named schedules for these.
    """
    layer = output * costs.pipeline_size / max(layers, 1)
    costs = costs.with_vocabulary(output=2 * layer, weight=layer, lookup=0.0)
    return costs.with_prediction() if predicts else costs


def counted(layer_flops: float, output_flops: float, multi_token: int = 0) -> Ends:
    """Derive the ends from FLOPs; each multi-token prediction is a layer and an output layer."""
    output = output_flops / layer_flops
    known = "counted from the sizes of the model"
    return Ends(0.0, output + multi_token * (1 + output), known, kept=float(multi_token))


def balanced(layers: int, schedule: Schedule, ends: Ends) -> Balance:
    """Distribute the layers of a model over the stages of a schedule.

    Ends that the schedule has sharded over all ranks count on none of them.

    Raises:
        UsageError: there are too few.
    """
    placement = schedule.placement
    sharded = any(p.kind is PassKind.O for rank in schedule.ranks for p in rank)
    whole, ends = ends, replace(ends, embedding=0.0, output=ends.kept) if sharded else ends
    asked = Layers(layers, embedding=ends.embedding, output=ends.output)
    found = layout.balanced(asked, placement)
    even, *_ = layout.choices(layers, placement, ends.embedding, ends.output)

    def costs(counts: Layout) -> Costs:
        if sharded:
            return costs_beside(placement, counts, whole, sharded=True)
        return _costs(schedule, counts, ends)

    seconds = {counts: simulate(schedule, costs(counts)).makespan for counts in (even, found)}
    best = min((even, found), key=seconds.__getitem__)
    return Balance(best, 1 - seconds[best] / seconds[even], ends)


def _costs(schedule: Schedule, counts: Layout, ends: Ends) -> Costs:
    placement = schedule.placement
    profile = ends.profile
    if profile is not None and profile.pipeline_size == placement.pipeline_size:
        return Fit.of(profile).costs(placement, counts)
    work = [float(count) for count in counts]
    work[0] += ends.embedding
    work[-1] += ends.output
    return Costs.of_slices(
        pipeline_size=placement.pipeline_size, forward=work, backward=work, weight=work
    )


def of_arguments(value: str, args: Any) -> Ends:
    """Return the ends for a value of ``--pipeline-layer-layout`` and Megatron's arguments.

    Raises:
        UsageError: the profile is wrong, or the costs of the ends do not follow from the sizes.
    """
    if value != AUTO_LAYOUT:
        sizes = {
            "layers": args.num_layers,
            "hidden_size": args.hidden_size,
            "sequence_length": args.seq_length,
            "tensor": args.tensor_model_parallel_size,
        }
        found, by_sizes = measured(Path(value), sizes), ends_of(args)
        return found if by_sizes is None else replace(found, shard_overhead=by_sizes.shard_overhead)
    instead = f"give a file of --pipeline-profile instead of {AUTO_LAYOUT}"
    if not _has_attention_sizes(args):
        raise UsageError(
            f"{LAYOUT_FLAG} {AUTO_LAYOUT} cannot count multi-latent attention without its sizes: "
            f"give {', '.join(map(flag_of, _LATENT))}, or {instead}"
        )
    ends = ends_of(args)
    if ends is None:
        raise UsageError(
            f"{LAYOUT_FLAG} {AUTO_LAYOUT} has to know how large layers and the output layer are: "
            "give --hidden-size, --num-attention-heads, --seq-length and --vocab-size, or "
            f"{instead}"
        )
    return ends


def ends_of(args: Any) -> Ends | None:
    """Derive the ends from the sizes of a model; return None where these do not suffice."""
    vocabulary = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)
    if vocabulary is None or not _has_attention_sizes(args):
        return None
    if not all((args.hidden_size, args.num_attention_heads, args.seq_length)):
        return None
    layer = _layer_flops(args)
    multi_token = getattr(args, "mtp_num_layers", None) or 0
    ends = counted(layer, 2.0 * args.hidden_size * vocabulary, multi_token)
    tensor = args.tensor_model_parallel_size
    shard_overhead = ShardOverhead.of_sizes(layer, vocabulary, args.hidden_size, tensor)
    return replace(ends, shard_overhead=shard_overhead.times(1 + multi_token))


def attention_of(args: Any) -> AttentionWork:
    """Count the work of attention beside linear layers; none where the sizes do not suffice."""
    if not _has_attention_sizes(args):
        return NO_ATTENTION
    if not all(getattr(args, name, None) for name in ("hidden_size", "num_attention_heads")):
        return NO_ATTENTION
    linear, scores = _layer_products(args)
    return AttentionWork.counted(scores, linear)


def _layer_flops(args: Any) -> float:
    """Count a layer's FLOPs per token in F: products with weights, half of those with scores."""
    linear, scores = _layer_products(args)
    return 2.0 * (linear + args.seq_length * scores)


def _layer_products(args: Any) -> tuple[int, int]:
    """Count a layer's products per token in F with weights, and half of those with one score."""

    def given(name: str) -> Any:
        return getattr(args, name, None)

    hidden = args.hidden_size
    attention, scores = _latent_attention(args) if _is_latent(args) else _attention(args)
    inner = given("ffn_hidden_size") or 4 * hidden
    matrices = 3 if given("swiglu") or given("gated_linear_unit") else 2
    if given("num_experts") or given("num_moe_experts"):
        inner = (given("moe_ffn_hidden_size") or inner) * (given("moe_router_topk") or 2)
        inner += given("moe_shared_expert_intermediate_size") or 0
    return attention + matrices * hidden * inner, scores


def _attention(args: Any) -> tuple[int, int]:
    hidden, heads = args.hidden_size, args.num_attention_heads
    head = getattr(args, "kv_channels", None) or hidden // heads
    # a config has no flag for groups, arguments have a number without it
    given = getattr(args, "num_query_groups", None)
    groups = given if getattr(args, "group_query_attention", True) and given else heads
    return 2 * hidden * head * (heads + groups), heads * head


_LATENT = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def _is_latent(args: Any) -> bool:
    return bool(getattr(args, "multi_latent_attention", False))


def _has_attention_sizes(args: Any) -> bool:
    """Whether attention can be counted; where it is latent, its widths have to be given."""
    return not _is_latent(args) or all(getattr(args, name, None) for name in _LATENT)


def _latent_attention(args: Any) -> tuple[int, int]:
    """Count multi-latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    narrow, plain, rotary, value = (getattr(args, name) for name in _LATENT)
    query, rank = plain + rotary, getattr(args, "q_lora_rank", None)
    queries = rank * (hidden + heads * query) if rank else hidden * heads * query
    keys_and_values = hidden * (narrow + rotary) + narrow * heads * (plain + value)
    scores = heads * (query + value) // 2
    return queries + keys_and_values + heads * value * hidden, scores

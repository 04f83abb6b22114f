"""Balanced layers of each stage, where the two ends of the model also count for some layers.

The cost of the ends comes from a profile of the user's own run, or from the sizes of the model
alone. The gain is that of the schedule that will run, simulated with either layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.job.settings import AUTO_LAYOUT, LAYOUT_FLAG
from megatron_zb.measured.counted_layers import (
    LATENT_SIZES,
    flops_of_kind,
    has_attention_sizes,
    layer_flops,
)
from megatron_zb.measured.fit import Fit
from megatron_zb.measured.profile import Profile, read_profile
from megatron_zb.measured.usual_gpu import ShardOverhead
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import Costs, PassKind, Schedule, layout, simulate
from megatron_zb.schedules.features.vocabulary import Vocabulary, with_prediction
from megatron_zb.schedules.layout import Layers, Layout
from megatron_zb.schedules.placement import Placement

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
    prediction. ``work`` is that of each decoder layer, 1 in the mean, or nothing if they are alike.
    """

    embedding: float
    output: float
    known: str
    profile: Profile | None = None
    shard_overhead: ShardOverhead = field(default_factory=ShardOverhead)
    kept: float = 0.0
    work: tuple[float, ...] = ()

    def of_stages(self, counts: Layout) -> list[float]:
        """Return the work of the layers of each stage, in layers."""
        if not self.work:
            return [float(count) for count in counts]
        layers = iter(self.work)
        return [sum(islice(layers, count)) for count in counts]

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


def measured(path: Path, sizes: Mapping[str, int], pattern: str = "") -> Ends:
    """Read the ends, and the work of a hybrid model's layers, from a profile of a run.

    Args:
        path: the file.
        sizes: layers, hidden_size, sequence_length and tensor of the run.
        pattern: that of a hybrid model.

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
    _check_pattern(profile, path, pattern.replace("|", ""))
    fit = Fit.of(profile)
    kept = fit.in_layers(sharded=True)[1] if profile.multi_token else 0.0
    return Ends(*fit.in_layers(), f"measured, {path}", profile, kept=kept, work=fit.work)


def _check_pattern(profile: Profile, path: Path, pattern: str) -> None:
    """Refuse the profile of another pattern, or one without the costs of its letters.

    Raises:
        UsageError: it is such a profile.
    """
    found = profile.model.pattern or ""
    if found and found != pattern:
        this = f"has {pattern}" if pattern else "is no hybrid model"
        raise UsageError(
            f"{LAYOUT_FLAG} {path}: the profile is of a run with --hybrid-layer-pattern {found}, "
            f"this one {this}: profile this model"
        )
    if pattern and not (profile.parts and profile.parts.letters):
        raise UsageError(
            f"{LAYOUT_FLAG} {path}: the profile cannot tell the layers of a hybrid model apart: "
            f"profile this model again, give {AUTO_LAYOUT}, or write '|' into its pattern"
        )


def costs_of(layers: int, pipeline_size: int, ends: Ends) -> Costs:
    """Build the costs of layers and the ends; F, B and W of a mean layer take p / layers each.

    A transfer takes :data:`TRANSFER`.
    """
    of_layers = ends.of_stages((1,) * layers)
    of_layers[0] += ends.embedding
    of_layers[-1] += ends.output
    work = [pipeline_size / layers * of_layer for of_layer in of_layers]
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
    work = [layer * of_stage for of_stage in ends.of_stages(layers)]
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
    return with_prediction(costs) if ends.kept else costs


def with_counted_vocabulary(costs: Costs, layers: int, output: float, *, predicts: bool) -> Costs:
    """Return equal costs with an output layer, which counts as layers, sharded over all ranks.

    Its logits and its part of the input gradient are O's, its weight gradient is V's. A run builds
    named schedules for these.
    """
    layer = output * costs.pipeline_size / max(layers, 1)
    costs = costs.having(Vocabulary(output=2 * layer, weight=layer, lookup=0.0))
    return with_prediction(costs) if predicts else costs


def counted(
    layer_flops: float, output_flops: float, multi_token: int = 0, predicting: float = 1.0
) -> Ends:
    """Derive the ends from FLOPs; each multi-token prediction also has an output layer.

    Args:
        predicting: the number of layers that one of multi-token prediction counts for.
    """
    output = output_flops / layer_flops
    kept = multi_token * predicting
    known = "counted from the sizes of the model"
    return Ends(0.0, output * (1 + multi_token) + kept, known, kept=kept)


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
    found = [layout.balanced(asked, placement)]
    even, *_ = layout.choices(layers, placement, ends.embedding, ends.output)
    if ends.work:
        found = layout.weighed(ends.work, placement, ends.embedding, ends.output)

    def costs(counts: Layout) -> Costs:
        if sharded:
            return costs_beside(placement, counts, whole, sharded=True)
        return _costs(schedule, counts, ends)

    seconds = {counts: simulate(schedule, costs(counts)).makespan for counts in (even, *found)}
    best = min(seconds, key=seconds.__getitem__)
    return Balance(best, 1 - seconds[best] / seconds[even], ends)


def _costs(schedule: Schedule, counts: Layout, ends: Ends) -> Costs:
    placement = schedule.placement
    profile = ends.profile
    if profile is not None and profile.pipeline_size == placement.pipeline_size:
        return Fit.of(profile).costs(placement, counts)
    work = ends.of_stages(counts)
    work[0] += ends.embedding
    work[-1] += ends.output
    return Costs.of_slices(
        pipeline_size=placement.pipeline_size, forward=work, backward=work, weight=work
    )


def of_arguments(value: str, args: Any, pattern: str = "") -> Ends:
    """Return the ends for a value of ``--pipeline-layer-layout`` and Megatron's arguments.

    Args:
        pattern: that of a hybrid model.

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
        found, by_sizes = measured(Path(value), sizes, pattern), ends_of(args, pattern)
        return found if by_sizes is None else replace(found, shard_overhead=by_sizes.shard_overhead)
    instead = f"give a file of --pipeline-profile instead of {AUTO_LAYOUT}"
    if not has_attention_sizes(args):
        raise UsageError(
            f"{LAYOUT_FLAG} {AUTO_LAYOUT} cannot count multi-latent attention without its sizes: "
            f"give {', '.join(map(flag_of, LATENT_SIZES))}, or {instead}"
        )
    ends = ends_of(args, pattern)
    if ends is None:
        raise UsageError(
            f"{LAYOUT_FLAG} {AUTO_LAYOUT} has to know how large layers and the output layer are: "
            "give --hidden-size, --num-attention-heads, --seq-length and --vocab-size, or "
            f"{instead}"
        )
    return ends


def ends_of(args: Any, pattern: str = "") -> Ends | None:
    """Derive the ends from the sizes of a model; return None where these do not suffice.

    Args:
        pattern: that of a hybrid model, whose letters are layers of unequal work.
    """
    vocabulary = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)
    if vocabulary is None or not has_attention_sizes(args):
        return None
    if not all((args.hidden_size, args.num_attention_heads, args.seq_length)):
        return None
    multi_token, predicting = getattr(args, "mtp_num_layers", None) or 0, 1.0
    work: tuple[float, ...] = ()
    if not pattern:
        layer = layer_flops(args)
    else:
        kinds, depths = layout.pattern_kinds(pattern), layout.predicting_parts(pattern)
        if not kinds:
            return None
        flops: dict[str, float] = {}
        for kind in kinds + "".join(depths):
            if (found := flops_of_kind(args, kind)) is None:
                return None
            flops[kind] = found
        layer = fmean(flops[kind] for kind in kinds)
        work = tuple(flops[kind] / layer for kind in kinds)
        predicting = sum(flops[kind] for kind in "".join(depths[:1])) / layer
    output_flops = 2.0 * args.hidden_size * vocabulary
    ends = counted(layer, output_flops, multi_token, predicting)
    tensor = args.tensor_model_parallel_size
    shard_overhead = ShardOverhead.of_sizes(layer, vocabulary, args.hidden_size, tensor)
    return replace(ends, shard_overhead=shard_overhead.times(1 + multi_token), work=work)

"""Arguments of Megatron-LM for the strategy and the schedule of a prediction."""

from __future__ import annotations

from megatron_zb.planner.candidate import (
    MEGATRON_1F1B,
    MEGATRON_INTERLEAVED,
    MEGATRON_OVERLAP,
    NO_PIPELINE,
)
from megatron_zb.planner.prediction import Prediction
from megatron_zb.planner.strategy import Strategy
from megatron_zb.schedules import layout
from megatron_zb.schedules.hybrid_pattern import placed
from megatron_zb.schedules.placement import Placement

_MEGATRON = (MEGATRON_1F1B, MEGATRON_INTERLEAVED, MEGATRON_OVERLAP, NO_PIPELINE)
_RECOMPUTE = {
    "none": [],
    "selective": ["--recompute-granularity selective"],
    "full": [
        "--recompute-granularity full",
        "--recompute-method uniform",
        "--recompute-num-layers 1",
    ],
}


def flags(prediction: Prediction, global_batch: int) -> list[str]:
    """Return the flags to paste, each with its value.

    Args:
        prediction: the choice.
        global_batch: samples of an iteration.
    """
    strategy = prediction.load.strategy
    out = [
        f"--tensor-model-parallel-size {strategy.tensor}",
        f"--pipeline-model-parallel-size {strategy.pipeline}",
        f"--micro-batch-size {strategy.microbatch}",
        f"--global-batch-size {global_batch}",
        f"--seq-length {prediction.load.sequence}",
        "--use-distributed-optimizer",
        *_precision(strategy),
        *_overlap(prediction),
    ]
    if strategy.tensor > 1 and strategy.sequence_parallel:
        out.append("--sequence-parallel")
    if strategy.context > 1:
        out.append(f"--context-parallel-size {strategy.context}")
    if strategy.expert > 1:
        out.append(f"--expert-model-parallel-size {strategy.expert}")
    if prediction.load.model.experts and strategy.expert_tensor != strategy.tensor:
        out.append(f"--expert-tensor-parallel-size {strategy.expert_tensor}")
    return out + _RECOMPUTE[strategy.recompute] + _schedule(prediction)


def _precision(strategy: Strategy) -> list[str]:
    return ["--bf16"] if strategy.precision == "bf16" else ["--bf16", "--fp8-format hybrid"]


def _overlap(prediction: Prediction) -> list[str]:
    strategy = prediction.load.strategy
    if not strategy.overlap or strategy.replicas == 1:
        return []
    gathering = [] if prediction.post_validation else ["--overlap-param-gather"]
    return ["--overlap-grad-reduce", *gathering]


def _schedule(prediction: Prediction) -> list[str]:
    out = []
    is_ours = prediction.candidate not in _MEGATRON
    if is_ours:
        out.append(f"--pipeline-schedule {prediction.family}")
    if prediction.cuts_vocabulary:
        out.append("--pipeline-vocabulary on")
    if prediction.dropped:
        out.append("--pipeline-recompute auto")
    if prediction.moved:
        out.append("--pipeline-offload auto")
    if prediction.overlaps_exchange:
        out.append("--overlap-moe-expert-parallel-comm")
    chunks = prediction.chunks
    pattern = prediction.load.model.hybrid_layer_pattern
    if prediction.memory_limit is not None and prediction.schedule is not None:
        out += placement_flags(prediction.schedule.placement)
        out.append(f"--pipeline-memory-limit {prediction.memory_limit:g}")
        chunks = None
    if pattern is not None:  # its segments give the chunks, too
        out = [words for words in out if not words.startswith("--num-virtual")]
        return [*out, f"--hybrid-layer-pattern '{placed(pattern, prediction.layout)}'"]
    written = layout.text(
        layout.lettered(prediction.layout, prediction.load.model.prediction_layers)
    )
    return out + flags_of_layout(
        chunks, None if prediction.is_even else written, megatron=not is_ours
    )


def flags_of_layout(chunks: int | None, written: str | None, *, megatron: bool) -> list[str]:
    """Return the flags for the chunks and layers of a schedule.

    Args:
        chunks: model chunks of each rank; None where the schedule leaves no choice.
        written: the layers of the stages; None for a layout that needs no flag.
        megatron: whether the schedule is Megatron's own, whose layout sets the chunks, too.
    """
    out = []
    if chunks is not None and not (megatron and written):
        out.append(f"--num-virtual-stages-per-pipeline-rank {chunks}")
    if written is not None:
        out.append(f"--pipeline-model-parallel-layout '{written}'")
    return out


def placement_flags(placement: Placement) -> list[str]:
    """Return the flags that bind ``auto`` to a placement, so that a run has the predicted one."""
    out = [f"--num-virtual-stages-per-pipeline-rank {placement.chunks}"]
    if placement.chunks > 1:
        out.append(f"--pipeline-placement {'loop' if placement.name == 'looped' else 'zigzag'}")
    return out


def named(schedule: str, runs: str) -> str:
    """Return the name of a schedule in tables.

    For ``auto``, it names what ``auto`` runs: the order of its search, or another schedule.
    """
    if schedule != "auto":
        return schedule
    return "auto: searched" if runs == "auto" else f"auto: {runs}"

"""Arguments of Megatron-LM for the strategy and the schedule of a prediction."""

from __future__ import annotations

from megatron_zb.planner.prediction import Prediction
from megatron_zb.planner.row import PlanRow
from megatron_zb.planner.strategy import Strategy
from megatron_zb.schedules import layout
from megatron_zb.schedules.layout import placed_pattern

_CHUNKS, _LAYOUT = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
_OF_STAGES = (_CHUNKS, _LAYOUT)
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
    model, pattern = prediction.load.model, prediction.load.model.hybrid_layer_pattern
    words = schedule_flags(prediction, prediction.memory_limit, model.prediction_layers)
    if pattern is None:
        return words
    # its segments give the chunks and the layers
    rest = [word for word in words if not word.startswith(_OF_STAGES)]
    return [*rest, f"--hybrid-layer-pattern '{placed_pattern(pattern, prediction.layout)}'"]


def schedule_flags(row: PlanRow, memory_limit: float | None, multi_token: int) -> list[str]:
    """Return the flags for the schedule of a row, its chunks and its layers.

    Args:
        row: the schedule, in its setting.
        memory_limit: the limit for a schedule of this package, as a fraction of 1F1B's activations.
        multi_token: layers of multi-token prediction.
    """
    out = [] if row.megatron else [f"--pipeline-schedule {row.family}"]
    if row.cuts_vocabulary:
        out.append("--pipeline-vocabulary on")
    if row.dropped:
        out.append("--pipeline-recompute auto")
    if row.moved:
        out.append("--pipeline-offload auto")
    if row.overlaps_exchange:
        out.append("--overlap-moe-expert-parallel-comm")
    chunks = row.chunks
    if row.family == "auto" and row.schedule is not None:
        placement = row.schedule.placement  # bound, so that a run has the predicted one
        out.append(f"{_CHUNKS} {placement.chunks}")
        if placement.chunks > 1:
            out.append(f"--pipeline-placement {'loop' if placement.name == 'looped' else 'zigzag'}")
        chunks = None
    if memory_limit is not None and not row.megatron:
        out.append(f"--pipeline-memory-limit {memory_limit:g}")
    if chunks is not None and (row.has_by_default or not row.megatron):
        out.append(f"{_CHUNKS} {chunks}")  # a layout sets those of Megatron's own
    if not row.has_by_default:
        written = layout.text(layout.lettered(row.layout, multi_token))
        out.append(f"{_LAYOUT} '{written}'")
    return out

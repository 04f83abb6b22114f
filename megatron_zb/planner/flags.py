"""The arguments of Megatron-LM that a prediction stands for."""

from __future__ import annotations

from megatron_zb.planner.contender import MEGATRON_1F1B, MEGATRON_INTERLEAVED, NO_PIPELINE
from megatron_zb.planner.prediction import Prediction
from megatron_zb.planner.strategy import Strategy
from megatron_zb.schedules import layout

_MEGATRON = (MEGATRON_1F1B, MEGATRON_INTERLEAVED, NO_PIPELINE)
_RECOMPUTE = {
    "none": [],
    "selective": ["--recompute-granularity selective"],
    "full": [
        "--recompute-granularity full",
        "--recompute-method uniform",
        "--recompute-num-layers 1",
    ],
}


def flags(prediction: Prediction, global_batch: int, memory: float) -> list[str]:
    """Flags to paste, each with its value.

    Args:
        prediction: the choice.
        global_batch: samples of an iteration.
        memory: bytes of a GPU, from which the limit of ``auto`` follows.
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
    return out + _RECOMPUTE[strategy.recompute] + _schedule(prediction, memory)


def _precision(strategy: Strategy) -> list[str]:
    return ["--bf16"] if strategy.precision == "bf16" else ["--bf16", "--fp8-format hybrid"]


def _overlap(prediction: Prediction) -> list[str]:
    strategy = prediction.load.strategy
    if not strategy.overlap or strategy.replicas == 1:
        return []
    gathering = [] if prediction.post_validation else ["--overlap-param-gather"]
    return ["--overlap-grad-reduce", *gathering]


def _schedule(prediction: Prediction, memory: float) -> list[str]:
    out = []
    if prediction.contender not in _MEGATRON:
        out.append(f"--pipeline-schedule {prediction.family}")
    if prediction.family == "auto":
        out.append(f"--pipeline-memory-limit {_fraction(prediction, memory):.2f}")
    written = layout.text(
        layout.lettered(prediction.layout, prediction.load.model.prediction_layers)
    )
    megatron = prediction.contender in _MEGATRON
    return out + flags_of_layout(
        prediction.chunks, None if prediction.is_even else written, megatron=megatron
    )


def flags_of_layout(chunks: int | None, written: str | None, *, megatron: bool) -> list[str]:
    """The flags of chunks and layers of a schedule.

    Args:
        chunks: of each rank; None where the schedule leaves no choice.
        written: the layers of the stages; None for those that stand there without a flag.
        megatron: it is a schedule of Megatron's own, for which a layout tells the chunks, too.
    """
    out = []
    if chunks is not None and not (megatron and written):
        out.append(f"--num-virtual-stages-per-pipeline-rank {chunks}")
    if written is not None:
        out.append(f"--pipeline-model-parallel-layout '{written}'")
    return out


def _fraction(prediction: Prediction, memory: float) -> float:
    """What ``auto`` may hold, as a fraction of 1F1B's peak."""
    worst = prediction.memory
    left = memory - worst.total + worst.activations + worst.weight_queue
    schedule = prediction.schedule
    if schedule is None or not schedule.report:
        return 1.0
    held = worst.activations + worst.weight_queue
    peak = max(_peaks(prediction))
    one = held / peak * schedule.placement.pipeline_size if peak else left
    return max(0.05, int(100 * min(left / one, 2.0)) / 100)


def _peaks(prediction: Prediction) -> list[float]:
    from megatron_zb.schedules.simulator import peak_held_chunks

    schedule = prediction.schedule
    assert schedule is not None
    return [peak_held_chunks(rank) / schedule.placement.chunks for rank in schedule.ranks]

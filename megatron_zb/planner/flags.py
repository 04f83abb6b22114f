"""The arguments of Megatron-LM that a prediction stands for."""

from __future__ import annotations

from megatron_zb.planner import layout
from megatron_zb.planner.contender import MEGATRON_1F1B, MEGATRON_INTERLEAVED, NO_PIPELINE
from megatron_zb.planner.prediction import Prediction
from megatron_zb.schedules.placement import Placement

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


def flags(prediction: Prediction, global_batch: int) -> list[str]:
    """Flags to paste, each with its value.

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
    ]
    if strategy.tensor > 1:
        out.append("--sequence-parallel")
    if strategy.expert > 1:
        out.append(f"--expert-model-parallel-size {strategy.expert}")
    return out + _RECOMPUTE[strategy.recompute] + _schedule(prediction)


def _schedule(prediction: Prediction) -> list[str]:
    out = []
    is_ours = prediction.contender not in _MEGATRON
    if is_ours:
        out.append(f"--pipeline-schedule {prediction.family}")
    if prediction.memory_limit is not None and prediction.schedule is not None:
        out += placement_flags(prediction.schedule.placement)
        out.append(f"--pipeline-memory-limit {prediction.memory_limit:.2f}")
    elif prediction.chunks is not None and (is_ours or prediction.is_even):
        out.append(f"--num-virtual-stages-per-pipeline-rank {prediction.chunks}")
    if not prediction.is_even:
        out.append(f"--pipeline-model-parallel-layout '{layout.text(prediction.layout)}'")
    return out


def placement_flags(placement: Placement) -> list[str]:
    """Bind ``auto`` to a placement, so that a run has that of its prediction."""
    out = [f"--num-virtual-stages-per-pipeline-rank {placement.chunks}"]
    if placement.chunks > 1:
        out.append(f"--pipeline-placement {'loop' if placement.name == 'looped' else 'zigzag'}")
    return out


def named(schedule: str, runs: str) -> str:
    """What tables call a schedule; of ``auto``, also what it runs: a search's order, or another."""
    if schedule != "auto":
        return schedule
    return "auto: searched" if runs == "auto" else f"auto: {runs}"

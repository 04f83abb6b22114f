"""Why a schedule lost to the one above it, in one line."""

from __future__ import annotations

from megatron_zb.planner.prediction import Prediction
from megatron_zb.planner.search import Plan

_LEVEL = 0.0005


def reason(plan: Plan, index: int) -> str:
    """What the row of an index lacks against the row before it; of the first, how far it leads."""
    row = plan.ranked[index]
    if index == 0:
        return _lead(plan)
    above = plan.ranked[index - 1]
    slower = above.tokens_per_gpu / row.tokens_per_gpu - 1
    if slower < _LEVEL:
        return f"level with {above.contender}"
    said = f"{slower:.1%} slower: {_largest(above, row)}"
    large = plan.too_large.get(row.contender)
    return f"{said}; {large}" if large else said


def _lead(plan: Plan) -> str:
    if len(plan.ranked) == 1:
        return "the only one that fits"
    lead = plan.ranked[0].tokens_per_gpu / plan.ranked[1].tokens_per_gpu - 1
    return f"the fastest, by {lead:.1%}"


def _largest(above: Prediction, row: Prediction) -> str:
    """The part of the time per token that differs the most."""
    parts = {
        _said_bubble(above, row): _per_token(row, _idle(row)) - _per_token(above, _idle(above)),
        _said_work(above, row): _per_token(row, _busy(row)) - _per_token(above, _busy(above)),
        "longer optimizer step and reductions": _per_token(row, row.step_seconds)
        - _per_token(above, above.step_seconds),
    }
    return max(parts, key=lambda said: parts[said])


def _said_bubble(above: Prediction, row: Prediction) -> str:
    return f"bubble {row.bubble:.1%} instead of {above.bubble:.1%}"


def _said_work(above: Prediction, row: Prediction) -> str:
    mine, other = row.load.strategy, above.load.strategy
    if mine.recompute != other.recompute and mine.recompute != "none":
        return f"it computes again ({mine.recompute})"
    if mine.tensor > other.tensor:
        return f"messages of TP{mine.tensor}"
    return "more work for each token on a rank"


def _idle(row: Prediction) -> float:
    return row.bubble * row.pipeline_seconds


def _busy(row: Prediction) -> float:
    return row.pipeline_seconds - _idle(row)


def _per_token(row: Prediction, seconds: float) -> float:
    return seconds * row.gpus / row.tokens

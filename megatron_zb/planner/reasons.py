"""Reason why a schedule is slower than the best one, in one line, and the recommendation."""

from __future__ import annotations

from megatron_zb.planner.candidate import NO_PIPELINE
from megatron_zb.planner.prediction import Prediction
from megatron_zb.planner.search import Plan

_LEVEL = 0.0005
_WORTH_A_CHANGE = 0.01  # of the tokens per second; predictions are not better than that


def reason(plan: Plan, index: int) -> str:
    """Explain how the row of an index compares with the first row and with Megatron's best."""
    row, first = plan.ranked[index], plan.ranked[0]
    if len(plan.ranked) == 1:
        return "the only one that fits"
    beside = _beside_megatron(plan, row)
    if index == 0:
        return f"the fastest; {beside}" if beside else "the fastest"
    slower = first.tokens_per_gpu / row.tokens_per_gpu - 1
    if slower < _LEVEL:
        said = f"level with the first, {first.candidate}"
    else:
        said = f"{slower:.1%} slower than the first: {_largest(first, row)}"
    large = plan.too_large.get(row.candidate)
    return "; ".join(filter(None, (said, beside, str(large) if large else "")))


def recommended(plan: Plan) -> str | None:
    """Return the schedule that is worth a change from Megatron's own; None where none is."""
    first, own = plan.ranked[0], _best_own(plan)
    if own is not None and first.tokens_per_gpu < own.tokens_per_gpu * (1 + _WORTH_A_CHANGE):
        return None
    return first.family


def recommendation(plan: Plan) -> str:
    """Return the recommendation of what to run, in one sentence."""
    first, own = plan.ranked[0], _best_own(plan)
    if own is None:
        return f"run {first.family}: nothing of Megatron-LM's own fits"
    if _is_own(first):
        return f"no schedule of this package is worth a change here: {first.candidate} is faster"
    lead = first.tokens_per_gpu / own.tokens_per_gpu - 1
    if recommended(plan) is None:
        return f"stay with {own.candidate}: {first.family} is ahead of it by {lead:.1%} alone"
    return f"run {first.family}: {lead:.1%} more tokens per second than {own.candidate}"


def _is_own(row: Prediction) -> bool:
    """Return whether Megatron-LM alone runs it."""
    return row.candidate.startswith("Megatron") or row.candidate == NO_PIPELINE


def _best_own(plan: Plan) -> Prediction | None:
    """Return the fastest row that needs nothing of this package; None if there is none."""
    return next((row for row in plan.ranked if _is_own(row)), None)


def _beside_megatron(plan: Plan, row: Prediction) -> str:
    best = _best_own(plan)
    if best is None or _is_own(row):
        return ""
    ahead = row.tokens_per_gpu / best.tokens_per_gpu - 1
    if abs(ahead) < _LEVEL:
        return f"level with {best.candidate}"
    return f"{abs(ahead):.1%} {'faster' if ahead > 0 else 'slower'} than {best.candidate}"


def _largest(above: Prediction, row: Prediction) -> str:
    """Describe the part of the time per token that differs the most."""
    parts = {
        _describe_bubble(above, row): _per_token(row, _idle(row)) - _per_token(above, _idle(above)),
        _describe_work(above, row): _per_token(row, _busy(row)) - _per_token(above, _busy(above)),
        "longer optimizer step and reductions": _per_token(row, row.step_seconds)
        - _per_token(above, above.step_seconds),
    }
    return max(parts, key=lambda said: parts[said])


def _describe_bubble(above: Prediction, row: Prediction) -> str:
    return f"bubble {row.bubble:.1%} instead of {above.bubble:.1%}"


def _describe_work(above: Prediction, row: Prediction) -> str:
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

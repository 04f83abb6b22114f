"""Reason why a schedule is slower than the best one, in one line, and the recommendation."""

from __future__ import annotations

from megatron_zb.parsing import gib
from megatron_zb.plan.features.catalog import FEATURES
from megatron_zb.plan.features.feature import WORTH_A_CHANGE, FreedActivations
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.search import Plan
from megatron_zb.plan.strategy import MEGATRON_INTERLEAVED

_LEVEL = 0.0005
AUTO = "auto"
LITTLE = 0.03
"""Share of a GPU's memory that a recommendation should leave free."""


def reason(plan: Plan, index: int) -> str:
    """Explain how the row of an index compares with the first row, and with another.

    That is the run as given, if there is one, or else Megatron's best.
    """
    row, first = plan.ranked[index], plan.ranked[0]
    beside = _beside_usual(plan, row)
    if len(plan.ranked) == 1:
        return f"the only one that fits; {beside}" if plan.given else "the only one that fits"
    if index == 0:
        return f"the fastest; {beside}" if beside else "the fastest"
    slower = first.tokens_per_gpu / row.tokens_per_gpu - 1
    if slower < _LEVEL:
        said = f"level with the first, {first.candidate}"
    else:
        said = f"{slower:.1%} slower than the first: {_largest(first, row)}"
    large = plan.too_large.get(row.candidate)
    return "; ".join(filter(None, (said, beside, str(large) if large else "")))


def of_given(plan: Plan) -> str | None:
    """Describe the run of the arguments beside the first row, or say why there is none."""
    given, first = plan.given, plan.ranked[0]
    if given is None:
        return plan.why_not_given and f"the run as given cannot be planned: {plan.why_not_given}"
    over = given.memory.total - plan.job.memory
    large = f"; it needs {gib(over)} more than there are" if over > 0 else ""
    behind = first.tokens_per_gpu / given.tokens_per_gpu - 1
    if abs(behind) < _LEVEL:
        return f"as given; level with the first, {first.candidate}{large}"
    if behind < 0:
        return f"as given; {-behind:.1%} faster than the first{large}"
    return f"as given; {behind:.1%} slower than the first: {_largest(first, given)}{large}"


def gain(plan: Plan, row: Prediction) -> float | None:
    """Return the share of tokens per second that a row has more than the run as given."""
    given = plan.given
    return None if given is None else row.tokens_per_gpu / given.tokens_per_gpu - 1


def is_named_too(plan: Plan, row: Prediction) -> bool:
    """Return whether a row of ``auto`` is the run of a named schedule's row, with all its flags."""
    return row.candidate.split()[0] == AUTO and any(
        other.candidate == named_as(row)
        and (other.load, other.layout, other.schedule) == (row.load, row.layout, row.schedule)
        for other in plan.ranked
    )


def named_as(row: Prediction) -> str:
    """Return the name of the schedule that a row of ``auto`` runs."""
    return row.candidate.replace(AUTO, row.family, 1)


def margin(plan: Plan) -> str:
    """Return how much memory the first row leaves, in one sentence, and a safer row if little is.

    The share is of the memory that the driver reports.
    """
    job, first = plan.job, plan.ranked[0]
    left = job.memory - first.memory.total
    said = f"{first.family} leaves {gib(left)} of {gib(job.memory)} ({left / job.memory:.1%}) free"
    if left >= LITTLE * job.memory:
        return said
    roomy = (r for r in plan.ranked if job.memory - r.memory.total >= LITTLE * job.memory)
    safer = next(roomy, None)
    if safer is None:
        return f"{said}; no row leaves {LITTLE:.0%}"
    slower = first.tokens_per_gpu / safer.tokens_per_gpu - 1
    return (
        f"{said}, which fragments or another batch may exceed; {safer.candidate} "
        f"({safer.load.strategy}) leaves {gib(job.memory - safer.memory.total)} and is "
        f"{slower:.1%} slower"
    )


def recommended(plan: Plan) -> str | None:
    """Return the schedule that is worth a change; None where none is.

    The change is from the run as given, if there is one, and from Megatron's own schedules.
    """
    first, own = plan.ranked[0], _best_own(plan)
    for other in filter(None, (plan.given, own)):
        if first.tokens_per_gpu < other.tokens_per_gpu * (1 + WORTH_A_CHANGE):
            return None
    return first.family


def recommendation(plan: Plan) -> str:
    """Return the recommendation of what to run, in one sentence."""
    if plan.given is not None:
        return _instead_of_given(plan, plan.given)
    first, own = plan.ranked[0], _best_own(plan)
    if own is None:
        return f"run {_said(first)}: nothing of Megatron-LM's own fits"
    if first.megatron:
        return f"no schedule of this package is worth a change here: {first.candidate} is faster"
    lead = first.tokens_per_gpu / own.tokens_per_gpu - 1
    if recommended(plan) is None:
        return f"keep {own.candidate}: {first.family} is ahead of it by only {lead:.1%}"
    return f"run {_said(first)}: {lead:.1%} more tokens per second than {own.candidate}"


def worth(plan: Plan) -> list[str]:
    """Return what the best row of this package gains beside each of Megatron's schedules.

    Each is one sentence. Megatron's interleaved schedule comes first, since tuned jobs run it.
    Empty where no row is of this package, or none of Megatron's.
    """
    best = next((row for row in plan.ranked if not row.megatron), None)
    if best is None:
        return []
    own: dict[str, Prediction] = {}
    for row in plan.ranked:
        if row.megatron:
            own.setdefault(_kind_of_own(row), row)
    order = sorted(own, key=lambda kind: (kind != MEGATRON_INTERLEAVED, kind))
    return [f"beside {own[kind].candidate}: {_exchanged(best, own[kind])}" for kind in order]


def _kind_of_own(row: Prediction) -> str:
    """Return the schedule without its number of chunks."""
    return row.candidate.split(" ×")[0]


def _exchanged(best: Prediction, own: Prediction) -> str:
    """Describe the time and memory of a row beside one of Megatron's."""
    lead = best.tokens_per_gpu / own.tokens_per_gpu - 1
    if abs(lead) < _LEVEL:
        time = f"{_said(best)} is as fast"
    else:
        time = f"{_said(best)} is {abs(lead):.1%} {'faster' if lead > 0 else 'slower'}"
    return f"{time}, in {gib(best.memory.total)} instead of {gib(own.memory.total)}"


def _instead_of_given(plan: Plan, given: Prediction) -> str:
    """Recommend the first row, or one of Megatron's own that is as good, or the run as given."""
    best, own, fits = plan.ranked[0], _best_own(plan), given.memory.total <= plan.job.memory
    if own is not None and best.tokens_per_gpu < own.tokens_per_gpu * (1 + WORTH_A_CHANGE):
        best = own
    named = best.candidate if best.megatron else _said(best)
    lead = best.tokens_per_gpu / given.tokens_per_gpu - 1
    if lead < 0 and not fits:
        return f"run {named}: the run as given, {given.candidate}, does not fit"
    if lead < WORTH_A_CHANGE and fits:
        return (
            f"keep the run as given, {given.candidate}: {named} is ahead of it by only {lead:.1%}"
        )
    return (
        f"run {named}: {lead:.1%} more tokens per second than the run as given, {given.candidate}"
    )


def _said(row: Prediction) -> str:
    told = (it for it in FEATURES if not isinstance(it, FreedActivations))
    flags = [flag for feature in told for flag in feature.flags(row)]
    return f"{row.family} with {' and '.join(flags)}" if flags else row.family


def sentences(plan: Plan) -> dict[str, str | None]:
    """Return what features bring, each in one sentence, by its name in JSON."""
    said: dict[str, str | None] = {}
    for feature in plan.job.features:
        said |= feature.said(plan.job, plan)
    return {**said, "activation_states": freed_gain(plan)}


def freed_gain(plan: Plan) -> str | None:
    """Return the gain of freeing activations, in one sentence; None if not requested."""
    row, kept = plan.freed, plan.all_kept
    if not plan.job.freeing:
        return None
    if row is None:
        return "no setting with recomputation or offload by the schedule can be ahead here"
    done = " and ".join(it.done(row) for it in plan.job.freeing if it.is_in(row))
    named = f"{row.family} that {done} ({row.load.strategy})"
    if kept is None:
        return f"{named} is the best that fits; nothing fits that keeps all"
    lead = row.tokens_per_gpu / kept.tokens_per_gpu - 1
    how = f"{abs(lead):.1%} {'ahead of' if lead >= 0 else 'behind'} auto that keeps all"
    return f"{named} is {how}" + ("" if lead > WORTH_A_CHANGE else ": that is not worth a change")


def _best_own(plan: Plan) -> Prediction | None:
    """Return the fastest row that needs nothing of this package; None if there is none."""
    return next((row for row in plan.ranked if row.megatron), None)


def _beside_usual(plan: Plan, row: Prediction) -> str:
    if (more := gain(plan, row)) is not None:
        if abs(more) < _LEVEL:
            return "level with the run as given"
        return f"{abs(more):.1%} {'faster' if more > 0 else 'slower'} than the run as given"
    best = _best_own(plan)
    if best is None or row.megatron:
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

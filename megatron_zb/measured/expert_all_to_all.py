"""Seconds of the expert all-to-all that pairs hide, from the times of pairs and single passes.

A pair is measured as a whole, which gives one number: how much shorter it is than its forward and
its backward run separately. The forward's and the backward's all-to-all count as equal parts of it,
since the backward sends the same tokens back. An all-to-all that is hidden but slows its pair down
looks the same as one that is hidden in part, and counts as the latter; a loss is only the time by
which pairs are longer than their two passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from megatron_zb.schedules import Costs, PassKind
from megatron_zb.schedules.features.pairs import PAIR_LOSS, Communication

_F, _B, _W = PassKind.F, PassKind.B, PassKind.W

ALL_TO_ALL = 0.5
"""Assumed expert all-to-all of a pass, as a share of the rest of a forward, until measured."""

_ROUNDS = 100
_MOST = 0.9  # share of a pass: it computes, too


class PairTimes(NamedTuple):
    """Stages of a pair, and the seconds of its F, of its B or BW, and of both as one."""

    f_stage: int
    b_stage: int
    forward: float
    backward: float
    both: float


@dataclass(frozen=True)
class HiddenAllToAll:
    """Seconds of each stage that a pair hides of its F, and as many of its B or BW; see the module.

    ``loss`` is that of :class:`Communication`, and ``share`` the all-to-all as a share of the rest
    of a forward.
    """

    seconds: tuple[float, ...]
    loss: float
    share: float

    @classmethod
    def measured(cls, forward: Sequence[float], pairs: Sequence[PairTimes]) -> HiddenAllToAll:
        """Derive what fits the pairs best, at least one; ``forward`` is each stage's seconds of F.

        A stage that no pair has run has the usual share of its forward.
        """
        fitted = _fitted(pairs)
        usual = median(fitted[stage] / forward[stage] for stage in fitted)
        seconds = [
            min(fitted.get(stage, usual * alone), _MOST * alone)
            for stage, alone in enumerate(forward)
        ]
        longer = [both / max(f + b - seconds[i] - seconds[j], f, b) for i, j, f, b, both in pairs]
        share = sum(seconds) / (sum(forward) - sum(seconds))
        return cls(tuple(seconds), max(0.0, median(longer) - 1.0), share)

    def split_off(self, costs: Costs) -> Costs:
        """Return costs with the seconds of each slice as a part of F, B and BW that pairs hide."""
        pairs = zip(self.seconds, costs.seconds[_F], costs.seconds[_B], strict=True)
        all_to_all = [min(seconds, _MOST * f, _MOST * b) for seconds, f, b in pairs]

        def rest(whole: Sequence[float]) -> tuple[float, ...]:
            return tuple(max(0.0, a - b) for a, b in zip(whole, all_to_all, strict=True))

        rests = {k: rest(of) if k is not _W else of for k, of in costs.seconds.items()}
        return replace(costs, seconds=rests).having(
            Communication(forward=all_to_all, backward=all_to_all, pair_loss=self.loss)
        )


def with_all_to_all(costs: Costs, share: float = ALL_TO_ALL, loss: float = PAIR_LOSS) -> Costs:
    """Return equal or counted costs with an all-to-all of ``share`` of the rest of a forward."""
    seconds = share * sum(costs.seconds[_F]) / costs.pipeline_size
    return costs.having(Communication(forward=seconds, backward=seconds, pair_loss=loss))


def _fitted(pairs: Sequence[PairTimes]) -> dict[int, float]:
    """Return the seconds of each stage, none negative, whose sums fit what pairs hide best.

    By least squares, one stage after the other, from half of each pair's on.
    """
    of_stage: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for a, b, forward, backward, both in pairs:
        of_stage[a].append((b, forward + backward - both))
        if a != b:
            of_stage[b].append((a, forward + backward - both))
    found = {
        s: max(0.0, sum(seconds for _, seconds in of_one) / 2 / len(of_one))
        for s, of_one in of_stage.items()
    }
    for _ in range(_ROUNDS):
        for s, of_one in of_stage.items():
            # a pair within one stage tells twice its seconds
            above = sum(2 * t if other == s else t - found[other] for other, t in of_one)
            below = sum(4 if other == s else 1 for other, _ in of_one)
            found[s] = max(0.0, above / below)
    return found

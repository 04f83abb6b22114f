"""Seconds that pairs hide of what experts exchange, from what pairs and single passes take.

A pair is measured as a whole, so it tells one number: by how much it is shorter than its forward
and its backward by themselves. How much of that is the forward's exchange and how much the
backward's cannot be told; they count as equal, since the backward sends the same tokens back. Nor
can an exchange that is hidden and slows its pair down be told from one that is hidden in part: it
counts as so much shorter, and a loss is only what pairs take longer than their two passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from megatron_zb.schedules import Costs
from megatron_zb.schedules.costs import PAIR_LOSS

EXCHANGE = 0.5
"""What experts exchange in a forward, and in a backward, as a share of the rest of a forward, until
it is measured.
"""

_ROUNDS = 100
_MOST = 0.9  # share of a pass: it computes, too


class PairTimes(NamedTuple):
    """The stages of a pair, the seconds of its F and of its B or BW alone, and of both as one."""

    f_stage: int
    b_stage: int
    forward: float
    backward: float
    both: float


@dataclass(frozen=True)
class HiddenExchange:
    """Seconds of each stage that a pair hides of its F, and as many of its B or BW; see the module.

    ``loss`` is ``Costs.pair_loss``, and ``share`` the exchange as a share of the rest of a forward.
    """

    seconds: tuple[float, ...]
    loss: float
    share: float

    @classmethod
    def measured(cls, forward: Sequence[float], pairs: Sequence[PairTimes]) -> HiddenExchange:
        """Derive what fits the pairs best, at least one; ``forward`` is each stage's seconds of F.

        A stage that no pair has run exchanges the usual share of its forward.
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
        pairs = zip(self.seconds, costs.forward, costs.backward, strict=True)
        exchange = [min(seconds, _MOST * f, _MOST * b) for seconds, f, b in pairs]

        def rest(whole: Sequence[float]) -> tuple[float, ...]:
            return tuple(max(0.0, a - b) for a, b in zip(whole, exchange, strict=True))

        return replace(
            costs,
            forward=rest(costs.forward),
            backward=rest(costs.backward),
            whole=rest(costs.whole) if costs.whole else (),
        ).with_communication(forward=exchange, backward=exchange, pair_loss=self.loss)


def with_exchange(costs: Costs, share: float = EXCHANGE, loss: float = PAIR_LOSS) -> Costs:
    """Return equal or counted costs with an exchange of ``share`` of the rest of a forward."""
    seconds = share * sum(costs.forward) / costs.pipeline_size
    return costs.with_communication(forward=seconds, backward=seconds, pair_loss=loss)


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

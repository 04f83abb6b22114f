"""Vocabulary parallelism: every rank holds a shard of the output layer, and of the embedding.

*Balancing Pipeline Parallelism with Vocabulary Parallelism* (arXiv 2411.05288). The passes of the
shards are found by :mod:`search.place_vocabulary`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import Costs, Feature, Scale, latency
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import StageCosts, Table

_F, _B, _BW = PassKind.F, PassKind.B, PassKind.BW
_O, _P, _V, _E, _G, _M, _K = (PassKind(letter) for letter in "OPVEGMK")


@dataclass(frozen=True)
class Vocabulary(Feature):
    """Costs of one microbatch of a vocabulary-parallel output layer.

    Args:
        output: seconds of O of all shards together (logits, softmax and parts of the input
            gradient).
        weight: seconds of V, the weight gradients.
        loss: seconds of P, which puts the parts together.
        held: what all shards hold from O to V, in the unit of activation.
        scatter: seconds by which the last stage's output takes longer to reach all ranks than one
            message from a stage to the next.
        gather: the same of the shards' parts on their way back.
        shares: the share of the vocabulary on each logical rank, the same on all if left out.
        lookup: seconds of E of all shards together, and those of G, if the embedding is vocabulary
            parallel, too; None if it is whole.
        predicts: whether the last stage embeds later tokens, for multi-token prediction.
    """

    name: ClassVar[str] = "vocabulary"

    output: float
    weight: float
    loss: float = 0.0
    held: float = 0.0
    scatter: float = 0.0
    gather: float = 0.0
    shares: Table = ()
    lookup: float | None = None
    predicts: bool = False

    def said(self) -> dict[str, str]:
        return {self.name: "vocabulary parallelism"}

    def completed(self, costs: Costs) -> Vocabulary:
        """Return the feature with the shares of all ranks.

        Raises:
            UsageError: a value is negative or not finite, or the shares do not make a whole.
        """
        p = costs.pipeline_size
        shares = tuple(self.shares or [1 / p] * p)
        names = ("output", "weight", "loss", "held", "scatter", "gather")
        values = {name: float(getattr(self, name)) for name in names}
        for name, value in (values | {"lookup": self.lookup or 0.0}).items():
            if not 0 <= value < float("inf"):
                raise UsageError(
                    f"costs: {name} of the vocabulary is {value}: give a finite value of 0 or more"
                )
        if len(shares) != p or min(shares) < 0 or abs(sum(shares) - 1.0) > 1e-6:
            raise UsageError(
                f"costs: the shares of the vocabulary are {list(shares)}: give one of 0 or more "
                f"for each of the {p} ranks, 1 in all"
            )
        return replace(self, shares=shares)

    def scaled(self, scale: Scale) -> Vocabulary:
        per_token = ("output", "weight", "loss", "held", "scatter", "gather")
        return replace(
            self,
            **{name: scale.tokens * getattr(self, name) for name in per_token},
            lookup=None if self.lookup is None else scale.tokens * self.lookup,
        )

    def of_units(self, units: Sequence[Costs]) -> Vocabulary:
        """Return that of the unit whose logits take the most: a rank holds those of a few units."""
        found = [it for row in units for it in row.features if isinstance(it, Vocabulary)]
        return max(found, key=lambda it: it.held)

    def placed(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        """Return the costs with those of shards: in each table, that of rank r stands at S + r."""
        end, none = placement.rank_of[-1], (0.0,) * placement.num_stages
        ranks = range(costs.pipeline_size)
        told = max(latency(costs, end, r) for r in ranks)
        back = (0.0 if r == end else latency(costs, r, end) + self.gather for r in ranks)
        share = [s * f for s, f in zip(self.shares, costs.slowdown, strict=True)]
        seconds = {
            _O: none + tuple(self.output * s for s in share),
            _V: none + tuple(self.weight * s for s in share),
            _P: (*none[1:], self.loss * costs.slowdown[end]),
        }
        latencies = {
            _F: (*table.latency[_F][:-1], told + self.scatter),
            _P: (*none[1:], told),
            _O: (*none, *back),
            _V: none + (0.0,) * len(ranks),
        }
        logits = none + tuple(self.held * s for s in self.shares)
        placed = replace(
            table,
            seconds={**table.seconds, **seconds},
            latency={**table.latency, **latencies},
            memory={**table.memory, "logits": logits},
        )
        return placed if self.lookup is None else self._with_lookups(costs, placement, placed)

    def _with_lookups(self, costs: Costs, placement: Placement, table: StageCosts) -> StageCosts:
        """Return the costs with those of the embedding's passes, which the first stage waits for.

        E of its rank reads the tokens and sends them to all ranks; B of that stage sends its
        gradient to all.
        """
        assert self.lookup is not None
        start, none = placement.rank_of[0], (0.0,) * placement.num_stages
        ranks = range(costs.pipeline_size)
        from_first = max(latency(costs, start, r) for r in ranks)
        answers = (from_first if r == start else latency(costs, r, start) for r in ranks)
        share = [s * f for s, f in zip(self.shares, costs.slowdown, strict=True)]
        lookups = none + tuple(self.lookup * s for s in share)
        first = (from_first, *table.latency[_B][1:])
        told = table.latency[_P][-1]
        return replace(
            table,
            seconds={**table.seconds, _E: lookups, _G: lookups, _M: none, _K: none},
            latency={
                **table.latency,
                _B: first,
                _BW: first,
                _E: (*none, *answers),
                _G: none + (0.0,) * len(ranks),
                _M: (told,) * len(none),
                _K: (from_first,) * len(none),
            },
        )


def shards_embedding(costs: Costs) -> bool:
    """Return whether the embedding is vocabulary parallel, like the output layer."""
    found = costs.feature(Vocabulary)
    return found is not None and found.lookup is not None


def with_prediction(costs: Costs) -> Costs:
    """Return the costs of a vocabulary-parallel embedding that the last stage also reads."""
    found = costs.feature(Vocabulary)
    assert found is not None and found.lookup is not None
    return costs.having(replace(found, predicts=True))

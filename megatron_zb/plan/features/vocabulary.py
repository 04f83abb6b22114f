"""Seconds and bytes of vocabulary parallelism over all pipeline ranks.

Counted as :mod:`megatron_zb.plan.work` counts, kernel by kernel of the passes O, V, P, E and G:

- O multiplies for the logits of its rows and for its part of the input gradient, V for its weight
  gradient; each reads and writes its logits some times in 32 bits. All of it, and the kernels'
  overhead with it, is spent on every rank: shards that are too thin gain nothing.
- Tensor-parallel ranks gather the tokens in O and in V, and sum their parts and rows in O.
- P, on the last stage's rank, adds the parts of all ranks.
- The link of that rank carries a message to each of the others and takes one of twice the size from
  each, in every microbatch.
- E transfers the rows of all tokens, and G their gradients; the link of the first stage's rank
  takes a message from each of the others and carries one to each.
- Multi-token prediction does all this once more for each of its layers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_zb.measured.balance import with_counted_vocabulary
from megatron_zb.measured.fit import Fit
from megatron_zb.measured.usual_gpu import (
    BYTES_OF_A_PART,
    GATHERED_IN_E,
    GATHERED_IN_O,
    GATHERED_IN_V,
    LOGIT_IN_O,
    LOGIT_IN_V,
)
from megatron_zb.plan import byte_counts
from megatron_zb.plan.byte_counts import GRADIENT, OPTIMIZER, WEIGHT, ActivationBytes, StateBytes
from megatron_zb.plan.ends import WholeEnds
from megatron_zb.plan.features.feature import (
    WORTH_A_CHANGE,
    CutWorkload,
    PlanRequest,
    RankedRows,
    Ranking,
    VariantFeature,
)
from megatron_zb.plan.rows import Prediction, fastest
from megatron_zb.plan.strategy import ScheduleCandidate
from megatron_zb.plan.work import PassSeconds, Workload
from megatron_zb.schedules import Costs
from megatron_zb.schedules.features.vocabulary import Vocabulary, with_prediction
from megatron_zb.schedules.placement import Placement

_KERNELS_OF_O, _KERNELS_OF_V = 16, 8
_KERNELS_OF_P, _KERNELS_OF_A_PART = 14, 8
_KERNELS_OF_E = 4  # and of G
# Bytes of each number of a token: its row looked up and masked; the part packed. In P, the sum
# divided and scaled at last. On the first stage, one more rank's rows added, in 16 bits.
_ROW, _PACKED, _DIVIDED, _ROW_ADDED = 8, 8, 28, 6
# Bytes of each logit that O has besides the logits, at most, and of each number of each part in P.
_WHILE_O, _WHILE_P = 12, 12
_LABEL = 16
CONNECTION = 4 * 2**20 + 524_288 + 4_915_200
"""Bytes that NCCL allocates by default to receive over a connection of one thread block.

They are the buffers of its three protocols (NCCL, src/init.cc)."""


def more_connections(placement: Placement, rank: int) -> int:
    """Return the ranks that send to a rank only for the shards, not for its stages."""
    usual = {frozenset(pair) for pair in placement.peers}
    ends = (placement.rank_of[0], placement.rank_of[-1])
    others = range(placement.pipeline_size)
    pairs = {frozenset((r, end)) for r in others for end in ends if r != end}
    return sum(rank in pair for pair in pairs - usual)


# --- what it changes in a setting


@dataclass(frozen=True)
class CountedShard(WholeEnds):
    """Ends of which each rank has a shard: that of one rank in one microbatch, all of equal size.

    The first stage adds what has been looked up, the last one keeps its norms and layers of
    prediction.
    """

    are_apart: ClassVar[bool] = True
    more_held: ClassVar[int] = 1

    @property
    def first(self) -> PassSeconds:
        """Seconds in which the first stage adds what all ranks have looked up, discarding some."""
        others = self.load.strategy.pipeline - 1
        added = self.load.moved(_ROW_ADDED * others * self._numbers) + self.load.launches(others)
        return PassSeconds(added) + self.load.embedding_dropout()

    @property
    def last(self) -> PassSeconds:
        return self.last_norm + self.load.prediction()

    @property
    def last_in_layout(self) -> float:
        return self.loss + self.load.prediction().total

    @property
    def last_held(self) -> ActivationBytes:
        norm = ActivationBytes(2 * self._numbers)  # its input
        return norm + byte_counts.prediction_held(self.load)

    @property
    def held_by_ranks(self) -> Sequence[ActivationBytes]:
        return [self.held] * self.load.strategy.pipeline

    def busiest(self, layer: PassSeconds, encoder: PassSeconds) -> PassSeconds:
        pipeline, layers = self.load.strategy.pipeline, self.load.model.layers
        equal = (layer * layers + (self.first + self.load.prediction() + encoder)) * (1 / pipeline)
        return max(equal, layer * math.ceil(layers / pipeline - 0.5), key=lambda w: w.total)

    def fullest(self, layer: PassSeconds, placement: Placement) -> PassSeconds:
        return PassSeconds()  # every stage has a layer

    def added_to(self, work: PassSeconds, *, is_last: bool) -> PassSeconds:
        """Return the work of a rank's stages and of its shard; O counts as F, P as B."""
        loss = self.loss if is_last else 0.0
        lookups = PassSeconds(self.lookup, 0.0, self.lookup)
        return work + PassSeconds(self.output, loss, self.weight) + lookups

    def link_seconds(self, placement: Placement) -> float:
        """Return the seconds for which what comes from all shards uses one rank's link.

        The last stage takes parts of twice a message's size, the first what was looked up.
        """
        both = placement.rank_of[0] == placement.rank_of[-1]
        return (3 if both else 2) * self._crowding(placement)[0]

    def _crowding(self, placement: Placement) -> tuple[float, float]:
        """Return the seconds of the messages of one to all shards, and of one of them."""
        in_node, end = self.load.ranks_in_node, placement.rank_of[-1]
        ranks = range(placement.pipeline_size)
        near = sum(r // in_node == end // in_node for r in ranks) - 1
        far = len(ranks) - 1 - near
        alone = self.crowding(0, 1) if far else self.crowding(1, 0)
        return self.crowding(near, far), alone

    def connections(self, placement: Placement, rank: int) -> float:
        return more_connections(placement, rank) * CONNECTION

    def costs(self, placement: Placement) -> Vocabulary:
        """Return the costs of all passes of the shards.

        Bytes of shards are left out: a run builds its order without them, and the memory of all
        passes is counted afterwards.
        """
        p, (crowded, alone) = placement.pipeline_size, self._crowding(placement)
        return Vocabulary(
            output=p * self.output,
            weight=p * self.weight,
            loss=self.loss,
            scatter=crowded - alone,
            gather=2 * crowded - alone,
            lookup=p * self.lookup,
        )

    @property
    def _rows(self) -> float:
        strategy = self.load.strategy
        return self.load.model.vocabulary / (strategy.pipeline * strategy.tensor)

    @property
    def _logits(self) -> float:
        return self.load.model.depths * self.load.tokens * self._rows

    @property
    def _numbers(self) -> float:
        """Numbers of all tokens on a tensor-parallel rank between the products."""
        return self._kept_tokens * self.load.model.hidden_size

    @property
    def _all_numbers(self) -> float:
        """Numbers of all tokens."""
        return self.load.model.depths * self.load.tokens * self.load.model.hidden_size

    @property
    def _kept_tokens(self) -> float:
        return self.load.model.depths * self.load.kept_tokens

    @property
    def _collective(self) -> float:
        """Seconds of one gathering of all tokens."""
        return self.load.model.depths * self.load.collective()

    @property
    def _product(self) -> float:
        flops = 2 * self._logits * self.load.model.hidden_size
        return flops / self.load.device.matrix_products.reached

    @property
    def output(self) -> float:
        """Seconds of O."""
        numbers = _ROW * self._all_numbers + _PACKED * self._numbers
        moved = self.load.moved(LOGIT_IN_O * self._logits + numbers)
        messages = GATHERED_IN_O * self._collective
        return 2 * self._product + moved + messages + self.load.launches(_KERNELS_OF_O)

    @property
    def weight(self) -> float:
        """Seconds of V."""
        moved = self.load.moved(LOGIT_IN_V * self._logits) + self._added_by_slices
        messages = GATHERED_IN_V * self._collective
        return self._product + moved + messages + self.load.launches(_KERNELS_OF_V)

    @property
    def _added_by_slices(self) -> float:
        model = self.load.model
        rows = model.vocabulary / self.load.strategy.pipeline
        return self.load.added_by_slices(model.depths * rows * model.hidden_size).weight

    @property
    def loss(self) -> float:
        """Seconds of P, on the last stage's rank."""
        parts = self.load.strategy.pipeline
        moved = self.load.moved((BYTES_OF_A_PART * parts + _DIVIDED) * self._numbers)
        return moved + self.load.launches(_KERNELS_OF_P + parts * _KERNELS_OF_A_PART)

    @property
    def lookup(self) -> float:
        """Seconds of E, and of G."""
        moved = self.load.moved(_ROW * self._all_numbers)
        return moved + GATHERED_IN_E * self._collective + self.load.launches(_KERNELS_OF_E)

    @property
    def last_norm(self) -> PassSeconds:
        """Seconds of the norms before the output layer, which are on the last stage."""
        each = self.load.launches(self.load.model.depths)
        forward, backward = self.load.moved(4 * self._numbers), self.load.moved(6 * self._numbers)
        return PassSeconds(forward + each, backward + each)

    @property
    def held(self) -> ActivationBytes:
        """Bytes from O to V: the last stage's output with its labels, and 16-bit logits."""
        tokens = 2 * self._numbers + _LABEL * self._kept_tokens
        return ActivationBytes(tokens + 2 * self._logits)

    def logits(self, *, is_last: bool) -> float:
        """Return the bytes while O runs, or P on the last stage's rank, and those of messages.

        They are those of one microbatch, or of one slice.
        """
        parts, share = self.load.strategy.pipeline, self.load.largest_slice
        while_o, numbers = share * _WHILE_O * self._logits, share * self._numbers
        if not is_last:
            return while_o + 6 * numbers
        return max(while_o, _WHILE_P * parts * numbers) + 4 * parts * numbers

    @property
    def states(self) -> StateBytes:
        """Bytes of the rows from step to step; their optimizer is distributed over replicas."""
        weights = 1 if self.load.model.tied_embeddings else 2
        here = weights * self._rows * self.load.model.hidden_size
        sharded = here / self.load.strategy.replicas
        return StateBytes(WEIGHT * here, GRADIENT * here, OPTIMIZER * sharded, here)

    def crowding(self, near: int, far: int) -> float:
        """Return the seconds for which one microbatch's messages out use the last rank's links.

        ``near`` and ``far`` are the other ranks of the pipeline in its node and beyond. Messages
        in, of twice the size, take twice as long beside them.
        """
        links = self.load.device.messages
        size = self.load.model.depths * self.load.message() / self.load.largest_slice
        in_node, between = links.in_node.bandwidth, links.between_nodes.bandwidth
        return max(near * size / in_node, far * size / between)


# --- what it changes in a plan


@dataclass(frozen=True)
class PlanVocabulary(VariantFeature):
    """Vocabulary parallelism of output layer and embedding."""

    choice: str = "auto"

    words: ClassVar[str] = "vocabulary parallelism"
    argument: ClassVar[str] = "vocabulary"
    field: ClassVar[str] = "vocabulary_parallel"
    flag: ClassVar[str] = "--pipeline-vocabulary on"
    mark: ClassVar[str] = "cut"
    refusal: ClassVar[str] = (
        "--vocabulary on: {name} cannot shard its output layer, because {why}: give --vocabulary "
        "auto"
    )

    def given(self, args: argparse.Namespace, candidate: ScheduleCandidate) -> ScheduleCandidate:
        is_on = args.pipeline_vocabulary == "on" and not candidate.megatron
        return self.set_in(candidate) if is_on else candidate

    def why_not(self, job: PlanRequest) -> str | None:
        if job.frozen:
            return (
                "its weights are frozen, and vocabulary parallelism has passes for their gradients"
            )
        if job.post_validation:
            return "the forwards that post-validation runs again have no passes of it"
        if job.profile is None or job.profile.vocabulary is not None:
            return None
        rows, p = job.profile.model.vocabulary, job.profile.pipeline_size * job.profile.model.tensor
        if Fit.of(job.profile).shard_overhead is None:
            return "the profile lacks its number of rows: profile again"
        if rows is not None and rows % p:
            return f"its {rows} rows cannot be sharded evenly for {p} ranks"
        return None

    def is_possible(self, load: Workload) -> bool:
        """Return whether the pipeline ranks can have equally many rows of the output layer."""
        return load.model.vocabulary % (load.strategy.pipeline * load.strategy.tensor) == 0

    def ends(self, load: Workload) -> CountedShard:
        return CountedShard(load)

    def costs(self, cut: CutWorkload, costs: Costs) -> Costs:
        costs = costs.having(CountedShard(cut.load).costs(cut.placement))
        return with_prediction(costs) if cut.load.model.prediction_layers else costs

    def costs_of_a_run(self, costs: Costs, fit: Fit) -> Costs:
        (_, output), (_, kept) = fit.in_layers(), fit.in_layers(sharded=True)
        predicts = fit.profile.multi_token > 0
        output -= kept if predicts else 0.0
        return with_counted_vocabulary(costs, fit.profile.model.layers, output, predicts=predicts)

    def floor(self, reached: Sequence[float]) -> float:
        return max(reached, default=0.0) * (1 + WORTH_A_CHANGE)

    def take(
        self, ranking: Ranking, found: Iterator[tuple[str, Prediction | None]], floor: float
    ) -> None:
        """Let rows take a place that are ahead of all others by more than predictions are off."""
        best = None
        for name, row in found:
            best = fastest(best, row)
            if row is not None and row.tokens_per_gpu >= floor:
                ranking.replace(name, row)
        auto = ranking.best.get("auto")
        if auto and best and best.tokens_per_gpu >= max(floor, auto.tokens_per_gpu):
            ranking.replace("auto", best)

    def as_json(self, rows: RankedRows, row: Prediction) -> dict[str, Any]:
        said = "on" if self.is_in(row) else "off"
        return {"vocabulary": said, "gain_of_cut": self.gain(rows, row)}

    def cell(self, rows: RankedRows, row: Prediction) -> str:
        gain = self.gain(rows, row)
        return "" if not self.is_in(row) else "yes" if gain is None else f"{gain:+.1%}"

    def gain(self, rows: RankedRows, row: Prediction) -> float | None:
        """Return the share of tokens per second that a row's schedule gains by it.

        None where it has a whole output layer, or has nothing that fits with a whole one.
        """
        whole = rows.replaced.get(row.candidate) if self.is_in(row) else None
        return None if whole is None else row.tokens_per_gpu / whole.tokens_per_gpu - 1

    def said(self, job: PlanRequest, rows: RankedRows) -> dict[str, str]:
        return {"vocabulary": self._said(job, rows)}

    def _said(self, job: PlanRequest, rows: RankedRows) -> str:
        row = rows.best_with.get(type(self))
        if (why := self.why_not(job)) is not None:
            return f"no {self.words}: {why}"
        if self.choice == "off":
            return f"no {self.words}: --vocabulary off"
        if row is None:
            return f"no schedule with {self.words} can be ahead here"
        named = f"{row.family} with {self.words} ({row.load.strategy})"
        best = fastest(*(it for it in rows.ranked if not self.is_in(it)), *rows.replaced.values())
        if best is None:
            return f"{named} is the best that fits; nothing fits without"
        lead = row.tokens_per_gpu / best.tokens_per_gpu - 1
        if any(map(self.is_in, rows.ranked)):
            how = f"{abs(lead):.1%} {'faster' if lead >= 0 else 'slower'} than"
            return f"{named} is {how} the best without, {best.candidate}"
        how = f"{abs(lead):.1%} {'ahead of' if lead >= 0 else 'behind'} {best.candidate}"
        return f"{named}, the most promising, is {how}: that is not worth a change"

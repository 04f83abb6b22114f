"""Input of the simulator from a workload and a layout: seconds and bytes of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_zb.measured.fit import CostModel, Variant
from megatron_zb.plan import byte_counts
from megatron_zb.plan.byte_counts import ActivationBytes, StateBytes
from megatron_zb.plan.encoder import CountedEncoder
from megatron_zb.plan.features.feature import CutWorkload, FreedActivations, PlanFeature
from megatron_zb.plan.slices import held_by, prefix
from megatron_zb.plan.strategy import ScheduleCandidate
from megatron_zb.plan.vocabulary import CONNECTION, CountedShard, more_connections
from megatron_zb.plan.work import PassSeconds, Workload
from megatron_zb.schedules import Costs, layout
from megatron_zb.schedules.features.pairs import PAIR_LOSS, Communication
from megatron_zb.schedules.features.slices import Slicing
from megatron_zb.schedules.features.vocabulary import Vocabulary, with_prediction
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.placement import Placement


@dataclass(frozen=True)
class StageWorkload(CutWorkload):
    """Seconds and bytes of a workload cut into stages, with the features of its schedule.

    With ``vocabulary_parallel``, output layer and embedding are vocabulary parallel over all ranks:
    the shard of rank r then counts as stage S + r where bytes are listed by stage. With
    ``overlaps_all_to_all``, pairs may hide the expert all-to-all.
    """

    vocabulary_parallel: bool = False
    overlaps_all_to_all: bool = False
    features: tuple[PlanFeature, ...] = ()

    @property
    def shard(self) -> CountedShard | None:
        """The shard of each rank, None where the output layer is whole."""
        return CountedShard(self.load) if self.vocabulary_parallel else None

    @property
    def frees_activations(self) -> bool:
        """Whether the schedule may free activations between F and B."""
        return any(isinstance(it, FreedActivations) for it in self.features)

    @cached_property
    def work(self) -> tuple[PassSeconds, ...]:
        """Seconds of a microbatch on each stage, without shards and :attr:`all_to_all`."""
        out = [
            sum_of_works(self.load, layers) + PassSeconds(-seconds, -seconds)
            for layers, seconds in zip(self.layers_of, self.all_to_all, strict=True)
        ]
        shard = self.shard
        out[0] += self.load.embedding() if shard is None else shard.looked_up
        out[0] += CountedEncoder(self.load).work
        if shard is None:
            out[-1] += self.load.output()
        else:
            out[-1] += shard.last_norm + self.load.prediction()
        return tuple(out)

    @cached_property
    def all_to_all(self) -> tuple[float, ...]:
        """Seconds of each stage, in F and as many in B, that pairs may hide."""
        if not self.overlaps_all_to_all:
            return (0.0,) * len(self.layout)
        return tuple(sum(map(self.load.all_to_all, layers)) for layers in self.layers_of)

    @cached_property
    def held(self) -> tuple[ActivationBytes, ...]:
        """Bytes of a microbatch on each stage, and on each shard."""
        model = self.load.model
        alike = model.alike(range(model.layers))
        of_kind = {model.kind(i): byte_counts.layer_held(self.load, i) for i in alike}
        out = [
            sum((of_kind[model.kind(i)] for i in layers), ActivationBytes())
            for layers in self.layers_of
        ]
        out[0] += byte_counts.embedding_held(self.load) + CountedEncoder(self.load).held
        if self.shard is None:
            out[-1] += byte_counts.output_held(self.load)
            return tuple(out)
        out[-1] += self.shard.last_norm_held + byte_counts.prediction_held(self.load)
        return (*out, *[self.shard.held] * self.placement.pipeline_size)

    @property
    def slicing(self) -> Slicing | None:
        """Token slices of every microbatch, None for whole ones."""
        return self.load.slicing

    @cached_property
    def held_by_slices(self) -> Sequence[ActivationBytes]:
        """Bytes of each slice of a microbatch on each stage; of whole ones, :attr:`held`."""
        held: Sequence[ActivationBytes] = self.held
        if self.slicing is not None:
            held = held_by(self.held, self.slicing)
        for feature in self.features:
            held = feature.held(self, held)
        return held

    def prefix(self, rank: int) -> float:
        """Return the bytes of prefixes on a rank, beside activations."""
        layers = [i for s in self.placement.stages_of[rank] for i in self.layers_of[s]]
        return prefix(self.load, sum(map(self.load.model.attends, layers)))

    @cached_property
    def states(self) -> tuple[StateBytes, ...]:
        """Bytes that each pipeline rank keeps from step to step."""
        found = [self._states_of(stages) for stages in self.placement.stages_of]
        return tuple(found if self.shard is None else [of + self.shard.states for of in found])

    @cached_property
    def stage_states(self) -> tuple[StateBytes, ...]:
        """Bytes that each stage, and each shard, keeps from step to step."""
        found = [self._states_of([stage]) for stage in range(len(self.layout))]
        shards = [] if self.shard is None else [self.shard.states] * self.placement.pipeline_size
        return tuple(found + shards)

    def _states_of(self, stages: Sequence[int]) -> StateBytes:
        """Return the bytes of stages on one rank, without its shard."""
        found = byte_counts.rank_states(
            self.load,
            [i for s in stages for i in self.layers_of[s]],
            embedding=0 in stages,
            output=self.placement.num_stages - 1 in stages,
            sharded=self.shard is not None,
        )
        return found + CountedEncoder(self.load).states if 0 in stages else found

    def rank_work(self, rank: int) -> PassSeconds:
        """Return the seconds of a microbatch on a pipeline rank; O counts as F, P as B."""
        work = sum((self.work[s] for s in self.placement.stages_of[rank]), PassSeconds())
        shard = self.shard
        if shard is None:
            return work
        loss = shard.loss if rank == self.placement.rank_of[-1] else 0.0
        lookups = PassSeconds(shard.lookup, 0.0, shard.lookup)
        return work + PassSeconds(shard.output, loss, shard.weight) + lookups

    @cached_property
    def busiest(self) -> PassSeconds:
        """Seconds of a microbatch on the busiest rank."""
        ranks = range(self.placement.pipeline_size)
        return max((self.rank_work(r) for r in ranks), key=lambda work: work.total)

    def interval(self, *, in_groups: bool) -> float:
        """Return the least seconds that each microbatch takes in the steady state.

        ``in_groups`` is for the interleaved schedule: its ranks go through the chunks in step, so
        that the slowest stage of each chunk counts. Shards run when they can.
        """
        if self.vocabulary_parallel or not in_groups:
            return max(self.busiest.total, self.link_seconds)
        stages = [[self.work[s].total for s in held] for held in self.placement.stages_of]
        return sum(max(chunk) for chunk in zip(*stages, strict=True))

    @property
    def link_seconds(self) -> float:
        """Seconds for which what comes from all shards for a microbatch uses one rank's link.

        The last stage takes parts of twice a message's size, the first what was looked up.
        """
        both = self.placement.rank_of[0] == self.placement.rank_of[-1]
        return (3 if both else 2) * self._crowding[0]

    @cached_property
    def _crowding(self) -> tuple[float, float]:
        """Seconds of the messages of one to all shards, and of a single one of them."""
        if self.shard is None:
            return 0.0, 0.0
        in_node, end = self._ranks_in_node, self.placement.rank_of[-1]
        ranks = range(self.placement.pipeline_size)
        near = sum(r // in_node == end // in_node for r in ranks) - 1
        far = len(ranks) - 1 - near
        alone = self.shard.crowding(0, 1) if far else self.shard.crowding(1, 0)
        return self.shard.crowding(near, far), alone

    @property
    def _ranks_in_node(self) -> int:
        """Pipeline ranks that share a node."""
        return max(1, self.load.device.node.gpus // self.load.strategy.model_ranks)

    def latencies(self, *, together: int = 1) -> list[list[float]]:
        """Return the seconds of a message between pipeline ranks, which may share a node."""
        in_node, ranks = self._ranks_in_node, range(self.load.strategy.pipeline)
        near, far = (self.load.latency(in_node, together=together) for in_node in (True, False))
        return [
            [0.0 if a == b else near if a // in_node == b // in_node else far for b in ranks]
            for a in ranks
        ]

    def costs(self, *, blocking: bool) -> Costs:
        """Return the costs of each stage; if ``blocking``, passes include their messages' time.

        Where such a rank has several chunks, one exchange takes the message of an F and that of a
        B, as in Megatron's ``send_forward_backward_recv_forward_backward``.

        Memory held for W is given as no more than F holds, as :class:`Costs` requires; memory is
        counted with the true figures afterwards.
        """
        latencies = self.latencies(together=2 if blocking and self.placement.chunks > 1 else 1)
        extra = self._exchange(latencies) if blocking else [(0.0, 0.0)] * len(self.work)
        held = self.held[: self.placement.num_stages]
        costs = Costs.of_slices(
            pipeline_size=self.placement.pipeline_size,
            forward=[w.forward + e[0] for w, e in zip(self.work, extra, strict=True)],
            backward=[w.backward + e[1] for w, e in zip(self.work, extra, strict=True)],
            weight=[w.weight for w in self.work],
            p2p=0.0 if blocking else latencies,
            activation=[h.activation for h in held],
            held_for_weight=[min(h.for_weight, h.activation) for h in held],
            fixed=[self.fixed(rank) for rank in range(self.placement.pipeline_size)],
        )
        if self.overlaps_all_to_all:
            return costs.having(
                Communication(
                    forward=self.all_to_all, backward=self.all_to_all, pair_loss=PAIR_LOSS
                )
            )
        if self.shard is not None:
            return self._with_shards(costs, self.shard)
        for feature in self.features:
            costs = feature.costs(self, costs)
        return costs

    def _with_shards(self, costs: Costs, shard: CountedShard) -> Costs:
        # Bytes of shards are left out: a run builds its order without them, and the memory of all
        # passes is counted afterwards.
        p, (crowded, alone) = self.placement.pipeline_size, self._crowding
        costs = costs.having(
            Vocabulary(
                output=p * shard.output,
                weight=p * shard.weight,
                loss=shard.loss,
                scatter=crowded - alone,
                gather=2 * crowded - alone,
                lookup=p * shard.lookup,
            )
        )
        return with_prediction(costs) if self.load.model.prediction_layers else costs

    def _exchange(self, latencies: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
        """Return the seconds for which a stage's forward and backward messages block its rank."""
        rank_of = self.placement.rank_of
        last = len(rank_of) - 1
        return [
            (
                latencies[rank_of[s]][rank_of[s + 1]] if s < last else 0.0,
                latencies[rank_of[s]][rank_of[s - 1]] if s > 0 else 0.0,
            )
            for s in range(len(rank_of))
        ]

    def fixed(self, rank: int) -> float:
        """Return the bytes that a rank needs besides activations."""
        return (
            self.states[rank].total
            + self.logits(rank)
            + self.messages(rank)
            + self.prefix(rank)
            + self.load.device.reserved_bytes
        )

    def messages(self, rank: int) -> float:
        """Return the bytes of messages under way, and of NCCL's buffers for those of shards."""
        buffers = byte_counts.message_buffers(self.load, self.placement.chunks)
        if self.shard is None:
            return buffers
        return buffers + more_connections(self.placement, rank) * CONNECTION

    def logits(self, rank: int) -> float:
        """Return the bytes of logits, and of their parts, that a rank has at a time.

        A whole output layer has them only on the last stage's rank.
        """
        holds = self.placement.rank_of[-1] == rank
        if self.shard is not None:
            return self.shard.passing(is_last=holds)
        return byte_counts.logits(self.load) if holds else 0.0


@dataclass(frozen=True)
class CountedCosts(CostModel):
    """Cost model of a workload, counted for its device."""

    load: Workload

    def layouts(self, placement: Placement, variant: Variant) -> Sequence[Layout]:
        """Return the even layout, and the one that counts the ends as layers.

        A layer of a hybrid model counts for as much as those of its kind take. So does any beside
        an all-to-all that pairs hide, where the longer of the two counts.
        """
        load, model = self.load, self.load.model
        hides = variant.overlaps_all_to_all
        shard = CountedShard(load) if variant.vocabulary_parallel else None
        first = load.embedding() if shard is None else shard.looked_up
        output = load.output().total if shard is None else shard.loss + load.prediction().total
        works = {model.kind(i): self._work(i, hides) for i in model.alike(range(model.layers))}
        weights = [works[model.kind(i)] for i in range(model.layers)]
        layer = sum(weights) / model.layers if hides else average_layer(load).total
        ends = ((first + CountedEncoder(load).work).total / layer, output / layer)
        if not (model.kinds or hides):
            return layout.choices(model.layers, placement, *ends)
        return layout.weighed(tuple(w / layer for w in weights), placement, *ends)

    def _work(self, layer: int, hides: bool) -> float:
        """Return the seconds of a layer, forward and backward, with an all-to-all hidden or not."""
        hidden = 2 * self.load.all_to_all(layer) if hides else 0.0
        return max(self.load.layer(layer).total - hidden, hidden)

    def staged(self, placement: Placement, counts: Layout, variant: Variant) -> StageWorkload:
        """Cut the workload into the stages of a layout."""
        return StageWorkload(
            self.load, placement, counts, variant.vocabulary_parallel, variant.overlaps_all_to_all
        )

    def costs(self, placement: Placement, counts: Layout, variant: Variant) -> Costs:
        """Return the costs with ``counts[s]`` layers on stage s."""
        return self.staged(placement, counts, variant).costs(blocking=variant.blocking)


def worth_a_simulation(
    load: Workload, candidate: ScheduleCandidate, chunks: int | None
) -> list[StageWorkload]:
    """Cut a workload by the best layout; with pairs, also by the best of those for no hiding.

    Which of them is faster depends on how many passes find a partner.
    """
    found = [cut_into_stages(load, candidate, chunks)]
    if candidate.overlaps_all_to_all:
        exposed = replace(candidate, overlaps_all_to_all=False)
        found.append(cut_into_stages(load, candidate, chunks, exposed))
        whole = cut_into_stages(load, exposed, chunks)
        found.append(whole and replace(whole, overlaps_all_to_all=True))
    return list({staged.layout: staged for staged in found if staged is not None}.values())


def cut_into_stages(
    load: Workload,
    candidate: ScheduleCandidate,
    chunks: int | None,
    weights: ScheduleCandidate | None = None,
) -> StageWorkload | None:
    """Cut a workload by the layout with the shortest steady state; None if layers are too few.

    Layers weigh what they do under ``weights``, or else under the candidate itself.
    """
    pipeline, counted = load.strategy.pipeline, CountedCosts(load)
    if pipeline == 1:
        return StageWorkload(load, Placement("whole", 1, (0,)), (load.model.layers,))
    placement = candidate.placement(pipeline, chunks)
    found = counted.layouts(placement, weights or candidate)
    return min(
        (counted.staged(placement, counts, candidate) for counts in found),
        key=lambda staged: staged.interval(in_groups=candidate.in_groups),
        default=None,
    )


def sum_of_works(load: Workload, layers: range) -> PassSeconds:
    """Add up the work of layers: those of one kind cost the same, so one of each is counted."""
    alike = load.model.alike(layers)
    return sum((load.layer(one) * count for one, count in alike.items()), PassSeconds())


def average_layer(load: Workload) -> PassSeconds:
    """Return the work of a layer that stands for all: a hybrid model's average, or the last one."""
    layers = load.model.layers
    if not load.model.kinds:
        return load.layer(layers - 1)
    return sum_of_works(load, range(layers)) * (1 / layers)

"""Input of the simulator from a workload and a layout: seconds and bytes of every stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_zb.measured.fit import CostModel, Variant
from megatron_zb.plan import byte_counts
from megatron_zb.plan.byte_counts import ActivationBytes, StateBytes
from megatron_zb.plan.encoder import CountedEncoder
from megatron_zb.plan.ends import WholeEnds
from megatron_zb.plan.features.catalog import features_of, units_of, with_features
from megatron_zb.plan.features.feature import CutWorkload, FreedActivations, PlanFeature
from megatron_zb.plan.strategy import ScheduleCandidate
from megatron_zb.plan.units import WholeUnits
from megatron_zb.plan.work import PassSeconds, Workload
from megatron_zb.schedules import Costs, layout
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.placement import Placement


@dataclass(frozen=True)
class StageWorkload(CutWorkload):
    """Seconds and bytes of a workload cut into stages, with the features of its schedule.

    What each rank has of :attr:`ends` beside its stages counts as stage S + r, for rank r, where
    bytes are listed by stage.
    """

    features: tuple[PlanFeature, ...] = ()

    @cached_property
    def ends(self) -> WholeEnds:
        """Embedding and output layer."""
        return ends_of(self.load, self.features)

    @property
    def frees_activations(self) -> bool:
        """Whether the schedule may free activations between F and B."""
        return any(isinstance(it, FreedActivations) for it in self.features)

    @cached_property
    def work(self) -> tuple[PassSeconds, ...]:
        """Seconds of a microbatch on each stage, without what is :attr:`hidden`."""
        out = [
            sum_of_works(self.load, layers) + PassSeconds(-seconds, -seconds)
            for layers, seconds in zip(self.layers_of, self.hidden, strict=True)
        ]
        out[0] += self.ends.first
        out[0] += CountedEncoder(self.load).work
        out[-1] += self.ends.last
        return tuple(out)

    @cached_property
    def hidden(self) -> tuple[float, ...]:
        """Seconds of each stage, in F and as many in B, that features may hide."""
        return tuple(
            sum(of.hidden(self.load, layer) for of in self.features for layer in layers)
            for layers in self.layers_of
        )

    @cached_property
    def held(self) -> tuple[ActivationBytes, ...]:
        """Bytes of a microbatch on each stage, and on each rank beside its stages."""
        model = self.load.model
        alike = model.alike(range(model.layers))
        of_kind = {model.kind(i): byte_counts.layer_held(self.load, i) for i in alike}
        out = [
            sum((of_kind[model.kind(i)] for i in layers), ActivationBytes())
            for layers in self.layers_of
        ]
        out[0] += byte_counts.embedding_held(self.load) + CountedEncoder(self.load).held
        out[-1] += self.ends.last_held
        return (*out, *self.ends.held_by_ranks)

    @cached_property
    def units(self) -> WholeUnits:
        """Units that passes work on."""
        return units_of(self.load)

    @cached_property
    def held_by_units(self) -> Sequence[ActivationBytes]:
        """Bytes of each unit of a microbatch on each stage; of whole ones, :attr:`held`."""
        message = self.load.message()
        held = self.units.held(self.held)
        return [replace(it, kept_input=min(message, it.activation)) for it in held]

    def kept(self, rank: int) -> float:
        """Return the bytes that the units of a microbatch keep on a rank, beside activations."""
        layers = [i for s in self.placement.stages_of[rank] for i in self.layers_of[s]]
        return self.units.kept(sum(map(self.load.model.attends, layers)))

    @cached_property
    def states(self) -> tuple[StateBytes, ...]:
        """Bytes that each pipeline rank keeps from step to step."""
        return tuple(
            self._states_of(stages) + self.ends.states for stages in self.placement.stages_of
        )

    @cached_property
    def stage_states(self) -> tuple[StateBytes, ...]:
        """Bytes that each stage, and each rank beside its stages, keeps from step to step."""
        found = [self._states_of([stage]) for stage in range(len(self.layout))]
        return (*found, *[self.ends.states] * len(self.ends.held_by_ranks))

    def _states_of(self, stages: Sequence[int]) -> StateBytes:
        """Return the bytes of stages on one rank."""
        found = byte_counts.rank_states(
            self.load,
            [i for s in stages for i in self.layers_of[s]],
            embedding=0 in stages,
            output=self.placement.num_stages - 1 in stages,
            ends_apart=self.ends.are_apart,
        )
        return found + CountedEncoder(self.load).states if 0 in stages else found

    def rank_work(self, rank: int) -> PassSeconds:
        """Return the seconds of a microbatch on a pipeline rank."""
        work = sum((self.work[s] for s in self.placement.stages_of[rank]), PassSeconds())
        return self.ends.added_to(work, is_last=rank == self.placement.rank_of[-1])

    @cached_property
    def busiest(self) -> PassSeconds:
        """Seconds of a microbatch on the busiest rank."""
        ranks = range(self.placement.pipeline_size)
        return max((self.rank_work(r) for r in ranks), key=lambda work: work.total)

    def interval(self, *, in_groups: bool) -> float:
        """Return the least seconds that each microbatch takes in the steady state.

        ``in_groups`` is for the interleaved schedule: its ranks go through the chunks in step, so
        that the slowest stage of each chunk counts. Ends that are apart run when they can.
        """
        if self.ends.are_apart or not in_groups:
            return max(self.busiest.total, self.link_seconds)
        stages = [[self.work[s].total for s in held] for held in self.placement.stages_of]
        return sum(max(chunk) for chunk in zip(*stages, strict=True))

    @property
    def link_seconds(self) -> float:
        """Seconds for which messages of the ends of a microbatch use one rank's link."""
        return self.ends.link_seconds(self.placement)

    def latencies(self, *, together: int = 1) -> list[list[float]]:
        """Return the seconds of a message between pipeline ranks, which may share a node."""
        in_node, ranks = self.load.ranks_in_node, range(self.load.strategy.pipeline)
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
        for feature in self.features:
            costs = feature.costs(self, costs)
        return costs

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
            + self.kept(rank)
            + self.load.device.reserved_bytes
        )

    def messages(self, rank: int) -> float:
        """Return the bytes of messages under way, and of NCCL's buffers for those of the ends."""
        buffers = byte_counts.message_buffers(self.load, self.placement.chunks)
        return buffers + self.ends.connections(self.placement, rank)

    def logits(self, rank: int) -> float:
        """Return the bytes of logits, and of their parts, that a rank has at a time."""
        return self.ends.logits(is_last=self.placement.rank_of[-1] == rank)


def ends_of(load: Workload, features: Iterable[PlanFeature]) -> WholeEnds:
    """Return the ends of a model, which a feature may have changed."""
    found = (feature.ends(load) for feature in features)
    return next((ends for ends in found if ends is not None), WholeEnds(load))


@dataclass(frozen=True)
class CountedCosts(CostModel):
    """Cost model of a workload, counted for its device."""

    load: Workload

    def layouts(self, placement: Placement, variant: Variant) -> Sequence[Layout]:
        """Return the even layout, and the one that counts the ends as layers.

        A layer of a hybrid model counts for as much as those of its kind take. So does any beside
        work that a feature hides, where the longer of the two counts.
        """
        load, model, features = self.load, self.load.model, features_of(variant)
        hides = any(it.hides for it in features)
        ends = ends_of(load, features)
        works = {model.kind(i): self._work(i, features) for i in model.alike(range(model.layers))}
        weights = [works[model.kind(i)] for i in range(model.layers)]
        layer = sum(weights) / model.layers if hides else average_layer(load).total
        first = (ends.first + CountedEncoder(load).work).total
        of_ends = (first / layer, ends.last_in_layout / layer)
        if not (model.kinds or hides):
            return layout.choices(model.layers, placement, *of_ends)
        return layout.weighed(tuple(w / layer for w in weights), placement, *of_ends)

    def _work(self, layer: int, features: Sequence[PlanFeature]) -> float:
        """Return the seconds of a layer, forward and backward, with what features hide beside."""
        hidden = 2 * sum(it.hidden(self.load, layer) for it in features)
        return max(self.load.layer(layer).total - hidden, hidden)

    def staged(self, placement: Placement, counts: Layout, variant: Variant) -> StageWorkload:
        """Cut the workload into the stages of a layout."""
        return StageWorkload(self.load, placement, counts, features_of(variant))

    def costs(self, placement: Placement, counts: Layout, variant: Variant) -> Costs:
        """Return the costs with ``counts[s]`` layers on stage s."""
        return self.staged(placement, counts, variant).costs(blocking=variant.blocking)


def worth_a_simulation(
    load: Workload, candidate: ScheduleCandidate, chunks: int | None
) -> list[StageWorkload]:
    """Cut a workload by the best layout; if work may be hidden, also by the best for none hidden.

    Which of them is faster depends on how many passes find a partner.
    """
    found = [cut_into_stages(load, candidate, chunks)]
    if any(it.hides for it in features_of(candidate)):
        exposed = with_features(candidate, [it for it in features_of(candidate) if not it.hides])
        found.append(cut_into_stages(load, candidate, chunks, exposed))
        whole = cut_into_stages(load, exposed, chunks)
        found.append(whole and replace(whole, features=features_of(candidate)))
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

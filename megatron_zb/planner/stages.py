"""Input of the simulator from a workload and a layout: seconds and bytes of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_zb.planner import byte_counts
from megatron_zb.planner.byte_counts import Held, States
from megatron_zb.planner.work import Work, Workload
from megatron_zb.schedules import Costs
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.placement import Placement


@dataclass(frozen=True)
class StageWorkload:
    """A workload cut into the stages of a placement."""

    load: Workload
    placement: Placement
    layout: Layout

    @cached_property
    def layers_of(self) -> tuple[range, ...]:
        """Layers of each stage."""
        out, first = [], 0
        for count in self.layout:
            out.append(range(first, first + count))
            first += count
        return tuple(out)

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """Seconds of a microbatch on each stage."""
        out = [sum_of_works(self.load, layers) for layers in self.layers_of]
        out[0] += self.load.embedding()
        out[-1] += self.load.output()
        return tuple(out)

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """Bytes of a microbatch on each stage."""
        out = [
            sum((byte_counts.layer_held(self.load, i) for i in layers), Held())
            for layers in self.layers_of
        ]
        out[0] += byte_counts.embedding_held(self.load)
        out[-1] += byte_counts.output_held(self.load)
        return tuple(out)

    @cached_property
    def states(self) -> tuple[States, ...]:
        """Bytes that each pipeline rank keeps from step to step."""
        last = self.placement.num_stages - 1
        return tuple(
            byte_counts.rank_states(
                self.load,
                [i for s in stages for i in self.layers_of[s]],
                embedding=0 in stages,
                output=last in stages,
            )
            for stages in self.placement.stages_of
        )

    @cached_property
    def stage_states(self) -> tuple[States, ...]:
        """Bytes that each stage keeps from step to step."""
        last = self.placement.num_stages - 1
        return tuple(
            byte_counts.rank_states(self.load, layers, embedding=s == 0, output=s == last)
            for s, layers in enumerate(self.layers_of)
        )

    def rank_work(self, rank: int) -> Work:
        """Return the seconds of a microbatch on a pipeline rank."""
        return sum((self.work[s] for s in self.placement.stages_of[rank]), Work())

    @cached_property
    def busiest(self) -> Work:
        """Seconds of a microbatch on the busiest rank."""
        ranks = range(self.placement.pipeline_size)
        return max((self.rank_work(r) for r in ranks), key=lambda work: work.total)

    def interval(self, *, in_groups: bool) -> float:
        """Return the least seconds that each microbatch takes in the steady state.

        ``in_groups`` is for the interleaved schedule: its ranks go through the chunks in step, so
        that the slowest stage of each chunk counts.
        """
        if not in_groups:
            return self.busiest.total
        stages = [[self.work[s].total for s in held] for held in self.placement.stages_of]
        return sum(max(chunk) for chunk in zip(*stages, strict=True))

    def hops(self, *, together: int = 1) -> list[list[float]]:
        """Return the seconds of a message between pipeline ranks, which may share a node."""
        strategy = self.load.strategy
        in_node = max(1, self.load.device.node.gpus // strategy.model_ranks)
        ranks = range(strategy.pipeline)
        near, far = (self.load.hop(in_node, together=together) for in_node in (True, False))
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
        hops = self.hops(together=2 if blocking and self.placement.chunks > 1 else 1)
        extra = self._exchange(hops) if blocking else [(0.0, 0.0)] * len(self.work)
        return Costs.of_slices(
            pipeline_size=self.placement.pipeline_size,
            forward=[w.forward + e[0] for w, e in zip(self.work, extra, strict=True)],
            backward=[w.backward + e[1] for w, e in zip(self.work, extra, strict=True)],
            weight=[w.weight for w in self.work],
            p2p=0.0 if blocking else hops,
            activation=[h.activation for h in self.held],
            held_for_weight=[min(h.for_weight, h.activation) for h in self.held],
            fixed=[self.fixed(rank) for rank in range(self.placement.pipeline_size)],
        )

    def _exchange(self, hops: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
        """Return the seconds for which a stage's forward and backward messages block its rank."""
        rank_of = self.placement.rank_of
        last = len(rank_of) - 1
        return [
            (
                hops[rank_of[s]][rank_of[s + 1]] if s < last else 0.0,
                hops[rank_of[s]][rank_of[s - 1]] if s > 0 else 0.0,
            )
            for s in range(len(rank_of))
        ]

    def fixed(self, rank: int) -> float:
        """Return the bytes that a rank needs besides activations."""
        return (
            self.states[rank].total
            + self.logits(rank)
            + byte_counts.message_buffers(self.load, self.placement.chunks)
            + self.load.device.reserved_bytes
        )

    def logits(self, rank: int) -> float:
        """Return the bytes of the logits on the rank with the output layer, 0 on others."""
        holds = self.placement.rank_of[-1] == rank
        return byte_counts.logits(self.load) if holds else 0.0


def sum_of_works(load: Workload, layers: range) -> Work:
    """Add up the work of layers: those of one kind cost the same, so one of each is counted."""
    alike = load.model.alike(layers)
    return sum((load.layer(one) * count for one, count in alike.items()), Work())


def average_layer(load: Workload) -> Work:
    """Return the work of a layer that stands for all: a hybrid model's average, or the last one."""
    layers = load.model.layers
    if not load.model.kinds:
        return load.layer(layers - 1)
    return sum_of_works(load, range(layers)) * (1 / layers)

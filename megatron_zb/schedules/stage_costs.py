"""Costs of the stages of one placement: seconds and memory of each kind of pass and message."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from operator import sub
from typing import Protocol

from megatron_zb.schedules.passes import Pair, Pass, PassKind
from megatron_zb.schedules.placement import Placement


@dataclass(frozen=True)
class ShardCosts:
    """Costs of a vocabulary-parallel output layer on one placement, by logical rank.

    ``arrival`` is the time of the last stage's output to the farthest rank, ``back[r]`` that of a
    part from rank r to the last stage, and ``told`` that of the loss from there to all ranks. Where
    the embedding is vocabulary parallel, too, ``lookup`` are the seconds of E and those of G,
    ``from_first`` is the time of a message from the first stage to the farthest rank, and
    ``of_lookup[r]`` that of what E of rank r makes, for the first stage or from it.
    """

    output: tuple[float, ...]
    weight: tuple[float, ...]
    loss: float
    held: tuple[float, ...]
    arrival: float
    back: tuple[float, ...]
    told: float
    lookup: tuple[float, ...] = ()
    from_first: float = 0.0
    of_lookup: tuple[float, ...] = ()


@dataclass(frozen=True)
class StageCosts:
    """Costs resolved for the stages of one placement (see :meth:`Costs.for_placement`).

    ``forward_p2p[s]`` is the time of the message from stage s to s+1 and ``backward_p2p[s]`` from
    stage s to s-1, 0 on the same rank. ``activation[s]`` is the memory that F(s) holds and
    ``held_for_weight[s]`` the part still held between B(s) and W(s). ``whole`` are the seconds of
    BW; where it is empty, BW takes as long as B and W. ``others`` has those of other kinds, and
    ``memory_of_others`` what they hold. Where
    microbatches are not all alike, ``microbatches[j]`` has the costs of microbatch j, and these are
    those of a typical one; equal rows are one object. ``shards`` are the costs of an output layer
    that is vocabulary parallel: rank r's shard counts as stage S + r.

    ``forward_comm[s]`` of the seconds of F, and ``backward_comm[s]`` of those of B, are spent on
    nothing but the expert all-to-all: a :class:`~passes.Pair` hides them. They
    are empty where there is none.

    ``recompute`` are the seconds of R, and ``kept_input[s]`` is the memory that an F holds whose R
    recomputes its activation; ``copy`` are the seconds in which an activation is copied to the
    host, or from it, with both at once if ``full_duplex``, and ``host_limit`` is the memory of the
    host for each rank. The tuples are empty where nothing is recomputed or offloaded.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    forward_p2p: tuple[float, ...]
    backward_p2p: tuple[float, ...]
    activation: tuple[float, ...]
    held_for_weight: tuple[float, ...]
    whole: tuple[float, ...] = ()
    others: tuple[tuple[PassKind, tuple[float, ...]], ...] = ()
    memory_of_others: tuple[tuple[str, tuple[float, ...]], ...] = ()
    microbatches: tuple[StageCosts, ...] = ()
    shards: ShardCosts | None = None
    forward_comm: tuple[float, ...] = ()
    backward_comm: tuple[float, ...] = ()
    pair_loss: float = 0.0
    recompute: tuple[float, ...] = ()
    kept_input: tuple[float, ...] = ()
    copy: tuple[float, ...] = ()
    full_duplex: bool = True
    host_limit: float = math.inf

    def of(self, microbatch: int) -> StageCosts:
        """Return the costs of one microbatch."""
        return self.microbatches[microbatch] if self.microbatches else self

    def rows(self, num_microbatches: int) -> list[tuple[int, StageCosts]]:
        """Return the costs that microbatches have, each with the number of those that have it."""
        if not self.microbatches:
            return [(num_microbatches, self)]
        return [(count, row) for row, count in Counter(self.microbatches).items()]

    @cached_property
    def largest_activation(self) -> tuple[float, ...]:
        """Memory that F holds on each stage, at most of all microbatches."""
        return tuple(map(max, zip(*(row.activation for _, row in self.rows(1)), strict=True)))

    @cached_property
    def mean_activation(self) -> tuple[float, ...]:
        """Memory that F holds on each stage, on average over the microbatches."""
        if not self.microbatches:
            return self.activation
        rows = [row.activation for row in self.microbatches]
        return tuple(sum(of_stage) / len(rows) for of_stage in zip(*rows, strict=True))

    @cached_property
    def seconds(self) -> dict[PassKind, tuple[float, ...]]:
        """Seconds of a pass of each kind on each stage."""
        training = {
            PassKind.F: self.forward,
            PassKind.B: self.backward,
            PassKind.W: self.weight,
            PassKind.BW: self.fused,
        }
        training[PassKind.R] = self.recompute or self.forward
        training[PassKind.D] = training[PassKind.H] = (0.0,) * len(self.forward)
        return training | dict(self.others) | self._seconds_of_shards()

    def _seconds_of_shards(self) -> dict[PassKind, tuple[float, ...]]:
        if self.shards is None:
            return {}
        none = (0.0,) * len(self.forward)
        return {
            PassKind.O: none + self.shards.output,
            PassKind.V: none + self.shards.weight,
            PassKind.P: (*none[1:], self.shards.loss),
            **dict.fromkeys((PassKind.E, PassKind.G), none + self.shards.lookup),
            **dict.fromkeys((PassKind.M, PassKind.K), none),
        }

    @cached_property
    def latencies(self) -> dict[PassKind, tuple[float, ...]]:
        """Transfer seconds of the output of a pass of each kind and stage."""
        none = (0.0,) * len(self.forward_p2p)
        latencies = dict.fromkeys(PassKind.all(), none)
        backward = dict.fromkeys((PassKind.B, PassKind.BW), self.backward_p2p)
        latencies |= {PassKind.F: self.forward_p2p} | backward
        if self.shards is not None:
            latencies[PassKind.F] = (*self.forward_p2p[:-1], self.shards.arrival)
            latencies[PassKind.P] = (*none[1:], self.shards.told)
            latencies[PassKind.O] = none + self.shards.back
            latencies[PassKind.V] = latencies[PassKind.G] = none + (0.0,) * len(self.shards.back)
            if self.shards.lookup:
                latencies[PassKind.E] = none + self.shards.of_lookup
                first = (self.shards.from_first, *self.backward_p2p[1:])
                latencies |= dict.fromkeys((PassKind.B, PassKind.BW), first)
                latencies |= {PassKind.M: (self.shards.told,) * len(none)}
                latencies |= {PassKind.K: (self.shards.from_first,) * len(none)}
        return latencies

    @cached_property
    def memory(self) -> dict[str, tuple[float, ...]]:
        """Tables of memory by stage; one that is left out is of nothing."""
        shards = () if self.shards is None else (0.0,) * len(self.activation) + self.shards.held
        tables = {
            "activation": self.activation,
            "held_for_weight": self.held_for_weight,
            "kept_input": self.kept_input,
            "logits": shards,
            **dict(self.memory_of_others),
        }
        return {name: table for name, table in tables.items() if table}

    @cached_property
    def _changes(self) -> dict[tuple[tuple[str, int], ...], tuple[float, ...]]:
        return {}

    def change(self, memory: tuple[tuple[str, int], ...], stage: int) -> float:
        """Return a change of memory on a stage: so many times each of the tables."""
        if (found := self._changes.get(memory)) is None:
            tables = [(n, self.memory[name]) for name, n in memory if name in self.memory]
            length = max((len(table) for _, table in tables), default=0)
            each = zip(*([n * value for value in table] for n, table in tables), strict=True)
            found = tuple(map(sum, each)) if length else ()
            self._changes[memory] = found
        return found[stage] if found else 0.0

    @property
    def fused(self) -> tuple[float, ...]:
        """Seconds of BW on each stage."""
        split = zip(self.backward, self.weight, strict=True)
        return self.whole or tuple(b + w for b, w in split)

    def shortest(self) -> StageCosts:
        """Return the costs with W shortened where a whole backward takes less than its halves."""
        if not self.whole:
            return self
        fused = zip(self.weight, self.whole, self.backward, strict=True)
        return replace(
            self, weight=tuple(max(0.0, min(w, both - b)) for w, both, b in fused), whole=()
        )

    def duration(self, p: Pass) -> float:
        """Return the seconds of one pass."""
        return self.of(p.microbatch).seconds[p.kind][p.stage]

    @property
    def recomputes_or_offloads(self) -> bool:
        """Whether activations can be recomputed or offloaded."""
        return bool(self.recompute or self.copy)

    @property
    def communicates(self) -> bool:
        """Whether there is anything that a pair could hide."""
        return any(self.forward_comm) or any(self.backward_comm)

    def hidden(self) -> StageCosts:
        """Return the costs if every F and B hid all of its communication."""
        if not self.communicates:
            return self

        def rest(alone: tuple[float, ...], comm: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(map(sub, alone, comm)) if alone and comm else alone

        return replace(
            self,
            forward=rest(self.forward, self.forward_comm),
            backward=rest(self.backward, self.backward_comm),
            whole=rest(self.whole, self.backward_comm),
            forward_comm=(),
            backward_comm=(),
        )

    def pair_seconds(self, pair: Pair) -> float:
        """Return the seconds of a pair.

        What both compute, their all-to-alls, or all of one of them, whichever takes longest; a
        share ``pair_loss`` more, because kernels that run at once slow each other down.
        """
        there, back = self.of(pair.forward.microbatch), self.of(pair.backward.microbatch)
        forward, backward = self.duration(pair.forward), self.duration(pair.backward)
        all_to_all = there.forward_comm[pair.forward.stage] if there.forward_comm else 0.0
        all_to_all += back.backward_comm[pair.backward.stage] if back.backward_comm else 0.0
        compute = forward + backward - all_to_all
        return max(compute, all_to_all, forward, backward) * (1.0 + self.pair_loss)


class Priced(Protocol):
    """Costs of passes on any placement: :class:`megatron_zb.schedules.Costs`, or block costs."""

    def for_placement(self, placement: Placement) -> StageCosts: ...

"""Costs of the stages of one placement, as tables by kind of pass and stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, TypeAlias

from megatron_zb.schedules.kinds import Memory
from megatron_zb.schedules.passes import Pair, Pass, PassKind
from megatron_zb.schedules.placement import Placement

Table: TypeAlias = tuple[float, ...]
"""A number for each stage s. Where ranks hold shards of the vocabulary, S + r is that of rank r."""


@dataclass(frozen=True)
class HostCopies:
    """Copies of activations to the host, and back.

    Args:
        seconds: in which what F of a stage holds is copied one way.
        full_duplex: whether the copies of both directions run at once without slowing down.
        limit: memory of the host for each rank, in the unit of activation.
    """

    seconds: Table
    full_duplex: bool = True
    limit: float = math.inf


@dataclass(frozen=True)
class StageCosts:
    """Costs resolved for the stages of one placement (see :meth:`Costs.for_placement`).

    Args:
        seconds: of a pass, by kind.
        latency: seconds in which the output of a pass travels, by kind; 0 on the same rank. F of
            stage s sends to stage s+1, B and BW to stage s-1.
        memory: tables that the entries of kinds name, all in one unit. ``activation[s]`` is what F
            of stage s holds and ``held_for_weight[s]`` the part still held between B and W. Where
            activations can be recomputed, ``kept_input[s]`` is what F holds until R; the lack of
            that table says that they cannot.
        exchange: seconds of F, and of B and BW, that are spent on nothing but the expert
            all-to-all, by F and B: a :class:`~passes.Pair` hides them.
        pair_loss: the share by which a pair takes longer.
        copies: those of activations that are offloaded; None where they cannot be.
        microbatches: costs of microbatch j, where they are not all alike; the others are those of
            a typical one then. Equal rows are one object.
        lag: seconds between each further input of a pass and its start, by kind, in which its rank
            runs other passes: a reduction of gradients, a gathering of weights. Those of one rank
            follow one another.
    """

    seconds: Mapping[PassKind, Table]
    latency: Mapping[PassKind, Table]
    memory: Mapping[str, Table]
    exchange: Mapping[PassKind, Table] = field(default_factory=dict)
    pair_loss: float = 0.0
    copies: HostCopies | None = None
    microbatches: tuple[StageCosts, ...] = ()
    lag: Mapping[PassKind, Table] = field(default_factory=dict)

    def of(self, microbatch: int) -> StageCosts:
        """Return the costs of one microbatch."""
        return self.microbatches[microbatch] if self.microbatches else self

    def rows(self, num_microbatches: int) -> list[tuple[int, StageCosts]]:
        """Return the costs that microbatches have, each with the number of those that have it."""
        if not self.microbatches:
            return [(num_microbatches, self)]
        counts = Counter(map(id, self.microbatches))
        first = {id(row): row for row in self.microbatches}
        return [(counts[key], row) for key, row in first.items()]

    def with_seconds(self, seconds: Mapping[PassKind, Table]) -> StageCosts:
        """Return the costs with other seconds of some kinds of passes."""
        return replace(self, seconds={**self.seconds, **seconds})

    @property
    def keeps_all(self) -> bool:
        """Whether activations can be neither recomputed nor offloaded."""
        return "kept_input" not in self.memory and self.copies is None

    @cached_property
    def largest_activation(self) -> Table:
        """Memory that F holds on each stage, at most of all microbatches."""
        rows = (row.memory["activation"] for _, row in self.rows(1))
        return tuple(map(max, zip(*rows, strict=True)))

    @cached_property
    def mean_activation(self) -> Table:
        """Memory that F holds on each stage, on average over the microbatches."""
        if not self.microbatches:
            return self.memory["activation"]
        rows = [row.memory["activation"] for row in self.microbatches]
        return tuple(sum(of_stage) / len(rows) for of_stage in zip(*rows, strict=True))

    @cached_property
    def _changes(self) -> dict[Memory, Table]:
        return {}

    def change(self, memory: Memory, stage: int) -> float:
        """Return a change of memory on a stage: a number of times each of the tables.

        A table that the costs do not have is one of nothing.
        """
        if (found := self._changes.get(memory)) is None:
            tables = [(n, self.memory[name]) for name, n in memory if name in self.memory]
            length = max((len(table) for _, table in tables), default=0)
            each = zip(*([n * value for value in table] for n, table in tables), strict=True)
            found = tuple(map(sum, each)) if length else ()
            self._changes[memory] = found
        return found[stage] if found else 0.0

    def duration(self, p: Pass) -> float:
        """Return the seconds of one pass."""
        return self.of(p.microbatch).seconds[p.kind][p.stage]

    def pair_seconds(self, pair: Pair) -> float:
        """Return the seconds of a pair.

        What both compute, their all-to-alls, or all of one of them, whichever takes longest; a
        share ``pair_loss`` more, because kernels that run at once slow each other down.
        """
        there = self.of(pair.forward.microbatch).exchange.get(PassKind.F)
        back = self.of(pair.backward.microbatch).exchange.get(PassKind.B)
        forward, backward = self.duration(pair.forward), self.duration(pair.backward)
        all_to_all = there[pair.forward.stage] if there else 0.0
        all_to_all += back[pair.backward.stage] if back else 0.0
        compute = forward + backward - all_to_all
        return max(compute, all_to_all, forward, backward) * (1.0 + self.pair_loss)


def communicates(costs: StageCosts) -> bool:
    """Return whether there is anything that a pair could hide."""
    return any(map(any, costs.exchange.values()))


class Priced(Protocol):
    """Costs of passes on any placement: :class:`megatron_zb.schedules.Costs`, or block costs."""

    def for_placement(self, placement: Placement) -> StageCosts: ...

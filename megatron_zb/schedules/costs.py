"""Costs of passes and messages: seconds per stage and kind, seconds per link, bytes per stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median

from megatron_zb.errors import UsageError
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement

MOST_RANKS = 1024
"""Most ranks of a pipeline; there is a time for every link between two of them."""


@dataclass(frozen=True)
class StageCosts:
    """Costs resolved for the stages of one placement (see :meth:`Costs.for_placement`).

    ``forward_hop[s]`` is the time of the message from stage s to s+1 and ``backward_hop[s]`` from
    stage s to s-1, 0 on the same rank. ``activation[s]`` is the memory that F(s) holds and
    ``held_for_weight[s]`` the part still held between B(s) and W(s). ``whole`` are the seconds of
    BW; where it is empty, BW takes as long as B and W. ``others`` has those of other kinds.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    forward_hop: tuple[float, ...]
    backward_hop: tuple[float, ...]
    activation: tuple[float, ...]
    held_for_weight: tuple[float, ...]
    whole: tuple[float, ...] = ()
    others: tuple[tuple[PassKind, tuple[float, ...]], ...] = ()

    @cached_property
    def seconds(self) -> dict[PassKind, tuple[float, ...]]:
        """Seconds of a pass of each kind on each stage."""
        training = {
            PassKind.F: self.forward,
            PassKind.B: self.backward,
            PassKind.W: self.weight,
            PassKind.BW: self.fused,
        }
        return training | dict(self.others)

    @cached_property
    def hops(self) -> dict[PassKind, tuple[float, ...]]:
        """Transfer seconds of the output of a pass of each kind and stage."""
        none = (0.0,) * len(self.forward_hop)
        hops = dict.fromkeys(PassKind, none)
        backward = dict.fromkeys((PassKind.B, PassKind.BW), self.backward_hop)
        return hops | {PassKind.F: self.forward_hop} | backward

    @cached_property
    def memory(self) -> dict[PassKind, tuple[tuple[float, ...], tuple[float, ...]]]:
        """Memory that a pass of each kind and stage takes at its start, and frees at its end."""
        none, held, kept = (0.0,) * len(self.activation), self.activation, self.held_for_weight
        by_b = tuple(a - b for a, b in zip(held, kept, strict=True))
        return {
            PassKind.F: (held, none),
            PassKind.B: (none, by_b),
            PassKind.W: (none, kept),
            PassKind.BW: (none, held),
            PassKind.T: (held, none),
            PassKind.S: (none, held),
            PassKind.U: (none, none),
        }

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
        return self.seconds[p.kind][p.stage]


@dataclass(frozen=True)
class Costs:
    """Costs of one microbatch, independent of how the model will be cut into stages.

    The model is described as equal numbers of layers in consecutive *slices* (any number of them,
    often one per pipeline rank or per layer): ``forward``, ``backward`` (input gradient) and
    ``weight`` are seconds per slice, ``activation`` what its F holds and ``held_for_weight`` what
    of that is still held between B and W, in any unit of memory. A placement with more or fewer
    stages cuts or merges the slices. ``slowdown[r]`` multiplies every time on logical rank r and
    ``p2p[a][b]`` is the time of one transfer from rank a to rank b. ``whole`` is what a fused
    backward takes where that is known; else, or if it is empty, as long as both of its halves.
    """

    pipeline_size: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    p2p: tuple[tuple[float, ...], ...]
    slowdown: tuple[float, ...]
    activation: tuple[float, ...]
    held_for_weight: tuple[float, ...]
    fixed: tuple[float, ...]
    whole: tuple[float, ...] = ()

    @classmethod
    def uniform(
        cls,
        *,
        pipeline_size: int,
        forward: float,
        backward: float,
        weight: float,
        p2p: float = 0.0,
    ) -> Costs:
        """Build costs that are equal everywhere.

        Args:
            pipeline_size: number of pipeline ranks p.
            forward, backward, weight: seconds for one microbatch on one pipeline rank (all of its
                model chunks together).
            p2p: seconds per transfer between two ranks.

        Raises:
            UsageError: a time is negative or not finite, or forward, backward are zero.
        """
        return cls.of_slices(
            pipeline_size=pipeline_size,
            forward=[forward] * pipeline_size,
            backward=[backward] * pipeline_size,
            weight=[weight] * pipeline_size,
            p2p=p2p,
        )

    @classmethod
    def of_slices(
        cls,
        *,
        pipeline_size: int,
        forward: Sequence[float],
        backward: Sequence[float],
        weight: Sequence[float],
        p2p: float | Sequence[Sequence[float]] = 0.0,
        slowdown: Sequence[float] | None = None,
        activation: Sequence[float] | None = None,
        held_for_weight: Sequence[float] | None = None,
        fixed: Sequence[float] | None = None,
        whole: Sequence[float] = (),
    ) -> Costs:
        """Build the costs of consecutive slices of the model (see the class).

        ``activation`` defaults to ``p / slices`` for each slice, so that memory is counted in
        microbatches of a whole rank; ``held_for_weight`` defaults to all of it.

        Raises:
            UsageError: lengths do not match, a value is negative or not finite, or there are more
                than :data:`MOST_RANKS` ranks.
        """
        slices = len(forward)
        if pipeline_size < 1 or slices < 1:
            raise UsageError(
                f"costs for {pipeline_size} pipeline ranks and {slices} slices: give 1 or more"
            )
        if pipeline_size > MOST_RANKS:
            raise UsageError(
                f"a pipeline of {pipeline_size} ranks was asked for: give at most {MOST_RANKS}"
            )
        if isinstance(p2p, int | float):
            ranks = range(pipeline_size)
            p2p = [[0.0 if a == b else float(p2p) for b in ranks] for a in ranks]
        held = [pipeline_size / slices] * slices if activation is None else list(activation)
        costs = cls(
            pipeline_size=pipeline_size,
            forward=tuple(forward),
            backward=tuple(backward),
            weight=tuple(weight),
            p2p=tuple(tuple(row) for row in p2p),
            slowdown=tuple([1.0] * pipeline_size if slowdown is None else slowdown),
            activation=tuple(held),
            held_for_weight=tuple(held if held_for_weight is None else held_for_weight),
            fixed=tuple([0.0] * pipeline_size if fixed is None else fixed),
            whole=tuple(whole),
        )
        costs._check()
        return costs

    def _check(self) -> None:
        slices = len(self.forward)
        for name, values, length in (
            ("forward", self.forward, slices),
            ("backward", self.backward, slices),
            ("weight", self.weight, slices),
            ("activation", self.activation, slices),
            ("held_for_weight", self.held_for_weight, slices),
            ("slowdown", self.slowdown, self.pipeline_size),
            ("fixed", self.fixed, self.pipeline_size),
            ("whole", self.whole, slices if self.whole else 0),
            *(("p2p", row, self.pipeline_size) for row in self.p2p),
        ):
            if len(values) != length:
                raise UsageError(f"costs: {name} has {len(values)} entries, {length} are needed")
            if not all(0 <= v < float("inf") for v in values):
                raise UsageError(
                    f"costs: {name} is {list(values)}: give finite values of 0 or more"
                )
        if len(self.p2p) != self.pipeline_size:
            raise UsageError(
                f"costs: p2p has {len(self.p2p)} rows, {self.pipeline_size} are needed"
            )
        for name, values in (("forward", self.forward), ("backward", self.backward)):
            if not sum(values) > 0:
                raise UsageError(f"costs: {name} is zero: give a positive time, such as 1.0")
        if any(
            kept > held for kept, held in zip(self.held_for_weight, self.activation, strict=True)
        ):
            raise UsageError("costs: held_for_weight is more than activation: B only frees memory")
        if not all(factor > 0 for factor in self.slowdown):
            raise UsageError("costs: slowdown is zero: give a positive factor, such as 1.0")

    def one_f_one_b_peak(self) -> float:
        """Return 1F1B's peak: p microbatches of the activations of its first rank."""
        return self.pipeline_size * _resample(self.activation, self.pipeline_size)[0]

    def averaged(self) -> Costs:
        """Return the same model with one cost for all, as most published schedulers see it.

        Every slice, rank and link gets the median of its kind.
        """
        links = [self.p2p[a][a + 1] for a in range(self.pipeline_size - 1)]
        return Costs.of_slices(
            pipeline_size=self.pipeline_size,
            forward=[median(self.forward)] * len(self.forward),
            backward=[median(self.backward)] * len(self.backward),
            weight=[median(self.weight)] * len(self.weight),
            p2p=median(links or [0.0]),
            activation=self.activation,
            held_for_weight=self.held_for_weight,
            fixed=self.fixed,
            whole=[median(self.whole)] * len(self.whole) if self.whole else (),
        )

    def _hop(self, source: int, target: int) -> float:
        return 0.0 if source == target else self.p2p[source][target]

    def for_placement(self, placement: Placement) -> StageCosts:
        """Cut or merge the slices into the stages of a placement.

        Raises:
            UsageError: the placement has another pipeline size.
        """
        if placement.pipeline_size != self.pipeline_size:
            raise UsageError(
                f"costs are for {self.pipeline_size} pipeline ranks, "
                f"the placement has {placement.pipeline_size}"
            )
        stages, rank_of = placement.num_stages, placement.rank_of

        def seconds(values: tuple[float, ...]) -> tuple[float, ...]:
            cut = _resample(values, stages)
            return tuple(v * self.slowdown[r] for v, r in zip(cut, rank_of, strict=True))

        forward_hop = [self._hop(a, b) for a, b in pairwise(rank_of)]
        backward_hop = [self._hop(b, a) for a, b in pairwise(rank_of)]
        return StageCosts(
            forward=seconds(self.forward),
            backward=seconds(self.backward),
            weight=seconds(self.weight),
            forward_hop=(*forward_hop, 0.0),
            backward_hop=(0.0, *backward_hop),
            activation=_resample(self.activation, stages),
            held_for_weight=_resample(self.held_for_weight, stages),
            whole=seconds(self.whole) if self.whole else (),
        )


def _resample(values: tuple[float, ...], parts: int) -> tuple[float, ...]:
    """Spread consecutive equal slices over ``parts`` equal stages, keeping the total."""
    slices = len(values)
    if slices == parts:
        return values
    if parts % slices == 0:
        share = parts // slices
        return tuple(v / share for v in values for _ in range(share))
    out = []
    for part in range(parts):  # in units of 1/parts slice, so that all borders are integers
        low, high = part * slices, (part + 1) * slices
        total = 0.0
        for index in range(low // parts, (high - 1) // parts + 1):
            overlap = min(high, (index + 1) * parts) - max(low, index * parts)
            total += values[index] * overlap / parts
        out.append(total)
    return tuple(out)

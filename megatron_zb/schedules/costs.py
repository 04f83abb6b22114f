"""Costs of a model and its links, before it is cut into stages: seconds and memory by slice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import add, mul, sub
from statistics import median
from typing import Any, NamedTuple, Protocol

from megatron_zb.errors import UsageError
from megatron_zb.schedules.kinds import Kind
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.stage_costs import ShardCosts, StageCosts

MOST_RANKS = 1024
"""Most ranks of a pipeline; there is a time for every link between two of them."""


PAIR_LOSS = 0.03
"""How much longer a pair takes because F and backward slow each other down. An assumption."""


def most_in_a_row(values: Sequence[float], count: int) -> float:
    """Return the largest sum of ``count`` consecutive values, or the sum of all if fewer."""
    return max(sum(values[i : i + count]) for i in range(max(1, len(values) - count + 1)))


@dataclass(frozen=True)
class Vocabulary:
    """Costs of one microbatch of a vocabulary-parallel output layer.

    ``output`` are the seconds of O of all shards together (logits, softmax and parts of the input
    gradient), ``weight`` those of V (weight gradients), ``loss`` those of P, which puts the parts
    together. ``held`` is what all shards hold from O to V, in the unit of ``Costs.activation``.
    ``scatter`` and ``gather`` are the seconds by which the last stage's output takes longer to
    reach all ranks, and their parts to come back, than one message from a stage to the next.
    ``shares[r]`` is the share of the vocabulary on logical rank r, the same on all if left out.
    ``lookup`` are the seconds of E of all shards together, and those of G, if the embedding is
    vocabulary parallel, too; None if it is whole. ``predicts`` says that the last stage embeds
    later tokens, for multi-token prediction.
    """

    output: float
    weight: float
    loss: float = 0.0
    held: float = 0.0
    scatter: float = 0.0
    gather: float = 0.0
    shares: tuple[float, ...] = ()
    lookup: float | None = None
    predicts: bool = False

    def times(self, factor: float) -> Vocabulary:
        """Return the costs of a microbatch that is so many times as long."""
        per_token = ("output", "weight", "loss", "held", "scatter", "gather")
        return replace(
            self,
            **{name: factor * getattr(self, name) for name in per_token},
            lookup=None if self.lookup is None else factor * self.lookup,
        )


class FurtherPasses(Protocol):
    """A kind of passes that the costs have beside those of training: see :mod:`parts`."""

    @property
    def kind(self) -> Kind: ...
    @property
    def follows(self) -> PassKind: ...
    @property
    def seconds(self) -> float: ...
    @property
    def memory(self) -> float: ...
    def times(self, length: float) -> FurtherPasses:
        """Return those of a microbatch that is so many times as long."""
        ...


class Scale(NamedTuple):
    """How many times one microbatch takes what another does, in three respects.

    Args:
        tokens: W, messages and memory.
        forward: F, and R, which computes it again.
        backward: B.
    """

    tokens: float
    forward: float
    backward: float


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
    Where microbatches are not all alike, ``microbatches[j]`` has the costs of microbatch j, and the
    other fields are those of a typical one: see :meth:`of_lengths`. ``vocabulary`` are the costs of
    a vocabulary-parallel output layer, and no part of the slices then.

    ``forward_comm`` and ``backward_comm`` are seconds per slice in which F, and B or BW, only
    run the expert all-to-all, beside those in which they compute; empty if there are none. A
    pair of F and B takes a share ``pair_loss`` longer than it would if the two did not slow each
    other down: see :meth:`with_communication`.

    ``recompute`` are the seconds per slice to recompute a forward that has kept only the input of
    its stage, which takes ``kept_input``, in the unit of ``activation``; empty if
    everything is kept: see :meth:`with_recomputation`. ``copy`` are the seconds per slice to copy
    what it holds to the host, or back; empty if nothing is offloaded: see :meth:`with_offload`.
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
    microbatches: tuple[Costs, ...] = ()
    vocabulary: Vocabulary | None = None
    forward_comm: tuple[float, ...] = ()
    backward_comm: tuple[float, ...] = ()
    pair_loss: float = 0.0
    recompute: tuple[float, ...] = ()
    kept_input: float = 0.0
    copy: tuple[float, ...] = ()
    full_duplex: bool = True
    host_limit: float = math.inf
    parts: tuple[FurtherPasses, ...] = ()

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
        slices, ranks = len(self.forward), self.pipeline_size
        lengths = dict.fromkeys(_ALWAYS, slices) | {"slowdown": ranks, "fixed": ranks}
        lengths |= {name: slices if getattr(self, name) else 0 for name in _AT_TIMES}
        lengths["backward_comm"] = lengths["forward_comm"]
        tables = [(name, getattr(self, name), length) for name, length in lengths.items()]
        tables += [(name, (getattr(self, name),), 1) for name in ("pair_loss", "kept_input")]
        tables += [("p2p", row, ranks) for row in self.p2p]
        for name, values, length in tables:
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

    def _check_one_length(self, what: str) -> None:
        if self.microbatches:
            raise UsageError(
                f"costs: microbatches have lengths of their own already: give the costs of {what} "
                "before"
            )

    @property
    def shards_embedding(self) -> bool:
        """Whether the embedding is vocabulary parallel, like the output layer."""
        return self.vocabulary is not None and self.vocabulary.lookup is not None

    def with_vocabulary(
        self,
        *,
        output: float,
        weight: float,
        loss: float = 0.0,
        held: float = 0.0,
        scatter: float = 0.0,
        gather: float = 0.0,
        shares: Sequence[float] | None = None,
        lookup: float | None = None,
    ) -> Costs:
        """Return the costs with a vocabulary-parallel output layer.

        Args:
            output, weight, loss, held, scatter, gather, lookup: see :class:`Vocabulary`.
            shares: the vocabulary's share of each logical rank, the same on all if left out.

        Raises:
            UsageError: a value is negative or not finite, or the shares do not make a whole.
        """
        p = self.pipeline_size
        given = tuple([1 / p] * p if shares is None else shares)
        values: dict[str, Any] = {"output": output, "weight": weight, "loss": loss, "held": held}
        values |= {"scatter": scatter, "gather": gather}
        for name, value in (values | {"lookup": lookup or 0.0}).items():
            if not 0 <= value < float("inf"):
                raise UsageError(
                    f"costs: {name} of the vocabulary is {value}: give a finite value of 0 or more"
                )
        if len(given) != p or min(given) < 0 or abs(sum(given) - 1.0) > 1e-6:
            raise UsageError(
                f"costs: the shares of the vocabulary are {list(given)}: give one of 0 or more for "
                f"each of the {p} ranks, 1 in all"
            )
        self._check_one_length("the vocabulary")
        return replace(self, vocabulary=Vocabulary(**values, shares=given, lookup=lookup))

    def with_prediction(self) -> Costs:
        """Return the costs of a vocabulary-parallel embedding that the last stage also reads."""
        assert self.vocabulary is not None and self.shards_embedding
        return replace(self, vocabulary=replace(self.vocabulary, predicts=True))

    def with_communication(
        self,
        *,
        forward: float | Sequence[float],
        backward: float | Sequence[float],
        pair_loss: float = 0.0,
    ) -> Costs:
        """Return the costs with an expert all-to-all that nothing hides.

        Args:
            forward, backward: seconds of it in F, and in B or BW, beside what they compute: of each
                slice, or one number for a microbatch on one whole rank.
            pair_loss: the share by which a pair of F and B takes longer because each slows the
                other down.

        Raises:
            UsageError: a value is negative or not finite, or there is not one for each slice.
        """
        self._check_one_length("communication")
        comm = {"forward_comm": self._each(forward), "backward_comm": self._each(backward)}
        return self._checked(**comm, pair_loss=pair_loss)

    def without_communication(self) -> Costs:
        """Return the costs with the all-to-all as a part of F and B that nothing can hide."""
        if not self.forward_comm:
            return self

        return replace(
            self,
            forward=_sum(self.forward, self.forward_comm),
            backward=_sum(self.backward, self.backward_comm),
            whole=_sum(self.whole, self.backward_comm),
            recompute=_sum(self.recompute, self.forward_comm),
            forward_comm=(),
            backward_comm=(),
            pair_loss=0.0,
            microbatches=tuple(row.without_communication() for row in self.microbatches),
        )

    def with_recomputation(
        self, *, kept_input: float, seconds: Sequence[float] | None = None
    ) -> Costs:
        """Return the costs with the choice to recompute activations before B.

        Args:
            kept_input: memory of the input of a stage, in the unit of ``activation``.
            seconds: what making them again takes, of each slice; as long as F if left out, beside
                what it exchanges: see :meth:`with_communication`.

        Raises:
            UsageError: a value is negative or not finite, or there is not one for each slice.
        """
        self._check_one_length("recomputation")
        again = self.forward if seconds is None else tuple(seconds)
        return self._checked(recompute=again, kept_input=kept_input)

    def with_offload(
        self,
        *,
        seconds: float | Sequence[float],
        full_duplex: bool = True,
        host_limit: float = math.inf,
    ) -> Costs:
        """Return the costs with the choice to offload activations, and to reload them before B.

        Args:
            seconds: what copying an activation one way takes, of each slice, or one number for a
                microbatch on one whole rank; longer where ranks share a link to the host.
            full_duplex: whether the copies of both directions run at once without slowing down.
            host_limit: memory of the host for each rank, in the unit of ``activation``.

        Raises:
            UsageError: a value is negative or not finite, or there is not one for each slice.
        """
        self._check_one_length("offload")
        if not host_limit >= 0:
            raise UsageError(f"costs: host_limit is {host_limit}: give memory of 0 or more")
        copy = self._each(seconds)
        return self._checked(copy=copy, full_duplex=full_duplex, host_limit=host_limit)

    def _checked(self, **changes: Any) -> Costs:
        costs = replace(self, **changes)
        costs._check()
        return costs

    def _each(self, values: float | Sequence[float]) -> tuple[float, ...]:
        """Return seconds of each slice, where one number is those of a whole rank."""
        slices = len(self.forward)
        if isinstance(values, int | float):
            return (values * self.pipeline_size / slices,) * slices
        return tuple(values)

    @property
    def recomputes_or_offloads(self) -> bool:
        """Whether activations can be recomputed or offloaded."""
        return bool(self.recompute or self.copy)

    def with_all_kept(self) -> Costs:
        """Return the costs where every activation is kept on its device."""
        if not self.recomputes_or_offloads:
            return self
        rows = tuple(row.with_all_kept() for row in self.microbatches)
        return replace(self, recompute=(), kept_input=0.0, copy=(), microbatches=rows)

    def with_unsplit(self, shares: Sequence[float]) -> Costs:
        """Return the costs where B computes a share of each stage's weight gradients, not W.

        Args:
            shares: of the weight gradients of consecutive stages, from 0 to 1.
        """
        left = self.with_frozen(shares)
        moved = map(sub, self.weight, left.weight)
        return replace(
            left,
            backward=tuple(map(add, self.backward, moved)),
            whole=self.whole,
            microbatches=tuple(row.with_unsplit(shares) for row in self.microbatches),
        )

    def with_frozen(self, shares: Sequence[float]) -> Costs:
        """Return the costs where nothing computes a share of each stage's weight gradients.

        Args:
            shares: of the weight gradients of consecutive stages, from 0 to 1.
        """
        slices = len(self.weight)
        mean = [total * slices / len(shares) for total in _resample(tuple(shares), slices)]

        def rest(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(value * (1 - share) for value, share in zip(values, mean, strict=True))

        weight = rest(self.weight)
        lost = map(sub, self.weight, weight)
        return replace(
            self,
            weight=weight,
            whole=tuple(whole - less for whole, less in zip(self.whole, lost, strict=False)),
            held_for_weight=rest(self.held_for_weight),
            microbatches=tuple(row.with_frozen(shares) for row in self.microbatches),
        )

    def of_lengths(self, lengths: Sequence[float]) -> Costs:
        """Return the costs of microbatches that take so many times what this one takes, in turn.

        Seconds of passes and of transfers and activations are all in proportion.

        Raises:
            UsageError: there is no length, or one is not a positive number.
        """
        if not lengths or not all(0 < length < float("inf") for length in lengths):
            raise UsageError(
                f"costs: lengths of microbatches are {list(lengths)}: give positive numbers"
            )
        rows = {length: self.scaled(Scale(length, length, length)) for length in lengths}
        return replace(self, microbatches=tuple(rows[length] for length in lengths))

    def scaled(self, scale: Scale) -> Costs:
        """Return the costs of a microbatch that takes more or less than this one."""
        backward, weight = scale.backward, scale.tokens
        factors = dict.fromkeys((*_ALWAYS, *_AT_TIMES), scale.tokens)
        factors |= {"forward": scale.forward, "recompute": scale.forward, "backward": backward}
        tables: dict[str, Any] = {
            name: tuple(value * factor for value in getattr(self, name))
            for name, factor in factors.items()
        }
        if backward != weight:
            tables["whole"] = tuple(
                value * (b * backward + w * weight) / (b + w)
                for value, b, w in zip(self.whole, self.backward, self.weight, strict=False)
            )
        return replace(
            self,
            **tables,
            p2p=tuple(tuple(value * scale.tokens for value in row) for row in self.p2p),
            kept_input=self.kept_input * scale.tokens,
            microbatches=(),
            vocabulary=self.vocabulary and self.vocabulary.times(scale.tokens),
            parts=tuple(part.times(scale.tokens) for part in self.parts),
        )

    def in_order(self, order: Sequence[int]) -> Costs:
        """Return the costs of unequal microbatches in another order."""
        return replace(self, microbatches=tuple(self.microbatches[j] for j in order))

    def one_f_one_b_peak(self) -> float:
        """Return 1F1B's peak: p microbatches in a row of the activations of its first rank."""
        p = self.pipeline_size
        if not self.microbatches:
            return p * _resample(self.activation, p)[0]
        held = [_resample(row.activation, p)[0] for row in self.microbatches]
        return most_in_a_row(held, p)

    def averaged(self) -> Costs:
        """Return the same model with one cost for all, as most published schedulers see it.

        Every slice, rank and link gets the median of its kind.
        """
        links = [self.p2p[a][a + 1] for a in range(self.pipeline_size - 1)]

        def equal(values: tuple[float, ...]) -> list[float]:
            return [median(values)] * len(values) if values else []

        costs = Costs.of_slices(
            pipeline_size=self.pipeline_size,
            forward=equal(self.forward),
            backward=equal(self.backward),
            weight=equal(self.weight),
            p2p=median(links or [0.0]),
            activation=self.activation,
            held_for_weight=self.held_for_weight,
            fixed=self.fixed,
            whole=equal(self.whole),
        )
        if not self.forward_comm:
            return costs
        comm = {"forward": equal(self.forward_comm), "backward": equal(self.backward_comm)}
        return costs.with_communication(**comm, pair_loss=self.pair_loss)

    def _latency(self, source: int, target: int) -> float:
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
            slowdown = [self.slowdown[r] for r in rank_of]
            return tuple(map(mul, memory(values), slowdown)) if values else ()

        def memory(values: tuple[float, ...]) -> tuple[float, ...]:
            return _resample(values, stages) if values else ()

        forward_comm, backward_comm = seconds(self.forward_comm), seconds(self.backward_comm)
        forward_p2p = [self._latency(a, b) for a, b in pairwise(rank_of)]
        backward_p2p = [self._latency(b, a) for a, b in pairwise(rank_of)]
        rows = {id(row): row.for_placement(placement) for row in self.microbatches}
        return StageCosts(
            forward=_sum(seconds(self.forward), forward_comm),
            backward=_sum(seconds(self.backward), backward_comm),
            weight=seconds(self.weight),
            forward_p2p=(*forward_p2p, 0.0),
            backward_p2p=(0.0, *backward_p2p),
            activation=memory(self.activation),
            held_for_weight=memory(self.held_for_weight),
            whole=_sum(seconds(self.whole), backward_comm),
            microbatches=tuple(rows[id(row)] for row in self.microbatches),
            shards=self._shards(placement),
            forward_comm=forward_comm,
            backward_comm=backward_comm,
            pair_loss=self.pair_loss,
            recompute=_sum(seconds(self.recompute), forward_comm),
            kept_input=self._kept_inputs(stages),
            copy=memory(self.copy),
            full_duplex=self.full_duplex,
            host_limit=self.host_limit,
            others=tuple((it.kind.kind, seconds(self._each(it.seconds))) for it in self.parts),
            memory_of_others=tuple(
                (str(it.kind.kind), _resample(self._each(it.memory), stages)) for it in self.parts
            ),
        )

    def folded(self) -> Costs:
        """Return the costs with the passes of parts counted as parts of those that they follow."""
        costs = replace(self, parts=())
        for part in self.parts:
            seconds, memory = self._each(part.seconds), self._each(part.memory)
            tables = {PassKind.F: "forward", PassKind.B: "backward", PassKind.W: "weight"}
            name = tables[part.follows]
            more = {name: seconds, "activation": memory}
            if self.whole and part.follows is not PassKind.F:
                more["whole"] = seconds
            for table, values in more.items():
                changed: Any = {table: tuple(map(add, getattr(costs, table), values))}
                costs = replace(costs, **changed)
        return costs

    def _kept_inputs(self, stages: int) -> tuple[float, ...]:
        if not self.recompute:
            return ()
        return tuple(min(self.kept_input, held) for held in _resample(self.activation, stages))

    def _shards(self, placement: Placement) -> ShardCosts | None:
        if self.vocabulary is None:
            return None
        ranks, end = range(self.pipeline_size), placement.rank_of[-1]
        told, gather = max(self._latency(end, r) for r in ranks), self.vocabulary.gather
        share = [s * f for s, f in zip(self.vocabulary.shares, self.slowdown, strict=True)]
        return ShardCosts(
            output=tuple(self.vocabulary.output * s for s in share),
            weight=tuple(self.vocabulary.weight * s for s in share),
            loss=self.vocabulary.loss * self.slowdown[end],
            held=tuple(self.vocabulary.held * s for s in self.vocabulary.shares),
            arrival=told + self.vocabulary.scatter,
            back=tuple(0.0 if r == end else self._latency(r, end) + gather for r in ranks),
            told=told,
            **self._lookups(placement, share),
        )

    def _lookups(self, placement: Placement, share: list[float]) -> dict[str, Any]:
        assert self.vocabulary is not None
        if self.vocabulary.lookup is None:
            return {}
        ranks, start = range(self.pipeline_size), placement.rank_of[0]
        from_first = max(self._latency(start, r) for r in ranks)
        return {
            "lookup": tuple(self.vocabulary.lookup * s for s in share),
            "from_first": from_first,
            "of_lookup": tuple(
                from_first if r == start else self._latency(r, start) for r in ranks
            ),
        }


_ALWAYS = ("forward", "backward", "weight", "activation", "held_for_weight")
_AT_TIMES = ("whole", "forward_comm", "backward_comm", "recompute", "copy")
"""Tables with one value for each slice: of all costs, and of some."""


def _sum(values: tuple[float, ...], more: tuple[float, ...]) -> tuple[float, ...]:
    """Return the sums of two tables; the first one where either is empty."""
    return tuple(map(add, values, more)) if values and more else values


def check_number(costs: Costs | StageCosts, num_microbatches: int) -> None:
    """Refuse costs of another number of microbatches.

    Raises:
        UsageError: names both numbers.
    """
    if costs.microbatches and len(costs.microbatches) != num_microbatches:
        raise UsageError(
            f"costs are for {len(costs.microbatches)} microbatches, "
            f"the schedule has {num_microbatches}"
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

"""A second model beside the trained one: its passes run in the bubbles of the pipeline.

The second model is the encoder of a vision-language model, or a frozen model whose forwards the
loss needs, such as the teacher of a distillation or the reference model of preference tuning. Its
layers are spread over all ranks. Each of its pieces is a stage of its own, numbered behind the
stages of the trained model, and its microbatches are units of their own, whose routes go through
these stages.

Example::

    encoder = SecondModel(SecondRole.ENCODER, forward=0.1, backward=0.2)
    build("v-half", pipeline_size=8, num_microbatches=16, second_model=encoder)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import Costs, latency
from megatron_zb.schedules.kinds import TRAINING_KINDS, Kind
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement, placement_of
from megatron_zb.schedules.rules import Sizes
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.stage_costs import Priced, StageCosts, Table
from megatron_zb.schedules.task_graph import Row, TaskGraph
from megatron_zb.schedules.units import UnitRules, Units, with_columns

_F, _B, _W, _BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW
_Numbers: TypeAlias = npt.NDArray[np.float64]


class SecondRole(Enum):
    """What a second model is for the trained one.

    ``ENCODER``: the first stage needs its output of the same microbatch. ``AHEAD``: it is a frozen
    encoder that runs for the next step, so that this step needs nothing of it. ``TEACHER``: it is
    frozen, and the loss in F of the last stage needs its output of the same microbatch.
    """

    ENCODER = "encoder"
    AHEAD = "encoder ahead"
    TEACHER = "teacher"


@dataclass(frozen=True)
class SecondModel:
    """A model that runs beside the trained one, spread over all ranks.

    Args:
        role: what it is for the trained model.
        forward: seconds of F of a microbatch on each rank, if its layers are cut over all ranks:
            one number for all ranks, or a number for each.
        backward: seconds of the input gradient, and of the weight gradient if ``weight`` is 0. A
            model without backward is frozen.
        weight: seconds of the weight gradient, if its passes may run apart.
        pieces: consecutive parts of the model on each rank, which are passes of their own.
        copies: whether each rank has a copy of the whole model, for every p-th microbatch.
        lengths: of the microbatches, relative to one another; 0 for a microbatch without a unit,
            such as one without images. All 1 if left out.
        activation: memory that F of a microbatch holds on each rank until its backward, if the
            layers are cut over all ranks, in the unit of the costs.
        output: memory of the output of a microbatch, from its last F until the pass that needs it.
    """

    role: SecondRole
    forward: float | tuple[float, ...]
    backward: float | tuple[float, ...] = 0.0
    weight: float | tuple[float, ...] = 0.0
    pieces: int = 1
    copies: bool = False
    lengths: tuple[float, ...] = ()
    activation: float = 0.0
    output: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            UsageError: a number is out of range, or the role has no backward.
        """
        name = self.name
        for what, values in (
            ("forward", self.forward),
            ("backward", self.backward),
            ("weight", self.weight),
            ("lengths", self.lengths),
            ("activation", self.activation),
            ("output", self.output),
        ):
            each = values if isinstance(values, tuple) else (values,)
            if not all(0 <= value < math.inf for value in each):
                raise UsageError(f"{name}: {what} is {values}: give finite numbers of 0 or more")
        if not _largest(self.forward) > 0:
            raise UsageError(f"{name}: forward is {self.forward}: give positive seconds")
        if self.pieces < 1:
            raise UsageError(f"{name}: {self.pieces} pieces on each rank: give 1 or more")
        if self.lengths and not any(self.lengths):
            raise UsageError(f"{name}: no microbatch has a length: leave the model out")
        if not self.is_frozen and self.role is not SecondRole.ENCODER:
            raise UsageError(
                f"{name}: its weights must not change, but backward or weight has seconds: leave "
                f"both out, or give {SecondRole.ENCODER}"
            )
        if self.is_frozen and self.activation:
            raise UsageError(
                f"{name}: it is frozen, and keeps no activation for a backward: leave activation "
                "out, or give the seconds of its backward"
            )

    @property
    def name(self) -> str:
        """What errors and drawings call it."""
        return "teacher" if self.role is SecondRole.TEACHER else "encoder"

    @property
    def in_words(self) -> str:
        """Name with its article."""
        return f"{'a' if self.role is SecondRole.TEACHER else 'an'} {self.name}"

    @property
    def layout_in_words(self) -> str:
        """Its layout, such as ``a copy on each rank``."""
        if self.copies:
            return "a copy on each rank"
        return f"layers cut over the ranks in {self.pieces} piece{'s' * (self.pieces > 1)} each"

    @property
    def place_in_words(self) -> str:
        """Its place on the ranks, such as ``every pipeline rank: a copy of the encoder``."""
        what = f"a copy of the {self.name}" if self.copies else f"layers of the {self.name}"
        of_each = ", for every p-th microbatch" if self.copies else ""
        return f"every pipeline rank: {what}{of_each}"

    @property
    def is_frozen(self) -> bool:
        """Whether it has no backward."""
        return not (_largest(self.backward) or _largest(self.weight))

    @property
    def has_whole_backward(self) -> bool:
        """Whether its weight gradients run with its input gradients."""
        return not _largest(self.weight)

    def scaled(self, factor: float) -> SecondModel:
        """Return the same model with all seconds multiplied."""

        def times(values: float | tuple[float, ...]) -> float | tuple[float, ...]:
            if isinstance(values, tuple):
                return tuple(value * factor for value in values)
            return values * factor

        return replace(
            self,
            forward=times(self.forward),
            backward=times(self.backward),
            weight=times(self.weight),
        )

    def served(self, num_microbatches: int) -> tuple[int, ...]:
        """Return the microbatches that have a unit of the second model."""
        return tuple(j for j in range(num_microbatches) if self.length(j) > 0)

    def length(self, microbatch: int) -> float:
        """Return the length of a microbatch relative to others."""
        return self.lengths[microbatch] if self.lengths else 1.0

    def check(self, pipeline_size: int, num_microbatches: int) -> None:
        """Refuse tables of other sizes.

        Raises:
            UsageError: names both sizes.
        """
        if self.lengths and len(self.lengths) != num_microbatches:
            raise UsageError(
                f"{self.name}: {len(self.lengths)} lengths for {num_microbatches} microbatches: "
                "give one for each, 0 for one without"
            )
        for what in ("forward", "backward", "weight"):
            values = getattr(self, what)
            if isinstance(values, tuple) and len(values) != pipeline_size:
                raise UsageError(
                    f"{self.name}: {what} has {len(values)} numbers for {pipeline_size} ranks: "
                    "give one for each"
                )


def _largest(values: float | tuple[float, ...]) -> float:
    return max(values, default=0.0) if isinstance(values, tuple) else values


# --- the placement: pieces of the second model behind the stages of the trained one


@dataclass(frozen=True)
class PlacementBeside(Placement):
    """Stages of a trained model, and behind them the pieces of a second one."""

    trained: Placement

    @property
    def of_trained(self) -> Placement:
        return self.trained

    @property
    def mirrored(self) -> bool:
        """Whether the trained model runs on Megatron's pipeline ranks in mirror image."""
        return self.trained.mirrored

    @property
    def peers(self) -> set[tuple[int, int]]:
        """Pairs of ranks of the trained model; :meth:`more_peers` of the rules has the others."""
        return self.trained.peers


def placed_beside(trained: Placement, second: SecondModel) -> PlacementBeside:
    """Return the placement of both models.

    A copy is on each rank as a whole. Layers that are cut run through the ranks in a zig-zag of
    ``pieces`` ways, which ends where the output is needed, so that no message carries it.
    """
    p, n = trained.pipeline_size, second.pieces
    if second.copies:
        ranks = [rank for rank in range(p) for _ in range(n)]
    else:
        is_teacher = second.role is SecondRole.TEACHER
        end = trained.rank_of[-1 if is_teacher else 0]
        way = [*range(p)] if end else [*range(p)][::-1]
        ranks = [rank for i in range(n) for rank in (way if (n - i) % 2 else way[::-1])]
    return PlacementBeside(trained.name, p, (*trained.rank_of, *ranks), trained)


# --- the rules


@dataclass(frozen=True)
class SecondModelRules(UnitRules):
    """Rules of a step of two models: units from ``microbatches`` on are those of the second one.

    ``whole`` are the rules for a search, in which weight gradients of the second model have no
    passes of their own.
    """

    second: SecondModel = field(kw_only=True)
    trained: Placement = field(kw_only=True)
    microbatches: int = field(kw_only=True)
    whole: bool = field(default=False, kw_only=True)

    owner_word: ClassVar[str] = ""

    @classmethod
    def of(cls, second: SecondModel, trained: Placement, num_microbatches: int) -> SecondModelRules:
        """Return the rules of a step of microbatches of both models."""
        stages, p, n = trained.num_stages, trained.pipeline_size, second.pieces
        served = second.served(num_microbatches)
        routes = [tuple(range(stages))] * num_microbatches
        if second.copies:
            of_rank = [tuple(range(stages + r * n, stages + (r + 1) * n)) for r in range(p)]
            routes += [of_rank[i % p] for i in range(len(served))]
        else:
            routes += [tuple(range(stages, stages + p * n))] * len(served)
        more = (_forward_with_output(),) if second.output else ()
        return cls(
            Units.of(routes),
            more=more,
            second=second,
            trained=trained,
            microbatches=num_microbatches,
        )

    @cached_property
    def served(self) -> tuple[int, ...]:
        """Microbatches of the units of the second model."""
        return self.second.served(self.microbatches)

    def microbatch_of(self, unit: int) -> int:
        """Return the microbatch that a unit of either model is."""
        return unit if unit < self.microbatches else self.served[unit - self.microbatches]

    def is_second(self, stage: int) -> bool:
        """Return whether a stage is a piece of the second model."""
        return stage >= self.trained.num_stages

    @property
    def owners(self) -> tuple[str, ...]:
        return "trained model", self.second.name

    def owner_of(self, unit: int) -> int:
        return int(unit >= self.microbatches)

    def visits(self, kind: Kind, stage: int) -> tuple[int, ...] | None:
        if self.is_second(stage) and kind.kind is not _F:
            is_none = self.second.is_frozen or (self.whole and kind.kind is _W)
            return () if is_none else super().visits(kind, stage)
        return super().visits(kind, stage)

    def joins(self) -> tuple[tuple[Pass, Pass], ...]:
        """Return the edges between the models: the maker and the reader of each."""
        return self._joins

    @cached_property
    def _joins(self) -> tuple[tuple[Pass, Pass], ...]:
        routes = self.routes or ()
        found: list[tuple[Pass, Pass]] = []
        for i, j in enumerate(self.served if self.second.role is not SecondRole.AHEAD else ()):
            unit = self.microbatches + i
            last = routes[unit][-1]
            is_teacher = self.second.role is SecondRole.TEACHER
            reader = self.trained.num_stages - 1 if is_teacher else 0
            found.append((Pass(_F, last, unit), Pass(_F, reader, j)))
            if not self.second.is_frozen:
                found.append((Pass(_B, 0, j), Pass(_B, last, unit)))
        return tuple(found)

    def more_inputs(self, graph: TaskGraph) -> Mapping[int, tuple[int, ...]]:
        """Return the inputs that a pass of one model has from the other; a BW has those of B."""
        rank_of, found = graph.placement.rank_of, dict[int, tuple[int, ...]]()
        for maker, reader in self.joins():
            if graph.forward_only and reader.kind is _B:
                continue
            code = graph.code_of(maker, rank_of[maker.stage])
            for kind in (_B, _BW) if reader.kind is _B else (_F,):
                read = graph.code_of(reader._replace(kind=kind), rank_of[reader.stage])
                found[read] = (code,)
        return found

    @cached_property
    def _readers(self) -> dict[Pass, Pass]:
        return dict(self.joins())

    def further_message(self, row: Row, unit: int) -> Message | None:
        """Return the message of an output or a gradient to the other model: of its maker's unit."""
        reader = self._readers.get(Pass(row.kind.kind, row.stage, unit))
        return None if reader is None else Message(row.kind.is_gradient, reader.stage, unit)

    def more_peers(self, placement: Placement) -> set[tuple[int, int]]:
        rank_of = placement.rank_of
        ends = {(rank_of[made.stage], rank_of[read.stage]) for made, read in self.joins()}
        between = {(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]}
        usual = {(min(pair), max(pair)) for pair in placement.peers}
        return super().more_peers(placement) | (between - usual)

    def counts_as(self, p: Pass, *, recomputed: bool) -> int:
        """Return 0 for the second model: peaks count microbatches of the trained one."""
        return 0 if self.is_second(p.stage) else super().counts_as(p, recomputed=recomputed)

    def chunks(self, placement: Placement) -> int:
        return self.trained.chunks

    def whole_microbatches(self, schedule: Sizes) -> int:
        return self.microbatches

    def unit_costs(self, schedule: Sizes, costs: Priced) -> Priced:
        return PricedBeside(costs, self) if isinstance(costs, Costs) else costs

    def sizes_in_words(self, schedule: Sizes) -> str:
        return f"{self.microbatches} microbatches, {self.second.role.value}"

    def _of_stage(self, stage: int) -> str:
        return (
            f"the {self.second.name}'s stage {stage}" if self.is_second(stage) else f"stage {stage}"
        )

    def pass_in_words(self, p: Pass) -> str:
        """Describe a pass, such as ``F of the encoder's stage 17, microbatch 3``."""
        j = self.microbatch_of(p.microbatch)
        return f"{p.kind.name} of {self._of_stage(p.stage)}, microbatch {j}"

    def message_in_words(self, placement: Placement | None, message: Message) -> str:
        kind = "the gradient" if message.is_gradient else "the activation"
        j = self.microbatch_of(message.microbatch)
        return f"{kind} for {self._of_stage(message.stage)}, microbatch {j}"

    def not_yet(self, p: Pass, needed: Pass) -> str:
        if (p.microbatch < self.microbatches) == (needed.microbatch < self.microbatches):
            return super().not_yet(p, needed)
        return f"{self.pass_in_words(p)} needs {self._input_of(p)}"

    def awaits_in_words(self, p: Pass) -> str:
        needs = {reader for _, reader in self.joins()}
        as_split = p._replace(kind=_B) if p.kind is _BW else p
        return f", which needs {self._input_of(p)}" if as_split in needs else ""

    def _input_of(self, p: Pass) -> str:
        j, name = self.microbatch_of(p.microbatch), self.second.name
        if p.kind is _F:
            return f"the {name}'s output of microbatch {j}"
        return f"the gradient of the {name}'s output of microbatch {j}"


def _forward_with_output() -> Kind:
    """Return F with the outputs of the second model: it takes one, or frees one."""
    forward = next(it for it in TRAINING_KINDS if it.kind is _F)
    return replace(forward, memory=(*forward.memory, ("output", 1)))


# --- costs


@dataclass(frozen=True)
class PricedBeside:
    """Costs of both models: those of the trained one, and the seconds of the second one."""

    costs: Costs
    rules: SecondModelRules

    def for_placement(self, placement: Placement) -> StageCosts:
        """Return the costs of the stages of both models on :class:`PlacementBeside`.

        Raises:
            UsageError: there are costs of another number of microbatches.
        """
        rules, m = self.rules, self.rules.microbatches
        trained = self.costs.for_placement(rules.trained)
        if trained.microbatches and len(trained.microbatches) != m:
            raise UsageError(
                f"costs are for {len(trained.microbatches)} microbatches, the schedule has {m}"
            )
        made: dict[tuple[object, ...], StageCosts] = {}

        def row(unit: int) -> StageCosts:
            j = rules.microbatch_of(unit)
            of_unit = self.costs.microbatches[j] if self.costs.microbatches else self.costs
            length = rules.second.length(j)
            last = self._last.get(j, -1)
            key = (id(of_unit), length, placement.rank_of[last] if rules.second.copies else -1)
            if key not in made:
                made[key] = self._row(placement, trained.of(j), of_unit, length, last)
            return made[key]

        rows = tuple(map(row, range(len(rules.columns))))
        return rows[0] if len(made) == 1 else replace(rows[0], microbatches=rows)

    @cached_property
    def _last(self) -> dict[int, int]:
        """The last piece of the second model that each microbatch passes."""
        routes, m = self.rules.routes or (), self.rules.microbatches
        return {j: routes[m + i][-1] for i, j in enumerate(self.rules.served)}

    def _row(
        self, placement: Placement, trained: StageCosts, costs: Costs, length: float, last: int
    ) -> StageCosts:
        rules, second = self.rules, self.rules.second
        stages, n, p = rules.trained.num_stages, second.pieces, placement.pipeline_size
        ranks = placement.rank_of[stages:]
        none = (0.0,) * len(ranks)

        def of_pieces(values: float | tuple[float, ...]) -> Table:
            of_rank = values if isinstance(values, tuple) else (values,) * p
            if second.copies:
                of_rank = (sum(of_rank),) * p
            return tuple(of_rank[r] * costs.slowdown[r] * length / n for r in ranks)

        f, b, w = map(of_pieces, (second.forward, second.backward, second.weight))
        own = {_F: f, _B: b, _W: w, _BW: tuple(x + y for x, y in zip(b, w, strict=True))}
        seconds = {kind: of + own.get(kind, none) for kind, of in trained.seconds.items()}
        held = of_pieces(second.activation)
        kept = none if second.has_whole_backward else held
        memory = {name: of + none for name, of in trained.memory.items()}
        memory["activation"] = trained.memory["activation"] + held
        memory["held_for_weight"] = trained.memory["held_for_weight"] + kept
        if second.output:
            memory["output"] = self._outputs(placement, second.output * length, last)
        return replace(
            trained,
            seconds=seconds,
            latency=self._latencies(placement, trained, costs, last),
            memory=memory,
            microbatches=(),
        )

    def _outputs(self, placement: Placement, output: float, last: int) -> Table:
        """Return the memory of an output by stage: taken by the last piece, freed by its reader.

        An output that goes to another rank is a message, as between any two stages.
        """
        found = [0.0] * placement.num_stages
        role, rank_of = self.rules.second.role, placement.rank_of
        reader = self.rules.trained.num_stages - 1 if role is SecondRole.TEACHER else 0
        if last >= 0 and role is SecondRole.AHEAD:
            found[last] = output
        elif last >= 0 and rank_of[last] == rank_of[reader]:
            found[last], found[reader] = output, -output
        return tuple(found)

    def _latencies(
        self, placement: Placement, trained: StageCosts, costs: Costs, last: int
    ) -> dict[PassKind, Table]:
        stages, total = self.rules.trained.num_stages, placement.num_stages
        rank_of, role = placement.rank_of, self.rules.second.role
        none = (0.0,) * (total - stages)
        found = {kind: [*of, *none] for kind, of in trained.latency.items()}
        n = total - stages if not self.rules.second.copies else self.rules.second.pieces
        for s in range(stages, total - 1):
            if (s + 1 - stages) % n:  # the next piece of the same route
                found[_F][s] = latency(costs, rank_of[s], rank_of[s + 1])
                for kind in (_B, _BW):
                    found[kind][s + 1] = latency(costs, rank_of[s + 1], rank_of[s])
        if last >= 0 and role is not SecondRole.AHEAD:
            reader = stages - 1 if role is SecondRole.TEACHER else 0
            found[_F][last] = latency(costs, rank_of[last], rank_of[reader])
            if not self.rules.second.is_frozen:
                for kind in (_B, _BW):
                    found[kind][0] = latency(costs, rank_of[0], rank_of[last])
        return {kind: tuple(of) for kind, of in found.items()}


# --- tables


def beside_second_model(schedule: Schedule, second: SecondModel, num_microbatches: int) -> Schedule:
    """Return the schedule of two models, not validated, whose table has the passes of another one.

    Raises:
        UsageError: it has other numbers of stages or microbatches.
    """
    p, stages = schedule.placement.pipeline_size, schedule.placement.num_stages
    second.check(p, num_microbatches)
    left = stages - p * second.pieces
    if left < p:
        raise UsageError(
            f"{schedule.name}: {stages} stages are listed, {p * second.pieces} of them of the "
            f"{second.name}: give the table of both models"
        )
    trained = placement_of(p, schedule.placement.rank_of[:left])
    placement = placed_beside(trained, second)
    rules = SecondModelRules.of(second, trained, num_microbatches)
    if placement.rank_of != schedule.placement.rank_of:
        raise UsageError(
            f"{schedule.name}: the pieces of the {second.name} are on ranks "
            f"{list(schedule.placement.rank_of[left:])}, not {list(placement.rank_of[left:])}"
        )
    named = with_columns(schedule, rules.columns)
    return replace(named, rules=rules, placement=placement)

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

import heapq
import math
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import product
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_zb.errors import UsageError
from megatron_zb.schedules.bounds import lower_bound, shortest
from megatron_zb.schedules.costs import Costs, latency
from megatron_zb.schedules.kinds import TRAINING_KINDS, Kind
from megatron_zb.schedules.passes import Message, Pass, PassKind
from megatron_zb.schedules.placement import Placement, placement_of
from megatron_zb.schedules.request import Limit, LimitTooSmall, Request, keeps
from megatron_zb.schedules.rules import Sizes
from megatron_zb.schedules.schedule import Report, Schedule
from megatron_zb.schedules.search.hill_climbing import Pool, polished_pool
from megatron_zb.schedules.search.kernels import engine
from megatron_zb.schedules.search.place_w import fuse_for_free, split_all
from megatron_zb.schedules.search.problem import Problem
from megatron_zb.schedules.search.runner import SINGLE, Effort, Runner, effort_of
from megatron_zb.schedules.simulator import Timeline, simulate
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
    def is_frozen(self) -> bool:
        """Whether it has no backward."""
        return not (_largest(self.backward) or _largest(self.weight))

    @property
    def has_whole_backward(self) -> bool:
        """Whether its weight gradients run with its input gradients."""
        return not _largest(self.weight)

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


# --- orders: the second model's passes in the gaps of an order of the trained one


class _Eagerness(NamedTuple):
    """Numbers that steer one run of the gap filler.

    Args:
        wait: the least wait for the trained model's next pass that a pass fills, in the seconds of
            that pass.
        ahead: outputs that the second model makes ahead of the trained one even where no rank
            waits.
        before_w: whether a backward goes before any W of the trained model, or else only where
            nothing but W is left to its rank.
    """

    wait: float
    ahead: int = 0
    before_w: bool = False


_WAITS = (0.0, 0.5, 1.0)
_AHEAD = (0, 2, 8)


def _eagerness_of(second: SecondModel) -> Iterator[_Eagerness]:
    """Yield what is tried for a second model: only numbers that make a difference."""
    for wait in _WAITS:
        for ahead in (0,) if second.role is SecondRole.AHEAD else _AHEAD:
            for before_w in (False,) if second.is_frozen else (False, True):
                yield _Eagerness(wait, ahead, before_w)


class _InGaps:
    """An order of both models, in which the trained one keeps its own order on every rank.

    List scheduling in order of time:

    1. The next event is the earliest time at which a rank is free, or an input of it arrives.
    2. A free rank runs an F of the second model if too few outputs are ahead, or a backward of it
       in place of a W; else the next pass of the trained model if that is ready.
    3. Else it runs a pass of the second model, if the wait is long enough.

    Args:
        graph: of both models.
        ranks: the order of the trained model.
        costs: of both.
        eagerness: of the second model.
        is_whole: whether the second model runs both gradients at once.
    """

    def __init__(
        self,
        graph: TaskGraph,
        ranks: Sequence[Sequence[Pass]],
        costs: StageCosts,
        eagerness: _Eagerness,
        *,
        is_whole: bool,
    ) -> None:
        assert isinstance(graph.work, SecondModelRules)
        self._graph, self._rules, self._costs = graph, graph.work, costs
        self._eagerness, self._is_whole = eagerness, is_whole
        self._leads = [deque(rank) for rank in ranks]
        self._other_leads = [sum(p.kind is not _W for p in rank) for rank in ranks]
        self._rows = [list(self._rows_of(rank)) for rank in range(len(ranks))]
        self._arrival = [math.inf] * len(graph)
        self._free = [0.0] * len(ranks)
        self._found: list[list[Pass]] = [[] for _ in ranks]
        self._has_run: set[Pass] = set()
        self._readers = [reader for _, reader in self._rules.joins() if reader.kind is _F]
        self._read = 0
        self._events = [(0.0, rank) for rank in range(len(ranks))]

    def _rows_of(self, rank: int) -> Iterator[deque[Pass]]:
        for kind in (_F, _BW) if self._is_whole else (_F, _B, _W):
            for stage in self._graph.placement.stages_of[rank]:
                if self._rules.is_second(stage):
                    row = self._graph.rows[self._graph.number[rank][kind, stage]]
                    if row.visits:
                        yield deque(Pass(kind, stage, unit) for unit in row.visits)

    def order(self) -> list[list[Pass]] | None:
        """Return the order, None if some pass never ran."""
        while self._events:
            now, rank = heapq.heappop(self._events)
            if now >= self._free[rank] and (queue := self._chosen(rank, now)) is not None:
                self._run(rank, queue.popleft(), now)
        return None if any(self._leads) or any(map(any, self._rows)) else self._found

    def _chosen(self, rank: int, now: float) -> deque[Pass] | None:
        """Return the passes of which a free rank runs the next one now, None if it waits."""
        leads = self._leads[rank]
        at = self._ready(leads[0]) if leads else math.inf
        ready = [row for row in self._rows[rank] if row and self._ready(row[0]) <= now]
        waits_for_w = bool(leads) and leads[0].kind is _W
        if waits_for_w and not self._eagerness.before_w:
            waits_for_w = self._other_leads[rank] == 0
        for row in ready:
            if self._is_urgent(row[0]) if row[0].kind is _F else waits_for_w:
                return row
        if at <= now:
            return leads
        for row in ready:
            if at - now >= self._eagerness.wait * self._costs.duration(row[0]):
                return row
        return None

    def _is_urgent(self, p: Pass) -> bool:
        """Return whether too few outputs of the second model are ahead of what needs them."""
        if not self._readers:
            return False
        while self._read < len(self._readers) and self._readers[self._read] in self._has_run:
            self._read += 1
        return p.microbatch - self._rules.microbatches - self._read < self._eagerness.ahead

    def _ready(self, p: Pass) -> float:
        """Return when the inputs of a pass have arrived, as far as it is known."""
        before = p._replace(kind=_B if p.kind is _W else _F)
        is_behind = p.kind is not _F and self._rules.is_second(p.stage)
        if is_behind and before not in self._has_run:
            return math.inf
        code = self._graph.code_of(p, self._graph.placement.rank_of[p.stage])
        return max((self._arrival[maker] for maker in self._graph.makers_of(code)), default=0.0)

    def _run(self, rank: int, p: Pass, now: float) -> None:
        self._found[rank].append(p)
        self._has_run.add(p)
        row = self._costs.of(p.microbatch)
        end = now + row.seconds[p.kind][p.stage]
        self._free[rank] = end
        self._other_leads[rank] -= p.kind is not _W and not self._rules.is_second(p.stage)
        heapq.heappush(self._events, (end, rank))
        units = self._graph.units
        for role in self._graph.roles[self._graph.number[rank][p.kind, p.stage]]:
            made = role * units + p.microbatch
            arrival = self._arrival[made] = end + row.latency[p.kind][p.stage]
            for reader in self._graph.reader_ranks(made):
                heapq.heappush(self._events, (arrival, reader))


# --- the search


SECONDS = 4.0
"""Approximate seconds of the search, if it is compiled."""

_PACE = replace(SINGLE, most=Effort(runs=0, moves=400_000), parts=(2, 1))
_STARTS = 4  # orders with filled gaps that are polished
_ROUNDING = 1e-9
_TRIES = 3  # of a trained model with less memory, so that both keep a limit
_THRESHOLDS = (0.6, 1.0, 0.6, 0.15, 0.15)


class Base(NamedTuple):
    """A schedule of the trained model alone.

    Args:
        schedule: its order.
        limits: memory that it may hold on each rank.
    """

    schedule: Schedule
    limits: tuple[float, ...]


def with_second_model(
    request: Request, second: SecondModel, build: Callable[[Request], Base]
) -> Schedule:
    """Return the fastest order found of a trained model, beside which a second one runs.

    1. The passes of the second model go into the gaps of the order of the trained one, by runs of
       different eagerness.
    2. Where both hold more than a limit, the trained model is built anew with less.
    3. Local search improves the best of these orders, and moves passes of both models.

    Args:
        request: for the trained model.
        second: the other one.
        build: of the trained model alone.

    Raises:
        UsageError: tables have other sizes, or the limit is too small for both.
    """
    second.check(request.pipeline_size, request.num_microbatches)
    base = build(request)
    beside = _Beside(base, request, second)
    users = request.limit.per_rank(request.costs)
    if users is None:
        return beside.searched(beside.least_memory(base.limits))
    left = users
    for _ in range(_TRIES):
        over = max(map(operator.sub, beside.least_memory(users), users))
        left = tuple(most - over for most in left)
        if over <= _ROUNDING or min(left) <= 0.0:
            break
        limit = Limit(bytes=tuple(map(operator.add, left, request.costs.fixed)))
        try:
            base = build(replace(request, limit=limit))
        except LimitTooSmall:
            break
        beside = _Beside(base, request, second)
    needed = beside.least_memory(users)
    request.check_feasible(base.schedule.name, base.schedule.placement, users, needed)
    return beside.searched(users)


class _Beside:
    """A search for an order of both models, from one of the trained model alone."""

    def __init__(self, base: Base, request: Request, second: SecondModel) -> None:
        self._base, self._request = base, request
        trained, m = base.schedule.placement, request.num_microbatches
        self._rules = SecondModelRules.of(second, trained, m)
        self._is_split = any(p.kind in (_B, _W) for rank in base.schedule.ranks for p in rank)
        self._is_whole = second.has_whole_backward or not self._is_split
        self._placement = placed_beside(trained, second)
        self._units = len(self._rules.columns)
        self._costs = PricedBeside(request.costs, self._rules).for_placement(self._placement)
        self._graph = TaskGraph.of(self._rules, self._placement, self._units)
        self._known = sorted(self._orders(), key=lambda timeline: timeline.makespan)

    def _orders(self) -> Iterator[Timeline]:
        """Yield the orders of the gap filler, simulated."""
        base, seen = self._base.schedule, set[tuple[tuple[Pass, ...], ...]]()
        bases = {base.ranks: None}
        if self._is_split:
            bases[split_all(base).ranks] = None
        for eagerness, ranks in product(_eagerness_of(self._rules.second), bases):
            filler = _InGaps(self._graph, ranks, self._costs, eagerness, is_whole=self._is_whole)
            found = tuple(map(tuple, filler.order() or ()))
            if found and found not in seen:
                seen.add(found)
                yield simulate(self._schedule(found), self._request.costs)

    def _schedule(self, ranks: tuple[tuple[Pass, ...], ...]) -> Schedule:
        name = self._base.schedule.name
        return Schedule(name, self._placement, self._units, ranks, rules=self._rules)

    def least_memory(self, limits: Sequence[float]) -> tuple[float, ...]:
        """Return limits, raised to the peaks of the known order that exceeds them the least."""

        def raised(timeline: Timeline) -> tuple[float, ...]:
            return tuple(map(max, timeline.peak_memory, limits))

        return min(map(raised, self._known), key=lambda most: max(map(operator.sub, most, limits)))

    def searched(self, limit: tuple[float, ...]) -> Schedule:
        """Return the best order that keeps a limit, with its report."""
        known = [it for it in self._known if keeps(it.peak_memory, limit)]
        base, costs = self._base.schedule, self._request.costs
        table = costs.for_placement(base.placement)
        alone = lower_bound(base.placement, self._request.num_microbatches, table, limit)
        whole = self._costs if self._is_split else _with_whole_backward(self._costs)
        bound = max(alone, _Paths(self._graph, whole).bound())
        rules, split = replace(self._rules, whole=self._is_whole), self._is_split
        problem = Problem(self._placement, self._units, self._costs, limit, split, rules=rules)
        effort = effort_of(problem, SECONDS, _PACE)
        runner = Runner(problem, engine(float(effort.moves) * problem.num_passes))
        orders = [self._with(_B, _BW, it.schedule.ranks) for it in known[:_STARTS]]
        starts = [(runner.coded(order), None) for order in orders]
        pool = Pool(effort.moves, bound * (1 + 1e-9), 2, _THRESHOLDS)
        ranks = runner.passes(polished_pool(runner, starts, pool))
        found = fuse_for_free(self._schedule(self._with(_BW, _B, ranks)), costs)
        makespan = simulate(found, costs).makespan
        return replace(found, report=Report(makespan, bound), reason=base.reason)

    def _with(
        self, kind: PassKind, other: PassKind, ranks: Sequence[Sequence[Pass]]
    ) -> tuple[tuple[Pass, ...], ...]:
        """Return an order with another kind of backward of the second model, if that is whole."""

        def changed(p: Pass) -> Pass:
            is_other = p.kind is other and self._rules.is_second(p.stage)
            return p._replace(kind=kind) if is_other and self._is_whole else p

        return tuple(tuple(map(changed, rank)) for rank in ranks)


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


# --- the bound


def _with_whole_backward(costs: StageCosts) -> StageCosts:
    """Return the costs where B has the seconds of both gradients, and W none."""
    none = (0.0,) * len(costs.seconds[_W])
    seconds = {_B: costs.seconds[_BW], _W: none}
    rows = {id(row): _with_whole_backward(row) for row in costs.microbatches}
    of_units = tuple(rows[id(row)] for row in costs.microbatches)
    return replace(costs.with_seconds(seconds), microbatches=of_units)


class _Paths:
    """Least seconds of a step by its task graph, with no limit of memory.

    Every pass has a *head*, the least seconds before it along its inputs, and a *tail*, the least
    seconds behind it. A set of passes of one rank takes at least the smallest head, all of its
    seconds, and the smallest tail.
    """

    def __init__(self, graph: TaskGraph, costs: StageCosts) -> None:
        self._graph = graph
        self._costs = [shortest(costs.of(unit)) for unit in range(graph.units)]
        rows = [(i, row) for i, row in enumerate(graph.rows) if row.kind.kind in (_F, _B, _W)]
        self._nodes = [i * graph.units + unit for i, row in rows for unit in row.visits or ()]
        self._seconds = {code: self._of(code, "seconds") for code in self._nodes}
        self._before: dict[int, list[tuple[int, float]]] = {code: [] for code in self._nodes}
        for i, row in rows:
            units = row.visits or ()
            for before, unit in zip((None, *units), units, strict=False):
                code = i * graph.units + unit
                self._before[code] = list(self._inputs(code))
                if before is not None:
                    self._before[code].append((i * graph.units + before, 0.0))

    def bound(self) -> float:
        """Return the largest bound of the sets of passes whose heads and tails are large enough."""
        behind: dict[int, list[tuple[int, float]]] = {code: [] for code in self._nodes}
        for code, makers in self._before.items():
            for maker, lag in makers:
                behind[maker].append((code, lag))
        order = self._in_turn(behind)
        heads = self._longest(order, self._before)
        tails = self._longest(order[::-1], behind)
        of_rank: dict[int, list[int]] = {}
        for code in order:
            of_rank.setdefault(self._graph.rank_of(code), []).append(code)
        return max(
            _least_span(
                *(np.array([of[code] for code in codes]) for of in (heads, self._seconds, tails))
            )
            for codes in of_rank.values()
        )

    def _inputs(self, code: int) -> Iterator[tuple[int, float]]:
        """Yield the passes that a pass needs, each with the seconds of the message."""
        row, unit = divmod(code, self._graph.units)
        for maker in self._graph.order_rules[row]:
            if self._graph.rows[maker].has(unit):
                yield maker * self._graph.units + unit, 0.0
        for made in self._graph.makers_of(code):
            is_near = self._graph.rank_of(made) == self._graph.rank_of(code)
            yield made, 0.0 if is_near else self._of(made, "latency")

    def _of(self, code: int, table: str) -> float:
        row, unit = divmod(code, self._graph.units)
        kind, stage, *_ = self._graph.rows[row]
        of_kind: Mapping[PassKind, Table] = getattr(self._costs[unit], table)
        return of_kind[kind.kind][stage]

    def _in_turn(self, behind: Mapping[int, Sequence[tuple[int, float]]]) -> list[int]:
        """Return the passes, each behind those that it needs."""
        left = {code: len(makers) for code, makers in self._before.items()}
        found = [code for code, count in left.items() if not count]
        for code in found:
            for reader, _ in behind[code]:
                left[reader] -= 1
                if not left[reader]:
                    found.append(reader)
        return found

    def _longest(
        self, order: Sequence[int], along: Mapping[int, Sequence[tuple[int, float]]]
    ) -> dict[int, float]:
        """Return the longest way to each pass, without its own seconds."""
        found: dict[int, float] = {}
        for code in order:
            ways = (found[at] + self._seconds[at] + lag for at, lag in along[code])
            found[code] = max(ways, default=0.0)
        return found


def _least_span(heads: _Numbers, seconds: _Numbers, tails: _Numbers) -> float:
    """Return the least seconds of the passes of a rank, by their heads and tails.

    For every head and tail: those, and the seconds of all passes whose head and tail are no less.
    """
    by_head = np.argsort(-heads, kind="stable")
    heads, seconds, tails = heads[by_head], seconds[by_head], tails[by_head]
    least = np.unique(tails)
    counted = np.where(tails[:, None] >= least[None, :], seconds[:, None], 0.0)
    work = np.cumsum(counted, axis=0)
    spans = np.where(work > 0, heads[:, None] + work + least[None, :], 0.0)
    return float(spans.max())

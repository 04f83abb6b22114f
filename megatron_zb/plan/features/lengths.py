"""Steps of sequences of unequal lengths, as fine-tuning and reinforcement learning have them.

The search of a plan takes all microbatches to be alike. This takes its rows, draws the lengths of
some steps, and simulates each row with them: Megatron's own schedules as the microbatches come, a
schedule of this package as a plan of the step orders them. Replicas have other sequences and wait
for one another at the end of a step; replicas with an expert all-to-all wait in
every pass.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_zb import files, schedules
from megatron_zb.errors import UsageError
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.search import Plan
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.stages import average_layer
from megatron_zb.plan.table import name_in, setting_of
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Costs, Schedule, catalog
from megatron_zb.schedules.simulator import Timeline
from megatron_zb.schedules.step_plan import (
    AttentionWork,
    Lengths,
    costs_of_work,
    plan_step,
    usual_limit,
)

_STEPS = 3
# Replicas of a step that are drawn at most: more wait for the slowest hardly longer.
_REPLICAS = 4
_ROUND = 128  # tokens to which the mean is rounded, so that parallel sizes divide it
_ROUNDS_OF_MEAN = 64
_MOST_IN_A_PACK = 500  # sequences: drawing more takes longer than a plan
Packs = list[list[int]]


@dataclass(frozen=True)
class SequenceLengths:
    """Source of the lengths of sequences, and what becomes a microbatch.

    Args:
        most: tokens of a microbatch at most; longer sequences are cut.
        packs: a microbatch is as many sequences as fit, in the order in which they come, and not
            one sequence.
        given: lengths to draw from; without them they are log-normal.
        median: of log-normal lengths, in tokens.
        sigma: standard deviation of their logarithm.
    """

    most: int
    packs: bool = False
    given: tuple[int, ...] = ()
    median: float = 0.0
    sigma: float = 0.0

    @classmethod
    def read(cls, text: str, most: int, *, packs: bool) -> SequenceLengths:
        """Read ``lognormal:MEDIAN:SIGMA``, or the name of a file with a length in every line.

        Raises:
            UsageError: it is neither.
        """
        kind, _, numbers = text.partition(":")
        if kind == "lognormal":
            median, sigma = _two_numbers(text, numbers)
            return cls(most, packs, median=median, sigma=sigma)._checked(text)
        try:
            lines = files.read_text(Path(text)).split()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--lengths {text} cannot be read ({error}): give a file with the tokens of a "
                "sequence in every line, or lognormal:MEDIAN:SIGMA"
            ) from None
        wrong = next((line for line in lines if not _is_length(line)), None)
        if wrong is not None or not lines:
            raise UsageError(
                f"--lengths {text}: {'it is empty' if wrong is None else repr(wrong[:20])}, where "
                "the tokens of a sequence should be: give a whole number in every line"
            )
        return cls(most, packs, given=tuple(map(int, lines)))._checked(text)

    def _checked(self, text: str) -> SequenceLengths:
        rng = random.Random("mean")
        mean = fmean(self._sequence(rng) for _ in range(_MOST_IN_A_PACK))
        if self.packs and mean * _MOST_IN_A_PACK < self.most:
            raise UsageError(
                f"--lengths {text}: a pack of {self.most} tokens would have more than "
                f"{_MOST_IN_A_PACK} sequences of {mean:.0f} tokens: give a shorter --seq-length"
            )
        return self

    @cached_property
    def mean(self) -> int:
        """Mean tokens of a microbatch."""
        drawn = self.drawn(_ROUNDS_OF_MEAN, random.Random("mean"))
        mean = fmean(map(sum, drawn))
        return max(_ROUND, _ROUND * round(mean / _ROUND))

    def drawn(self, count: int, rng: random.Random) -> Packs:
        """Return the sequences of a number of microbatches."""
        if not self.packs:
            return [[self._sequence(rng)] for _ in range(count)]
        found: Packs = []
        totals: list[int] = []
        while True:
            length = self._sequence(rng)
            fitting = (k for k, total in enumerate(totals) if total + length <= self.most)
            place = next(fitting, len(found))
            if place == count:
                return found
            if place == len(found):
                found.append([])
                totals.append(0)
            found[place].append(length)
            totals[place] += length

    def _sequence(self, rng: random.Random) -> int:
        if self.given:
            return min(self.most, rng.choice(self.given))
        return max(1, min(self.most, round(rng.lognormvariate(math.log(self.median), self.sigma))))


def asked_lengths(arguments: argparse.Namespace, job: PlanJob) -> SequenceLengths | None:
    """Return the lengths of sequences, if they are requested.

    Raises:
        UsageError: they cannot be read, or a microbatch would have several samples.
    """
    if arguments.lengths is None:
        if arguments.packing is not None:
            raise UsageError("--packing needs --lengths, such as --lengths lognormal:4096:0.9")
        return None
    for feature in job.features:
        feature.check_lengths(arguments)
    if arguments.micro_batch_size not in (None, "1"):
        raise UsageError(
            f"--micro-batch-size {arguments.micro_batch_size} cannot be combined with --lengths, "
            "where a microbatch is one sequence or one pack: leave it out"
        )
    packs = arguments.packing == "first-fit"
    return SequenceLengths.read(arguments.lengths, job.sequence, packs=packs)


def _two_numbers(text: str, numbers: str) -> tuple[float, float]:
    try:
        median, sigma = map(float, numbers.split(":"))
        is_good = 1 <= median < math.inf and 0 <= sigma <= 10
    except ValueError:
        is_good = False
    if not is_good:
        raise UsageError(
            f"--lengths {text} has no median in tokens and no standard deviation of the logarithm: "
            "give, for example, lognormal:4096:0.9"
        )
    return median, sigma


def _is_length(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0


def evenly(sequences: Sequence[int], most: int) -> Packs:
    """Pack sequences into the fewest microbatches that this finds, each as long as the others."""
    count = max(1, math.ceil(sum(sequences) / most))
    while max(map(sum, into(sequences, count))) > most:
        count += 1
    return into(sequences, count)


def into(sequences: Sequence[int], count: int) -> Packs:
    """Pack sequences into microbatches of about the same length, the longest first."""
    packs: Packs = [[] for _ in range(count)]
    for length in sorted(sequences, reverse=True):
        min(packs, key=sum).append(length)
    return packs


@dataclass(frozen=True)
class UnequalRow:
    """Seconds of a row of a plan for drawn steps; None where a step does not fit into the memory.

    Args:
        index: of the row in the plan.
        tokens_per_gpu: tokens per second and GPU.
        as_fed: the same, with microbatches in the order in which they come.
    """

    index: int
    tokens_per_gpu: float | None
    as_fed: float | None


@dataclass(frozen=True)
class UnequalPlan:
    """Rows of a plan with drawn steps, fastest first.

    Args:
        source: of the lengths.
        rows: those that run with a pipeline.
        evenly: microbatches into which the sequences of the first row's steps are packed evenly,
            and how many times its tokens per second that brings; None if that cannot run.
    """

    source: SequenceLengths
    rows: tuple[UnequalRow, ...]
    evenly: tuple[int, float] | None


def with_lengths(
    ranked: Sequence[Prediction], source: SequenceLengths, memory: float
) -> UnequalPlan:
    """Simulate the rows of a plan with drawn lengths.

    Args:
        ranked: rows whose sequence length is the mean of a microbatch.
        source: of the lengths.
        memory: bytes of a GPU.
    """
    found = [
        UnequalRow(index, steps.rate(in_order=False), steps.rate(in_order=True))
        for index, row in enumerate(ranked)
        if row.timeline is not None
        for steps in [_Steps(row, source, memory)]
    ]
    rows = tuple(sorted(found, key=lambda row: -(row.tokens_per_gpu or 0.0)))
    best = rows[0].tokens_per_gpu if rows else None
    packed = None
    if best is not None:
        found_even = _Steps(ranked[rows[0].index], source, memory).packed_evenly()
        packed = found_even and (found_even[0], found_even[1] / best)
    return UnequalPlan(source, rows, packed)


@dataclass(frozen=True)
class _Steps:
    """Drawn steps of one row of a plan."""

    row: Prediction
    source: SequenceLengths
    memory: float

    def rate(self, *, in_order: bool) -> float | None:
        """Return the tokens per second and GPU; None if a step does not fit."""
        in_order = in_order or self.row.megatron
        drawn = [[lengths_of(packs) for packs in step] for step in self._drawn]
        timed = [together(step, self._coupled, in_order=in_order) for step in drawn]
        tokens = sum(fmean(sum(lengths.tokens) for lengths in step) for step in drawn)
        return self._rate(self._schedule, timed, tokens, keeps_order=in_order)

    def packed_evenly(self) -> tuple[int, float] | None:
        """Return the microbatches into which to pack the same sequences evenly, and their rate.

        None if no number of them can run.
        """
        drawn = [[list(chain.from_iterable(packs)) for packs in step] for step in self._drawn]
        least = max(len(evenly(every, self.source.most)) for step in drawn for every in step)
        most = min(len(every) for step in drawn for every in step)
        p = self.row.load.strategy.pipeline
        counts = sorted({least, *(k for k in (p, 2 * p, 4 * p) if least < k <= most)})
        rates = [(self._rate_of(drawn, count), count) for count in counts if count <= most]
        found = max(((rate, count) for rate, count in rates if rate is not None), default=None)
        return None if found is None else (found[1], found[0])

    def _rate_of(self, drawn: Sequence[Sequence[Sequence[int]]], count: int) -> float | None:
        """Return the rate of sequences in a number of even microbatches."""
        try:
            schedule = schedules.build(
                self.row.family,
                pipeline_size=self.row.load.strategy.pipeline,
                num_microbatches=count,
                costs=self._costs,
                chunks=self.row.chunks,
                memory_limit=self.row.memory_limit,
            )
        except UsageError:
            return None
        timed = [[lengths_of(into(every, count)) for every in step] for step in drawn]
        tokens = sum(fmean(map(sum, step)) for step in drawn)
        return self._rate(schedule, timed, tokens, keeps_order=self.row.megatron)

    def _rate(
        self,
        schedule: Schedule,
        timed: Sequence[Sequence[Lengths]],
        tokens: float,
        *,
        keeps_order: bool,
    ) -> float | None:
        seconds = 0.0
        for replicas in timed:
            found = [self._seconds(schedule, lengths, keeps_order) for lengths in replicas]
            if None in found:
                return None
            seconds += max(filter(None, found)) + self.row.step_seconds
        return tokens * self.row.load.strategy.data / seconds / self.row.gpus

    def _seconds(self, schedule: Schedule, lengths: Lengths, keeps_order: bool) -> float | None:
        costs = costs_of_work(self._costs, lengths, self._attention, self._mean)
        timeline = schedules.simulate(schedule, costs)
        if self.row.megatron:
            return timeline.makespan if max(timeline.peak_memory) <= self._room else None
        follows = catalog.family(self.row.family).follows_costs
        most = usual_limit(schedule, self._costs, costs, follows_costs=follows)
        plan = plan_step(
            schedule,
            costs,
            [min(most, self._room)] * costs.pipeline_size,
            keeps_order=keeps_order,
            keeps_passes=not follows,
        )
        return None if plan is None else schedules.simulate(plan.schedule, plan.costs).makespan

    @cached_property
    def _drawn(self) -> list[list[Packs]]:
        """Return the sequences of each replica's microbatches in each step."""
        strategy, m = self.row.load.strategy, self._schedule.num_microbatches
        replicas = min(_REPLICAS, strategy.data)
        return [
            [self.source.drawn(m, random.Random(f"{step} {r}")) for r in range(replicas)]
            for step in range(_STEPS)
        ]

    @property
    def _coupled(self) -> int:
        """Number of the drawn replicas that share experts."""
        strategy = self.row.load.strategy
        return strategy.expert * strategy.expert_tensor // (strategy.tensor * strategy.context)

    @property
    def _timeline(self) -> Timeline:
        assert self.row.timeline is not None
        return self.row.timeline

    @property
    def _schedule(self) -> Schedule:
        return self._timeline.schedule

    @property
    def _costs(self) -> Costs:
        assert self.row.costs is not None
        return self.row.costs

    @property
    def _mean(self) -> Lengths:
        return Lengths.of([self.row.load.sequence])

    @cached_property
    def _attention(self) -> AttentionWork:
        return attention_of(self.row.load)

    @cached_property
    def _room(self) -> float:
        """Return the bytes that are left for activations on the rank with the least."""
        return self.memory - self.row.memory.total + max(self._timeline.peak_memory)


def lengths_of(packs: Packs) -> Lengths:
    """Return tokens and squares of the microbatches that are packed."""
    return Lengths.of([*map(sum, packs)], [sum(n * n for n in pack) for pack in packs])


def together(replicas: Sequence[Lengths], coupled: int, *, in_order: bool) -> list[Lengths]:
    """Return the lengths that replicas run which wait for each other in every pass.

    In the order in which microbatches come, the longest at each place counts; else replicas run
    their longest at one time, and so on.
    """
    found = []
    for start in range(0, len(replicas), max(1, coupled)):
        group = replicas[start : start + max(1, coupled)]
        if len(group) > 1 and not in_order:
            group = [r.in_order(sorted(range(len(r)), key=lambda j: -r.tokens[j])) for r in group]
        tokens = map(max, zip(*(r.tokens for r in group), strict=True))
        squares = map(max, zip(*(r.squares for r in group), strict=True))
        found.append(Lengths.of([*tokens], [*squares]))
    return found


def attention_of(load: Workload) -> AttentionWork:
    """Return the work of attention, from the counted seconds of sequences twice as long."""
    once, twice = average_layer(load), average_layer(replace(load, sequence=2 * load.sequence))
    n = load.sequence

    def share(short: float, long: float) -> float:
        of_square = max(0.0, (long - 2 * short) / (2 * n * n))
        return of_square / max((short - of_square * n * n) / n, 1e-30)

    return AttentionWork(share(once.forward, twice.forward), share(once.backward, twice.backward))


# --- a table, and JSON


def print_unequal(plan: Plan, unequal: UnequalPlan, console: Console) -> None:
    """Print the rows, fastest first, and what even packing would bring."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    source = unequal.source
    what = "packs of sequences" if source.packs else "single sequences"
    title = (
        f"\nwith {what} of unequal lengths, {source.mean} tokens a microbatch on average, at most "
        f"{source.most}"
    )
    console.print(Text(title, style="bold"), soft_wrap=True)
    for column in ("schedule", "setting"):
        table.add_column(column, no_wrap=True)
    for column in ("tok/s/GPU", "as fed"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in unequal.rows:
        of = plan.ranked[row.index]
        rates = (row.tokens_per_gpu, row.as_fed)
        shown = ("too long" if rate is None else f"{rate:.0f}" for rate in rates)
        table.add_row(name_in(plan, of), setting_of(of), *shown)
    console.print(table)
    console.print(Text(f" -  {advice(unequal)}"), highlight=False, soft_wrap=True)


def advice(unequal: UnequalPlan) -> str:
    """Return what the figures mean, and what even packing would bring the first row."""
    meaning = (
        "tok/s/GPU: in the order and with the passes that Pipeline.order of megatron_zb.bridge "
        "plans before each step; as fed: in the order in which microbatches come, as Megatron's "
        "own schedules run them"
    )
    if unequal.evenly is None:
        return meaning
    count, factor = unequal.evenly
    return (
        f"{meaning}; packed evenly into {count} microbatches a step, the same sequences would run "
        f"at {factor:.2f} times the speed of the first"
    )


def unequal_as_json(plan: Plan, unequal: UnequalPlan) -> dict[str, Any]:
    """Return the rows as data for JSON."""
    source, evenly = unequal.source, unequal.evenly
    return {
        "mean_tokens": source.mean,
        "most_tokens": source.most,
        "packs": source.packs,
        "rows": [
            {
                "schedule": plan.ranked[row.index].candidate,
                "index": row.index,
                "tokens_per_second_per_gpu": row.tokens_per_gpu,
                "as_fed": row.as_fed,
            }
            for row in unequal.rows
        ],
        "packed_evenly": None
        if evenly is None
        else {"microbatches": evenly[0], "speed": evenly[1]},
    }

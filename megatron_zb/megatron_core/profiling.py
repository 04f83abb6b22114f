"""Measurement of a job in a few of its own iterations: seconds and bytes of passes, and links."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_zb.measured import parts
from megatron_zb.measured.parts import StageTimes
from megatron_zb.measured.profile import (
    HostLinkProfile,
    LinkProfile,
    PairProfile,
    PartSeconds,
    Profile,
    ProfiledModel,
    ShardHost,
    ShardProfile,
    StageProfile,
    VocabularyTimes,
    merged,
    merged_pairs,
    merged_shards,
)
from megatron_zb.megatron_core.current_schedule import CurrentSchedule
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.link_times import BYTES, CopyTimes
from megatron_zb.runtime.observer import AllocatedMemory, MemoryRecorder, Observer, Recorder, Span
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.passes import Channel, Pair, Pass, PassKind
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.place_w import join_all, split_all
from megatron_zb.schedules.step_plan import Lengths, together

WARM_UP = 2
TIMED = 4
WHOLE = 2
PAIRED = 3
ITERATIONS = WARM_UP + TIMED + WHOLE + 1
"""Iterations of a profile: B and W are timed apart, then each backward whole, and last, bytes are
counted and nothing is timed. In all of them every pass runs by itself. Where the schedule has
pairs, these are timed in ``PAIRED`` more before the last.
"""


def iterations_of(schedule: Schedule) -> int:
    """Return the iterations that a profile of a schedule takes."""
    return ITERATIONS + (PAIRED if schedule.pairs else 0)


# Copies of both directions at once that take so much longer than one take turns.
_HALF_DUPLEX = 1.6

_SHORTEST = 1e-9  # seconds: what a clock cannot tell from nothing, as on a stage without layers

_TIMED_KINDS = (PassKind.F, PassKind.B, PassKind.W, PassKind.BW)
_OF_SHARDS = {
    "output": PassKind.O,
    "weight": PassKind.V,
    "lookup": PassKind.E,
    "gradient": PassKind.G,
}

Steps = Sequence[Sequence[Span]]
"""Timed steps of a rank."""

Within = dict[tuple[PassKind, int], dict[str, float]]
"""Seconds of the parts of a pass, by kind and stage."""

Spans = list[tuple[Pass | None, float, float]]
"""Passes of a rank, None for a wait, each with its start and end."""


@dataclass(frozen=True)
class HeldStage:
    """A stage that this rank holds: its number, its logical rank, its layers as letters.

    ``kinds`` are those of its decoder layers, if the model is a hybrid.
    """

    stage: int
    rank: int
    layers: str
    kinds: str = ""


class Profiling:
    """Measurement in the first iterations of a job, and again every ``every`` iterations.

    It switches to an order of passes in which every backward is split, so that B and W are timed
    separately, to one in which every backward is whole, and to the usual one with its pairs.

    Args:
        current: the schedule of the job. Iterations with another number of microbatches are left
            out.
        held: the stages of this rank.
        every: iterations from one profile to the next; None for a single profile.
    """

    def __init__(
        self, current: CurrentSchedule, held: Sequence[HeldStage], every: int | None = None
    ) -> None:
        self._current, self._held, self._every = current, held, every
        self.usual = current.schedule
        """The schedule before and after the measurement."""
        sharded = current.costs.feature(Vocabulary) is not None
        # a rank's shard of the vocabulary counts as a stage behind those of the model
        self._shard = self.usual.placement.num_stages + held[0].rank if sharded else None
        self._num_microbatches = self.usual.num_microbatches
        self._timed = WARM_UP + TIMED + WHOLE
        self._done = 0
        self._counts = False
        self._recorders: list[Recorder] = []
        self._memory: MemoryRecorder | None = None
        self._of_allocator = False
        self.observers: tuple[Observer, ...] = ()
        """Observers of the current step."""

    def before_step(self, num_microbatches: int) -> None:
        """Prepare for a step of training that is about to begin."""
        self._counts = num_microbatches == self._num_microbatches
        self._current.measures = False
        if not self._counts:
            return
        if self._done == self._every:
            self._done = 0
        if self._done == 0:
            self.usual = self._current.schedule
            self._timed = iterations_of(self.usual) - 1
        if self._done in (0, self._timed):
            self._current.use(split_all(self.usual.without_pairs()))
        elif self._done == WARM_UP + TIMED:  # the time of a BW is not the sum of its halves'
            self._current.use(join_all(self.usual.without_pairs()))
        elif self._done == WARM_UP + TIMED + WHOLE:
            self._current.use(self.usual)
        self._current.measures = self._done <= self._timed

    @property
    def is_for_pairs(self) -> bool:
        """Whether the current step is one of a profile of pairs and of their passes by themselves.

        Then each has to run as it does where others run in pairs.
        """
        return self._counts and self._done <= self._timed > WARM_UP + TIMED + WHOLE

    @contextmanager
    def step(
        self,
        memory: ActivationMemory | None,
        parameters: Iterable[torch.Tensor],
        on_gpu: bool,
        marking: Callable[[Callable[[str], None]], AbstractContextManager[None]],
    ) -> Iterator[ActivationMemory | None]:
        """Measure a step while this context is active; yield the counter of the step's activations.

        Args:
            memory: the counter in use without profiling, if any.
            parameters: not counted as activations, also where autograd saves them.
            on_gpu: count all bytes, by the allocator; else those that autograd saves are counted.
            marking: context in which the model marks the parts of a pass.
        """
        with ExitStack() as stack:
            if not self._counts:
                yield memory
                return
            if WARM_UP <= self._done < self._timed:
                self._recorders.append(Recorder(on_gpu))
                self.observers = (self._recorders[-1],)
                stack.enter_context(marking(self._recorders[-1].mark))
            elif self._done == self._timed:
                self._of_allocator = on_gpu
                if on_gpu:
                    self._memory = MemoryRecorder(AllocatedMemory())
                else:
                    if memory is None:
                        memory = stack.enter_context(ActivationMemory(parameters).watching())
                    self._memory = MemoryRecorder(memory)
                self.observers = (self._memory,)
            try:
                yield memory
            except BaseException:  # the step was none: the next one is measured in its place
                del self._recorders[max(0, self._done - WARM_UP) :]
                raise
            finally:
                self.observers = ()
            self._done += 1

    def end_step(self) -> None:
        """End a step, after all that belongs to it, such as the reduction of gradients."""
        if self._counts and WARM_UP < self._done <= self._timed:
            self._recorders[-1].finish()

    @property
    def done(self) -> int:
        """Iterations of the current profile that are done."""
        return self._done

    @property
    def is_complete(self) -> bool:
        """Whether the last step has ended a profile."""
        return self._counts and self._done == self._timed + 1

    def measured(
        self,
        model: ProfiledModel,
        lengths: Lengths,
        links: dict[Channel, float],
        message: int,
        ahead: float,
        copies: CopyTimes | None = None,
    ) -> tuple[Profile, list[Spans]]:
        """Gather the measurements of all ranks; collective over the job.

        Args:
            model: the model of the job.
            lengths: of the microbatches of this rank's measured steps.
            links: the seconds of each channel that this rank has measured.
            message: bytes of one message.
            ahead: seconds by which the next rank's clock is ahead of this one's.
            copies: the seconds of copies between this rank's device and its host, if timed.

        Returns:
            The profile, and the last timed step of every logical rank of one pipeline, by one
            clock; both are equal on every rank.
        """
        rank = self._held[0].rank
        steps = [recorder.spans() for recorder in self._recorders]
        split, whole, paired = steps[:TIMED], steps[TIMED:][:WHOLE], steps[TIMED + WHOLE :]
        outside = [
            recorder.seconds - (spans[-1].end - spans[0].start)
            for recorder, spans in zip(self._recorders, steps, strict=True)
        ]
        within = {**_mean_within(whole), **_mean_within(split)}
        mine = _OfRank(
            stages={held.stage: self._stage(held, within, message) for held in self._held},
            times=[
                StageTimes(
                    held.layers,
                    *(within[kind, held.stage] for kind in _TIMED_KINDS),
                    kinds=held.kinds,
                )
                for held in self._held
            ],
            host=_before_passes(split, whole),
            shard=self._of_shard(split),
            pairs=_pairs(paired),
            outside=outside,
            links=links,
            rank=rank,
            ahead=ahead,
            lengths=lengths,
            spans=self._last_spans(split[-1]),
            copies=copies,
        )
        everyone: list[_OfRank] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        self._recorders.clear()
        self._memory = None
        stages: dict[int, list[StageProfile]] = defaultdict(list)
        pipeline: dict[int, tuple[float, Spans]] = {}
        shards: dict[int, list[_OfShard]] = defaultdict(list)
        for one in everyone:
            pipeline.setdefault(one.rank, (one.ahead, one.spans))  # of the first replica
            for number, stage in one.stages.items():
                stages[number].append(stage)
            if one.shard is not None:
                shards[one.rank].append(one.shard)
        times = [of_stage for one in everyone for of_stage in one.times]
        unsplit = self._current.unsplit_shares or [0.0] * len(stages)
        profile = Profile(
            version=1,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            schedule=self.usual.name,
            pipeline_size=self.usual.placement.pipeline_size,
            num_microbatches=self.usual.num_microbatches,
            message=message,
            model=model,
            stages=[
                stage.model_copy(update={"unsplit": share})
                for stage, share in zip(
                    merged([seen for _, seen in sorted(stages.items())]), unsplit, strict=True
                )
            ],
            pairs=merged_pairs(one.pairs for one in everyone),
            links=slowest_links([one.links for one in everyone]),
            # None where the layers could not be separated
            parts=parts.of_stages(times),
            attention=parts.attention_of(times, together([one.lengths for one in everyone])),
            host=_usual([one.host for one in everyone]),
            # who ends last waits for nobody
            outside=median(map(min, zip(*(one.outside for one in everyone), strict=True))),
            vocabulary=_cut_vocabulary([of_rank for _, of_rank in sorted(shards.items())]),
            host_link=_host_link([one.copies for one in everyone if one.copies is not None]),
        )
        return profile, by_one_clock([of_rank for _, of_rank in sorted(pipeline.items())])

    def _of_shard(self, split: Steps) -> _OfShard | None:
        """Return what this rank's shard takes, with the seconds of P where this rank has it."""
        if self._shard is None:
            return None
        assert self._memory is not None, "no step has been counted"
        within = {key: sum(of.values()) for key, of in _mean_within(split).items()}
        shard = ShardProfile(
            **{
                name: max(within[kind, self._shard], _SHORTEST) for name, kind in _OF_SHARDS.items()
            },
            # what V frees: O leaves its part besides, which is a message
            held=max(0, -round(median(self._memory.changes_of(PassKind.V, self._shard).values()))),
        )
        loss = next((seconds for (kind, _), seconds in within.items() if kind is PassKind.P), 0.0)
        gaps = _gaps(split)
        host = {name: gaps[kind] for name, kind in (_OF_SHARDS | {"loss": PassKind.P}).items()}
        return _OfShard(shard, loss, host)

    def _last_spans(self, spans: Sequence[Span]) -> Spans:
        began = self._recorders[TIMED - 1].began
        return [
            (of if isinstance(of, Pass) else None, began + start, began + end)
            for of, start, end, _ in spans
        ]

    def _stage(self, held: HeldStage, within: Within, message: int) -> StageProfile:
        after_f, after_b = self._left_after(held.stage)
        if self._of_allocator:
            after_f += _messages_of_f(held) * message
        seconds = {
            kind: max(sum(of.values()), _SHORTEST)
            for (kind, stage), of in within.items()
            if stage == held.stage
        }
        return StageProfile(
            rank=held.rank,
            layers=held.layers,
            forward=seconds[PassKind.F],
            backward=seconds[PassKind.B],
            weight=seconds[PassKind.W],
            whole=seconds[PassKind.BW],
            recompute=seconds.get(PassKind.R),
            # W may hold more than F did, such as the logits' gradient. Schedules keep to a limit of
            # memory where an F begins, so it is counted from then on: nothing is understated.
            activation=max(after_f, after_b, 0),
            held_for_weight=max(after_b, 0),
        )

    def _left_after(self, stage: int) -> tuple[int, int]:
        """Return the bytes that a microbatch's F leaves, with its R, and those after its B.

        By those that stay on the device, where there are any: copies that end count elsewhere.
        """
        assert self._memory is not None, "no step has been counted"
        forward, again, moved, backward = (
            self._memory.changes_of(kind, stage)
            for kind in (PassKind.F, PassKind.R, PassKind.D, PassKind.B)
        )
        usual = [m for m in forward if m not in moved] or list(forward)
        after_f = round(median(forward[m] + again.get(m, 0) for m in usual))
        return after_f, after_f + round(median(backward[m] for m in usual))


def _mean_within(steps: Steps) -> Within:
    """Return the seconds of each part of a pass: the mean over a step, as a step takes their sum.

    Of several steps it is the median, as one may be disturbed.
    """
    taken: dict[tuple[PassKind, int], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(lambda: [0.0] * len(steps))
    )
    for number, step in enumerate(steps):
        passes = Counter((s.of.kind, s.of.stage) for s in step if isinstance(s.of, Pass))
        for of, start, end, marks in step:
            if isinstance(of, Pass):
                key = of.kind, of.stage
                for name, seconds in parts.segments(start, end, marks).items():
                    taken[key][name][number] += seconds / passes[key]
    return {
        key: {name: median(means) for name, means in names.items()} for key, names in taken.items()
    }


def _pairs(steps: Steps) -> list[PairProfile]:
    """Return the seconds of each kind of pair: the mean over a step, and the median of several."""
    means: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
    for step in steps:
        taken: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
        for of, start, end, _ in step:
            if isinstance(of, Pair):
                kind, stage, _ = of.backward
                taken[of.forward.stage, stage, kind is PassKind.BW].append(end - start)
        for key, seconds in taken.items():
            means[key].append(fmean(seconds))
    return [
        PairProfile(
            forward=f, backward=b, whole=whole, seconds=max(median(means[f, b, whole]), _SHORTEST)
        )
        for f, b, whole in means
    ]


class _OfShard(NamedTuple):
    """Measurements of one rank's shard of the vocabulary; ``loss`` is 0 where no P runs."""

    shard: ShardProfile
    loss: float
    host: dict[str, float]


class _OfRank(NamedTuple):
    """Measurements of one rank."""

    stages: dict[int, StageProfile]
    times: list[StageTimes]
    host: PartSeconds
    shard: _OfShard | None
    pairs: list[PairProfile]
    outside: list[float]
    links: dict[Channel, float]
    rank: int
    ahead: float
    lengths: Lengths
    spans: Spans
    copies: CopyTimes | None


def _host_link(ranks: Sequence[CopyTimes]) -> HostLinkProfile | None:
    """Put together what all ranks have measured of copies: the slowest counts."""
    if not ranks:
        return None
    one_way, both_ways = (max(seconds) for seconds in zip(*ranks, strict=True))
    full_duplex = both_ways < _HALF_DUPLEX * one_way
    seconds = max(one_way, both_ways) if full_duplex else one_way
    return HostLinkProfile(bandwidth=BYTES / seconds, full_duplex=full_duplex)


def _cut_vocabulary(ranks: Sequence[Sequence[_OfShard]]) -> VocabularyTimes | None:
    """Put together what the replicas of every logical rank have measured, in order."""
    if not ranks:
        return None
    everyone = [of for seen in ranks for of in seen]

    def usual(name: str) -> float:
        who = [of for of in everyone if of.loss > 0] if name == "loss" else everyone
        return median(of.host[name] for of in who)

    return VocabularyTimes(
        shards=merged_shards([[of.shard for of in seen] for seen in ranks]),
        loss=max(of.loss for of in everyone),
        host=ShardHost(**{name: usual(name) for name in ShardHost.model_fields}),
    )


def _before_passes(split: Steps, whole: Steps) -> PartSeconds:
    """Return the host's seconds before a pass without waits: sends, and bookkeeping."""
    gaps = _gaps([*split, *whole])
    forward, backward, weight, together = (gaps[kind] for kind in _TIMED_KINDS)
    return PartSeconds(forward=forward, backward=backward, weight=weight, whole=together)


def _gaps(steps: Steps) -> dict[PassKind, float]:
    """Return the host's seconds before a pass of each kind, 0 where none runs."""
    means: dict[PassKind, list[float]] = defaultdict(list)
    for step in steps:
        gaps: dict[PassKind, list[float]] = defaultdict(list)
        for before, span in pairwise(step):
            if isinstance(span.of, Pass):
                gaps[span.of.kind].append(max(0.0, span.start - before.end))
        for kind, found in gaps.items():
            means[kind].append(fmean(found))
    return {kind: median(means[kind] or [0.0]) for kind in PassKind.all()}


def _usual(ranks: Sequence[PartSeconds]) -> PartSeconds:
    names = PartSeconds.model_fields
    return PartSeconds(**{name: median(getattr(rank, name) for rank in ranks) for name in names})


def _messages_of_f(held: HeldStage) -> int:
    """Count the messages that F holds beyond those it allocates: plus its input, minus its output.

    The input was there before F, and counts as held from F to B; the output is allocated in F, and
    goes with its message. What B adds and takes away is the opposite.
    """
    return (held.stage > 0) - (not held.layers.endswith("L"))


def slowest_links(of_ranks: Iterable[Mapping[Channel, float]]) -> list[LinkProfile]:
    """Return every link once, with the seconds of a message on its slowest replica."""
    slowest: dict[Channel, float] = defaultdict(float)
    for of_rank in of_ranks:
        for channel, seconds in of_rank.items():
            slowest[channel] = max(slowest[channel], seconds)
    return [
        LinkProfile(source=channel.source, target=channel.target, seconds=seconds)
        for channel, seconds in sorted(slowest.items())
    ]


def by_one_clock(ranks: Sequence[tuple[float, Spans]]) -> list[Spans]:
    """Return the spans of all ranks by the first's clock; each has its offset to the next."""
    offset, found = 0.0, []
    for ahead, spans in ranks:
        found.append([(of, start - offset, end - offset) for of, start, end in spans])
        offset += ahead
    return found

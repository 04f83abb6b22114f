"""Profile of a run: seconds and bytes of every stage, seconds of every link.

``--pipeline-profile`` writes the file, ``megatron-zb plan --profile`` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import yaml
from pydantic import Field, model_validator

from megatron_zb import files
from megatron_zb.errors import UsageError
from megatron_zb.measured import config
from megatron_zb.measured.config import Section
from megatron_zb.measured.expert_all_to_all import HiddenAllToAll, PairTimes
from megatron_zb.schedules import Costs, layout
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.vocabulary import Vocabulary, with_prediction
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.step_plan import AttentionWork

_MOST = 10_000_000
_LEAST_REST = 0.01  # share of a layer beside attention, which no layer is without
_Replica = TypeVar("_Replica", bound=Section)


def _seconds(description: str) -> Any:
    return Field(gt=0, lt=1e5, description=description, examples=[0.0125])


def _bytes(description: str) -> Any:
    return Field(ge=0, lt=1e15, description=description, examples=[4194304])


class StageProfile(Section):
    """One stage: seconds and bytes of its passes, the mean of a step of its slowest replica."""

    rank: int = Field(
        ge=0, le=_MOST, description="its pipeline rank in the order of the schedule", examples=[0]
    )
    layers: str = Field(
        max_length=2000,
        pattern="^E?t*m*L?$",
        description="none, or E embedding, t layer, m multi-token prediction, L output layer",
        examples=["Ett"],
    )
    forward: float = _seconds("seconds of F")
    backward: float = _seconds("seconds of B, the input gradient")
    weight: float = Field(
        ge=0, lt=1e5, description="seconds of W, the weight gradient", examples=[0.0125]
    )
    whole: float | None = Field(
        default=None, gt=0, lt=1e5, description="seconds of BW, a backward in one pass"
    )
    recompute: float | None = Field(
        default=None, gt=0, lt=1e5, description="seconds of R; left out where none ran: those of F"
    )
    activation: int = _bytes("bytes that F holds")
    held_for_weight: int = _bytes("bytes of them that are still held after B")
    unsplit: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of its weight gradients that B computes, as layers cannot be split",
        examples=[0.25],
    )

    @model_validator(mode="after")
    def _b_only_frees(self) -> StageProfile:
        if self.held_for_weight > self.activation:
            raise ValueError(
                f"held_for_weight is {self.held_for_weight}, more than activation "
                f"{self.activation}; give, for example, held_for_weight: {self.activation}"
            )
        return self


class PairProfile(Section):
    """F that ran as one with a backward of its rank: the mean of a step of its slowest replica."""

    forward: int = Field(ge=0, le=_MOST, description="stage of F", examples=[0])
    backward: int = Field(ge=0, le=_MOST, description="stage of B or BW", examples=[7])
    whole: bool = Field(description="whether it was BW", examples=[True])
    seconds: float = _seconds("seconds of both")


class LinkProfile(Section):
    """One direction between two logical ranks."""

    source: int = Field(ge=0, le=_MOST, description="logical rank that sends", examples=[0])
    target: int = Field(ge=0, le=_MOST, description="logical rank that receives", examples=[1])
    seconds: float = Field(ge=0, lt=1e5, description="seconds of a message", examples=[0.0002])


class HostLinkProfile(Section):
    """Copies between a device and its host, on the slowest rank while all ranks copy at once."""

    bandwidth: float = Field(
        gt=0, lt=1e18, description="bytes/s in one direction", examples=["2.5e+10"]
    )
    full_duplex: bool = Field(description="whether both directions run at once", examples=[True])


def _part(what: str) -> Any:
    return Field(ge=0, lt=1e5, description=f"seconds of {what}", examples=[0.0125])


class PartSeconds(Section):
    """Seconds of a part of the model in each kind of pass."""

    forward: float = _part("F")
    backward: float = _part("B")
    weight: float = _part("W")
    whole: float = _part("BW, a backward in one pass")

    @property
    def total(self) -> float:
        """Seconds of a microbatch, with a split backward."""
        return self.forward + self.backward + self.weight


_NOTHING = PartSeconds(forward=0.0, backward=0.0, weight=0.0, whole=0.0)


class AttentionProfile(Section):
    """Seconds of attention in one layer, and the lengths for which they were measured."""

    forward: float = _seconds("seconds of F")
    backward: float = _seconds("seconds of B")
    tokens: float = Field(gt=0, lt=1e12, description="mean of a microbatch", examples=[4096])
    squares: float = Field(
        gt=0, lt=1e18, description="mean sum of the squares of its lengths", examples=[16777216]
    )


class Parts(Section):
    """Seconds of the model's parts for a microbatch; ``empty_pass`` is a pass by itself."""

    layer: PartSeconds = Field(description="one layer, the mean of a hybrid model's")
    letters: dict[str, PartSeconds] = Field(
        default={}, description="one layer of a hybrid model, by its letter in the pattern"
    )
    embedding: PartSeconds = Field(description="the embedding, with its data")
    output: PartSeconds = Field(description="the output layer, with its loss")
    multi_token: PartSeconds = Field(description="multi-token prediction")
    empty_pass: PartSeconds = Field(description="a pass without any of these")

    @model_validator(mode="after")
    def _a_layer_takes_time(self) -> Parts:
        named = {f"letters.{letter}": seconds for letter, seconds in self.letters.items()}
        for name, seconds in {"layer": self.layer, **named}.items():
            if not (seconds.forward > 0 and seconds.backward > 0):
                raise ValueError(
                    f"parts.{name}: its forward and backward must be greater than 0, for example "
                    "forward: 0.0125"
                )
        return self


class ShardProfile(Section):
    """Shard of one rank with vocabulary parallelism: the mean of a step, and bytes.

    As of a stage, of its slowest replica.
    """

    output: float = _seconds("seconds of O, its part of the logits and of the loss")
    weight: float = _seconds("seconds of V, the weight gradient of the output layer")
    lookup: float = _seconds("seconds of E, its part of the embedding")
    gradient: float = _seconds("seconds of G, the weight gradient of the embedding")
    held: int = _bytes("bytes that are held from O to V")

    @property
    def seconds(self) -> float:
        """Seconds of a microbatch."""
        return self.output + self.weight + self.lookup + self.gradient


class ShardHost(Section):
    """Seconds of the rank's host before the passes of shards."""

    output: float = _part("O")
    loss: float = _part("P")
    weight: float = _part("V")
    lookup: float = _part("E")
    gradient: float = _part("G")


class VocabularyTimes(Section):
    """Output layer and embedding that are vocabulary parallel over all ranks."""

    shards: list[ShardProfile] = Field(
        min_length=2, max_length=100_000, description="that of every rank, in logical order"
    )
    loss: float = _seconds("seconds of P, which puts the parts of all ranks together")
    host: ShardHost = Field(description="seconds of the rank's host before each pass")

    def added_to(self, costs: Costs, end: int, *, host: bool = True) -> Costs:
        """Return the costs of stages, by rank as fast as these say, with those of the shards.

        Args:
            costs: those of the stages.
            end: the rank of the last stage in the run that was measured.
            host: count the host's time before a pass as part of it.
        """
        more = len(self.shards) if host else 0

        def total(name: str) -> float:
            pairs = zip(self.shards, costs.slowdown, strict=True)
            seconds = sum(getattr(shard, name) / slowdown for shard, slowdown in pairs)
            return float(seconds + more * getattr(self.host, name))

        loss = self.loss / costs.slowdown[end] + (self.host.loss if host else 0.0)
        return costs.having(
            Vocabulary(
                output=total("output"),
                weight=total("weight"),
                loss=loss,
                held=len(self.shards) * max(shard.held for shard in self.shards),
                lookup=(total("lookup") + total("gradient")) / 2,
            )
        )


class ProfiledModel(Section):
    """Properties of the model that must be the same for the figures to hold."""

    layers: int = Field(gt=0, le=_MOST, description="layers of the model", examples=[32])
    hidden_size: int = Field(gt=0, le=_MOST, description="hidden size", examples=[4096])
    sequence_length: int = Field(gt=0, le=_MOST, description="tokens of a sample", examples=[8192])
    microbatch: int = Field(gt=0, le=_MOST, description="samples of a microbatch", examples=[1])
    tensor: int = Field(gt=0, le=_MOST, description="tensor-parallel ranks", examples=[8])
    context: int = Field(gt=0, le=_MOST, description="context-parallel ranks", examples=[1])
    vocabulary: int | None = Field(
        default=None, gt=0, le=_MOST, description="rows of the output layer", examples=[128256]
    )
    pattern: str | None = Field(
        default=None,
        max_length=20_000,
        pattern="^[^|]*$",
        description="letters of a hybrid model's layers, without '|' between stages",
        examples=["'M*-E'"],
    )

    @property
    def kinds(self) -> str:
        """A letter for each decoder layer of a hybrid model; none for others."""
        return layout.pattern_kinds(self.pattern or "")


class Profile(Section):
    """Whole file of a profile; stages in model order."""

    version: Literal[1] = Field(description="of this format", examples=[1])
    device: str = Field(max_length=200, description="what it ran on", examples=["NVIDIA H200"])
    schedule: str = Field(max_length=80, description="that ran", examples=["v-half"])
    pipeline_size: int = Field(ge=2, le=100_000, description="pipeline ranks", examples=[8])
    num_microbatches: int = Field(gt=0, le=_MOST, description="of a step", examples=[64])
    message: int = _bytes("bytes of a message between stages")
    model: ProfiledModel = Field(description="what was trained")
    stages: list[StageProfile] = Field(
        min_length=2, max_length=10_000, description="every stage, in model order"
    )
    pairs: list[PairProfile] = Field(
        default=[], max_length=100_000, description="forwards that ran as one with a backward"
    )
    links: list[LinkProfile] = Field(max_length=100_000, description="every link that is used")
    parts: Parts | None = Field(
        default=None, description="of the model; left out where they could not be told apart"
    )
    attention: AttentionProfile | None = Field(
        default=None, description="of one layer; left out where it has no module by itself"
    )
    host: PartSeconds = Field(
        default=_NOTHING, description="seconds of the rank's host before each pass"
    )
    outside: float = Field(
        default=0.0, ge=0, lt=1e5, description="seconds of a step outside of its passes"
    )
    vocabulary: VocabularyTimes | None = Field(
        default=None, description="of shards, where the run has cut its vocabulary over all ranks"
    )
    host_link: HostLinkProfile | None = Field(
        default=None, description="of copies to the host and back; left out where none were timed"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        p = self.pipeline_size
        counts = [sum(s.rank == r for s in self.stages) for r in range(p)]
        if len(set(counts)) != 1 or sum(counts) != len(self.stages):
            raise ValueError(
                f"stages: their ranks must be 0 to {p - 1}, each as often as the others; they are "
                f"{[s.rank for s in self.stages]}"
            )
        for number, link in enumerate(self.links):
            if max(link.source, link.target) >= p or link.source == link.target:
                raise ValueError(
                    f"links.{number}: it goes from rank {link.source} to {link.target}; give two "
                    f"different ranks of 0 to {p - 1}, for example source: 0, target: 1"
                )
        ranks = [s.rank for s in self.stages]
        for number, pair in enumerate(self.pairs):
            if (
                max(pair.forward, pair.backward) >= len(ranks)
                or ranks[pair.forward] != ranks[pair.backward]
            ):
                raise ValueError(
                    f"pairs.{number}: stages {pair.forward} and {pair.backward} are not on one "
                    "rank; give two of one rank, for example forward: 0, backward: 0"
                )
        if len({s.whole is None for s in self.stages}) > 1:
            raise ValueError(
                "stages: some tell their whole backward and some do not; every stage says it, for "
                "example whole: 0.0125, or none"
            )
        if self.vocabulary is not None and len(self.vocabulary.shards) != p:
            raise ValueError(
                f"vocabulary.shards: there are {len(self.vocabulary.shards)} for {p} pipeline "
                "ranks; every rank has one"
            )
        layers = sum(s.layers.count("t") for s in self.stages)
        if layers != self.model.layers:
            raise ValueError(
                f"stages: they have {layers} layers and the model has {self.model.layers}; every "
                "stage says its own, for example layers: Ett"
            )
        self._check_letters()
        return self

    def _check_letters(self) -> None:
        model, letters = self.model, {} if self.parts is None else self.parts.letters
        if model.pattern is not None and len(model.kinds) != model.layers:
            raise ValueError(
                f"model.pattern has {len(model.kinds)} letters before '/' and the model has "
                f"{model.layers} layers; write one letter for each"
            )
        if letters and set(letters) != set(model.kinds):
            raise ValueError(
                f"parts.letters: they are {_listed(letters)}, and the layers of model.pattern are "
                f"{_listed(model.kinds)}; give seconds for each letter of the pattern, or leave "
                "parts.letters out"
            )

    @property
    def attention_work(self) -> AttentionWork | None:
        """Cost of attention relative to linear layers; None where it was not measured."""
        attention = self.attention
        if self.parts is None or attention is None:
            return None
        layer = self.parts.layer

        def of_pair(scores: float, whole: float) -> float:
            rest = max(whole - scores, _LEAST_REST * whole)
            return scores / attention.squares / (rest / attention.tokens)

        return AttentionWork(
            of_pair(attention.forward, layer.forward), of_pair(attention.backward, layer.backward)
        )

    @property
    def rank_of(self) -> tuple[int, ...]:
        """Logical rank of each stage."""
        return tuple(stage.rank for stage in self.stages)

    @property
    def placement(self) -> Placement:
        """Placement of the run."""
        return Placement(self.schedule, self.pipeline_size, self.rank_of)

    def costs(self, placement: Placement, *, host: bool = True) -> Costs:
        """Return the measured costs of the placement that ran, in seconds and bytes.

        Args:
            placement: of the schedule.
            host: count the host's time before a pass as part of it.

        Raises:
            UsageError: it is another placement.
        """
        if placement.rank_of != self.rank_of:
            raise UsageError(
                f"the profile has stages on pipeline ranks {_numbers(self.placement)}, the "
                f"schedule on {_numbers(placement)}: profile a run of this placement"
            )
        stages = self.stages
        more = self.host if host else _NOTHING
        slowdown = self._slowdown_of_shards()

        def seconds(name: str) -> list[float]:
            added = getattr(more, name)
            return [(getattr(s, name) + added) / slowdown[s.rank] for s in stages]

        costs = Costs.of_slices(
            pipeline_size=self.pipeline_size,
            forward=seconds("forward"),
            backward=seconds("backward"),
            weight=seconds("weight"),
            whole=[] if stages[0].whole is None else seconds("whole"),
            p2p=self.latencies(),
            slowdown=slowdown,
            activation=[s.activation for s in stages],
            held_for_weight=[s.held_for_weight for s in stages],
        )
        if (all_to_all := self.all_to_all) is not None:
            costs = all_to_all.split_off(costs)
        if self.vocabulary is None:
            return costs
        costs = self.vocabulary.added_to(costs, placement.rank_of[-1], host=host)
        return with_prediction(costs) if self.multi_token else costs

    @property
    def multi_token(self) -> int:
        """Layers of multi-token prediction."""
        return self.stages[-1].layers.count("m")

    def with_recomputation(self, costs: Costs) -> Costs:
        """Return the costs of the stages that ran, with the choice to recompute activations.

        R takes what it took in the run, or what F takes there where none has run.
        """

        def again(stage: StageProfile, forward: float) -> float:
            if stage.recompute is None:
                return forward
            return forward + (stage.recompute - stage.forward) / costs.slowdown[stage.rank]

        seconds = [
            again(*each) for each in zip(self.stages, costs.seconds[PassKind.F], strict=True)
        ]
        return costs.having(Recomputation(kept_input=self.message, seconds=seconds))

    def with_offload(self, costs: Costs, host_limit: float = math.inf) -> Costs:
        """Return the costs of the stages that ran, with the choice to offload activations.

        Args:
            costs: those of the stages, in seconds and bytes.
            host_limit: bytes of the host for each rank.

        Raises:
            UsageError: no copies were timed.
        """
        link = self.host_link
        if link is None:
            raise UsageError(
                "the profile does not say how fast activations are copied to the host: profile a "
                "run of this version"
            )
        return costs.having(
            Offload(
                seconds=[held / link.bandwidth for held in costs.memory["activation"]],
                full_duplex=link.full_duplex,
                host_limit=host_limit,
            )
        )

    @property
    def one_f_one_b_bytes(self) -> float:
        """Bytes on 1F1B's first rank with equal layers: p microbatches of a p-th of them."""
        return float(sum(stage.activation for stage in self.stages))

    @property
    def copy_share(self) -> float | None:
        """Seconds of a copy one way, as a share of F, B and W; None if not timed."""
        if self.host_link is None:
            return None
        held = sum(stage.activation for stage in self.stages)
        passes = sum(stage.forward + stage.backward + stage.weight for stage in self.stages)
        return held / self.host_link.bandwidth / passes

    @property
    def all_to_all(self) -> HiddenAllToAll | None:
        """Expert all-to-all that pairs hide; None where none ran."""
        if not self.pairs:
            return None
        stages = self.stages

        def alone(pair: PairProfile) -> PairTimes:
            forward, back = stages[pair.forward], stages[pair.backward]
            whole = back.whole or back.backward + back.weight
            backward = whole if pair.whole else back.backward
            return PairTimes(pair.forward, pair.backward, forward.forward, backward, pair.seconds)

        return HiddenAllToAll.measured([s.forward for s in stages], list(map(alone, self.pairs)))

    def _slowdown_of_shards(self) -> list[float]:
        """Return how slow the shard of each rank is against the mean of all; they are alike."""
        if self.vocabulary is None:
            return [1.0] * self.pipeline_size
        seconds = [shard.seconds for shard in self.vocabulary.shards]
        return [of_rank * len(seconds) / sum(seconds) for of_rank in seconds]

    def latencies(self) -> list[list[float]]:
        """Return the seconds of a message by [source][target].

        Where none was measured, it is the median of the links.
        """
        ranks = range(self.pipeline_size)
        usual = median([link.seconds for link in self.links] or [0.0])
        latencies = [[0.0 if a == b else usual for b in ranks] for a in ranks]
        for link in self.links:
            latencies[link.source][link.target] = link.seconds
        return latencies


def read_profile(path: Path) -> Profile:
    """Read a file that ``--pipeline-profile`` has written.

    Raises:
        UsageError: the file or a field of it is wrong.
    """
    return config.read(path, Profile)


def write_profile(profile: Profile, path: Path) -> None:
    """Write a file that :func:`read_profile` reads.

    Raises:
        UsageError: it cannot be written.
    """
    text = yaml.safe_dump(profile.model_dump(), sort_keys=False, width=120)
    if profile.placement.mirrored:
        last = profile.pipeline_size - 1
        note = f"ranks are those of the schedule: rank r is pipeline rank {last} - r of Megatron"
        text = f"# {note}\n{text}"
    files.write_text(path, text)


def _listed(letters: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(letters)) or "none"


def _numbers(placement: Placement) -> list[int]:
    """Return Megatron's pipeline rank of each stage."""
    return [placement.pipeline_rank(rank) for rank in placement.rank_of]


def merged(replicas: Sequence[Sequence[StageProfile]]) -> list[StageProfile]:
    """Merge the stages that several ranks have measured, in model order: the slowest of each.

    Args:
        replicas: for each stage, what every rank that holds it has measured.
    """
    return [_slowest(seen, rank=seen[0].rank, layers=seen[0].layers) for seen in replicas]


def merged_shards(replicas: Sequence[Sequence[ShardProfile]]) -> list[ShardProfile]:
    """Merge the shards that several ranks have measured, by logical rank: the slowest of each."""
    return [_slowest(seen) for seen in replicas]


def _slowest(seen: Sequence[_Replica], **alike: Any) -> _Replica:
    """Return the largest number of each field, but for those that are ``alike``."""
    kind = type(seen[0])
    for name in kind.model_fields.keys() - alike.keys():
        known = (getattr(one, name) for one in seen)
        alike[name] = max((value for value in known if value is not None), default=None)
    return kind.model_validate(alike)


def merged_pairs(ranks: Iterable[Iterable[PairProfile]]) -> list[PairProfile]:
    """Merge the pairs that all ranks have measured: the slowest replica of each."""
    slowest: dict[tuple[int, int, bool], PairProfile] = {}
    for pair in chain.from_iterable(ranks):
        key = pair.forward, pair.backward, pair.whole
        slowest[key] = max(slowest.get(key, pair), pair, key=lambda one: one.seconds)
    return [pair for _, pair in sorted(slowest.items())]

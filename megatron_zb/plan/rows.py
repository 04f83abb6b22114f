"""Rows of a plan: a schedule in one setting, with its time and its memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megatron_zb.plan.encoder import CountedEncoder
from megatron_zb.plan.operators import model_flops
from megatron_zb.plan.strategy import MEGATRON_OWN, ScheduleCandidate
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Costs, Schedule
from megatron_zb.schedules.layout import Layout
from megatron_zb.schedules.simulator import Timeline


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A schedule in one setting, whatever its costs come from.

    Attributes:
        candidate: name in the table.
        runs: the schedule that runs; for ``auto``, the fastest of all.
        chunks: chunks of a rank, where the schedule has the choice.
        layout: layers of each stage.
        has_by_default: whether a run has this layout without a flag.
        timeline: the simulation; None without a pipeline.
    """

    candidate: str
    runs: ScheduleCandidate
    chunks: int | None
    layout: Layout
    has_by_default: bool
    timeline: Timeline | None = None

    @property
    def family(self) -> str:
        """Name of the schedule in the flags."""
        return self.runs.family

    @property
    def megatron(self) -> bool:
        """Whether Megatron-LM runs it without this package."""
        return self.candidate in MEGATRON_OWN

    @property
    def schedule(self) -> Schedule | None:
        """Schedule of the timeline."""
        return None if self.timeline is None else self.timeline.schedule

    @property
    def name(self) -> str:
        """Name in tables, with the chunks; for ``auto``, with what it runs."""
        named = self.candidate
        if named.split()[0] == "auto":
            named += ": searched" if self.family == "auto" else f": {self.family}"
        return named if self.chunks is None else f"{named} ×{self.chunks}"


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one of Megatron's pipeline ranks at its peak.

    ``weight_queue`` is what W still needs after B.
    """

    rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    weight_queue: float
    logits: float
    messages: float
    snapshot: float
    reserved: float
    fragmentation: float

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the bytes of each part by name."""
        return {name: size for name, size in asdict(self).items() if name != "rank"}


@dataclass(frozen=True, kw_only=True)
class Prediction(PlanRow):
    """Predicted time and memory of one choice.

    Where there are many microbatches, the timeline is that of the first ones, from which the
    seconds of the rest are extrapolated. ``memory_limit`` is the limit to give ``auto``, as a
    fraction of 1F1B's activations.
    """

    load: Workload
    num_microbatches: int
    pipeline_seconds: float
    bubble: float
    step_seconds: float
    memory: RankMemory
    costs: Costs | None = None
    post_validation: bool = False
    memory_limit: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return self.pipeline_seconds + self.step_seconds

    @property
    def gpus(self) -> int:
        strategy = self.load.strategy
        return strategy.model_ranks * strategy.pipeline

    @property
    def tokens(self) -> int:
        """Tokens of an iteration on all GPUs."""
        strategy = self.load.strategy
        samples = self.num_microbatches * strategy.microbatch * strategy.data
        return samples * self.load.sequence

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the data sheet's FLOP/s that training needs.

        Training on frozen weights needs two thirds: it has no weight gradients.
        """
        flops = model_flops(self.load.model, self.tokens, self.load.sequence)
        flops *= 2 / 3 if self.load.frozen else 1
        flops += CountedEncoder(self.load).flops(self.tokens / self.load.sequence)
        return flops / self.seconds / self.gpus / self.load.rate.peak


def fastest(*rows: Prediction | None) -> Prediction | None:
    """Return the row of the most tokens per second, the first of several; None if there is none."""
    return max(filter(None, rows), key=lambda row: row.tokens_per_gpu, default=None)

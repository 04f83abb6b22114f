"""The best setting of every schedule: formulas order all settings, simulation decides the first.

Each schedule gets the same care, Megatron's own included: its best sharing of the GPUs, microbatch,
recomputation, number of chunks and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megatron_zb.errors import UsageError
from megatron_zb.planner import estimate
from megatron_zb.planner.contender import NO_PIPELINE, Contender
from megatron_zb.planner.device import DeviceConfig
from megatron_zb.planner.division import said_of_none
from megatron_zb.planner.estimate import Cut
from megatron_zb.planner.model import ModelConfig
from megatron_zb.planner.prediction import Prediction, predict
from megatron_zb.planner.stages import Staged
from megatron_zb.planner.strategy import Choices, Strategy, strategies
from megatron_zb.planner.units import gib
from megatron_zb.planner.work import Workload
from megatron_zb.schedules import layout
from megatron_zb.schedules.placement import Placement

# The formula leaves out what a schedule can save; what is above by more is not simulated.
_SLACK = 1.25
# A setting whose rate by formula is below this share of the best simulated one is left out.
_HOPELESS = 0.97
# So many settings of each schedule are looked at with their layouts before some are simulated.
_REFINED = 40


@dataclass(frozen=True)
class Job:
    """What the user wants to train, and on what.

    With ``post_validation``, schedules are built for iterations ``in_a_row`` unless it is False.
    """

    model: ModelConfig
    device: DeviceConfig
    gpus: int
    memory: float
    global_batch: int
    sequence: int
    choices: Choices = field(default_factory=Choices)
    post_validation: bool = False
    in_a_row: bool = True
    snapshot: bool = False


@dataclass(frozen=True)
class TooLarge:
    """A setting that was promising and does not fit."""

    strategy: Strategy
    needed: float

    def __str__(self) -> str:
        return f"{self.strategy} needs {gib(self.needed)}"


@dataclass(frozen=True)
class Plan:
    """The best setting of each schedule, fastest first.

    ``too_large`` has, for each schedule, the most promising setting that does not fit;
    ``nothing_for`` tells why a schedule is not in the table.
    """

    job: Job
    ranked: tuple[Prediction, ...]
    too_large: dict[str, TooLarge]
    nothing_for: dict[str, str]
    settings: int
    simulated: int


@dataclass(frozen=True)
class _Setting:
    load: Workload
    contender: Contender
    chunks: int | None
    m: int
    seconds: float
    memory: float
    counted: float  # seconds of a microbatch on a rank that the formula counts with

    @property
    def rate(self) -> float:
        """Tokens per second on all GPUs, by formula."""
        strategy = self.load.strategy
        return self.m * self.load.tokens * strategy.data / self.seconds


Watch = Callable[[str, int, int], None]


def search(
    job: Job,
    contenders: Sequence[Contender],
    *,
    tries: int = 3,
    watch: Watch = lambda text, done, of: None,
) -> Plan:
    """Find the best setting of each schedule.

    Args:
        job: what to train on what.
        contenders: the schedules.
        tries: settings of each schedule to simulate, the most promising ones by formula.
        watch: is told what is being looked at, how many schedules are done, and of how many.

    Raises:
        UsageError: the sizes cannot be divided, or nothing fits into the memory.
    """
    cuts = _cuts(job)
    best: list[Prediction] = []
    too_large: dict[str, TooLarge] = {}
    nothing: dict[str, str] = {}
    smallest: list[tuple[float, str]] = []
    settings = simulated = 0
    alone = Contender(NO_PIPELINE, "1f1b", megatron=True)
    everyone = [alone, *contenders]
    for done, contender in enumerate(everyone):
        watch(contender.name, done, len(everyone))
        ordered = sorted(_settings(cuts, contender, job), key=lambda s: -s.rate)
        settings += len(ordered)
        # The search of auto is long, and it starts where the V's are good.
        found = _best(job, ordered, 1 if contender.family == "auto" else tries)
        simulated += found.simulated
        smallest += [(s.memory, f"{contender.name} with {s.load.strategy}") for s in ordered]
        if found.prediction is not None:
            best.append(found.prediction)
        elif ordered:
            nothing[contender.name] = f"nothing fits: {found.too_large or 'see the others'}"
        elif contender is not alone:
            nothing[contender.name] = "no setting has layers and microbatches that divide"
        if found.too_large is not None:
            too_large[contender.name] = found.too_large
    watch("", len(everyone), len(everyone))
    if not best:
        raise UsageError(_said_too_small(job, smallest, too_large))
    best.sort(key=lambda p: -p.tokens_per_gpu)
    return Plan(job, tuple(best), too_large, nothing, settings, simulated)


def _cuts(job: Job) -> list[Cut]:
    found = [
        Cut(Workload(job.model, job.device, strategy, job.sequence))
        for strategy in strategies(
            job.model, job.device, job.gpus, job.global_batch, job.choices, job.sequence
        )
    ]
    if not found:
        raise UsageError(
            said_of_none(job.model, job.device, job.gpus, job.global_batch, job.choices)
        )
    return found


def _settings(cuts: Sequence[Cut], contender: Contender, job: Job) -> list[_Setting]:
    out = []
    for cut in cuts:
        strategy = cut.load.strategy
        m = strategy.num_microbatches(job.global_batch)
        if (strategy.pipeline == 1) != (contender.name == NO_PIPELINE):
            continue
        if strategy.pipeline == 1:
            seconds = estimate.seconds(cut, contender, m, None)
            needed = cut.states.total + job.device.reserved_bytes + cut.held.activation
            out.append(_Setting(cut.load, contender, None, m, seconds, needed, cut.rank.total))
            continue
        if contender.megatron and contender.takes_chunks and m % strategy.pipeline:
            continue  # Megatron's interleaved schedule takes whole groups of p alone
        for chunks in contender.chunk_counts(job.model.layers, strategy.pipeline):
            seconds = estimate.seconds(cut, contender, m, chunks)
            needed = estimate.memory(cut, contender, m, chunks)
            counted = cut.rank_with(contender.placement(strategy.pipeline, chunks)).total
            out.append(_Setting(cut.load, contender, chunks, m, seconds, needed, counted))
    return out


@dataclass
class _Found:
    prediction: Prediction | None = None
    too_large: TooLarge | None = None
    simulated: int = 0


def _best(job: Job, ordered: Sequence[_Setting], tries: int) -> _Found:
    """Simulate the most promising settings that may fit, until ``tries`` of them do."""
    found = _Found()
    fitting = 0
    for setting in _refined(job, ordered):
        reached = found.prediction.tokens_per_gpu * job.gpus if found.prediction else 0.0
        if fitting >= tries or setting.rate < _HOPELESS * reached:
            break
        if setting.memory > _SLACK * job.memory:
            _note(found, setting, setting.memory)
            continue
        staged = cut_into_stages(setting.load, setting.contender, setting.chunks)
        if staged is None:
            continue
        try:
            prediction = _predicted(job, setting, staged)
        except UsageError:
            _note(found, setting, setting.memory)
            continue
        found.simulated += 1
        if prediction.memory.total > job.memory:
            _note(found, setting, prediction.memory.total)
            continue
        fitting += 1
        before = found.prediction
        if before is None or prediction.tokens_per_gpu > before.tokens_per_gpu:
            found.prediction = prediction
    return found


def _refined(job: Job, ordered: Sequence[_Setting]) -> list[_Setting]:
    """The first settings that may fit, ordered anew with the steady state of their layouts."""
    out: list[_Setting] = []
    fitting = 0
    for setting in ordered:
        if fitting >= _REFINED:
            break
        if setting.memory > _SLACK * job.memory:
            out.append(setting)
            continue
        staged = cut_into_stages(setting.load, setting.contender, setting.chunks)
        if staged is None:
            continue
        fitting += 1
        steady = staged.interval(in_groups=setting.contender.family == "interleaved")
        longer = max(0.0, steady - setting.counted)
        out.append(replace(setting, seconds=setting.seconds + setting.m * longer))
    return sorted(out, key=lambda s: -s.rate)


def _note(found: _Found, setting: _Setting, needed: float) -> None:
    """Only what would have come before the best that fits is worth telling."""
    if found.too_large is None and found.prediction is None:
        found.too_large = TooLarge(setting.load.strategy, needed)


def _predicted(job: Job, setting: _Setting, staged: Staged) -> Prediction:
    return predict(
        staged,
        setting.contender,
        setting.m,
        setting.chunks,
        is_even=setting.contender.has_by_default(staged.layout, staged.placement),
        post_validation=job.post_validation and setting.contender.splits,
        in_a_row=job.in_a_row,
        snapshot=job.snapshot and setting.contender.splits,
        memory_bytes=job.memory,
    )


def cut_into_stages(load: Workload, contender: Contender, chunks: int | None) -> Staged | None:
    """The even layout or one that counts the ends, whichever has the shorter steady state."""
    pipeline, layers = load.strategy.pipeline, load.model.layers
    if pipeline == 1:
        return Staged(load, Placement("whole", 1, (0,)), (layers,))
    placement = contender.placement(pipeline, chunks)
    layer = load.layer(layers - 1).total
    ends = (load.embedding().total / layer, load.output().total / layer)
    cuts = [Staged(load, placement, found) for found in layout.choices(layers, placement, *ends)]
    in_groups = contender.family == "interleaved"
    return min(cuts, key=lambda staged: staged.interval(in_groups=in_groups), default=None)


def _said_too_small(
    job: Job, smallest: Sequence[tuple[float, str]], too_large: dict[str, TooLarge]
) -> str:
    counted = [(large.needed, f"{name} with {large.strategy}") for name, large in too_large.items()]
    needed, what = min([*smallest, *counted])
    return (
        f"nothing fits into {gib(job.memory)} on {job.gpus} GPUs: the least that would do is about "
        f"{gib(needed)}, for {what}; give more GPUs or --gpu-memory"
    )

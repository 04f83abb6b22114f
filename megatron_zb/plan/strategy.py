"""Choices of a plan: division of the GPUs, microbatch and recomputation, and the schedules.

The schedules are Megatron's own, as the baselines, and the catalog's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.fit import Variant
from megatron_zb.parsing import flag_of
from megatron_zb.plan.device import DeviceConfig
from megatron_zb.plan.mixers import RECURRENT
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.operators import RECOMPUTE
from megatron_zb.schedules import catalog
from megatron_zb.schedules.layout import Layers, Layout, spread
from megatron_zb.schedules.placement import Placement

# --- strategies


_MICROBATCHES = (1, 2, 3, 4, 6, 8)
_CONTEXTS = (2, 4, 8, 16, 32)
_LONG = 8192  # tokens of a sample above which it is cut without being asked
SLICE_STEP = 16  # tokens on a rank, in multiples of which slices differ


@dataclass(frozen=True)
class Strategy:
    """One way to divide the GPUs, with the size of the microbatch and the recomputation.

    ``expert`` times ``expert_tensor`` ranks share the experts; they lie within the ``tensor`` times
    ``context`` times ``data`` ranks of a pipeline rank, as in Megatron's parallel folding.
    ``overlap`` is for the reduction of gradients and the gathering of weights. Without
    ``sequence_parallel``, every tensor-parallel rank works on norms and residuals of all tokens.
    ``recompute`` is none, selective, full, or modules joined by a plus sign. ``slices`` is the
    number of token slices of a microbatch, equally long, or as long in time with ``by_time``.
    """

    tensor: int
    pipeline: int
    data: int
    expert: int
    microbatch: int
    recompute: str
    context: int = 1
    expert_tensor: int = 1
    precision: str = "bf16"
    overlap: bool = True
    sequence_parallel: bool = True
    slices: int = 1
    by_time: bool = False

    @property
    def model_ranks(self) -> int:
        """GPUs of a pipeline rank, all of which work on its layers."""
        return self.tensor * self.context * self.data

    @property
    def drops_all(self) -> bool:
        """Whether layers keep nothing but their input (full recomputation)."""
        return self.recompute == "full"

    @property
    def spread(self) -> int:
        """Ranks over which the tokens of a slice are spread."""
        return self.tensor * self.context

    @property
    def gathers(self) -> bool:
        """Whether context-parallel ranks gather keys and values, as those of slices do."""
        return self.context > 1 and self.slices > 1

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard of a dense weight."""
        return self.context * self.data

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same shard of an expert's weight."""
        return self.model_ranks // (self.expert * self.expert_tensor)

    def num_microbatches(self, global_batch: int) -> int:
        """Return the number of microbatches of each pipeline in an iteration."""
        return global_batch // (self.data * self.microbatch)

    def __str__(self) -> str:
        context = f" CP{self.context}" if self.context > 1 else ""
        expert = f" EP{self.expert}" if self.expert > 1 else ""
        split = f" ETP{self.expert_tensor}" if self.expert_tensor > 1 else ""
        size = f"TP{self.tensor}{context} PP{self.pipeline} DP{self.data}{expert}{split}"
        said = f"{size} b={self.microbatch}"
        if self.precision != "bf16":
            said += f" {self.precision}"
        said += f" n={self.slices}" if self.slices > 1 else ""
        said += " by time" if self.by_time else ""
        return said if self.recompute == "none" else f"{said} recompute {self.recompute}"


@dataclass(frozen=True)
class Choices:
    """Choices that the user allows; None is everything that fits.

    ``flags`` are the user's arguments for the choices, by name, where they are not those of a plan.
    """

    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    microbatch: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    context: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    expert_tensor: tuple[int, ...] | None = None
    precision: str = "bf16"
    overlap: bool = True
    sequence_parallel: bool = True
    flags: Mapping[str, str] = field(default_factory=dict, compare=False)

    def flag(self, name: str) -> str:
        """Return the user's argument for a choice."""
        return self.flags.get(name) or _FLAGS.get(name) or flag_of(name)


def strategies(
    model: ModelConfig,
    device: DeviceConfig,
    gpus: int,
    global_batch: int,
    choices: Choices,
    sequence: int | None = None,
) -> Iterator[Strategy]:
    """Yield all that divides: heads by TP, samples by CP, layers over PP, the batch by DP."""
    sequence = model.sequence_length if sequence is None else sequence
    for tensor in _tensor(model, device, gpus, choices.tensor):
        for context in _context(sequence, tensor, choices.context):
            inner = tensor * context
            if gpus % inner or (context > 1 and not RECURRENT.keys().isdisjoint(model.kinds)):
                continue  # how a state passes between parts of a sample is not counted
            for pipeline in choices.pipeline or _divisors(gpus // inner):
                if gpus // inner % pipeline or pipeline > model.layers:
                    continue
                data = gpus // inner // pipeline
                if global_batch % data:
                    continue
                shape = Strategy(
                    tensor,
                    pipeline,
                    data,
                    1,
                    1,
                    "none",
                    context=context,
                    precision=choices.precision,
                    overlap=choices.overlap,
                    sequence_parallel=choices.sequence_parallel,
                )
                yield from _with_experts(model, device, shape, global_batch, choices)


def _with_experts(
    model: ModelConfig, device: DeviceConfig, shape: Strategy, batch: int, choices: Choices
) -> Iterator[Strategy]:
    """Yield the strategies with every division of the experts, microbatch and recomputation."""
    for expert, expert_tensor in _experts(model, device, shape.model_ranks, choices):
        for microbatch in choices.microbatch or _MICROBATCHES:
            if batch // shape.data % microbatch == 0:
                for recompute in _recompute(model, choices.recompute):
                    yield replace(
                        shape,
                        expert=expert,
                        expert_tensor=expert_tensor,
                        microbatch=microbatch,
                        recompute=recompute,
                    )


def _divisors(whole: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, whole + 1) if whole % d == 0)


def _tensor(
    model: ModelConfig, device: DeviceConfig, gpus: int, asked: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the TP sizes within a node that divide the layers and the vocabulary."""
    return tuple(
        t
        for t in (asked or _divisors(device.node.gpus))
        if gpus % t == 0 and t <= device.node.gpus and model.is_cut_by(t)
    )


def _context(sequence: int, tensor: int, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the CP sizes that divide a sample into two equal parts for each rank.

    Unless sizes are requested, those above 1 leave a rank at least 8192 tokens of a sample.
    """
    usual = [1, *(c for c in _CONTEXTS if sequence // c >= _LONG)]
    return tuple(c for c in (asked or usual) if c == 1 or sequence % (2 * c * tensor) == 0)


def _experts(
    model: ModelConfig, device: DeviceConfig, ranks: int, choices: Choices
) -> Iterator[tuple[int, int]]:
    """Yield sizes of expert and expert tensor parallelism within a number of ranks.

    Unless sizes are requested, experts are whole, and spread over as many ranks as stay in a node,
    or in eight nodes where a node has more than eight experts per GPU.
    """
    if model.experts is None:
        yield 1, 1
        return
    for split in choices.expert_tensor or (1,):
        if ranks % split or model.experts.ffn_hidden_size % split:
            continue
        most = [d for d in _divisors(ranks // split) if model.experts.experts % d == 0]
        if choices.expert is not None:
            yield from ((d, split) for d in most if d in choices.expert)
            continue
        near = [d for d in most if d * split <= device.node.gpus]
        # Where a node cannot hold the experts' states, only more ranks help: eight nodes at most.
        large = model.experts.experts > 8 * device.node.gpus
        far = [d for d in most if d * split <= 8 * device.node.gpus]
        yield max(far if large else near or [1]), split


def _recompute(model: ModelConfig, asked: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the kinds of recomputation that are requested, or else those that save memory.

    Recomputing the attention scores saves nothing where they are not stored.
    """
    if asked is None:
        return tuple(r for r in RECOMPUTE if r != "selective" or not model.flash_attention)
    return tuple(dict.fromkeys([*(r for r in RECOMPUTE if r in asked), *asked]))


# --- error message for GPUs that cannot be divided as the user asks -------------------------------


_FLAGS = {"microbatch": "--micro-batch-size"}
_FARTHEST = 64  # numbers of GPUs that are looked at on either side


def no_strategy_message(
    model: ModelConfig, device: DeviceConfig, gpus: int, global_batch: int, choices: Choices
) -> str:
    """Describe sizes that cannot be divided: the flag to change, and the values that would do."""
    free = [f.name for f in fields(choices) if f.default is None]
    asked = [name for name in free if getattr(choices, name) is not None]
    for name in asked:
        any_value: dict[str, Any] = {name: None}
        others = replace(choices, **any_value)
        possible = {getattr(s, name) for s in strategies(model, device, gpus, global_batch, others)}
        if possible:
            return (
                f"{choices.flag(name)} {_listed(getattr(choices, name))} cannot be had for "
                f"{model.name} on {gpus} GPUs{_rest(choices, asked, name)}: {choices.flag(name)} "
                f"can be {_describe(possible)}"
            )
    problem = (
        f"{gpus} GPUs, a global batch of {global_batch} and the {model.attention_heads} heads and "
        f"{model.layers} layers of {model.name} cannot be divided among one another"
    )
    if asked and _is_possible(strategies(model, device, gpus, global_batch, Choices())):
        flags = " and ".join(map(choices.flag, asked))
        return f"{problem} with {flags} as given: leave one of them out"
    for batch in _batches(gpus, global_batch):
        if _is_possible(strategies(model, device, gpus, batch, choices)):
            return f"{problem}: --global-batch-size {batch} can be"
    for number in _neighbours(gpus):
        if _is_possible(strategies(model, device, number, global_batch, choices)):
            return f"{problem}: --gpus {number} can be"
    return f"{problem}: give another number of GPUs, such as --gpus {device.node.gpus}"


def _is_possible(found: Iterator[Strategy]) -> bool:
    return any(True for _ in found)


def _rest(choices: Choices, asked: list[str], name: str) -> str:
    others = [choices.flag(other) for other in asked if other != name]
    return f" with {' and '.join(others)} as given" if others else ""


def _listed(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values))


def _describe(values: set[object]) -> str:
    """List values in order, with `or` before the last."""
    *first, last = map(str, sorted(values, key=lambda v: (isinstance(v, str), v)))
    return f"{', '.join(first)} or {last}" if first else last


def _batches(gpus: int, global_batch: int) -> Iterator[int]:
    """Yield batches that every number of data-parallel ranks divides, the nearest first."""
    below = global_batch - global_batch % gpus
    yield from (batch for batch in (below, below + gpus) if batch)


def _neighbours(gpus: int) -> Iterator[int]:
    for step in range(1, _FARTHEST + 1):
        yield from (number for number in (gpus - step, gpus + step) if number > 0)


# --- schedules


MEGATRON_1F1B = "Megatron 1F1B"
MEGATRON_INTERLEAVED = "Megatron interleaved"
MEGATRON_OVERLAP = "Megatron interleaved, overlap"
NO_PIPELINE = "no pipeline"
# Beside slices: only strategies with this and not the other.
MEGATRON_CONTEXT = "Megatron 1F1B, context parallel"
MEGATRON_FULL = "Megatron 1F1B, full recompute"
MEGATRON_OWN = (
    MEGATRON_1F1B,
    MEGATRON_INTERLEAVED,
    MEGATRON_OVERLAP,
    NO_PIPELINE,
    MEGATRON_CONTEXT,
    MEGATRON_FULL,
)

# Left out unless they are asked for: no user's choice at the sizes of a real job.
_SELDOM = ("gpipe", "zb-h2", "1f1b", "interleaved")


@dataclass(frozen=True)
class ScheduleCandidate(Variant):
    """A schedule to compare, by its name in the table and its family in the catalog.

    Megatron's 1F1B is blocking, and so is its interleaved schedule with
    ``--no-overlap-p2p-communication``.
    """

    name: str
    family: str
    takes_chunks: bool = False
    megatron: bool = False
    is_sliced: bool = False

    def takes(self, strategy: Strategy) -> bool:
        """Return whether it runs under a strategy."""
        if (strategy.pipeline == 1) != (self.name == NO_PIPELINE):
            return False
        if (strategy.slices > 1) is not self.is_sliced:
            return False
        remedies = strategy.context > 1, strategy.drops_all
        wanted = {MEGATRON_CONTEXT: (True, False), MEGATRON_FULL: (False, True)}
        return wanted.get(self.name, remedies) == remedies

    def chunk_counts(self, layers: int, pipeline: int) -> Iterator[int | None]:
        """Yield the numbers of chunks per rank that the layers allow; None if it has no choice."""
        if not self.takes_chunks:
            yield None
            return
        step = catalog.family(self.family).chunk_step
        yield from range(2 * step, layers // pipeline + 1, step)

    def placement(self, pipeline: int, chunks: int | None) -> Placement:
        """Return the placement of its stages; ``auto`` has none."""
        place = catalog.family(self.family).placement
        assert place is not None, "auto takes the placements of the others"
        return place(pipeline, chunks)

    @property
    def takes_the_best(self) -> bool:
        """Whether it is ``auto``, which runs the fastest schedule of all."""
        return catalog.family(self.family).chooses_placement

    def has_by_default(self, counts: Layout, placement: Placement) -> bool:
        """Return whether a run has this layout without a flag for it.

        Megatron's own schedules have it where the layers divide. Without a flag, no stage is empty.
        """
        if self.megatron:
            return len(set(counts)) == 1
        return min(counts) > 0 and counts == spread(Layers(sum(counts)), placement)

    @property
    def needs_whole_groups(self) -> bool:
        """Whether the microbatches must be a multiple of the ranks: for Megatron's interleaved."""
        return self.megatron and self.takes_chunks

    @property
    def in_groups(self) -> bool:
        """Whether microbatches pass the chunks of a rank in groups."""
        return catalog.family(self.family).takes_group_size

    @property
    def splits(self) -> bool:
        return catalog.family(self.family).splits_backward


def candidates_of(names: Sequence[str] | None, *, overlap: bool = True) -> list[ScheduleCandidate]:
    """Return Megatron's own schedules, and those that are named, or else the usual ones.

    Raises:
        UsageError: a name is unknown.
    """
    own = [
        ScheduleCandidate(MEGATRON_1F1B, "1f1b", blocking=True, megatron=True),
        ScheduleCandidate(
            MEGATRON_INTERLEAVED,
            "interleaved",
            takes_chunks=True,
            blocking=not overlap,
            megatron=True,
        ),
    ]
    usual = [name for name in schedules.names() if name not in _SELDOM]
    chosen = dict.fromkeys(catalog.family_of_one_copy(name).name for name in names or usual)
    return [*own, *map(of_family, chosen)]


def of_family(name: str) -> ScheduleCandidate:
    """Return a schedule of the catalog.

    Raises:
        UsageError: the name is unknown.
    """
    family = catalog.family_of_one_copy(name)
    chunks = family.takes_chunks and family.placement is not None
    return ScheduleCandidate(family.name, family.name, chunks)


def names_in(text: str) -> tuple[str, ...]:
    """Split names that are separated by commas.

    Raises:
        UsageError: there is none.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise UsageError(f"--schedules '{text}' names no schedule: give, for example, v-zb,v-half")
    return names

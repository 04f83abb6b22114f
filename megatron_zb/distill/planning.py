"""``megatron-zb plan --student-config``: the distribution of a distillation before it runs.

Times are counted as those of training are (:mod:`megatron_zb.plan.work`); a measured run finds
its own. Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from megatron_zb.distill.schedule.candidates import CandidateCosts
from megatron_zb.distill.schedule.distribution import (
    BlockCosts,
    Distribution,
    distribute,
    evenly,
)
from megatron_zb.distill.student import (
    BlockShape,
    Library,
    TeacherShape,
    nodes_of,
)
from megatron_zb.distill.student_files import Student, library_of
from megatron_zb.errors import UsageError
from megatron_zb.parsing import gib
from megatron_zb.plan import byte_counts
from megatron_zb.plan.byte_counts import GRADIENT, OPTIMIZER, WEIGHT
from megatron_zb.plan.device import DeviceConfig
from megatron_zb.plan.mixers import GROUPED
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.operators import weights_of
from megatron_zb.plan.strategy import Strategy
from megatron_zb.plan.work import Workload
from megatron_zb.schedules.passes import PassKind

_LOSS = 12
"""Bytes of traffic for each element of a block's output in the loss and its gradient."""


@dataclass(frozen=True)
class DistillPlanJob:
    """Models, hardware and batch of a planned distillation; ``memory`` in bytes per GPU."""

    teacher: ModelConfig
    student: Student
    device: DeviceConfig
    gpus: int
    memory: float
    microbatch: int
    global_batch: int
    sequence: int
    tokens: float | None = None
    """Of the whole distillation."""

    @property
    def microbatches(self) -> int:
        return self.global_batch // self.microbatch

    @property
    def candidates(self) -> Library:
        return library_of(self.student, _shape_of(self.teacher))

    def hours(self, seconds: float) -> float | None:
        """Return the hours of the whole distillation, for the seconds of a step."""
        if self.tokens is None:
            return None
        return ceil(self.tokens / (self.global_batch * self.sequence)) * seconds / 3600


@dataclass(frozen=True)
class DistillPlanStage:
    """Blocks, or candidates as ``BLOCK.NAME``, on the same GPUs, and the seconds of a step."""

    first: str
    last: str
    gpus: int
    teacher: float
    students: float
    update: float
    """Gradients summed over the GPUs, and the optimizers' step."""

    @property
    def seconds(self) -> float:
        return self.teacher + self.students + self.update


@dataclass(frozen=True)
class DistillPlanRow:
    """One way to distil; ``distribution`` is None for data-parallel training block by block."""

    name: str
    distribution: Distribution | None
    seconds: float
    memory: float
    stages: tuple[DistillPlanStage, ...] = ()
    """In the order of the blocks."""
    of_candidates: bool = False
    """Whether the distribution is one of candidates, as for ``--save-library``."""


def rows(job: DistillPlanJob) -> list[DistillPlanRow]:
    """Return ways to distil, the fastest first: the solver's and those it is compared with.

    Raises:
        UsageError: the batch does not divide, or a GPU is too small.
    """
    _check(job)
    costs = block_costs(job)
    ways, name = [], "pipe-bd"
    if max(map(len, job.candidates)) > 1:
        name = "pipe-bd, whole blocks"
        placed = candidate_costs(job)
        ways.append(_row(job, placed, "pipe-bd, candidates apart", _distributed(job, placed)))
    try:
        found = _distributed(job, costs)
        ways.append(_row(job, costs, name, found))
    except UsageError:
        found = None
        if not ways:  # whole blocks are the least that a rank can have
            raise
    spread = evenly(costs.num_blocks, job.gpus)
    if spread != found:
        ways.append(_row(job, costs, "even ranges of blocks", spread))
    if job.microbatches % job.gpus == 0:
        everywhere = Distribution.of([(costs.num_blocks, job.gpus)])
        if everywhere != found:
            ways.append(_row(job, costs, "data-parallel, all blocks at once", everywhere))
        ways.append(_block_by_block(job, costs))
    fits = [way for way in ways if way.memory <= job.memory]
    return sorted(fits, key=lambda row: row.seconds)


def _distributed(job: DistillPlanJob, costs: BlockCosts) -> Distribution:
    left = _for_blocks(job)
    try:
        return distribute(costs, job.gpus, job.microbatches, left)
    except UsageError:
        of = "candidates" if isinstance(costs, CandidateCosts) else "of them with their students"
        each = [costs.held(range(node, node + 1)) for node in range(costs.num_blocks)]
        raise UsageError(
            f"{job.gpus} GPUs with {gib(left)} left for blocks cannot hold {costs.num_blocks} "
            f"{of}, {gib(sum(costs.memory))} in all, the largest {gib(max(each))}: give more "
            "--gpus, or fewer candidates"
        ) from None


def block_costs(job: DistillPlanJob) -> BlockCosts:
    """Estimate the seconds and bytes of every block, with all of its candidates."""
    costs = [_costs_of(job, shapes) for shapes in job.candidates]
    load, whole = _load(job), WEIGHT * weights_of(job.teacher, [0])[0]
    return BlockCosts.of(
        teacher=[load.layer(block).forward for block in range(job.teacher.layers)],
        student=[of.student for of in costs],
        update=[of.update for of in costs],
        reduce=[of.reduce for of in costs],
        memory=[whole + of.memory for of in costs],
    )


def candidate_costs(job: DistillPlanJob) -> CandidateCosts:
    """Estimate the seconds and bytes of every candidate, each of which may be on another GPU."""
    nodes, load = nodes_of(job.candidates), _load(job)
    costs = [_costs_of(job, node.shapes) for node in nodes]
    return CandidateCosts(
        teacher=tuple(load.layer(node.block).forward for node in nodes),
        student=tuple(of.student for of in costs),
        update=tuple(of.update for of in costs),
        relay=(0.0,) * len(nodes),
        reduce=tuple(of.reduce for of in costs),
        memory=tuple(of.memory for of in costs),
        block_of=tuple(node.block for node in nodes),
        teacher_memory=float(WEIGHT * weights_of(job.teacher, [0])[0]),
    )


class _Costs(NamedTuple):
    """Seconds and bytes of candidates, without their teacher's."""

    student: float
    update: float
    reduce: float
    memory: float


def _costs_of(job: DistillPlanJob, shapes: Sequence[BlockShape]) -> _Costs:
    weights = float(sum(_weights(job.teacher, shape) for shape in shapes))
    links = job.device.collectives
    link = links.in_node if job.gpus <= job.device.node.gpus else links.between_nodes
    stepped = WEIGHT + GRADIENT + 2 * OPTIMIZER
    return _Costs(
        student=sum(_student(job, shape) for shape in shapes),
        update=stepped * weights / job.device.memory_bandwidth.reached,
        reduce=link.seconds(GRADIENT * weights),
        memory=(WEIGHT + GRADIENT + OPTIMIZER) * weights,
    )


def _load(job: DistillPlanJob, **changes: int) -> Workload:
    strategy = Strategy(1, job.gpus, 1, 1, job.microbatch, "none")
    model = job.teacher.model_copy(update=changes)
    return Workload(model, job.device, strategy, job.sequence)


def _shape_of(model: ModelConfig) -> TeacherShape:
    return TeacherShape(
        model.layers, model.hidden_size, model.attention_heads, model.groups, model.ffn
    )


def _student(job: DistillPlanJob, shape: BlockShape) -> float:
    """Estimate the seconds of forward, loss and backward of a candidate on one microbatch."""
    load = _load(job, query_groups=shape.num_query_groups, ffn_hidden_size=shape.ffn_hidden_size)
    weights = _weights(job.teacher, shape)
    work = load.block(weights, attends=shape.attention == "attention")
    elements = load.tokens * job.teacher.hidden_size
    return work.total + _LOSS * elements / job.device.memory_bandwidth.reached


def _weights(teacher: ModelConfig, shape: BlockShape) -> int:
    """Count the weights in a candidate's matrices."""
    sizes = {"query_groups": shape.num_query_groups, "ffn_hidden_size": shape.ffn_hidden_size}
    model = teacher.model_copy(update=sizes)
    square = teacher.hidden_size**2
    attention = {"attention": model.attention.weights, "linear": square, "no_op": 0}
    mlp_weights = weights_of(model, [0])[0] - model.attention.weights
    mlp = {"mlp": mlp_weights, "linear": square, "no_op": 0}
    return attention[shape.attention] + mlp[shape.mlp]


def _for_blocks(job: DistillPlanJob) -> float:
    """Return the bytes of a GPU that are left for blocks and their states."""
    load = _load(job)
    held = max(byte_counts.layer_held(load, b).activation for b in range(job.teacher.layers))
    ends = 2 * WEIGHT * job.teacher.hidden_size * job.teacher.vocabulary
    return job.memory - job.device.reserved_bytes - held - ends


def _row(
    job: DistillPlanJob, costs: BlockCosts, name: str, distribution: Distribution
) -> DistillPlanRow:
    held = max(costs.held(blocks) for blocks, _ in distribution.ranges)
    return DistillPlanRow(
        name,
        distribution,
        costs.slowest(distribution, job.microbatches),
        job.memory - _for_blocks(job) + held,
        _stages(job, costs, distribution),
        isinstance(costs, CandidateCosts),
    )


def _stages(
    job: DistillPlanJob, costs: BlockCosts, distribution: Distribution
) -> tuple[DistillPlanStage, ...]:
    if isinstance(costs, CandidateCosts):
        ends = [(node.first, node.last) for node in nodes_of(job.candidates)]
    else:
        ends = [(str(block), str(block)) for block in range(costs.num_blocks)]
    seconds = costs.stage_costs(distribution).seconds

    def of_step(stage: int, kind: PassKind) -> float:
        ranks = distribution.ranges[stage][1]
        return job.microbatches // len(ranks) * seconds[kind][stage]

    return tuple(
        DistillPlanStage(
            ends[held.start][0],
            ends[held.stop - 1][1],
            len(ranks),
            of_step(stage, PassKind.T),
            of_step(stage, PassKind.S),
            seconds[PassKind.U][stage],
        )
        for stage, (held, ranks) in enumerate(distribution.ranges)
    )


def _block_by_block(job: DistillPlanJob, costs: BlockCosts) -> DistillPlanRow:
    """Estimate block-by-block training: each rank runs the teacher up to each block in turn."""
    each, ranks = job.microbatches // job.gpus, job.gpus
    seconds = sum(
        each * (sum(costs.teacher[: block + 1]) + costs.student[block])
        + costs.update[block]
        + costs.reduce[block] * 2 * (ranks - 1) / ranks
        for block in range(costs.num_blocks)
    )
    taught = WEIGHT * costs.num_blocks * weights_of(job.teacher, [0])[0]
    memory = job.memory - _for_blocks(job) + taught + max(costs.memory)
    return DistillPlanRow("data-parallel, block by block", None, seconds, memory)


def _check(job: DistillPlanJob) -> None:
    if job.global_batch % job.microbatch:
        raise UsageError(
            f"--global-batch-size {job.global_batch} is not a multiple of --micro-batch-size "
            f"{job.microbatch}: give, for example, --micro-batch-size 1"
        )
    attention = job.teacher.attention
    unlike = [] if job.teacher.experts is None else ["experts"]
    unlike += [] if attention.name == GROUPED else [attention.name]
    unlike += ["layers of several kinds"] if job.teacher.kinds else []
    if unlike:
        raise UsageError(
            f"--student-config: the distillation of a teacher with {unlike[0]} is not planned: "
            "give a dense one, such as llama3_8b"
        )
    if _for_blocks(job) <= 0:
        raise UsageError(
            f"a GPU of {job.memory / 2**30:.4g} GiB cannot hold one block's activations: give a "
            "smaller --micro-batch-size"
        )


def flags_of(job: DistillPlanJob, row: DistillPlanRow) -> Sequence[str]:
    """Return the flags for ``megatron_zb.distill``; none for block-by-block training."""
    if row.distribution is None:
        return []
    return [
        *(["--save-library DIR"] if row.of_candidates else []),
        f"--distribution {row.distribution.spec}",
        f"--micro-batch-size {job.microbatch}",
        f"--global-batch-size {job.global_batch}",
    ]

"""``megatron-zb plan --student-config``: the distribution of a distillation before it runs.

Times are counted as those of training are (:mod:`megatron_zb_plan.work`); a measured run finds
its own. Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_zb.errors import UsageError
from megatron_zb.parsing import gib
from megatron_zb_distill.schedule.distribution import (
    BlockCosts,
    Distribution,
    distribute,
    evenly,
)
from megatron_zb_distill.student import BlockShape, StudentConfig, TeacherShape, library
from megatron_zb_plan import byte_counts
from megatron_zb_plan.byte_counts import GRADIENT, OPTIMIZER, WEIGHT
from megatron_zb_plan.device import DeviceConfig
from megatron_zb_plan.mixers import GROUPED
from megatron_zb_plan.model import ModelConfig
from megatron_zb_plan.operators import weights_of
from megatron_zb_plan.strategy import Strategy
from megatron_zb_plan.work import Workload

_LOSS = 12
"""Bytes of traffic for each element of a block's output in the loss and its gradient."""


@dataclass(frozen=True)
class DistillPlanJob:
    """Models, hardware and batch of a planned distillation; ``memory`` in bytes per GPU."""

    teacher: ModelConfig
    student: StudentConfig
    device: DeviceConfig
    gpus: int
    memory: float
    microbatch: int
    global_batch: int
    sequence: int

    @property
    def microbatches(self) -> int:
        return self.global_batch // self.microbatch


@dataclass(frozen=True)
class DistillPlanRow:
    """One way to distil; ``distribution`` is None for data-parallel training block by block."""

    name: str
    distribution: Distribution | None
    seconds: float
    memory: float


def rows(job: DistillPlanJob) -> list[DistillPlanRow]:
    """Return ways to distil, the fastest first: the solver's and those it is compared with.

    Raises:
        UsageError: the batch does not divide, or a GPU is too small.
    """
    _check(job)
    costs = block_costs(job)
    found = _distributed(job, costs)
    ways = [_row(job, costs, "pipe-bd", found)]
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
        raise UsageError(
            f"{job.gpus} GPUs with {gib(left)} left for blocks cannot hold {costs.num_blocks} of "
            f"them with their students, {gib(sum(costs.memory))} in all, the largest "
            f"{gib(max(costs.memory))}: give more --gpus, or fewer candidates"
        ) from None


def block_costs(job: DistillPlanJob) -> BlockCosts:
    """Estimate the seconds and bytes of every block."""
    candidates = library(job.student, _shape_of(job.teacher))
    load = _load(job)
    students = [[_student(job, shape) for shape in shapes] for shapes in candidates]
    weights = [[_weights(job.teacher, shape) for shape in shapes] for shapes in candidates]
    sums = [float(sum(of)) for of in weights]
    teacher = [load.layer(block).forward for block in range(job.teacher.layers)]
    links = job.device.collectives
    link = links.in_node if job.gpus <= job.device.node.gpus else links.between_nodes
    stepped = WEIGHT + GRADIENT + 2 * OPTIMIZER
    whole, _ = weights_of(job.teacher, [0])
    return BlockCosts.of(
        teacher=teacher,
        student=[sum(of) for of in students],
        update=[stepped * n / job.device.memory_bandwidth.reached for n in sums],
        reduce=[link.seconds(GRADIENT * n) for n in sums],
        memory=[WEIGHT * whole + (WEIGHT + GRADIENT + OPTIMIZER) * n for n in sums],
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
    held = max(sum(costs.memory[b] for b in blocks) for blocks, _ in distribution.ranges)
    return DistillPlanRow(
        name,
        distribution,
        costs.slowest(distribution, job.microbatches),
        job.memory - _for_blocks(job) + held,
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
    """Return the flags for ``megatron_zb.distill_gpt``; none for block-by-block training."""
    if row.distribution is None:
        return []
    return [
        f"--distribution {row.distribution.spec}",
        f"--micro-batch-size {job.microbatch}",
        f"--global-batch-size {job.global_batch}",
    ]

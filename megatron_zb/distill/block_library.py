"""A library of blocks: candidates of every block, placed on ranks one by one, scored and stored.

A node of the distribution is a candidate. All ranks train on the teacher's relayed activations
(Pipe-BD, arXiv 2301.12443). A candidate is written as soon as it has been scored on held-out text,
so that a run that was killed continues with the others.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_expert_model_parallel_group,
    get_tensor_model_parallel_group,
)
from pydantic import Field

from megatron_zb import files
from megatron_zb.distill import block_times, library_files, shards
from megatron_zb.distill.block_times import BlockTime
from megatron_zb.distill.blocks import student_layer, taught
from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.library_files import TEACHER, Entry, LibraryFile
from megatron_zb.distill.loop import DistillRun, Job, microbatches_of
from megatron_zb.distill.place import Place, check_distribution, parse_distribution
from megatron_zb.distill.schedule.candidates import CandidateCosts
from megatron_zb.distill.schedule.distribution import Distribution, distribute
from megatron_zb.distill.stage import (
    StageBlocks,
    batch_of,
    empty_activation,
    open_stage_blocks,
)
from megatron_zb.distill.student import BlockShape, CandidateNode, Library, TeacherShape, nodes_of
from megatron_zb.distill.student_block import StudentBlock
from megatron_zb.errors import UsageError
from megatron_zb.measured import config
from megatron_zb.measured.config import Section
from megatron_zb.parsing import gib, size_in_bytes
from megatron_zb.train import data


def check_library(args: argparse.Namespace, library: Library, world_size: int) -> None:
    """Check names, the distribution and what is finished; needs no process group.

    Raises:
        UsageError: something does not fit.
    """
    known: dict[str, BlockShape] = {}
    for block, candidates in enumerate(library):
        for shape in candidates:
            alike = replace(shape, learning_rate=None)
            if shape.name == TEACHER or known.setdefault(shape.name, alike) != alike:
                raise UsageError(
                    f"--student-config: candidate {shape.name} of block {block} has a name that "
                    "belongs to other sizes in this library: give it another name"
                )
    if args.distribution is not None:
        nodes = len(nodes_of(library))
        check_distribution(
            parse_distribution(args.distribution, nodes, world_size, "candidate", Lanes.of(args)),
            microbatches_of(args),
        )
    library_files.finished(args, library)


def distil_library(job: Job, store: dist.Store) -> None:
    """Train, score and store all candidates that are not finished; collective over all ranks.

    Raises:
        UsageError: a file cannot be used, the ranks cannot hold the candidates, or one does not
            learn.
    """
    args = job.args
    for number, candidates in enumerate(_rounds(job.library, args.candidates_at_once)):
        done = _of_first_rank(library_files.finished(args, candidates))
        left = [
            [shape for shape in shapes if (block, shape.name) not in done]
            for block, shapes in enumerate(candidates)
        ]
        if any(left):
            _train(job, left, dist.PrefixStore(f"round{number}", store))
            dist.barrier()
    if dist.get_rank() == 0:
        _conclude(job)
    dist.barrier()


def _rounds(library: Library, at_once: int | None) -> Iterator[list[Sequence[BlockShape]]]:
    """Yield the candidates of each block that are trained at the same time."""
    most = max(map(len, library))
    for first in range(0, most, at_once or most):
        yield [candidates[first : first + (at_once or most)] for candidates in library]


def _of_first_rank(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _train(job: Job, left: Library, store: dist.Store) -> None:
    args = job.args
    run = open_candidates(job, left, distribution_of(job, left), store)
    run.report.say(
        f"{sum(map(len, left))} candidates learn from the {args.num_layers} blocks of "
        f"{job.teacher.path}, by rank: {_placed(job.library, run.distribution)}"
    )
    run.steps(0, args.train_iters)
    run.report.finish()
    run.draw()
    for student_block, score in _scores(args, run):
        _store(args, run.stage_blocks.place, student_block, score)
    run.close()


def _placed(library: Library, distribution: Distribution) -> str:
    nodes = nodes_of(library)
    ends = [(nodes[held.start], nodes[held.stop - 1]) for held, _ in distribution.ranges]
    stages = zip(ends, distribution.ranges, strict=True)
    return ", ".join(
        f"{first.first} to {last.last} on {len(ranks)}" for (first, last), (_, ranks) in stages
    )


def open_candidates(
    job: Job, left: Library, distribution: Distribution, store: dist.Store
) -> DistillRun:
    """Build this rank's part of the candidates that are left; collective over all ranks.

    `left` has the candidates to train of each block, `distribution` is of all nodes of the job.
    """
    place = Place.of_this_rank(distribution, Lanes.of(job.args))
    place, shapes = _share(job, left, place, distribution)
    stage_blocks = open_stage_blocks(job.args, job.teacher, shapes, place)
    datasets = data.build_datasets(job.args)
    return DistillRun(job.args, distribution, stage_blocks, store, datasets, 0)


def _share(
    job: Job, left: Library, place: Place, distribution: Distribution
) -> tuple[Place, list[list[BlockShape]]]:
    """Return this rank's place, with its blocks of the teacher, and its candidates of each."""
    nodes = nodes_of(job.library)
    shapes: list[list[BlockShape]] = [[] for _ in job.library]
    if not place.blocks:
        return place, shapes
    for node in place.blocks:
        block = nodes[node].block
        shapes[block] += [shape for shape in nodes[node].shapes if shape in left[block]]
    last = nodes[place.blocks.stop - 1].block
    following = nodes[place.blocks.stop : place.blocks.stop + 1]
    held = range(nodes[place.blocks.start].block, last + 1)
    shares_last = any(node.block == last for node in following)
    return replace(place, blocks=held, shares_last=shares_last), shapes


# --- times and memory


class CandidateTime(Section):
    """Seconds of one candidate."""

    student: float = Field(ge=0, description="forward, loss, backward", examples=[0.003])
    update: float = Field(ge=0, description="optimizer step", examples=[0.001])
    reduce: float = Field(ge=0, description="gradients over a link", examples=[0.002])


class CandidateTimes(Section):
    """Measured or given times of all candidates, for a microbatch and a step."""

    teacher: float = Field(ge=0, description="seconds of a block's forward", examples=[0.001])
    dense_teacher: float | None = Field(
        None,
        ge=0,
        description="of a block without experts, where others have some",
        examples=[0.001],
    )
    candidates: dict[str, CandidateTime] = Field(description="by name", examples=["{}"])


def distribution_of(job: Job, left: Library) -> Distribution:
    """Return the distribution of all nodes: as given, or the fastest for what is left. Collective.

    Raises:
        UsageError: the ranks cannot hold the candidates, or times.json is wrong.
    """
    args, nodes = job.args, nodes_of(job.library)
    if args.distribution is not None:
        return parse_distribution(args.distribution, len(nodes), None, "candidate")
    costs = _costs(job, left, nodes, _times(job))
    limit, ranks = float("inf"), Lanes.of(args).place_of(dist.get_world_size())
    if args.memory_limit is not None:
        limit = size_in_bytes(args.memory_limit, "--memory-limit")
    try:
        return distribute(costs, ranks, microbatches_of(args), limit)
    except UsageError:
        raise UsageError(
            f"--memory-limit {args.memory_limit}: {ranks} ranks cannot hold these candidates, "
            f"{gib(sum(costs.memory))} in all, and the teacher's blocks: give more ranks, or fewer "
            "--candidates-at-once"
        ) from None


def _times(job: Job) -> CandidateTimes:
    """Read or measure the times of all candidates; collective."""
    path = Path(job.args.save_library) / "times.json"
    if not _of_first_rank(path.exists()):
        known = _by_name(job.library)
        work = [(block, [shape]) for block, shape in known.values()]
        measured = block_times.measure(job.args, work, job.teacher.shape)
        if dist.get_rank() == 0:
            library_files.write(path, _as_file(job.teacher.shape, known, measured))
        dist.barrier()
    times = config.read(path, CandidateTimes)
    for candidates in job.library:
        for shape in candidates:
            if shape.name not in times.candidates:
                raise UsageError(
                    f"{path} has no times of candidate {shape.name}: add them, or delete the file "
                    "to measure them"
                )
    return times


def _by_name(library: Library) -> dict[str, tuple[int, BlockShape]]:
    """Return each shape once, by its name, with the first block that it is for."""
    found: dict[str, tuple[int, BlockShape]] = {}
    for block, shapes in enumerate(library):
        for shape in shapes:
            found.setdefault(shape.name, (block, shape))
    return found


def _as_file(
    sizes: TeacherShape,
    known: Mapping[str, tuple[int, BlockShape]],
    measured: Sequence[BlockTime],
) -> dict[str, Any]:
    parts = [asdict(time) for time in measured]
    teacher: dict[bool, float] = {}
    for (block, _), part in zip(known.values(), parts, strict=True):
        has_experts = block in sizes.expert_blocks
        seconds = part.pop("teacher")
        teacher[has_experts] = min(seconds, teacher.get(has_experts, seconds))
    dense = {"dense_teacher": teacher[False]} if len(teacher) > 1 else {}
    candidates = dict(zip(known, parts, strict=True))
    return {"teacher": teacher[max(teacher)], **dense, "candidates": candidates}


def _costs(
    job: Job, left: Library, nodes: Sequence[CandidateNode], times: CandidateTimes
) -> CandidateCosts:
    """Return the costs of all nodes, of which finished candidates and those of later have none."""
    trained = [[s for s in node.shapes if s in left[node.block]] for node in nodes]
    taken = [[times.candidates[shape.name] for shape in shapes] for shapes in trained]
    numbers = {
        name: parameters_of(job.args, shape, block)
        for name, (block, shape) in _by_name(left).items()
    }
    weight, held = (2, 18) if job.args.bf16 else (4, 16)  # with gradient, Adam's and a copy
    sizes = job.teacher.shape
    whole = max(numbers_of_teacher(job.args, sizes).values())
    dense = times.teacher if times.dense_teacher is None else times.dense_teacher
    teacher = (times.teacher if sizes.experts_of(node.block) else dense for node in nodes)
    return CandidateCosts(
        teacher=tuple(teacher),
        student=tuple(sum(time.student for time in node) for node in taken),
        update=tuple(sum(time.update for time in node) for node in taken),
        relay=(0.0,) * len(nodes),
        reduce=tuple(sum(time.reduce for time in node) for node in taken),
        memory=tuple(float(sum(held * numbers[s.name] for s in shapes)) for shapes in trained),
        block_of=tuple(node.block for node in nodes),
        teacher_memory=float(weight * whole),
    )


def teacher_shape(sizes: TeacherShape, block: int) -> BlockShape:
    """Return the shape of a block of the teacher's."""
    experts, width = sizes.experts_of(block), sizes.width_of(block)
    return BlockShape(
        TEACHER, "attention", sizes.num_query_groups, "mlp", width, None, num_experts=experts
    )


def numbers_of_teacher(args: argparse.Namespace, sizes: TeacherShape) -> dict[bool, int]:
    """Return the weights of the teacher's blocks, by whether a block has experts."""
    first = {bool(sizes.experts_of(b)): b for b in reversed(range(sizes.num_layers))}
    return {kind: parameters_of(args, teacher_shape(sizes, b), b) for kind, b in first.items()}


def parameters_of(args: argparse.Namespace, shape: BlockShape, block: int) -> int:
    """Count the weights of a candidate for a block, of all ranks that share it."""
    return shards.number_of(student_layer(args, shape, block))


# --- scores and files


def _scores(args: argparse.Namespace, run: DistillRun) -> Iterator[tuple[StudentBlock, float]]:
    """Yield this rank's candidates with their errors on held-out text, on the first of a stage.

    The error is the squared norm of a candidate's difference from its teacher's output, over that
    of the output, both summed over the first --eval-iters batches of the evaluation split.
    """
    stage_blocks, place = run.stage_blocks, run.stage_blocks.place
    if not place.blocks or not place.is_leader:
        return
    student_blocks = list(stage_blocks.all_student_blocks())
    errors = [[0.0, 0.0] for _ in student_blocks]
    for number in range(args.eval_iters * microbatches_of(args)):
        found = _errors(run.distribution, stage_blocks, _given(args, run, number))
        for so_far, more in zip(errors, found, strict=True):
            so_far[:] = [a + b for a, b in zip(so_far, more, strict=True)]
    sums = torch.tensor(errors, dtype=torch.float64, device="cpu" if args.cpu else "cuda")
    if args.sequence_parallel:
        dist.all_reduce(sums, group=get_tensor_model_parallel_group())
    if args.expert_model_parallel_size > 1:  # each lane has other text
        dist.all_reduce(sums, group=get_expert_model_parallel_group())
    for student_block, (error, norm) in zip(student_blocks, sums.tolist(), strict=True):
        if not math.isfinite(error) or not norm:
            raise UsageError(
                f"the error of block {student_block.block}, candidate {student_block.shape.name}, "
                "on held-out text is not a number: give a lower --lr"
            )
        yield student_block, error / norm


def _given(args: argparse.Namespace, run: DistillRun, number: int) -> torch.Tensor:
    """Return the input of this stage's first block for a microbatch of held-out text."""
    stage_blocks = run.stage_blocks
    if stage_blocks.embedding is not None:
        batch = batch_of(args, run.held_out, number)
        embedded: torch.Tensor = stage_blocks.embedding(batch["tokens"], batch["position_ids"])
        return embedded
    given = empty_activation(args)
    dist.recv(given, stage_blocks.place.leader_of(run.distribution, stage_blocks.place.stage - 1))
    return given


@torch.no_grad()
def _errors(
    distribution: Distribution, stage_blocks: StageBlocks, given: torch.Tensor
) -> list[tuple[float, float]]:
    """Return squared norms, of each candidate's difference and of its teacher's output; relay."""
    place, found, wanted = stage_blocks.place, [], given
    for layer, candidates in zip(stage_blocks.layers, stage_blocks.student_blocks, strict=True):
        given = wanted
        wanted = taught(layer, given, stage_blocks.rotary)
        norm = float(wanted.double().square().sum())
        for student_block in candidates:
            made = student_block.forward(given, stage_blocks.rotary)
            found.append((float((made.double() - wanted.double()).square().sum()), norm))
    if not place.is_last:
        relayed = given if place.shares_last else wanted
        dist.send(relayed.contiguous(), place.leader_of(distribution, place.stage + 1))
    return found


def _store(
    args: argparse.Namespace, place: Place, student_block: StudentBlock, score: float
) -> None:
    """Write a candidate in one piece; collective over the ranks that share it."""
    shape, folder, layer = student_block.shape, Path(args.save_library), student_block.layer
    weights = shards.with_all_experts(layer, shards.whole(layer))
    if place.lane:
        return
    entry = _entry(args, shape, score, sum(weight.numel() for weight in weights.values()))
    stored = {name: value.cpu() for name, value in (weights | dict(layer.named_buffers())).items()}
    path = library_files.weights_path(folder, student_block.block, shape.name)
    files.replace(path, lambda new: torch.save(stored, new))
    record = library_files.record(args, entry, shape)
    library_files.write(path.with_suffix(".json"), record.model_dump())


def _entry(args: argparse.Namespace, shape: BlockShape, score: float, parameters: int) -> Entry:
    sizes = {k: v for k, v in asdict(shape).items() if k != "learning_rate"}
    held = 2 * shape.num_query_groups * args.kv_channels * (2 if args.bf16 else 4)
    cache = held if shape.attention == "attention" else 0
    return Entry(**sizes, score=score, parameters=parameters, kv_cache_bytes=cache)


def _conclude(job: Job) -> None:
    """Write library.json and print the scores."""
    args, sizes = job.args, job.teacher.shape
    numbers = numbers_of_teacher(args, sizes)
    entries = library_files.finished(args, job.library)
    blocks = []
    for block, shapes in enumerate(job.library):
        own = teacher_shape(sizes, block)
        whole = _entry(args, own, 0.0, numbers[bool(own.num_experts)])
        blocks.append([whole, *(entries[block, shape.name] for shape in shapes)])
    made = LibraryFile(
        teacher=args.teacher_load,
        bf16=args.bf16,
        experts_per_token=args.moe_router_topk if args.num_experts else 0,
        shared_expert_size=getattr(args, "moe_shared_expert_intermediate_size", None) or 0,
        blocks=blocks,
    )
    path = Path(args.save_library) / "library.json"
    library_files.write(path, made.model_dump())
    for block, candidates in enumerate(blocks):
        scores = " ".join(f"{entry.name} {entry.score:.3e}" for entry in candidates[1:])
        print(f" block {block} | error on held-out text: {scores} |", flush=True)
    print(f"the library is in {path}", flush=True)

"""The student that a choice of a library's blocks makes, as a checkpoint of Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb.cpu_ranks import redirect_experts
from megatron_zb.distill import flags
from megatron_zb.distill.blocks import student_layer
from megatron_zb.distill.library_files import TEACHER, Entry, LibraryFile, weights_path
from megatron_zb.distill.place import Place
from megatron_zb.distill.schedule.distribution import Distribution
from megatron_zb.distill.stage import open_stage_blocks
from megatron_zb.distill.stitching import (
    ChosenBlock,
    check_stitchable,
    described,
    is_uniform,
    save_student,
)
from megatron_zb.distill.student import BlockShape
from megatron_zb.distill.teacher import expert_blocks, read_teacher
from megatron_zb.errors import UsageError
from megatron_zb.files import write_text
from megatron_zb.train.processes import Environment
from megatron_zb.train.ranks import start_ranks, stop_ranks

_LAYERS = "layers.json"


def assemble(folder: Path, library: LibraryFile, chosen: Sequence[Entry], destination: Path) -> str:
    """Write the student of a choice, on this process and its CPU; return how to load it.

    Blocks of different shapes are described in DIR/layers.json.

    Raises:
        UsageError: a file is missing or damaged, or the student cannot be written.
    """
    teacher = read_teacher(Path(library.teacher))
    args = _arguments(library, teacher.arguments, destination)
    shapes = [entry.shape for entry in chosen]
    if len(shapes) != args.num_layers:
        raise UsageError(
            f"{folder / 'library.json'} has {len(shapes)} blocks, the teacher in {teacher.path} "
            f"{args.num_layers}: give the library of this teacher"
        )
    check_stitchable(args, [[shape] for shape in shapes])
    if args.num_experts:
        redirect_experts()
    start_ranks(args, None, dist.HashStore(), Environment(0, 1, 0, "0"))
    place = Place.of_this_rank(Distribution.of([(len(shapes), 1)]))
    whole = open_stage_blocks(args, teacher, [[] for _ in shapes], place)
    blocks = []
    for block, (shape, layer) in enumerate(zip(shapes, whole.layers, strict=True)):
        if shape.name != TEACHER:
            layer = _read(args, folder, block, shape)
        blocks.append(ChosenBlock(block, shape, layer))
    save_student(args, whole, blocks, 1)
    stop_ranks()
    if is_uniform(shapes, expert_blocks(vars(args))):
        return f"the student is in {destination}: layers of one shape, as a GPTModel has"
    path = destination / _LAYERS
    write_text(path, described(args, shapes))
    return f"the student is in {destination}, for --heterogeneous-layers-config-path {path}"


def _arguments(
    library: LibraryFile, model: dict[str, Any], destination: Path
) -> argparse.Namespace:
    """Return the arguments of a model of the teacher's sizes; those of a training mean nothing."""
    training = "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 0 --mock-data --cpu"
    words = [*training.split(), *(["--bf16"] if library.bf16 else [])]
    words += ["--teacher-load", library.teacher, "--student-config", "none"]
    return flags.complete(flags.parse([*words, "--save-student", str(destination)]), model)


def _read(args: argparse.Namespace, folder: Path, block: int, shape: BlockShape) -> Any:
    """Build the layer of a candidate, with its weights.

    Raises:
        UsageError: its file is missing or damaged.
    """
    path = weights_path(folder, block, shape.name)
    layer = student_layer(args, shape, block)
    try:
        stored = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                tensor.copy_(stored[name])
    except Exception as error:  # what a damaged file raises depends on the damage
        raise UsageError(
            f"{path} is missing or damaged: delete {path.with_suffix('.json')} and run "
            "megatron_zb.distill with this --save-library again"
        ) from error
    return layer

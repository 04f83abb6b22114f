"""Checkpoints of a distillation: all candidates with their optimizers, for any distribution."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from megatron_zb.distill import weights
from megatron_zb.distill.place import Holders
from megatron_zb.distill.schedule.distribution import Distribution
from megatron_zb.distill.stage import StageBlocks
from megatron_zb.distill.student import BlockShape
from megatron_zb.distill.student_block import StudentBlock
from megatron_zb.errors import UsageError
from megatron_zb.job import data_contents
from megatron_zb.parsing import flag_of
from megatron_zb.train.checkpoint import read, write
from megatron_zb.train.checkpoint_contents import check_contents
from megatron_zb.train.checkpoint_directory import latest_checkpoint

Library = Sequence[Sequence[BlockShape]]

# A resumed run with another of these would be another run.
_SAME = ("num_layers", "hidden_size", "seq_length", "global_batch_size", "loss", "bf16", "seed")


def save(
    args: argparse.Namespace,
    library: Library,
    distribution: Distribution,
    stage_blocks: StageBlocks,
    step: int,
) -> None:
    """Write a checkpoint after `step` steps; collective over all ranks.

    Raises:
        UsageError: the directory cannot be written.
    """
    state: dict[str, Any] = _request(stage_blocks)
    state["step"] = step
    state["distribution"] = distribution.spec
    state["library"] = _described(library)
    state[data_contents.RECORD] = getattr(args, data_contents.RECORD)
    state["settings"] = {name: getattr(args, name) for name in _SAME}
    write(Path(args.save), step, state, {})


def stored_distribution(args: argparse.Namespace, library: Library) -> tuple[Path, str]:
    """Find the latest checkpoint in --load, and its distribution; needs no process group.

    Raises:
        UsageError: there is none, it is damaged, or it is of another run.
    """
    _, path = latest_checkpoint(Path(args.load))
    check_contents(path, "--load")
    common = read(path, lambda: dist_checkpointing.load_common_state_dict(str(path)))
    if "library" not in common or "settings" not in common:
        raise UsageError(
            f"--load: {path} is no checkpoint of a distillation: give the directory that was given "
            "to --save of megatron_zb.distill"
        )
    if common["library"] != _described(library):
        raise UsageError(
            f"--load: {path} was written with student blocks of other shapes: give the "
            "--student-config that it was begun with"
        )
    for name, value in common["settings"].items():
        if getattr(args, name) != value:
            flag = flag_of(name)
            raise UsageError(
                f"--load: {path} was written with {flag} {value}, this run has "
                f"{getattr(args, name)}; they must be the same"
            )
    if not args.pipeline_allow_other_data:
        mine = getattr(args, data_contents.RECORD)
        data_contents.check_resume(common.get(data_contents.RECORD), mine, str(path))
    return path, common["distribution"]


def load(path: Path, stage_blocks: StageBlocks) -> int:
    """Load this rank's candidates; return the number of steps done. Collective over all ranks.

    Raises:
        UsageError: a file is missing or damaged.
    """
    request = _request(stage_blocks)
    state = read(path, lambda: dist_checkpointing.load(request, str(path)))
    step: int = state["step"]
    for student_block in stage_blocks.all_student_blocks():
        name = _name(student_block)
        weights.fill(student_block.layer, state[name]["layer"], f"{name}.")
        student_block.optimizer.resume(state[name]["optimizer"], step)
    return step


def _request(stage_blocks: StageBlocks) -> dict[str, Any]:
    copies = stage_blocks.place.copies
    return {
        _name(student_block): _state(student_block, copies)
        for student_block in stage_blocks.all_student_blocks()
    }


def _state(student_block: StudentBlock, copies: Holders) -> dict[str, Any]:
    name = _name(student_block)
    layer = weights.module_state(student_block.layer, f"{name}.", copies)
    optimizer = {}
    for key, tensor in student_block.optimizer.state().items():
        parameter = layer[f"{name}.{key.partition('.')[2]}"]
        optimizer[key] = weights.state_like(parameter, f"{name}.optimizer.{key}", tensor)
    return {"layer": layer, "optimizer": optimizer}


def _name(student_block: StudentBlock) -> str:
    return f"students.{student_block.block}.{student_block.shape.name}"


def _described(library: Library) -> list[list[dict[str, Any]]]:
    """Return the shapes as mappings, without the learning rates, which a resumed run may change."""
    return [
        [{k: v for k, v in asdict(shape).items() if k != "learning_rate"} for shape in candidates]
        for candidates in library
    ]

"""The files of a library of blocks: for each candidate, its weights and a record of what it is.

DIR/block3/half.pt has the weights and DIR/block3/half.json the record, which is written last: a
candidate is finished if it has one. DIR/library.json lists them all. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from megatron_zb import files
from megatron_zb.distill.student import AttentionKind, BlockShape, MlpKind
from megatron_zb.errors import UsageError
from megatron_zb.job import data_contents
from megatron_zb.measured import config
from megatron_zb.measured.config import Section, size
from megatron_zb.parsing import flag_of

TEACHER = "teacher"
"""The name of the teacher's own block among the candidates."""

# What decides how well a candidate learns, and how it is scored.
_SAME = (
    "teacher_load",
    "num_layers",
    "hidden_size",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "lr",
    "loss",
    "bf16",
    "seed",
    "eval_iters",
)


class Entry(Section):
    """One candidate of one block."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,40}$", description="its name", examples=["half"])
    attention: AttentionKind = Field(description="its kind", examples=["attention"])
    num_query_groups: int = size("heads of keys and values", 2)
    mlp: MlpKind = Field(description="its kind", examples=["mlp"])
    ffn_hidden_size: int = size("inner size", 256)
    num_experts: int = Field(0, ge=0, le=10**6, description="of an MLP", examples=[8])
    score: float = Field(ge=0, description="relative error on held-out text", examples=[0.01])
    parameters: int = Field(ge=0, le=10**15, description="number of weights", examples=[163840])
    kv_cache_bytes: int = Field(
        ge=0, le=10**15, description="keys and values of a token", examples=[512]
    )

    @property
    def shape(self) -> BlockShape:
        sizes = self.model_dump(exclude={"score", "parameters", "kv_cache_bytes"})
        return BlockShape(**sizes, learning_rate=None)


class LibraryFile(Section):
    """All candidates of a library, and the teacher's blocks."""

    teacher: str = Field(description="as given to --teacher-load", examples=["runs/teacher"])
    bf16: bool = Field(description="whether weights are in bf16", examples=[False])
    experts_per_token: int = Field(0, ge=0, le=10**6, description="by the router", examples=[2])
    shared_expert_size: int = Field(0, ge=0, le=10**8, description="their width", examples=[64])
    blocks: list[list[Entry]] = Field(min_length=1, description="of each block", examples=["[[]]"])

    @model_validator(mode="after")
    def _has_teachers_blocks(self) -> LibraryFile:
        for block, candidates in enumerate(self.blocks):
            if not candidates or candidates[0].name != TEACHER:
                raise ValueError(f"block {block} does not begin with the {TEACHER}'s own: add it")
        return self


class CandidateRecord(Section):
    """One finished candidate, and how it was made."""

    candidate: Entry
    made_with: dict[str, Any] = Field(description="flags", examples=["{}"])
    data: dict[str, Any] = Field(description="the data's contents", examples=["{}"])


def read_library(folder: Path) -> LibraryFile:
    """Read library.json of a folder.

    Raises:
        UsageError: it is missing or wrong.
    """
    return config.read(folder / "library.json", LibraryFile)


def weights_path(folder: Path, block: int, name: str) -> Path:
    """Return the file of a candidate's weights."""
    return folder / f"block{block}" / f"{name}.pt"


def record(args: argparse.Namespace, entry: Entry, shape: BlockShape) -> CandidateRecord:
    """Return the record of a candidate that this run has trained."""
    made = made_with(args, shape)
    return CandidateRecord(
        candidate=entry, made_with=made, data=getattr(args, data_contents.RECORD)
    )


def made_with(args: argparse.Namespace, shape: BlockShape) -> dict[str, Any]:
    """Return what decides the weights of a candidate, besides the data."""
    return asdict(shape) | {name: getattr(args, name) for name in _SAME}


def finished(
    args: argparse.Namespace, library: Sequence[Sequence[BlockShape]]
) -> dict[tuple[int, str], Entry]:
    """Return the finished candidates of this run's library by block and name.

    Raises:
        UsageError: a record is damaged, or of another run.
    """
    found = {}
    for block, candidates in enumerate(library):
        for shape in candidates:
            path = weights_path(Path(args.save_library), block, shape.name).with_suffix(".json")
            if path.exists():
                stored = config.read(path, CandidateRecord)
                _check_same(args, stored, made_with(args, shape), path)
                found[block, shape.name] = stored.candidate
    return found


def _check_same(
    args: argparse.Namespace, stored: CandidateRecord, mine: Mapping[str, Any], path: Path
) -> None:
    for name, value in mine.items():
        if stored.made_with.get(name) != value:
            raise UsageError(
                f"--save-library: {path} was made with {flag_of(name)} "
                f"{stored.made_with.get(name)}, this run has {value}: give what it was made with, "
                "or another directory"
            )
    if not args.pipeline_allow_other_data:
        data_contents.check_resume(stored.data, getattr(args, data_contents.RECORD), str(path))


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON; readers see the old file or the new one.

    Raises:
        UsageError: it cannot be written.
    """
    files.write_text(path, json.dumps(content, indent=1) + "\n")

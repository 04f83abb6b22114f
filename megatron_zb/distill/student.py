"""Shapes of student blocks, and their files, ``configs/students/*.yaml``. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from megatron_zb.errors import UsageError
from megatron_zb.measured.config import Section, optional_size

AttentionKind = Literal["attention", "linear", "no_op"]
MlpKind = Literal["mlp", "linear", "no_op"]
_MOST_NODES = 512
"""The solver takes seconds for them; the candidates of larger libraries are placed in groups."""


@dataclass(frozen=True)
class TeacherShape:
    """Sizes of a teacher, in elements."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    has_latent_attention: bool = False
    expert_blocks: frozenset[int] = frozenset()
    """Blocks, from 0, whose MLP is one of experts."""
    expert_ffn_hidden_size: int = 0
    """Width of each expert."""
    num_experts: int = 0
    """Of a block that has experts, without shared ones."""
    head_size: int = 0
    """Of a head of attention, but for latent attention."""

    def width_of(self, block: int) -> int:
        """Return the width of a block's MLP, or of each of its experts."""
        has_experts = block in self.expert_blocks
        return self.expert_ffn_hidden_size if has_experts else self.ffn_hidden_size

    def experts_of(self, block: int) -> int:
        """Return the number of a block's experts, 0 if its MLP is not one of experts."""
        return self.num_experts if block in self.expert_blocks else 0


@dataclass(frozen=True)
class BlockShape:
    """The shape of one candidate for one block; width and heads are the teacher's."""

    name: str
    attention: AttentionKind
    num_query_groups: int
    """Number of heads of keys and values; the teacher's where there is no attention."""
    mlp: MlpKind
    ffn_hidden_size: int
    """Width of the MLP, or of each expert; the teacher's where there is no MLP."""
    learning_rate: float | None
    """Peak learning rate; None for the run's."""
    num_experts: int = 0
    """Experts of the MLP, 0 if it has none; the teacher's where there is no MLP."""

    @property
    def is_layer(self) -> bool:
        """Whether the block has attention and an MLP, as every layer of a GPTModel has."""
        return self.attention == "attention" and self.mlp == "mlp"


Library = Sequence[Sequence[BlockShape]]
"""Candidates of every block."""


class CandidateNode(NamedTuple):
    """Smallest unit of a stage: one candidate of a block, or several of a large library."""

    block: int
    shapes: tuple[BlockShape, ...]

    @property
    def first(self) -> str:
        """Name of the first candidate, such as ``3.half`` of block 3."""
        return f"{self.block}.{self.shapes[0].name}"

    @property
    def last(self) -> str:
        return f"{self.block}.{self.shapes[-1].name}"


def nodes_of(library: Library) -> list[CandidateNode]:
    """Return the candidates in the order in which they are distributed."""
    each = -(-sum(map(len, library)) // _MOST_NODES)
    return [
        CandidateNode(block, tuple(candidates[first : first + each]))
        for block, candidates in enumerate(library)
        for first in range(0, len(candidates), each)
    ]


class Attention(Section):
    """The replacement of a block's attention."""

    kind: AttentionKind = Field(
        "attention", description="attention, linear or no_op", examples=["linear"]
    )
    query_groups: int | None = optional_size("heads of keys and values", 2)

    @model_validator(mode="after")
    def _has_heads(self) -> Attention:
        if self.query_groups is not None and self.kind != "attention":
            raise ValueError(
                f"query_groups is for kind: attention, not for kind: {self.kind}; leave it out"
            )
        return self


class Mlp(Section):
    """The replacement of a block's MLP."""

    kind: MlpKind = Field("mlp", description="mlp, linear or no_op", examples=["linear"])
    ffn_hidden_size: int | None = optional_size("inner size", 256)
    ffn_fraction: float | None = Field(
        None, gt=0, le=1, description="inner size as a part of the teacher's", examples=[0.5]
    )
    experts: int | None = optional_size("experts that are kept", 4)

    @model_validator(mode="after")
    def _has_one_size(self) -> Mlp:
        sizes = ("ffn_hidden_size", "ffn_fraction", "experts")
        given = [name for name in sizes if getattr(self, name) is not None]
        if given and self.kind != "mlp":
            raise ValueError(
                f"{given[0]} is for kind: mlp, not for kind: {self.kind}; leave it out"
            )
        if given[:2] == list(sizes[:2]):
            raise ValueError("ffn_hidden_size and ffn_fraction say the same: leave one of them out")
        return self


class Candidate(Section):
    """One candidate for a block; what is left out is as in the teacher."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_-]{1,40}$", description="letters, digits, _ and -", examples=["half"]
    )
    attention: Attention = Field(
        Attention(kind="attention", query_groups=None), description="in place of the attention"
    )
    mlp: Mlp = Field(
        Mlp(kind="mlp", ffn_hidden_size=None, ffn_fraction=None, experts=None),
        description="in place of the MLP",
    )
    learning_rate: float | None = Field(
        None, gt=0, le=1e3, description="highest one, if not the run's", examples=[0.001]
    )


def _candidates(required: bool) -> Any:
    return Field(
        *(() if required else (None,)),
        min_length=1,
        max_length=64,
        description="one for a student, several for a library of blocks",
        examples=["[{name: half, mlp: {ffn_fraction: 0.5}}]"],
    )


class Exceptional(Section):
    """Blocks with candidates of their own."""

    blocks: list[int] = Field(
        min_length=1, max_length=10_000, description="numbers from 0", examples=["[0, 7]"]
    )
    candidates: list[Candidate] = _candidates(required=True)


class StudentConfig(Section):
    """A student with as many blocks as its teacher."""

    name: str = Field(min_length=1, max_length=80, description="as shown", examples=["Half MLPs"])
    candidates: list[Candidate] = _candidates(required=True)
    exceptions: list[Exceptional] = Field(
        [], max_length=10_000, description="blocks that are built in another way"
    )

    @model_validator(mode="after")
    def _named_once(self) -> StudentConfig:
        for candidates in (self.candidates, *(e.candidates for e in self.exceptions)):
            names = [candidate.name for candidate in candidates]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"two candidates are called {twice}: give each its own name")
        blocks = [block for exception in self.exceptions for block in exception.blocks]
        repeated = next((block for block in blocks if blocks.count(block) > 1), None)
        if repeated is not None:
            raise ValueError(f"exceptions name block {repeated} twice: name it once")
        return self


def library(student: StudentConfig, teacher: TeacherShape) -> tuple[tuple[BlockShape, ...], ...]:
    """Return the candidates of every block, in the order of the blocks.

    Raises:
        UsageError: a block does not fit the teacher.
    """
    candidates = dict.fromkeys(range(teacher.num_layers), student.candidates)
    for exception in student.exceptions:
        for block in exception.blocks:
            if block not in candidates:
                raise UsageError(
                    f"{student.name}: exceptions name block {block}, but the teacher has blocks 0 "
                    f"to {teacher.num_layers - 1}: give one of them"
                )
            candidates[block] = exception.candidates
    return tuple(tuple(shape_of(c, teacher, b) for c in candidates[b]) for b in sorted(candidates))


def shape_of(candidate: Candidate, teacher: TeacherShape, block: int) -> BlockShape:
    """Return the shape of a candidate for a block.

    Raises:
        UsageError: it does not fit the teacher.
    """
    _check_replaceable(candidate, teacher, block)
    return BlockShape(
        name=candidate.name,
        attention=candidate.attention.kind,
        num_query_groups=_query_groups(candidate, teacher),
        mlp=candidate.mlp.kind,
        ffn_hidden_size=_ffn_hidden_size(candidate, teacher.width_of(block)),
        learning_rate=candidate.learning_rate,
        num_experts=_num_experts(candidate, teacher.experts_of(block), block),
    )


def _check_replaceable(candidate: Candidate, teacher: TeacherShape, block: int) -> None:
    """Check that a block has the weights that a candidate is made of.

    Raises:
        UsageError: it has not.
    """
    attention, mlp = candidate.attention, candidate.mlp
    if teacher.has_latent_attention and (attention.kind == "linear" or attention.query_groups):
        raise UsageError(
            f"candidate {candidate.name}: the teacher's latent attention has no heads of keys and "
            "values to average or to multiply: leave attention out, or give kind: no_op"
        )
    if block in teacher.expert_blocks and mlp.kind == "linear":
        raise UsageError(
            f"candidate {candidate.name}: block {block} of the teacher has experts, which no "
            "product of matrices replaces: give mlp: {kind: no_op}, or narrower experts"
        )


def _query_groups(candidate: Candidate, teacher: TeacherShape) -> int:
    groups = candidate.attention.query_groups or teacher.num_query_groups
    if teacher.num_query_groups % groups:
        possible = [n for n in range(1, groups) if teacher.num_query_groups % n == 0]
        raise UsageError(
            f"candidate {candidate.name}: query_groups {groups} does not divide the teacher's "
            f"{teacher.num_query_groups}, whose heads are averaged to start from: give, for "
            f"example, query_groups: {possible[-1]}"
        )
    return groups


def _num_experts(candidate: Candidate, whole: int, block: int) -> int:
    experts = candidate.mlp.experts
    if experts is None:
        return whole
    if experts > whole:
        has = f"the teacher has {whole} there: give fewer" if whole else "has none: leave it out"
        raise UsageError(f"candidate {candidate.name}: experts {experts} of block {block}, {has}")
    return experts


def _ffn_hidden_size(candidate: Candidate, whole: int) -> int:
    mlp = candidate.mlp
    size = mlp.ffn_hidden_size or whole
    if mlp.ffn_fraction is not None:
        size = max(1, round(mlp.ffn_fraction * whole))
    if size > whole:
        raise UsageError(
            f"candidate {candidate.name}: ffn_hidden_size {size} is more than the teacher's "
            f"{whole}, of which a part is kept: give, for example, ffn_hidden_size: "
            f"{max(1, whole // 2)}"
        )
    return size

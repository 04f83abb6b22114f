"""Placement of stages on logical pipeline ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import lcm

from megatron_zb.errors import UsageError


@dataclass(frozen=True)
class Placement:
    """Stages 0 to S-1 of the model on pipeline ranks 0 to p-1, ``chunks`` stages on each rank.

    ``rank_of[s]`` is the logical rank of stage s. Chunk c of a rank is its c-th stage in model
    order, so a chunk index always rises along the model.

    With several ``copies`` of the model, the stages of the first one come first: a microbatch
    passes one of the copies.
    """

    name: str
    pipeline_size: int
    rank_of: tuple[int, ...]
    copies: int = field(default=1, kw_only=True)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def stages_of_model(self) -> int:
        """The number of stages of one copy of the model."""
        return self.num_stages // self.copies

    def stage_of_model(self, stage: int) -> int:
        """Return the place of a stage in its copy of the model."""
        return stage % self.stages_of_model

    @cached_property
    def of_one_copy(self) -> Placement:
        """The placement of the first copy of the model."""
        if self.copies == 1:
            return self
        return replace(self, rank_of=self.rank_of[: self.stages_of_model], copies=1)

    @property
    def of_trained(self) -> Placement:
        """The placement of the trained model, where a second one may lie beside it."""
        return self

    @property
    def chunks(self) -> int:
        return self.num_stages // self.pipeline_size

    @property
    def chunks_of_copy(self) -> int:
        """Stages of one copy of the model on each rank: those that a microbatch passes there."""
        return self.chunks // self.copies

    @property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each copy of the model, in the order of F."""
        length = self.stages_of_model
        return tuple(tuple(range(i * length, (i + 1) * length)) for i in range(self.copies))

    @property
    def mirrored(self) -> bool:
        """Whether it runs on Megatron's pipeline ranks in mirror image.

        Megatron reports the loss from its last pipeline rank, and a V ends on logical rank 0.
        Several copies end on both the first and the last rank.
        """
        return self.copies == 1 and self.rank_of[-1] != self.pipeline_size - 1

    def pipeline_rank(self, rank: int) -> int:
        """Return Megatron's pipeline rank of a logical rank, or the logical one of Megatron's."""
        return self.pipeline_size - 1 - rank if self.mirrored else rank

    @property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage: one, but for :class:`GroupPlacement`."""
        return tuple((rank,) for rank in self.rank_of)

    def rank_at(self, stage: int, microbatch: int) -> int:
        """Return the rank on which a microbatch passes a stage."""
        return self.rank_of[stage]

    @property
    def peers(self) -> set[tuple[int, int]]:
        """Pairs of ranks that messages travel between, in either direction."""
        links = (pairwise(self.rank_of[s] for s in way) for way in self.ways)
        return {(a, b) for of_way in links for a, b in of_way if a != b}

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each rank, in model order."""
        held: list[list[int]] = [[] for _ in range(self.pipeline_size)]
        for stage, rank in enumerate(self.rank_of):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    @cached_property
    def _chunk_of(self) -> tuple[int, ...]:
        return tuple(self.stages_of[rank].index(s) for s, rank in enumerate(self.rank_of))

    def chunk_of(self, stage: int) -> int:
        """Return the chunk index of a stage on its rank."""
        return self._chunk_of[stage]


@dataclass(frozen=True)
class GroupPlacement(Placement):
    """Stage s on the ranks ``groups[s]``, each of which takes whole microbatches in turn.

    Microbatch j passes stage s on rank ``groups[s][j % len(groups[s])]``, so that every activation
    goes from one rank to one rank whatever the sizes of the groups. A rank has one stage;
    ``rank_of`` names the first rank of each.
    """

    groups: tuple[tuple[int, ...], ...]

    @property
    def chunks(self) -> int:
        return 1

    @property
    def mirrored(self) -> bool:
        return False

    @property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        return self.groups

    def rank_at(self, stage: int, microbatch: int) -> int:
        """Return the rank on which a microbatch passes a stage."""
        group = self.groups[stage]
        return group[microbatch % len(group)]

    @property
    def peers(self) -> set[tuple[int, int]]:
        """Relays between neighbouring stages, and from every rank to those of the first stage."""
        relays = {
            (a[j % len(a)], b[j % len(b)])
            for a, b in pairwise(self.groups)
            for j in range(lcm(len(a), len(b)))
        }
        ranks = range(self.pipeline_size)
        return relays | {(first, rank) for first in self.groups[0] for rank in ranks} - {
            (first, first) for first in ranks
        }

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The one stage of each rank, as a tuple."""
        stage_of = {rank: stage for stage, group in enumerate(self.groups) for rank in group}
        return tuple((stage_of[rank],) for rank in range(self.pipeline_size))

    def chunk_of(self, stage: int) -> int:
        """Return 0: a rank has one stage."""
        return 0


def grouped(groups: Sequence[Sequence[int]]) -> GroupPlacement:
    """Return the placement of stage s on the ranks ``groups[s]``.

    Together the groups are ranks 0 to p-1, in any order.

    Raises:
        UsageError: a group is empty, or a rank is in two groups or in none.
    """
    ranks = sorted(rank for group in groups for rank in group)
    if not groups or not all(groups) or ranks != list(range(len(ranks))):
        raise UsageError(
            f"the groups of ranks {[list(group) for group in groups]} are no placement: "
            "give every stage one rank or more, and each of the ranks 0 to p-1 to one stage"
        )
    held = tuple(tuple(group) for group in groups)
    return GroupPlacement("grouped", len(ranks), tuple(group[0] for group in held), held)


def looped(pipeline_size: int, chunks: int = 1) -> Placement:
    """Return the placement of stage s on rank s mod p: 1F1B (one chunk) and interleaved 1F1B."""
    _check(pipeline_size, chunks)
    return Placement("looped", pipeline_size, tuple(range(pipeline_size)) * chunks)


def wave(pipeline_size: int, chunks: int) -> Placement:
    """Return a zig-zag: every odd chunk runs back through the ranks (Hanayo, arXiv 2308.15762)."""
    _check(pipeline_size, chunks)
    there = tuple(range(pipeline_size))
    ranks = tuple(r for c in range(chunks) for r in (there if c % 2 == 0 else there[::-1]))
    return Placement("v" if chunks == 2 else "wave", pipeline_size, ranks)


def v_shape(pipeline_size: int) -> Placement:
    """Return the placement of stages i and 2p-1-i on rank i (arXiv 2405.15362, section 4)."""
    return wave(pipeline_size, 2)


def placement_of(pipeline_size: int, rank_of: tuple[int, ...]) -> Placement:
    """Return the known placement with these ranks of stages, or a custom one."""
    chunks = len(rank_of) // pipeline_size
    for known in (looped(pipeline_size, chunks), wave(pipeline_size, chunks)):
        if known.rank_of == rank_of:
            return known
    return Placement("custom", pipeline_size, rank_of)


def _check(pipeline_size: int, chunks: int) -> None:
    if pipeline_size < 2:
        raise UsageError(
            f"pipeline size {pipeline_size} has nothing to schedule: "
            "pipeline schedules need at least 2 pipeline ranks"
        )
    if chunks < 1:
        raise UsageError(f"{chunks} model chunks per rank were asked for: give 1 or more")

"""Which logical pipeline rank holds which stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_zb.errors import UsageError


@dataclass(frozen=True)
class Placement:
    """Stages 0 to S-1 of the model on pipeline ranks 0 to p-1, ``chunks`` stages on each rank.

    ``rank_of[s]`` is the logical rank of stage s. Chunk c of a rank is its c-th stage in model
    order, so a chunk index always rises along the model.
    """

    name: str
    pipeline_size: int
    rank_of: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def chunks(self) -> int:
        return self.num_stages // self.pipeline_size

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in model order."""
        held: list[list[int]] = [[] for _ in range(self.pipeline_size)]
        for stage, rank in enumerate(self.rank_of):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    @cached_property
    def _chunk_of(self) -> tuple[int, ...]:
        return tuple(self.stages_of[rank].index(s) for s, rank in enumerate(self.rank_of))

    def chunk_of(self, stage: int) -> int:
        """The chunk index of a stage on its rank."""
        return self._chunk_of[stage]


def looped(pipeline_size: int, chunks: int = 1) -> Placement:
    """Stage s on rank s mod p: 1F1B (one chunk) and interleaved 1F1B."""
    _check(pipeline_size, chunks)
    return Placement("looped", pipeline_size, tuple(range(pipeline_size)) * chunks)


def wave(pipeline_size: int, chunks: int) -> Placement:
    """Zig-zag: every odd chunk runs back through the ranks (Hanayo, arXiv 2308.15762)."""
    _check(pipeline_size, chunks)
    there = tuple(range(pipeline_size))
    ranks = tuple(r for c in range(chunks) for r in (there if c % 2 == 0 else there[::-1]))
    return Placement("v" if chunks == 2 else "wave", pipeline_size, ranks)


def v_shape(pipeline_size: int) -> Placement:
    """Stages i and 2p-1-i on rank i (arXiv 2405.15362, section 4)."""
    return wave(pipeline_size, 2)


def _check(pipeline_size: int, chunks: int) -> None:
    if pipeline_size < 2:
        raise UsageError(
            f"pipeline size {pipeline_size} has nothing to schedule: "
            "pipeline schedules need at least 2 pipeline ranks"
        )
    if chunks < 1:
        raise UsageError(f"{chunks} model chunks per rank were asked for: give 1 or more")

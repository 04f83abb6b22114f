"""Costs of a library of blocks in which every candidate may be on another rank.

The distribution is one of candidates, those of a block next to one another: a stage that begins or
ends amid a block's candidates runs the teacher's block for its own, on the same input.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.distill.schedule.distribution import BlockCosts


@dataclass(frozen=True)
class CandidateCosts(BlockCosts):
    """Costs with an entry for every candidate, as in :class:`BlockCosts`.

    ``teacher`` is the forward of the candidate's block, and ``memory`` is the candidate's share.
    """

    block_of: tuple[int, ...] = ()
    """The teacher's block of each candidate, in ascending order."""
    teacher_memory: float = 0.0
    """Memory of one block of the teacher."""

    def _teacher(self, blocks: range) -> float:
        taught = sum(self.teacher[c] for c in self._first_of_blocks(blocks))
        return taught + (0.0 if blocks.stop == self.num_blocks else self.relay[blocks.stop - 1])

    def held(self, blocks: range) -> float:
        """Return the memory of a stage: its blocks of the teacher once, and its candidates."""
        return super().held(blocks) + self.teacher_memory * len(self._first_of_blocks(blocks))

    def _first_of_blocks(self, candidates: range) -> list[int]:
        """Return the first of each block's candidates in a stage."""
        block = self.block_of
        return [c for c in candidates if c == candidates.start or block[c] != block[c - 1]]

"""The lines that a job prints at its start: its schedule, its ranks and what to expect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_zb.measured.balance import TRANSFER, Balance
from megatron_zb.megatron_core.placement import StageLayout
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.simulator import simulate


@dataclass(frozen=True)
class StartReport:
    """A schedule on the ranks of a job, in words."""

    schedule: Schedule
    costs: Costs
    layout: StageLayout
    bubble_rate: float

    def text(self, balance: Balance | None, more: Sequence[str]) -> str:
        """Return all lines.

        Args:
            balance: the balance by which layers were placed, if any.
            more: lines to add at the end.
        """
        placement = self.schedule.placement
        head = (
            f"pipeline schedule {self.schedule.name}: {placement.pipeline_size} ranks x "
            f"{placement.chunks} chunks, {self.schedule.num_microbatches} microbatches, expected "
            f"bubble {100 * self.bubble_rate:.1f} % at {self._known_costs()}"
        )
        lines = [*self._ranks(), *([str(balance)] if balance else ()), *self._states(), *more]
        return "\n".join([head, *(f"  {line}" for line in lines)])

    def _ranks(self) -> Iterator[str]:
        placement, physical = self.schedule.placement, self.layout.physical
        p, timeline = placement.pipeline_size, simulate(self.schedule, self.costs)
        for pp_rank in range(p):
            held = " + ".join(
                self._stage(physical.stage(pp_rank, chunk)) for chunk in range(placement.chunks)
            )
            peak = timeline.peak_activation[physical.logical(pp_rank)]
            yield (
                f"pipeline rank {pp_rank}: {held}; activations of at most {peak:g} microbatches "
                f"({peak / p:.2f} of 1F1B's first rank)"
            )
        if self.costs.vocabulary is not None:
            yield "every pipeline rank: its rows of the embedding and the output layer"

    def _stage(self, stage: int) -> str:
        letters = self.layout.letters
        first = "".join(letters[:stage]).count("t") + 1
        count = letters[stage].count("t")
        parts = [f"layers {first}-{first + count - 1}"] if count else []
        if self.costs.vocabulary is None:
            parts = ["embedding"] * ("E" in letters[stage]) + parts
            parts += ["output layer"] * ("L" in letters[stage])
        return f"stage {stage} ({', '.join(parts) or 'empty'})"

    def _states(self) -> Iterator[str]:
        """Describe the pairs of passes, and the recomputed and offloaded activations."""
        schedule, costs = self.schedule, self.costs
        forwards = schedule.num_microbatches * schedule.placement.num_stages
        if costs.forward_comm:
            yield f"{len(schedule.pairs)} of {forwards} forwards run in one pass with a backward"
        if costs.recompute or schedule.dropped:
            yield (
                f"{len(schedule.dropped)} of {forwards} forwards keep their input alone; their "
                "activations are computed again"
            )
        if costs.copy or schedule.moved:
            line = f"{len(schedule.moved)} of {forwards} activations move to the host and back"
            passes = sum(map(sum, (costs.forward, costs.backward, costs.weight)))
            share = f"; a copy counts as {sum(costs.copy) / passes:.0%} of its passes"
            yield line + (share if costs.copy else "")

    def _known_costs(self) -> str:
        costs = self.costs
        known = "equal costs" if len(set(costs.forward)) == 1 else "costs counted from sizes"
        if self.schedule.name == "auto":
            known += f" and transfers of {TRANSFER:.0%} of a forward"
        if costs.forward_comm:
            share = sum(costs.forward_comm) / sum(costs.forward)
            known += f" and an exchange between experts of {share:.0%} of a forward"
        return known

"""Whether an output layer is cut along the vocabulary, where the user leaves the choice."""

from __future__ import annotations

from megatron_zb.measured.balance import Ends, costs_beside
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.schedules import simulate

WHOLE = "the output layer stays whole"


def faster(whole: PipelineAdapter, cut: PipelineAdapter, ends: Ends) -> PipelineAdapter:
    """Return the adapter whose schedule is faster in the simulator; it says by how much.

    Args:
        whole: with the output layer on the last stage.
        cut: with the output layer cut along the vocabulary over all pipeline ranks.
        ends: what the embedding and the output layer take.
    """
    seconds = [_seconds(whole, ends, cut=False), _seconds(cut, ends, cut=True)]
    less = 1 - seconds[1] / seconds[0]
    if less > 0:
        cut.say(
            f"the output layer is cut along the vocabulary: {less:.1%} less time than whole, "
            f"simulated for {ends}"
        )
        return cut
    whole.say(f"{WHOLE}: cut, a step would take {-less:.1%} longer, simulated for {ends}")
    return whole


def _seconds(adapter: PipelineAdapter, ends: Ends, *, cut: bool) -> float:
    schedule = adapter.schedule
    layers = tuple(letters.count("t") for letters in adapter.layer_layout.letters)
    costs = costs_beside(schedule.placement, layers, ends, cut=cut)
    return simulate(schedule, costs).makespan

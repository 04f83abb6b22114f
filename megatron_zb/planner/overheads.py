"""Costs of a schedule on a GPU that the predicted seconds do not show.

- A receive is a kernel that waits for its message beside the computation and occupies thread blocks
  meanwhile. How much that slows the computation down has not been measured, so it is in no time.
- Megatron's backward hides the reduce-scatter of tensor parallelism in its input gradient behind
  the weight gradient. A split backward exposes it in B. The seconds of all rows, Megatron's too,
  include it as exposed, so the lead of a split schedule may be smaller by its share.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zb.planner.prediction import Prediction
from megatron_zb.planner.work import Workload
from megatron_zb.schedules import catalog, lower
from megatron_zb.schedules.program.waiting_kernels import waiting_kernels


@dataclass(frozen=True)
class Overheads:
    """Overheads of one schedule of this package.

    Attributes:
        waiting: message kernels that wait on a rank while it computes, the mean over time and
            ranks.
        exposed: share of an iteration in which B waits for collectives of tensor parallelism that
            Megatron's own backward hides.
    """

    waiting: float
    exposed: float


def overheads(row: Prediction) -> Overheads | None:
    """Return the overheads of a row; None where Megatron itself runs it."""
    timeline = row.timeline
    if timeline is None or row.candidate.startswith("Megatron"):
        return None
    found = waiting_kernels(lower(timeline.schedule, timeline), timeline.costs)
    return Overheads(sum(rank.mean for rank in found) / len(found), _exposed(row))


def _exposed(row: Prediction) -> float:
    if not catalog.family(row.family).splits_backward:
        return 0.0
    seconds = sum(_hidden_by_weight_gradient(row.load, i) for i in range(row.load.model.layers))
    return row.num_microbatches * seconds / row.load.strategy.pipeline / row.seconds


def _hidden_by_weight_gradient(load: Workload, index: int) -> float:
    """Return the seconds of a layer's reduce-scatters in B that its W could hide."""
    return min(load.tensor_parallel(index) / 2, load.layer(index).weight)

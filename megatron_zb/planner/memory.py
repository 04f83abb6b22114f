"""Memory of the worst rank, part by part, from the passes that it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron_zb.planner.byte_counts import ActivationBytes
from megatron_zb.planner.stages import StageWorkload
from megatron_zb.schedules import Pass, PassKind, Schedule


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its peak; ``weight_queue`` is what W still needs after B."""

    rank: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    weight_queue: float
    logits: float
    messages: float
    snapshot: float
    reserved: float
    fragmentation: float

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the bytes of each part by name."""
        return {name: size for name, size in asdict(self).items() if name != "rank"}


def worst_rank(staged: StageWorkload, schedule: Schedule, *, snapshot: bool) -> RankMemory:
    """Return the memory of the rank that needs the most.

    ``snapshot`` keeps a copy of the optimizer's state, with which a step can be taken back.
    """
    ranks = range(staged.placement.pipeline_size)
    kept = staged.load.message() if staged.drops else 0.0
    peaks = [peak_of(schedule.ranks[r], staged.held, kept) for r in ranks]
    return max(
        (_of_rank(staged, r, *peaks[r], snapshot=snapshot) for r in ranks), key=lambda m: m.total
    )


def without_pipeline(staged: StageWorkload) -> RankMemory:
    """Return the memory of one rank that runs F and BW of each microbatch in turn."""
    passes = (
        *(Pass(PassKind.F, s, 0) for s in range(len(staged.held))),
        *(Pass(PassKind.BW, s, 0) for s in reversed(range(len(staged.held)))),
    )
    return _of_rank(staged, 0, *peak_of(passes, staged.held), snapshot=False)


def _of_rank(
    staged: StageWorkload, rank: int, activations: float, queue: float, *, snapshot: bool
) -> RankMemory:
    states, device = staged.states[rank], staged.load.device
    return RankMemory(
        rank=rank,
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=activations,
        weight_queue=queue,
        logits=staged.logits(rank),
        messages=staged.messages(rank),
        snapshot=states.optimizer if snapshot else 0.0,
        reserved=device.reserved_bytes - device.fragmentation_bytes,
        fragmentation=device.fragmentation_bytes,
    )


_HOLD_NOTHING = (PassKind.P, PassKind.E, PassKind.G)


def peak_of(
    passes: Sequence[Pass], held: Sequence[ActivationBytes], kept_input: float = 0.0
) -> tuple[float, float]:
    """Return the bytes of activations and the bytes waiting for W, when their sum is largest.

    A backward that recomputes holds its layer's activations while it runs. Shards of the output
    layer hold theirs from O to V. What R makes again holds ``kept_input`` bytes until then, and
    offloaded activations nothing from D to H.
    """
    live = queue = most = 0.0
    best = (0.0, 0.0)
    dropped = {(stage, microbatch) for kind, stage, microbatch in passes if kind is PassKind.R}
    for kind, stage, microbatch in passes:
        here = held[stage]
        if kind in _HOLD_NOTHING:
            continue
        if kind is PassKind.F and (stage, microbatch) in dropped:
            live += min(kept_input, here.activation)
        elif kind is PassKind.R:
            live += max(0.0, here.activation - kept_input)
        elif kind in (PassKind.F, PassKind.O, PassKind.H):
            live += here.activation
        elif kind in (PassKind.V, PassKind.D):
            live -= here.activation
        elif kind is PassKind.W:
            queue -= here.for_weight
        else:
            if live + here.in_backward + queue > most:
                most, best = live + here.in_backward + queue, (live + here.in_backward, queue)
            live -= here.activation
            if kind is PassKind.B:
                queue += here.for_weight
        if live + queue > most:
            most, best = live + queue, (live, queue)
    return best

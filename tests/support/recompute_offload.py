"""Orders in which some activations are recomputed, and some offloaded."""

from __future__ import annotations

import random
from dataclasses import replace

from megatron_zb.schedules import Schedule
from megatron_zb.schedules.kinds import Home
from megatron_zb.schedules.passes import Pass, PassKind

_BACKWARD = (PassKind.B, PassKind.BW)
_KINDS_OF = {
    "keep": (),
    "recompute": (PassKind.R,),
    "offload": (PassKind.D, PassKind.H),
}


def with_recompute_offload(
    schedule: Schedule, seed: int, recompute: float = 0.0, offload: float = 0.0
) -> Schedule:
    """The same order, with R, or D and H, of shares of the units anywhere between F and B.

    The last stage has them of slices alone.
    """
    rng = random.Random(seed)
    last, r = schedule.placement.num_stages - 1, schedule.rules.by_kind[PassKind.R]
    ranks = []
    for passes in schedule.ranks:
        line = list(passes)
        for p in passes:
            if p.kind is not PassKind.F or (p.stage == last and r.home is not Home.STAGES):
                continue
            at = rng.random()
            choice = (
                "recompute" if at < recompute else "offload" if at < recompute + offload else "keep"
            )
            _insert(line, p, _KINDS_OF[choice], rng)
        ranks.append(tuple(line))
    return replace(schedule, ranks=tuple(ranks)).validate()


def _insert(
    line: list[Pass], forward: Pass, kinds: tuple[PassKind, ...], rng: random.Random
) -> None:
    start = line.index(forward) + 1
    for kind in kinds:
        unit = (forward.stage, forward.microbatch)
        end = next(i for i, p in enumerate(line) if p[1:] == unit and p.kind in _BACKWARD)
        at = rng.randint(start, end)
        line.insert(at, Pass(kind, *unit))
        start = at + 1

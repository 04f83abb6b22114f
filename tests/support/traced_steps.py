"""A step of two ranks as it ran, and the profile that predicts it."""

from __future__ import annotations

from typing import Any

from megatron_zb import schedules
from megatron_zb.measured.profile import Profile
from megatron_zb.measured.trace import Trace, of_spans
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.search.place_w import split_all

P, M = 2, 4
SECONDS = {PassKind.F: 0.1, PassKind.B: 0.2, PassKind.W: 0.1}
LATE = 0.05  # seconds by which rank 1's third pass is longer than its median


def profile(schedule: str = "zb-h1") -> Profile:
    """The profile of zb-h1, or of a V."""
    stage = {
        "forward": 0.1,
        "backward": 0.2,
        "weight": 0.1,
        "activation": 100,
        "held_for_weight": 50,
    }
    model = {
        "layers": len(_STAGES[schedule]),
        "hidden_size": 32,
        "sequence_length": 16,
        "microbatch": 1,
        "tensor": 1,
        "context": 1,
    }
    return Profile.model_validate(
        {
            "version": 1,
            "device": "CPU",
            "schedule": schedule,
            "pipeline_size": P,
            "num_microbatches": M,
            "message": 8,
            "model": model,
            "stages": [{"rank": rank, "layers": of, **stage} for rank, of in _STAGES[schedule]],
            "links": [],
        }
    )


_STAGES = {
    "zb-h1": ((0, "Et"), (1, "tL")),
    "v-half": ((0, "Et"), (1, "t"), (1, "t"), (0, "tL")),
}


def ran(name: str = "zb-h1") -> Trace:
    """As predicted, but rank 1 is late in one pass and all that follows is later by so much."""
    schedule = split_all(schedules.build(name, pipeline_size=P, num_microbatches=M))
    timeline = schedules.simulate(schedule, profile(name).costs(schedule.placement))
    ranks: list[list[Any]] = []
    for rank, passes in enumerate(schedule.ranks):
        spans = []
        for number, (p, start, end) in enumerate(
            zip(passes, timeline.start[rank], timeline.end[rank], strict=True)
        ):
            later = LATE if rank == 1 and number > 2 else 0.0
            longer = LATE if rank == 1 and number == 2 else 0.0
            spans.append((p, 7 + start + later, 7 + end + later + longer))
        waits = [(None, 7.0, 7.0 + timeline.start[rank][0])] if rank else []
        ranks.append([*waits, *spans])
    return of_spans(ranks)

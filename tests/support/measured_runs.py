"""The profile of a run, as a V of two layers a stage would have measured it."""

from __future__ import annotations

from typing import Any

from megatron_zb.measured.profile import Profile
from megatron_zb.schedules.placement import v_shape

LAYER = {"forward": 1.0, "backward": 1.2, "weight": 0.8}
HEAVY = 3.0  # layers that the output layer counts for
P, LAYERS = 4, 16


def profile(slow: dict[int, float] | None = None, output: float = HEAVY) -> Profile:
    """A V of two layers a stage, as a run would have measured it; ``slow`` multiplies ranks."""
    slowness = slow or {}
    placement = v_shape(P)
    last = placement.num_stages - 1
    stages: list[dict[str, Any]] = []
    for number, rank in enumerate(placement.rank_of):
        extra = output if number == last else 0.0
        seconds = {k: t * (2 + extra) * slowness.get(rank, 1.0) for k, t in LAYER.items()}
        letters = "E" * (number == 0) + "tt" + "L" * (number == last)
        held = {"activation": 200 + round(100 * extra), "held_for_weight": 100}
        stages.append({"rank": rank, "layers": letters, **seconds, **held})
    links = [
        {"source": a, "target": b, "seconds": 0.05}
        for a in range(P)
        for b in (a - 1, a + 1)
        if 0 <= b < P
    ]
    model = {
        "layers": LAYERS,
        "hidden_size": 64,
        "sequence_length": 32,
        "microbatch": 1,
        "tensor": 1,
        "context": 1,
    }
    return Profile.model_validate(
        {
            "version": 1,
            "device": "CPU",
            "schedule": "v-half",
            "pipeline_size": P,
            "num_microbatches": 8,
            "message": 4,
            "model": model,
            "stages": stages,
            "links": links,
        }
    )


SHARD = {"output": 0.5, "weight": 0.25, "lookup": 0.02, "gradient": 0.03, "held": 60}
LOSS = 0.04


def sharded_profile(slow: dict[int, float] | None = None) -> Profile:
    """The same with shards on all ranks, as measured in a run with vocabulary parallelism."""
    slowness = slow or {}
    shards: list[dict[str, Any]] = []
    for rank in range(P):
        seconds = {k: t * slowness.get(rank, 1.0) for k, t in SHARD.items() if k != "held"}
        shards.append({**seconds, "held": SHARD["held"]})
    host = dict.fromkeys(("output", "loss", "weight", "lookup", "gradient"), 0.0)
    cut = {"shards": shards, "loss": LOSS * slowness.get(0, 1.0), "host": host}
    values = profile(slow, output=0.0).model_dump()
    values["model"]["vocabulary"] = 4096
    return Profile.model_validate({**values, "vocabulary": cut})

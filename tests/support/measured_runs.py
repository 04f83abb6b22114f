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


HYBRID = "****" + "-" * 12
TIMES = 4.0
"""How many times as long as an MLP the attention layers of :data:`HYBRID` take."""


def hybrid_profile(output: float = 0.0, prediction: str = "") -> Profile:
    """The profile of a V whose layers are those of :data:`HYBRID`, two on each stage.

    Args:
        output: MLP layers that the output layer counts for.
        prediction: the layers of multi-token prediction in the pattern, which take no time.
    """
    mlp = {**LAYER, "whole": LAYER["backward"] + LAYER["weight"]}
    letters = {"*": {k: TIMES * t for k, t in mlp.items()}, "-": mlp}
    values = profile(output=0.0).model_dump()
    for number, stage in enumerate(values["stages"]):
        kinds = HYBRID[2 * number : 2 * number + 2]
        stage |= {k: sum(letters[kind][k] for kind in kinds) for k in mlp}
    last = values["stages"][-1]
    last |= {k: last[k] + output * t for k, t in mlp.items()}
    mean = sum(map(TIMES_OF.__getitem__, HYBRID)) / LAYERS
    nothing = dict.fromkeys(mlp, 0.0)
    parts = {
        "layer": {k: mean * t for k, t in mlp.items()},
        "letters": letters,
        "embedding": nothing,
        "output": {k: output * t for k, t in mlp.items()},
        "multi_token": nothing,
        "empty_pass": nothing,
    }
    if prediction:
        last["layers"] = last["layers"].replace("L", "mL")
    values["model"]["pattern"] = f"{HYBRID}/{prediction}" if prediction else HYBRID
    return Profile.model_validate({**values, "parts": parts})


TIMES_OF = {"*": TIMES, "-": 1.0}

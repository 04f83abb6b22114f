"""Memory of several adapters: the base and its activations once, whatever their number."""

from __future__ import annotations

import pytest
from adapter_optimizers import new_optimizer
from brief_searches import briefly
from gpt_cases import SEQUENCE, GPTCase, built, forward_backward, microbatches
from megatron.core.utils import get_model_config
from ranks import RankPools

from megatron_zb import schedules
from megatron_zb.lora.layers import LoRALayers, LoRAShape
from megatron_zb.lora.training import AdapterOptimizers
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.schedules.features.adapters import Adapters

RANKS, UNITS = 4, 16
MESSAGE = 4 * 2 * SEQUENCE * 32
"""Bytes of an activation between stages: one may arrive earlier, or later, by chance."""
CASE = GPTCase(wrapped=False, layers=8)


def taken(schedule: str, count: int) -> tuple[int, int, int]:
    """Peak of activations, and bytes of the base and of all adapters, on this rank."""
    m = UNITS // count
    adapters = Adapters.equal(count, microbatches=m)
    with briefly():
        order = schedules.build(schedule, pipeline_size=RANKS, adapters=adapters)
    with built(CASE, order, adapters.num_units, lambda: 0) as (pipeline, chunks):
        assert pipeline is not None
        shapes = {it.name: LoRAShape(4, 8.0, ("linear_proj",), 1) for it in adapters.each}
        layers = LoRALayers(chunks, shapes)
        each = {name: new_optimizer(layers, name, 0.0) for name in shapes}
        optimizers = AdapterOptimizers([layers], each, get_model_config(chunks[0]))
        part = pipeline.train_adapters(optimizers)
        weights = [w for chunk in chunks for w in chunk.parameters()]
        own = [w for it in each.values() for w in it.weights()]
        memory = ActivationMemory(exclude=[*weights, *own])
        pipeline.track(memory)
        data = [
            part.merged({name: iter(microbatches(CASE, m, i)) for i, name in enumerate(shapes)})
            for _ in chunks
        ]
        forward_backward(pipeline.forward_backward_func, chunks, data, adapters.num_units)
        base = sum(w.numel() * w.element_size() for w in weights)
        return memory.peak_bytes, base, sum(it.num_bytes for it in each.values())


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
def test_the_base_and_its_activations_are_there_once(ranks: RankPools, schedule: str) -> None:
    one, four, eight = (
        ranks(RANKS).run(taken, schedule=schedule, count=count) for count in (1, 4, 8)
    )
    for rank in range(RANKS):
        (peak, base, adapter), *others = (found[rank] for found in (one, four, eight))
        assert adapter > 0
        for count, (more, same_base, adapters) in zip((4, 8), others, strict=True):
            assert same_base == base
            assert adapters == count * adapter
            assert more <= peak + MESSAGE

"""Spans of OpenTelemetry: of passes and messages, in the groups that a job traces."""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType
from unittest import mock

import pytest
from gpt_cases import GPTCase, built, forward_backward, microbatches
from ranks import RankPools

M = 4
CASE = GPTCase()


def spans(schedule: str, groups: tuple[str, ...]) -> tuple[Counter[str], Counter[str]]:
    """Return how many spans of each name a step has made, and how many the program asks for.

    nemo-lens, which Megatron-LM asks for the groups, is on no package index: a module stands in.
    """
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    state = ModuleType("nemo.lens.state")
    state.is_span_group_enabled = groups.__contains__  # type: ignore[attr-defined]
    modules = {name: ModuleType(name) for name in ("nemo", "nemo.lens")}
    stand_in = mock.patch.dict(sys.modules, modules | {"nemo.lens.state": state})
    tracing = mock.patch.object(trace, "get_tracer", provider.get_tracer)
    with stand_in, tracing, built(CASE, schedule, M) as (adapter, chunks):
        assert adapter is not None
        data = [microbatches(CASE, M) for _ in chunks]
        forward_backward(adapter.forward_backward_func, chunks, data, M)
        rank = adapter.placed.physical.logical(_pipeline_rank())
        kinds = Counter(str(work.kind) for work in adapter.schedule.ranks[rank])
    found = exporter.get_finished_spans()
    assert all({"stage", "microbatch"} <= (span.attributes or {}).keys() for span in found)
    return Counter(span.name for span in found), kinds


def _pipeline_rank() -> int:
    from megatron.core import parallel_state

    rank: int = parallel_state.get_pipeline_model_parallel_rank()
    return rank


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half"])
def test_every_backward_has_a_span_with_megatrons_name(ranks: RankPools, schedule: str) -> None:
    for found, kinds in ranks(2).run(spans, schedule=schedule, groups=("microbatch",)):
        assert found == +Counter(
            {
                "megatron.microbatch.backward": kinds["BW"],
                "megatron.microbatch.backward_input": kinds["B"],
                "megatron.microbatch.backward_weight": kinds["W"],
            }
        )


def test_every_message_has_a_span_in_its_own_group(ranks: RankPools) -> None:
    (first, _), (last, _) = ranks(2).run(spans, schedule="zb-h1", groups=("communication",))
    assert first == {"megatron.p2p.recv_backward": M}
    assert last == {"megatron.p2p.recv_forward": M}


def test_without_the_groups_nothing_is_traced(ranks: RankPools) -> None:
    assert [found for found, _ in ranks(2).run(spans, schedule="zb-h1", groups=())] == [{}, {}]

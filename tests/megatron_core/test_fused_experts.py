"""Experts of operations that Transformer-Engine may fuse, and Megatron's paged stash of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import gpt_cases
import paged_stash_stand_in
import pytest
from gpt_cases import FIRST_WITH_HYBRIDS, GPTCase, as_hybrid
from joined_pairs import joined
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from rank_process import Kind
from ranks import RankPool, RankPools
from te_models import (
    FUSED_EXPERTS,
    differences,
    hybrid_of_te,
    layers_of_te,
    quantized,
    quantized_differences,
)

from megatron_zb import schedules
from megatron_zb.megatron_core import versions
from megatron_zb.runtime.autograd_stage import WeightGradQueue
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.lowering import Run, RunPair, runs_of
from megatron_zb.schedules.passes import PassKind

pytestmark = pytest.mark.skipif(
    versions.core_series() < (0, 18), reason="this Megatron does not have it"
)
# Without it Megatron builds no operations; Transformer-Engine fuses them on a GPU alone.
FUSES = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
MICROBATCHES = 5


@contextmanager
def counting_deferred() -> Iterator[Counter[int]]:
    """Count how often the gradient of each weight is left to W, by its ``id``."""
    deferred: Counter[int] = Counter()
    usual = WeightGradQueue.defer

    def defer(self: Any, compute: Any, *operands: Any, weights: Any = (), **more: Any) -> None:
        deferred.update(map(id, weights))
        usual(self, compute, *operands, weights=weights, **more)

    with patch.object(WeightGradQueue, "defer", defer):
        yield deferred


def fused_differences(case: GPTCase, schedule: str) -> list[str]:
    with patch.dict(os.environ, FUSES):
        if case.optimizer_steps:
            return quantized_differences(case, schedule)
        return differences(case, schedule, [MICROBATCHES])


_OVERLAPPED = replace(FUSED_EXPERTS, fused_accumulation=True, overlap_grad_reduce=True)


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (FUSED_EXPERTS, "v-half"),
        (_OVERLAPPED, "zb-h1"),
        (quantized("fp8", "tensorwise", _OVERLAPPED), "v-half"),
    ],
    ids=["plain", "overlapped", "fp8"],
)
def test_models_equal_megatrons(te_pool: RankPool, case: GPTCase, schedule: str) -> None:
    assert te_pool.run(fused_differences, case=case, schedule=schedule) == [[], []]


# The checks of Megatron's config ask for the name of a dispatcher that no CPU can run.
STASH = {
    "moe_paged_stash": True,
    "moe_paged_stash_page_size": 8,
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_flex_dispatcher_backend": "hybridep",
}


STASHES = (
    *STASH,
    "moe_paged_stash_buffer_size_factor_cuda",
    "moe_paged_stash_buffer_size_factor_cpu",
)
_SPREAD = replace(
    FUSED_EXPERTS, dtype="bfloat16", data_parallel=2, expert_parallel=2, all_to_all_overlaps=True
)


def stashing(case: GPTCase = FUSED_EXPERTS, **more: Any) -> GPTCase:
    return replace(case, options=(*FUSED_EXPERTS.options, *(STASH | more).items()))


class Steps:
    """Steps of training with a stash, compared with Megatron's own schedule without one."""

    def __init__(self, schedule: str | Schedule | None, counts: list[int], case: GPTCase) -> None:
        gpt_cases._specification = layers_of_te
        gpt_cases._hybrid_model = hybrid_of_te
        self.found: list[str] = []
        self._case = case
        without = tuple(option for option in case.options if option[0] not in STASHES)
        plain = replace(case, options=without, all_to_all_overlaps=False)
        upstream = gpt_cases._references(plain, sorted(set(counts)), forward_only=False)
        self._references = dict(zip(sorted(set(counts)), upstream, strict=True))
        self._built = gpt_cases.built(case, schedule, counts[0])
        self.adapter, self.chunks = self._built.__enter__()
        self.function: Any = gpt_cases.get_forward_backward_func()
        if self.adapter is not None:
            self.function = self.adapter.forward_backward_func

    def run(self, count: int, **more: Any) -> None:
        gpt_cases._zero_gradients(self.chunks)
        data: list[Any] = [gpt_cases.microbatches(self._case, count) for _ in self.chunks]
        records = gpt_cases.forward_backward(
            self.function, self.chunks, data, count, forward_only=bool(more)
        )
        if not more:
            losses = [float(record["lm loss"]) for record in records]
            outcome = gpt_cases.Outcome(losses, dict(gpt_cases.gradients(self.chunks)))
            self.found += gpt_cases._compare(outcome, self._references[count])
            self.found += [] if outcome.gradients else ["no gradients"]

    def end(self) -> None:
        self._built.__exit__(None, None, None)


def manager() -> Any:
    from megatron.core.transformer.moe.paged_stash import PagedStashManager

    return PagedStashManager.get_instance()


def passes_of(steps: Steps, count: int) -> list[list[tuple[PassKind, int, int]]]:
    """Return the kind, chunk and microbatch of all passes of this rank, those of pairs together."""
    function = steps.function
    rank = function._physical.logical(parallel_state.get_pipeline_model_parallel_rank())
    stages = function._physical.placement.stages_of[rank]
    program = function._program_for(count, False, False).ranks[rank]
    return [
        [
            (p.kind, stages.index(p.stage), p.microbatch)
            for p in (run.work for run in runs_of([item]))
        ]
        for item in program
        if isinstance(item, Run | RunPair)
    ]


def expected_order(steps: Steps, count: int) -> list[int]:
    """Return what the manager should note: chunk, layer and microbatch, from 1; B's are negative.

    Every layer that is counted has experts.
    """

    def of_pass(kind: PassKind, chunk: int, microbatch: int) -> list[int]:
        number = (chunk + 1) * 10**6 + microbatch + 1
        decoder = unwrap_model(steps.chunks[chunk]).decoder
        layers = sum(hasattr(layer.mlp, "experts") for layer in decoder.layers)
        if kind is PassKind.F:
            return [number + 1000 * layer for layer in range(1, layers + 1)]
        if kind is PassKind.W:
            return []
        return [-number - 1000 * layer for layer in range(layers, 0, -1)]

    order = []
    for passes in passes_of(steps, count):  # layer by layer, and a pair's backward first
        in_turn = zip_longest(*(of_pass(*each) for each in reversed(passes)))
        order += [number for layer in in_turn for number in layer if number is not None]
    return order


def left_to_w(steps: Steps, deferred: Counter[int], counts: list[int]) -> set[bool]:
    """Tell whether B has left the experts' weight gradients to W as often as the programs say."""
    split = Counter(
        chunk
        for count in counts
        for passes in passes_of(steps, count)
        for kind, chunk, _ in passes
        if kind is PassKind.B
    )
    return {
        deferred[id(weight)] == split[chunk]
        for chunk, model in enumerate(steps.chunks)
        for name, weight in model.named_parameters()
        if "experts.linear" in name
    }


def stashed(
    schedule: str | Schedule | None,
    counts: list[int],
    on_gpu: float = 1.0,
    is_hybrid: bool = False,
) -> list[str]:
    """Train with a stash, with an evaluation before the last step.

    ``on_gpu`` is the share of the pages that are on the GPU; the host has as many as are missing.
    """
    case = stashing(
        _SPREAD if isinstance(schedule, Schedule) else FUSED_EXPERTS,
        moe_paged_stash_buffer_size_factor_cuda=-on_gpu,
        moe_paged_stash_buffer_size_factor_cpu=on_gpu - 1.0,
    )
    case = as_hybrid(case) if is_hybrid else case
    with patch.dict(os.environ, FUSES), paged_stash_stand_in.installed() as launches:
        steps = Steps(schedule, counts, case)
        with counting_deferred() as deferred:
            for count in counts[:-1]:
                steps.run(count)
        steps.run(2, forward_only=True)
        steps.run(counts[-1])
        found, stash = steps.found, manager()
        if stash.status != "captured" or not launches["copy"] == launches["pop"] > 0:
            found.append(f"{stash.status} after {launches}")
        buffers = [b for by_width in stash.stash_buffers.values() for b in by_width.values()]
        taken = [b for b in buffers if any(b.free_list_tail - b.free_list_head - b._reset_tail)]
        if not buffers or taken or stash.overflow or bool(stash.host_spill) != (on_gpu < 1):
            found.append(f"{taken} are not free again, or {stash.host_spill} pages on the host")
        if steps.adapter is not None:
            if stash._pp_schedule != expected_order(steps, counts[-1]):
                found.append(f"the order that was recorded is {stash._pp_schedule}")
            if left_to_w(steps, deferred, counts[:-1]) != {True}:
                found.append("weight gradients were not left to W")
        steps.end()
    return found


def test_a_stash_gives_what_megatron_gives_without(te_pool: RankPool) -> None:
    """Its first step records, the others use the pages; Megatron's own needs equal steps."""
    assert te_pool.run(stashed, schedule=None, counts=[5, 5, 5]) == [[], []]


@pytest.mark.parametrize(
    ("schedule", "on_gpu", "is_hybrid"),
    [
        ("v-half", 1.0, False),
        ("zb-h1", 1.0, False),
        ("v-zb", 0.5, False),
        ("interleaved", 1.0, False),
        pytest.param("v-zb", 0.5, True, marks=pytest.mark.slow),
    ],
)
def test_a_stash_follows_the_order_of_a_schedule(
    te_pool: RankPool, schedule: str, on_gpu: float, is_hybrid: bool
) -> None:
    """Also that of another number of microbatches, which it records anew.

    As many tokens have pages as are alive at once, so a page that is held too long is missed.
    """
    counts = [5, 5, 5, 3, 3, 3]
    if is_hybrid and versions.core_series() < FIRST_WITH_HYBRIDS:
        pytest.skip("this megatron-core has no HybridModel")
    found = te_pool.run(
        stashed, schedule=schedule, counts=counts, on_gpu=on_gpu, is_hybrid=is_hybrid
    )
    assert found == [[], []]


def test_a_stash_follows_the_order_of_pairs(ranks: RankPools) -> None:
    schedule = joined(schedules.build("v-half", pipeline_size=2, num_microbatches=5))
    assert schedule.pairs
    pool = ranks(4, Kind.TRANSFORMER_ENGINE)
    assert pool.run(stashed, schedule=schedule, counts=[5, 5, 5]) == [[]] * 4


def rerun(schedule: str) -> list[str]:
    """Train with a stash that is too small, by Megatron's runner, which then does without."""
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    calls = []
    with patch.dict(os.environ, FUSES), paged_stash_stand_in.installed():
        small = stashing(moe_paged_stash_buffer_size_factor_cuda=-0.3)
        steps = Steps(schedule, [MICROBATCHES], small)
        usual, config = steps.function, unwrap_model(steps.chunks[0]).config

        def called(**arguments: Any) -> Any:
            calls.append(config.moe_paged_stash)
            return usual(**arguments)

        steps.function = PagedStashRunner(config, False, steps.chunks, None, called)
        for _ in range(3):
            steps.run(MICROBATCHES)
        steps.end()
    expected = [True, True, False, True, False]
    return steps.found + ([] if calls == expected else [f"stashed or not: {calls}"])


def test_a_step_that_does_not_fit_is_run_again(te_pool: RankPool) -> None:
    assert te_pool.run(rerun, schedule="v-half") == [[], []]

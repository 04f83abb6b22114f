"""The order of streams on a GPU: every kind of pass, of state and of parallelism, and planted bugs.

See the sanitizer for what is noted and what is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from drawn_sizes import first
from gpt_cases import GPTCase
from rank_process import Kind
from ranks import RankPools
from sanitizer.plants import PLANTS
from sanitizer.trials import Noted, Trial, noted_of, run
from small_relay import distilled_on_ranks
from state_cases import PARALLEL, SMALL_GPTS
from validated_training import Training, train

RECOMPUTED: dict[str, Any] = {"recompute": 0.6}
OFFLOADED: dict[str, Any] = {"offload": 0.6}
BOTH: dict[str, Any] = {"recompute": 0.3, "offload": 0.4}
VOCABULARY = GPTCase(vocabulary=True)
SLICES = GPTCase(slices="4")
PAIRED = replace(PARALLEL["expert"], all_to_all_overlaps=True)

ON_TWO = {
    **{f"kept, {name}": Trial(schedule=name) for name in ("v-zb", "zb-h1", "1f1b", "interleaved")},
    **{f"recomputed, {name}": Trial(schedule=name, **RECOMPUTED) for name in ("v-half", "zb-h1")},
    **{f"offloaded, {name}": Trial(schedule=name, **OFFLOADED) for name in ("v-half", "zb-h1")},
    **{f"both, {name}": Trial(schedule=name, **BOTH) for name in ("v-zb", "interleaved")},
    **{f"both, {name}": Trial(case, **BOTH) for name, case in SMALL_GPTS.items()},
    "kept, lengths": Trial(SMALL_GPTS["lengths"]),
    "vocabulary, v-half": Trial(VOCABULARY),
    "vocabulary, zb-h1": Trial(VOCABULARY, "zb-h1"),
    "vocabulary, tied": Trial(replace(VOCABULARY, tied=True)),
    "slices, documents": Trial(replace(SLICES, documents="ends", rotary=True)),
    "slices, vocabulary": Trial(replace(VOCABULARY, slices="4", tied=True), "v-zb"),
    "slices, interleaved": Trial(SLICES, "interleaved"),
    "slices, both": Trial(replace(SLICES, rotary=True), "v-half", **BOTH),
    "slices, selective": Trial(replace(SMALL_GPTS["selective"], slices="4"), "zb-h1"),
}
ON_FOUR = {
    **{f"both, {name}": Trial(case, **BOTH) for name, case in PARALLEL.items()},
    "kept, data": Trial(PARALLEL["data"]),
    "pairs, recomputed": Trial(PAIRED, "v-zb", pairs=True, recomputed=True),
    "slices": Trial(replace(PARALLEL["expert"], slices="4")),
    "slices, experts, both": Trial(replace(PARALLEL["expert"], slices="4"), "zb-h1", **BOTH),
    "slices, vocabulary, sequence": Trial(
        replace(PARALLEL["sequence"], slices="4", vocabulary=True), "zb-h1"
    ),
    "pairs, vocabulary": Trial(replace(PAIRED, vocabulary=True), "v-zb"),
    "pairs": Trial(PAIRED, "v-zb", pairs=True),
    "slices, sequence": Trial(replace(PARALLEL["sequence"], slices="4")),
    "slices, data": Trial(replace(PARALLEL["data"], slices="4")),
}

OF_MEGATRON = {
    "_local_scalar_dense in fork (random.py)",  # of a random state, which the host has
    "_local_scalar_dense in custom_forward (attention.py)",  # of an enumerator, as a number
    "masked_select in permute (moe_utils.py)",
    "Event.synchronize in _maybe_dtoh_and_synchronize (token_dispatcher.py)",
}
"""Host waits that Megatron's own schedule has in its forwards, too."""

OF_HOST = {"_unique2 in attend (sliced_documents.py)"}
"""Of starts of documents, which are on the host."""

ONCE = {"equal in _equal (data_iterators.py)"}
"""Host waits of this package for the first microbatch of data iterators; each step has new ones."""

MOST_ONCE = 16
"""Four tensors of a microbatch, in the most steps that a run here has."""


def check(found: list[Noted]) -> None:
    for noted in found:
        assert noted.kernels > 20
        assert not noted.violations, next(iter(noted.violations))
        assert set(noted.host_waits) <= OF_MEGATRON | OF_HOST | ONCE
        assert sum(noted.host_waits.get(wait, 0) for wait in ONCE) <= MOST_ONCE


@pytest.mark.slow
@pytest.mark.parametrize("name", first(-2, [*ON_TWO]))
def test_uses_of_memory_are_in_order(ranks: RankPools, name: str) -> None:
    check(ranks(2, Kind.STREAMS).run(run, trial=ON_TWO[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", first(-3, [*ON_FOUR]))
def test_uses_of_memory_are_in_order_with_other_parallelism(ranks: RankPools, name: str) -> None:
    check(ranks(4, Kind.STREAMS).run(run, trial=ON_FOUR[name]))


@pytest.mark.slow
@pytest.mark.parametrize("clip", [1e6, 1.2], ids=["right", "mended"])
def test_post_validated_steps_are_in_order(ranks: RankPools, clip: float) -> None:
    training = Training(GPTCase(dtype="bfloat16"), clip=clip, iterations=4)
    found = ranks(2, Kind.STREAMS).run(noted_of, function=train, training=training, validated=True)
    check(found)


@pytest.mark.parametrize("any_shape", [False, True])
def test_a_distillation_is_in_order(ranks: RankPools, any_shape: bool) -> None:
    found = ranks(2, Kind.STREAMS).run(
        noted_of,
        function=distilled_on_ranks,
        stages=[(1, 1), (2, 1)],
        runs=[(0, 3)],
        any_shape=any_shape,
    )
    check(found)


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_are_found(ranks: RankPools, plant: str) -> None:
    found = ranks(2, Kind.STREAMS).run(run, trial=Trial(**OFFLOADED), plant=plant)
    assert any(noted.violations for noted in found)

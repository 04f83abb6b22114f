"""One spread of layers: what is predicted is what the printed flags run."""

from __future__ import annotations

import random
import shlex
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from adapters import scheduled
from measured_runs import profile as measured_profile
from megatron_arguments import parsed
from small_models import load, small

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.balance import Ends
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_lm.adapter_of_arguments import adapter_of
from megatron_zb.plan.from_profile import ProfileRequest, rows
from megatron_zb.plan.prediction import IterationSettings, predict
from megatron_zb.plan.stages import cut_into_stages
from megatron_zb.plan.strategy import ScheduleCandidate, candidates_of
from megatron_zb.plan.table import flags
from megatron_zb.schedules import layout
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.placement import Placement, looped, v_shape, wave

pytestmark = pytest.mark.usefixtures("brief_searches")

CASES = 1000
CHUNKS = {"interleaved": (2, 3, 4), "wave": (2, 4)}
NAMES = ["1f1b", "interleaved", "1f1b-v", "zb-h1", "wave"]
"""Every kind of placement, by schedules that take no search."""


@lru_cache(maxsize=1024)
def a_schedule(name: str, ranks: int, chunks: int | None) -> schedules.Schedule:
    return schedules.build(name, pipeline_size=ranks, num_microbatches=ranks, chunks=chunks)


def drawn(seed: int) -> tuple[schedules.Schedule, Layers]:
    """A schedule, and layers of which at least one is left for every stage."""
    draw = random.Random(seed)
    name, ranks = draw.choice(NAMES), draw.choice((2, 3, 4, 8))
    chunks = draw.choice(CHUNKS[name]) if name in CHUNKS else None
    schedule = a_schedule(name, ranks, chunks)
    stages = schedule.placement.num_stages
    layers = Layers(
        draw.randint(stages, 4 * stages),
        multi_token=draw.choice((0, 0, 1)),
        embedding=draw.choice((0.0, 0.0, 1.0)),
        output=draw.choice((0.0, 0.0, 1.0, 2.7)),
    )
    left = layers.decoder - stages
    first = 1 + draw.randint(0, left // 2) if draw.random() < 0.2 else None
    last = 1 + draw.randint(0, left // 2) if draw.random() < 0.2 else None
    if stages == 2 and first is not None and last is not None:
        last = layers.decoder - first
    elif stages == 2 and (first or last):
        return schedule, replace(layers, first=first, last=last, embedding=0.0, output=0.0)
    return schedule, replace(layers, first=first, last=last)


def told(adapter: PipelineAdapter) -> list[str]:
    """What Megatron's own layout object says of every stage, as letters, in model order."""
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    placement, physical = adapter.schedule.placement, adapter.physical
    return [
        "".join(
            letters[layer.name]
            for layer in adapter.layer_layout.layout[physical.logical(placement.rank_of[s])][
                placement.chunk_of(s)
            ]
        )
        for s in range(placement.num_stages)
    ]


def test_the_predicted_layout_is_the_adapters_in_a_thousand_cases() -> None:
    uneven = 0
    for seed in range(CASES):
        schedule, layers = drawn(seed)
        placement = schedule.placement
        sizes: Any = {
            "pipeline_size": placement.pipeline_size,
            "num_microbatches": schedule.num_microbatches,
        }
        adapter = scheduled(schedule, **sizes, layers=layers)
        predicted = layout.spread(layers, placement)
        assert told(adapter) == list(layout.lettered(predicted, layers.multi_token)), (seed, layers)
        uneven += len(set(predicted)) > 1
        if layers.first is not None or layers.last is not None:
            continue
        ends = Ends(layers.embedding, layers.output, "for a test")
        asked = scheduled(schedule, **sizes, layers=layers, layer_layout=ends)
        balance = asked.placed.balance
        assert balance is not None
        assert told(asked) == list(layout.lettered(balance.layers, layers.multi_token))
        assert balance.layers in layout.choices(
            layers.decoder, placement, layers.embedding, layers.output
        )
    assert uneven > CASES / 2


def as_run(candidate: ScheduleCandidate, printed: list[str], layers: int, ranks: int) -> list[str]:
    """The layers of the stages of a run with these flags."""
    words = shlex.split(" ".join(printed))
    known = {
        "--num-virtual-stages-per-pipeline-rank": "num_virtual_stages_per_pipeline_rank",
        "--pipeline-model-parallel-layout": "pipeline_model_parallel_layout",
    }
    upstream: dict[str, Any] = {
        "num_layers": layers,
        "pipeline_model_parallel_size": ranks,
        "world_size": ranks,
        "micro_batch_size": 1,
        "global_batch_size": 2 * ranks,
    }
    ours = []
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if flag in known:
            upstream[known[flag]] = int(value) if value.isdecimal() else value
        else:
            ours += [flag, value]
    if not candidate.megatron:
        return told(adapter_of(parsed(" ".join(ours), **upstream)))
    assert not ours
    written, chunks = upstream.get(known[words[0]]) if words else None, 1
    if isinstance(written, str):
        return written.split("|")
    chunks = written or 1
    assert layers % (ranks * chunks) == 0, "Megatron divides evenly or not at all"
    share = layers // (ranks * chunks)
    return list(layout.lettered((share,) * (ranks * chunks)))


SCHEDULE_FLAGS = (
    "--pipeline-schedule ",
    "--num-virtual-stages-per-pipeline-rank ",
    "--pipeline-model-parallel-layout ",
)


@pytest.mark.parametrize("layers", [12, 18])
def test_the_flags_of_a_plan_for_a_config_run_the_layout_that_was_predicted(layers: int) -> None:
    """Of a light output layer, which leaves layers even, and of a heavy one."""
    tried = 0
    for vocabulary in (1000, 256_000):
        workload = load(small(layers=layers, vocabulary=vocabulary))
        for candidate in candidates_of(NAMES):
            for chunks in list(candidate.chunk_counts(layers, 4))[:3]:
                staged = cut_into_stages(workload, candidate, chunks)
                assert staged is not None
                found = predict(staged, candidate, IterationSettings(8), chunks)
                printed = [f for f in flags(found, 8) if f.startswith(SCHEDULE_FLAGS)]
                run = as_run(candidate, printed, layers, 4)
                assert run == list(layout.lettered(staged.layout)), (candidate.name, chunks)
                tried += 1
    assert tried >= 12


@pytest.mark.parametrize("output", [0.0, 3.0])
def test_the_flags_of_a_plan_for_a_profile_run_the_layout_that_was_predicted(output: float) -> None:
    asked = ProfileRequest(measured_profile(output=output), 8, None, post_validation=False)
    candidates = candidates_of(["1f1b", "interleaved", "1f1b-v"])
    found, missing = rows(asked, candidates)
    assert len(found) > len(candidates)
    for row in found:
        (candidate,) = (c for c in candidates if c.name == row.candidate)
        printed = [f for f in row.flags if f.startswith(SCHEDULE_FLAGS)]
        run = as_run(candidate, printed, asked.profile.model.layers, asked.profile.pipeline_size)
        assert "|".join(run) == row.written, row.candidate
    assert not missing


@pytest.mark.parametrize("placement", [looped(4), looped(4, 2), v_shape(4), wave(4, 4)])
def test_no_rank_has_two_layers_more_than_another(placement: Placement) -> None:
    for layers in range(placement.num_stages, 4 * placement.num_stages):
        counts = layout.spread(Layers(layers), placement)
        on_ranks = [sum(counts[s] for s in held) for held in placement.stages_of]
        assert max(on_ranks) - min(on_ranks) <= 1
        assert min(counts) >= 1
        assert sum(counts) == layers


def test_twelve_layers_on_a_v_of_four_ranks_are_three_on_each() -> None:
    assert layout.spread(Layers(12), v_shape(4)) == (2, 2, 2, 2, 1, 1, 1, 1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("layers", [8, 16, 40])
def test_what_upstream_divides_stays_what_it_is(layers: int, ranks: int) -> None:
    even = (layers // ranks,) * ranks
    assert layout.spread(Layers(layers), looped(ranks)) == even
    if layers >= 2 * ranks:
        accounted = layout.spread(Layers(layers - 2, embedding=1, output=1), looped(ranks))
        assert accounted == (even[0] - 1, *even[1:-1], even[-1] - 1)
    fixed = layout.spread(Layers(layers + 1, first=even[0] + 1), looped(ranks))
    assert fixed == (even[0] + 1, *even[1:])


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("Ett|tt|tt|ttL", ("Ett", "tt", "tt", "ttL")),
        ("Et*2|(tt|)*2,t*2L", ("Ett", "tt", "tt", "ttL")),
        ("E|t*4|t*4|L", ("E", "tttt", "tttt", "L")),
    ],
)
def test_a_written_layout_is_read_as_megatron_reads_it(
    written: str, found: tuple[str, ...]
) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    assert layout.read(written, Layers(8), 4) == found
    theirs = PipelineParallelLayerLayout.parse_str_to_list(written)
    assert [len(stage) for stage in theirs] == [len(stage) for stage in found]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("Ett|tt|tt|ttx", "use E, t, m, L and |"),
        ("Et*999999999|ttL", "more than 1000000 letters"),
        ("E((t|)*9|ttL", "use E, t, m, L and |"),
        ("Etttt|ttttL", "it names 2 stages and the schedule has 4"),
        ("Ett|tt|tt|tL", "it names 7 layers and the model has 8"),
        ("tEt|tt|tt|ttL", "it must begin with E and end with L"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(written: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("|", r"\|")):
        layout.read(written, Layers(8), 4)


@pytest.mark.parametrize(
    ("written", "name"), [("Ett|tttt|ttttt|tL", "v"), ("Et" + "|tL", "looped")]
)
def test_a_written_layout_binds_the_placement_of_auto(written: str, name: str) -> None:
    """A plan predicts auto on a V; the stages that it prints have to be those of the run."""
    layers = Layers(written.count("t"))
    adapter = scheduled(
        "auto", pipeline_size=2, num_microbatches=2, layers=layers, layer_layout=written
    )
    assert adapter.schedule.placement.name == name
    assert "|".join(told(adapter)) == written


@pytest.mark.parametrize("layers", [Layers(4, first=0), Layers(4, last=0)])
def test_an_end_without_layers_is_refused(layers: Layers) -> None:
    """The layers add up, but a stage would have none."""
    with pytest.raises(UsageError, match="with at least one on each"):
        layout.spread(layers, looped(2, 1))


def test_a_hybrid_pattern_says_the_layers_of_each_stage() -> None:
    layers = Layers(6, multi_token=1, kinds="M*ME*-")
    assert layout.read("M*|M||E*-", layers, 4) == ("Ett", "t", "", "tttmL")
    with pytest.raises(UsageError, match=r"^hybrid .* 'M\*M\|E\*-': it has 2 segments .* 4 stages"):
        layout.read("M*M|E*-", layers, 4)
    adapter = scheduled(
        "auto", pipeline_size=2, num_microbatches=2, layers=layers, layer_layout="M*|M|E*|-"
    )
    assert adapter.schedule.placement.name == "v"
    assert told(adapter) == ["Ett", "t", "tt", "tmL"]


def test_borders_move_away_from_the_rank_of_the_embedding() -> None:
    placement = looped(2)
    weights = (1.0,) * 8
    assert layout._evened((4, 4), weights, placement, 4.0, 0.0) == (2, 6)
    assert layout._evened((4, 4), weights, placement, 0.0, 4.0) == (6, 2)
    assert layout._evened((4, 4), weights, placement, 4.0, 4.0) == (4, 4)


def test_ranks_with_an_end_of_the_model_have_fewer_layers_among_equals() -> None:
    assert layout.spread(Layers(6), looped(4)) == (1, 2, 2, 1)
    assert layout.spread(Layers(5), looped(4)) == (1, 2, 1, 1)

"""``megatron-zb plan --profile``: other schedules and layouts from what one run has measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from brief_searches import briefly
from measured_runs import (
    HEAVY,
    HYBRID,
    LAYER,
    LAYERS,
    TIMES,
    TIMES_OF,
    P,
    hybrid_profile,
    profile,
    sharded_profile,
)

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.errors import UsageError
from megatron_zb.measured.fit import Fit, FittedPart, Variant
from megatron_zb.measured.profile import Profile, read_profile, write_profile
from megatron_zb.plan.features.catalog import asking
from megatron_zb.plan.features.vocabulary import PlanVocabulary
from megatron_zb.plan.from_profile import ProfileRequest, rows
from megatron_zb.plan.strategy import (
    MEGATRON_INTERLEAVED,
    MEGATRON_OVERLAP,
    candidates_of,
)
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import looped, v_shape
from megatron_zb.schedules.request import LimitTooSmall

SHARDED = asking(PlanVocabulary("on"))


def test_parts_are_read_off_the_stages() -> None:
    letters = ["Ett", "ttt", "tt", "tL"]
    part = FittedPart.fitted([2 * 3 + 1, 3 * 3, 2 * 3, 3 + 5], letters)
    assert part == FittedPart(layer=3, embedding=1, output=5)
    assert part.stages((1, 4, 3, 0)) == [4, 12, 9, 5]
    empty = FittedPart.fitted([0.0, 3.0, 2 * 3.0], ["E", "t", "tt" + "L"])
    assert empty == FittedPart(layer=3, embedding=0, output=0)
    assert (
        FittedPart.fitted([1.0, 0.5, 4.0], ["Et", "", "tL"]).layer == 1.0
    )  # no stage of layers alone
    no_middle = FittedPart.fitted([6.0, 6.0 + 4.0], ["Ett", "ttL"])
    assert no_middle == FittedPart(layer=3, embedding=0, output=4)


def test_the_costs_of_the_placement_that_ran_are_those_it_has_measured() -> None:
    measured = profile(slow={2: 1.5})
    placement = v_shape(P)
    fitted = Fit.of(measured).costs(placement, (2,) * 8).for_placement(placement)
    own = measured.costs(placement).for_placement(placement)
    for kind in (PassKind.F, PassKind.B, PassKind.W):
        assert fitted.seconds[kind] == pytest.approx(own.seconds[kind]), kind
    for name in ("activation", "held_for_weight"):
        assert fitted.memory[name] == pytest.approx(own.memory[name]), name
    assert fitted.latency[PassKind.F] == own.latency[PassKind.F]


def test_a_slow_rank_is_slow_in_every_placement() -> None:
    costs = Fit.of(profile(slow={2: 1.5})).costs(looped(P), (4,) * 4).for_placement(looped(P))
    assert costs.seconds[PassKind.F] == pytest.approx((4.0, 4.0, 6.0, 4.0 + HEAVY))


def test_a_heavy_output_layer_asks_for_an_uneven_layout() -> None:
    asked = ProfileRequest(profile(), 8, None, post_validation=False)
    found, missing = rows(asked, candidates_of(["v-zb", "1f1b"])[2:])
    assert missing == {}
    assert [row.candidate for row in found] == ["v-zb", "1f1b"]
    for row in found:
        assert not row.is_even
        assert row.seconds < row.seconds_even
        assert row.written.replace("|", "") == "E" + "t" * LAYERS + "L"
    even, _ = rows(ProfileRequest(profile(output=0.0), 8, None, False), candidates_of(["v-zb"])[2:])
    assert even[0].is_even
    assert even[0].seconds == even[0].seconds_even


def test_the_fullest_rank_has_megatrons_number() -> None:
    """The output layer holds the most: on the last rank of both, which is logical rank 0 of a V."""
    values = profile().model_dump()
    values["stages"][-1]["activation"] = 9000
    asked = ProfileRequest(Profile.model_validate(values), 8, None, False)
    found, _ = rows(asked, candidates_of(["v-half", "zb-h1"])[2:])
    assert {row.candidate: row.rank for row in found} == {"v-half": 3, "zb-h1": 3}


def with_rows(**model: int) -> Profile:
    """The profile of a whole output layer that tells its rows."""
    values = profile().model_dump()
    values["model"] |= {"vocabulary": 262_144, "hidden_size": 16_384, **model}
    return Profile.model_validate(values)


@pytest.mark.parametrize("measured", [with_rows(), sharded_profile()], ids=["whole", "sharded"])
def test_a_plan_has_rows_with_and_without_a_sharded_vocabulary(measured: Profile) -> None:
    """Whichever of both has run; a heavy output layer is faster sharded than in any layout."""
    asked = ProfileRequest(measured, 8, None, post_validation=False)
    with briefly():
        found, missing = rows(asked, candidates_of(["v-zb", "auto"])[2:])
    assert missing == {}
    named = {row.runs.vocabulary_parallel: row for row in found if row.candidate == "v-zb"}
    assert named[True].seconds < named[False].seconds
    kinds = {p.kind for rank in named[True].timeline.schedule.ranks for p in rank}
    assert kinds >= {*"OPVEG"}
    assert "--pipeline-vocabulary on" in named[True].flags
    assert "--pipeline-vocabulary on" not in named[False].flags
    assert named[True].is_even
    best = next(row for row in found if row.candidate == "auto")
    assert best.runs.vocabulary_parallel and best.seconds <= named[True].seconds


def test_a_plan_shards_every_row_or_none_if_asked() -> None:
    asked = ProfileRequest(sharded_profile(), 8, None, post_validation=False)
    for vocabulary in ("on", "off"):
        of = asking(PlanVocabulary(vocabulary))
        with briefly():
            found, _ = rows(replace(asked, features=of), candidates_of(["v-half"])[2:])
        assert [row.runs.vocabulary_parallel for row in found] == [vocabulary == "on"]


def test_auto_takes_the_best_of_schedules_that_are_all_sharded_if_asked() -> None:
    asked = ProfileRequest(
        sharded_profile(), 8, None, post_validation=False, features=asking(PlanVocabulary("on"))
    )
    with briefly():
        found, _ = rows(asked, candidates_of(["v-half", "auto"]))
    sharded = {row.candidate for row in found if row.runs.vocabulary_parallel}
    assert sharded == {"v-half", "auto"}
    assert all(row.megatron for row in found if not row.runs.vocabulary_parallel)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (ProfileRequest(profile(), 8, None, False, SHARDED), "lacks its number of rows"),
        (
            ProfileRequest(sharded_profile(), 8, None, True, SHARDED),
            "post-validation runs again",
        ),
        (
            ProfileRequest(with_rows(vocabulary=4098), 8, None, False, SHARDED),
            "its 4098 rows cannot be sharded evenly for 4 ranks",
        ),
    ],
)
def test_a_vocabulary_that_cannot_be_sharded_is_a_reason(asked: ProfileRequest, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rows(asked, candidates_of(["v-half"])[2:])
    found, _ = rows(
        replace(asked, features=asking(PlanVocabulary("auto"))), candidates_of(["v-half"])[2:]
    )
    assert [row.runs.vocabulary_parallel for row in found] == [False]


def test_iterations_in_a_row_are_shorter() -> None:
    settings = (candidates_of(["v-zb"])[2:],)
    alone, back_to_back = (
        rows(ProfileRequest(profile(), 8, None, flag), *settings)[0] for flag in (False, True)
    )
    assert back_to_back[0].seconds < alone[0].seconds
    assert back_to_back[0].bubble < alone[0].bubble


def with_pairs() -> Profile:
    """The profile of a run with pairs: a layer exchanges for .4 of its F and as long in B."""
    values = profile(output=0.0).model_dump()
    alone = 2 * (LAYER["forward"] + LAYER["backward"])
    pairs = [
        {"forward": f, "backward": b, "whole": False, "seconds": alone - 4 * 0.4}
        for f in range(2 * P)
        for b in (f, 2 * P - 1 - f)
    ]
    return Profile.model_validate({**values, "pairs": pairs})


def test_measured_pairs_take_part_as_rows_of_their_own() -> None:
    measured = with_pairs()
    asked = ProfileRequest(measured, 8, None, post_validation=False)
    settings = [*candidates_of(["v-zb", "zb-h1"])]
    with briefly():
        found, missing = rows(asked, settings)
    assert not missing
    by_name = {(row.candidate, row.runs.overlaps_all_to_all): row for row in found}
    paired, alone = by_name["v-zb", True], by_name["v-zb", False]
    assert paired.timeline.schedule.pairs
    assert not alone.timeline.schedule.pairs
    assert paired.seconds < alone.seconds
    assert paired.name == "v-zb, pairs"
    flag = "--overlap-moe-expert-parallel-comm"
    assert flag in paired.flags
    assert flag not in alone.flags
    assert ("zb-h1", True) not in by_name, "one chunk is never a pair's"
    own = by_name[MEGATRON_OVERLAP, True]
    assert own.seconds < by_name[MEGATRON_INTERLEAVED, False].seconds
    assert flag in own.flags
    costs = Fit.of(measured).costs(
        v_shape(P), (1, 2, 2, 2, 2, 2, 2, 3), Variant(overlaps_all_to_all=True)
    )
    communication = costs.feature(Communication)
    assert communication is not None
    assert communication.forward == pytest.approx([0.4 * n for n in (1, 2, 2, 2, 2, 2, 2, 3)])
    table = costs.for_placement(v_shape(P))
    assert table.seconds[PassKind.F] == pytest.approx(
        [LAYER["forward"] * n for n in (1, 2, 2, 2, 2, 2, 2, 3)]
    )


@pytest.mark.parametrize(
    "asked",
    [
        ProfileRequest(profile(), 8, None, post_validation=False),
        ProfileRequest(with_pairs(), 8, None, post_validation=True),
    ],
    ids=["none measured", "post-validation"],
)
def test_where_there_are_no_pairs_there_are_no_rows_of_them(asked: ProfileRequest) -> None:
    found, _ = rows(asked, candidates_of(["v-half"]))
    assert not any(row.runs.overlaps_all_to_all for row in found)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.yaml"
    write_profile(profile(), path)
    return path


def test_the_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["plan", "--profile", str(file), "--schedules", "v-half,v-zb,interleaved"])
    text = capsys.readouterr().out
    assert "the output layer for 3.00" in text
    assert "--pipeline-schedule v-zb" in text
    assert "--pipeline-model-parallel-layout 'E" in text


def test_the_command_says_what_b_computes_in_place_of_w(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_profile(file)
    stages = [s.model_copy(update={"unsplit": 0.25 * (n == 2)}) for n, s in enumerate(found.stages)]
    write_profile(found.model_copy(update={"stages": stages}), file)
    words = ["plan", "--profile", str(file), "--schedules", "v-half"]
    assert cli.main(words) == 0
    said = "weight gradients in B, of layers that cannot be split: 25% of stage 2\n"
    assert said in capsys.readouterr().out
    assert cli.main([*words, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["unsplit"][:4] == [0.0, 0.0, 0.25, 0.0]


def test_the_command_for_programs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--memory-limit", "0.5", "--schedules", "v-half,zb-h1", "--format", "json"]
    cli.main(["plan", "--profile", str(file), "--microbatches", "12", *flags])
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_microbatches"] == 12
    assert [row["schedule"] for row in plan["ranked"]] == ["v-half"]
    assert "cannot keep the memory limit of 0.5 of 1F1B" in plan["not_possible"]["zb-h1"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus", "8"], "--gpus cannot be combined with --profile"),
        (["--microbatches", "0"], "--microbatches is 0: give 1 or more"),
        (["--schedules", "v-huge"], "unknown pipeline schedule 'v-huge'"),
        (["--memory-limit", "-1"], "memory limit -1 is not a fraction"),
        (["--memory-limit", "0.01"], "cannot keep the memory limit of 0.01"),
    ],
)
def test_what_cannot_be_planned(
    file: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert cli.main(["plan", "--profile", str(file), *flags]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert len(captured.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus", "8"], "--config is missing"),
        (["--config", "model.yaml"], "--gpus is missing"),
        (["--config", "m.yaml", "--gpus", "8", "--microbatches", "4"], "needs --profile"),
    ],
)
def test_what_is_missing(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert cli.main(["plan", *flags]) == 2
    assert said in capsys.readouterr().err


def test_auto_is_as_fast_as_every_named_schedule_with_a_heavy_output_layer() -> None:
    """A vocabulary of 32 times the hidden size counts for about 2.7 layers."""
    measured = profile(output=32 / 12)
    costs = Fit.of(measured).costs(v_shape(P), (2,) * 8)

    def seconds(name: str) -> float:
        with briefly():
            schedule = schedules.build(
                name, pipeline_size=P, num_microbatches=8, costs=costs, memory_limit=1.0
            )
        return schedules.simulate(schedule, costs).makespan

    fastest = seconds("auto")
    compared = 0
    for name in schedules.names():
        try:
            assert fastest <= seconds(name) * (1 + 1e-9), name
        except UsageError as refused:
            assert "cannot keep the memory limit" in str(refused)
        else:
            compared += 1
    assert compared >= 9


def test_a_limit_that_no_schedule_keeps_names_the_smallest_that_one_does() -> None:
    candidates = candidates_of(["1f1b", "zb-h1", "v-half", "v-min"])[2:]
    asked = ProfileRequest(profile(), 8, 0.001, post_validation=False)
    with briefly(), pytest.raises(LimitTooSmall) as refused:
        rows(asked, candidates)
    needed = refused.value.needed / P  # of 1F1B's, which is a microbatch of each rank
    assert str(refused.value).endswith(f"needs at least {needed:.4g} of 1F1B")
    with briefly():
        found, _ = rows(replace(asked, memory_limit=1.001 * needed), candidates)
    assert found
    with briefly(), pytest.raises(LimitTooSmall):
        rows(replace(asked, memory_limit=0.99 * needed), candidates)


@pytest.mark.parametrize("name", ["zb-h1", "v-zb"])
def test_the_layers_of_a_hybrid_model_count_by_their_letters(name: str) -> None:
    """The even layout has all attention on one rank of four, or on two."""
    asked = ProfileRequest(hybrid_profile(), 8, None, post_validation=False)
    found, missing = rows(asked, candidates_of([name])[2:])
    assert missing == {}
    (row,) = found
    assert not row.is_even and row.seconds < 0.85 * row.seconds_even
    segments = row.written.split("|")
    assert "".join(segments) == HYBRID
    assert len(segments) == row.timeline.schedule.placement.num_stages
    work = [0.0] * P
    for segment, rank in zip(segments, row.timeline.schedule.placement.rank_of, strict=True):
        work[rank] += sum(TIMES_OF[letter] for letter in segment)
    assert max(work) <= 8, "an even share is 7"
    assert f"--hybrid-layer-pattern '{row.written}'" in row.flags
    stray = ("--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank")
    assert not any(flag.startswith(stray) for flag in row.flags)


def test_a_layout_keeps_the_layers_of_prediction_in_its_pattern() -> None:
    asked = ProfileRequest(hybrid_profile(prediction="*-"), 8, None, post_validation=False)
    found, _ = rows(asked, candidates_of(["zb-h1", "interleaved"]))
    assert {row.family for row in found} >= {"zb-h1", "interleaved", "1f1b"}
    for row in found:
        assert row.written.replace("|", "") == f"{HYBRID}/*-"
        assert row.written.count("|") == row.timeline.schedule.placement.num_stages - 1


def test_without_the_seconds_of_letters_all_layers_of_a_pattern_are_alike() -> None:
    values = hybrid_profile().model_dump()
    values["parts"]["letters"] = {}
    asked = ProfileRequest(Profile.model_validate(values), 8, None, post_validation=False)
    ((row,), _) = rows(asked, candidates_of(["zb-h1"])[2:])
    assert row.is_even and row.written == "****|----|----|----"


def test_the_command_says_what_letters_count_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.yaml"
    write_profile(hybrid_profile(), path)
    words = ["plan", "--profile", str(path), "--schedules", "zb-h1"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    mean = (4 * TIMES + 12) / 16
    assert f"* for {TIMES / mean:.2f}, - for {1 / mean:.2f}" in text
    assert "--hybrid-layer-pattern '*" in text
    assert cli.main([*words, "--format", "json"]) == 0
    first = json.loads(capsys.readouterr().out)["ranked"][0]
    assert first["layout"].replace("|", "") == HYBRID

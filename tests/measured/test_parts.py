"""What the parts of a model cost, where the truth is known: the figures that were put in."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest

from megatron_zb import schedules
from megatron_zb.measured import parts
from megatron_zb.measured.fit import Fit
from megatron_zb.measured.parts import (
    AFTER,
    ATTENTION,
    BEFORE,
    DATA,
    LAYERS,
    MULTI_TOKEN,
    OUTPUT,
    StageTimes,
    of_kind,
)
from megatron_zb.measured.profile import Profile
from megatron_zb.megatron_core.profiling import _before_passes, _mean_within
from megatron_zb.plan.from_profile import ProfileRequest, rows
from megatron_zb.plan.strategy import MEGATRON_1F1B, MEGATRON_INTERLEAVED, candidates_of
from megatron_zb.runtime.observer import Span
from megatron_zb.schedules import layout
from megatron_zb.schedules.layout import Layers, Letters
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import Placement, v_shape
from megatron_zb.schedules.search.place_w import join_all, split_all
from megatron_zb.schedules.step_plan import Lengths

M, P, LAYERS_IN_ALL = 6, 2, 8
KINDS = ("forward", "backward", "weight", "whole")
PASSES = (PassKind.F, PassKind.B, PassKind.W, PassKind.BW)
PACKED = Lengths.of([100.0, 60.0], [100.0**2, 2 * 30.0**2])
Four = tuple[float, float, float, float]


@dataclass(frozen=True)
class Truth:
    """Seconds of each part in F, B, W and BW, and of the host before each pass."""

    layer: Four = (0.010, 0.012, 0.008, 0.022)
    attention: Four = (0.002, 0.005, 0.0, 0.006)  # of a layer's
    embedding: Four = (0.001, 0.0015, 0.0, 0.0016)
    data: float = 0.0007
    output: Four = (0.004, 0.0045, 0.004, 0.0085)
    multi_token: Four = (0.013, 0.014, 0.009, 0.024)
    before: Four = (0.0003, 0.0004, 0.0001, 0.0005)
    after: Four = (0.0002, 0.0001, 0.0002, 0.0002)
    host: Four = (0.0005, 0.0006, 0.0001, 0.0004)
    outside: float = 0.005
    letters: dict[str, Four] = field(default_factory=dict)

    def layers(self, kind: int, letters: str, kinds: str) -> list[tuple[str, float]]:
        """The layers of a stage; of those of a hybrid model, ``*`` has the attention."""
        found: list[tuple[str, float]] = []
        for letter in kinds or [""] * letters.count("t"):
            whole = self.letters[letter][kind] if letter else self.layer[kind]
            attention = self.attention[kind] if letter in "*" else 0.0
            attends = [(of_kind(ATTENTION, letter), attention)] if attention else []
            half = (of_kind(LAYERS, letter), (whole - attention) / 2)
            found += [half, *attends, half]
        if kinds and kind == 0:
            found.insert(0, (LAYERS, 0.0))
        return (found if kind == 0 else found[::-1]) or [(LAYERS, 0.0)]

    def segments(self, kind: int, letters: str, kinds: str = "") -> list[tuple[str, float]]:
        """What a pass of a stage does, in its order."""
        layers = self.layers(kind, letters, kinds)
        first = self.embedding[kind] if "E" in letters else 0.0
        last = self.output[kind] if "L" in letters else 0.0
        prediction = letters.count("m") * self.multi_token[kind]
        before, after = self.before[kind], self.after[kind]
        if kind == 0:
            data = self.data if set(letters) & {"E", "L"} else 0.0
            return [
                (BEFORE, before / 2),
                (DATA, data),
                (BEFORE, before / 2 + first),
                *layers,
                (AFTER, after / 2),
                (MULTI_TOKEN, prediction),
                (AFTER, after / 2 + last),
            ]
        if kind in (1, 3):
            return [
                (BEFORE, before + last),
                (MULTI_TOKEN, prediction),
                *layers,
                (AFTER, after + first),
            ]
        weights = [(OUTPUT, last), (MULTI_TOKEN, prediction), *layers]
        return [(BEFORE, before), *weights, (AFTER, after)]

    def seconds(self, kind: int, letters: str, kinds: str = "") -> float:
        return sum(seconds for _, seconds in self.segments(kind, letters, kinds))

    def costs(self, placement: Placement, letters: Letters, pattern: str = "") -> schedules.Costs:
        """Of a placement, host included."""
        stages = list(zip(letters, kinds_of(letters, pattern), strict=True))
        of = [[self.seconds(k, *stage) + self.host[k] for stage in stages] for k in range(4)]
        named: Any = dict(zip(KINDS, of, strict=True))
        return schedules.Costs.of_slices(pipeline_size=placement.pipeline_size, **named)


def letters_of(placement: Placement, multi_token: int = 0) -> Letters:
    counts = layout.spread(Layers(LAYERS_IN_ALL), placement)
    return layout.lettered(counts, multi_token)


def kinds_of(letters: Letters, pattern: str) -> list[str]:
    """The kinds of each stage's layers."""
    kinds = iter(pattern)
    return ["".join(islice(kinds, stage.count("t"))) for stage in letters]


def step(
    truth: Truth, schedule: schedules.Schedule, letters: Letters, rank: int, pattern: str = ""
) -> list[Span]:
    """What a recorder of a rank that never waits would say of a step."""
    kinds = kinds_of(letters, pattern)
    clock = 0.1
    spans: list[Span] = []
    for work in schedule.ranks[rank]:
        kind = PASSES.index(work.kind)
        clock += truth.host[kind] if spans else 0.0
        start, marks = clock, []
        for name, seconds in truth.segments(kind, letters[work.stage], kinds[work.stage]):
            marks.append((name, clock))
            clock += seconds
        spans.append(Span(work, start, clock, tuple(marks[1:])))
    return spans


def profile_of(truth: Truth, name: str, multi_token: int = 0, pattern: str = "") -> Profile:
    """Of a run of a schedule, as :mod:`megatron_zb.megatron_core.profiling` puts it together."""
    usual = schedules.build(name, pipeline_size=P, num_microbatches=M)
    split, whole = split_all(usual), join_all(usual)
    placement = usual.placement
    letters = letters_of(placement, multi_token)
    kinds = kinds_of(letters, pattern)
    times, stages = [], []
    for rank, held in enumerate(placement.stages_of):
        within = {
            **_mean_within([step(truth, whole, letters, rank, pattern)] * 2),
            **_mean_within([step(truth, split, letters, rank, pattern)] * 3),
        }
        for stage in held:
            of = [within[kind, stage] for kind in PASSES]
            times.append(StageTimes(letters[stage], *of, kinds=kinds[stage]))
    for stage, rank in enumerate(placement.rank_of):
        seconds = {k: truth.seconds(i, letters[stage], kinds[stage]) for i, k in enumerate(KINDS)}
        memory = {"activation": 100 * letters[stage].count("t"), "held_for_weight": 10}
        stages.append({"rank": rank, "layers": letters[stage], **seconds, **memory})
    found, attention = parts.of_stages(times), parts.attention_of(times, PACKED)
    assert found is not None
    host = _before_passes(*([step(truth, order, letters, 0)] for order in (split, whole)))
    model = {"layers": LAYERS_IN_ALL, "hidden_size": 64, "sequence_length": 32, "microbatch": 1}
    return Profile.model_validate(
        {
            "version": 1,
            "device": "CPU",
            "schedule": name,
            "pipeline_size": P,
            "num_microbatches": M,
            "message": 8,
            "model": {**model, "tensor": 1, "context": 1, "pattern": pattern or None},
            "stages": stages,
            "links": [],
            "parts": found.model_dump(),
            "attention": attention and attention.model_dump(),
            "host": host.model_dump(),
            "outside": truth.outside,
        }
    )


@pytest.mark.parametrize("name", ["zb-h1", "v-half"])
@pytest.mark.parametrize("multi_token", [0, 1])
def test_the_parts_are_those_that_were_put_in(name: str, multi_token: int) -> None:
    """Under zb-h1 on two ranks every stage has an end, and no stage is of layers alone."""
    truth = Truth()
    profile = profile_of(truth, name, multi_token)
    found = profile.parts
    assert found is not None
    empty = [a + b for a, b in zip(truth.before, truth.after, strict=True)]
    data = (truth.data, 0.0, 0.0, 0.0)
    known: dict[str, Any] = {
        "layer": truth.layer,
        "embedding": [a + b for a, b in zip(truth.embedding, data, strict=True)],
        "output": [a + b for a, b in zip(truth.output, data, strict=True)],
        "multi_token": [multi_token * seconds for seconds in truth.multi_token],
        "empty_pass": empty,
    }
    for part, seconds in known.items():
        measured = [getattr(getattr(found, part), kind) for kind in KINDS]
        assert measured == pytest.approx(list(seconds), rel=1e-6, abs=1e-9), part
    host = [getattr(profile.host, kind) for kind in KINDS]
    assert host == pytest.approx(list(truth.host), rel=1e-6)


@pytest.mark.parametrize("profiled", ["zb-h1", "v-half"])
@pytest.mark.parametrize("name", ["zb-h1", "1f1b-v", "v-half", "interleaved", "wave"])
def test_every_schedule_takes_as_long_as_the_truth_says(profiled: str, name: str) -> None:
    """Also those with twice and four times the passes of what was profiled."""
    truth = Truth()
    fit = Fit.of(profile_of(truth, profiled))
    chunks = 4 if name == "wave" else None
    schedule = schedules.build(name, pipeline_size=P, num_microbatches=M, chunks=chunks)
    placement = schedule.placement
    counts = layout.spread(Layers(LAYERS_IN_ALL), placement)
    predicted = schedules.simulate(schedule, fit.costs(placement, counts)).makespan
    known = schedules.simulate(schedule, truth.costs(placement, layout.lettered(counts))).makespan
    assert predicted == pytest.approx(known, rel=2e-3)


@pytest.mark.parametrize("more", [-0.002, 0.002])
def test_a_whole_backward_has_its_own_seconds(more: float) -> None:
    """A step of whole backwards takes them; where they take longer, none is joined."""
    split: Any = {"forward": [0.01, 0.01], "backward": [0.012, 0.012], "weight": [0.008, 0.008]}
    costs = schedules.Costs.of_slices(pipeline_size=2, **split, whole=[0.02 + more] * 2)
    assert costs.seconds[PassKind.BW] == (0.02 + more,) * 2
    timeline = schedules.simulate(
        schedules.build("1f1b", pipeline_size=2, num_microbatches=4), costs
    )
    # four of both on the busier rank, and what the other one does before and after
    assert timeline.makespan == pytest.approx(5 * (0.01 + 0.02 + more))
    built = schedules.build("zb-h1", pipeline_size=2, num_microbatches=4, costs=costs)
    joined = sum(p.kind is PassKind.BW for rank in built.ranks for p in rank)
    assert bool(joined) == (more < 0)
    assert built.report is not None
    assert built.report.lower_bound <= built.report.makespan * (1 + 1e-9)


def test_an_embedding_without_a_stage_of_its_own_is_not_nothing() -> None:
    embedding, output = Fit.of(profile_of(Truth(), "zb-h1")).in_layers()
    assert embedding == pytest.approx((0.0025 + 0.0007) / 0.03, rel=1e-3)
    assert output == pytest.approx((0.0125 + 0.0007) / 0.03, rel=1e-3)


def test_a_part_that_takes_longer_makes_no_other_longer() -> None:
    """Each figure by itself: what is put into one part is found in it alone."""
    draw = random.Random(1)
    usual = profile_of(Truth(), "zb-h1").parts
    assert usual is not None
    for part in ("layer", "embedding", "output"):
        more: Any = {part: tuple(draw.uniform(1, 2) * s for s in getattr(Truth(), part))}
        found = profile_of(Truth(**more), "zb-h1").parts
        assert found is not None
        for other in ("layer", "embedding", "output", "empty_pass"):
            same = getattr(found, other).total == pytest.approx(getattr(usual, other).total)
            assert same == (other != part), (part, other)


def test_attention_is_told_apart_from_linear_layers() -> None:
    """Its seconds are for pairs of tokens, theirs for tokens."""
    profile = profile_of(Truth(), "v-half")
    assert profile.attention is not None
    assert profile.attention.forward == pytest.approx(0.002)
    assert profile.attention.backward == pytest.approx(0.005)
    work = profile.attention_work
    assert work is not None
    tokens, squares = 80.0, (100**2 + 2 * 30**2) / 2
    assert work.forward == pytest.approx(0.002 / squares / (0.008 / tokens))
    assert work.backward == pytest.approx(0.005 / squares / (0.007 / tokens))


def test_attention_without_a_module_is_counted_as_before() -> None:
    profile = profile_of(Truth(attention=(0.0, 0.0, 0.0, 0.0)), "v-half")
    assert profile.parts is not None
    assert profile.attention is None
    assert profile.attention_work is None


def test_layers_that_have_no_marks_are_not_guessed() -> None:
    times = StageTimes("EttL", *[{BEFORE: 1.0}] * 4)
    assert parts.of_stages([times]) is None


HYBRID = Truth(
    letters={
        "*": (0.016, 0.02, 0.01, 0.033),
        "-": (0.004, 0.005, 0.004, 0.010),
        "M": (0.008, 0.03, 0.001, 0.032),
    }
)
PATTERN = "*-M-*M--"


@pytest.mark.parametrize("name", ["zb-h1", "v-half"])
@pytest.mark.parametrize("multi_token", [0, 1])
def test_the_letters_of_a_hybrid_model_are_those_that_were_put_in(
    name: str, multi_token: int
) -> None:
    profile = profile_of(HYBRID, name, multi_token, PATTERN)
    found = profile.parts
    assert found is not None
    assert list(found.letters) == ["*", "-", "M"]
    for letter, seconds in HYBRID.letters.items():
        measured = [getattr(found.letters[letter], kind) for kind in KINDS]
        assert measured == pytest.approx(list(seconds), rel=1e-6), letter
    mean = [sum(HYBRID.letters[kind][k] for kind in PATTERN) / LAYERS_IN_ALL for k in range(4)]
    assert [getattr(found.layer, kind) for kind in KINDS] == pytest.approx(mean, rel=1e-6)
    usual = profile_of(Truth(), name, multi_token).parts
    assert usual is not None
    for part in ("embedding", "output", "multi_token", "empty_pass"):
        expected = pytest.approx(getattr(usual, part).total, rel=1e-6, abs=1e-9)
        assert getattr(found, part).total == expected, part
    assert profile.attention is not None
    assert profile.attention.forward == pytest.approx(0.002 * 2 / LAYERS_IN_ALL)
    assert profile.attention.backward == pytest.approx(0.005 * 2 / LAYERS_IN_ALL)


def test_a_letter_that_takes_longer_makes_no_other_longer() -> None:
    usual = profile_of(HYBRID, "v-half", 0, PATTERN).parts
    assert usual is not None
    for letter in HYBRID.letters:
        longer = tuple(1.5 * seconds for seconds in HYBRID.letters[letter])
        letters: Any = {**HYBRID.letters, letter: longer}
        found = profile_of(Truth(letters=letters), "v-half", 0, PATTERN).parts
        assert found is not None
        for other, seconds in found.letters.items():
            factor = 1.5 if other == letter else 1.0
            assert seconds.total == pytest.approx(factor * usual.letters[other].total), other


@pytest.mark.parametrize("profiled", ["zb-h1", "v-half"])
@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (1, 2, 3, 2), (1, 1, 1, 5), (0, 4, 3, 1)])
def test_every_division_of_a_hybrid_model_takes_as_long_as_the_truth_says(
    profiled: str, counts: tuple[int, ...]
) -> None:
    """Also those in which stages have other letters than in what was profiled."""
    fit, placement = Fit.of(profile_of(HYBRID, profiled, 0, PATTERN)), v_shape(P)
    found = fit.costs(placement, counts).for_placement(placement)
    known = HYBRID.costs(placement, layout.lettered(counts), PATTERN).for_placement(placement)
    assert found.seconds[PassKind.F] == pytest.approx(known.seconds[PassKind.F], rel=2e-3)
    assert found.seconds[PassKind.B] == pytest.approx(known.seconds[PassKind.B], rel=2e-3)
    assert found.seconds[PassKind.W] == pytest.approx(known.seconds[PassKind.W], rel=2e-3)
    work = [sum(HYBRID.letters[kind][:3]) for kind in PATTERN]
    assert fit.work == pytest.approx([LAYERS_IN_ALL * one / sum(work) for one in work])


def test_layers_of_a_hybrid_model_that_one_stage_cannot_tell_apart_count_alike() -> None:
    """Such as frozen ones, which no gradient passes."""
    kinds = {of_kind(LAYERS, "*"): 3.0, of_kind(LAYERS, "-"): 1.0}
    apart = StageTimes("Ett", kinds, kinds, kinds, kinds, kinds="*-")
    frozen = {LAYERS: 0.0, of_kind(LAYERS, "-"): 4.0}
    partly = StageTimes("ttL", kinds, frozen, kinds, kinds, kinds="*-")
    found, of_both = parts.of_stages([apart, apart]), parts.of_stages([apart, partly])
    assert found is not None and of_both is not None
    assert {kind: of.forward for kind, of in found.letters.items()} == {"*": 3.0, "-": 1.0}
    assert of_both.letters == {}
    assert (of_both.layer.forward, of_both.layer.backward) == (2.0, 2.0)
    unknown = parts.of_stages([StageTimes("EttL", kinds, kinds, kinds, kinds)])
    assert unknown is not None and unknown.letters == {}, "the pattern is not known"
    assert unknown.layer.forward == 2.0


def test_a_segment_lasts_from_its_mark_to_the_next() -> None:
    found = parts.segments(1.0, 6.0, [(LAYERS, 1.5), (AFTER, 4.0), (LAYERS, 4.5)])
    assert found == {BEFORE: 0.5, LAYERS: 4.0, AFTER: 0.5}


def test_upstream_stands_in_the_ranking() -> None:
    """With blocking messages 1F1B takes longer than ours, without any it is level."""
    profile = profile_of(Truth(), "zb-h1")
    found, missing = rows(ProfileRequest(profile, M, None, False), candidates_of(["zb-h1", "1f1b"]))
    assert missing == {}
    by_name = {(row.candidate, row.chunks): row for row in found}
    upstream, ours = by_name[MEGATRON_1F1B, None], by_name["1f1b", None]
    assert upstream.seconds == pytest.approx(ours.seconds)
    assert (MEGATRON_INTERLEAVED, 2) in by_name
    links = [{"source": a, "target": 1 - a, "seconds": 0.004} for a in (0, 1)]
    slow = Profile.model_validate({**profile.model_dump(), "links": links})
    found, _ = rows(ProfileRequest(slow, M, None, False), candidates_of(["1f1b"]))
    by_name = {(row.candidate, row.chunks): row for row in found}
    assert by_name[MEGATRON_1F1B, None].seconds > by_name["1f1b", None].seconds + 0.01
    odd, missing = rows(ProfileRequest(profile, M + 1, None, False), candidates_of(["1f1b"]))
    assert MEGATRON_INTERLEAVED not in {row.candidate for row in odd}
    assert "it needs whole groups of 2 microbatches" in missing[f"{MEGATRON_INTERLEAVED} ×2"]


def test_a_profile_without_what_may_be_left_out_is_read() -> None:
    profile = profile_of(Truth(), "v-half")
    old = profile.model_dump(exclude={"parts": True, "host": True, "outside": True})
    old["stages"] = [{k: v for k, v in s.items() if k != "whole"} for s in old["stages"]]
    fit = Fit.of(Profile.model_validate(old))
    placement = v_shape(P)
    assert fit.parts["forward"].layer == pytest.approx((0.020 + 0.0005) / 2)
    assert len(fit.costs(placement, (2, 2, 2, 2)).seconds[PassKind.F]) == 4

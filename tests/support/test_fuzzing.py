"""The space of combinations, and the comparison of their logs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
from fuzzing import trial
from fuzzing.comparison import compare
from fuzzing.covering import covering_array, pairs_of
from fuzzing.drawing import draw
from fuzzing.shrinking import shrink
from fuzzing.space import Impossible, Setting, Space, space_of
from fuzzing.trial import Bench, Verdict, judge
from jobs import Ended

RESULTS = Path(__file__).resolve().parents[2] / "docs/results/fuzzing.jsonl"


def setting(name: str, *values: str) -> Setting:
    return Setting(name, {value: {} for value in values})


SMALL = Space(
    "0.16",
    "",
    {
        s.name: s
        for s in (setting("a", "1", "2", "3"), setting("b", "x", "y"), setting("c", "p", "q"))
    },
    (Impossible({"a": frozenset("3"), "b": frozenset("y")}, "for example"),),
)


def test_every_possible_pair_is_in_the_covering_array() -> None:
    rows = list(covering_array(SMALL, "seed"))
    seen = {pair for row in rows for pair in combinations(sorted(row.items()), 2)}
    assert len(seen) == 3 * 2 + 3 * 2 + 2 * 2 - 1
    assert (("a", "3"), ("b", "y")) not in seen


def test_pairs_of_earlier_runs_are_left_out() -> None:
    first, *others = covering_array(SMALL, "seed")
    rows = list(covering_array(SMALL, "other", pairs_of(first)))
    assert 0 < len(rows) <= len(others) + 1
    every = {pair for row in covering_array(SMALL, "seed") for pair in pairs_of(row)}
    assert {pair for row in rows for pair in pairs_of(row)} >= every - pairs_of(first)
    assert not list(covering_array(SMALL, "other", every))


def test_a_value_can_be_fixed_in_all_rows() -> None:
    rows = list(covering_array(SMALL.with_fixed("a", "3"), "seed"))
    assert {row["a"] for row in rows} == {"3"}
    assert {(row["b"], row["c"]) for row in rows} == {("x", "p"), ("x", "q")}
    with pytest.raises(ValueError, match="a has no value 4"):
        SMALL.with_fixed("a", "4")


@pytest.mark.slow
def test_a_draw_follows_from_its_seed_and_keeps_the_rules() -> None:
    space = space_of("0.19")
    first = draw(space, "1/2")
    assert first == draw(space, "1/2")
    assert first != draw(space, "1/3")
    assert first.keys() == space.settings.keys()
    for number in range(5):
        assert space.why_not(draw(space, f"rules/{number}")) is None


def test_a_failure_is_shrunk_to_what_it_needs() -> None:
    found = shrink(SMALL, {"a": "2", "b": "y", "c": "q"}, lambda tried: tried["b"] == "y")
    assert found == {"a": "1", "b": "y", "c": "p"}


def combination(**values: str) -> dict[str, str]:
    usual = dict.fromkeys(("slices", "balanced", "post_validation", "sequence_parallel"), "without")
    usual |= {"vocabulary": "whole", "clip": "0", "layers": "even", **values}
    named = {name.replace("_", "-"): value for name, value in usual.items()}
    return draw(space_of("0.16"), "compare/0") | named


NORM = {"4 grad norm": "1.0"}, {"4 grad norm": "1.0000001"}
Z_LOSS = {"4 z_loss": "1.917968750E+00"}, {"4 z_loss": "1.914062500E+00"}
USUAL = {"1 lm loss": "4.0", "1 grad norm": "1.0"}


@pytest.mark.parametrize(
    ("logs", "values", "first"),
    [
        ((USUAL, USUAL), {"schedule": "zb-h1"}, ""),
        ((USUAL, USUAL | {"1 lm loss": "4.000000001"}), {"schedule": "zb-h1"}, "1 lm loss"),
        ((USUAL, USUAL | {"1 grad norm": "1.0000001"}), {"schedule": "v-half"}, ""),
        ((USUAL, USUAL | {"1 grad norm": "1.001"}), {"schedule": "v-half"}, "1 grad norm"),
        ((USUAL, {"1 lm loss": "4.0"}), {"schedule": "zb-h1"}, "logged by one alone"),
        # post-validation sums norms along the pipeline
        (NORM, {"schedule": "zb-h1", "post_validation": "with"}, ""),
        (NORM, {"schedule": "zb-h1", "post_validation": "without"}, "4 grad norm"),
        # a z-loss has the rounding of its precision
        (Z_LOSS, {"slices": "four", "precision": "bf16"}, ""),
        (Z_LOSS, {"slices": "four", "precision": "fp16"}, "4 z_loss"),
        (Z_LOSS, {"slices": "four", "precision": "fp32"}, "4 z_loss"),
    ],
)
def test_logs_are_compared(
    logs: tuple[dict[str, str], dict[str, str]], values: dict[str, str], first: str
) -> None:
    found = compare(*logs, combination(**values)).first
    assert found.startswith(first)
    assert bool(found) is bool(first)


def test_a_run_that_goes_on_has_the_rounding_of_both_its_schedules() -> None:
    first, then = combination(schedule="zb-1p"), combination(schedule="v-zb")
    assert compare(*NORM, first).first
    assert not compare(*NORM, first, then).first
    assert not compare(*NORM, then, first).first


def test_kept_results_are_of_settings_that_there_are() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        space = space_of(row["megatron"])
        usual = {name: each.default for name, each in space.settings.items()}
        assert all(value in space.settings[name].values for name, value in row["unusual"].items())
        assert row["verdict"] not in [each.value for each in Verdict if each.is_failure]
        assert space.unusual({**usual, **row["unusual"]}) == row["unusual"]
    assert sum(row["verdict"] == Verdict.EQUAL.value for row in rows) > 200


@pytest.mark.parametrize(
    ("why", "checked"),
    [
        ("its state is of other weights", True),
        ("the state has the parameter groups of the rank that wrote it", False),
    ],
)
def test_ours_gets_the_checkpoint_that_upstream_cannot_load(
    why: str, checked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    space = space_of("0.16")
    usual = {name: each.default for name, each in space.settings.items()}
    report = {"argument": "--load", "verdict": "refused", "why": why}

    def tried(ranks: int | None, program: str, words: Sequence[str], *_: object) -> Ended:
        if ranks is None:
            found = [report] if checked and "--load" in words else []
            return Ended(0, json.dumps({"arguments": found}), "", 1.0)
        if "--load" not in words:
            return Ended(0, "", "", 1.0)
        ours = "--pipeline-schedule" in words
        return Ended(1, "", f"megatron_zb: error: {why}" if ours else "KeyError: 'step'", 1.0)

    monkeypatch.setattr(trial, "try_job", tried)
    assert judge(Bench(space, tmp_path), usual).verdict is Verdict.REFUSED_BY_BOTH

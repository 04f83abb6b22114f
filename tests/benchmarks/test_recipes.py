"""The count of public recipes that go with a schedule."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import hybrid_recipes  # noqa: E402
import recipes  # noqa: E402


@pytest.mark.parametrize(("schedule", "least"), [("v-half", 270), ("zb-h1", 160)])
def test_recipes_run_and_the_rest_have_a_reason(schedule: str, least: int) -> None:
    every = recipes.read()
    runs, stopped, reasons = recipes.counted(every, schedule)
    assert len(every) == 294
    assert runs >= least
    assert set(stopped) == set(reasons)
    assert all(reasons.values())


def test_what_counts_as_running_has_a_test_or_a_script() -> None:
    shown = {
        pair
        for recipe in recipes.read()
        if not recipes.in_the_way(recipe, "v-half")
        for pair in recipes.unseen(recipe, "v-half")
    }
    assert len(shown) > 5
    assert all((ROOT / shown_by).is_file() for _, shown_by in shown)


def test_a_recipe_becomes_arguments() -> None:
    found = [r for r in recipes.read() if r["precision"] == "fp8_mx" and r["cuda_graph_impl"]]
    words = " ".join(recipes.words_of(found[0]))
    assert "--fp8-format e4m3 --fp8-recipe mxfp8" in words
    assert f"--cuda-graph-impl {found[0]['cuda_graph_impl']} " in words
    assert "--num-virtual-stages-per-pipeline-rank" not in words


def test_a_recipe_predicts_the_tokens_that_its_base_recipe_asks_for() -> None:
    for_speed = recipes.read(recipes.RECIPES[0])
    found = [" ".join(recipes.words_of(r)) for r in for_speed if "deepseek_v3" in r["recipe"]]
    assert len(found) == 36
    assert all("--mtp-num-layers 1 " in words for words in found)


def test_recipes_of_hybrid_models_run_with_their_patterns() -> None:
    hybrids = [recipe for recipe in recipes.read() if recipes.is_hybrid(recipe)]
    assert len(hybrids) == 6
    for recipe in hybrids:
        words = recipes.words_of(recipe)
        pattern = words[words.index("--hybrid-layer-pattern") + 1]
        assert pattern.endswith("/*E/*E")
        assert "--num-layers" not in words
    for schedule in ("v-half", "zb-h1"):
        assert recipes.counted(hybrids, schedule)[0] == 6
        assert recipes.counted(hybrids, schedule, *recipes.SHARDED)[0] == 6


def test_a_sharded_output_layer_is_counted_beside_each_schedule() -> None:
    """Of CUDA graphs, it excludes those that go with the schedule alone."""
    captured = [recipe for recipe in recipes.read() if recipe["cuda_graph_impl"]]
    runs = next(recipe for recipe in captured if not recipes.in_the_way(recipe, "v-half"))
    plain = {**runs, "cuda_graph_impl": "", "cuda_graph_scope": ""}
    assert recipes.in_the_way(runs, "v-half", *recipes.SHARDED).keys() == {"--cuda-graph-impl"}
    assert recipes.counted([runs, plain], "v-half", *recipes.SHARDED)[0] == 1


def test_the_results_have_the_recipes_of_hybrid_models() -> None:
    text = (ROOT / "docs/results/hybrid_recipes.json").read_text(encoding="utf-8")
    found = [row["recipe"] for row in json.loads(text)["rows"]]
    assert found == [recipe["recipe"] for recipe in hybrid_recipes.recipes_of_patterns()]

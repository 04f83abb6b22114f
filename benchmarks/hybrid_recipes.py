#!/usr/bin/env python3
"""Count what public recipes of hybrid models gain by balanced layers and vocabulary parallelism.

For each recipe of data/recipes.csv and data/recipes_other.csv whose model has a pattern, with the
costs that `megatron-zb plan` counts for the GPUs in its name, this simulates

  its own schedule    1F1B, or Megatron's interleaved schedule with the recipe's chunks, with as
                      many layers of the pattern on each stage
  v-zb, even          as many layers on each stage
  v-zb, balanced      layers of the stages by the costs of their letters
  v-zb, sharded       the same, with a vocabulary-parallel output layer

v-zb holds as many activations as 1F1B. Recomputation is that of the recipe where the planner counts
its modules. Qwen3-Next's recipes train a GPTModel, whose 48 layers a pattern writes as 96. Whether
a recipe fits into the memory of its GPUs is not decided here. LoRA's recipes, whose weights are
frozen, those with context parallelism, which the planner does not count for Mamba-2, and those with
a layout of their own are left out.

Writes docs/results/hybrid_recipes.json; docs/make_recipes.py makes the page.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipe_gains import Shape, model_of, shape_of
from recipes import RECIPES, Recipe, read

from megatron_zb.measured.config import builtin_folder
from megatron_zb.plan import operators
from megatron_zb.plan.device import read_device
from megatron_zb.plan.prediction import IterationSettings, predict
from megatron_zb.plan.stages import StageWorkload, cut_into_stages
from megatron_zb.plan.strategy import ScheduleCandidate, Strategy, candidates_of
from megatron_zb.plan.work import Workload
from megatron_zb.schedules.layout import Layers, spread

RESULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "hybrid_recipes.json"
DEVICES = {
    "h100": "h100_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200_nvl72",
    "gb300": "gb300_nvl72",
}
GPUS = {"nemotron_3_super_pretrain_config": ("64", "h100")}  # the one name without them


def recipes_of_patterns() -> list[Recipe]:
    """Return the recipes whose model is, or can be, written as a pattern."""
    return [recipe for recipe in read(*RECIPES) if _is_hybrid(recipe)]


def _is_hybrid(recipe: Recipe) -> bool:
    model = model_of(recipe)
    is_counted = "_peft_" not in recipe["recipe"] and recipe["context_parallel_size"] in ("", "1")
    is_counted &= not recipe["pipeline_model_parallel_layout"]
    return is_counted and model is not None and model.pattern is not None


def load_of(recipe: Recipe) -> Workload:
    """Return the workload of a recipe on one of its tensor-parallel ranks."""
    model, shape = model_of(recipe), shape_of(recipe)
    assert model is not None and shape is not None
    name = recipe["recipe"]
    found = re.search(r"_(\d+)gpu_(\w+?)_", name)
    gpus, device = found.groups() if found else GPUS[name]
    tensor = int(recipe["tensor_model_parallel_size"] or 1)
    modules = ast.literal_eval(recipe["recompute_modules"] or "[]")
    counted = [module for module in modules if module in operators.MODULES]
    strategy = Strategy(
        tensor=tensor,
        pipeline=shape.pipeline,
        data=int(gpus) // (shape.pipeline * tensor),
        expert=int(recipe["expert_model_parallel_size"] or 1),
        microbatch=int(recipe["micro_batch_size"] or 1),
        recompute="+".join(counted) or "none",
        precision="fp8" if recipe["precision"].startswith(("fp8", "nvfp4")) else "bf16",
    )
    described = read_device(builtin_folder("devices") / f"{DEVICES[device]}.yaml")
    return Workload(model, described, strategy, model.sequence_length)


def ways(load: Workload, shape: Shape) -> Iterator[tuple[str, float]]:
    """Yield the seconds of an iteration in each way."""
    one, interleaved = candidates_of(())[:2]
    (v_zb,) = candidates_of(["v-zb"])[2:]
    own, chunks = (one, None) if shape.chunks == 1 else (interleaved, shape.chunks)
    yield "own", _seconds(_even(load, own, chunks), own, shape, chunks)
    yield "even", _seconds(_even(load, v_zb, None), v_zb, shape)
    for name, sharded in (("balanced", False), ("sharded", True)):
        candidate = replace(v_zb, vocabulary_parallel=sharded)
        staged = cut_into_stages(load, candidate, None)
        assert staged is not None
        yield name, _seconds(staged, candidate, shape)


def _even(load: Workload, candidate: ScheduleCandidate, chunks: int | None) -> StageWorkload:
    placement = candidate.placement(load.strategy.pipeline, chunks)
    return StageWorkload(load, placement, spread(Layers(load.model.layers), placement))


def _seconds(
    staged: StageWorkload, candidate: ScheduleCandidate, shape: Shape, chunks: int | None = None
) -> float:
    settings = IterationSettings(shape.microbatches)
    return predict(staged, candidate, settings, chunks).seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULT, metavar="FILE")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for recipe in recipes_of_patterns():
        shape = shape_of(recipe)
        if shape is None:
            continue
        seconds = {name: round(value, 4) for name, value in ways(load_of(recipe), shape)}
        rows.append({"recipe": recipe["recipe"], **vars(shape), **seconds})
        gains = (f"{name} {seconds['own'] / seconds[name] - 1:+.1%}" for name in seconds)
        print(f"{recipe['recipe']}: {', '.join(gains)}", flush=True)
    arguments.output.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"recipes": len(rows)}))


if __name__ == "__main__":
    main()

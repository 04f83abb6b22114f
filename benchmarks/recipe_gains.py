#!/usr/bin/env python3
"""Simulate what public recipes gain by a schedule of this package at the same memory.

data/recipes.csv and data/recipes_other.csv have the settings of the 294 recipes of Megatron-Bridge
(August 2026) that have a pipeline: performance pre-training, and pre-training, fine-tuning and
LoRA of its library; where a recipe names no batch, that of the common recipe it is made from. For
each recipe whose batch its ranks divide, this simulates

  its own schedule       1F1B, or Megatron's interleaved schedule with the recipe's chunks
  auto, same memory      the fastest order that `auto` finds on a V within its own schedule's memory
  v-half                 time and memory beside its own schedule
  auto, not recomputed   where the recipe recomputes: the fastest order on a V that keeps every
                         activation in no more bytes than its own schedule holds of what
                         recomputation leaves, if there is one

with equal stages: F, B and W of 1, 1.2 and 0.8 and messages of 0.01 on each rank, 1F1B and chunks
alike. What recomputation leaves of the activations is counted from the sizes of
data/recipe_models.yaml as by `megatron-zb plan`; the time that it takes is left out, as are layers
and overlaps, so this ranks recipes; `megatron-zb plan` predicts one of them. Above 6p microbatches,
steps are continued from two shorter ones.

Writes docs/results/recipe_gains.json; docs/make_recipes.py makes the page. About 15 minutes.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import yaml

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.config import builtin_folder
from megatron_zb.plan import operators
from megatron_zb.plan.byte_counts import layer_held
from megatron_zb.plan.device import read_device
from megatron_zb.plan.model import ModelConfig, read_model
from megatron_zb.plan.strategy import Strategy
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import Costs

ROOT = Path(__file__).resolve().parents[1]
DATA = (ROOT / "benchmarks/data/recipes.csv", ROOT / "benchmarks/data/recipes_other.csv")
RESULT = ROOT / "docs/results/recipe_gains.json"
MODELS = ROOT / "benchmarks/data/recipe_models.yaml"
FORWARD, BACKWARD, WEIGHT, P2P = 1.0, 1.2, 0.8, 0.01
GPUS = {"nemotron_3_super_pretrain_config": 64}  # the one name without their number


@dataclass(frozen=True)
class Shape:
    """What decides the bubble of a recipe: pipeline ranks, microbatches, chunks per rank."""

    pipeline: int
    microbatches: int
    chunks: int


@dataclass(frozen=True)
class Gain:
    """Steps in the time of one microbatch on a rank, and memory in microbatches of 1F1B's ranks."""

    own: float
    own_memory: float
    auto: float
    v_half: float
    v_half_memory: float


def shape_of(recipe: dict[str, str]) -> Shape | None:
    """Return the shape of a recipe; None if its ranks do not divide its batch."""
    found = re.search(r"_(\d+)gpu_", recipe["recipe"])
    gpus = int(found[1]) if found else GPUS[recipe["recipe"]]
    columns = ("pipeline", "tensor")
    pipeline, tensor = (int(recipe[f"{name}_model_parallel_size"] or 1) for name in columns)
    context = int(recipe["context_parallel_size"] or 1)
    data, rest = divmod(gpus, pipeline * tensor * context)
    if rest or data == 0:
        return None
    samples = int(recipe["micro_batch_size"] or 1) * data
    microbatches, rest = divmod(int(recipe["global_batch_size"]), samples)
    if rest or microbatches == 0:
        return None
    return Shape(pipeline, microbatches, int(recipe["virtual_pipeline_model_parallel_size"] or 1))


@cache
def gain_of(shape: Shape) -> Gain:
    """Simulate a shape's own schedule, ``auto`` within its memory, and ``v-half``."""
    p = shape.pipeline
    if shape.chunks == 1:
        own, memory = _step("1f1b", shape)
    else:
        own, memory = _step("interleaved", shape, chunks=shape.chunks)
    limit = memory / min(p, shape.microbatches)
    auto, _ = _step("auto", shape, chunks=2, memory_limit=max(limit, 1e-9))
    half, held = _step("v-half", shape)
    return Gain(own, memory, min(auto, half) if held <= memory else auto, half, held)


@cache
def without_recomputation(shape: Shape, kept: float) -> float | None:
    """Return the fastest step that recomputes nothing in the same bytes; None if there is none.

    Args:
        shape: of the recipe.
        kept: what its recomputation leaves, as a share of the activations.
    """
    limit = gain_of(shape).own_memory * kept / min(shape.pipeline, shape.microbatches)
    try:
        return _step("auto", shape, chunks=2, memory_limit=limit)[0]
    except UsageError:  # the smallest limit is larger
        return None


@cache
def _models() -> dict[str, ModelConfig]:
    """Return the models whose sizes are known, by how the names of recipes begin."""
    found = {}
    for name, sizes in yaml.safe_load(MODELS.read_text(encoding="utf-8")).items():
        if isinstance(sizes, str):
            found[name] = read_model(builtin_folder("models") / f"{sizes}.yaml")
        else:
            about = {"name": name, "source": "config.json", "sequence_length": 4096}
            found[name] = ModelConfig(**about, global_batch_size=512, **sizes)
    return found


def model_of(recipe: dict[str, str]) -> ModelConfig | None:
    """Return the model of a recipe, if its sizes are known."""
    return next((m for name, m in _models().items() if recipe["recipe"].startswith(name)), None)


def share_kept(recipe: dict[str, str]) -> float | None:
    """Return what a recipe's recomputation leaves of a stage's activations; None if unknown.

    Layers of a hybrid model differ, so that it is not the same on all stages.
    """
    model = model_of(recipe)
    modules = ast.literal_eval(recipe["recompute_modules"] or "[]")
    kind = "+".join(modules) or recipe["recompute_granularity"]
    if (
        model is None
        or model.pattern is not None
        or any(module not in operators.MODULES for module in modules)
    ):
        return None
    held, left = (
        sum(layer_held(_load(model, recipe, how), i).activation for i in range(model.layers))
        for how in ("none", kind)
    )
    return left / held


def _load(model: ModelConfig, recipe: dict[str, str], recompute: str) -> Workload:
    strategy = Strategy(
        tensor=int(recipe["tensor_model_parallel_size"] or 1),
        pipeline=int(recipe["pipeline_model_parallel_size"]),
        data=1,
        expert=1,
        microbatch=1,
        recompute=recompute,
        precision="fp8" if recipe["precision"].startswith(("fp8", "nvfp4")) else "bf16",
    )
    device = read_device(builtin_folder("devices") / "h100_sxm.yaml")
    return Workload(model, device, strategy, model.sequence_length)


def _step(name: str, shape: Shape, **options: float) -> tuple[float, float]:
    """Return the makespan of a step and the peak of its activations."""
    p, m = shape.pipeline, shape.microbatches
    if m <= 6 * p:
        return _simulated(name, p, m, **options)
    (some, _), (more, memory) = (_simulated(name, p, n * p, **options) for n in (4, 5))
    least = FORWARD + BACKWARD + WEIGHT
    return more + (m - 5 * p) * max((more - some) / p, least), memory


@cache
def _simulated(name: str, p: int, m: int, **options: float) -> tuple[float, float]:
    costs = Costs.uniform(
        pipeline_size=p, forward=FORWARD, backward=BACKWARD, weight=WEIGHT, p2p=P2P
    )
    built = schedules.build(name, pipeline_size=p, num_microbatches=m, costs=costs, **options)  # type: ignore[arg-type]
    timeline = schedules.simulate(built, costs)
    return timeline.makespan, max(timeline.peak_activation)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULT, metavar="FILE")
    arguments = parser.parse_args()
    rows, unsized = [], []
    for path in DATA:
        with path.open(encoding="utf-8", newline="") as file:
            recipes = list(csv.DictReader(file))
        for recipe in recipes:
            shape = shape_of(recipe)
            if shape is None:
                unsized.append(recipe["recipe"])
                continue
            gain = gain_of(shape)
            about = {"recipe": recipe["recipe"], "recompute": recipe["recompute_granularity"]}
            rows.append({**about, "from": path.stem, **asdict(shape), **asdict(gain)})
            said = f"{recipe['recipe']}: {gain.own / gain.auto - 1:+.1%}"
            kept = share_kept(recipe) if recipe["recompute_granularity"] else None
            if kept is not None:
                kept_all = without_recomputation(shape, round(kept, 3))
                rows[-1] |= {"kept": round(kept, 3), "without": kept_all}
                less = "no" if kept_all is None else f"in {kept_all / gain.own:.2f} of the time"
                said += f"; keeps {kept:.2f}, without recomputation: {less}"
            print(said, flush=True)
    costs = {"forward": FORWARD, "backward": BACKWARD, "weight": WEIGHT, "p2p": P2P}
    result = {"costs": costs, "rows": rows, "without_a_size": unsized}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"recipes": len(rows), "without_a_size": len(unsized)}))


if __name__ == "__main__":
    main()

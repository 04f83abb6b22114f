#!/usr/bin/env python3
"""Count the public recipes with a pipeline that run with each schedule.

  python benchmarks/recipes.py
  python benchmarks/recipes.py --schedule v-zb

data/recipes.csv and data/recipes_other.csv have the settings of the 294 recipes of Megatron-Bridge
(August 2026) whose pipeline has 2 ranks or more: 175 of pre-training for speed, and the others,
fine-tuning and LoRA among them, whose adapters and packing are no flags. Each is turned into
arguments of Megatron-LM and checked as by ``megatron-zb check``, at no size but its parallel
sizes: the schedule places the layers, so that a recipe's own chunks and layout are left out. The
vision-language ones are of classes that tests/trainers/test_vision.py trains; nothing is trained
here. Beside each schedule is the number that also run with a vocabulary-parallel output layer, and
how many of these, and of all, have a hybrid pattern. The last line is JSON: how many run with
--schedule, of all, of those for speed and of hybrid ones, and how many recipes each setting is in
the way of.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import io
import json
import re
import warnings
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that fused kernels are not installed
    from megatron_zb.megatron_lm import checking
    from megatron_zb.megatron_lm.argument_table import Verdict

from megatron_zb import schedules
from megatron_zb.schedules import catalog

DATA = Path(__file__).with_name("data")
RECIPES = (DATA / "recipes.csv", DATA / "recipes_other.csv")
VERSION = "0.19"
Recipe = dict[str, str]

PRECISIONS = {
    "": "",
    "bf16": "--bf16",
    "fp8_cs": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "fp8_mx": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4",
}
# Of the columns that are no numbers of ranks: the flags of a setting that is on.
SWITCHES = {
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm "
    "--moe-token-dispatcher-type alltoall",  # the only ones with it are this and flex
    "delay_wgrad_compute": "--delay-wgrad-compute",
    "overlap_param_gather_with_optimizer_step": "--overlap-param-gather-with-optimizer-step",
    "moe_paged_stash": "--moe-paged-stash --use-transformer-engine-op-fuser",  # which it needs
    "fine_grained_activation_offloading": "--fine-grained-activation-offloading",
    "tp_comm_overlap": "--tp-comm-overlap",
    "sequence_parallel": "--sequence-parallel",
}
VALUES = {
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "cuda_graph_impl": "--cuda-graph-impl",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
    "moe_flex_dispatcher_backend": "--moe-flex-dispatcher-backend",
    "recompute_granularity": "--recompute-granularity",
    "mtp_num_layers": "--mtp-num-layers",
    "global_batch_size": "--global-batch-size",
    "micro_batch_size": "--micro-batch-size",
}
LISTS = {"recompute_modules": "--recompute-modules", "cuda_graph_scope": "--cuda-graph-modules"}
# What a model brings along that no column says.
MODELS = {
    "deepseek_v3": "--multi-latent-attention --moe-router-enable-expert-bias",
    "kimi_k2": "--multi-latent-attention --moe-router-enable-expert-bias",
    "qwen3_next": "--experimental-attention-variant gated_delta_net",
    "gpt_oss": "--softmax-type learnable",
    "qwen35_vl": "--experimental-attention-variant gated_delta_net",
    "kimi_k25": "--multi-latent-attention --moe-router-enable-expert-bias",
    "glm5": "--multi-latent-attention --experimental-attention-variant dsa",
    "nemotron_3_super": "--hybrid-layer-pattern MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
    "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME/*E/*E",
    "nemotron_3_ultra": "--hybrid-layer-pattern MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*"
    "EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME/*E/*E",
}
SHARDED = ("--pipeline-vocabulary", "on")
# Depths of multi-token prediction that a base recipe sets, where no column says them.
PREDICTED = {
    "deepseek_v3": 1,
    "glm5": 1,
    "glm45_": 1,
    "qwen3_next": 1,
    "qwen35_vl": 1,
    "nemotron_3_super": 2,
    "nemotron_3_ultra": 2,
}
NOT_A_FLAG = {
    "deepseek_v4": "hyper-connections, which no release of Megatron-LM has",
    "step3": "layers that write into the config that all chunks of a rank share",
}


def words_of(recipe: Recipe) -> list[str]:
    """Return a recipe as arguments of Megatron-LM."""
    words = PRECISIONS[recipe["precision"]].split()
    for column, flags in SWITCHES.items():
        words += flags.split() if recipe[column] == "True" else []
    for column, flag in VALUES.items():
        if recipe[column]:
            words += [flag, recipe[column]]
    for column, flag in LISTS.items():
        if recipe[column]:
            words += [flag, *ast.literal_eval(recipe[column])]
    if recipe["overlap_param_gather_with_optimizer_step"]:
        words += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if recipe["expert_model_parallel_size"] not in ("", "1"):
        words += ["--num-experts", recipe["expert_model_parallel_size"]]
    if recipe["cuda_graph_impl"]:
        words += ["--te-rng-tracker", "--pipeline-random-streams", "rank"]
    for model, more in MODELS.items():
        if recipe["recipe"].startswith(model):
            words += more.split()
    for model, depths in PREDICTED.items():
        if recipe["recipe"].startswith(model) and not recipe["mtp_num_layers"]:
            words += ["--mtp-num-layers", str(depths)]
    return words if is_hybrid(recipe) else [*words, "--num-layers", "64"]


def is_hybrid(recipe: Recipe) -> bool:
    """Return whether a recipe trains a HybridModel, whose layers a pattern writes."""
    return any(
        recipe["recipe"].startswith(model)
        for model, more in MODELS.items()
        if more.startswith("--hybrid-layer-pattern")
    )


def in_the_way(recipe: Recipe, schedule: str, *more: str) -> dict[str, str]:
    """Return the settings of a recipe that do not go with a schedule, with the reasons.

    Args:
        recipe: the recipe.
        schedule: name of the schedule.
        more: further arguments.
    """
    found = {
        name: why
        for name, why in NOT_A_FLAG.items()
        if recipe["recipe"].startswith(name) and not (name == "step3" and _has_one_chunk(schedule))
    }
    return found | {_name(c.flag): c.finding.why for c in _stopping(recipe, schedule, *more)}


def _name(flag: str) -> str:
    return flag.split()[0] if flag.startswith("--") else flag


def unseen(recipe: Recipe, schedule: str) -> set[tuple[str, str]]:
    """Return the settings of a recipe that only a GPU can show, each with what will show it."""
    report = _report(recipe, schedule)
    return {(c.flag, c.finding.shown_by) for c in report.of(Verdict.UNSEEN)}


def _has_one_chunk(schedule: str) -> bool:
    placements = catalog.possible_placements(catalog.family(schedule), 4, None, None)
    return any(placement.chunks == 1 for placement in placements)


def _stopping(recipe: Recipe, schedule: str, *more: str) -> list[checking.Checked]:
    report = _report(recipe, schedule, *more)
    return report.of(Verdict.REFUSED) + report.of(Verdict.UNKNOWN)


def _report(recipe: Recipe, schedule: str, *more: str) -> checking.CheckReport:
    gpus = re.search(r"_(\d+)gpu_", recipe["recipe"])
    words = [*words_of(recipe), "--pipeline-schedule", schedule, *more]
    with contextlib.redirect_stdout(io.StringIO()):
        args = checking.parse(words, VERSION, int(gpus[1]) if gpus else None)
        return checking.check(args, VERSION, build=None)


def read(*paths: Path) -> list[Recipe]:
    """Return the recipes of some files, or all."""
    found = []
    for path in paths or RECIPES:
        with path.open(encoding="utf-8", newline="") as file:
            found += list(csv.DictReader(file))
    return found


def counted(
    recipes: list[Recipe], schedule: str, *more: str
) -> tuple[int, Counter[str], dict[str, str]]:
    """Return how many recipes run, how many each setting is in the way of, and the reasons."""
    stopped: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    runs = 0
    for recipe in recipes:
        found = in_the_way(recipe, schedule, *more)
        runs += not found
        stopped.update(found.keys())
        reasons |= found
    return runs, stopped, reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="v-half", help="of the last line (default: v-half)")
    arguments = parser.parse_args()
    recipes, console = read(), Console()
    hybrids = [recipe for recipe in recipes if is_hybrid(recipe)]
    of_all, of_hybrids = f"of {len(recipes)}", f"of {len(hybrids)} hybrid"
    table = Table(
        "schedule", of_all, of_hybrids, f"sharded {of_all}", f"sharded {of_hybrids}", box=None
    )
    for name in schedules.names():
        ways = ((recipes, ()), (hybrids, ()), (recipes, SHARDED), (hybrids, SHARDED))
        table.add_row(name, *(str(counted(each, name, *more)[0]) for each, more in ways))
    console.print(table)
    runs, stopped, reasons = counted(recipes, arguments.schedule)
    table = Table("in the way", "recipes", "why", title=f"with {arguments.schedule}", box=None)
    for flag, count in stopped.most_common():
        table.add_row(flag, str(count), str(reasons[flag]))
    console.print(table)
    table = Table("runs, but only a GPU can show", "recipes", "shown by", box=None)
    seen = Counter(
        pair
        for recipe in recipes
        if not in_the_way(recipe, arguments.schedule)
        for pair in unseen(recipe, arguments.schedule)
    )
    for (flag, shown_by), count in seen.most_common():
        table.add_row(flag, str(count), shown_by)
    console.print(table)
    for_speed = read(RECIPES[0])
    found = {"runs": runs, "of": len(recipes), "in_the_way": dict(stopped)}
    found["for_speed"] = [counted(for_speed, arguments.schedule)[0], len(for_speed)]
    found["hybrid"] = [counted(hybrids, arguments.schedule)[0], len(hybrids)]
    found["hybrid_sharded"] = [counted(hybrids, arguments.schedule, *SHARDED)[0], len(hybrids)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

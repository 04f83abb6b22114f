#!/usr/bin/env python3
"""Train with the features that no CPU can run, under Megatron-LM's own schedule and under others.

  python benchmarks/gpu/features.py --megatron-lm ~/Megatron-LM --gpus 8 --output features.json
  python benchmarks/gpu/features.py --megatron-lm ~/Megatron-LM --cpu --gpus 2 --only baseline
  python benchmarks/gpu/features.py --megatron-lm ~/Megatron-LM --share-gpu --gpus 2 --at-once 4

Each feature is a set of arguments for a small GPT on data that Megatron-LM makes up. Its own
schedule trains an iteration and writes a checkpoint; from that, its own schedule and each of
--schedules train a few more, without dropout. The losses that are printed must be equal: there are
no tied weights and no norm of all gradients, whose sums depend on where layers are. Token slices
and a vocabulary-parallel output layer round in other places: ``within`` is by how much their losses
differ at most, as a share, which --tolerance bounds. A feature that Megatron-LM itself cannot run
here, for want of GPUs or of a library, says so and counts as not shown. Ranks that share a GPU need
NCCL 2.31 or newer, which LD_PRELOAD can put before torch's. The last line is JSON; exit status 0 if
all that ran was equal.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from launched_ranks import reason_of, run_ranks, started_ranks

MODEL = """
--mock-data --tokenizer-type NullTokenizer --vocab-size 1024 --num-layers 8 --hidden-size 256
--num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 --micro-batch-size 2
--global-batch-size 32 --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --lr-decay-iters 20
--train-iters 6 --eval-iters 0 --eval-interval 100 --log-interval 1 --ckpt-format torch_dist --bf16
--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --clip-grad 0
--dist-ckpt-optim-fully-reshardable
"""
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear"
SPREAD = f"{EXPERTS} --expert-model-parallel-size 2"
# It needs a GPU with mxfp8, and NVTE_CUTEDSL_FUSED_GROUPED_MLP=1.
STASH = (
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-router-dtype "
    "fp32 --moe-expert-rank-capacity-factor 1.5 --moe-paged-stash --swiglu "
    "--moe-mlp-glu-interleave-size 32 --use-transformer-engine-op-fuser --fp8-format e4m3 "
    "--fp8-recipe mxfp8"
)
FEATURES = {
    "baseline": "",
    "fp8, current scaling": "--fp8-format hybrid --fp8-recipe tensorwise",
    "fp8, delayed scaling": "--fp8-format hybrid --fp8-recipe delayed",
    "fp8, blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4",
    "fp8 parameters": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather "
    "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce",
    "distributed optimizer, overlapped": "--use-distributed-optimizer --overlap-param-gather "
    "--overlap-grad-reduce",
    "tensor parallelism": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tensor-parallel overlap": "--tensor-model-parallel-size 2 --sequence-parallel "
    "--tp-comm-overlap",
    "context parallelism, ring": "--context-parallel-size 2 --cp-comm-type p2p",
    "context parallelism, all-gather": "--context-parallel-size 2 --cp-comm-type all_gather",
    "context parallelism, all-to-all": "--context-parallel-size 2 --cp-comm-type a2a",
    "experts, all-to-all": f"{SPREAD} --moe-token-dispatcher-type alltoall",
    "experts, DeepEP": f"{SPREAD} --moe-token-dispatcher-type flex "
    "--moe-flex-dispatcher-backend deepep --moe-router-dtype fp32",
    "experts, HybridEP": f"{SPREAD} --moe-token-dispatcher-type flex "
    "--moe-flex-dispatcher-backend hybridep --moe-router-dtype fp32",
    "experts, paged stash": f"{SPREAD} {STASH}",
    "experts, tensor-parallel": f"{SPREAD} --expert-tensor-parallel-size 2 "
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "shared expert, overlapped": f"{SPREAD} --moe-token-dispatcher-type alltoall "
    "--moe-shared-expert-intermediate-size 256 --moe-shared-expert-overlap",
    "fused permutation": f"{SPREAD} --moe-token-dispatcher-type alltoall --moe-permute-fusion",
    "fused router": f"{EXPERTS} --moe-router-fusion",
    "fused cross entropy": "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    "recomputed up-projections": "--multi-latent-attention --recompute-granularity selective "
    "--recompute-modules mla_up_proj",
    "recomputed norms and activations": f"{EXPERTS} --recompute-granularity selective "
    "--recompute-modules layernorm moe_act",
    "recomputed MLP": "--disable-bias-linear --recompute-granularity selective "
    "--recompute-modules mlp",
    "recomputed experts": f"{EXPERTS} --recompute-granularity selective --recompute-modules moe",
    "recomputed shared expert": f"{EXPERTS} --moe-shared-expert-intermediate-size 256 "
    "--recompute-granularity selective --recompute-modules shared_experts",
    "Muon": "--optimizer muon",
    "Muon, spread over ranks by layers": "--optimizer dist_muon",
    "optimizer on the CPU": "--optimizer-cpu-offload --use-precision-aware-optimizer "
    "--use-distributed-optimizer",
    "NCCL user buffers": "--use-nccl-ub --use-distributed-optimizer --overlap-grad-reduce",
    "two instances of the distributed optimizer": "--use-distributed-optimizer "
    "--num-distributed-optimizer-instances 2 --overlap-grad-reduce",
    "gated delta layers": "--experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 2",
    "Mamba, attention, MLP and expert layers": f"{EXPERTS} --hybrid-layer-pattern M*M-MEME",
    "gated delta layers of a hybrid model": "--hybrid-layer-pattern G*G-G*G-",
    "graphs of Transformer-Engine": "--cuda-graph-impl transformer_engine --te-rng-tracker",
    "graph of the whole iteration": "--cuda-graph-impl full_iteration --te-rng-tracker "
    "--no-check-for-nan-in-loss-and-grad",
}
ROUNDED = ("--pipeline-slices", "--pipeline-vocabulary")
_LOSS = re.compile(r"iteration +(\d+)/ +\d+ .* lm loss: (\S+) ")


def train(arguments: argparse.Namespace, words: str) -> tuple[dict[int, str], str]:
    """Return the losses by iteration, and the end of what was printed; no losses if it failed."""
    script = "pretrain_hybrid.py" if "--hybrid-layer-pattern" in words else "pretrain_gpt.py"
    program = ["-m", "megatron_zb.launch", *["--cpu"] * arguments.cpu]
    program += [str(arguments.megatron_lm / script), *MODEL.split()]
    program += [*words.split(), *arguments.more.split()]
    launched = started_ranks(arguments.gpus, arguments.share_gpu)
    with arguments.places:
        problem, text = run_ranks(launched, program, arguments.seconds)
    found = {int(number): loss for number, loss in _LOSS.findall(text)}
    if not problem:
        return found, ""
    return {}, f"{problem} after {len(found)} iterations; {reason_of(text)}"


def compare(arguments: argparse.Namespace, feature: str) -> list[dict[str, Any]]:
    """Return a row for each schedule: whether its losses are those of Megatron-LM's own."""
    flags = FEATURES[feature]
    with tempfile.TemporaryDirectory() as folder:
        saved, why = train(
            arguments, f"{flags} --save {folder} --save-interval 1 --exit-interval 1"
        )
        upstream, why = train(arguments, f"{flags} --load {folder}") if saved else ({}, why)
        if not upstream:
            return [{"feature": feature, "schedule": None, "equal": None, "why": why}]
        beside = partial(_beside, arguments, feature, f"{flags} --load {folder}", upstream)
        names = arguments.schedules.split(",")
        with ThreadPoolExecutor(len(names)) as threads:
            return list(threads.map(beside, names))


def _beside(
    arguments: argparse.Namespace, feature: str, words: str, upstream: dict[int, str], name: str
) -> dict[str, Any]:
    """Return the row of one schedule."""
    ours, why = train(arguments, f"{words} --pipeline-schedule {name}")
    row = {"feature": feature, "schedule": name, "equal": ours == upstream, "why": why}
    if any(flag in name for flag in ROUNDED) and ours.keys() == upstream.keys():
        row["within"] = max(abs(float(ours[i]) / float(upstream[i]) - 1) for i in upstream)
    return {**row, "upstream": upstream, "ours": ours}


def _said(row: dict[str, Any], tolerance: float) -> str:
    """Return what a row says: whether losses are equal, or as near as rounding lets them be."""
    if not row["equal"] and row.get("within", math.inf) <= tolerance:
        return f"within {row['within']:.1e}"
    return {None: "not shown", True: "equal", False: "DIFFERS"}[row["equal"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron-lm", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="ranks (default 8)")
    parser.add_argument(
        "--schedules",
        default="zb-h1,v-half,v-zb",
        metavar="NAMES",
        help='with more flags, if need be: "v-half,v-half --pipeline-offload auto"',
    )
    parser.add_argument(
        "--seconds", type=float, default=900.0, metavar="N", help="of one training (default 900)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=FEATURES, default=list(FEATURES), help="some of the features"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=5e-3,
        metavar="X",
        help="of rounded losses (default 5e-3)",
    )
    parser.add_argument("--more", default="", metavar="ARGUMENTS", help="of all trainings")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="trainings (default 1)")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks take the first GPU")
    parser.add_argument("--cpu", action="store_true", help="on CPU ranks, to try this script")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the JSON goes, too")
    arguments = parser.parse_args()
    rows = []
    arguments.places = BoundedSemaphore(arguments.at_once)
    with ThreadPoolExecutor(len(arguments.only)) as threads:
        for compared in threads.map(partial(compare, arguments), arguments.only):
            rows += compared
            for row in compared:
                said = _said(row, arguments.tolerance)
                name = f"{row['feature']}, {row['schedule'] or 'Megatron-LM'}"
                print(f"{name}: {said} {row['why']}", flush=True)
    device = "cpu" if arguments.cpu else "cuda"
    text = json.dumps(
        {
            "benchmark": "features",
            "device": device,
            "ranks": arguments.gpus,
            "tolerance": arguments.tolerance,
            "rows": rows,
        }
    )
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(any(_said(row, arguments.tolerance) == "DIFFERS" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Do steps that are replayed from CUDA graphs give what they give without, over NCCL or gloo?

Takes a few steps down the gradient, without graphs and with them: the first before they are
captured, the others from them. Losses and gradients of every step must be equal to the last bit.
Every rank has a GPU:

  torchrun --nproc-per-node 4 benchmarks/gpu/graphs.py --graphs full_iteration
  torchrun --nproc-per-node 4 benchmarks/gpu/graphs.py --graphs transformer_engine
  torchrun --nproc-per-node 4 benchmarks/gpu/graphs.py --graphs transformer_engine \
    --precision current

The first captures whole iterations of Megatron's local layers, messages included; the second every
layer of Transformer-Engine's by itself, which needs Transformer-Engine; the third the same in fp8,
with an evaluation after the capture, which may not touch the weights that graphs have quantised.
With ``--share-device`` all ranks have one GPU, and messages go over gloo, which no graph can have:
it goes with the second and the third. On a CPU nothing can be captured: ``--device cpu`` says
whether the steps around it work, and nothing about graphs.

The first rank prints a JSON line for every schedule, and all end with exit status 1 when a result
was another. A replay that hangs is ended by torch after ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import layer_sizes
import one_device
import torch
import torch.distributed as dist
from layer_sizes import LOCAL, TRANSFORMER_ENGINE

SIZES = layer_sizes.LayerSizes(
    hidden=1024, heads=16, ffn_hidden=2752, seq_length=512, micro_batch_size=1
)
VOCABULARY, SEED = 4096, 7
STEPS = 5  # the second is captured, the others after it are replayed
RATE = 1e-3  # of the steps down the gradient

PRECISIONS: dict[str, dict[str, str]] = {
    "bf16": {},
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}

Outcome = tuple[list[float], list[torch.Tensor]]


def main() -> None:
    args = _arguments()
    device = one_device.choose(args.device)
    _start(device, args.seconds, args.share_device)
    equal = [_try(args, device, schedule) for schedule in args.schedules]
    dist.destroy_process_group()
    sys.exit(not all(equal))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive = one_device.at_least_one
    kinds = ["full_iteration", "transformer_engine"]
    parser.add_argument("--graphs", choices=kinds, default=kinds[0])
    parser.add_argument("--precision", choices=[*PRECISIONS], default="bf16")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    names = ["v-half", "v-zb", "zb-h1", "interleaved", "1f1b"]
    parser.add_argument("--schedules", nargs="+", default=names, metavar="NAME")
    parser.add_argument("--layers", type=positive, default=16, metavar="N", help="(default 16)")
    parser.add_argument("--microbatches", type=positive, default=8, metavar="N", help="(default 8)")
    parser.add_argument("--seconds", type=positive, default=60, metavar="N", help="(default 60)")
    parser.add_argument("--share-device", action="store_true", help="one GPU for all ranks, gloo")
    layer_sizes.add_options(parser, SIZES, SIZES)
    args = parser.parse_args()
    if args.share_device and args.graphs == "full_iteration":
        parser.error("--share-device goes with --graphs transformer_engine: gloo is in no graph")
    if args.graphs == "full_iteration" and args.precision != "bf16":
        parser.error("--precision goes with --graphs transformer_engine: local layers have bf16")
    return args


def _start(device: torch.device, seconds: int, share_device: bool) -> None:
    os.environ["NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"] = "1"  # or no two runs are equal
    os.environ.update(one_device.REPEATABLE)
    if device.type == "cpu":
        from megatron_zb.cpu_ranks import run_on_cpu

        run_on_cpu()
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(0 if share_device else int(os.environ["LOCAL_RANK"]))
    if share_device:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        from host_memory_channels import share_the_gpu

        share_the_gpu()
    backend = "nccl" if device.type == "cuda" and not share_device else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))


def _try(args: argparse.Namespace, device: torch.device, schedule: str) -> bool:
    """Whether all steps of a schedule came to the same; prints what was found."""
    expected, _ = _steps(args, device, schedule, graphed=False)
    outcomes, seconds = _steps(args, device, schedule, graphed=True)
    equal = [_are_equal(a, b) for a, b in zip(expected, outcomes, strict=True)]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, equal)
    line = {
        "benchmark": "graphs",
        "machine": one_device.describe(device),
        "graphs": args.graphs if device.type == "cuda" else "none: a CPU captures nothing",
        "precision": args.precision,
        "schedule": schedule,
        "ranks": dist.get_world_size(),
        "equal": found,
        "step_seconds": seconds,
    }
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)
    return all(map(all, found))


def _steps(
    args: argparse.Namespace, device: torch.device, schedule: str, graphed: bool
) -> tuple[list[Outcome], list[float]]:
    """What some steps of a new model come to, and their seconds."""
    sizes = replace(layer_sizes.chosen(args, device, SIZES, SIZES), vocabulary=VOCABULARY)
    adapter, chunks = _built(args, device, sizes, schedule, graphed)
    function, capture = _with_graphs(args, device, adapter, chunks, graphed)
    outcomes, seconds = [], []
    for step in range(STEPS):
        if step == 1:
            capture()
            if args.precision != "bf16":
                _evaluate(args, device, sizes, function, chunks)
        begin = time.perf_counter()
        outcomes.append(_step(args, device, sizes, function, chunks))
        seconds.append(time.perf_counter() - begin)
        for weight in (weight for chunk in chunks for weight in chunk.parameters()):
            weight.data.add_(weight.main_grad, alpha=-RATE)
    adapter.forward_backward_func.close()
    return outcomes, seconds


def _built(
    args: argparse.Namespace,
    device: torch.device,
    sizes: layer_sizes.LayerSizes,
    schedule: str,
    graphed: bool,
) -> tuple[Any, list[Any]]:
    """The adapter of a schedule, and this rank's chunks with weights by their names."""
    import gpt_layers
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_zb.megatron_core.adapter import JobSizes, PipelineAdapter, ScheduleSettings
    from megatron_zb.megatron_core.random_streams import initialise_by_global_name
    from megatron_zb.schedules.layout import Layers

    ranks, on_gpu = dist.get_world_size(), device.type == "cuda"
    adapter = PipelineAdapter.create(
        ScheduleSettings(pipeline_schedule=schedule),
        JobSizes(
            pipeline_size=ranks,
            num_microbatches=args.microbatches,
            layers=Layers(args.layers),
        ),
    )
    parallel_state.destroy_model_parallel()
    choose = adapter.embedding_ranks
    more: dict[str, Any] = {}
    if choose is not None:
        more["get_embedding_ranks"] = lambda of_pipeline, _=None: choose(of_pipeline)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=adapter.virtual_pipeline_size,
        create_gloo_process_groups=False,
        **more,
    )
    of_te = args.graphs == "transformer_engine" and on_gpu
    model_parallel_cuda_manual_seed(
        SEED, te_rng_tracker=of_te, use_cudagraphable_rng=on_gpu, force_reset_rng=True
    )
    implementation = TRANSFORMER_ENGINE if of_te else LOCAL
    config = gpt_layers.configuration(
        sizes,
        args.layers,
        torch.bfloat16 if on_gpu else torch.float32,
        device,
        implementation,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=adapter.virtual_pipeline_size,
        pipeline_model_parallel_layout=adapter.layer_layout,
        cuda_graph_impl="transformer_engine" if of_te and graphed else "none",
        cuda_graph_warmup_steps=1,
        **(PRECISIONS[args.precision] if of_te else {}),
    )
    if of_te:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()  # the scales of another model
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = [
        gpt_layers.build(
            config,
            sizes,
            implementation,
            device,
            ends=(adapter.pre_process(rank, chunk), adapter.post_process(rank, chunk)),
            vp_stage=chunk if adapter.chunks > 1 else None,
        )
        for chunk in range(adapter.chunks)
    ]
    initialise_by_global_name(chunks, config, SEED)
    adapter.prepare_model(chunks)
    return adapter, [gpt_layers.with_main_grads(chunk) for chunk in chunks]


def _with_graphs(
    args: argparse.Namespace, device: torch.device, adapter: Any, chunks: list[Any], graphed: bool
) -> tuple[Any, Any]:
    """The function of a step, and what is to be called between the first and the second."""
    function = adapter.forward_backward_func
    if device.type == "cpu" or not graphed:
        return function, lambda: None
    if args.graphs == "full_iteration":
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

        FullCudaGraphWrapper.curr_iteration = {"training": 0, "validation": 0}
        FullCudaGraphWrapper.cuda_graph = {"training": None, "validation": None}
        StaticBufferLoader.static_buffers = {"training": [], "validation": []}
        return FullCudaGraphWrapper(function, cuda_graph_warmup_steps=1), lambda: None
    from megatron.core import num_microbatches_calculator
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        dist.get_rank(), None, args.microbatches, 1, 1
    )
    sizes = layer_sizes.chosen(args, device, SIZES, SIZES)
    helper = TECudaGraphHelper(chunks, chunks[0].config, sizes.seq_length, sizes.micro_batch_size)
    return function, lambda: adapter.create_graphs(helper)


def _step(
    args: argparse.Namespace,
    device: torch.device,
    sizes: layer_sizes.LayerSizes,
    function: Any,
    chunks: list[Any],
) -> Outcome:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    records = _run(args, device, sizes, function, chunks)
    torch.cuda.synchronize()
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    return [float(r["loss"]) for r in records], [w.main_grad.clone() for w in weights]


def _evaluate(
    args: argparse.Namespace,
    device: torch.device,
    sizes: layer_sizes.LayerSizes,
    function: Any,
    chunks: list[Any],
) -> None:
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        _run(args, device, sizes, function, chunks, forward_only=True)
    for chunk in chunks:
        chunk.train()


def _run(
    args: argparse.Namespace,
    device: torch.device,
    sizes: layer_sizes.LayerSizes,
    function: Any,
    chunks: list[Any],
    forward_only: bool = False,
) -> list[dict[str, torch.Tensor]]:
    data = [_batches(args, device, sizes) for _ in chunks]
    records: list[dict[str, torch.Tensor]] = function(
        forward_step_func=_forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=args.microbatches,
        seq_length=sizes.seq_length,
        micro_batch_size=sizes.micro_batch_size,
        forward_only=forward_only,
    )
    return records


def _batches(
    args: argparse.Namespace, device: torch.device, sizes: layer_sizes.LayerSizes
) -> Iterator[dict[str, torch.Tensor]]:
    shape = (sizes.micro_batch_size, sizes.seq_length + 1)
    for microbatch in range(args.microbatches):
        generator = torch.Generator().manual_seed(microbatch)
        tokens = torch.randint(sizes.vocabulary, shape, generator=generator).to(device)
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def _forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    batch = next(batches)
    return model(batch["tokens"], None, None), partial(_loss, batch["labels"])


def _loss(labels: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    flat = logits.float().view(-1, logits.size(-1))
    loss = torch.nn.functional.cross_entropy(flat, labels.view(-1))
    return loss, {"loss": loss.detach().clone()}


def _are_equal(expected: Outcome, found: Outcome) -> bool:
    same_gradients = all(torch.equal(a, b) for a, b in zip(expected[1], found[1], strict=True))
    return expected[0] == found[0] and same_gradients


if __name__ == "__main__":
    one_device.run(main)

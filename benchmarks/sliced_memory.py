#!/usr/bin/env python3
"""Activation memory of token slices in a training: measured on CPU ranks, beside 1F1B's.

A GPT of Megatron's local layers is trained for a step under Megatron's order, 1F1B, on whole
microbatches, and under schedules of slices. Every rank counts the bytes that it keeps for backward,
for W and as messages; scores of attention are computed again, as fused kernels do. The most of any
rank is compared with what the simulator promises, in units of a microbatch, whose bytes are those
of 1F1B's first rank divided by what it holds, and with 1F1B's most.

  python benchmarks/sliced_memory.py             # 8 ranks, 16 microbatches of 8 slices

A schedule named "..., limited" drops slices to keep a tenth of 1F1B's memory.

Bars: at most 1.10 of the simulated peak, and at most 0.27 of 1F1B's with the sizes above. Prints a
table and, last, one JSON line; ends with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import provenance
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layer_sizes import LOCAL, LayerSizes
from rich.console import Console
from rich.table import Table

from megatron_zb.job.settings import ScheduleSettings
from megatron_zb.megatron_core.current_schedule import CurrentSchedule, JobSizes
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.schedules import Timeline
from megatron_zb.schedules.layout import Layers
from megatron_zb.train.synthetic_steps import join

BASE = "1f1b"
MOST_OVER, MOST_OF_BASE = 1.10, 0.27
LIMITED, LIMIT = ", limited", 0.1


@dataclass(frozen=True)
class Job:
    """A model and its step."""

    sizes: LayerSizes
    ranks: int
    layers: int
    microbatches: int
    slices: int
    schedules: tuple[str, ...]


def main() -> None:
    args = _arguments()
    sizes = LayerSizes(
        hidden=args.hidden,
        heads=max(1, args.hidden // 64),
        ffn_hidden=4 * args.hidden,
        seq_length=args.sequence,
        micro_batch_size=1,
        vocabulary=256,
    )
    layers = args.layers or 2 * args.ranks
    job = Job(sizes, args.ranks, layers, args.microbatches, args.slices, tuple(args.schedules))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(job, folder), nprocs=job.ranks)
        peaks = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    rows = {name: _compared(job, name, peaks) for name in (BASE, *job.schedules)}
    table = Table("schedule", "MiB of the worst rank", "microbatches", "simulated", "of 1F1B's")
    for name, row in rows.items():
        figures = (f"{row[key]:.3f}" for key in ("held", "simulated", "of_base"))
        table.add_row(name, f"{row['peak_bytes'] / 2**20:.2f}", *figures)
    Console(width=110).print(table)
    print(json.dumps({**provenance.of_this_run(), "job": asdict(job), "results": rows}))
    sliced = {name: rows[name] for name in job.schedules}
    missed = [
        name
        for name, row in sliced.items()
        if row["held"] > MOST_OVER * row["simulated"] or row["of_base"] > MOST_OF_BASE
    ]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    sys.exit(bool(missed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = partial(parser.add_argument, type=int, metavar="N")
    number("--ranks", default=8, help="pipeline ranks (default 8)")
    number("--layers", help="of the model (default 2 for each rank)")
    number("--hidden", default=128, help="hidden size (default 128)")
    number("--sequence", default=256, help="tokens of a sample (default 256)")
    number("--microbatches", default=16, help="of a step (default 16)")
    number("--slices", default=8, help="of a microbatch (default 8)")
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=["1f1b, sliced", "zb-h1", "v-half", f"v-zb{LIMITED}"],
        metavar="NAME",
    )
    return parser.parse_args()


def _asked(job: Job, name: str) -> tuple[ScheduleSettings, JobSizes]:
    is_limited = name.endswith(LIMITED)
    settings = ScheduleSettings(
        pipeline_schedule=name.removesuffix(", sliced").removesuffix(LIMITED),
        pipeline_slices=1 if name == BASE else job.slices,
        pipeline_recompute="auto" if is_limited else "off",
        pipeline_memory_limit=LIMIT if is_limited else None,
    )
    layers = Layers(job.layers)
    sizes = JobSizes(pipeline_size=job.ranks, num_microbatches=job.microbatches, layers=layers)
    return settings, sizes


def _timeline(job: Job, name: str) -> Timeline:
    """Simulate a schedule; passes take equally long, and W frees an activation."""
    return CurrentSchedule.named(*_asked(job, name)).timeline


def _compared(job: Job, name: str, peaks: dict[str, list[int]]) -> dict[str, float]:
    base = max(peaks[BASE])
    promised = {each: max(_timeline(job, each).peak_memory) for each in (BASE, name)}
    return {
        "peak_bytes": max(peaks[name]),
        "held": max(peaks[name]) / base * promised[BASE],
        "simulated": promised[name],
        "of_base": max(peaks[name]) / base,
    }


# --- a rank


def _rank(rank: int, job: Job, folder: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_zb.cpu_ranks import run_on_cpu

    run_on_cpu()
    join(rank, job.ranks, f"{folder}/meeting")
    found: dict[str, Any] = {}
    for name in (BASE, *job.schedules):
        chunks = _timeline(job, name).schedule.placement.chunks
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=job.ranks,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1)
        found[name] = [None] * job.ranks
        dist.all_gather_object(found[name], _peak(rank, job, name))
        parallel_state.destroy_model_parallel()
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _peak(rank: int, job: Job, name: str) -> int:
    """Return the most bytes of activations on this rank within a step."""
    adapter = _adapter(job, name)
    chunks = _model(rank, job, adapter)
    memory = ActivationMemory(p for chunk in chunks for p in chunk.parameters())
    adapter.track(memory)
    data = [_batches(job) for _ in chunks]
    with memory.watching():
        adapter.forward_backward_func(
            forward_step_func=_forward_step,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=job.microbatches,
            seq_length=job.sizes.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )
    adapter.forward_backward_func.close()
    return memory.peak_bytes


def _adapter(job: Job, name: str) -> Any:
    from megatron_zb.megatron_core.adapter import PipelineAdapter

    return PipelineAdapter.create(*_asked(job, name))


def _model(rank: int, job: Job, adapter: Any) -> list[Any]:
    import gpt_layers

    device = torch.device("cpu")
    config = gpt_layers.configuration(
        job.sizes,
        job.layers,
        torch.float32,
        device,
        LOCAL,
        pipeline_model_parallel_size=job.ranks,
        virtual_pipeline_model_parallel_size=adapter.virtual_pipeline_size,
        pipeline_model_parallel_layout=adapter.layer_layout,
        deallocate_pipeline_outputs=True,
        recompute_granularity="selective",
        recompute_modules=["core_attn"],
    )
    chunks = [
        gpt_layers.build(
            config,
            job.sizes,
            LOCAL,
            device,
            ends=(adapter.pre_process(rank, chunk), adapter.post_process(rank, chunk)),
            vp_stage=chunk if adapter.chunks > 1 else None,
        )
        for chunk in range(adapter.chunks)
    ]
    adapter.prepare_model(chunks)
    config.finalize_model_grads_func = adapter.finalize_model_grads
    wrapped = [gpt_layers.with_main_grads(chunk) for chunk in chunks]
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    return wrapped


def _batches(job: Job) -> Iterator[dict[str, torch.Tensor]]:
    length = job.sizes.seq_length
    for _ in range(job.microbatches):
        text = torch.randint(job.sizes.vocabulary, (1, length + 1))
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(1, length),
        }


def _forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    batch = next(data)
    output = model(batch["tokens"], None, None, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses.float() * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach()}


if __name__ == "__main__":
    main()

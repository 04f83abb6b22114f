#!/usr/bin/env python3
"""Activation memory of every rank of a pipeline, measured on one device.

The ranks of a schedule are replayed one after another, as they would train: the same program,
executor, stages and channels, with real transformer layers and their main_grads. Only the other
ranks are missing: what they would have sent is drawn at random where it would have arrived, and
what is sent to them leaves after the next pass. A rank's activation memory is its peak without
what was there before the step: weights and gradients. The table compares the worst rank of each
schedule with 1F1B's, and with what the simulator says: once with activations held whole until W,
once with the bytes that one layer was measured to hold after F and after B. ``v-half+8slices``
is v-half on microbatches cut into 8 token slices. ``--timed`` measures steps, too: what slices cost
a rank.

On a GPU everything that is allocated counts. On a CPU only what is kept for backward, for W and as
messages counts, not what an operation needs while it runs. Measures on a GPU if there is one, else
on the CPU. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import layer_sizes
import one_device
import torch
from layer_sizes import LOCAL_FLASH, LayerSizes
from one_device import DTYPES
from rich.console import Console
from rich.table import Table

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.runtime.channels import Channels
from megatron_zb.schedules.passes import Channel

BASE = "1f1b"
TIMED_STEPS = 2
TARGETS = {"v-zb": 1.03, "v-half": 0.66, "v-min": 0.54}  # on a GPU, 8 ranks, a 7B-like layer
SCHEDULES = ["1f1b", "zb-h1", "v-zb", "v-half", "v-min"]
ON_CPU = LayerSizes(hidden=128, heads=4, ffn_hidden=344, seq_length=128, micro_batch_size=1)


@dataclass(frozen=True)
class Job:
    """What all schedules are measured with."""

    pipeline_size: int
    num_microbatches: int
    layers_per_rank: int
    sizes: LayerSizes
    implementation: str
    dtype: str
    device: torch.device
    timed: bool = False


def main() -> None:
    args = _arguments()
    device = one_device.choose(args.device)
    job = Job(
        pipeline_size=args.ranks,
        num_microbatches=args.microbatches,
        layers_per_rank=args.layers_per_rank,
        sizes=layer_sizes.chosen(args, device, ON_CPU),
        implementation=args.implementation,
        dtype=args.dtype,
        device=device,
        timed=args.timed,
    )
    reason = layer_sizes.missing(job.implementation, device)
    if reason is not None:
        raise UsageError(f"--implementation {job.implementation}: {reason}")
    names = list(dict.fromkeys([BASE, *args.schedules]))
    tables = {name: _build(name, job) for name in names}
    one_device.start(device)
    layer = _bytes_of_one_layer(job)
    _warm_up(tables[BASE], job)
    results = {name: measure(table, job, layer) for name, table in tables.items()}
    one_device.finish()
    for result in results.values():
        if job.timed:
            result["seconds_ratio"] = result["step_seconds"] / results[BASE]["step_seconds"]
        for peak in ("peak_bytes", "promised_microbatches", "simulated_bytes"):
            result[f"{peak}_ratio"] = result[peak] / results[BASE][peak]
    _report(results, layer, job)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = partial(parser.add_argument, type=one_device.at_least_one, metavar="N")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    number("--ranks", default=8, help="pipeline ranks p (default 8)")
    number("--microbatches", default=16, help="m (default 16)")
    number("--layers-per-rank", default=4, help="shared out among its chunks (default 4)")
    layer_sizes.add_options(parser, ON_CPU)
    number(
        "--vocabulary",
        help="with an embedding and an output layer for N tokens (default: without both)",
    )
    parser.add_argument(
        "--implementation",
        choices=layer_sizes.IMPLEMENTATIONS,
        default=LOCAL_FLASH,
        help=f"see split_backward.py (default {LOCAL_FLASH})",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="(default bf16)")
    parser.add_argument(
        "--timed", action="store_true", help="also measure the seconds of every rank's steps"
    )
    parser.add_argument(
        "--schedules",
        nargs="+",
        default=SCHEDULES,
        metavar="NAME",
        help=f"{BASE} is always measured; v-half+8slices cuts them into 8 token slices "
        f"(default {' '.join(SCHEDULES)})",
    )
    return parser.parse_args()


def _build(name: str, job: Job) -> schedules.Schedule:
    """A schedule whose stages have equally many layers: ratios would mix in the placement."""
    family, _, slices = name.removesuffix("slices").partition("+")
    schedule = schedules.build(
        family,
        pipeline_size=job.pipeline_size,
        num_microbatches=job.num_microbatches,
        slices=int(slices or 1),
    )
    chunks = schedule.placement.chunks
    if job.layers_per_rank % chunks:
        raise UsageError(
            f"{name} has {chunks} chunks on every rank, among which --layers-per-rank "
            f"{job.layers_per_rank} cannot be shared out: give a multiple of {chunks}"
        )
    return schedule


class Finished:
    """A message from or to a rank that is not there; it is on its way during one pass."""

    def __init__(self) -> None:
        self._asked = False

    def wait(self) -> None:
        self._asked = True

    def is_completed(self) -> bool:
        asked, self._asked = self._asked, True
        return asked


class StandInPeers(Channels):
    """The channels of a rank whose peers are made up."""

    def __init__(self) -> None:
        self._prepare(torch.device("cpu"))

    def _isend(self, channel: Channel, tensor: torch.Tensor) -> Any:
        return Finished()

    def _irecv(self, channel: Channel, tensor: torch.Tensor) -> Any:
        tensor.normal_()
        return Finished()


@dataclass(frozen=True)
class Role:
    """What a chunk does at the ends of the model, as the iterator over its microbatches."""

    is_first: bool
    is_last: bool
    seq_length: int
    device: torch.device

    def __next__(self) -> dict[str, torch.Tensor]:
        return {"loss_mask": torch.ones(1, self.seq_length, device=self.device)}


def measure(schedule: schedules.Schedule, job: Job, layer: dict[str, int]) -> dict[str, Any]:
    """The peak of every rank, and what the simulator says."""
    begin = time.perf_counter()
    replays = [_replay(schedule, rank, job) for rank in range(job.pipeline_size)]
    peaks = [replay.peak_bytes for replay in replays]
    units = schedule.num_microbatches
    promised, simulated = (
        schedules.simulate(schedule, costs) for costs in (_costs(job), _costs(job, layer))
    )
    return {
        "peak_bytes": max(peaks),
        "worst_rank": peaks.index(max(peaks)),
        "peak_bytes_of_ranks": peaks,
        "promised_microbatches": max(promised.peak_activation) / units * job.num_microbatches,
        "simulated_bytes": max(simulated.peak_memory),
        "counted": replays[-1].counted,
        "step_seconds": max(replay.step_seconds for replay in replays),
        "seconds": time.perf_counter() - begin,
    }


def _costs(job: Job, layer: dict[str, int] | None = None) -> schedules.Costs:
    """Passes of equal time; with the bytes of a layer, what a rank holds after F and after B."""
    p = job.pipeline_size
    ones, held, kept = [1.0] * p, None, None
    if layer is not None:
        held = [float(job.layers_per_rank * layer["F"])] * p
        kept = [float(job.layers_per_rank * min(layer["F"], layer["B"]))] * p
    return schedules.Costs.of_slices(
        pipeline_size=p,
        forward=ones,
        backward=ones,
        weight=ones,
        activation=held,
        held_for_weight=kept,
    )


def _bytes_of_one_layer(job: Job) -> dict[str, int]:
    import gpt_layers

    sizes = replace(job.sizes, vocabulary=0)
    config = gpt_layers.configuration(sizes, 1, DTYPES[job.dtype], job.device, job.implementation)
    layers = gpt_layers.Layers(config, sizes, job.implementation, job.device)
    for name in ("F", "BW", "F", "B", "W"):  # libraries allocate what then stays
        layers.run(name)
    return layers.held_after(one_device.meter_of(job.device, [layers.model]))


def _warm_up(schedule: schedules.Schedule, job: Job) -> None:
    """One rank once, so that nothing is allocated for good while ranks are measured."""
    _replay(schedule, job.pipeline_size - 1, job)


@dataclass(frozen=True)
class Replay:
    """One rank's training step: its peak, what was counted, and the least seconds if timed."""

    peak_bytes: int
    counted: str
    step_seconds: float


def _replay(schedule: schedules.Schedule, rank: int, job: Job) -> Replay:
    """Replay one physical rank."""
    from megatron_zb.megatron_core.adapter import JobSizes, PipelineAdapter
    from megatron_zb.megatron_core.connections import ChannelsPart
    from megatron_zb.schedules.layout import Layers

    gc.collect()  # the models of the rank before
    adapter = PipelineAdapter.of_table(
        schedule,
        JobSizes(
            pipeline_size=job.pipeline_size,
            num_microbatches=job.num_microbatches,
            layers=Layers(job.layers_per_rank * job.pipeline_size),
        ),
    )
    chunks, roles = _build_chunks(adapter, rank, job)
    meter = one_device.meter_of(job.device, chunks)
    adapter.track(meter.activation_memory)
    function = adapter.forward_backward_func
    adapter.part(ChannelsPart).channels = StandInPeers()
    step = partial(
        function,
        forward_step_func=partial(_forward_step, job),
        data_iterator=roles,
        model=chunks,
        num_microbatches=job.num_microbatches,
        seq_length=job.sizes.seq_length,
        micro_batch_size=job.sizes.micro_batch_size,
        pg_collection=_groups(rank),
    )
    with meter.watching():
        step()
        peak = meter.peak_bytes
    seconds = [_timed(step) for _ in range(TIMED_STEPS)] if job.timed else [0.0]
    return Replay(peak, meter.counts, min(seconds))


def _timed(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _build_chunks(adapter: Any, rank: int, job: Job) -> tuple[list[Any], list[Role]]:
    """The wrapped model chunks of a rank and what they do."""
    import gpt_layers

    chunks, roles = [], []
    per_chunk = job.layers_per_rank // adapter.chunks
    config = gpt_layers.configuration(
        job.sizes, per_chunk, DTYPES[job.dtype], job.device, job.implementation
    )
    for chunk in range(adapter.chunks):
        ends = adapter.pre_process(rank, chunk), adapter.post_process(rank, chunk)
        role = Role(*ends, job.sizes.seq_length, job.device)
        roles.append(role)
        chunks.append(
            gpt_layers.build(
                config,
                job.sizes,
                job.implementation,
                job.device,
                ends=(
                    role.is_first and job.sizes.vocabulary > 0,
                    role.is_last and job.sizes.vocabulary > 0,
                ),
            )
        )
    adapter.prepare_model(chunks)
    return [gpt_layers.with_main_grads(chunk) for chunk in chunks], roles


def _groups(rank: int) -> Any:
    """Megatron's groups of this only rank, and another's place in the pipeline."""
    from megatron.core import parallel_state

    return SimpleNamespace(
        pp=SimpleNamespace(rank=lambda: rank),
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
    )


def _forward_step(job: Job, role: Role, model: Any) -> tuple[torch.Tensor, Any]:
    """One microbatch through a chunk; without an embedding, the model's input is drawn."""
    import gpt_layers

    length = next(role)["loss_mask"].shape[1]
    sizes, tokens, labels = replace(job.sizes, seq_length=length), None, None
    shape = (sizes.micro_batch_size, sizes.seq_length)
    if sizes.vocabulary and role.is_first:
        tokens = torch.randint(sizes.vocabulary, shape, device=job.device)
    elif role.is_first:
        activation = gpt_layers.message(sizes, DTYPES[job.dtype], job.device)
        model.module.set_input_tensor([activation.requires_grad_()])
        del activation
    if sizes.vocabulary and role.is_last:
        labels = torch.randint(sizes.vocabulary, shape, device=job.device)
    output = model(tokens, None, None, labels=labels)
    model.module.set_input_tensor([None])
    return output, _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return output.mean().float(), {}


def _targets(job: Job) -> dict[str, float]:
    """They are for layers alone, on 8 ranks: with fewer, all V-shaped schedules hold more."""
    return TARGETS if job.pipeline_size == 8 and not job.sizes.vocabulary else {}


def _report(results: dict[str, dict[str, Any]], layer: dict[str, int], job: Job) -> None:
    targets = _targets(job)
    table = Table(
        title=f"activation memory of the worst of {job.pipeline_size} ranks, "
        f"{job.num_microbatches} microbatches, {job.layers_per_rank} layers per rank"
    )
    for heading in ("schedule", "worst rank", "peak MiB", "ratio", "target on a GPU"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    table.add_column("simulated: held until W", justify="right")
    table.add_column("simulated: with B's release", justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            str(result["worst_rank"]),
            f"{result['peak_bytes'] / 2**20:.1f}",
            f"{result['peak_bytes_ratio']:.4f}",
            f"<= {targets[name]}" if name in targets else "",
            f"{result['promised_microbatches_ratio']:.4f}",
            f"{result['simulated_bytes_ratio']:.4f}",
        )
    console = Console(width=130)
    console.print(table)
    for name, result in results.items() if job.timed else ():
        console.print(
            f"{name}: steps of the slowest rank take {result['seconds_ratio']:.3f} of 1F1B's"
        )
    console.print(
        f"MiB are {results[BASE]['counted']}; one layer holds {layer['F'] / 2**20:.1f} after F "
        f"and {layer['B'] / 2**20:.1f} after B"
    )
    facts = {name: value for name, value in asdict(job).items() if name != "device"}
    line = {
        "benchmark": "rank_memory",
        "machine": one_device.describe(job.device),
        "job": facts,
        "held_bytes_of_one_layer": layer,
        "targets_on_a_gpu": targets,
        "results": results,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    one_device.run(main)

#!/usr/bin/env python3
"""A small GPT trained on CPU ranks with its output layer whole and sharded: losses, seconds, bytes.

  python benchmarks/vocabulary_training.py                                  # 500 steps
  python benchmarks/vocabulary_training.py --hidden 256 --sequence 128 --layers 16 --steps 8

Trains the same model, untied and in fp32, on data that can be learned, under Megatron's own 1F1B,
and under each of --schedules with even layers: its output layer whole, and vocabulary parallel
over all ranks. Of each it tells

  losses     the greatest relative distance of a step's loss from that of Megatron's own schedule
  seconds    processor time of the busiest rank's steps, over the mean of all ranks
  passes     the same of the passes alone, without the optimizer
  states     bytes of the weights, their gradients and the optimizer's states of the rank that has
             most, over the mean of all ranks
  logits     bytes of logits, or of what is made of them, that are kept for a later pass: the most
             at once on any rank, over the most of Megatron's own on its last rank divided by p

Bars, for shards: losses within 1e-4. A training magnifies what rounding differs by, soon where
it learns fast: where the output layer is whole, gradients are Megatron's bit for bit, and only the
norm that clips them is summed in another order. How far its losses are off is what rounding does.
Prints a table and, last, one JSON line with all losses; ends with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

import provenance
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layer_sizes import LOCAL_FLASH, LayerSizes
from rich.console import Console
from rich.table import Table

from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.train.synthetic_steps import join

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
UPSTREAM = "upstream 1f1b"
MOST_OFF = 1e-4
SUCCESSORS = 4
"""Tokens that may follow a token: the loss falls from that of the vocabulary to theirs."""
SKEW = 4
"""Words of low numbers are frequent, as in a text: a loss falls soon. 1 makes all alike."""


@dataclass(frozen=True)
class Job:
    """A model and its training; ``warm_up`` steps do not count for the seconds."""

    sizes: LayerSizes
    ranks: int
    layers: int
    microbatches: int
    steps: int
    warm_up: int = 1
    learning_rate: float = 1e-3

    @property
    def output_layers(self) -> float:
        """The layers that the output layer counts for: by the products of a token."""
        hidden = self.sizes.hidden
        layer = hidden * (4 * hidden + self.sizes.seq_length) + 3 * hidden * self.sizes.ffn_hidden
        return hidden * self.sizes.vocabulary / layer


@dataclass(frozen=True)
class Contender:
    """A schedule, None for Megatron's own, and whether the output layer is vocabulary parallel."""

    schedule: str | None
    sharded: bool = False

    def __str__(self) -> str:
        return (
            UPSTREAM if self.schedule is None else self.schedule + (", cut" if self.sharded else "")
        )


@dataclass(frozen=True)
class Trained:
    """What one rank has of a training; ``losses`` of each step, empty where there is no loss."""

    losses: list[float]
    seconds: float
    pass_seconds: float
    state_bytes: int
    logits_bytes: int


def main() -> None:
    args = _arguments()
    sizes = LayerSizes(
        hidden=args.hidden,
        heads=max(2, args.hidden // 64),
        ffn_hidden=8 * args.hidden // 3,
        seq_length=args.sequence,
        micro_batch_size=args.samples,
        vocabulary=args.vocabulary * args.hidden,
    )
    job = Job(sizes, args.ranks, args.layers, args.microbatches, args.steps, learning_rate=args.lr)
    contenders = [Contender(None)]
    contenders += [Contender(name, on) for name in args.schedules for on in (False, True)]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(job, contenders, folder), nprocs=job.ranks)
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    rows = {name: compared(found[UPSTREAM], ranks) for name, ranks in found.items()}
    _report(job, rows)
    losses = {name: _losses(ranks) for name, ranks in found.items()}
    line = {"job": asdict(job), "results": rows, "losses": losses}
    print(json.dumps({**provenance.of_this_run(), **line}))
    missed = [n for n, row in rows.items() if n.endswith(", cut") and row["losses"] > MOST_OFF]
    for name in missed:
        print(f"missed: losses of {name} are not within {MOST_OFF:g}", file=sys.stderr)
    sys.exit(bool(missed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = partial(parser.add_argument, type=int, metavar="N")
    number("--ranks", default=4, help="pipeline ranks (default 4)")
    number("--layers", default=8, help="of the model (default 8)")
    number("--hidden", default=32, help="hidden size (default 32)")
    number("--vocabulary", default=32, help="words, in hidden sizes (default 32)")
    number("--sequence", default=32, help="tokens of a sample (default 32)")
    number("--samples", default=1, help="of a microbatch (default 1)")
    number("--microbatches", default=8, help="of a step (default 8)")
    number("--steps", default=500, help="of each training (default 500)")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate (default 2e-4)")
    parser.add_argument("--schedules", nargs="+", default=["v-half"], metavar="NAME")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: the first warms up, give 2 or more")
    return args


# --- a rank


def _rank(rank: int, job: Job, contenders: list[Contender], folder: str) -> None:
    from megatron_zb.cpu_ranks import run_on_cpu

    run_on_cpu()
    join(rank, job.ranks, f"{folder}/meeting")
    found = {}
    for contender in contenders:
        results: list[Any] = [None] * job.ranks
        dist.all_gather_object(results, asdict(trained(job, contender)))
        found[str(contender)] = results
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def trained(job: Job, contender: Contender) -> Trained:
    """Train on this rank of a gloo group, on which Megatron has no parallel groups yet."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    adapter = adapter_of(job, contender)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=job.ranks,
        virtual_pipeline_model_parallel_size=adapter.virtual_pipeline_size if adapter else None,
        get_embedding_ranks=adapter.embedding_ranks if adapter else None,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)
    chunks = model_of(job, adapter)
    optimizer = optimizer_of(job, chunks)
    memory = LogitsMemory(job, chunks)
    if adapter is not None:
        adapter.track(memory)
    function = adapter.forward_backward_func if adapter else get_forward_backward_func()
    data = [list(batches(job, step)) for step in range(job.steps)]
    losses: list[float] = []
    clock = _Clock(function)
    with memory.watching():
        for step in range(job.steps):
            if step == job.warm_up:
                dist.barrier()
                clock = _Clock(function)
            losses += run_step(job, clock, chunks, optimizer, data[step])
    found = Trained(
        losses, clock.seconds, clock.within, _state_bytes(chunks, optimizer), memory.peak_bytes
    )
    if adapter is not None:
        adapter.forward_backward_func.close()
    parallel_state.destroy_model_parallel()
    return found


class _Clock:
    """A function, and this process's processor seconds: since the start, and within it."""

    def __init__(self, function: Any) -> None:
        self._function, self._begin, self.within = function, time.process_time(), 0.0

    def __call__(self, **arguments: Any) -> Any:
        begin = time.process_time()
        try:
            return self._function(**arguments)
        finally:
            self.within += time.process_time() - begin

    @property
    def seconds(self) -> float:
        return time.process_time() - self._begin


def adapter_of(job: Job, contender: Contender) -> Any:
    from megatron_zb.megatron_core.adapter import JobSizes, PipelineAdapter, ScheduleSettings
    from megatron_zb.schedules.layout import Layers

    if contender.schedule is None:
        return None
    return PipelineAdapter.create(
        ScheduleSettings(
            pipeline_schedule=contender.schedule,
            pipeline_vocabulary="on" if contender.sharded else "off",
        ),
        JobSizes(
            pipeline_size=job.ranks,
            num_microbatches=job.microbatches,
            layers=Layers(job.layers),
            vocabulary=job.output_layers,
        ),
    )


def model_of(job: Job, adapter: Any) -> list[Any]:
    import gpt_layers
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    from megatron_zb.megatron_core.random_streams import initialise_by_global_name

    rank = parallel_state.get_pipeline_model_parallel_rank()
    device, p = torch.device("cpu"), job.ranks
    config = gpt_layers.configuration(
        job.sizes,
        job.layers,
        torch.float32,
        device,
        LOCAL_FLASH,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=adapter.virtual_pipeline_size if adapter else None,
        pipeline_model_parallel_layout=adapter.layer_layout if adapter else None,
        deallocate_pipeline_outputs=True,
    )
    chunks = [
        gpt_layers.build(
            config,
            job.sizes,
            LOCAL_FLASH,
            device,
            ends=(
                adapter.pre_process(rank, chunk) if adapter else rank == 0,
                adapter.post_process(rank, chunk) if adapter else rank == p - 1,
            ),
            vp_stage=chunk if adapter and adapter.chunks > 1 else None,
        )
        for chunk in range(adapter.chunks if adapter else 1)
    ]
    initialise_by_global_name(chunks, config, seed=7)
    if adapter is not None:
        adapter.prepare_model(chunks)
    config.finalize_model_grads_func = (
        adapter.finalize_model_grads if adapter else finalize_model_grads
    )
    return [gpt_layers.with_main_grads(chunk) for chunk in chunks]


def optimizer_of(job: Job, chunks: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=job.learning_rate, params_dtype=torch.float32, clip_grad=1.0
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def run_step(
    job: Job, function: Any, chunks: list[Any], optimizer: Any, batches: list[Batch]
) -> list[float]:
    """Return the mean loss of a step, on the rank that has it."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    data = [iter(batches) for _ in chunks]
    records = function(
        forward_step_func=_forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=job.microbatches,
        seq_length=job.sizes.seq_length,
        micro_batch_size=job.sizes.micro_batch_size,
        forward_only=False,
    )
    optimizer.step()
    return [mean(float(record["loss"]) for record in records)] if records else []


def batches(job: Job, step: int) -> Iterator[Batch]:
    """Yield tokens and labels: what may follow a token are a few others, always the same."""
    words, length = job.sizes.vocabulary, job.sizes.seq_length
    uniform = torch.rand(words, SUCCESSORS, generator=torch.Generator().manual_seed(0))
    follows = (uniform**SKEW * words).long()
    for microbatch in range(job.microbatches):
        rng = torch.Generator().manual_seed(1 + step * job.microbatches + microbatch)
        tokens = [torch.randint(words, (job.sizes.micro_batch_size,), generator=rng)]
        for _ in range(length):
            which = torch.randint(SUCCESSORS, tokens[-1].shape, generator=rng)
            tokens.append(follows[tokens[-1], which])
        text = torch.stack(tokens, 1)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _forward_step(data: Iterator[Batch], model: Any) -> Any:
    tokens, labels = next(data)
    return model(tokens, None, None, labels=labels), _loss


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


class LogitsMemory(ActivationMemory):
    """Counts logits, and what has their shape: that of all words, or of a rank's."""

    def __init__(self, job: Job, chunks: list[Any]) -> None:
        super().__init__(p for chunk in chunks for p in chunk.parameters())
        words = job.sizes.vocabulary
        self._widths = (words, words // job.ranks)

    def hold(self, tensor: torch.Tensor) -> None:
        if tensor.dim() > 1 and tensor.size(-1) in self._widths:
            super().hold(tensor)


def _state_bytes(chunks: list[Any], optimizer: Any) -> int:
    """Return the bytes of weights, their gradients and the optimizer's states."""
    weights = [p for chunk in chunks for p in chunk.parameters()]
    states = [
        value
        for part in optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    gradients = [p.main_grad for p in weights]
    return sum(tensor.nbytes for tensor in (*weights, *gradients, *states))


# --- all of them


def compared(upstream: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of a contender, beside Megatron's own: see the top of this file."""
    pairs = zip(_losses(ranks), _losses(upstream), strict=True)
    share = max(rank["logits_bytes"] for rank in upstream) / len(upstream)
    return {
        "losses": max(abs(ours - theirs) / theirs for ours, theirs in pairs),
        "last_loss": _losses(ranks)[-1],
        "seconds": _over_mean([rank["seconds"] for rank in ranks]),
        "passes": _over_mean([rank["pass_seconds"] for rank in ranks]),
        "states": _over_mean([rank["state_bytes"] for rank in ranks]),
        "logits": max(rank["logits_bytes"] for rank in ranks) / share,
        "busiest_seconds": max(rank["seconds"] for rank in ranks),
    }


def _losses(ranks: list[dict[str, Any]]) -> list[float]:
    found: list[float] = next(rank["losses"] for rank in ranks if rank["losses"])
    return found


def _over_mean(values: list[float]) -> float:
    return max(values) / mean(values)


def _report(job: Job, rows: dict[str, dict[str, float]]) -> None:
    table = Table(
        title=f"{job.ranks} ranks, {job.layers} layers of {job.sizes.hidden}, an output layer of "
        f"{job.output_layers:.2f} layers, {job.steps} steps"
    )
    ratios = ("seconds", "passes", "states", "logits")
    headings = ("contender", "last loss", "losses off by", *ratios)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for name, row in rows.items():
        figures = (f"{row[key]:.3f}" for key in ratios)
        table.add_row(name, f"{row['last_loss']:.5f}", f"{row['losses']:.1e}", *figures)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Step times of microbatches of unequal lengths on CPU ranks: Megatron's 1F1B, planned steps.

Each microbatch is one sequence, as in fine-tuning without packing. Lengths are drawn once, are
log-normal, and the same for all contenders. Those with "hill" or "planned" get their microbatches
in that order, the others as they were drawn. Contenders take turns, each in processes of its own,
in an order that rotates; its time is the median of all its steps but the first ones of each turn.

  python benchmarks/unequal_steps.py
  python benchmarks/unequal_steps.py --ranks 2 --microbatches 8 --turns 5

Each rank has one thread; a quiet machine with a core for each is needed for figures that count.
Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

UPSTREAM = "megatron 1f1b"
CONTENDERS = {
    UPSTREAM: ("", "as drawn"),
    f"{UPSTREAM}, hill": ("", "hill"),
    "zb-h1, planned": ("zb-h1", "planned"),
    "v-zb": ("v-zb", "as drawn"),
    "v-zb, planned": ("v-zb", "planned"),
}
_WORDS = 512


def main() -> None:
    args = _arguments()
    if args.contender is not None:
        _run_rank(args)
        return
    import provenance
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    names = list(CONTENDERS)
    milliseconds: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in track(range(args.turns), "turns", console=Console(stderr=True)):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            milliseconds[name].append(_steps(args, name))
    found = {
        name: median(ms for turn in turns for ms in turn) for name, turns in milliseconds.items()
    }
    table = Table("contender", "ms a step", "of Megatron's", "medians of the turns")
    for name, value in found.items():
        turns = sorted(map(median, milliseconds[name]))
        spread = f"{turns[0]:.0f} to {turns[-1]:.0f}"
        table.add_row(name, f"{value:.0f}", f"{value / found[UPSTREAM]:.3f}", spread)
    Console().print(table)
    sizes = {key: value for key, value in vars(args).items() if key != "contender"}
    last = {"sizes": sizes, "lengths": _lengths(args), "all_ms": milliseconds, "ms": found}
    print(json.dumps({**provenance.of_this_run(), **last}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="pipeline ranks (default 2)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default 256)")
    parser.add_argument("--longest", type=int, default=512, help="most tokens (default 512)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--steps", type=int, default=10, help="of a turn (default 10)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps left out (default 3)")
    parser.add_argument("--turns", type=int, default=5, help="of all contenders (default 5)")
    parser.add_argument("--seed", type=int, default=1, help="of the lengths (default 1)")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= args.warm_up:
        parser.error(f"--steps {args.steps} leaves nothing: give more than --warm-up")
    return args


def _lengths(args: argparse.Namespace) -> list[int]:
    """Lengths whose median is an eighth of the longest that are allowed."""
    rng = random.Random(args.seed)
    drawn = [args.longest / 8 * rng.lognormvariate(0.0, 0.9) for _ in range(args.microbatches)]
    return [max(8, min(args.longest, int(each))) for each in drawn]


def _steps(args: argparse.Namespace, name: str) -> list[float]:
    """Run one contender once; return the milliseconds of its steps, without the first ones."""
    sizes = {key: value for key, value in vars(args).items() if key not in ("contender", "turns")}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in sizes.items()]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={args.ranks}",
        *(str(Path(__file__)), "--contender", name, *flags),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found[args.warm_up :]


def _run_rank(args: argparse.Namespace) -> None:
    """Train one contender on this rank; the first rank prints the milliseconds of all steps."""
    from megatron_zb.cpu_ranks import run_on_cpu

    run_on_cpu()
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import TransformerConfig

    from megatron_zb.bridge import Settings, install
    from megatron_zb.schedules.step_plan import rules

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    schedule, fed = CONTENDERS[args.contender]
    lengths = _lengths(args)
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.hidden // 64,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        pipeline_model_parallel_size=args.ranks,
        pipeline_dtype=torch.float32,
    )
    settings = Settings(pipeline_schedule=schedule or "1f1b", num_microbatches=args.microbatches)
    pipeline = install(settings, config) if schedule else None
    with pipeline or nullcontext():
        size = pipeline.virtual_pipeline_size if pipeline else None
        parallel_state.initialize_model_parallel(1, args.ranks, size)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        layer = gpt_layer_specs.get_gpt_layer_local_spec()
        build: Any = partial(GPTModel, config, layer, _WORDS, args.longest)
        if pipeline:
            build = pipeline.builder(build)
            models = [build(vp_stage=stage) for stage in range(size or 1)]
        else:
            first = parallel_state.is_pipeline_first_stage()
            last = parallel_state.is_pipeline_last_stage()
            models = [build(pre_process=first, post_process=last)]
        ddp = DistributedDataParallelConfig()
        chunks = [DistributedDataParallel(config, ddp, model) for model in models]
        if pipeline is None:
            config.finalize_model_grads_func = finalize_model_grads
        run = schedules.get_forward_backward_func()  # which is another one where it is installed
        milliseconds = []
        for _ in range(args.steps):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            torch.distributed.barrier()
            start = time.perf_counter()
            order: Sequence[int] = range(args.microbatches)
            if fed == "hill":
                order = rules([float(n) for n in lengths])[0]
            elif fed == "planned":
                assert pipeline is not None
                order = pipeline.order(lengths, shapes=[(n, 1) for n in lengths])
            run(
                forward_step_func=_forward_step,
                data_iterator=[_samples([lengths[i] for i in order]) for _ in chunks],
                model=chunks,
                num_microbatches=args.microbatches,
                seq_length=1,  # every message tells its own
                micro_batch_size=1,
            )
            torch.distributed.barrier()
            milliseconds.append(1e3 * (time.perf_counter() - start))
    if torch.distributed.get_rank() == 0:
        print(json.dumps(milliseconds))


def _samples(lengths: list[int]) -> Iterator[Any]:
    import torch

    for length in lengths:
        draw = torch.Generator().manual_seed(length)
        yield torch.randint(_WORDS, (1, length + 1), generator=draw)


def _forward_step(data: Iterator[Any], chunk: Any) -> Any:
    import torch

    tokens = next(data)
    positions = torch.arange(tokens.size(1) - 1)[None]
    output = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:])

    def loss(losses: Any) -> Any:
        mean = losses.float().mean()
        return mean, {"loss": mean.detach()}

    return output, loss


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How well one profile predicts every schedule, upstream's included: real compute on the CPU.

For each of three shapes, two ranks (one thread each, so that a core for each is needed) train a GPT
of Megatron's layers over gloo:

1. zb-h1 measures itself, as with --pipeline-profile, several times; the profile has the median of
   every time.
2. From that one profile every schedule is predicted and ranked, as `megatron-zb plan --profile`
   does, each with the layers that its flags would run; Megatron's own 1F1B and interleaved, too.
3. Each is trained with, the same layers on the same stages. All take turns, in rounds; in a turn,
   the first step is not timed. A step's seconds are those from a barrier to the end of the last
   rank.

The speed of a virtual machine changes by tens of per cent within seconds. So that a profile may be
compared with a step that runs later, all ranks at once compute the same piece of work, some layers
forward and backward, between the steps of a profile and before and after every timed step. All
seconds are told at one speed, that of the median profile: divided by those of the pieces beside
them and multiplied by the profile's. What the clock said and the pieces are in the JSON line, too.

The bars: every prediction is within 5 % of the measured median, and the schedule that is predicted
to be the fastest within 2 % of the fastest measured. Prints tables and, last, one JSON line with
commit, date, versions and every step; --output writes it into a file, too. Ends with 1 where a bar
is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import one_device
import provenance
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from rich.console import Console
from rich.table import Table

from megatron_zb.train.synthetic_steps import join

PROFILED = "zb-h1"
RANKS = 2
MOST_OFF, MOST_BEHIND = 0.05, 0.02
"""How far a prediction may be off, and the first one behind the fastest measured."""


@dataclass(frozen=True)
class Shape:
    """Of a model and a step; the vocabulary is counted in hidden sizes."""

    name: str
    layers: int
    hidden: int
    seq_length: int
    vocabulary: int
    microbatches: int


SHAPES = (
    Shape("small vocabulary", 8, 128, 128, 4, 8),
    Shape("large vocabulary", 8, 128, 128, 32, 8),
    Shape("many layers", 16, 128, 64, 16, 12),
)
_SHORT = {shape.name.split()[0]: shape for shape in SHAPES}


def main() -> None:
    args = _arguments()
    found = {}
    for name in args.shapes:
        shape = _SHORT[name]
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, args=(args, shape, folder), nprocs=RANKS)
            found[shape.name] = json.loads((Path(folder) / "found.json").read_text("utf-8"))
        _show(shape, found[shape.name])
    sys.exit(_report(args, found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = one_device.at_least_one
    parser.add_argument(
        "--shapes", nargs="+", choices=_SHORT, default=list(_SHORT), help="(default: all)"
    )
    parser.add_argument("--profiles", type=number, default=9, help="(default 9)")
    parser.add_argument("--rounds", type=number, default=10, help="turns of each (default 10)")
    parser.add_argument("--steps", type=number, default=3, help="timed in a turn (default 3)")
    parser.add_argument(
        "--schedules", nargs="+", metavar="NAME", help="beside Megatron's own (default: all)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    return parser.parse_args()


def _rank(rank: int, args: argparse.Namespace, shape: Shape, folder: str) -> None:
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    from megatron_zb.cpu_ranks import run_on_cpu

    run_on_cpu()
    join(rank, RANKS, f"{folder}/meeting")
    _make_groups()
    path = Path(folder) / "profile.yaml"
    piece = Piece(shape)
    piece_of_profile = _profile(shape, path, piece, args.profiles)
    planned = _planned(args, path)
    candidates = {row.name: _contender(shape, row) for row in planned}
    seconds: dict[str, list[Step]] = {name: [] for name in candidates}
    for _ in range(args.rounds):
        for name, candidate in candidates.items():
            candidate.step()
            seconds[name] += [_timed(candidate.step, piece) for _ in range(args.steps)]
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, seconds)
    if rank == 0:
        rows = [
            _row(row, [of_rank[row.name] for of_rank in everyone], piece_of_profile)
            for row in planned
        ]
        found = {"rows": rows, "piece": piece_of_profile, "profile": path.read_text("utf-8")}
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Step:
    """Seconds of a step of one rank, and of a piece of work beside it, the same on all ranks.

    ``busy`` is the processor's time in the thread that trains.
    """

    seconds: float
    busy: float
    piece: float


def _row(row: Planned, ranks: Sequence[Sequence[Step]], piece: float) -> dict[str, Any]:
    """What is written of a schedule; ``busy`` tells errors of passes from those of waits.

    ``steps`` and ``busy`` are at the speed of the profile, ``clock`` is what the clock said.
    """
    pieces = [step.piece for step in ranks[0]]
    clock = [max(step.seconds for step in together) for together in zip(*ranks, strict=True)]
    return {
        "schedule": row.name,
        "layers": row.layout,
        "predicted": row.seconds,
        "steps": [piece / now * seconds for now, seconds in zip(pieces, clock, strict=True)],
        "clock": clock,
        "pieces": pieces,
        "busy_predicted": row.busy,
        "busy": [
            statistics.median(piece / step.piece * step.busy for step in steps) for steps in ranks
        ],
    }


class Piece:
    """A fixed piece of work, which all ranks compute at once."""

    def __init__(self, shape: Shape) -> None:
        draw = torch.Generator().manual_seed(1)
        hidden = shape.hidden
        self._input = torch.randn(shape.seq_length, hidden, generator=draw)
        self._wide = torch.randn(hidden, 4 * hidden, generator=draw) / hidden
        self._narrow = torch.randn(4 * hidden, hidden, generator=draw) / hidden
        self._times = max(1, 2**23 // (shape.seq_length * hidden * hidden))

    def seconds(self) -> float:
        """From a barrier on, the mean of all ranks; collective."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self._times):
            self._compute()
        elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(elapsed)
        return elapsed.item() / dist.get_world_size()

    def _compute(self) -> None:
        values = self._input.requires_grad_()
        for _ in range(8):
            inner = torch.nn.functional.gelu(values @ self._wide)
            values = torch.nn.functional.layer_norm(values + inner @ self._narrow, values.shape[1:])
        (values * values).mean().backward()
        self._input.grad = None


def _make_groups() -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=RANKS, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1)


@dataclass(frozen=True)
class Planned:
    """A row of the plan; ``schedule`` is None for Megatron's own.

    ``busy`` is how long each physical rank computes.
    """

    name: str
    layout: str
    seconds: float
    busy: list[float]
    chunks: int
    schedule: Any


def _planned(args: argparse.Namespace, profile: Path) -> list[Planned]:
    """What ``plan --profile`` ranks, the fastest first; the same on all ranks."""
    from megatron_zb.measured.profile import read_profile
    from megatron_zb.plan import from_profile
    from megatron_zb.plan.strategy import candidates_of

    found: list[Any] = [None]
    if dist.get_rank() == 0:
        read = read_profile(profile)
        names = args.schedules
        candidates = candidates_of(names)
        if names is None:
            candidates += candidates_of(["1f1b", "interleaved", "zb-h2"])[2:]
        asked = from_profile.ProfileRequest(
            read, read.num_microbatches, None, post_validation=False
        )
        rows, _ = from_profile.rows(asked, candidates)
        found[0] = [
            Planned(
                row.name,
                row.written,
                row.seconds,
                _busy(row.timeline),
                row.timeline.schedule.placement.chunks,
                None if row.megatron else row.timeline.schedule,
            )
            for row in rows
        ]
    dist.broadcast_object_list(found, src=0)
    planned: list[Planned] = found[0]
    return planned


def _busy(timeline: Any) -> list[float]:
    ranks = [
        sum(timeline.costs.duration(work) for work in rank) for rank in timeline.schedule.ranks
    ]
    in_mirror_image = timeline.schedule.placement.rank_of[-1] == 0  # a V's first rank is the last
    return ranks[::-1] if in_mirror_image else ranks


class Trained:
    """A model on this rank, and a step of it."""

    def __init__(
        self, shape: Shape, stages: Sequence[int], last: int, layout: Any, prepare: Any = None
    ) -> None:
        from megatron.core import parallel_state

        self._shape = shape
        chunks = len(stages)
        self._virtual = chunks if chunks > 1 else None
        parallel_state.set_virtual_pipeline_model_parallel_world_size(self._virtual)
        config = self._config(layout, chunks)
        models = [self._model(config, s, last, vp_stage) for vp_stage, s in enumerate(stages)]
        if prepare is not None:
            prepare(models)
        self.chunks = [_in_data_parallelism(model) for model in models]
        draw = torch.Generator().manual_seed(1)
        size = (1, shape.seq_length)
        self._tokens = torch.randint(shape.vocabulary * shape.hidden, size, generator=draw)
        self._positions = torch.arange(shape.seq_length)[None]
        self._mask = torch.ones((1, 1, *2 * (shape.seq_length,)), dtype=torch.bool).triu(1)
        self.function: Callable[..., Any] | None = None

    def _config(self, layout: Any, chunks: int) -> Any:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer.transformer_config import TransformerConfig

        return TransformerConfig(
            num_layers=self._shape.layers,
            hidden_size=self._shape.hidden,
            num_attention_heads=4,
            pipeline_model_parallel_size=RANKS,
            virtual_pipeline_model_parallel_size=self._virtual,
            pipeline_model_parallel_layout=layout,
            pipeline_dtype=torch.float32,
            params_dtype=torch.float32,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            deallocate_pipeline_outputs=True,
            finalize_model_grads_func=finalize_model_grads,
            # as Megatron-LM sets them: messages overlap with passes where there are chunks
            overlap_p2p_comm=chunks > 1,
            batch_p2p_comm=chunks == 1,
        )

    def _model(self, config: Any, stage: int, last: int, vp_stage: int) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        return GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=self._shape.vocabulary * self._shape.hidden,
            max_sequence_length=self._shape.seq_length,
            pre_process=stage == 0,
            post_process=stage == last,
            share_embeddings_and_output_weights=False,
            vp_stage=None if self._virtual is None else vp_stage,
        )

    def _forward_step(self, iterator: Any, model: Any) -> tuple[Any, Any]:
        tokens = next(iterator)
        return model(tokens, self._positions, self._mask, labels=tokens), _loss

    def step(self) -> None:
        """All microbatches forward and backward, and the reduction of gradients."""
        from megatron.core import parallel_state

        assert self.function is not None
        parallel_state.set_virtual_pipeline_model_parallel_world_size(self._virtual)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        shape, chunks = self._shape, self.chunks
        data = [repeat(self._tokens, shape.microbatches) for _ in chunks]
        self.function(
            forward_step_func=self._forward_step,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=shape.microbatches,
            seq_length=shape.seq_length,
            micro_batch_size=1,
        )


def _in_data_parallelism(model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(model.config, settings, model)


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.mean()
    return loss, {"lm loss": loss.detach()}


def _ours(shape: Shape, schedule: Any, layout: str | None) -> tuple[Trained, Any]:
    from megatron_zb.megatron_core.adapter import JobSizes, PipelineAdapter
    from megatron_zb.schedules.layout import Layers

    adapter = PipelineAdapter.of_table(
        schedule,
        JobSizes(
            pipeline_size=RANKS,
            num_microbatches=shape.microbatches,
            layers=Layers(shape.layers),
            layer_layout=layout,
        ),
    )
    placement = schedule.placement
    stages = placement.stages_of[adapter.physical.logical(dist.get_rank())]
    last = placement.num_stages - 1
    trained = Trained(shape, stages, last, adapter.layer_layout, adapter.prepare_model)
    return trained, adapter


def _megatrons(shape: Shape, chunks: int, layout: str) -> Trained:
    from megatron.core.pipeline_parallel import schedules as megatron_schedules
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    stages = range(dist.get_rank(), RANKS * chunks, RANKS)
    theirs = PipelineParallelLayerLayout(layout, RANKS)
    trained = Trained(shape, list(stages), RANKS * chunks - 1, theirs)
    trained.function = (
        megatron_schedules.forward_backward_pipelining_without_interleaving
        if chunks == 1
        else megatron_schedules.forward_backward_pipelining_with_interleaving
    )
    return trained


def _contender(shape: Shape, row: Planned) -> Trained:
    if row.schedule is None:
        return _megatrons(shape, row.chunks, row.layout)
    trained, adapter = _ours(shape, row.schedule, row.layout)
    trained.function = adapter.forward_backward_func
    return trained


def _profile(shape: Shape, path: Path, piece: Piece, times: int) -> float:
    """Write the median of some profiles; the seconds of a piece of work beside it."""
    from megatron_zb import schedules

    schedule = schedules.build(PROFILED, pipeline_size=RANKS, num_microbatches=shape.microbatches)
    found = [_profile_once(shape, schedule, path, piece) for _ in range(times)]
    usual = statistics.median(seconds for _, seconds in found)
    if dist.get_rank() == 0:
        at_one_speed = [_scaled(read, usual / seconds) for read, seconds in found]
        path.write_text(yaml.safe_dump(_median(at_one_speed)), encoding="utf-8")
    dist.barrier()
    return usual


def _profile_once(shape: Shape, schedule: Any, path: Path, piece: Piece) -> tuple[Any, float]:
    from megatron_zb.megatron_core.profiling import ITERATIONS

    trained, adapter = _ours(shape, schedule, None)
    adapter.profile(path, None)
    trained.function = adapter.forward_backward_func
    pieces = []
    for _ in range(ITERATIONS):
        trained.step()
        pieces.append(piece.seconds())
    adapter.forward_backward_func.close()
    dist.barrier()
    return yaml.safe_load(path.read_text("utf-8")), statistics.median(pieces)


def _scaled(found: Any, factor: float) -> Any:
    """A profile at another speed: its seconds are its floats."""
    if isinstance(found, dict):
        return {name: _scaled(value, factor) for name, value in found.items()}
    if isinstance(found, list):
        return [_scaled(value, factor) for value in found]
    return factor * found if isinstance(found, float) else found


def _median(profiles: Sequence[Any]) -> Any:
    """The median of every time of profiles of one form."""
    first = profiles[0]
    if isinstance(first, dict):
        return {name: _median([profile[name] for profile in profiles]) for name in first}
    if isinstance(first, list):
        return [_median(values) for values in zip(*profiles, strict=True)]
    return statistics.median(profiles) if isinstance(first, float) else first


def _timed(step: Callable[[], None], piece: Piece) -> Step:
    before = piece.seconds()
    dist.barrier()
    start, busy = time.perf_counter(), time.thread_time()
    step()
    seconds, busy = time.perf_counter() - start, time.thread_time() - busy
    dist.barrier()
    return Step(seconds, busy, (before + piece.seconds()) / 2)


def _medians(found: dict[str, Any]) -> dict[str, float]:
    return {row["schedule"]: statistics.median(row["steps"]) for row in found["rows"]}


def _off(found: dict[str, Any]) -> dict[str, float]:
    medians = _medians(found)
    return {
        row["schedule"]: row["predicted"] / medians[row["schedule"]] - 1 for row in found["rows"]
    }


def _behind(found: dict[str, Any]) -> float:
    """By how much the first prediction is slower than the fastest schedule."""
    medians = _medians(found)
    return medians[found["rows"][0]["schedule"]] / min(medians.values()) - 1


def _show(shape: Shape, found: dict[str, Any]) -> None:
    table = Table(
        title=f"{shape.name}: {RANKS} ranks, {shape.microbatches} microbatches, {shape.layers} "
        f"layers, hidden size {shape.hidden}, vocabulary of {shape.vocabulary} hidden sizes; "
        f"predicted from one profile of {PROFILED}"
    )
    for heading in ("schedule", "predicted ms", "measured ms", "fastest to slowest", "off by"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    table.add_column("layers")
    off, medians = _off(found), _medians(found)
    for row in found["rows"]:
        name, steps = row["schedule"], [1000 * seconds for seconds in row["steps"]]
        table.add_row(
            name,
            f"{1000 * row['predicted']:.1f}",
            f"{1000 * medians[name]:.1f}",
            f"{min(steps):.1f} to {max(steps):.1f}",
            f"{off[name]:+.1%}",
            row["layers"],
        )
    console = Console(width=120)
    console.print(table)
    worst = max(off.values(), key=abs)
    console.print(f"worst {worst:+.1%}; the first is {_behind(found):.1%} behind the fastest\n")


def _report(args: argparse.Namespace, found: dict[str, Any]) -> int:
    report = {
        **provenance.of_this_run(),
        "profiles": args.profiles,
        "rounds": args.rounds,
        "off_by": {
            name: {k: round(v, 4) for k, v in _off(shape).items()} for name, shape in found.items()
        },
        "first_behind_fastest": {name: round(_behind(s), 4) for name, s in found.items()},
        "sizes": {shape.name: asdict(shape) for shape in SHAPES if shape.name in found},
        "shapes": found,
    }
    line = json.dumps(report)
    print(line)
    if args.output is not None:
        args.output.write_text(line + "\n", encoding="utf-8")
    kept = all(
        max(map(abs, _off(shape).values())) <= MOST_OFF and _behind(shape) <= MOST_BEHIND
        for shape in found.values()
    )
    return 0 if kept else 1


if __name__ == "__main__":
    main()

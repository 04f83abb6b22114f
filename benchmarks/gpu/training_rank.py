"""One rank of the small GPT that one_gpu_training.py and step_times.py train; they start it.

Writes what it found to a file, as JSON.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from layer_sizes import LOCAL, LayerSizes
from one_device import DTYPES, SavedMeter

INTERLEAVED = "megatron-interleaved"
SEED = 7
LEARNING_RATE = 0.1

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """One training, the same on all its ranks.

    Without a ``schedule`` it is Megatron's own, on one rank; ``megatron`` and
    ``megatron-interleaved+4chunks`` are Megatron's own on all ranks; ``v-half+moved`` is v-half in
    less memory, with activations that move to the host, and ``v-half+dropped`` with activations
    that are computed again; ``v-half+4slices`` cuts every microbatch into 4 token slices.
    ``host_memory`` sends messages as ranks of one GPU must. After
    ``stacks_after_seconds`` a rank prints where its threads are. With ``device_each``, each rank
    has a GPU; else all have the first one. With ``nccl``, messages go over NCCL, else over gloo.
    ``fp8`` is Megatron's name of an fp8 recipe. With ``experts``, every MLP is one of so many
    experts. With ``unequal``, microbatches have other lengths than each other. ``timed`` trains as
    users do, with Adam, and measures ``steps`` after those that warm up or profile; weights are not
    compared.
    """

    ranks: int
    schedule: str | None
    layers: int
    microbatches: int
    steps: int
    dtype: str
    device: str
    host_memory: bool
    stacks_after_seconds: float
    sizes: LayerSizes
    device_each: bool = False
    implementation: str = LOCAL
    dropout: float = 0.0
    fp8: str | None = None
    experts: int | None = None
    nccl: bool = False
    unequal: bool = False
    timed: bool = False

    def length(self, microbatch: int) -> int:
        """Tokens of a microbatch: an eighth to all of the sequence length."""
        most = self.sizes.seq_length
        return most * (1 + 5 * microbatch % 8) // 8 if self.unequal else most

    @property
    def slices(self) -> int | None:
        """Token slices of every microbatch, as ``+4slices`` asks for them."""
        way = (self.schedule or "").partition("+")[2]
        return int(way.removesuffix("slices")) if way.endswith("slices") else None

    @property
    def chunks_of_megatron(self) -> int:
        """Chunks per rank of Megatron's own schedule, as ``+4chunks`` asks for them."""
        chunks = (self.schedule or "").partition(f"{INTERLEAVED}+")[2]
        return int(chunks.removesuffix("chunks")) if chunks else 1

    @property
    def measures_itself(self) -> bool:
        """Whether the schedule is built anew for what the first steps have measured."""
        return self.timed and self.schedule == "auto"

    @classmethod
    def of_text(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**{**values, "sizes": LayerSizes(**values["sizes"])})


def main() -> None:
    job, rank, folder = Job.of_text(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    faulthandler.dump_traceback_later(job.stacks_after_seconds)
    _start(job, rank, folder)
    found = train(job, rank)
    dist.barrier()  # a rank that leaves takes its connections along
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    faulthandler.cancel_dump_traceback_later()


def _start(job: Job, rank: int, folder: Path) -> None:
    """Join the other ranks."""
    if job.device == "cpu":
        from megatron_zb.cpu_ranks import redirect_experts, run_on_cpu

        run_on_cpu()
        if job.experts is not None:
            redirect_experts()
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank if job.device_each else 0)
    dist.init_process_group(
        "nccl" if job.nccl else "gloo",
        init_method=f"file://{folder / 'meeting_point'}",
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(minutes=8),
    )


def train(job: Job, rank: int) -> dict[str, Any]:
    """The losses of all microbatches of every step, and the weights after the last one."""
    import gpt_layers
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    losses: list[list[float]] = []
    seconds = []
    adapter = _adapter(job, losses)
    _make_parallel_groups(job, adapter)
    chunks = _build_chunks(job, adapter, rank)
    models = [gpt_layers.with_main_grads(chunk) for chunk in chunks]
    timing = _Timing(job, adapter, models) if job.timed else None
    function = adapter.forward_backward_func if adapter else get_forward_backward_func()
    for step in range(job.steps + (0 if timing is None else timing.untimed)):
        # a copy to the GPU waits for all work before it, so none is made within a step
        data = [iter([*_batches(job, step)]) for _ in models]
        if timing is not None:
            timing.begin()
        begin = time.perf_counter()
        with nullcontext() if timing is None else timing.counting(step):
            records = function(
                forward_step_func=partial(_forward_step, job),
                data_iterator=data if len(models) > 1 else data[0],
                model=models if len(models) > 1 else models[0],
                num_microbatches=job.microbatches,
                seq_length=job.sizes.seq_length,
                micro_batch_size=job.sizes.micro_batch_size,
            )
        if timing is None:
            _update(models)
        else:
            timing.update()
        losses.append([float(record["loss"]) for record in records])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        if timing is not None:
            timing.end()
    if adapter is not None:
        adapter.forward_backward_func.close()
    peak = torch.cuda.max_memory_allocated() if job.device == "cuda" else None
    found = {"losses": losses, "step_seconds": seconds, "weights": {}, "peak_bytes": peak}
    return {**found, "weights": _digests(chunks)} if timing is None else timing.added_to(found)


class _Timing:
    """What a timed training has besides: an optimizer, and the time in which passes run.

    On a CPU, which has no allocator to ask, the bytes that the first step saves for the backward
    stand in for the peak.
    """

    def __init__(self, job: Job, adapter: Any, models: list[Any]) -> None:
        from busy_time import BusyTime
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from megatron_zb.megatron_core.profiling import iterations_of

        self.untimed = 1 + (iterations_of(adapter.schedule) if job.measures_itself else 0)
        self._busy = BusyTime(job.device == "cuda")
        if adapter is None:
            self._busy.observe_megatron()
        else:
            if job.measures_itself:
                adapter.profile(None, None)
            adapter.forward_backward_func.add(self._busy)
        self._saved: SavedMeter | None = None
        if job.device == "cpu":
            self._saved = SavedMeter([weight for model in models for weight in model.parameters()])
            if adapter is not None:
                adapter.track(self._saved.activation_memory)
        dtype = DTYPES[job.dtype]
        config = OptimizerConfig(
            optimizer="adam", lr=1e-4, bf16=dtype is torch.bfloat16, params_dtype=dtype
        )
        self._models = models
        self._optimizer = get_megatron_optimizer(config, models, use_gloo_process_groups=False)
        self._seconds: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Begin a step on all ranks at once."""
        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()
        dist.barrier()
        torch.cuda.synchronize()
        self._busy.begin()

    def counting(self, step: int) -> AbstractContextManager[Any]:
        """Return the context of a step's passes: on a CPU, it counts bytes in the first one."""
        return nullcontext() if self._saved is None or step else self._saved.watching()

    def update(self) -> None:
        self._optimizer.step()

    def end(self) -> None:
        self._seconds.append(self._busy.seconds())

    def added_to(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return what was found in the timed steps, with the seconds of passes."""
        busy, pipeline = zip(*self._seconds[self.untimed :], strict=True)
        seconds = found["step_seconds"][self.untimed :]
        more: dict[str, Any] = {"busy_seconds": busy, "pipeline_seconds": pipeline}
        if self._saved is not None:
            more["peak_bytes"] = self._saved.peak_bytes
        return {**found, "step_seconds": seconds, **more}


def _adapter(job: Job, losses: list[list[float]]) -> Any:
    """The schedule as a training script has it; None for Megatron's own.

    With dropout each layer has separate RNG states: masks depend on the steps in ``losses``, the
    layer and the microbatch, not on the schedule.
    """
    if job.schedule is None or job.schedule.startswith("megatron"):
        return None
    from megatron_zb.megatron_core.adapter import JobSizes, PipelineAdapter, ScheduleSettings
    from megatron_zb.schedules.features.slices import Slicing
    from megatron_zb.schedules.layout import Layers

    if job.host_memory:
        from host_memory_channels import share_the_gpu

        share_the_gpu()
    name, _, way = job.schedule.partition("+")
    adapter = PipelineAdapter.create(
        ScheduleSettings(
            pipeline_schedule=name,
            pipeline_memory_limit=_memory_limit(job, way),
            pipeline_recompute="auto" if way == "dropped" else None,
            pipeline_offload="auto" if way == "moved" else None,
            pipeline_slices=Slicing.equal(job.slices) if job.slices else None,
        ),
        JobSizes(
            pipeline_size=job.ranks,
            num_microbatches=job.microbatches,
            layers=Layers(job.layers),
            copy=0.1,
            sequence=job.sizes.seq_length,
        ),
    )
    if job.dropout:
        adapter.draw_by_layer(SEED, lambda: len(losses))
    return adapter


def _memory_limit(job: Job, way: str) -> float | None:
    """A share of 1F1B's activations: all of them for ``auto`` that measures itself."""
    if job.measures_itself:
        return 1.0
    return 0.55 if way in ("dropped", "moved") else None


def _make_parallel_groups(job: Job, adapter: Any) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    more: dict[str, Any] = {}
    if adapter is not None and adapter.embedding_ranks is not None:
        choose = adapter.embedding_ranks
        more["get_embedding_ranks"] = lambda ranks, _=None: choose(ranks)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=job.ranks,
        virtual_pipeline_model_parallel_size=_virtual_size(job, adapter),
        create_gloo_process_groups=False,
        **more,
    )
    model_parallel_cuda_manual_seed(SEED)


def _virtual_size(job: Job, adapter: Any) -> int | None:
    if adapter is not None:
        found: int | None = adapter.virtual_pipeline_size
        return found
    return job.chunks_of_megatron if job.chunks_of_megatron > 1 else None


def _build_chunks(job: Job, adapter: Any, rank: int) -> list[Any]:
    """The model chunks of a rank, whose weights depend on their place in the model alone."""
    import gpt_layers

    from megatron_zb.megatron_core.random_streams import initialise_by_global_name

    device = torch.device(job.device)
    more: dict[str, Any] = {}
    if job.fp8 is not None:
        more |= {"fp8": "hybrid", "fp8_recipe": job.fp8}
    if job.experts is not None:
        more |= gpt_layers.of_experts(job.implementation, job.experts, job.sizes.ffn_hidden)
    if job.chunks_of_megatron > 1:  # as Megatron-LM has it by default
        more |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if job.unequal:
        more |= {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    config = gpt_layers.configuration(
        job.sizes,
        job.layers,
        DTYPES[job.dtype],
        device,
        job.implementation,
        pipeline_model_parallel_size=job.ranks,
        virtual_pipeline_model_parallel_size=_virtual_size(job, adapter),
        pipeline_model_parallel_layout=adapter.layer_layout if adapter else None,
        deallocate_pipeline_outputs=True,
        hidden_dropout=job.dropout,
        **more,
    )
    count, last = adapter.chunks if adapter else job.chunks_of_megatron, job.ranks - 1
    chunks = [
        gpt_layers.build(
            config,
            job.sizes,
            job.implementation,
            device,
            ends=(
                adapter.pre_process(rank, chunk) if adapter else rank == chunk == 0,
                adapter.post_process(rank, chunk)
                if adapter
                else (rank, chunk) == (last, count - 1),
            ),
            vp_stage=chunk if count > 1 else None,
        )
        for chunk in range(count)
    ]
    if not job.timed:
        initialise_by_global_name(chunks, config, SEED)
    if adapter is not None:
        adapter.prepare_model(chunks)
    return chunks


def _batches(job: Job, step: int) -> Iterator[Batch]:
    """Tokens and labels that depend on step and microbatch alone."""
    for microbatch in range(job.microbatches):
        shape = (job.sizes.micro_batch_size, job.length(microbatch) + 1)
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens = torch.randint(job.sizes.vocabulary, shape, generator=generator).to(job.device)
        inputs = tokens[:, :-1].contiguous()
        loss_mask = torch.ones_like(inputs, dtype=torch.float32)
        yield {"tokens": inputs, "labels": tokens[:, 1:].contiguous(), "loss_mask": loss_mask}


def _forward_step(job: Job, batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """One microbatch through a chunk; Megatron's own loss would ask a group of one rank."""
    batch = next(batches)
    return model(batch["tokens"], None, None), partial(_loss, batch["labels"])


def _loss(labels: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    flat = logits.float().view(-1, logits.size(-1))
    loss = torch.nn.functional.cross_entropy(flat, labels.view(-1))
    return loss, {"loss": loss.detach().clone()}


def _update(models: list[Any]) -> None:
    """A step against the gradients, which is enough for the next losses to depend on them."""
    with torch.no_grad():
        for model in models:
            for weight in model.parameters():
                weight.copy_(weight.float() - LEARNING_RATE * weight.main_grad)
            model.zero_grad_buffer()


def _digests(chunks: list[Any]) -> dict[str, str]:
    """A hash of every weight's bytes, by its name in the whole model."""
    from megatron_zb.megatron_core.random_streams import global_parameters

    found = {}
    for chunk in chunks:
        for name, weight in global_parameters(chunk).items():
            content = weight.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found[name] = hashlib.sha256(content.numpy().data).hexdigest()
    return found


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # a thread that receives would keep the process for ever
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)

"""Steps of the same tiny GPT under several pipeline runtimes; what ``host_overhead.py`` times.

Imports Megatron: call ``megatron_zb.cpu_ranks.run_on_cpu`` first. Every stage has one
layer, the first one an embedding and the last one an output layer and the loss. Microbatches are
all alike, so that nobody's time goes into data.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch_schedules import torch_schedule

from megatron_zb import schedules
from megatron_zb.megatron_core.adapter import JobSizes, PipelineAdapter
from megatron_zb.runtime.autograd_stage import WeightGradQueue
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.placement import Placement, looped, v_shape

VOCABULARY = 32
_TORCH: dict[str, Any] = {
    "torch-1f1b": pipelining.Schedule1F1B,
    "torch-interleaved": pipelining.ScheduleInterleaved1F1B,
    "torch-zbv": ScheduleZBVZeroBubble,
    "torch-dualpipe-v": ScheduleDualPipeV,
}
_TABLES = {"zbv-table": "ZBVZeroBubble", "dualpipe-v-table": "DualPipeV"}


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a step. ``wrapped``: in Megatron's data parallelism, as it trains."""

    ranks: int
    microbatches: int
    hidden: int = 16
    heads: int = 2
    seq_length: int = 8
    wrapped: bool = False


class Computing:
    """Adds up the processor time that a step spends in what no runtime can do without.

    That is the model's forward, what autograd's engine runs, and the weight gradients that W runs,
    which torch computes with that engine.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._time_engine()

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begin

        return call

    def _time_engine(self) -> None:
        """Time the engine of autograd, and our queue of weight gradients."""
        variable: Any = torch.autograd.Variable
        variable._execution_engine = _TimedEngine(variable._execution_engine, self)
        queue: Any = WeightGradQueue
        queue.run = self.timed(queue.run)


class _TimedEngine:
    """Autograd's engine, whose backward is timed."""

    def __init__(self, engine: Any, computing: Computing) -> None:
        self._engine = engine
        self.run_backward = computing.timed(engine.run_backward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def start(sizes: Sizes) -> Computing:
    """Make Megatron's parallel groups; one set serves all, as nothing here is tied or reduced."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=sizes.ranks, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1)
    return Computing()


class Contender(ABC):
    """Steps of one runtime on this rank.

    ``passes`` is what it runs in a step on this rank, by kind; ``layers`` names the placement, so
    that it is compared with its own layers.
    """

    def __init__(self, sizes: Sizes, placement: Placement, computing: Computing) -> None:
        self.sizes = sizes
        self.placement = placement
        self.rank = dist.get_rank()
        self.layers = layers_of(placement)
        self.passes: Counter[str] = Counter()
        self.chunks: list[Any] = []
        self._forward_step = computing.timed(self._compute)
        self._tokens = torch.zeros(1, sizes.seq_length, dtype=torch.long)
        self._positions = torch.arange(sizes.seq_length)[None]
        square = (1, 1, sizes.seq_length, sizes.seq_length)
        self._mask = torch.ones(square, dtype=torch.bool).triu(1)

    @abstractmethod
    def step(self) -> None:
        """Run all microbatches forward and backward."""

    def zero_gradients(self) -> None:
        """Make the gradients zeros; not part of what is timed."""
        for chunk in self.chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
                continue
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()

    def close(self) -> None:
        """Let go of the model, and of what the runtime has made for itself."""
        self.chunks = []

    def _count_whole_backwards(self) -> None:
        """An F and a BW for every stage and microbatch of this rank."""
        count = len(self.placement.stages_of[self.rank]) * self.sizes.microbatches
        self.passes = Counter(F=count, BW=count)

    def _build(self, stages: list[int], wrapped: bool) -> list[Any]:
        """One chunk with one layer for each of these stages."""
        chunks, chunk_count = [], self.placement.chunks
        config = self._config()
        for vp_stage, stage in enumerate(stages):
            chunk: Any = GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=VOCABULARY,
                max_sequence_length=self.sizes.seq_length,
                pre_process=stage == 0,
                post_process=stage == self.placement.num_stages - 1,
                share_embeddings_and_output_weights=False,
                vp_stage=vp_stage if chunk_count > 1 else None,
            )
            chunks.append(chunk)
        return [self._in_data_parallelism(c) for c in chunks] if wrapped else chunks

    def _config(self) -> TransformerConfig:
        chunks = self.placement.chunks
        return TransformerConfig(
            num_layers=self.placement.num_stages,
            hidden_size=self.sizes.hidden,
            num_attention_heads=self.sizes.heads,
            pipeline_model_parallel_size=self.sizes.ranks,
            virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
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
            # as Megatron-LM sets them: messages overlap with passes where there are chunks
            overlap_p2p_comm=chunks > 1,
            batch_p2p_comm=chunks == 1,
        )

    def _in_data_parallelism(self, chunk: Any) -> Any:
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        return DistributedDataParallel(chunk.config, settings, chunk)

    def _compute(self, iterator: Any, model: Any) -> tuple[Any, Any]:
        tokens = next(iterator)
        return model(tokens, self._positions, self._mask, labels=tokens), loss_of


def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean over the tokens of a microbatch, and what is logged."""
    loss = losses.mean()
    return loss, {"lm loss": loss.detach()}


def layers_of(placement: Placement) -> str:
    """The name of the layers of a placement, run without a pipeline."""
    shape = "loop" if placement == looped(placement.pipeline_size, placement.chunks) else "V"
    return f"layers of {placement.chunks} in a {shape}" if placement.chunks > 1 else "layers of 1"


class LayersAlone(Contender):
    """The layers of a placement without a pipeline: F and BW of one microbatch after another."""

    def __init__(self, sizes: Sizes, placement: Placement, computing: Computing) -> None:
        super().__init__(sizes, placement, computing)
        stages = list(placement.stages_of[self.rank])
        self.chunks = self._build(stages, sizes.wrapped)
        self._count_whole_backwards()
        shape = (sizes.seq_length, 1, sizes.hidden)
        self._gradient = torch.full(shape, 1e-3)
        self._input = torch.ones(shape)

    def step(self) -> None:
        """Run all microbatches forward and backward."""
        for chunk in self.chunks:
            bare = getattr(chunk, "module", chunk)
            first, last = bare.pre_process, bare.post_process
            data = repeat(self._tokens, self.sizes.microbatches)
            for _ in range(self.sizes.microbatches):
                activation = None if first else self._input.detach().requires_grad_()
                bare.set_input_tensor([activation])
                output, loss_func = self._forward_step(data, chunk)
                if last:
                    loss_func(output)[0].backward()
                else:
                    torch.autograd.backward(output, self._gradient)


class Ours(Contender):
    """One of our schedules, or torch's order in our runtime."""

    def __init__(self, sizes: Sizes, name: str, computing: Computing) -> None:
        m, p = sizes.microbatches, sizes.ranks
        schedule = (
            torch_schedule(_TABLES[name], p, m)
            if name in _TABLES
            else schedules.build(name, pipeline_size=p, num_microbatches=m)
        )
        super().__init__(sizes, schedule.placement, computing)
        self._adapter = PipelineAdapter.of_table(
            schedule,
            JobSizes(
                pipeline_size=p,
                num_microbatches=m,
                layers=Layers(schedule.placement.num_stages),
            ),
        )
        logical = self._adapter.physical.logical(self.rank)
        stages = [
            self._adapter.physical.stage(self.rank, c) for c in range(schedule.placement.chunks)
        ]
        chunks = self._build(stages, wrapped=False)
        self._adapter.prepare_model(chunks)
        self.chunks = [self._in_data_parallelism(c) for c in chunks] if sizes.wrapped else chunks
        self.passes = Counter(work.kind.name for work in schedule.ranks[logical])

    def step(self) -> None:
        """Run all microbatches forward and backward."""
        call_as_megatron(self, self._adapter.forward_backward_func)

    def close(self) -> None:
        """Let go of the model and close the channels."""
        super().close()
        self._adapter.forward_backward_func.close()


class Megatrons(Contender):
    """Megatron's own 1F1B, or interleaved where there are several chunks."""

    def __init__(self, sizes: Sizes, chunks: int, computing: Computing) -> None:
        super().__init__(sizes, looped(sizes.ranks, chunks), computing)
        self.chunks = self._build(list(self.placement.stages_of[self.rank]), sizes.wrapped)
        self._count_whole_backwards()
        self._function = (
            megatron_schedules.forward_backward_pipelining_without_interleaving
            if chunks == 1
            else megatron_schedules.forward_backward_pipelining_with_interleaving
        )

    def step(self) -> None:
        """Run all microbatches forward and backward."""
        call_as_megatron(self, self._function)


def call_as_megatron(contender: Contender, function: Callable[..., Any]) -> None:
    """Call what has the contract of Megatron's ``forward_backward_func``."""
    sizes, chunks = contender.sizes, contender.chunks
    data = [repeat(contender._tokens, sizes.microbatches) for _ in chunks]
    function(
        forward_step_func=contender._forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=sizes.microbatches,
        seq_length=sizes.seq_length,
        micro_batch_size=1,
    )


class TorchStage(torch.nn.Module):
    """A chunk with the calling contract of torch's stages: one tensor in, one tensor out."""

    def __init__(self, chunk: Any, forward: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.chunk = chunk
        self._forward = forward

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """Tokens on the first stage, activations on others."""
        if not self.chunk.pre_process:
            self.chunk.set_input_tensor([received])
        return self._forward(self.chunk)


class Torchs(Contender):
    """A schedule of torch.distributed.pipelining in torch's runtime."""

    def __init__(self, sizes: Sizes, name: str, computing: Computing) -> None:
        v = name in ("torch-zbv", "torch-dualpipe-v")
        chunks = 1 if name == "torch-1f1b" else 2
        placement = v_shape(sizes.ranks) if v else looped(sizes.ranks, chunks)
        super().__init__(sizes, placement, computing)
        self._stages = list(self.placement.stages_of[self.rank])
        self.chunks = self._build(self._stages, wrapped=False)
        stages = [self._stage(s, c) for s, c in zip(self._stages, self.chunks, strict=True)]
        self._schedule = _TORCH[name](
            stages[0] if chunks == 1 else stages,
            sizes.microbatches,
            loss_fn=lambda losses, _: loss_of(losses)[0],
            scale_grads=False,  # which takes time, and Megatron does it with the loss
        )
        self._count_whole_backwards()
        if v:
            table = torch_schedule(_TABLES[name.removeprefix("torch-") + "-table"], *self._counts)
            self.passes = Counter(work.kind.name for work in table.ranks[self.rank])
        self._batch = self._tokens.repeat(sizes.microbatches, 1)

    @property
    def _counts(self) -> tuple[int, int]:
        return self.sizes.ranks, self.sizes.microbatches

    def _stage(self, index: int, chunk: Any) -> pipelining.PipelineStage:
        module = TorchStage(chunk, self._run_chunk)
        return pipelining.PipelineStage(
            module, index, self.placement.num_stages, torch.device("cpu")
        )

    def _run_chunk(self, chunk: Any) -> torch.Tensor:
        return self._forward_step(iter((self._tokens,)), chunk)[0]

    def step(self) -> None:
        """Run all microbatches forward and backward."""
        is_last = self.placement.num_stages - 1 in self._stages
        self._schedule.step(
            *((self._batch,) if 0 in self._stages else ()),
            target=self._batch if is_last else None,
            return_outputs=False,
        )


def contender(name: str, sizes: Sizes, computing: Computing) -> Contender:
    """By its name on the command line."""
    if name in _TORCH:
        return Torchs(sizes, name, computing)
    if name.startswith("megatron-"):
        return Megatrons(sizes, 1 if name == "megatron-1f1b" else 2, computing)
    return Ours(sizes, name, computing)

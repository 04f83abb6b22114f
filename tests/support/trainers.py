"""Trainers that build their model and call Megatron's schedules themselves, small.

One has the shape of those for reinforcement learning: arguments that travel to the processes, a
function that builds a chunk, steps of other sizes and passes without a backward between them. The
other has that of Megatron-Bridge: a config that provides its own model. Like those they import
Megatron's functions by name, and know nothing of this package.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megatron_zb.cpu_ranks import redirect_experts
from megatron_zb.megatron_core.random_streams import global_parameters, initialise_by_global_name

LENGTH, VOCABULARY, BATCH = 16, 64, 2
_EXPERT = "local_experts"
OF_MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "pipeline_dtype": torch.float32,
    "moe_token_dispatcher_type": "alltoall",  # lengths may vary
}


def weights_of(models: list[Any]) -> dict[str, torch.Tensor]:
    """The weights of this rank by their names in the whole model."""
    return {
        f"{mpu.get_expert_model_parallel_rank() if _EXPERT in name else ''}{name}".replace(
            "module.", ""
        ): weight.detach().clone()
        for model in models
        for name, weight in global_parameters(model).items()
    }


def wrapped(config: Any, chunks: list[Any], overlap: bool = False) -> tuple[list[Any], Any]:
    """Chunks in data parallelism, and a distributed optimizer; it clips nothing, see README."""
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=overlap, bucket_size=5000
    )
    models = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    if overlap:
        config.no_sync_func = [model.no_sync for model in models]
        if len(models) == 1:
            (config.no_sync_func,) = config.no_sync_func
    settings = OptimizerConfig(lr=0.01, use_distributed_optimizer=True, clip_grad=0.0)
    return models, get_megatron_optimizer(settings, models, use_gloo_process_groups=False)


# --- the shape of trainers for reinforcement learning


def arguments(
    pipeline_size: int,
    *,
    tied: bool = False,
    overlap: bool = False,
    experts: int | None = None,
    adapters: str | None = None,
) -> argparse.Namespace:
    """What such a trainer parses in one process, and pickles to all.

    With ``adapters`` of LoRA on frozen layers, which come before or after the builder is wrapped.
    """
    return argparse.Namespace(
        **OF_MODEL,
        num_layers=2 * pipeline_size,
        pipeline_model_parallel_size=pipeline_size,
        virtual_pipeline_model_parallel_size=None,
        pipeline_model_parallel_layout=None,
        variable_seq_lengths=True,
        tied=tied,
        overlap_grad_reduce=overlap,
        adapters=adapters,
        num_moe_experts=experts,
        expert_model_parallel_size=2 if experts else 1,
        add_bias_linear=not experts,
    )


class Actor:
    """A process of the trainer; ``wrap`` is given what builds a chunk."""

    def __init__(self, args: argparse.Namespace, wrap: Callable[[Any], Any] | None = None) -> None:
        self.args = args
        mpu.initialize_model_parallel(
            1,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1)
        redirect_experts()
        build: Callable[..., Any] = partial(_build_chunk, args)
        if args.adapters == "before":
            build = _adapted(build)
        if wrap:
            build = wrap(build)
        if args.adapters == "after":
            build = _adapted(build)
        self.chunks = _chunks(build)
        self.config = get_model_config(self.chunks[0])
        self.load(seed=1)
        overlap = args.overlap_grad_reduce
        self.reads_at_ends = False
        self.models, self.optimizer = wrapped(self.config, self.chunks, overlap)

    def load(self, seed: int) -> None:
        """Load other weights; one seed is one checkpoint."""
        one = copy(self.config)
        one.expert_model_parallel_size = 1  # experts have local names
        initialise_by_global_name(self.chunks, one, seed)
        for chunk in self.chunks:
            for name, weight in chunk.named_parameters():
                if _EXPERT in name:
                    weight.data.mul_(1 + mpu.get_expert_model_parallel_rank())

    def put_back(self, weights: dict[str, torch.Tensor]) -> None:
        for chunk in self.chunks:
            for name, weight in global_parameters(chunk).items():
                weight.data.copy_(weights[name])

    def train_one_step(
        self, step: int, num_microbatches: int, order: Sequence[int] | None = None
    ) -> list[float]:
        """The losses of the step, on the rank that has the output layer, as they were fed.

        With an ``order``, microbatches have the lengths of :func:`drawn_lengths`, in that order.
        """
        for model in self.models:
            model.train()
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        found = self._run(_train, step, num_microbatches, order)
        self.optimizer.step()
        return [float(each["loss"]) for each in found]

    @torch.no_grad()
    def log_probs(
        self, step: int, num_microbatches: int, order: Sequence[int] | None = None, **more: Any
    ) -> list[torch.Tensor]:
        """The log-probabilities of the tokens of a step, before it is trained."""
        for model in self.models:
            model.eval()
        function = _data if more else _score
        found = self._run(function, step, num_microbatches, order, forward_only=True, **more)
        return [each["log_probs"] for each in found]

    def _run(
        self, function: Any, step: int, count: int, order: Sequence[int] | None, **more: Any
    ) -> list[Any]:
        data: list[Any] = [_samples(step, count, order) for _ in self.models]
        if self.reads_at_ends:
            pairs = zip(data, self.models, strict=True)
            data = [samples if _is_end(model) else None for samples, model in pairs]
        several = len(self.models) > 1
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, function),
            data_iterator=data if several else data[0],
            model=self.models if several else self.models[0],
            num_microbatches=count,
            seq_length=1,  # every message tells its own
            micro_batch_size=1,
            **more,
        )
        return found


def _is_end(model: Any) -> bool:
    return bool(model.module.pre_process or model.module.post_process)


def _build_chunk(
    args: argparse.Namespace, pre_process: bool, post_process: bool, vp_stage: int | None = None
) -> GPTModel:
    fields = TransformerConfig.__dataclass_fields__
    config = TransformerConfig(**{k: v for k, v in vars(args).items() if k in fields})
    return GPTModel(
        config,
        get_gpt_layer_local_spec(args.num_moe_experts),
        VOCABULARY,
        LENGTH,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=args.tied,
        vp_stage=vp_stage,
    )


class Adapted(torch.nn.Module):
    """A frozen layer with a low-rank adapter beside it, as in Megatron-Bridge."""

    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        self.to_wrap = layer
        shared = {"config": config, "init_method": config.init_method, "bias": False}
        inputs, outputs = layer.weight.shape[1], layer.weight.shape[0]
        self.linear_in = ColumnParallelLinear(inputs, 4, gather_output=True, **shared)
        self.linear_out = ColumnParallelLinear(4, outputs, gather_output=False, **shared)

    def forward(self, hidden: torch.Tensor, *rest: Any, **more: Any) -> tuple[Any, Any]:
        output, bias = self.to_wrap(hidden, *rest, **more)
        return output + self.linear_out(self.linear_in(hidden)[0])[0], bias


def _adapted(build: Callable[..., Any]) -> Callable[..., Any]:
    def with_adapters(**keywords: Any) -> Any:
        chunk = build(**keywords)
        for weight in chunk.parameters():
            weight.requires_grad = False
        for module in list(chunk.modules()):
            for name, layer in list(module.named_children()):
                if name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
                    setattr(module, name, Adapted(layer, chunk.config))
        return chunk

    return with_adapters


def _chunks(build: Callable[..., Any]) -> list[Any]:
    size = mpu.get_virtual_pipeline_model_parallel_world_size()
    if size is None:
        ends = (mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage())
        return [build(pre_process=ends[0], post_process=ends[1])]
    return [
        build(
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=i),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=i),
            vp_stage=i,
        )
        for i in range(size)
    ]


def drawn_lengths(step: int, count: int) -> list[int]:
    """Lengths of one to eight times the shortest, others on every data-parallel rank."""
    draw = random.Random(f"{mpu.get_data_parallel_rank()} {step}")
    return [draw.randint(2, LENGTH) for _ in range(count)]


def _samples(step: int, count: int, order: Sequence[int] | None) -> Iterator[torch.Tensor]:
    """Sequences whose length changes from microbatch to microbatch."""
    drawn = drawn_lengths(step, count)
    for number in range(count) if order is None else order:
        seed = 10_000 * mpu.get_data_parallel_rank() + 100 * step + number
        draw = torch.Generator().manual_seed(seed)
        length = 5 + (7 * step + 3 * number) % (LENGTH - 5) if order is None else drawn[number]
        yield torch.randint(VOCABULARY, (BATCH, length + 1), generator=draw)


def _forward_step(
    function: Any, data: Iterator[torch.Tensor] | None, model: Any
) -> tuple[Any, Any]:
    if data is None:
        return model(None, None, None), partial(function, None)
    tokens = next(data)
    stage = model.module.vp_stage
    first = mpu.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage)
    positions = torch.arange(tokens.size(1) - 1).expand(BATCH, -1)
    labels = tokens[:, 1:] if function is _train else None
    inputs = (tokens[:, :-1], positions) if first else (None, None)
    output = model(*inputs, None, labels=labels)
    return output, partial(function, tokens[:, 1:])


def _train(labels: torch.Tensor, losses: torch.Tensor) -> tuple[Any, ...]:
    total = losses.float().sum()
    count = torch.tensor(labels.numel(), dtype=torch.int)
    return total, count, {"loss": total.detach() / count}


def _score(labels: torch.Tensor, logits: torch.Tensor) -> tuple[Any, Any]:
    return torch.empty(0), _data(labels, logits)


def _data(labels: torch.Tensor, logits: torch.Tensor, non_loss_data: bool = True) -> dict[str, Any]:
    del non_loss_data
    return {"log_probs": logits.log_softmax(-1).gather(-1, labels[..., None])}


# --- the shape of Megatron-Bridge


@dataclass
class Provider(TransformerConfig):
    """A config that provides its own model; what it says is complete when it is finalised."""

    vocab_size: int = VOCABULARY
    seq_length: int = LENGTH
    share_embeddings_and_output_weights: bool = True

    def __post_init__(self) -> None:
        pass

    def finalize(self) -> None:
        super().__post_init__()

    def provide(
        self, pre_process: bool, post_process: bool, vp_stage: int | None = None
    ) -> GPTModel:
        chunk = GPTModel(
            self,
            get_gpt_layer_local_spec(),
            self.vocab_size,
            self.seq_length,
            pre_process,
            post_process,
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            vp_stage=vp_stage,
        )
        initialise_by_global_name([chunk], self, seed=1)
        return chunk

    def provide_distributed_model(self, groups: Any) -> tuple[list[Any], Any]:
        size = self.virtual_pipeline_model_parallel_size
        chunks = []
        for i in [None] if size is None else range(size):
            first = is_vp_first_stage(i, size) and is_pp_first_stage(groups.pp)
            last = is_vp_last_stage(i, size) and is_pp_last_stage(groups.pp)
            named = {} if i is None else {"vp_stage": i}
            chunks.append(self.provide(pre_process=first, post_process=last, **named))
        return wrapped(self, chunks)


def pretrain(
    provider: Provider, steps: int, models: int = 1
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of this rank after some steps; sequences have one length."""
    mpu.initialize_model_parallel(
        pipeline_model_parallel_size=provider.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=provider.virtual_pipeline_model_parallel_size,
        get_embedding_ranks=lambda ranks: [ranks[0], ranks[-1]],
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
    for _ in range(models):
        chunks, optimizer = provider.provide_distributed_model(groups)
    provider.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    provider.grad_scale_func = optimizer.scale_loss
    function = get_forward_backward_func(
        pp_size=groups.pp.size(), vp_size=provider.virtual_pipeline_model_parallel_size
    )
    losses = []
    for step in range(steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = function(
            forward_step_func=partial(_step_of_provider, groups),
            data_iterator=[_whole_samples(step) for _ in chunks],
            model=chunks,
            num_microbatches=4,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
        optimizer.step()
        losses += [float(each["loss"]) for each in found]
    return losses, weights_of(chunks)


Sample = dict[str, torch.Tensor]


def _whole_samples(step: int) -> Iterator[Sample]:
    draw = torch.Generator().manual_seed(step)
    while True:
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=draw)
        positions = torch.arange(LENGTH).expand(BATCH, -1)
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": torch.ones(BATCH, LENGTH),
            "position_ids": positions,
        }


def _step_of_provider(groups: Any, data: Iterator[Sample], model: Any) -> tuple[Any, Any]:
    """A stage is given what its place asks for, as it finds that out itself."""
    config, stage = get_model_config(model), model.module.vp_stage
    size = config.virtual_pipeline_model_parallel_size
    sample = next(data)
    first = is_pp_first_stage(groups.pp) and is_vp_first_stage(stage, size)
    last = is_pp_last_stage(groups.pp) and is_vp_last_stage(stage, size)
    output = model(
        sample["tokens"] if first else None,
        sample["position_ids"] if first else None,
        None,
        labels=sample["labels"] if last else None,
    )
    return output, partial(_train, sample["labels"])

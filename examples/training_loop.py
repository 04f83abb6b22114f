"""A training loop of one's own: torchrun --nproc-per-node 2 examples/training_loop.py v-half."""

import sys
from typing import Any

import torch

from megatron_zb.cpu_ranks import run_on_cpu

run_on_cpu()  # before Megatron is imported; on GPUs without it, with nccl and chunks on the device

from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from megatron_zb.megatron_core.adapter import JobSizes, Layers, PipelineAdapter, ScheduleSettings
from megatron_zb.megatron_core.random_streams import initialise_by_global_name

MICROBATCHES, BATCH, LENGTH, VOCABULARY = 8, 4, 16, 32


def forward_step(data: Any, chunk: Any) -> Any:  # a microbatch through a chunk, as in Megatron
    tokens = next(data)
    losses = chunk(tokens[:, :-1], torch.arange(LENGTH)[None], None, labels=tokens[:, 1:])
    return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def batches(seed: int) -> Any:  # sequences that count up from somewhere
    draw = torch.Generator().manual_seed(seed)
    while True:
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=draw)
        yield (first + torch.arange(LENGTH + 1)) % VOCABULARY


torch.distributed.init_process_group("gloo")
p = torch.distributed.get_world_size()
sizes = JobSizes(pipeline_size=p, num_microbatches=MICROBATCHES, layers=Layers(8))
zb = PipelineAdapter.create(ScheduleSettings(pipeline_schedule=sys.argv[1]), sizes)
v = zb.virtual_pipeline_size
mpu.initialize_model_parallel(1, p, v, get_embedding_ranks=zb.embedding_ranks)
tensor_parallel.model_parallel_cuda_manual_seed(1)
pp = "pipeline_model_parallel"
placed = {f"{pp}_size": p, f"virtual_{pp}_size": v, f"{pp}_layout": zb.layer_layout}
fixed = {"use_cpu_initialization": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}
shape = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4}
config = TransformerConfig(pipeline_dtype=torch.float32, **shape, **fixed, **placed)
layer, rank = gpt_layer_specs.get_gpt_layer_local_spec(), mpu.get_pipeline_model_parallel_rank()
models = []
for c in range(zb.chunks):
    ends = zb.pre_process(rank, c), zb.post_process(rank, c)
    models.append(GPTModel(config, layer, VOCABULARY, LENGTH, *ends, vp_stage=c if v else None))
initialise_by_global_name(models, config, seed=1)  # the same weights under every schedule
zb.prepare_model(models)  # splits the backward; before data parallelism wraps the chunks
chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(), m) for m in models]
config.finalize_model_grads_func = zb.finalize_model_grads
# without clipping: a V sums the norm of the gradients in another order
optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3, clip_grad=0.0), chunks)
train: Any = zb.forward_backward_func
step = {"num_microbatches": MICROBATCHES, "seq_length": LENGTH, "micro_batch_size": BATCH}
for number in range(30):
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    data = [batches(number) for _ in chunks]
    losses = train(forward_step_func=forward_step, data_iterator=data, model=chunks, **step)
    optimizer.step()
    if losses:  # on the rank that holds the output layer
        print(number, sum(loss["loss"].item() for loss in losses) / MICROBATCHES, flush=True)

"""A trainer for reinforcement learning: torchrun --nproc-per-node 2 examples/rl_trainer.py v-half.

It builds its model and calls Megatron's schedules itself: of this package are settings and zb.
"""

import sys
from functools import partial
from typing import Any

import torch

from megatron_zb.cpu_ranks import run_on_cpu

run_on_cpu()  # before Megatron is imported; on GPUs without it, with nccl and chunks on the device

from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from megatron_zb.bridge import Settings, install
from megatron_zb.megatron_core.random_streams import initialise_by_global_name

BATCH, LONGEST, VOCABULARY = 4, 24, 32


def rollouts(step: int, count: int) -> Any:  # sequences that count up, and some that do not
    draw = torch.Generator().manual_seed(step)
    for number in range(count):  # each microbatch has a length of its own
        length = 8 + (5 * number + 3 * step) % (LONGEST - 8)
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=draw)
        tokens = (first + torch.arange(length + 1)) % VOCABULARY
        tokens[::2] = torch.randint(VOCABULARY, tokens[::2].shape, generator=draw)
        yield number, tokens


def forward_step(loss: Any, data: Any, chunk: Any) -> Any:
    number, tokens = next(data)
    positions = torch.arange(tokens.size(1) - 1)[None]
    return chunk(tokens[:, :-1], positions, None), partial(loss, number, tokens)


def log_probs(number: int, tokens: Any, logits: Any, non_loss_data: bool = False) -> Any:
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def policy_loss(old: list[Any], number: int, tokens: Any, logits: Any) -> Any:
    new = log_probs(number, tokens, logits)
    reward = (tokens.diff() % VOCABULARY == 1).float().mean(-1, keepdim=True)  # it counts up
    loss = -((new - old[number]).exp().clamp(max=1.2) * (reward - 0.5)).mean()
    return loss, {"counting": new[1::2].detach().exp().mean()}


settings = Settings(pipeline_schedule=sys.argv[1], num_microbatches=6)  # can be pickled
torch.distributed.init_process_group("gloo")
p = torch.distributed.get_world_size()
fixed = {"use_cpu_initialization": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}
shape = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4}
varying = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
placed = {"pipeline_model_parallel_size": p, "pipeline_dtype": torch.float32}
config = TransformerConfig(**shape, **fixed, **varying, **placed)
zb = install(settings, config)  # in every process, before initialize_model_parallel
mpu.initialize_model_parallel(1, p, zb.virtual_pipeline_size)
tensor_parallel.model_parallel_cuda_manual_seed(1)
layer = gpt_layer_specs.get_gpt_layer_local_spec()
build = zb.builder(partial(GPTModel, config, layer, VOCABULARY, LONGEST))  # one chunk
stages = [None] if zb.virtual_pipeline_size is None else list(range(zb.virtual_pipeline_size))
models = [build(vp_stage=stage) for stage in stages]
initialise_by_global_name(models, config, seed=1)  # the same weights under every schedule
chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(), m) for m in models]
config.finalize_model_grads_func = finalize_model_grads
optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3, clip_grad=0.0), chunks)
for step in range(20):
    count = 2 * (2 + step % 3)  # microbatches
    run = partial(get_forward_backward_func(), model=chunks, num_microbatches=count)
    run = partial(run, seq_length=1, micro_batch_size=1)  # every message tells its own
    data = [rollouts(step, count) for _ in chunks]
    score = partial(forward_step, log_probs)
    with torch.no_grad():
        old = run(forward_step_func=score, data_iterator=data, forward_only=True,
                  collect_non_loss_data=True)  # fmt: skip
    optimizer.zero_grad()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    train = partial(forward_step, partial(policy_loss, old))
    data = [rollouts(step, count) for _ in chunks]
    found = run(forward_step_func=train, data_iterator=data)
    optimizer.step()
    if found:  # on the rank that holds the output layer
        print(step, sum(each["counting"].item() for each in found) / count, flush=True)

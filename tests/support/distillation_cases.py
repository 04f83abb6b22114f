"""A tiny teacher, and student blocks trained alone on what it was recorded to say."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch.distributed.distributed_c10d import _world
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_zb.cpu_ranks import redirect_experts
from megatron_zb.distill.blocks import FusedAttention, ShardedNorm, student_layer, teacher_layer
from megatron_zb.distill.flags import complete, parse
from megatron_zb.distill.initialisation import inherit
from megatron_zb.distill.loop import Job, distribution_of, open_job
from megatron_zb.distill.student import BlockShape, StudentConfig, library
from megatron_zb.distill.teacher import read_teacher
from megatron_zb.megatron_core.random_streams import initialise_by_global_name
from megatron_zb.parsing import flag_of
from megatron_zb.train import data
from megatron_zb.train.checkpoint import write
from megatron_zb.train.model import transformer_config

Key = tuple[int, str]
"""A block and the name of a candidate."""

LAYERS = 4
SEQUENCE = 16
GPT: Mapping[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "padded_vocab_size": 384,
    "max_position_embeddings": SEQUENCE,
    "seq_length": SEQUENCE,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "disable_bias_linear": False,
    "untie_embeddings_and_output_weights": False,
}
LLAMA: Mapping[str, Any] = {
    **GPT,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
# Queries and keys are normed, heads wider than their share of the hidden size, as in Qwen3; biases
# of queries, keys and values are Qwen2.5's, positions scaled as in Llama 3.1.
QWEN: Mapping[str, Any] = {
    **LLAMA,
    "kv_channels": 12,
    "qk_layernorm": True,
    "add_qkv_bias": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "rotary_base": 500.0,
    "use_rope_scaling": True,
    "rope_scaling_factor": 4.0,
}
LATENT: Mapping[str, Any] = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 32,
}
# Experts in every layer, which Megatron stores as slices of the same tensors.
MIXTRAL: Mapping[str, Any] = {**LLAMA, **EXPERTS, "moe_layer_freq": 1}
MICROBATCHES, STEPS, RATE, CLIP = 4, 3, 1e-2, 0.05
TRAINING = (
    f"--cpu --micro-batch-size 2 --global-batch-size {2 * MICROBATCHES} --lr {RATE} "
    f"--clip-grad {CLIP} --train-iters {STEPS} --loss mse --student-config none.yaml"
)
HALF = {"name": "half", "mlp": {"ffn_fraction": 0.5}}
SLOW = {"name": "slow", "attention": {"query_groups": 2}, "learning_rate": 1e-3}
LINEAR = {"name": "linear", "attention": {"kind": "linear"}, "mlp": {"kind": "linear"}}
EMPTY = {"name": "empty", "attention": {"kind": "no_op"}}
FEWER_EXPERTS = {"name": "fewer-experts", "mlp": {"experts": 2}}


@dataclass(frozen=True)
class Learnt:
    """What became of one candidate."""

    gradients: list[list[torch.Tensor]]
    """Of each step, as the optimizer was given them."""
    weights: dict[str, torch.Tensor]


def enter(model: Mapping[str, Any], folder: str, flags: Sequence[str] = ()) -> None:
    """Make Megatron's groups, and the teacher's checkpoint if it is not there yet; collective."""
    redirect_experts()
    if not parallel_state.is_initialized():
        sizes = {
            name: int(flags[flags.index(flag_of(name)) + 1])
            for name in ("tensor_model_parallel_size", "expert_model_parallel_size")
            if flag_of(name) in flags
        }
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    if not Path(folder).exists():
        dist.barrier()
        whole = whole_model(argparse.Namespace(**(vars(_defaults()) | dict(model))))
        write(Path(folder), 1, {"model": whole.sharded_state_dict(), "args": dict(model)}, {})
    dist.barrier()


def _defaults() -> argparse.Namespace:
    from megatron_zb.train import flags

    values = flags.parser().defaults()
    own = {"cpu": True, "num_query_groups": 4, "sequence_parallel": False}
    return argparse.Namespace(**(values | own))


def whole_model(args: argparse.Namespace, ffn_hidden_size: int | None = None) -> GPTModel:
    """A model in one piece, as Megatron builds it, with random weights."""
    split = args.sequence_parallel and _is_recorded_split(args)
    args = argparse.Namespace(**(vars(args) | {"sequence_parallel": split}))
    if ffn_hidden_size is not None:
        args = argparse.Namespace(**(vars(args) | {"ffn_hidden_size": ffn_hidden_size}))
    config = _config(args)
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layers(config),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
    )
    if config.expert_model_parallel_size == 1:  # split, its weights are loaded
        initialise_by_global_name([model], config, seed=7)
    for name, bias in model.named_buffers():
        if name.endswith("expert_bias"):
            bias.copy_(torch.linspace(-0.1, 0.2, len(bias)))
    with torch.no_grad():
        for parameter in model.parameters():  # so that no two blocks say nearly the same
            parameter.mul_(1 + 3 * (parameter.dim() > 1))
    return model


def _is_recorded_split(args: argparse.Namespace) -> bool:
    """Whether a teacher is recorded with shards: experts sum in another order without them."""
    return vars(args).get("num_experts") is not None


def _config(args: argparse.Namespace) -> TransformerConfig:
    given = vars(args)
    fields = {name: given[name] for name in (*LATENT, *EXPERTS) if given.get(name) is not None}
    if experts := fields.pop("num_experts", None):
        fields |= {"num_moe_experts": experts, "moe_router_load_balancing_type": "none"}
        split = args.tensor_model_parallel_size > 1
        fields["moe_token_dispatcher_type"] = "allgather" if split else "alltoall"
        fields["expert_model_parallel_size"] = parallel_state.get_expert_model_parallel_world_size()
    kind = TransformerConfig
    if fields.pop("multi_latent_attention", False):
        kind = MLATransformerConfig
    return transformer_config(args, kind=kind, fields=fields)


def _layers(config: TransformerConfig) -> Any:
    if not config.num_moe_experts:
        whole = of_layer = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=config.normalization,
        )
        layers = [of_layer]
    else:
        whole = get_gpt_decoder_block_spec(config, False, normalization=config.normalization)
        layers = whole.layer_specs
        whole.layer_norm = ShardedNorm
        for layer in layers:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = ShardedNorm
    for layer in layers:
        layer.submodules.self_attention.submodules.core_attention = FusedAttention
    return whole


def job_of(corpus: str, teacher: str, candidates: Sequence[Mapping[str, Any]], *flags: str) -> Job:
    """A job over that teacher; `flags` are added to those of the command line."""
    words = [*TRAINING.split(), "--teacher-load", teacher, "--data-path", corpus, *flags]
    found = read_teacher(Path(teacher))
    args = complete(parse(words), found.arguments)
    student = StudentConfig.model_validate({"name": "a student", "candidates": list(candidates)})
    return Job(args, found, library(student, found.shape), None)


def learnt_in_pipeline(
    corpus: str,
    teacher: str,
    model: Mapping[str, Any],
    candidates: Sequence[Mapping[str, Any]],
    flags: Sequence[str],
) -> dict[Key, Learnt]:
    """Train on the ranks of the pool; what this rank's candidates have come to."""
    enter(model, teacher, flags)
    job = job_of(corpus, teacher, candidates, *flags)
    groups = list(_world.pg_map)
    run = open_job(job, distribution_of(job), dist.HashStore() if alone() else _store())
    student_blocks = {(p.block, p.shape.name): p for p in run.stage_blocks.all_student_blocks()}
    owner = {
        id(p): key
        for key, student_block in student_blocks.items()
        for p in student_block.layer.parameters()
    }
    with _recorded(owner) as gradients:
        run.steps(0, STEPS)
    run.close()
    assert list(_world.pg_map) == groups, "groups are left"
    return {
        key: Learnt(
            gradients.get(key, []),
            {n: p.detach().clone() for n, p in student_block.layer.named_parameters()},
        )
        for key, student_block in student_blocks.items()
    }


def alone() -> bool:
    return dist.get_world_size() == 1


def _store() -> dist.Store:
    from torch.distributed.distributed_c10d import _get_default_store

    store: dist.Store = _get_default_store()
    return store


@contextmanager
def _recorded(owner: Mapping[int, Key]) -> Iterator[dict[Key, list[list[torch.Tensor]]]]:
    found: dict[Key, list[list[torch.Tensor]]] = {}

    def record(optimizer: Any, _args: Any, _keywords: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if key := owner.get(id(parameters[0])):
            found.setdefault(key, []).append([p.grad.clone() for p in parameters])

    handle = register_optimizer_step_pre_hook(record)
    try:
        yield found
    finally:
        handle.remove()


def learnt_alone(
    corpus: str,
    teacher: str,
    model: Mapping[str, Any],
    candidates: Sequence[Mapping[str, Any]],
    shares: Sequence[int],
    flags: Sequence[str] = (),
) -> dict[Key, Learnt]:
    """Every block trained by itself, on activations recorded from the teacher in one piece.

    `shares` says for each block over how many ranks gradients are summed: microbatches in turn.
    """
    enter(model, teacher, flags)
    job = job_of(corpus, teacher, candidates, *flags)
    recorded = _recorded_lessons(job)
    return {
        (block, shape.name): _train(job, block, shape, recorded, shares[block])
        for block, shapes in enumerate(job.library)
        for shape in shapes
    }


Lessons = list[list[tuple[torch.Tensor, torch.Tensor]]]
"""By microbatch and block: what a layer of the teacher was given, and what it made of it."""


def _recorded_lessons(job: Job) -> Lessons:
    whole = whole_model(job.args).eval()
    state = {"model": whole.sharded_state_dict()}
    whole.load_state_dict(dist_checkpointing.load(state, str(job.teacher.path))["model"])
    dataset, _ = data.build_datasets(job.args)
    lessons: Lessons = []

    def record(_layer: Any, given: Any, keywords: Any, made: Any) -> None:
        entered = keywords["hidden_states"] if "hidden_states" in keywords else given[0]
        lessons[-1].append((_shard(job, entered).clone(), _shard(job, made[0]).clone()))

    for layer in whole.decoder.layers:
        layer.register_forward_hook(record, with_kwargs=True)
    with torch.no_grad():
        for number in _mine(job, range(STEPS * MICROBATCHES)):
            batch = data.microbatch(dataset, job.args, 2 * number)
            lessons.append([])
            whole(batch["tokens"], batch["position_ids"], None)
    return lessons


def _mine(job: Job, numbers: range) -> range:
    """The microbatches of this rank's share of the experts, in turn."""
    lane = parallel_state.get_expert_model_parallel_rank()
    return numbers[lane :: job.args.expert_model_parallel_size]


def _shard(job: Job, activation: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sequence, (sequence, batch, hidden)."""
    if not job.args.sequence_parallel or _is_recorded_split(job.args):
        return activation
    parts = activation.chunk(job.args.tensor_model_parallel_size)
    return parts[parallel_state.get_tensor_model_parallel_rank()]


def fresh(job: Job, block: int, shape: BlockShape) -> Any:
    """A candidate before its first step."""
    whole = whole_model(job.args)
    state = {"model": whole.sharded_state_dict()}
    whole.load_state_dict(dist_checkpointing.load(state, str(job.teacher.path))["model"])
    taught = teacher_layer(job.args, block)
    taught.load_state_dict(whole.decoder.layers[block].state_dict())
    layer = student_layer(job.args, shape, block)
    inherit(layer, taught, shape, job.teacher.shape)
    return layer


def _train(job: Job, block: int, shape: BlockShape, recorded: Lessons, share: int) -> Learnt:
    layer = fresh(job, block, shape)
    parameters = list(layer.parameters())
    decaying = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    peak = RATE if shape.learning_rate is None else shape.learning_rate
    adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=peak, weight_decay=0.01)
    rotary, sequence = _rotary(job), job.args.sequence_parallel
    split = job.args.tensor_model_parallel_size
    lanes = split * job.args.expert_model_parallel_size
    each = MICROBATCHES // job.args.expert_model_parallel_size
    gradients = []
    for step in range(STEPS):
        for group in adam.param_groups:
            group["lr"] = (1.0 - step / STEPS) * peak
        parts = []
        for part in range(share):
            adam.zero_grad()
            for number in range(step * each + part, (step + 1) * each, share):
                given, wanted = recorded[number][block]
                said, _ = layer(given, attention_mask=None, rotary_pos_emb=rotary)
                loss = ((said - wanted) ** 2).mean() / (split if sequence else 1)
                (loss * (1 / MICROBATCHES)).backward()
            parts.append([p.grad.clone() for p in decaying + others])
        for parameter, *summands in zip(decaying + others, *parts, strict=True):
            parameter.grad = sum(summands[1:], start=summands[0])
        if lanes > 1:
            _finish_split(layer, sequence)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        gradients.append([p.grad.clone() for p in decaying + others])
        adam.step()
    weights = {n: p.detach().clone() for n, p in layer.named_parameters()}
    return Learnt(gradients, weights)


_SPLIT = (
    *("linear_qkv.", "linear_fc1.", "linear_proj.weight", "linear_fc2.weight"),
    *("linear_q_down", "linear_q_up", "linear_kv_down", "linear_kv_up"),
    *("self_attention.weight", "mlp.weight"),  # of linear layers
)


def _finish_split(layer: Any, sequence: bool) -> None:
    """Sum what every rank has of a part, and clip by the norm of the whole block."""
    group = parallel_state.get_tensor_model_parallel_group()
    experts = parallel_state.get_expert_model_parallel_group()
    counted = []
    for name, parameter in layer.named_parameters():
        is_split = any(part in name for part in _SPLIT)
        is_expert = ".local_experts." in name and experts.size() > 1
        if not is_expert:
            dist.all_reduce(parameter.grad, group=experts)
        of_heads = ".q_layernorm." in name or ".k_layernorm." in name
        if (sequence or of_heads) and not is_split:
            dist.all_reduce(parameter.grad, group=group)
        if (is_split or group.rank() == 0) and (is_expert or experts.rank() == 0):
            counted.append(torch.linalg.vector_norm(parameter.grad))
    square = torch.linalg.vector_norm(torch.stack(counted)).square() if counted else torch.zeros(())
    dist.all_reduce(square)
    factor = (CLIP / (square.sqrt() + 1e-6)).clamp(max=1)
    for parameter in layer.parameters():
        parameter.grad *= factor


def _rotary(job: Job) -> torch.Tensor | None:
    if job.args.position_embedding_type != "rope" or job.args.multi_latent_attention:
        return None
    table: torch.Tensor = whole_model(job.args).rotary_pos_emb(SEQUENCE)
    return table


def differences(ours: Mapping[Key, Learnt], alone: Mapping[Key, Learnt]) -> list[str]:
    """Where candidates are not to the last bit what they are when trained alone: [] is parity."""
    found = []
    for key, learnt in ours.items():
        expected = alone[key]
        if len(learnt.gradients) != len(expected.gradients):
            found.append(f"{key}: {len(learnt.gradients)} steps")
        for step, (mine, theirs) in enumerate(
            zip(learnt.gradients, expected.gradients, strict=False)
        ):
            equal = [torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)]
            if not all(equal):
                found.append(f"{key}: gradients of step {step}, {equal.count(False)} tensors")
        for name, weight in learnt.weights.items():
            if not torch.equal(weight, expected.weights[name]):
                found.append(
                    f"{key}: {name} is off by {(weight - expected.weights[name]).abs().max()}"
                )
    return found

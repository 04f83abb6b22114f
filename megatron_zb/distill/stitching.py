"""The finished student as an ordinary checkpoint of Megatron."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_zb.distill import weights
from megatron_zb.distill.flags import BEST, FIRST
from megatron_zb.distill.stage import StageBlocks
from megatron_zb.distill.student import BlockShape
from megatron_zb.distill.student_block import StudentBlock
from megatron_zb.distill.teacher import expert_blocks
from megatron_zb.errors import UsageError
from megatron_zb.parsing import flag_of
from megatron_zb.train.checkpoint import write

_CONTENT = {"singleton_local_shards": False}

# What Megatron-LM calls what its arguments for heterogeneous layers ask of a model.
_HETEROGENEOUS_NEEDS = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
}


@dataclass(frozen=True)
class ChosenBlock:
    """A block of a student that is assembled: a layer and its shape."""

    block: int
    shape: BlockShape
    layer: Any


def is_uniform(shapes: Iterable[BlockShape], experts: Collection[int] = ()) -> bool:
    """Return whether blocks of these shapes can be the layers of one GPTModel.

    The blocks `experts` of it have experts, whose width may differ from that of other MLPs.
    """
    numbered = list(enumerate(shapes))
    groups = {shape.num_query_groups for _, shape in numbered}
    sizes = {(b in experts, shape.num_experts, shape.ffn_hidden_size) for b, shape in numbered}
    kinds = {has_experts for has_experts, _, _ in sizes}
    return all(s.is_layer for _, s in numbered) and len(groups) == 1 and len(sizes) == len(kinds)


def are_alike(args: argparse.Namespace, shapes: Sequence[BlockShape]) -> bool:
    """Return whether Megatron stores the layers as slices of the same tensors.

    Where only some layers have experts it does not, whatever their widths.
    """
    return is_uniform(shapes, expert_blocks(vars(args))) and args.moe_layer_freq in (None, 1)


def check_stitchable(args: argparse.Namespace, library: Sequence[Sequence[BlockShape]]) -> None:
    """Check that every possible student can be written as a checkpoint.

    Raises:
        UsageError: --save-student is given and one cannot.
    """
    if args.save_student is None:
        return
    if args.candidate == BEST:
        possible = [shape for candidates in library for shape in candidates]
    else:
        possible = [_named(candidates, args.candidate) for candidates in library]
    experts = expert_blocks(vars(args))
    if experts or args.multi_latent_attention:
        if args.candidate == BEST or not is_uniform(possible, experts):
            raise UsageError(
                "--save-student: Megatron's heterogeneous layers have neither experts nor latent "
                "attention: give every block the same candidate, with attention and an MLP, by "
                "--candidate NAME, or --alike for a choice, or leave --save-student out"
            )
        return
    if is_uniform(possible):
        return
    for name, needed in _HETEROGENEOUS_NEEDS.items():
        if getattr(args, name) != needed:
            raise UsageError(
                f"--save-student: a heterogeneous student cannot be stitched to a uniform "
                f"checkpoint, and Megatron's heterogeneous layers need {flag_of(name)} "
                f"{needed} where this teacher has {getattr(args, name)}: give every block the same "
                "candidate, with attention and an MLP, or leave --save-student out"
            )


def _named(candidates: Sequence[Any], name: str) -> Any:
    if name in (FIRST, BEST):
        return candidates[0]
    return next(c for c in candidates if getattr(c, "shape", c).name == name)


def choose(
    candidate: str, stage_blocks: StageBlocks, losses: dict[tuple[int, str], float]
) -> list[StudentBlock]:
    """Choose a candidate for each of this rank's blocks.

    `losses` by (block, name) are for the best.
    """
    if candidate != BEST:
        return [_named(candidates, candidate) for candidates in stage_blocks.student_blocks]
    return [
        min(
            candidates,
            key=lambda student_block: losses[student_block.block, student_block.shape.name],
        )
        for candidates in stage_blocks.student_blocks
    ]


def save_student(
    args: argparse.Namespace,
    stage_blocks: StageBlocks,
    chosen: Sequence[StudentBlock | ChosenBlock],
    step: int,
) -> None:
    """Write the student: chosen blocks, and the teacher's embedding, last norm and output layer.

    Collective over all ranks. The layers are stored as a GPTModel's, each under its number, as
    Megatron does, where they differ in shape or only some have experts.

    Raises:
        UsageError: the directory cannot be written.
    """
    shapes = _all_shapes(chosen)
    alike = are_alike(args, shapes)
    copies = stage_blocks.place.copies
    parts = [
        weights.layer_state(p.layer, p.block, args.num_layers, copies, alike=alike) for p in chosen
    ]
    if stage_blocks.embedding is not None:
        parts.append(weights.embedding_state(stage_blocks.embedding, copies))
    if stage_blocks.head is not None:
        untied = args.untie_embeddings_and_output_weights
        parts.append(weights.head_state(stage_blocks.head, untied, copies))
    state = {
        "model": weights.merged(parts),
        "args": argparse.Namespace(**_model_arguments(args, shapes)),
        "iteration": step,
        "checkpoint_version": 3.0,
    }
    write(Path(args.save_student), step, state, _CONTENT)


def _all_shapes(chosen: Sequence[StudentBlock | ChosenBlock]) -> list[BlockShape]:
    """Gather the shapes of all blocks, in order; collective over all ranks."""
    everywhere: list[dict[int, BlockShape]] = [{}] * dist.get_world_size()
    dist.all_gather_object(
        everywhere, {student_block.block: student_block.shape for student_block in chosen}
    )
    shapes = {block: shape for on_rank in everywhere for block, shape in on_rank.items()}
    return [shapes[block] for block in sorted(shapes)]


def _model_arguments(args: argparse.Namespace, shapes: Sequence[BlockShape]) -> dict[str, Any]:
    """Return the arguments under the names of megatron_zb.train, then of Megatron-LM."""
    stored = dict(vars(args))
    experts = expert_blocks(stored)
    stored["group_query_attention"] = not args.multi_latent_attention
    stored["num_query_groups"] = shapes[0].num_query_groups
    for block, shape in reversed(list(enumerate(shapes))):
        if block in experts:
            stored["num_experts"] = shape.num_experts
        width = "moe_ffn_hidden_size" if block in experts else "ffn_hidden_size"
        stored[width] = shape.ffn_hidden_size
    if not is_uniform(shapes, experts):
        stored["heterogeneous_layers_config_encoded_json"] = described(args, shapes)
    return stored | {
        "add_bias_linear": not args.disable_bias_linear,
        "add_position_embedding": args.position_embedding_type == "learned_absolute",
        "world_size": 1,
        "tokenizer_type": None,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "no_save_optim": True,
        "no_save_rng": True,
    }


def described(args: argparse.Namespace, shapes: Sequence[BlockShape]) -> str:
    """Describe blocks of different shapes for megatron-core's HeterogeneousTransformerConfig."""
    blocks = [
        {
            "attention": {
                "no_op": s.attention == "no_op",
                "replace_with_linear": s.attention == "linear",
                "num_query_groups": s.num_query_groups if s.attention == "attention" else None,
                "n_heads_in_group": (
                    args.num_attention_heads // s.num_query_groups
                    if s.attention == "attention"
                    else None
                ),
            },
            "mlp": {
                "no_op": s.mlp == "no_op",
                "replace_with_linear": s.mlp == "linear",
                "ffn_hidden_size": s.ffn_hidden_size if s.mlp == "mlp" else None,
            },
        }
        for s in shapes
    ]
    model = {
        "hidden_act": "silu",
        "num_hidden_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "rope_theta": args.rotary_base,
        # Megatron-LM asks for --use-rope-scaling beside heterogeneous layers; 1 changes nothing
        "rope_scaling": {"factor": args.rope_scaling_factor if args.use_rope_scaling else 1.0},
    }
    return json.dumps(model | {"block_configs": blocks})

"""The flags of `megatron_zb.distill`, their `--help` texts and their checks.

Nothing here imports torch or Megatron, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_zb.errors import UsageError
from megatron_zb.files import check_writable
from megatron_zb.job import settings
from megatron_zb.parsing import Argument, Parser, add_flags, check_bounds, flag_of, size_in_bytes
from megatron_zb.train import arguments, flags

if TYPE_CHECKING:
    from megatron_zb.distill.student import BlockShape

_FP8_MULTIPLES = {"tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""Recipes of fp8, and what divides the sizes of matrices in products."""
LOSSES = ("mse", "normalised-mse", "cosine")
FIRST, BEST = "first", "best"

_DESCRIPTION = """\
Distil a GPT block by block: every block of a student learns from the block of its teacher in the
same place, on the activations that the teacher's blocks relay from rank to rank (Pipe-BD,
arXiv 2301.12443).

  torchrun --nproc-per-node 2 -m megatron_zb.distill --cpu \\
      --teacher-load checkpoints/teacher --student-config configs/students/half_mlp.yaml \\
      --micro-batch-size 2 --global-batch-size 16 --train-iters 300 --lr 1e-3 \\
      --data-path data/corpus_text --save checkpoints/distillation \\
      --save-student checkpoints/student

The sizes of the model are those of the teacher's checkpoint.
"""


def parser() -> Parser:
    """Build the parser of the command line, which raises UsageError on mistakes."""
    command_line = Parser(
        prog="python -m megatron_zb.distill",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(command_line.add_argument_group("distillation"), _DISTILLATION)
    add_flags(command_line.add_argument_group("library of blocks"), _LIBRARY)
    _add_ranks(command_line)
    _add_training(command_line)
    _add_data(command_line)
    _add_checkpoint(command_line)
    _add_log(command_line)
    return command_line


_DISTILLATION: dict[str, Argument] = {
    "teacher_load": {
        "required": True,
        "metavar": "DIR",
        "help": "the teacher: a torch_dist checkpoint of a GPT, as --save of pretrain_gpt writes "
        "it, or Megatron-Bridge when it imports a model of Hugging Face's format",
    },
    "teacher_fp8": {
        "choices": tuple(_FP8_MULTIPLES),
        "metavar": "RECIPE",
        "help": "run the teacher's linear layers in fp8 by Transformer-Engine, whose scales are of "
        "a tensor (tensorwise), a block (blockwise) or 32 numbers (mxfp8); students stay as they "
        "are",
    },
    "student_config": {
        "required": True,
        "metavar": "FILE",
        "help": "the shapes of the student's blocks, see configs/students",
    },
    "loss": {
        "choices": LOSSES,
        "default": "normalised-mse",
        "help": "between the outputs of a student block and its teacher's; default: %(default)s",
    },
    "candidate": {
        "default": FIRST,
        "metavar": "NAME",
        "help": "which candidate of each block is stitched into the student: one by its name, the "
        "first, or the best, which has the lowest loss at the end; default: %(default)s",
    },
}
_LIBRARY: dict[str, Argument] = {
    "save_library": {
        "metavar": "DIR",
        "help": "write every candidate there when it is finished, with its error on held-out text, "
        "for megatron_zb.distill.choice; a run continues with what is not there yet. Then "
        "--distribution counts candidates, block by block. DIR/times.json has their times, and is "
        "measured if it is missing",
    },
    "candidates_at_once": {
        "type": int,
        "metavar": "N",
        "least": 1,
        "help": "train at most N candidates of a block at a time; default: all",
    },
    "memory_limit": {
        "metavar": "SIZE",
        "help": "of a rank, for blocks and optimizers, such as 60GiB; default: none",
    },
}
_RANKS: dict[str, Argument] = {
    "redistribute": {
        "action": "store_true",
        "help": "at every checkpoint, distribute the blocks anew by the times that ranks took, if "
        "a step should take 5 %% less, and continue from the checkpoint; needs --save-interval",
    },
    "tensor_model_parallel_size": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "above": 0,
        "help": "ranks that split each block, of teacher and student; default: %(default)s",
    },
    "sequence_parallel": {
        "action": "store_true",
        "help": "split the sequence, too, between the parts of a block that are split",
    },
    "expert_model_parallel_size": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "above": 0,
        "help": "ranks that split the experts of each block; default: %(default)s",
    },
    "run_ahead": {
        "type": int,
        "default": 2,
        "metavar": "N",
        "least": 1,
        "help": "steps that the first rank may be ahead of the slowest; default: %(default)s",
    },
    "relay_memory_limit": {
        "metavar": "SIZE",
        "help": "of the activations that a rank has sent and the next one has not taken yet, such "
        "as 8GiB: a rank that is further ahead waits; default: none but --run-ahead",
    },
}


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks")
    add_flags(group, flags.PROCESSES)
    group.add_argument(
        "--distribution",
        metavar="SPEC",
        help="which blocks run on how many ranks: 0-3:1,4-7:2 is blocks 0 to 3 on one rank and 4 "
        "to 7 on two; by default blocks are timed, and what should be fastest is chosen; ranks "
        "that share a block count as one",
    )
    add_flags(group, _RANKS)
    settings.add_arguments(group, settings.DISTILLATION, "pipeline_timeout")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    about = (
        "sequences per iteration, over all microbatches; a stage on several ranks gives them "
        "microbatches in turn"
    )
    add_flags(group, flags.BATCHES, global_batch_size={"help": about})
    group.add_argument(
        "--seq-length", type=int, metavar="N", help="in tokens; default: the teacher's"
    )
    add_flags(group, flags.OPTIMIZER)
    group.add_argument("--bf16", action="store_true", help="float32 without it")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data and evaluation")
    flags.add_source(group)
    about = (
        "batches of held-out text on which teacher and stitched student are compared at the end; "
        "default: %(default)s, none"
    )
    add_flags(group, flags.DATA, eval_iters={"help": about})


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    add_flags(
        group,
        flags.CHECKPOINTS,
        save={
            "help": "write a checkpoint of all candidates and their optimizers at the end of the "
            "run"
        },
        load={"help": "continue from the latest checkpoint there"},
    )
    settings.add_arguments(group, settings.DISTILLATION, "pipeline_allow_other_data")
    group.add_argument(
        "--save-student",
        metavar="DIR",
        help="write the stitched student as a checkpoint of Megatron at the end of the run",
    )


def _add_log(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    add_flags(group, flags.RECORDS, log_interval={"default": 10})
    group.add_argument(
        "--picture",
        metavar="FILE",
        help="at the end, draw which rank ran which pass when in the last 3 steps, as .png or .svg",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line; the model's arguments are not known yet.

    Raises:
        UsageError: something is missing or contradictory.
    """
    args = parser().parse_args(argv)
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Check parsed arguments, as :func:`parse` does.

    Raises:
        UsageError: something is missing or contradictory.
    """
    for table in (_DISTILLATION, _LIBRARY, _RANKS, flags.BATCHES, flags.RECORDS):
        check_bounds(args, table)
    _check_library(args)
    if args.redistribute and (args.distribution or not (args.save and args.save_interval)):
        raise UsageError(
            "--redistribute chooses the distribution at checkpoints: give --save and "
            "--save-interval, and leave --distribution out"
        )
    if args.teacher_fp8 is not None:
        _check_fp8(args)
    if args.relay_memory_limit is not None:
        size_in_bytes(args.relay_memory_limit, "--relay-memory-limit")
    if args.picture is not None:
        if Path(args.picture).suffix.lower() not in (".png", ".svg"):
            raise UsageError(f"--picture {args.picture}: give a name that ends in .png or .svg")
        if find_spec("matplotlib") is None:
            raise UsageError(
                "--picture needs matplotlib: install it with pip install 'megatron-zb[plots]'"
            )
        check_writable(Path(args.picture))
    if not Path(args.teacher_load).is_dir():
        raise UsageError(
            f"--teacher-load {args.teacher_load}: there is no such directory; give the one that "
            "was given to --save when the teacher was trained"
        )


def _check_fp8(args: argparse.Namespace) -> None:
    if args.cpu:
        raise UsageError("--teacher-fp8 needs a GPU that computes in eight bits: leave out --cpu")
    if find_spec("transformer_engine") is None:
        raise UsageError(
            "--teacher-fp8 needs the package transformer_engine, which is not installed: install it"
        )


# What a library has in its own way, with what it is when it is not given.
_NOT_WITH_LIBRARY = {
    "save": None,
    "save_interval": None,
    "load": None,
    "exit_interval": None,
    "redistribute": False,
    "save_student": None,
    "candidate": FIRST,
}


def _check_library(args: argparse.Namespace) -> None:
    if args.save_library is None:
        for name in ("candidates_at_once", "memory_limit"):
            if getattr(args, name) is not None:
                raise UsageError(f"{flag_of(name)} is for a library: give --save-library, too")
        return
    for name, nothing in _NOT_WITH_LIBRARY.items():
        if getattr(args, name) != nothing:
            raise UsageError(
                f"{flag_of(name)}: --save-library keeps every finished candidate and continues by "
                "itself, and a student is chosen afterwards: leave it out"
            )
    if not args.eval_iters or args.eval_iters < 0:
        raise UsageError(
            "--save-library scores candidates on held-out text: give --eval-iters, such as 8"
        )
    if args.memory_limit is not None:
        size_in_bytes(args.memory_limit, "--memory-limit")


def complete(args: argparse.Namespace, model: Mapping[str, Any]) -> argparse.Namespace:
    """Return all arguments for building and training a GPT, with those of the teacher's model.

    Args:
        args: the result of :func:`parse`.
        model: the model's arguments by the names of megatron_zb.train.

    Raises:
        UsageError: something does not fit the model.
    """
    seq_length = args.seq_length or model["seq_length"] or model["max_position_embeddings"]
    if seq_length > model["max_position_embeddings"]:
        raise UsageError(
            f"--seq-length {seq_length} is more than the {model['max_position_embeddings']} "
            "positions of the teacher: give fewer"
        )
    unset = {name: value for name, value in model.items() if value is None}
    known = {name: value for name, value in model.items() if value is not None}
    # how many of its tokens a tokenizer uses is not always stored with a model
    known["vocab_size"] = model["padded_vocab_size"]
    # the norms of a block run on shards of a sequence, those of a GPTModel may not
    given = vars(args) | {"seq_length": seq_length, "sequence_parallel": False}
    whole = argparse.Namespace(**(unset | flags.parser().defaults() | known | given))
    arguments.complete(whole, world_size=args.tensor_model_parallel_size)
    whole.padded_vocab_size = model["padded_vocab_size"]
    whole.sequence_parallel = args.sequence_parallel
    whole.no_gradient_accumulation_fusion = True  # autograd has the gradients: no main_grad
    _check_tensor_parallel(whole)
    _check_experts(whole)
    if whole.teacher_fp8 is not None:
        _check_sizes_in_fp8(whole)
    return whole


def _check_sizes_in_fp8(args: argparse.Namespace) -> None:
    """Refuse what Transformer-Engine does not multiply in eight bits."""
    heads, split = args.num_attention_heads, args.tensor_model_parallel_size
    widths = {"hidden size": args.hidden_size, "width of the MLP": args.ffn_hidden_size // split}
    if args.multi_latent_attention:
        query, rotated = args.qk_head_dim, args.qk_pos_emb_head_dim
        widths |= {
            "compressed keys and values": args.kv_lora_rank + rotated,
            "compressed queries": args.q_lora_rank or 0,
            "width of queries": heads * (query + rotated) // split,
            "width of keys and values": heads * (query + args.v_head_dim) // split,
            "width of heads": heads * args.v_head_dim // split,
        }
    else:
        groups = args.num_query_groups or heads
        widths["width of queries, keys and values"] = (
            args.kv_channels * (heads + 2 * groups) // split
        )
        widths["width of heads"] = args.kv_channels * heads // split
    if args.num_experts:
        widths["width of experts"] = args.moe_ffn_hidden_size
    widths["tokens of a microbatch"] = args.seq_length * args.micro_batch_size
    multiple = _FP8_MULTIPLES[args.teacher_fp8]
    for what, size in widths.items():
        if size % multiple:
            raise UsageError(
                f"--teacher-fp8 {args.teacher_fp8}: {what} on a rank: {size}, but its products "
                f"take multiples of {multiple}: leave it out"
            )


def _check_tensor_parallel(args: argparse.Namespace) -> None:
    size = args.tensor_model_parallel_size
    if args.sequence_parallel and size == 1:
        raise UsageError("--sequence-parallel needs --tensor-model-parallel-size of 2 or more")
    for name in ("padded_vocab_size", "seq_length"):
        if (name != "seq_length" or args.sequence_parallel) and getattr(args, name) % size:
            raise UsageError(
                f"{flag_of(name)} {getattr(args, name)} cannot be split over "
                f"--tensor-model-parallel-size {size} ranks: give a size that divides it"
            )


def _check_experts(args: argparse.Namespace) -> None:
    experts, ranks = args.num_experts, args.expert_model_parallel_size
    if experts is None:
        if ranks > 1:
            raise UsageError(
                f"--expert-model-parallel-size {ranks}: the teacher has no experts: leave it out"
            )
        return
    if experts % ranks:
        raise UsageError(
            f"--expert-model-parallel-size {ranks} does not divide the teacher's {experts} "
            "experts: give a divisor"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise UsageError(
            "--tensor-model-parallel-size: Megatron trains experts under it only with "
            "--sequence-parallel: add it"
        )


def check_split(
    args: argparse.Namespace, library: Sequence[Sequence[BlockShape]], world_size: int
) -> None:
    """Check that ranks and student blocks can be split as the arguments ask.

    Raises:
        UsageError: they cannot.
    """
    size = args.tensor_model_parallel_size
    each = size * args.expert_model_parallel_size
    if world_size % each:
        raise UsageError(
            f"{world_size} ranks were started, but {each} share a block by "
            f"--tensor-model-parallel-size {size} and --expert-model-parallel-size "
            f"{args.expert_model_parallel_size}: start torchrun with --nproc-per-node {each}, or a "
            "multiple"
        )
    for block, candidates in enumerate(library):
        for shape in candidates:
            for name in ("num_query_groups", "ffn_hidden_size"):
                if getattr(shape, name) % size:
                    raise UsageError(
                        f"candidate {shape.name} of block {block} has {name} "
                        f"{getattr(shape, name)}, which --tensor-model-parallel-size {size} does "
                        "not divide: give a multiple"
                    )
            if shape.num_experts:
                _check_routed(args, shape, block)


def _check_routed(args: argparse.Namespace, shape: BlockShape, block: int) -> None:
    """Check that a candidate's experts can be split over ranks, and that the router finds enough.

    Raises:
        UsageError: they cannot, or it does not.
    """
    groups = getattr(args, "moe_router_num_groups", None) or 1
    of_groups = getattr(args, "moe_router_group_topk", None) or 1
    least = -(-args.moe_router_topk // of_groups) * groups  # of each group that it chooses
    each = math.lcm(args.expert_model_parallel_size, groups)
    if shape.num_experts % each or shape.num_experts < least:
        raise UsageError(
            f"candidate {shape.name} of block {block} has {shape.num_experts} experts: by "
            f"--expert-model-parallel-size {args.expert_model_parallel_size} and the teacher's "
            f"router, give a multiple of {each}, {-(-least // each) * each} or more"
        )


def check_candidate(args: argparse.Namespace, library: Sequence[Sequence[BlockShape]]) -> None:
    """Check that --candidate names a candidate of every block.

    Raises:
        UsageError: it does not.
    """
    if args.candidate in (FIRST, BEST):
        return
    for block, candidates in enumerate(library):
        names = [candidate.name for candidate in candidates]
        if args.candidate not in names:
            raise UsageError(
                f"--candidate {args.candidate}: block {block} has no such candidate; give one of "
                f"{', '.join((FIRST, BEST, *names))}"
            )

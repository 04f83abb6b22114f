"""The command line of `megatron_zb.pretrain_gpt`: Megatron's names, checked before anything starts.

Nothing here imports torch or Megatron, so that a mistake is reported at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from megatron_zb.errors import UsageError
from megatron_zb.schedules import catalog
from megatron_zb.training.checkpoint_directory import latest_checkpoint

_DESCRIPTION = """\
Train a GPT model with megatron-core, with one of this package's pipeline schedules or with
Megatron's own. The arguments have the names they have in Megatron-LM.

  torchrun --nproc-per-node 4 -m megatron_zb.pretrain_gpt --cpu \\
      --pipeline-model-parallel-size 4 --pipeline-schedule v-half \\
      --num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \\
      --micro-batch-size 1 --global-batch-size 8 --train-iters 30 --lr 3e-3 \\
      --data-path data/corpus_text

scripts/prepare_text.py turns text files into what --data-path reads.
"""


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as the UsageError that every other mistake is."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(_with_nearest_flag(message, sorted(self._option_string_actions)))


def _with_nearest_flag(message: str, known: Sequence[str]) -> str:
    """argparse's message as one sentence; an unknown flag gets the flag that was probably meant."""
    unknown = re.match(r"unrecognized arguments: (\S+)", message)
    if unknown is None:
        return message
    flag = unknown.group(1)
    near = difflib.get_close_matches(flag, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists what there is"
    return f"unknown argument '{flag}': {hint}"


def parse(argv: Sequence[str], world_size: int) -> argparse.Namespace:
    """The arguments, checked, with what follows from them filled in.

    Besides the flags the namespace holds `data_parallel_size`, `num_microbatches` (per iteration
    and data-parallel rank), `padded_vocab_size`, `ffn_hidden_size`, `max_position_embeddings` and
    `num_query_groups`, all of them numbers.

    Raises:
        UsageError: something is missing, contradictory or does not fit the number of ranks.
    """
    args = _parser().parse_args(argv)
    _fill_in(args)
    for check in (
        _check_positive,
        _check_model,
        _check_precision,
        _check_parallel,
        _check_schedule,
        _check_training,
        _check_recompute,
        _check_files,
    ):
        check(args, world_size)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m megatron_zb.pretrain_gpt",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for add in (
        _add_pipeline,
        _add_model,
        _add_training,
        _add_precision,
        _add_data,
        _add_parallel,
        _add_recompute,
        _add_checkpoint,
        _add_log,
    ):
        add(parser)
    return parser


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pipeline schedule")
    group.add_argument(
        "--pipeline-schedule",
        metavar="NAME",
        help=f"{', '.join(catalog.names())}; without it, Megatron's own 1F1B runs, untouched",
    )
    group.add_argument(
        "--pipeline-memory-limit",
        type=float,
        metavar="X",
        help="the most activation memory a rank may hold, as a fraction of 1F1B's",
    )
    group.add_argument(
        "--pipeline-layer-layout",
        metavar="LAYOUT",
        help="which layers each stage holds, as in Megatron's --pipeline-model-parallel-layout: "
        "'Ett|ttt|ttt|ttL' has four stages, embedding first, loss last; stages are written in "
        "the order in which a microbatch passes them",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=int, required=True, metavar="N")
    group.add_argument("--hidden-size", type=int, required=True, metavar="N")
    group.add_argument("--num-attention-heads", type=int, required=True, metavar="N")
    group.add_argument("--ffn-hidden-size", type=int, metavar="N", help="default: 4 * hidden-size")
    group.add_argument("--seq-length", type=int, required=True, metavar="N", help="in tokens")
    group.add_argument(
        "--max-position-embeddings", type=int, metavar="N", help="default: seq-length"
    )
    group.add_argument(
        "--position-embedding-type",
        choices=("learned_absolute", "rope", "none"),
        default="learned_absolute",
    )
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    group.add_argument("--norm-epsilon", type=float, default=1e-5)
    group.add_argument("--swiglu", action="store_true", help="gated MLP with SiLU instead of GELU")
    group.add_argument("--disable-bias-linear", action="store_true")
    group.add_argument("--group-query-attention", action="store_true")
    group.add_argument(
        "--num-query-groups", type=int, metavar="N", help="with --group-query-attention"
    )
    group.add_argument(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="give the output layer a weight of its own; by default it is the embedding's",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=257,
        metavar="N",
        help="token ids are 0 to N-1, the last one ends a document; the default, 257, is what "
        "scripts/prepare_text.py writes",
    )
    group.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="default: %(default)s",
    )
    group.add_argument("--init-method-std", type=float, default=0.02, help="default: %(default)s")
    group.add_argument(
        "--attention-dropout",
        type=float,
        default=0.0,
        help="default: %(default)s, not Megatron's 0.1: masks depend on the placement of the "
        "layers, and with them losses could not be compared between schedules",
    )
    group.add_argument(
        "--hidden-dropout",
        type=float,
        default=0.0,
        help="default: %(default)s, for the same reason",
    )
    group.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default="local",
        help="default: %(default)s",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=int, required=True, metavar="N")
    group.add_argument(
        "--global-batch-size",
        type=int,
        required=True,
        metavar="N",
        help="sequences per iteration, over all microbatches and data-parallel ranks",
    )
    group.add_argument("--train-iters", type=int, required=True, metavar="N")
    group.add_argument(
        "--exit-interval",
        type=int,
        metavar="N",
        help="stop after an iteration divisible by N, though the schedules of learning rate and "
        "data go on to --train-iters",
    )
    group.add_argument("--lr", type=float, required=True)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument(
        "--lr-decay-style",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
        default="linear",
        help="default: %(default)s",
    )
    group.add_argument("--lr-decay-iters", type=int, metavar="N", help="default: train-iters")
    group.add_argument("--lr-warmup-iters", type=int, default=0, metavar="N")
    group.add_argument("--weight-decay", type=float, default=0.01, help="default: %(default)s")
    group.add_argument(
        "--clip-grad",
        type=float,
        default=1.0,
        help="largest norm of the gradient, 0 to leave it alone; default: %(default)s",
    )
    group.add_argument("--adam-beta1", type=float, default=0.9, help="default: %(default)s")
    group.add_argument("--adam-beta2", type=float, default=0.999, help="default: %(default)s")
    group.add_argument("--adam-eps", type=float, default=1e-8, help="default: %(default)s")
    group.add_argument("--seed", type=int, default=1234, help="default: %(default)s")
    group.add_argument(
        "--calculate-per-token-loss",
        action="store_true",
        help="average the gradient over all tokens of the batch instead of per microbatch",
    )


def _add_precision(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("precision", "float32 without --bf16 or --fp16")
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--fp16", action="store_true")
    group.add_argument(
        "--loss-scale", type=float, help="a constant one; by default fp16 adapts it as it goes"
    )
    group.add_argument("--initial-loss-scale", type=float, default=2.0**32)
    group.add_argument("--min-loss-scale", type=float, default=1.0)
    group.add_argument("--loss-scale-window", type=float, default=1000)
    group.add_argument("--hysteresis", type=int, default=2)
    for fusion in (
        "gradient-accumulation",
        "masked-softmax",
        "bias-gelu",
        "bias-swiglu",
        "bias-dropout",
    ):
        group.add_argument(
            f"--no-{fusion}-fusion",
            action="store_true",
            help="fused kernels are used where they are installed, and never with --cpu",
        )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data and evaluation")
    group.add_argument(
        "--data-path",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="data set(s) in Megatron's format: PREFIX.bin and PREFIX.idx; several are mixed "
        "by size, or by weight when each is written as WEIGHT PREFIX",
    )
    group.add_argument(
        "--data-cache-path",
        metavar="DIR",
        help="where the order of the samples is kept; default: 'cache' beside the data",
    )
    group.add_argument(
        "--split",
        default="969,30,1",
        help="shares of the documents for training, evaluation and test; default: %(default)s",
    )
    group.add_argument(
        "--eval-interval",
        type=int,
        default=1000,
        metavar="N",
        help="evaluate every N iterations, always on the same sequences; default: %(default)s",
    )
    group.add_argument(
        "--eval-iters",
        type=int,
        default=0,
        metavar="N",
        help="batches of --global-batch-size per evaluation; default: %(default)s, none",
    )


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks")
    group.add_argument(
        "--cpu", action="store_true", help="run on CPU ranks over gloo, to try things out and debug"
    )
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument("--overlap-grad-reduce", action="store_true")
    group.add_argument(
        "--distributed-timeout-minutes", type=float, default=10, metavar="N", help="default: 10"
    )


def _add_recompute(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("activation recomputation")
    group.add_argument("--recompute-granularity", choices=("full", "selective"))
    group.add_argument(
        "--recompute-method", choices=("uniform", "block"), help="with granularity full"
    )
    group.add_argument(
        "--recompute-num-layers", type=int, metavar="N", help="with granularity full"
    )


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", metavar="DIR", help="write a checkpoint at the end of the run")
    group.add_argument("--save-interval", type=int, metavar="N", help="and every N iterations")
    group.add_argument(
        "--load",
        metavar="DIR",
        help="continue from the latest checkpoint there, which may have been written under "
        "another schedule or number of ranks",
    )


def _add_log(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument(
        "--log-interval", type=int, default=1, metavar="N", help="iterations per printed line"
    )
    group.add_argument(
        "--log-file", metavar="PATH", help="also write every iteration as one line of JSON"
    )
    group.add_argument(
        "--measure-activation-memory",
        action="store_true",
        help="measure the peak of each rank's activations in the second and third iteration",
    )


def _fill_in(args: argparse.Namespace) -> None:
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters


_POSITIVE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "eval_interval",
    "log_interval",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "exit_interval",
    "save_interval",
    "lr_decay_iters",
    "seed",
    "distributed_timeout_minutes",
)
_NOT_NEGATIVE = (
    "lr",
    "min_lr",
    "weight_decay",
    "clip_grad",
    "eval_iters",
    "lr_warmup_iters",
    "attention_dropout",
    "hidden_dropout",
)


def flag(name: str) -> str:
    """`train_iters` as the user writes it: `--train-iters`."""
    return "--" + name.replace("_", "-")


def _check_positive(args: argparse.Namespace, world_size: int) -> None:
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"{flag(name)} is {value}: it must be greater than 0")
    for name in _NOT_NEGATIVE:
        if getattr(args, name) < 0:
            raise UsageError(f"{flag(name)} is {getattr(args, name)}: it must be 0 or greater")


def _check_model(args: argparse.Namespace, world_size: int) -> None:
    _check_divides(args, "num_attention_heads", "hidden_size")
    if args.group_query_attention != (args.num_query_groups is not None):
        raise UsageError("--group-query-attention and --num-query-groups must be given together")
    args.num_query_groups = args.num_query_groups or args.num_attention_heads
    _check_divides(args, "num_query_groups", "num_attention_heads")
    if args.max_position_embeddings < args.seq_length:
        raise UsageError(
            f"--max-position-embeddings {args.max_position_embeddings} is too few for "
            f"--seq-length {args.seq_length}: it must be at least the sequence length"
        )
    if args.transformer_impl == "transformer_engine":
        if args.cpu:
            raise UsageError("--transformer-impl transformer_engine needs a GPU: leave out --cpu")
        if find_spec("transformer_engine") is None:
            raise UsageError(
                "--transformer-impl transformer_engine: the package transformer_engine is not "
                "installed; install it or use --transformer-impl local"
            )


def _check_divides(args: argparse.Namespace, divisor: str, dividend: str) -> None:
    small, large = getattr(args, divisor), getattr(args, dividend)
    if large % small:
        raise UsageError(
            f"{flag(dividend)} {large} is not a multiple of {flag(divisor)} {small}: "
            f"{large - large % small or small} or {large + small - large % small} would be"
        )


def _check_precision(args: argparse.Namespace, world_size: int) -> None:
    if args.bf16 and args.fp16:
        raise UsageError("--bf16 and --fp16 exclude each other: give one of them")
    if args.loss_scale is not None and not args.fp16:
        raise UsageError("--loss-scale is for --fp16: add --fp16 or leave it out")


def _check_parallel(args: argparse.Namespace, world_size: int) -> None:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if world_size % (tensor * pipeline):
        raise UsageError(
            f"{world_size} ranks were started, but --tensor-model-parallel-size {tensor} times "
            f"--pipeline-model-parallel-size {pipeline} needs a multiple of {tensor * pipeline} "
            f"ranks: start torchrun with --nproc-per-node {tensor * pipeline}"
        )
    args.data_parallel_size = world_size // (tensor * pipeline)
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        _check_divides(args, "tensor_model_parallel_size", name)
    _check_sequence_parallel(args)
    args.padded_vocab_size = _padded_vocab_size(args)
    _check_batch(args)


def _check_sequence_parallel(args: argparse.Namespace) -> None:
    if not args.sequence_parallel:
        return
    if args.tensor_model_parallel_size == 1:
        raise UsageError("--sequence-parallel needs --tensor-model-parallel-size of 2 or more")
    _check_divides(args, "tensor_model_parallel_size", "seq_length")
    if args.transformer_impl == "local" and find_spec("apex") is None:
        raise UsageError(
            "--sequence-parallel needs the norm layers of Apex or --transformer-impl "
            "transformer_engine: Megatron's plain norm layers do not support it"
        )


def _padded_vocab_size(args: argparse.Namespace) -> int:
    """The same number under every tensor-parallel size that divides it, so the same model."""
    multiple: int = args.make_vocab_size_divisible_by
    while multiple % args.tensor_model_parallel_size:
        multiple += args.make_vocab_size_divisible_by
    return -(-int(args.vocab_size) // multiple) * multiple


def _check_batch(args: argparse.Namespace) -> None:
    step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % step:
        raise UsageError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of "
            f"--micro-batch-size {args.micro_batch_size} times {args.data_parallel_size} "
            f"data-parallel ranks: {_neighbours(args.global_batch_size, step)} would be"
        )
    args.num_microbatches = args.global_batch_size // step


def _neighbours(number: int, step: int) -> str:
    below = number - number % step
    return f"{below} or {below + step}" if below else str(step)


def _check_schedule(args: argparse.Namespace, world_size: int) -> None:
    size = args.pipeline_model_parallel_size
    if args.pipeline_schedule is None:
        if args.pipeline_memory_limit is not None:
            raise UsageError("--pipeline-memory-limit needs --pipeline-schedule")
        _check_stock_layers(args, size)
        return
    catalog.family(args.pipeline_schedule)
    if size == 1:
        raise UsageError(
            f"--pipeline-schedule {args.pipeline_schedule} needs a pipeline: give "
            "--pipeline-model-parallel-size of 2 or more, or leave the schedule out"
        )


def _check_stock_layers(args: argparse.Namespace, size: int) -> None:
    """Megatron's own placement: the same number of layers on every rank, or one written out."""
    if args.pipeline_layer_layout is not None:
        stages = args.pipeline_layer_layout.count("|") + 1
        if "(" not in args.pipeline_layer_layout and stages != size:
            raise UsageError(
                f"--pipeline-layer-layout has {stages} stages, but without --pipeline-schedule "
                f"every one of the {size} pipeline ranks holds one: write {size} stages"
            )
    elif args.num_layers % size:
        raise UsageError(
            f"--num-layers {args.num_layers} cannot be placed evenly on {size} pipeline ranks: "
            f"{_neighbours(args.num_layers, size)} can, or give --pipeline-layer-layout"
        )


def _check_training(args: argparse.Namespace, world_size: int) -> None:
    if args.min_lr > args.lr:
        raise UsageError(f"--min-lr {args.min_lr} is above --lr {args.lr}: it must not be")
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise UsageError(
            f"--lr-warmup-iters {args.lr_warmup_iters} leaves nothing of the "
            f"{args.lr_decay_iters} iterations of the learning rate: it must be less"
        )
    if args.save_interval is not None and args.save is None:
        raise UsageError("--save-interval needs --save")
    _check_split(args)


def _check_split(args: argparse.Namespace) -> None:
    try:
        shares = [float(share) for share in args.split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or shares[0] == 0:
        raise UsageError(
            f"--split '{args.split}' is not understood: it is the shares of training, evaluation "
            "and test, such as 90,10,0"
        )
    if args.eval_iters and (len(shares) < 2 or shares[1] == 0):
        raise UsageError(
            f"--eval-iters {args.eval_iters} needs documents to evaluate on, but --split "
            f"'{args.split}' leaves none: try --split 90,10,0"
        )


def _check_recompute(args: argparse.Namespace, world_size: int) -> None:
    given = [name for name in ("recompute_method", "recompute_num_layers") if getattr(args, name)]
    if args.recompute_granularity == "full":
        if len(given) < 2:
            raise UsageError(
                "--recompute-granularity full needs --recompute-method and --recompute-num-layers"
            )
    elif given:
        raise UsageError(f"{flag(given[0])} needs --recompute-granularity full")


def data_prefixes(args: argparse.Namespace) -> tuple[list[str], list[float] | None]:
    """The prefixes in --data-path and their weights, or None where they are mixed by size."""
    words: list[str] = args.data_path
    weights = [_number(word) for word in words[::2]]
    if len(words) > 1 and len(words) % 2 == 0 and None not in weights:
        return words[1::2], [weight for weight in weights if weight is not None]
    return words, None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _check_files(args: argparse.Namespace, world_size: int) -> None:
    for prefix in data_prefixes(args)[0]:
        for suffix in (".bin", ".idx"):
            if not Path(prefix + suffix).is_file():
                raise UsageError(
                    f"--data-path {prefix}: there is no file {prefix}{suffix}; give the path "
                    "without .bin or .idx, or make the files with scripts/prepare_text.py"
                )
    if args.load is not None:
        latest_checkpoint(Path(args.load))
    if args.save is not None and find_spec("psutil") is None:
        raise UsageError(
            "--save needs the package psutil, which Megatron's checkpoints use: install it"
        )
    for name in ("save", "log_file"):
        _check_can_be_made(name, getattr(args, name))


def _check_can_be_made(name: str, path: Any) -> None:
    if path is None:
        return
    place = Path(path).absolute() if name == "save" else Path(path).absolute().parent
    place = next(parent for parent in (place, *place.parents) if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(f"{flag(name)} {path}: {place} is not a directory that can be written to")

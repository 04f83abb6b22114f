"""The flags of `megatron_zb.train`, in Megatron's names, and their `--help` texts.

Nothing here imports torch or Megatron, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse

from megatron_zb.job import settings
from megatron_zb.parsing import Parser

_DESCRIPTION = """\
Train a GPT model with megatron-core, with one of this package's pipeline schedules or with
Megatron's own. The arguments have the names they have in Megatron-LM.

  torchrun --nproc-per-node 4 -m megatron_zb.train --cpu \\
      --pipeline-model-parallel-size 4 --pipeline-schedule v-half \\
      --num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \\
      --micro-batch-size 1 --global-batch-size 8 --train-iters 30 --lr 3e-3 \\
      --data-path data/corpus_text

scripts/prepare_text.py turns text files into what --data-path reads.
"""


def parser() -> Parser:
    """Build the parser of the command line, which raises UsageError on mistakes."""
    command_line = Parser(
        prog="python -m megatron_zb.train",
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
        add(command_line)
    return command_line


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pipeline schedule")
    settings.add_arguments(group, settings.TRAINER)


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
    _add_attention(group)
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
    group.add_argument(
        "--heterogeneous-layers-config-path",
        metavar="FILE",
        help="layers of different shapes, as megatron_zb.distill.choice writes them",
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


def _add_attention(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-channels",
        type=int,
        metavar="N",
        help="size of an attention head; default: hidden-size / num-attention-heads",
    )
    group.add_argument(
        "--add-qkv-bias", action="store_true", help="also with --disable-bias-linear, as in Qwen2.5"
    )
    group.add_argument(
        "--qk-layernorm", action="store_true", help="norms of queries and keys, as in Qwen3"
    )
    group.add_argument(
        "--rotary-base", type=float, default=10000, metavar="X", help="default: %(default)s"
    )
    group.add_argument(
        "--rotary-percent",
        type=float,
        default=1.0,
        metavar="X",
        help="the share of a head that has positions; default: %(default)s",
    )
    group.add_argument(
        "--use-rope-scaling", action="store_true", help="of low frequencies, as in Llama 3.1"
    )
    group.add_argument(
        "--rope-scaling-factor", type=float, default=8.0, metavar="X", help="default: %(default)s"
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add_batches(group, "sequences per iteration, over all microbatches and data-parallel ranks")
    add_optimizer(group)
    group.add_argument(
        "--calculate-per-token-loss",
        action="store_true",
        help="average the gradient over all tokens of the batch instead of per microbatch",
    )


def add_batches(group: argparse._ArgumentGroup, about: str) -> None:
    """Add the flags of batches and their number; ``about`` describes the global batch size."""
    group.add_argument("--micro-batch-size", type=int, required=True, metavar="N")
    group.add_argument("--global-batch-size", type=int, required=True, metavar="N", help=about)
    group.add_argument("--train-iters", type=int, required=True, metavar="N")
    group.add_argument(
        "--exit-interval",
        type=int,
        metavar="N",
        help="stop after an iteration divisible by N, though the schedules of learning rate and "
        "data go on to --train-iters",
    )


def add_optimizer(group: argparse._ArgumentGroup) -> None:
    """Add the flags of learning rate, Adam and the seed."""
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
    group.add_argument(
        "--no-check-for-nan-in-loss-and-grad",
        dest="check_for_nan_in_loss_and_grad",
        action="store_false",
        help="train on with losses and gradients that are NaN or infinite, which otherwise end the "
        "job; where fp16 adapts its loss scale, such an iteration is skipped instead",
    )
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
    add_sources(group)
    group.add_argument(
        "--eval-interval",
        type=int,
        default=1000,
        metavar="N",
        help="evaluate every N iterations, always on the same sequences; default: %(default)s",
    )
    add_evaluation(group, "batches of --global-batch-size per evaluation")
    group.add_argument(
        "--skip-train", action="store_true", help="evaluate once and end, without training"
    )


def add_evaluation(group: argparse._ArgumentGroup, about: str) -> None:
    """Add the flag of an evaluation's batches; ``about`` says what they are for."""
    group.add_argument(
        "--eval-iters",
        type=int,
        default=0,
        metavar="N",
        help=f"{about}; default: %(default)s, none",
    )


def add_sources(group: argparse._ArgumentGroup) -> None:
    """Add the flags of data sets and their splits."""
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--mock-data", action="store_true", help="train on made-up tokens, which need no file"
    )
    source.add_argument(
        "--data-path",
        nargs="+",
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
        "--tokenizer-type",
        choices=("NullTokenizer",),
        default="NullTokenizer",
        help="data sets hold numbers of tokens already: --vocab-size describes them",
    )
    group.add_argument(
        "--split",
        default="969,30,1",
        help="shares of the documents for training, evaluation and test; default: %(default)s",
    )


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks")
    add_processes(group)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument("--overlap-grad-reduce", action="store_true")


def add_processes(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the ranks' device, and of torch's timeout between ranks."""
    group.add_argument(
        "--cpu", action="store_true", help="run on CPU ranks over gloo, to try things out and debug"
    )
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
    add_checkpoints(
        group,
        "write a checkpoint at the end of the run",
        "continue from the latest checkpoint there, which may have been written under another "
        "schedule or number of ranks",
    )
    group.add_argument(
        "--finetune",
        action="store_true",
        help="take the weights alone from --load and begin at the first iteration",
    )


def add_checkpoints(group: argparse._ArgumentGroup, save: str, load: str) -> None:
    """Add the flags of checkpoints that are written, and of one that is read."""
    group.add_argument("--save", metavar="DIR", help=save)
    group.add_argument("--save-interval", type=int, metavar="N", help="and every N iterations")
    group.add_argument("--load", metavar="DIR", help=load)


def add_records(group: argparse._ArgumentGroup, *, interval: int) -> None:
    """Add the flags of the log, with its default interval."""
    group.add_argument(
        "--log-interval",
        type=int,
        default=interval,
        metavar="N",
        help="iterations per printed line; default: %(default)s",
    )
    group.add_argument("--log-file", metavar="PATH", help="also write the log as lines of JSON")


def _add_log(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    add_records(group, interval=1)
    group.add_argument(
        "--measure-activation-memory",
        action="store_true",
        help="measure the peak of each rank's activations in the second and third iteration",
    )

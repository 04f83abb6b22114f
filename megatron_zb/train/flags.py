"""The flags of `megatron_zb.train`, in Megatron's names, with their bounds.

Nothing here imports torch or Megatron, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_zb.job import settings
from megatron_zb.parsing import Argument, Parser, add_flags, check_bounds

_DESCRIPTION = """\
Train a GPT model with megatron-core, with one of this package's pipeline schedules or with
Megatron's own. The arguments have the names they have in Megatron-LM, whose scripts have more.

  torchrun --nproc-per-node 4 -m megatron_zb.train --cpu \\
      --pipeline-model-parallel-size 4 --pipeline-schedule v-half \\
      --num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \\
      --micro-batch-size 1 --global-batch-size 8 --train-iters 30 --lr 3e-3 \\
      --data-path data/corpus_text

scripts/prepare_text.py turns text files into what --data-path reads.
"""


def _flag(default: Any = None, help: str = "", **argument: Any) -> Argument:
    """Return a flag with a value; its default is shown where it has one."""
    shown = "default: %(default)s" if default is not None and "default:" not in help else ""
    text = "; ".join(filter(None, (help, shown)))
    return {"default": default, "help": text or None, **argument}


def _count(default: int | None = None, help: str = "", **argument: Any) -> Argument:
    """Return a whole number of 1 or more, unless another bound is given."""
    bound = {} if "least" in argument else {"above": 0}
    return _flag(default, help, type=int, metavar="N", **bound, **argument)


def _number(default: float | None = None, help: str = "", **argument: Any) -> Argument:
    return _flag(default, help, type=float, metavar="X", **argument)


def _switch(help: str = "", **argument: Any) -> Argument:
    return {"action": "store_true", "help": help or None, **argument}


MODEL = {
    "num_layers": _count(required=True),
    "hidden_size": _count(required=True),
    "num_attention_heads": _count(required=True),
    "ffn_hidden_size": _count(help="default: 4 * hidden-size"),
    "seq_length": _count(help="in tokens", required=True),
    "max_position_embeddings": _flag(type=int, metavar="N", help="default: seq-length"),
    "position_embedding_type": _flag(
        "learned_absolute", choices=("learned_absolute", "rope", "none")
    ),
    "normalization": _flag("LayerNorm", choices=("LayerNorm", "RMSNorm")),
    "norm_epsilon": _number(1e-5),
    "swiglu": _switch("gated MLP with SiLU instead of GELU"),
    "disable_bias_linear": _switch(),
    "group_query_attention": _switch(),
    "num_query_groups": _flag(type=int, metavar="N", help="with --group-query-attention"),
    "kv_channels": _count(
        help="size of an attention head; default: hidden-size / num-attention-heads"
    ),
    "add_qkv_bias": _switch("also with --disable-bias-linear, as in Qwen2.5"),
    "qk_layernorm": _switch("norms of queries and keys, as in Qwen3"),
    "rotary_base": _number(10000, above=0),
    "rotary_percent": _number(1.0, "the share of a head that has positions"),
    "use_rope_scaling": _switch("of low frequencies, as in Llama 3.1"),
    "rope_scaling_factor": _number(8.0, above=0),
    "untie_embeddings_and_output_weights": _switch(
        "give the output layer a weight of its own; by default it is the embedding's"
    ),
    "vocab_size": _count(
        257,
        "token ids are 0 to N-1, the last one ends a document; default: %(default)s, as "
        "scripts/prepare_text.py writes it",
    ),
    "make_vocab_size_divisible_by": _count(128),
    "heterogeneous_layers_config_path": _flag(
        metavar="FILE", help="layers of different shapes, as megatron_zb.distill.choice writes them"
    ),
    "init_method_std": _number(0.02),
    "attention_dropout": _number(
        0.0,
        "default: %(default)s, not Megatron's 0.1: masks depend on the placement of the layers, "
        "and with them losses could not be compared between schedules",
        least=0,
    ),
    "hidden_dropout": _number(0.0, "default: %(default)s, for the same reason", least=0),
}
BATCHES = {
    "micro_batch_size": _count(required=True),
    "global_batch_size": _count(
        help="sequences per iteration, over all microbatches and data-parallel ranks", required=True
    ),
    "train_iters": _count(required=True),
    "exit_interval": _count(
        help="stop after an iteration divisible by N, though the schedules of learning rate and "
        "data go on to --train-iters"
    ),
}
OPTIMIZER = {
    "lr": _number(required=True, least=0),
    "min_lr": _number(0.0, least=0),
    "lr_decay_style": _flag(
        "linear", choices=("constant", "linear", "cosine", "inverse-square-root")
    ),
    "lr_decay_iters": _count(help="default: train-iters"),
    "lr_warmup_iters": _count(0, least=0),
    "weight_decay": _number(0.01, least=0),
    "clip_grad": _number(1.0, "largest norm of the gradient, 0 to leave it alone", least=0),
    "adam_beta1": _number(0.9),
    "adam_beta2": _number(0.999),
    "adam_eps": _number(1e-8),
    "seed": _count(1234),
}
_ONE_SOURCE = {
    "mock_data": _switch("train on made-up tokens, which need no file"),
    "data_path": _flag(
        nargs="+",
        metavar="PREFIX",
        help="data set(s) in Megatron's format: PREFIX.bin and PREFIX.idx; several are mixed by "
        "size, or by weight when each is written as WEIGHT PREFIX",
    ),
}
DATA = {
    "data_cache_path": _flag(
        metavar="DIR",
        help="where the order of the samples is kept; default: 'cache' beside the data",
    ),
    "split": _flag("969,30,1", "shares of the documents for training, evaluation and test"),
    "eval_iters": _count(
        0, "batches of --global-batch-size per evaluation; default: %(default)s, none", least=0
    ),
}
PROCESSES = {
    "cpu": _switch("run on CPU ranks over gloo, to try things out and debug"),
    "distributed_timeout_minutes": _number(10, above=0),
}
CHECKPOINTS = {
    "save": _flag(metavar="DIR", help="write a checkpoint at the end of the run"),
    "save_interval": _count(help="and every N iterations"),
    "load": _flag(
        metavar="DIR",
        help="continue from the latest checkpoint there, which may have been written under "
        "another schedule or number of ranks",
    ),
}
RECORDS = {
    "log_interval": _count(1, "iterations per printed line"),
    "log_file": _flag(metavar="PATH", help="also write the log as lines of JSON"),
}
_GROUPS = {
    "model": MODEL,
    "training": {
        **BATCHES,
        **OPTIMIZER,
        "bf16": _switch("float32 without it"),
        "check_for_nan_in_loss_and_grad": {
            "flag": "--no-check-for-nan-in-loss-and-grad",
            "action": "store_false",
            "help": "train on with losses and gradients that are NaN or infinite, which otherwise "
            "end the job",
        },
    },
    "data and evaluation": {
        **DATA,
        "eval_interval": _count(1000, "evaluate every N iterations, always on the same sequences"),
        "skip_train": _switch("evaluate once and end, without training"),
    },
    "ranks": {
        **PROCESSES,
        "pipeline_model_parallel_size": _count(1),
        "tensor_model_parallel_size": _count(1),
    },
    "checkpoints": {
        **CHECKPOINTS,
        "finetune": _switch("take the weights alone from --load and begin at the first iteration"),
    },
    "log": {
        **RECORDS,
        "measure_activation_memory": _switch(
            "measure the peak of each rank's activations in the second and third iteration"
        ),
    },
}


def parser() -> Parser:
    """Build the parser of the command line, which raises UsageError on mistakes."""
    command_line = Parser(
        prog="python -m megatron_zb.train",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = command_line.add_argument_group("pipeline schedule")
    settings.add_arguments(group, settings.TRAINER)
    for title, arguments in _GROUPS.items():
        group = command_line.add_argument_group(title)
        if "split" in arguments:
            add_source(group)
        add_flags(group, arguments)
    return command_line


def add_source(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the text to train on, of which one is given."""
    add_flags(group.add_mutually_exclusive_group(required=True), _ONE_SOURCE)


def check_numbers(args: argparse.Namespace) -> None:
    """Check every number that has a bound, where it is given.

    Raises:
        UsageError: one is too small.
    """
    for arguments in _GROUPS.values():
        check_bounds(args, arguments)

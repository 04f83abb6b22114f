"""The arguments of `megatron_zb.train`, checked before anything starts.

Nothing here imports torch or Megatron, so that a mistake is reported at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.files import read_text
from megatron_zb.job import data_contents, settings
from megatron_zb.job.settings import AUTO_LAYOUT, LAYOUT_FLAG, asks_for_balance, choice_of
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import catalog
from megatron_zb.train.checkpoint_directory import latest_checkpoint
from megatron_zb.train.flags import check_numbers, parser


def parse(argv: Sequence[str], world_size: int) -> argparse.Namespace:
    """Parse and check the arguments, and fill in what follows from them.

    Besides the flags the namespace holds `data_parallel_size`, `num_microbatches` (per iteration
    and data-parallel rank), `padded_vocab_size`, `ffn_hidden_size`, `max_position_embeddings` and
    `num_query_groups`, all of them numbers.

    Raises:
        UsageError: something is missing, contradictory or does not fit the number of ranks.
    """
    args = parser().parse_args(argv)
    complete(args, world_size)
    return args


def complete(args: argparse.Namespace, world_size: int) -> None:
    """Check a namespace with all of the flags, and fill in what :func:`parse` does.

    The contents of the data sets are also recorded, so that a resumed run can recognise them.

    Raises:
        UsageError: as :func:`parse`.
    """
    _fill_in(args)
    check_numbers(args)
    _check_model(args)
    _check_parallel(args, world_size)
    _check_schedule(args)
    _check_training(args)
    _check_files(args)
    if args.mock_data:
        contents = data_contents.record({}, {}, {"--mock-data": True})
    else:
        contents = data_contents.record(
            {"--data-path": args.data_path}, {}, {"--split": args.split}
        )
    setattr(args, data_contents.RECORD, contents)


def _fill_in(args: argparse.Namespace) -> None:
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = 4 * args.hidden_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters
    # which Megatron stores in a checkpoint, as the file may be gone when it is loaded
    args.heterogeneous_layers_config_encoded_json = _read_layers(args)


def _read_layers(args: argparse.Namespace) -> str | None:
    """Read the description of layers of different shapes, if there is one."""
    path = args.heterogeneous_layers_config_path
    if path is None:
        return None
    flag = flag_of("heterogeneous_layers_config_path")
    try:
        text = read_text(Path(path))
        layers = len(json.loads(text)["block_configs"])
    except OSError as error:
        raise UsageError(f"{flag}: {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{flag}: {path} is no JSON with a list block_configs: give layers.json of a student"
        ) from error
    if layers != args.num_layers:
        raise UsageError(
            f"{flag}: {path} describes {layers} layers: give --num-layers {layers}, not "
            f"{args.num_layers}"
        )
    return text


def _check_model(args: argparse.Namespace) -> None:
    if args.kv_channels is None:
        _check_divides(args, "num_attention_heads", "hidden_size")
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if not 0 < args.rotary_percent <= 1:
        raise UsageError(
            f"--rotary-percent is {args.rotary_percent}: give a share above 0, 1.0 at most"
        )
    if args.group_query_attention != (args.num_query_groups is not None):
        raise UsageError("--group-query-attention and --num-query-groups must be given together")
    args.num_query_groups = args.num_query_groups or args.num_attention_heads
    _check_divides(args, "num_query_groups", "num_attention_heads")
    if args.max_position_embeddings < args.seq_length:
        raise UsageError(
            f"--max-position-embeddings {args.max_position_embeddings} is too few for "
            f"--seq-length {args.seq_length}: it must be at least the sequence length"
        )


def _check_divides(args: argparse.Namespace, divisor: str, dividend: str) -> None:
    small, large = getattr(args, divisor), getattr(args, dividend)
    if large % small:
        raise UsageError(
            f"{flag_of(dividend)} {large} is not a multiple of {flag_of(divisor)} {small}: "
            f"{_neighbours(large, small)} would be"
        )


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
    # equal for all tensor-parallel sizes that divide it
    multiple = math.lcm(args.make_vocab_size_divisible_by, tensor)
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
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


def _check_schedule(args: argparse.Namespace) -> None:
    size = args.pipeline_model_parallel_size
    if args.pipeline_schedule is None and args.pipeline_schedule_file is None:
        settings.check_unscheduled(args, settings.TRAINER)
        _check_upstream_layers(args, size)
        return
    if args.pipeline_schedule is not None:
        catalog.family_of_one_copy(
            args.pipeline_schedule
        )  # a mistyped name is the first thing to say
    if size == 1:
        raise UsageError(
            f"{choice_of(args)} needs a pipeline: give "
            "--pipeline-model-parallel-size of 2 or more, or leave the schedule out"
        )
    from megatron_zb.megatron_core import refusals  # only where a schedule is chosen

    chunks, layers = args.num_virtual_stages_per_pipeline_rank, args.num_layers
    refusals.check(refusals.of_arguments(args, chunks=chunks, num_layers=layers))


def _check_upstream_layers(args: argparse.Namespace, size: int) -> None:
    """Check Megatron's own placement: as many layers on every rank, or a layout written out."""
    if asks_for_balance(args.pipeline_layer_layout):
        raise UsageError(
            f"{LAYOUT_FLAG} {args.pipeline_layer_layout} needs --pipeline-schedule, such as v-half"
        )
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


def _check_training(args: argparse.Namespace) -> None:
    if args.min_lr > args.lr:
        raise UsageError(f"--min-lr {args.min_lr} is above --lr {args.lr}: it must not be")
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise UsageError(
            f"--lr-warmup-iters {args.lr_warmup_iters} leaves nothing of the "
            f"{args.lr_decay_iters} iterations of the learning rate: it must be less"
        )
    if args.save_interval is not None and args.save is None:
        raise UsageError("--save-interval needs --save")
    if args.finetune and args.load is None:
        raise UsageError("--finetune needs --load")
    if args.skip_train and not args.eval_iters:
        raise UsageError("--skip-train leaves nothing to do without --eval-iters")
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


def data_prefixes(args: argparse.Namespace) -> tuple[list[str], list[float] | None]:
    """Return the prefixes in --data-path and their weights, None where they are mixed by size.

    With --mock-data there are none.
    """
    entries = list(data_contents.blend_entries(args.data_path or ()))
    weights = [float(weight) for weight, _ in entries if weight]
    return [prefix for _, prefix in entries], weights or None


def _check_files(args: argparse.Namespace) -> None:
    layout = args.pipeline_layer_layout
    if asks_for_balance(layout) and layout != AUTO_LAYOUT and not Path(layout).is_file():
        raise UsageError(
            f"{LAYOUT_FLAG} {layout}: there is no such file: give one that --pipeline-profile wrote"
        )
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
        raise UsageError(
            f"{flag_of(name)} {path}: {place} is not a directory that can be written to"
        )

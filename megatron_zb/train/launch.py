"""Launch of a job from its command line: all ranks agree on the arguments, and errors end the job.

Ranks that disagree would wait for each other for ever. So before any communicator is made, each
rank leaves its arguments, or their error, in the store that torchrun provides; rank 0 compares
them and leaves a verdict, which every rank obeys.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_zb import __version__
from megatron_zb.children import end_with_launcher
from megatron_zb.errors import UsageError, describe_lost_peer, explain_missing_package
from megatron_zb.job import data_contents
from megatron_zb.job.agreement import named_arguments
from megatron_zb.job.data_contents import RECORD
from megatron_zb.job.settings import asks_for_balance, chooses_schedule
from megatron_zb.train.arguments import complete
from megatron_zb.train.flags import parser
from megatron_zb.train.processes import Environment

if TYPE_CHECKING:
    from torch.distributed import Store

    from megatron_zb.job.agreement import Rendezvous
    from megatron_zb.megatron_core.adapter import PipelineAdapter
    from megatron_zb.schedules.catalog import Build


_LONGEST_START = 300.0  # seconds: imports from a slow disk differ between ranks
_TIME_FOR_RANK_0 = 2.0


def launch(
    argv: Sequence[str], run: Callable[[Sequence[str], Environment], None] | None = None
) -> NoReturn:
    """Train as `argv` says and end the process: code 0 done, 2 UsageError, 1 anything else.

    `run` replaces the training of `megatron_zb.train` by another function.
    """
    end_with_launcher()
    environment = Environment.read()
    if environment.rank and {"-h", "--help"} & set(argv):
        sys.exit(0)  # rank 0 prints it
    try:
        with explain_missing_package():
            (run or _run)(argv, environment)
    except UsageError as error:
        end(2, f"megatron_zb: error: {error}")
    except _SaidByRankZero:
        end(2, "")
    except Exception as error:
        end(1, _describe(error))
    sys.exit(0)


def _describe(error: Exception) -> str:
    """Describe an error in one sentence where there is one, else by Python's traceback."""
    from megatron_zb.train.finite import NotFinite

    if isinstance(error, NotFinite):
        return f"megatron_zb: error: {error}"
    lost = describe_lost_peer(error, Environment.read().rank)
    return lost if lost is not None else traceback.format_exc()


class _SaidByRankZero(Exception):
    """A UsageError of the whole job, which rank 0 reports."""


def end(code: int, message: str) -> NoReturn:
    """End the process at once: an orderly end could wait for ranks that wait for this one."""
    if message:
        print(message, file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


def _run(argv: Sequence[str], environment: Environment) -> None:
    from megatron_zb.job.agreement import store_of_job
    from megatron_zb.job.shared_build import SharedBuild, build_with_cache

    failure, adapter = None, None
    values: dict[str, Any] = {}
    args = argparse.Namespace()
    try:
        with explain_missing_package():
            args = parser().parse_args(argv)
            values = given_arguments(args)
            complete(args, environment.world_size)
            _check_surroundings(args)
    except UsageError as error:
        failure = error
    store = store_of_job(environment.world_size, environment.attempt)
    ranks = rendezvous(store, environment)
    ranks.agree("arguments", values, failure)
    first = build_with_cache(args.pipeline_schedule_cache, environment.rank)
    build = SharedBuild(lambda: store, environment.rank, environment.world_size, first)
    try:
        with explain_missing_package():
            adapter = _adapter(args, build)
            values |= _made_of_files(args, adapter)
    except UsageError as error:
        failure = error
        build.abandon(error)
    ranks.agree("start", values, failure)

    from megatron_zb.train.loop import train
    from megatron_zb.train.ranks import start_ranks, stop_ranks

    start_ranks(args, adapter, store, environment)
    train(args, adapter, partial(ranks.agree, "model", {}))
    stop_ranks()


def _check_surroundings(args: argparse.Namespace) -> None:
    """Check the GPU, the data and the checkpoint; imports Megatron.

    Raises:
        UsageError: one of them is not there, or cannot be read.
    """
    # about fused kernels that are not installed, and old names inside Megatron
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    # that it has been made, by the first check of a number
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    if args.cpu:
        from megatron_zb.cpu_ranks import run_on_cpu

        run_on_cpu()
    else:
        check_gpu()
    from megatron_zb.train.data import check_data

    check_data(args)
    if args.load is not None:
        from megatron_zb.train.checkpoint import check_checkpoint

        check_checkpoint(args)


def _adapter(args: argparse.Namespace, build: Build) -> PipelineAdapter | None:
    """Create the adapter of the chosen schedule, None for Megatron's own.

    Raises:
        UsageError: the schedule cannot be built with these arguments.
    """
    if not chooses_schedule(args):
        return None
    from megatron_zb.measured import balance
    from megatron_zb.measured.counted_layers import attention_of
    from megatron_zb.megatron_core.adapter import Chunks, build_adapter, copy_of
    from megatron_zb.megatron_core.current_schedule import JobSizes
    from megatron_zb.schedules.layout import Layers

    layout = args.pipeline_layer_layout
    sizes = JobSizes(
        pipeline_size=args.pipeline_model_parallel_size,
        num_microbatches=args.num_microbatches,
        layers=Layers(args.num_layers),
        layer_layout=balance.of_arguments(layout, args) if asks_for_balance(layout) else layout,
        ends=balance.ends_of(args),
        copy=copy_of(args),
        attention=attention_of(args),
        sequence=args.seq_length,
        spread=args.tensor_model_parallel_size,
        hidden=args.hidden_size,
    )
    return build_adapter(args, sizes, Chunks(args.num_virtual_stages_per_pipeline_rank), build)


def check_gpu() -> None:
    """Check that torch can use a GPU.

    Raises:
        UsageError: it cannot.
    """
    import torch

    if not torch.cuda.is_available():
        raise UsageError("no GPU can be used here: give --cpu to run on the CPU")


def rendezvous(store: Store, environment: Environment) -> Rendezvous:
    """Return the part of this rank in the agreements of the job.

    An error is raised on rank 0; the other ranks raise one that prints nothing.
    """
    from megatron_zb.job.agreement import Rendezvous

    def end(error: UsageError, *, speaks: bool | None = None) -> NoReturn:
        if speaks is not False:
            raise error
        time.sleep(_TIME_FOR_RANK_0)  # the launcher ends every process when one has ended
        raise _SaidByRankZero from None

    rank, size = environment.rank, environment.world_size
    return Rendezvous(rank, size, _LONGEST_START, end=end, store=store)


# Arguments that a host may have its own value of, see named_arguments.
LOCAL = ("data_cache_path", "log_file", "pipeline_profile")


def given_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return every argument of a command line, to agree on, before anything is filled in."""
    return {**named_arguments(args, local=LOCAL), "megatron_zb version": __version__}


def _made_of_files(args: argparse.Namespace, adapter: PipelineAdapter | None) -> dict[str, Any]:
    """Return what each rank has read from files by itself."""
    values: dict[str, Any] = dict(data_contents.to_agree_on(getattr(args, RECORD)))
    values["layers described as"] = args.heterogeneous_layers_config_encoded_json
    if adapter is not None:
        from megatron_zb.schedules.interchange import digest

        values["a table with the digest"] = digest(adapter.schedule)
        values["layers placed as"] = str(adapter.layer_layout)
    return values

"""From the command line to a running job: every rank agrees on what to do, and errors end the job.

Ranks that disagree would wait for each other for ever. So before any communicator is made, each
rank leaves its arguments, or what is wrong with them, in the store that torchrun provides; rank 0
compares them and leaves a verdict, which every rank obeys.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_zb import __version__
from megatron_zb.errors import UsageError
from megatron_zb.run_flags import asks_for_balance
from megatron_zb.training.arguments import flag, parse

if TYPE_CHECKING:
    from torch.distributed import Store


_LONGEST_START = 300.0  # seconds: imports from a slow disk differ between ranks
_TIME_FOR_RANK_0 = 2.0


@dataclass(frozen=True)
class Environment:
    """This process among those that the launcher started."""

    rank: int
    world_size: int
    local_rank: int
    attempt: str

    @staticmethod
    def read() -> Environment:
        """From torchrun's variables; a process started without it is alone."""
        return Environment(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )


def launch(
    argv: Sequence[str], run: Callable[[Sequence[str], Environment], None] | None = None
) -> NoReturn:
    """Train as `argv` says and end the process: 0 done, 2 the user's to mend, 1 anything else.

    `run` is what to do, where it is not the training of `megatron_zb.pretrain_gpt`.
    """
    environment = Environment.read()
    if environment.rank and {"-h", "--help"} & set(argv):
        sys.exit(0)  # rank 0 prints it
    try:
        (run or _run)(argv, environment)
    except UsageError as error:
        end(2, f"megatron_zb: error: {error}")
    except _SaidByRankZero:
        end(2, "")
    except Exception:
        end(1, traceback.format_exc())
    sys.exit(0)


class _SaidByRankZero(Exception):
    """A UsageError of the whole job, which rank 0 reports."""


def end(code: int, message: str) -> NoReturn:
    """End at once: an orderly end could wait for ranks that wait for this one."""
    if message:
        print(message, file=sys.stderr)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


def _run(argv: Sequence[str], environment: Environment) -> None:
    problem = None
    args = argparse.Namespace()
    try:
        args = parse(argv, environment.world_size)
        plan = _plan(args)
    except UsageError as error:
        problem, plan = str(error), None
    store = shared_store(environment)
    agree_on(store, environment, vars(args), problem)

    from megatron_zb.training.loop import train
    from megatron_zb.training.ranks import start_ranks, stop_ranks

    start_ranks(args, plan, store, environment)
    train(args, plan)
    stop_ranks()


def _plan(args: argparse.Namespace) -> Any:
    """The adapter of the chosen schedule, None for Megatron's own; imports Megatron.

    Raises:
        UsageError: the schedule cannot be had with these arguments, or the data cannot be read.
    """
    # about fused kernels that are not installed, and old names inside Megatron
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    if args.cpu:
        from megatron_zb.megatron.cpu import run_on_cpu

        run_on_cpu()
    else:
        check_gpu()
    from megatron_zb.training.data import check_data

    check_data(args)
    if args.load is not None:
        from megatron_zb.training.checkpoint import check_checkpoint

        check_checkpoint(args)
    if args.pipeline_schedule is None:
        return None
    from megatron_zb.megatron.adapter import PipelineAdapter
    from megatron_zb.megatron.placement import Layers
    from megatron_zb.planner.balance import ends_of

    adapter = PipelineAdapter.create(
        args.pipeline_schedule,
        pipeline_size=args.pipeline_model_parallel_size,
        num_microbatches=args.num_microbatches,
        layers=Layers(args.num_layers),
        layer_layout=_layer_layout(args),
        memory_limit=args.pipeline_memory_limit,
        ends=ends_of(args),
    )
    adapter.watch(args.pipeline_timeout, args.distributed_timeout_minutes)
    profile = None if args.pipeline_profile is None else Path(args.pipeline_profile)
    adapter.profile(profile, args.pipeline_replan_every)
    return adapter


def _layer_layout(args: argparse.Namespace) -> Any:
    """As text, or what the ends of the model count for."""
    asked = args.pipeline_layer_layout
    if not asks_for_balance(asked):
        return asked
    from megatron_zb.planner import balance

    return balance.of_arguments(asked, args)


def check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UsageError("no GPU can be used here: give --cpu to run on the CPU")


def shared_store(environment: Environment) -> Store:
    """The store that the ranks share."""
    import torch.distributed as dist

    if environment.world_size == 1:
        return dist.HashStore()
    store, _, _ = next(iter(dist.rendezvous("env://")))
    return dist.PrefixStore(f"megatron_zb/{environment.attempt}", store)


def agree_on(
    store: Store, environment: Environment, arguments: Mapping[str, Any], problem: str | None
) -> None:
    """Go on if every rank has the same valid arguments.

    Raises:
        UsageError: on rank 0; the others raise what says nothing.
    """
    from megatron_zb.agreement import Disagreement, agree

    values = {_said(name): value for name, value in arguments.items()}
    values["megatron_zb version"] = __version__
    try:
        agree(
            store,
            environment.rank,
            environment.world_size,
            values,
            problem,
            seconds=_LONGEST_START,
        )
    except Disagreement:
        if environment.rank == 0:
            raise
        time.sleep(_TIME_FOR_RANK_0)  # the launcher ends every process when one has ended
        raise _SaidByRankZero from None


def _said(name: str) -> str:
    return name if " " in name else flag(name)

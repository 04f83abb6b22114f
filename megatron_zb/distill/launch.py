"""Launch of a distillation from its command line; all ranks agree on the arguments first."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_zb.distill.flags import check, check_candidate, check_split, complete, parser
from megatron_zb.errors import UsageError, explain_missing_package
from megatron_zb.job import data_contents
from megatron_zb.train import launch as training_launch
from megatron_zb.train.processes import Environment, is_lost_connection

if TYPE_CHECKING:
    from megatron_zb.distill.loop import Job


def launch(argv: Sequence[str]) -> NoReturn:
    """Distil as `argv` says and end the process: code 0 done, 2 UsageError, 1 anything else."""
    training_launch.launch(argv, _run)


def _run(argv: Sequence[str], environment: Environment) -> None:
    from megatron_zb.job.agreement import store_of_job

    failure, job = None, None
    values: dict[str, Any] = {}
    try:
        with explain_missing_package():
            args = parser().parse_args(argv)
            values = training_launch.given_arguments(args)
            check(args)
            job = _job(args, environment.world_size)
            values |= _made_of_files(job)
    except UsageError as error:
        failure = error
    store = store_of_job(environment.world_size, environment.attempt)
    training_launch.rendezvous(store, environment).agree("start", values, failure)
    assert job is not None, "ranks do not agree on what one cannot do"

    from megatron_zb.distill.block_library import distil_library
    from megatron_zb.distill.loop import distil
    from megatron_zb.train.ranks import start_ranks, stop_ranks

    if job.args.cpu and job.args.num_experts:
        from megatron_zb.cpu_ranks import redirect_experts

        redirect_experts()
    experts = job.args.expert_model_parallel_size
    start_ranks(job.args, None, store, environment, experts)
    try:
        (distil_library if job.args.save_library else distil)(job, store)
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        training_launch.end(1, _lost(job.args, environment.rank))
    stop_ranks()


def _made_of_files(job: Job) -> dict[str, Any]:
    """Return what each rank has read from files by itself: data, teacher and student."""
    files = {
        "--teacher-load": str(job.teacher.path),
        "--student-config": str(job.args.student_config),
    }
    read = data_contents.record({}, files, {}) | getattr(job.args, data_contents.RECORD)
    return dict(data_contents.to_agree_on(read))


def _lost(args: argparse.Namespace, rank: int) -> str:
    again = f"--load {args.save}" if args.save else "--load, where --save has left a checkpoint"
    again = f"--save-library {args.save_library}" if args.save_library else again
    return (
        f"megatron_zb: error: rank {rank} has lost the connection to another rank, which has "
        f"ended: see what that one or the launcher says of it, and continue with {again}"
    )


def _job(args: argparse.Namespace, world_size: int) -> Job:
    """Build the job from the arguments and check all that needs no other rank; imports Megatron.

    Raises:
        UsageError: teacher, student, data and checkpoint do not fit together.
    """
    from megatron_zb.distill.student_files import library_of, read_student

    student = read_student(Path(args.student_config))
    # about fused kernels that are not installed, and old names inside Megatron
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.|megatron\.core")
    if args.cpu:
        from megatron_zb.cpu_ranks import run_on_cpu

        run_on_cpu()
    else:
        training_launch.check_gpu()
    from megatron_zb.distill.checkpoint import stored_distribution
    from megatron_zb.distill.lanes import Lanes
    from megatron_zb.distill.loop import Job, microbatches_of
    from megatron_zb.distill.place import check_distribution, parse_distribution
    from megatron_zb.distill.stitching import check_stitchable
    from megatron_zb.distill.teacher import read_teacher
    from megatron_zb.train.data import check_data

    teacher = read_teacher(Path(args.teacher_load))
    if teacher.arguments["multi_latent_attention"] and not find_spec("transformer_engine"):
        raise UsageError(
            f"--teacher-load {args.teacher_load}: Megatron builds latent attention only with the "
            "package transformer_engine, which is not installed: install it"
        )
    args = complete(args, teacher.arguments)
    shapes = library_of(student, teacher.shape)
    check_candidate(args, shapes)
    check_split(args, shapes, world_size)
    check_stitchable(args, shapes)
    check_data(args)
    if args.save_library is not None:
        from megatron_zb.distill.block_library import check_library

        check_library(args, shapes, world_size)
    elif args.distribution is not None:
        lanes = Lanes.of(args)
        distribution = parse_distribution(args.distribution, len(shapes), world_size, lanes=lanes)
        check_distribution(distribution, microbatches_of(args))
    resume = None if args.load is None else stored_distribution(args, shapes)
    return Job(args, teacher, shapes, resume)

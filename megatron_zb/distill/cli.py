"""Blockwise distillation in ``megatron-zb show``, ``export`` and ``plan``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_zb.cli.ending import report_if_slow
from megatron_zb.distill.schedule.distribution import (
    BlockCosts,
    Distribution,
    RelayCosts,
    distribute,
    evenly,
)
from megatron_zb.distill.schedule.pipe_bd import NAME, pipe_bd
from megatron_zb.errors import UsageError
from megatron_zb.parsing import flag_of, seconds
from megatron_zb.schedules import Report, Timeline, simulate

SHOW_HELP = """\
pipe-bd draws blockwise distillation, for blocks with times of their own:
  megatron-zb show pipe-bd --pipeline-size 4 --num-microbatches 8 --steps 3 \\
      --teacher 1 1 2 1 1 1 --student 3 3 5 3 3 2 --update 1
"""
EXPORT_HELP = """\
pipe-bd writes the timeline of blockwise distillation, as chrome-trace:
  megatron-zb export pipe-bd --pipeline-size 4 --num-microbatches 8 --steps 3 \\
      --teacher 1 1 2 1 1 1 --student 3 3 5 3 3 2 --update 1 --format chrome-trace --output bd.json
"""

UNITS = {"num_microbatches": "M"}

_TIMES = {
    "teacher": (1.0, "the teacher's forward of one microbatch"),
    "student": (3.0, "forward, loss and backward of its students on one microbatch"),
    "update": (0.0, "the update of its students, once a step"),
    "relay": (0.0, "handing its output of one microbatch to the next rank"),
    "reduce": (4.0, "its students' gradients over a link; k ranks take 2(k-1)/k of it"),
}
_MOST_BLOCKS = 512  # the solver takes seconds for them
_OWN = (*_TIMES, "blocks", "steps", "run_ahead", "distribution")
_OF_OTHERS = dict.fromkeys(
    ("memory_limit", "chunks", "group_size", "attention", "recompute", "offload")
)
_COSTS_OF_OTHERS = {
    **dict.fromkeys(("forward", "backward", "weight"), 1.0),
    **dict.fromkeys(("p2p", "forward_comm", "backward_comm"), 0.0),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that only pipe-bd takes."""
    group = command.add_argument_group(
        "blockwise distillation (pipe-bd), times in any unit, one for all blocks or one for each"
    )
    group.add_argument(
        "--blocks", type=int, metavar="N", help="of the teacher (default: as many as times, or P)"
    )
    group.add_argument("--steps", type=int, metavar="N", help="in a row (default 3)")
    group.add_argument(
        "--run-ahead",
        type=int,
        metavar="N",
        help="steps that a rank may be ahead of another: 0 begins a step when all have ended the "
        "one before (default 1)",
    )
    group.add_argument(
        "--distribution",
        metavar="SPEC",
        help="'even', or which blocks run on how many ranks: 0-3:1,4-7:2 is blocks 0 to 3 on one "
        "rank and 4 to 7 on two (default: the fastest there is)",
    )
    for name, (default, what) in _TIMES.items():
        group.add_argument(
            f"--{name}", type=seconds, nargs="+", metavar="T", help=f"{what} (default {default:g})"
        )


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of a distillation's plan."""
    group = command.add_argument_group("blockwise distillation")
    group.add_argument(
        "--student-config",
        type=Path,
        metavar="NAME|FILE",
        help="distil the model into this student, or into a library of several candidates for each "
        "block: a name of configs/students, or a file like those",
    )
    group.add_argument(
        "--tokens", metavar="N", help="of the distillation, such as 2.5B: adds its hours"
    )


def plan(arguments: argparse.Namespace) -> bool:
    """Print the plan of a distillation if a student is given; return whether one is.

    Raises:
        UsageError: a file, a field or an argument is wrong, or nothing fits.
    """
    if arguments.student_config is None:
        if arguments.tokens is not None:
            raise UsageError("--tokens is of a distillation: give --student-config, too")
        return False
    from megatron_zb.distill import plan as planning

    with report_if_slow("distributing the blocks"):
        planning.run(arguments)
    return True


def check(arguments: argparse.Namespace) -> None:
    """Reject arguments that do not apply to the schedule that is named.

    Raises:
        UsageError: names the argument.
    """
    if arguments.name == NAME:
        refused = [
            name
            for name, default in {**_OF_OTHERS, **_COSTS_OF_OTHERS}.items()
            if getattr(arguments, name) != default
        ]
        said = f"{NAME} does not take it: leave it out; see --teacher and --student for times"
    else:
        refused = [name for name in _OWN if getattr(arguments, name) is not None]
        other = arguments.name or "--csv FILE"
        said = f"only {NAME} takes it, not {other}: leave it out"
    if refused:
        raise UsageError(f"{flag_of(refused[0])}: {said}")


def timeline(arguments: argparse.Namespace) -> Timeline:
    """Simulate the schedule that the arguments describe.

    Raises:
        UsageError: they contradict one another.
    """
    if arguments.cut_output is not None:
        raise UsageError(f"--cut-output: {NAME} has no output layer: leave it out")
    costs = _block_costs(arguments)
    ranks, microbatches = arguments.pipeline_size, arguments.num_microbatches
    distribution = _distribution(arguments.distribution, costs, ranks, microbatches)
    steps = 3 if arguments.steps is None else arguments.steps
    run_ahead = 1 if arguments.run_ahead is None else arguments.run_ahead
    schedule = pipe_bd(distribution, microbatches, steps, run_ahead).validate()
    timeline = simulate(schedule, RelayCosts(costs, distribution))
    bound = costs.lower_bound(distribution, microbatches, steps)
    idle = ranks - distribution.num_ranks
    reason = (
        f"{distribution}; the slowest takes {costs.slowest(distribution, microbatches):.6g} a step"
    )
    if idle:
        reason += f"; {idle} of {ranks} ranks would gain nothing, and are left out"
    report = Report(timeline.makespan, bound)
    return replace(timeline, schedule=replace(schedule, report=report, reason=reason))


def _distribution(
    text: str | None, costs: BlockCosts, ranks: int, microbatches: int
) -> Distribution:
    if text is None:
        return distribute(costs, ranks, microbatches)
    if text == "even":
        return evenly(costs.num_blocks, ranks)
    found = Distribution.parse(text)
    if found.num_blocks != costs.num_blocks or found.num_ranks > ranks:
        raise UsageError(
            f"--distribution {text} has {found.num_blocks} blocks on {found.num_ranks} ranks: "
            f"there are {costs.num_blocks} blocks and {ranks} ranks"
        )
    return found


def _block_costs(arguments: argparse.Namespace) -> BlockCosts:
    given = {name: getattr(arguments, name) or [default] for name, (default, _) in _TIMES.items()}
    blocks = arguments.blocks
    if blocks is None:
        most = max(map(len, given.values()))
        blocks = most if most > 1 else arguments.pipeline_size
    if blocks > _MOST_BLOCKS:
        raise UsageError(
            f"{blocks} blocks are too many: give at most {_MOST_BLOCKS}, such as --blocks "
            f"{_MOST_BLOCKS} with one time for all of them"
        )
    if blocks < 1:
        raise UsageError(f"--blocks is {blocks}: give 1 or more")
    for name, values in given.items():
        if len(values) not in (1, blocks):
            raise UsageError(
                f"--{name} has {len(values)} times for {blocks} blocks: give one time for all of "
                "them, or one for each"
            )
    if not sum(given["teacher"]) + sum(given["student"]) > 0:
        raise UsageError(
            "--teacher and --student are 0, and no block takes any time: give, for example, "
            "--teacher 1"
        )
    return BlockCosts.of(
        **{name: values * (1 if len(values) > 1 else blocks) for name, values in given.items()}
    )

"""The command `megatron-zb`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_zb import __version__, pipe_bd_flags, schedules
from megatron_zb.errors import UsageError
from megatron_zb.planner import command as planning
from megatron_zb.planner import trace_command as tracing
from megatron_zb.schedules import interchange
from megatron_zb.schedules.bounds import lower_bound
from megatron_zb.schedules.pipe_bd import NAME

# The choices that a schedule may have, as build() and the command line name them.
_MOST = 1_000_000  # ranks, microbatches, chunks
_CHOICES = ("memory_limit", "chunks", "group_size")

SHOW_HELP = """\
Draw a schedule: a row for each pipeline rank, a bar for each pass, the number of its microbatch in
the bar. The title has the bubble rate and the activation memory that its costs lead to; the next
line tells how far the time is from the lower bound, which no order of passes can beat. Below is the
activation memory that each rank holds over time, beside 1F1B's peak.

--output FILE.html writes all of it into one page for a browser, which needs no network, with an
explorer: in it, sizes, costs, the memory limit and the schedule can be changed.

examples:
  megatron-zb show v-half --pipeline-size 4 --num-microbatches 8
  megatron-zb show v-min --pipeline-size 8 --num-microbatches 16 --output v-min.png
  megatron-zb show v-half --pipeline-size 4 --num-microbatches 8 --forward 1 --backward 1.2 \\
      --weight 0.9 --p2p 0.05
  megatron-zb show auto --pipeline-size 8 --num-microbatches 16 --memory-limit 0.5
  megatron-zb show v-half --pipeline-size 8 --num-microbatches 16 --output v-half.html
  megatron-zb show --csv table.csv

pipe-bd draws blockwise distillation, for blocks with times of their own:
  megatron-zb show pipe-bd --pipeline-size 4 --num-microbatches 8 --steps 3 \\
      --teacher 1 1 2 1 1 1 --student 3 3 5 3 3 2 --update 1

schedules: """

EXPORT_HELP = """\
Write a schedule into a file: as csv, the compute-only table that the pipeline runtime of
torch.distributed.pipelining loads (a row for each rank), or as chrome-trace, its timeline at the
given costs, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing.

examples:
  megatron-zb export v-half --pipeline-size 4 --num-microbatches 8 --format csv --output v-half.csv
  megatron-zb export v-min --pipeline-size 8 --num-microbatches 16 --forward 0.010 \\
      --backward 0.012 --weight 0.009 --format chrome-trace --output v-min.json

schedules: """

DOCTOR_HELP = """\
Say what is installed here, which versions fit, which optional parts are live, and what to do about
each thing that is missing. Given a Megatron-LM checkout, say also whether it is served, what its
training loop lacks, and how to start it. Nothing is changed, and nothing but torch is imported.

A part is
  ok        there, in a version that fits
  optional  not there, or not needed by every job; the advice says what to do without it
  missing   required and not there
  wrong     there, but in a version or a state that does not work

exit code: 0 if all that is required is there, 1 if anything is missing or wrong, 2 if the path is
no Megatron-LM checkout.

examples:
  megatron-zb doctor
  megatron-zb doctor ~/Megatron-LM
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="megatron-zb",
        description="Pipeline schedules for Megatron: less bubble or less memory, same losses.",
    )
    top.add_argument("--version", action="version", version=f"megatron-zb {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_show(commands)
    _add_export(commands)
    _add_plan(commands)
    _add_trace(commands)
    _add_flags(commands)
    _add_doctor(commands)
    return top


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = commands.add_parser(
        "show",
        help="draw a schedule and its memory in the terminal, as a picture or as a page",
        description=SHOW_HELP + ", ".join([*schedules.names(), NAME]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.set_defaults(command=_show)
    _add_schedule(show)
    pipe_bd_flags.add_arguments(show)
    show.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="write FILE.png, FILE.svg or FILE.html instead",
    )


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = commands.add_parser(
        "export",
        help="write a schedule for torch.distributed.pipelining or a trace viewer",
        description=EXPORT_HELP + ", ".join(schedules.names()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.set_defaults(command=_export)
    _add_schedule(export)
    pipe_bd_flags.add_arguments(export)
    export.add_argument(
        "--format", choices=("csv", "chrome-trace"), required=True, help="what to write"
    )
    export.add_argument("--output", "-o", type=Path, required=True, metavar="FILE")


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="find the fastest schedule for a model and a cluster, and what it costs in memory",
        description=planning.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.set_defaults(command=_plan)
    planning.add_arguments(plan)


def _plan(arguments: argparse.Namespace) -> None:
    if arguments.student_config is not None:
        from megatron_zb.distillation import plan_command

        plan_command.run(arguments)
        return
    run = planning.run if arguments.profile is None else planning.run_measured
    if arguments.html is None:
        run(arguments)
        return
    from megatron_zb.report import page

    page.check(arguments.html)
    if arguments.profile is None:
        from megatron_zb.report import plan_page

        plan_page.save_plan(arguments.html, planning.run(arguments))
    else:
        from megatron_zb.planner import trace
        from megatron_zb.report import run_page

        path = trace.trace_path(arguments.profile)
        step = trace.compare(arguments.profile) if path.is_file() else None
        run_page.save_plan(arguments.html, *planning.run_measured(arguments), step)
    if arguments.format != "json":
        print(arguments.html)


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trace = commands.add_parser(
        "trace",
        help="compare a step of a run with what its profile predicts",
        description=tracing.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    trace.set_defaults(command=tracing.run)
    tracing.add_arguments(trace)


def _add_flags(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    flags = commands.add_parser(
        "flags",
        help="print the arguments of Megatron-LM that describe a model of configs/models",
        description="Print the arguments of Megatron-LM that describe a model, one word on a line, "
        "for scripts. Data and parallel sizes are not among them.",
    )
    flags.set_defaults(command=_flags)
    flags.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="NAME|FILE",
        help="the model: a name of configs/models, or a file like those",
    )
    what = flags.add_mutually_exclusive_group()
    what.add_argument(
        "--schedule", action="store_true", help="print the model's recommended schedule instead"
    )
    what.add_argument(
        "--mock-data",
        action="store_true",
        help="add those for made-up data with the model's vocabulary",
    )


def _flags(arguments: argparse.Namespace) -> None:
    from megatron_zb.planner.model import read_model
    from megatron_zb.planner.model_flags import mock_data_flags, model_flags
    from megatron_zb.planner.shipped import path_of

    model = read_model(path_of("--config", "models", arguments.config))
    if arguments.schedule:
        print(model.recommended.schedule if model.recommended else "none")
    else:
        words = mock_data_flags(model) if arguments.mock_data else []
        print("\n".join([*model_flags(model), *words]))


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, what fits, and what to do about what is missing",
        description=DOCTOR_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.set_defaults(command=_doctor)
    doctor.add_argument(
        "checkout", type=Path, nargs="?", metavar="MEGATRON_LM", help="a Megatron-LM checkout"
    )


def _add_schedule(command: argparse.ArgumentParser) -> None:
    """The arguments that say which schedule, at which costs."""
    command.add_argument("name", metavar="NAME", nargs="?", help="the schedule, such as v-half")
    command.add_argument("--pipeline-size", "-p", type=positive, metavar="P", help="pipeline ranks")
    command.add_argument(
        "--num-microbatches", "-m", type=positive, metavar="M", help="microbatches per iteration"
    )
    command.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="a compute-only table of torch.distributed.pipelining, in place of NAME and its sizes",
    )
    choices = command.add_argument_group("what the schedule may use")
    choices.add_argument(
        "--memory-limit",
        type=float,
        metavar="X",
        help="activation memory of a rank, as a fraction of 1F1B's, such as 0.5",
    )
    choices.add_argument(
        "--chunks", type=positive, metavar="V", help="model chunks per rank (interleaved, wave)"
    )
    choices.add_argument(
        "--group-size",
        type=positive,
        metavar="G",
        help="microbatches that pass a chunk together (interleaved; default P)",
    )
    costs = command.add_argument_group("time of one microbatch on one rank, in any unit")
    for name, what in (
        ("forward", "forward pass"),
        ("backward", "input gradient"),
        ("weight", "weight gradient"),
    ):
        costs.add_argument(
            f"--{name}", type=float, default=1.0, metavar="T", help=f"{what} (default 1)"
        )
    costs.add_argument(
        "--p2p", type=float, default=0.0, metavar="T", help="a transfer between ranks (default 0)"
    )


def positive(text: str) -> int:
    """A whole number of 1 or more, and not absurd."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    if int(text) > _MOST:
        raise argparse.ArgumentTypeError(f"{text} is more than {_MOST}")
    return int(text)


def _show(arguments: argparse.Namespace) -> None:
    if arguments.output is not None:
        _save(arguments)
        print(arguments.output)
        return
    timeline = _timeline(arguments)
    from rich.console import Console

    from megatron_zb.terminal import print_schedule

    print_schedule(timeline, timeline.schedule.report or _report(timeline), Console())


def _save(arguments: argparse.Namespace) -> None:
    """Write the file that --output names, in the format of its ending."""
    path, timeline = arguments.output, _timeline(arguments)
    ending = path.suffix.lower()
    if ending == ".html":
        if timeline.schedule.relay is not None:
            raise UsageError(f"there is no page for {NAME}: give a name that ends in .png or .svg")
        from megatron_zb.report.schedule_page import save_schedule

        costs = _costs(arguments, timeline.schedule.placement.pipeline_size)
        report = timeline.schedule.report or _report(timeline)
        save_schedule(path, timeline, report, costs, arguments.memory_limit)
        return
    from megatron_zb.pictures import FORMATS, save_picture

    if ending not in FORMATS:
        raise UsageError(f"cannot draw into '{path}': give a name that ends in .png, .svg or .html")
    save_picture(timeline, path)


def _report(timeline: schedules.Timeline) -> schedules.Report:
    """For a table: the bound within the memory that it takes itself."""
    schedule = timeline.schedule
    bound = lower_bound(
        schedule.placement, schedule.num_microbatches, timeline.costs, timeline.peak_memory
    )
    return schedules.Report(timeline.makespan, bound)


def _export(arguments: argparse.Namespace) -> None:
    timeline = _timeline(arguments)
    if arguments.format == "csv":
        if timeline.schedule.relay is not None:
            raise UsageError(f"a csv table has no passes of {NAME}: give --format chrome-trace")
        interchange.write_csv(timeline.schedule, arguments.output)
    else:
        interchange.write_text(arguments.output, interchange.to_chrome_trace(timeline))
    print(arguments.output)


def _doctor(arguments: argparse.Namespace) -> int:
    from megatron_zb import doctor

    findings = doctor.examine(arguments.checkout)
    doctor.print_findings(findings)
    return doctor.exit_code(findings)


def _timeline(arguments: argparse.Namespace) -> schedules.Timeline:
    if arguments.csv is not None:
        table = _table(arguments)
        return schedules.simulate(table, _costs(arguments, table.placement.pipeline_size))
    if arguments.name is None:
        raise UsageError("no schedule was asked for: give NAME, such as v-half, or --csv FILE")
    if arguments.pipeline_size is None or arguments.num_microbatches is None:
        raise UsageError(f"{arguments.name} needs --pipeline-size P and --num-microbatches M")
    pipe_bd_flags.check(arguments)
    if arguments.name == NAME:
        return pipe_bd_flags.timeline(arguments)
    costs = _costs(arguments, arguments.pipeline_size)
    schedule = schedules.build(
        arguments.name,
        pipeline_size=arguments.pipeline_size,
        num_microbatches=arguments.num_microbatches,
        costs=costs,
        **{name: getattr(arguments, name) for name in _CHOICES},
    )
    return schedules.simulate(schedule, costs)


def _table(arguments: argparse.Namespace) -> schedules.Schedule:
    if arguments.name is not None:
        raise UsageError(f"give either {arguments.name} or --csv FILE: two schedules were named")
    if arguments.pipeline_size is not None or arguments.num_microbatches is not None:
        raise UsageError("--csv FILE has its own sizes: leave the sizes out")
    for choice in _CHOICES:
        if getattr(arguments, choice) is not None:
            flag = f"--{choice.replace('_', '-')}"
            raise UsageError(f"--csv FILE is a finished schedule: leave {flag} out")
    return interchange.from_csv(arguments.csv)


def _costs(arguments: argparse.Namespace, pipeline_size: int) -> schedules.Costs:
    return schedules.Costs.uniform(
        pipeline_size=pipeline_size,
        forward=arguments.forward,
        backward=arguments.backward,
        weight=arguments.weight,
        p2p=arguments.p2p,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; what the user can mend is told in one sentence, with exit code 2."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.command(arguments) or 0
    except UsageError as error:
        print(f"megatron-zb: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

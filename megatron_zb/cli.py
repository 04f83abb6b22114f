"""The command `megatron-zb`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_zb import __version__, schedules
from megatron_zb.errors import UsageError

SHOW_HELP = """\
Draw a schedule: a row for each pipeline rank, a bar for each pass, the number of its microbatch in
the bar. The title has the bubble rate and the activation memory that its costs lead to.

examples:
  megatron-zb show v-half --pipeline-size 4 --num-microbatches 8
  megatron-zb show v-min --pipeline-size 8 --num-microbatches 16 --output v-min.png
  megatron-zb show v-half --pipeline-size 4 --num-microbatches 8 --forward 1 --backward 1.2 \\
      --weight 0.9 --p2p 0.05

schedules: """


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="megatron-zb",
        description="Pipeline schedules for Megatron: less bubble or less memory, same losses.",
    )
    top.add_argument("--version", action="version", version=f"megatron-zb {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_show(commands)
    return top


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = commands.add_parser(
        "show",
        help="draw a schedule in the terminal or as a picture",
        description=SHOW_HELP + ", ".join(schedules.names()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.set_defaults(command=_show)
    show.add_argument("name", metavar="NAME", help="the schedule, such as v-half")
    show.add_argument(
        "--pipeline-size", "-p", type=positive, required=True, metavar="P", help="pipeline ranks"
    )
    show.add_argument(
        "--num-microbatches",
        "-m",
        type=positive,
        required=True,
        metavar="M",
        help="microbatches per iteration",
    )
    costs = show.add_argument_group("time of one microbatch on one rank, in any unit")
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
    show.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="write FILE.png or FILE.svg instead"
    )


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    return int(text)


def _show(arguments: argparse.Namespace) -> None:
    timeline = _timeline(arguments)
    if arguments.output is not None:
        from megatron_zb.pictures import save_picture

        save_picture(timeline, arguments.output)
        print(arguments.output)
        return
    from rich.console import Console

    from megatron_zb.terminal import print_schedule

    print_schedule(timeline, Console())


def _timeline(arguments: argparse.Namespace) -> schedules.Timeline:
    costs = schedules.Costs.uniform(
        pipeline_size=arguments.pipeline_size,
        forward=arguments.forward,
        backward=arguments.backward,
        weight=arguments.weight,
        p2p=arguments.p2p,
    )
    schedule = schedules.build(
        arguments.name,
        pipeline_size=arguments.pipeline_size,
        num_microbatches=arguments.num_microbatches,
        costs=costs,
    )
    return schedules.simulate(schedule, costs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; what the user can mend is told in one sentence, with exit code 2."""
    arguments = parser().parse_args(argv)
    try:
        arguments.command(arguments)
    except UsageError as error:
        print(f"megatron-zb: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

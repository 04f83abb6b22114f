"""The commands ``megatron-zb plan`` and ``megatron-zb flags``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_zb.cli.ending import report_if_slow, say
from megatron_zb.cli.extensions import Commands, add_command, packages_with_plans

if TYPE_CHECKING:
    from megatron_zb.plan.from_profile import MeasuredRow, ProfileRequest
    from megatron_zb.plan.search import Plan

HELP = """\
Find out, before a GPU is rented, which schedule is the fastest on a model and a cluster, and what
it costs in memory. Every schedule gets its best tensor, pipeline and data parallelism, microbatch,
recomputation, number of chunks and layer layout; so do Megatron's own 1F1B and its interleaved
schedule, which always stand in the table. Costs come from counted operations and bytes and from the
description of the device: no GPU is needed, and none is used.

examples:
  megatron-zb plan --config gpt_28b --gpus 64 --gpu-memory 80GiB
  megatron-zb plan --config llama3_70b --gpus 128 --device h100_sxm \\
      --global-batch-size 512 --schedules v-zb,v-half
  megatron-zb plan --config llama3_8b --gpus 16 --tensor 2 --pipeline 8 \\
      --device h100_sxm --format json
  megatron-zb plan --profile run.yaml     what --pipeline-profile run.yaml of a run has measured:
                                          other schedules and layer layouts on the same ranks
  megatron-zb plan --gpus 64 -- $MY_ARGUMENTS
                                          the same from the arguments of a training: their model,
                                          and the sizes that they give
  megatron-zb plan --config llama3_8b --gpus 16 --lengths lognormal:4096:0.9 --seq-length 32768
                                          fine-tuning, whose sequences have unequal lengths
  megatron-zb plan --config gpt_28b --gpus 64 --html plan.html
  megatron-zb plan --config llama3_70b --gpus 64 --device b200_sxm --precision fp8 --context 2
  megatron-zb plan --config llama3_8b --gpus 8 --device h100_sxm --student-config half_mlp
                                          where the blocks of a distillation go
  megatron-zb plan --config llama3_8b --gpus 16 --device h100_sxm --student-config library \\
      --tokens 1B                         the same for a library: GPUs of each candidate, hours

the table:
  =              the run of the arguments of a training as they give it, with Megatron's defaults
  gain           tokens per second that a row has more than that run
  tok/s/GPU      tokens of the whole iteration, with the optimizer's step and its reductions
  MFU            FLOPs that training needs over the data sheet's; recomputation does not count
  bubble         share of the pipeline's time in which ranks run no pass
  GiB            memory of the rank that needs the most, at its fullest moment
  uneven         the layers are not spread evenly; the flags have the layout
  cut            gain of the schedule by vocabulary parallelism, which shards the output layer over
                 the pipeline ranks (--pipeline-vocabulary on); only where a row has it
  pairs          overlapped forward-backward, which hides the expert all-to-all
                 (--overlap-moe-expert-parallel-comm)

--html writes all of it into one file for a browser, which needs no network: the table with the
memory of each row, a chart of speed over memory, the flags of every row, pictures of the best
schedules, and an explorer, in which sizes, costs, the memory limit and the schedule can be changed.
--chart prints the chart below the table.

What is not known is not guessed: kernels that slow one another down, jitter, data loading. A line
below the table counts the NCCL kernels that wait beside the computation of the first row.
docs/validation.md compares predictions with published measurements.

exit code: 0, or 2 with one sentence if a file, a field or a size is wrong or nothing fits."""
FLAGS_HELP = """\
Print the arguments of Megatron-LM that describe a model, one word on a line, for scripts. Data and
parallel sizes are not among them."""


def add_commands(commands: Commands) -> None:
    """Add ``plan`` and ``flags``."""
    summary = "find the fastest schedule for a model and a cluster, and what it costs in memory"
    add_arguments(add_command(commands, "plan", make_plan, summary, HELP))
    summary = "print the arguments of Megatron-LM that describe a model of configs/models"
    _add_flags(add_command(commands, "flags", print_flags, summary, FLAGS_HELP))


def add_model(command: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the argument that names a model."""
    command.add_argument(
        "--config",
        type=Path,
        required=required,
        metavar="NAME|FILE",
        help="the model: a name of configs/models, or a file like those",
    )


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    add_model(command, required=False)
    command.add_argument("--gpus", type=int, metavar="N", help="GPUs of the job")
    _add_measured(command)
    for package in packages_with_plans():
        package.add_plan_arguments(command)
    command.add_argument(
        "--device",
        type=Path,
        metavar="FILE",
        help="the GPU and its links: a name of configs/devices, or a file like those "
        "(default: a100_80gb_sxm)",
    )
    command.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="memory of a GPU, such as 80GiB (default: the device's)",
    )
    command.add_argument(
        "--global-batch-size", type=int, metavar="N", help="samples of an iteration"
    )
    command.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sample")
    command.add_argument(
        "--lengths",
        metavar="FILE|lognormal:MEDIAN:SIGMA",
        help="of sequences, in tokens: a file with one in every line, or drawn, such as "
        "lognormal:4096:0.9. A second table has each schedule with steps of them. --seq-length "
        "is then the most of a microbatch, --global-batch-size the number of microbatches",
    )
    command.add_argument(
        "--packing",
        choices=("none", "first-fit"),
        help="what a microbatch is with --lengths: one sequence (none, the default), or as many as "
        "fit, in the order in which they come (first-fit)",
    )
    command.add_argument(
        "--adapters",
        type=Path,
        metavar="FILE",
        help="LoRA adapters that share the pipeline, as --pipeline-adapters takes them, with batch "
        "and steps. A second table has the time of all of them together, and one after another; "
        "it brings --lora",
    )
    command.add_argument(
        "--late-updates",
        choices=("plain", "feedback"),
        help="a second table has the schedules with updates that come one step late and no flush, "
        "as with --pipeline-update-delay 1, and what they need for copies of weights and "
        "gradients, with feedback for error feedback or a linear prediction as well; it changes "
        "the training (default: that of a training's --pipeline-update-delay)",
    )
    _add_choices(command)
    command.add_argument(
        "--format", choices=("table", "json"), default="table", help="how to print it"
    )
    command.add_argument(
        "--top", type=int, default=8, metavar="N", help="rows of the table (default 8)"
    )
    command.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with pictures into FILE.html, too"
    )
    command.add_argument(
        "--chart", action="store_true", help="draw speed over memory of all rows below the table"
    )
    command.add_argument(
        "words",
        nargs="*",
        metavar="ARGUMENT",
        help="of a training, after --, in place of --config: sizes that they give are kept, and "
        "those that they leave out are chosen",
    )


def _add_measured(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("from a measured run, in place of --config and --gpus")
    group.add_argument(
        "--profile", type=Path, metavar="FILE", help="what --pipeline-profile has written"
    )
    group.add_argument(
        "--microbatches", type=int, metavar="M", help="of an iteration (default: the run's)"
    )
    group.add_argument(
        "--memory-limit",
        type=float,
        metavar="X",
        help="activations of any rank, as a fraction of 1F1B's (default: each schedule's own)",
    )


def _add_choices(command: argparse.ArgumentParser) -> None:
    from megatron_zb.job.settings import PERMISSIONS, permission

    group = command.add_argument_group("what may be chosen (everything, if left out)")
    group.add_argument("--schedules", metavar="NAMES", help="such as v-zb,v-half,auto")
    for name, what in (
        ("tensor", "tensor-parallel sizes"),
        ("pipeline", "pipeline sizes"),
        ("micro-batch-size", "microbatch sizes"),
        ("context", "context-parallel sizes"),
        ("expert", "expert-parallel sizes, over all ranks of a pipeline rank"),
        ("expert-tensor", "tensor-parallel sizes of experts"),
    ):
        group.add_argument(f"--{name}", metavar="N,N", help=f"{what}, such as 2,4")
    group.add_argument(
        "--recompute",
        metavar="NAMES",
        help="of none, selective, full, or Megatron's modules joined by +, such as "
        "none,moe_act+layernorm",
    )
    for flag, what in (
        ("--pipeline-recompute", "recompute activations"),
        ("--pipeline-offload", "offload activations to the host"),
    ):
        group.add_argument(
            flag,
            type=permission,
            choices=PERMISSIONS,
            help=f"whether --schedules auto may {what}, as in training, where that is faster "
            "(auto or on), or not (off, the default)",
        )
    group.add_argument(
        "--lora",
        action="store_const",
        const=True,
        help="all weights of the model are frozen: no weight gradients, no gradient and optimizer "
        "memory; adapters, which are small, are not counted",
    )
    group.add_argument(
        "--precision",
        choices=("bf16", "fp8"),
        help="of the products with the weights of layers (default bf16)",
    )
    group.add_argument(
        "--slices",
        metavar="auto|N,N",
        help="token slices of a microbatch along its sequence: numbers such as 1,4,8, or powers of "
        "two as long as slices have --slice-tokens (auto); of equal tokens, and of equal time. By "
        "default microbatches are whole",
    )
    group.add_argument(
        "--slice-tokens",
        type=int,
        metavar="N",
        help="least tokens of a slice on a rank of tensor and context parallelism (default 1024, "
        "more for a hidden size below 8192): products of fewer are slower than counted",
    )
    group.add_argument(
        "--vocabulary",
        choices=("auto", "on", "off"),
        help="shard the output layer along the vocabulary over the pipeline ranks: where that is "
        "faster (auto, the default; with --profile the fastest both ways), in every schedule of "
        "this package (on), or in none (off)",
    )
    group.add_argument(
        "--no-overlap-data-parallel",
        action="store_true",
        help="without --overlap-grad-reduce and --overlap-param-gather",
    )
    group.add_argument(
        "--no-overlap-p2p",
        action="store_true",
        help="Megatron's interleaved schedule with --no-overlap-p2p-communication",
    )
    group.add_argument(
        "--post-validation",
        action="store_true",
        help="ranks step one by one and check afterwards (schedules that split the backward)",
    )
    group.add_argument(
        "--snapshot",
        action="store_true",
        help="count a copy of the optimizer's state, to take such a step back",
    )
    group.add_argument(
        "--tries",
        type=int,
        default=3,
        metavar="N",
        help="settings of each schedule to simulate (default 3)",
    )


def make_plan(arguments: argparse.Namespace) -> None:
    """Run ``plan``: print the table, and write the page if it is requested.

    Raises:
        UsageError: an error that the user can correct.
    """
    if any(package.plan(arguments) for package in packages_with_plans()):
        return
    is_measured = arguments.profile is not None
    if arguments.html is None:
        (run_measured if is_measured else run)(arguments)
        return
    from megatron_zb import files
    from megatron_zb.drawing import html_page

    html_page.check(arguments.html)
    files.check_writable(arguments.html)
    (_measured_page if is_measured else _page)(arguments)
    if arguments.format != "json":
        print(arguments.html)


def _page(arguments: argparse.Namespace) -> None:
    from megatron_zb.plan import page

    found = run(arguments)
    with report_if_slow(f"drawing {arguments.html}"):
        page.save_plan(arguments.html, found)


def _measured_page(arguments: argparse.Namespace) -> None:
    from megatron_zb.measured import trace
    from megatron_zb.plan import page

    path = trace.trace_path(arguments.profile)
    step = trace.compare(arguments.profile) if path.is_file() else None
    measured = run_measured(arguments)
    with report_if_slow(f"drawing {arguments.html}"):
        page.save_measured_plan(arguments.html, *measured, step)


def run(arguments: argparse.Namespace) -> Plan:
    """Search for the best settings, print them and return the plan.

    Raises:
        UsageError: an error that the user can correct.
    """
    from rich.console import Console

    from megatron_zb.parsing import GIB
    from megatron_zb.plan import request, table
    from megatron_zb.plan.chart import plan_chart, points
    from megatron_zb.plan.features import adapter_groups, adapters, late_updates, lengths
    from megatron_zb.plan.search import search
    from megatron_zb.plan.workers import workers

    entries = adapters.asked_adapters(arguments)
    asked = late_updates.FLAG if arguments.late_updates else late_updates.OF_TRAINING
    job, candidates = request.read(arguments, [late_updates.of_training])
    late_updates.check_late(arguments, asked)
    source = lengths.asked_lengths(arguments, job)
    if source is not None:
        job = job.of_single_samples(source.mean)
    with _Progress() as progress, workers() as each:
        plan = search(job, candidates, tries=arguments.tries, watch=progress.show, each=each)
    unequal = None if source is None else lengths.with_lengths(plan.ranked, source, job.memory)
    shared = None if entries is None else adapters.with_adapters(plan, entries)
    groups = adapter_groups.grouped(plan, shared or [], entries or [])
    way = arguments.late_updates
    late = None if way is None else late_updates.with_late_updates(plan, way)
    if arguments.format == "json":
        found = table.as_json(plan)
        if unequal is not None:
            found["unequal"] = lengths.unequal_as_json(plan, unequal)
        if shared is not None and entries is not None:
            found["adapters"] = adapters.adapters_as_json(plan, shared, entries)
            found["adapters"]["groups"] = adapter_groups.groups_as_json(groups)
            found["adapters"]["no_groups"] = groups.missing
        if late is not None:
            found["late_updates"] = late_updates.late_as_json(plan, late)
        print(json.dumps(found, indent=2))
    else:
        table.print_plan(plan, Console(), arguments.top)
        if unequal is not None:
            lengths.print_unequal(plan, unequal, Console())
        if shared is not None and entries is not None:
            adapters.print_adapters(plan, shared, entries, Console())
            adapter_groups.print_groups(plan, groups, Console())
        if late is not None:
            late_updates.print_late(plan, late, Console())
    if arguments.chart:
        print(f"\n{plan_chart(points(plan), plan.job.memory / GIB)}")
    return plan


def run_measured(
    arguments: argparse.Namespace,
) -> tuple[ProfileRequest, list[MeasuredRow], dict[str, str]]:
    """Run ``plan --profile``; return the request, the rows, and why other schedules are missing.

    Raises:
        UsageError: an error that the user can correct.
    """
    from megatron_zb.plan import from_profile, request

    request.check_only_measured(arguments)
    asked, candidates = from_profile.read(arguments)
    with _Progress() as progress:
        found, missing = from_profile.rows(asked, candidates, progress.show)
    from_profile.show(asked, found, missing, arguments)
    return asked, found, missing


class _Progress:
    """Progress of the search on standard error: a bar on a terminal, else a line at times."""

    AFTER = 2.0  # seconds until the first line
    EVERY = 3.0  # seconds between two lines

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._is_terminal = sys.stderr.isatty()
        self._bar = Progress(
            console=Console(stderr=True), transient=True, disable=not self._is_terminal
        )
        self._task = self._bar.add_task("", total=1)
        self._next = time.monotonic() + self.AFTER
        self._started = False

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *reason: object) -> None:
        if self._started:
            self._bar.stop()

    def show(self, text: str, done: int, of: int) -> None:
        """Update the display; called before each schedule and setting, and once at the end."""
        is_due = time.monotonic() >= self._next
        if self._is_terminal:
            if is_due and not self._started:
                self._bar.start()
                self._started = True
            self._bar.update(self._task, description=text, completed=done, total=of)
        elif is_due and text:
            self._next = time.monotonic() + self.EVERY
            place = f"{min(done + 1, of)} of {of}"
            say(f"plan: looking at {text} ({place})")


# --- flags


def _add_flags(command: argparse.ArgumentParser) -> None:
    add_model(command, required=True)
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--schedule",
        action="store_true",
        help="print the recommended schedule, with its flags, instead",
    )
    what.add_argument(
        "--mock-data",
        action="store_true",
        help="add those for made-up data with the model's vocabulary",
    )


def print_flags(arguments: argparse.Namespace) -> None:
    """Run ``flags``."""
    from megatron_zb.measured.config import path_of
    from megatron_zb.plan.model import read_model
    from megatron_zb.plan.model_flags import mock_data_flags, model_flags

    model = read_model(path_of("--config", "models", arguments.config))
    if arguments.schedule:
        asked = model.recommended
        more = " --pipeline-vocabulary on" if asked and asked.vocabulary_parallel else ""
        print(asked.schedule + more if asked else "none")
    else:
        words = mock_data_flags(model) if arguments.mock_data else []
        print("\n".join([*model_flags(model), *words]))

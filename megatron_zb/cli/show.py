"""The commands ``megatron-zb show`` and ``megatron-zb export``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_zb import files, schedules
from megatron_zb.cli.ending import report_if_slow
from megatron_zb.cli.extensions import extension_of, extensions
from megatron_zb.errors import UsageError, raise_first
from megatron_zb.parsing import add_flags, flag_of, positive, seconds
from megatron_zb.schedules import catalog, conflicts, interchange
from megatron_zb.schedules.bounds import WHOLE, lower_bound
from megatron_zb.schedules.features.adapters import Adapters
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.second_model import SecondModel, SecondRole
from megatron_zb.schedules.features.slices import KEPT, Slicing
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.rules import TrainingRules

# The choices that a schedule may have, as build() and the command line name them.
_CHOICES = ("memory_limit", "chunks", "group_size")
_OF_UNITS = ("slices", "adapters", "encoder", "reference", "update_delay")
"""Flags with which passes count something else than the microbatches of one training."""
_UNITS = {"num_microbatches": "M"}
"""What passes work on, if no extension has the schedule, with its letter."""
_STDOUT = Path("-")

_FLAGS = {
    conflicts.RECOMPUTATION: "--recompute",
    conflicts.OFFLOAD: "--offload",
    conflicts.VOCABULARY: "--cut-output",
    conflicts.SLICES: "--slices",
    conflicts.ADAPTERS: "--adapters",
    conflicts.GROUPS: "--group-size",
    conflicts.UPDATE_DELAY: "--update-delay",
}
"""Flags that request features."""

_ALSO = (
    (conflicts.ADAPTERS, "adapters"),
    (conflicts.SECOND_MODEL, "encoder"),
    (conflicts.SECOND_MODEL, "reference"),
    (conflicts.UPDATE_DELAY, "update_delay"),
)
"""Features without costs, and the flags that request them."""

# Ranks times microbatches of what is drawn; more takes minutes, and is too small to be seen.
MOST_IN_TERMINAL = 2**15
MOST_IN_PICTURE = 2**13
_REPEATS = 4  # that are enough to see how units follow one another

SHOW_HELP = """\
Draw a schedule: a row for each pipeline rank, a bar for each pass, the number of its microbatch in
the bar. The title has the bubble rate and the activation memory that its costs lead to; the next
line has the distance to the lower bound, which no order of passes can beat. Below is the
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
  megatron-zb show v-half --pipeline-size 4 --num-microbatches 8 --cut-output 2
  megatron-zb show v-zb --pipeline-size 8 --num-microbatches 8 --slices 8 --attention 0.5
  megatron-zb show 1f1b --pipeline-size 4 --num-microbatches 4 --adapters 4 --weight 0.02
  megatron-zb show v-half --pipeline-size 4 --num-microbatches 8 --encoder 0.1
  megatron-zb show v-half --pipeline-size 4 --num-microbatches 4 --update-delay 1
  megatron-zb show --csv table.csv
  megatron-zb show dualpipe-v --pipeline-size 4 --num-microbatches 10 --forward-comm 0.5 \\
      --backward-comm 0.5
"""

EXPORT_HELP = """\
Write a schedule into a file: as csv, the compute-only table that the pipeline runtime of
torch.distributed.pipelining loads (a row for each rank), or as chrome-trace, its timeline at the
given costs, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing.

examples:
  megatron-zb export v-half --pipeline-size 4 --num-microbatches 8 --format csv --output v-half.csv
  megatron-zb export v-min --pipeline-size 8 --num-microbatches 16 --forward 0.010 \\
      --backward 0.012 --weight 0.009 --format chrome-trace --output v-min.json
"""


def add_show(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``show``."""
    _add_schedule(command)
    for extension in extensions():
        extension.add_arguments(command)
    command.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="write FILE.png, FILE.svg or FILE.html instead",
    )


def add_export(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    _add_schedule(command)
    for extension in extensions():
        extension.add_arguments(command)
    command.add_argument(
        "--format", choices=("csv", "chrome-trace"), required=True, help="what to write"
    )
    command.add_argument(
        "--output", "-o", type=Path, required=True, metavar="FILE", help="the file; - is stdout"
    )


def _time(default: float, what: str) -> dict[str, Any]:
    return {"default": default, "metavar": "T", "help": f"{what} (default {default:g})"}


def _add_schedule(command: argparse.ArgumentParser) -> None:
    """Add the arguments that select a schedule and its costs."""
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
    add_flags(command.add_argument_group("what the schedule may use"), _MAY_USE)
    costs = command.add_argument_group("time of one microbatch on one rank, in any unit")
    add_flags(costs, {name: {"type": seconds, **argument} for name, argument in _COSTS.items()})


_MAY_USE: dict[str, dict[str, Any]] = {
    "memory_limit": {
        "type": float,
        "metavar": "X",
        "help": "activation memory of a rank, as a fraction of 1F1B's, such as 0.5",
    },
    "chunks": {
        "type": positive,
        "metavar": "V",
        "help": "model chunks per rank (interleaved, wave)",
    },
    "group_size": {
        "type": positive,
        "metavar": "G",
        "help": "microbatches that pass a chunk together (interleaved; default P)",
    },
    "slices": {
        "type": Slicing.parse,
        "metavar": "N",
        "help": "token slices: cut each microbatch along the sequence into N parts, or into parts "
        "of unequal lengths, such as 2,1,1",
    },
    "adapters": {
        "type": positive,
        "metavar": "N",
        "help": "N adapters share the pipeline, each with M microbatches in a step",
    },
    "adapter_steps": {
        "type": positive,
        "metavar": "S",
        "help": "with --adapters: steps of each before the pipeline is drained (default 1)",
    },
    "encoder": {
        "type": seconds,
        "metavar": "T",
        "help": "an encoder, cut over all ranks, runs beside the model; T is the time of its "
        "forward for a microbatch on one rank, its backward takes twice as long",
    },
    "reference": {
        "type": seconds,
        "metavar": "T",
        "help": "a frozen teacher or reference model, cut over all ranks, runs beside the model, "
        "whose loss needs its output; T is the time of its forward for a microbatch on one rank",
    },
    "update_delay": {
        "type": int,
        "choices": (1,),
        "help": "updates of the optimizer come one step late; draws four consecutive steps",
    },
    "attention": {
        "type": seconds,
        "metavar": "X",
        "help": "with --slices: share of the attention between tokens in forward and input "
        "gradient, which grows with the tokens before a slice (default 0)",
    },
}
_COSTS: dict[str, dict[str, Any]] = {
    "forward": _time(1.0, "forward pass"),
    "backward": _time(1.0, "input gradient"),
    "weight": _time(1.0, "weight gradient"),
    "p2p": _time(0.0, "a transfer between ranks"),
    "forward_comm": _time(
        0.0,
        "seconds of the expert all-to-all in a forward pass, beside its time, which a backward in "
        "the same pass can hide",
    ),
    "backward_comm": _time(0.0, "the same of an input gradient"),
    "recompute": {
        "metavar": "X",
        "help": "recomputation: forwards under a memory limit may keep only the input of their "
        "stage and run again before their backward; X is the memory of that input, in microbatches "
        "on a whole rank",
    },
    "offload": {
        "metavar": "T",
        "help": "offload: activations under a memory limit may be copied to the host and back "
        "between forward and backward; T is the time to copy those of a microbatch on a whole rank "
        "one way",
    },
    "cut_output": {
        "metavar": "X",
        "help": "vocabulary parallelism: an output layer that takes X times as long as the passes "
        "of one rank is sharded over all ranks",
    },
}


def show(arguments: argparse.Namespace) -> None:
    """Draw a schedule in the terminal or into a file.

    Raises:
        UsageError: an error that the user can correct.
    """
    if arguments.output is not None:
        _save(arguments)
        print(arguments.output)
        return
    timeline = _timeline(arguments, MOST_IN_TERMINAL)
    from rich.console import Console

    from megatron_zb.drawing.terminal import print_schedule

    print_schedule(timeline, timeline.schedule.report or _report(timeline), Console())


def _save(arguments: argparse.Namespace) -> None:
    """Write the file that --output names, in the format of its ending."""
    from megatron_zb.drawing.pictures import FORMATS, save_picture

    path = arguments.output
    ending = path.suffix.lower()
    if ending not in (*FORMATS, ".html"):
        raise UsageError(f"cannot draw into '{path}': give a name that ends in .png, .svg or .html")
    files.check_writable(path)
    if ending == ".html":
        _save_page(path, arguments)
        return
    timeline = _timeline(arguments, MOST_IN_PICTURE)
    with report_if_slow(f"drawing {path}"):
        save_picture(timeline, path)


def _save_page(path: Path, arguments: argparse.Namespace) -> None:
    if extension_of(arguments.name) is not None:
        raise UsageError(
            f"there is no page for {arguments.name}: give a name that ends in .png or .svg"
        )
    for name in ("slices", "encoder", "reference", "update_delay"):
        if getattr(arguments, name) is not None:
            what = name.replace("_", " ")
            raise UsageError(f"there is no page for {what}: give a name that ends in .png or .svg")
    if arguments.name is not None:
        _check_page(arguments.name, catalog.family(arguments.name).copies)
    from megatron_zb.drawing import html_page
    from megatron_zb.drawing.html_page import save_schedule

    html_page.check(path)
    timeline = _timeline(arguments, MOST_IN_PICTURE)
    _check_page(timeline.schedule.name, timeline.schedule.placement.copies)
    costs = _costs(arguments, timeline.schedule.placement.pipeline_size)
    report = timeline.schedule.report or _report(timeline)
    save_schedule(path, timeline, report, costs, arguments.memory_limit)


def _check_page(name: str, copies: int) -> None:
    """Refuse the page of a schedule with several copies of the model, whose routes no page knows.

    Raises:
        UsageError: there are several.
    """
    if copies > 1:
        raise UsageError(
            f"there is no page for {name}, in two directions: give a name that ends in .png or .svg"
        )


def _report(timeline: schedules.Timeline) -> schedules.Report:
    """Return the report of a table, with the lower bound within the memory that it takes itself."""
    schedule, rules = timeline.schedule, timeline.schedule.rules
    grain = rules.grain if isinstance(rules, TrainingRules) else WHOLE
    sizes = schedule.placement, schedule.num_microbatches
    bound = lower_bound(*sizes, timeline.costs, timeline.peak_memory, grain)
    return schedules.Report(timeline.makespan, bound)


def export(arguments: argparse.Namespace) -> None:
    """Write a schedule as a table or as a trace.

    Raises:
        UsageError: an error that the user can correct.
    """
    path = arguments.output
    if path != _STDOUT:
        files.check_writable(path)
    if arguments.format == "csv" and extension_of(arguments.name) is not None:
        raise UsageError(
            f"a csv table has no passes of {arguments.name}: give --format chrome-trace"
        )
    for name in _OF_UNITS:
        if arguments.format == "csv" and getattr(arguments, name) is not None:
            what = name.replace("_", " ")
            raise UsageError(f"a csv table of torch has no {what}: give --format chrome-trace")
    timeline = _timeline(arguments)
    if arguments.format == "csv":
        text = interchange.to_csv(timeline.schedule)
    else:
        text = interchange.to_chrome_trace(timeline)
    if path == _STDOUT:
        sys.stdout.write(text)
        return
    files.write_text(path, text)
    print(path)


def _timeline(arguments: argparse.Namespace, most: int | None = None) -> schedules.Timeline:
    """Simulate the schedule that the arguments describe.

    Args:
        arguments: the arguments of the command line.
        most: largest product of ranks and microbatches, where it is to be drawn.

    Raises:
        UsageError: an error that the user can correct.
    """
    if arguments.csv is not None:
        table = _table(arguments)
        kinds = {p.kind for rank in table.ranks for p in rank}
        _check_costs_of_table(arguments, kinds)
        _check_table_drawn(table, most)
        costs = _costs(arguments, table.placement.pipeline_size, lookups=PassKind.E in kinds)
        return schedules.simulate(table, costs)
    if arguments.name is None:
        raise UsageError("no schedule was asked for: give NAME, such as v-half, or --csv FILE")
    sizes = _sizes(arguments)
    for extension in extensions():
        extension.check(arguments)
    parts = 1 if arguments.slices is None else arguments.slices.slices
    parts *= (arguments.adapters or 1) * (arguments.adapter_steps or 1)
    _check_drawn(arguments.name, sizes, parts, most)
    ranks, (unit, number), *_ = sizes.items()
    with report_if_slow(
        f"putting the passes of {number} {_word(unit)} on {ranks[1]} ranks in order"
    ):
        return _built(arguments)


def _sizes(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the sizes that a schedule needs by their arguments: ranks, units, and repeats of them.

    Raises:
        UsageError: one is missing.
    """
    extension = extension_of(arguments.name)
    letters = {"pipeline_size": "P", **(_UNITS if extension is None else extension.UNITS)}
    given = {name: getattr(arguments, name) for name in letters}
    if None in given.values():
        *first, last = (f"{flag_of(name)} {letter}" for name, letter in letters.items())
        raise UsageError(f"{arguments.name} needs {', '.join(first)} and {last}")
    return given


def _word(unit: str) -> str:
    """Return what units are called, from the name of the argument with their number."""
    return unit.removeprefix("num_")


def _check_drawn(name: str, sizes: Mapping[str, int], parts: int, most: int | None) -> None:
    """Reject a drawing with more than ``most`` ranks times microbatches, too large to look at.

    Args:
        sizes: those of :func:`_sizes`.
        parts: what a microbatch counts for: its slices, or the steps of all adapters.
    """
    (_, ranks), (unit, _), *repeats = sizes.items()
    drawn = math.prod(sizes.values()) * parts
    if most is None or drawn <= most:
        return
    fewer = {repeat: min(number, _REPEATS) for repeat, number in repeats}
    enough = _enough(ranks, parts * math.prod(fewer.values()), most)
    flags = [enough.replace(flag_of("num_microbatches"), flag_of(unit))]
    flags += [f"{flag_of(repeat)} {number}" for repeat, number in fewer.items()]
    raise UsageError(
        f"{_too_many(name, ranks, drawn // ranks, most, _word(unit))}; a schedule repeats itself "
        f"between its beginning and its end, so that {' '.join(flags)} shows as much"
    )


def _check_table_drawn(table: schedules.Schedule, most: int | None) -> None:
    """Reject the drawing of a table like :func:`_check_drawn`; no flag makes a table smaller."""
    ranks, microbatches = table.placement.pipeline_size, table.num_microbatches
    if most is not None and ranks * microbatches > most:
        raise UsageError(
            f"{_too_many(table.name, ranks, microbatches, most)}; megatron-zb export --csv FILE "
            "--format chrome-trace --output FILE.json writes it for Perfetto"
        )


def _too_many(name: str, ranks: int, number: int, most: int, word: str = "microbatches") -> str:
    return (
        f"{name}: {number} {word} on {ranks} ranks are too many to be drawn: their product can be "
        f"at most {most}"
    )


def _enough(ranks: int, parts: int, most: int) -> str:
    """Return flags of a drawing in which a pipeline is filled, stays full, and is drained."""
    if 4 * ranks * ranks * parts <= most:
        return f"--num-microbatches {4 * ranks}"
    smaller = 2
    while 4 * (2 * smaller) ** 2 * parts <= most:
        smaller *= 2
    return f"--pipeline-size {smaller} --num-microbatches {4 * smaller}"


def _built(arguments: argparse.Namespace) -> schedules.Timeline:
    extension = extension_of(arguments.name)
    for name in () if extension is None else _OF_UNITS:
        if getattr(arguments, name) is not None:
            raise UsageError(
                f"{arguments.name} has no {name.replace('_', ' ')}: leave {flag_of(name)} out"
            )
    adapters = _adapters(arguments)
    if extension is not None:
        return extension.timeline(arguments)
    costs, slicing = _costs(arguments, arguments.pipeline_size), Slicing.equal(1)
    if arguments.slices is not None:
        slicing = replace(arguments.slices, attention=arguments.attention or 0.0, kept=KEPT)
    if arguments.attention is not None and slicing.slices == 1:
        raise UsageError(
            "--attention is for token slices, and a whole microbatch has all its attention in F "
            "and B: add --slices, such as 4, or leave --attention out"
        )
    _check_combined(arguments, costs, slicing)
    schedule = schedules.build(
        arguments.name,
        pipeline_size=arguments.pipeline_size,
        num_microbatches=arguments.num_microbatches if adapters is None else None,
        costs=costs,
        slices=slicing,
        adapters=adapters,
        second_model=_second_model(arguments),
        update_delay=arguments.update_delay or 0,
        **{name: getattr(arguments, name) for name in _CHOICES},
    )
    return schedules.simulate(schedule, costs)


def _second_model(arguments: argparse.Namespace) -> SecondModel | None:
    encoder, frozen = arguments.encoder, arguments.reference
    if encoder is not None and frozen is not None:
        raise UsageError("--encoder and --reference are two second models: leave one out")
    if encoder is not None:
        return SecondModel(SecondRole.ENCODER, encoder, backward=2 * encoder)
    return None if frozen is None else SecondModel(SecondRole.TEACHER, frozen)


def _adapters(arguments: argparse.Namespace) -> Adapters | None:
    if arguments.adapters is None:
        if arguments.adapter_steps is not None:
            raise UsageError("--adapter-steps is for adapters: give --adapters N")
        return None
    return Adapters.equal(
        arguments.adapters,
        microbatches=arguments.num_microbatches,
        steps=arguments.adapter_steps or 1,
    )


def _check_combined(
    arguments: argparse.Namespace, costs: schedules.Costs, slicing: Slicing
) -> None:
    """Refuse flags that no schedule combines, and an input that is too large.

    Raises:
        UsageError: names the flags.
    """
    words = conflicts.requested(
        arguments.name,
        costs,
        has_fixed_order=not catalog.family(arguments.name).searches,
        is_sliced=slicing.slices > 1,
        group_size=arguments.group_size,
        also=[feature for feature, flag in _ALSO if getattr(arguments, flag) is not None],
    )
    given = "--encoder" if arguments.reference is None else "--reference"
    flags = {
        **_FLAGS,
        conflicts.SECOND_MODEL: given,
        conflicts.COMMUNICATION: flag_of(_communication(arguments)),
    }
    raise_first(conflicts.refusals({it: flags.get(it, said) for it, said in words.items()}))
    if arguments.recompute is not None and arguments.recompute >= 1:
        raise UsageError(
            f"--recompute is {arguments.recompute:g}: the input of a stage takes less than its "
            "activations, 1 for a whole rank: give a share such as 0.03"
        )


def _communication(arguments: argparse.Namespace) -> str:
    return "forward_comm" if arguments.forward_comm else "backward_comm"


def _table(arguments: argparse.Namespace) -> schedules.Schedule:
    if arguments.name is not None:
        raise UsageError(f"give either {arguments.name} or --csv FILE: two schedules were named")
    if arguments.pipeline_size is not None or arguments.num_microbatches is not None:
        raise UsageError("--csv FILE has its own sizes: leave the sizes out")
    for choice in (*_CHOICES, *_OF_UNITS, "attention", "adapter_steps"):
        if getattr(arguments, choice) is not None:
            flag = flag_of(choice)
            raise UsageError(f"--csv FILE is a finished schedule: leave {flag} out")
    for extension in extensions():
        extension.check(arguments)
    return interchange.from_csv(arguments.csv)


_COSTS_OF_PASSES = {
    PassKind.R: ("recompute", "passes that are recomputed: give the memory of their input"),
    PassKind.D: ("offload", "activations that are offloaded: give the time of a copy"),
    PassKind.O: ("cut_output", "passes of a vocabulary-parallel output layer: give its time"),
}


def _check_costs_of_table(arguments: argparse.Namespace, kinds: set[PassKind]) -> None:
    """Refuse costs of passes that a table does not have, and the lack of those that it has.

    Raises:
        UsageError: names the flag.
    """
    for kind, (name, has) in _COSTS_OF_PASSES.items():
        given, flag = getattr(arguments, name) is not None, flag_of(name)
        if kind in kinds and not given:
            raise UsageError(f"--csv {arguments.csv} has {has}, with {flag} X")
        if given and kind not in kinds:
            raise UsageError(f"--csv {arguments.csv} has no passes {kind}: leave {flag} out")


def _costs(
    arguments: argparse.Namespace, pipeline_size: int, *, lookups: bool = False
) -> schedules.Costs:
    costs = schedules.Costs.uniform(
        pipeline_size=pipeline_size,
        forward=arguments.forward,
        backward=arguments.backward,
        weight=arguments.weight,
        p2p=arguments.p2p,
    )
    if arguments.forward_comm or arguments.backward_comm:
        costs = costs.having(
            Communication(forward=arguments.forward_comm, backward=arguments.backward_comm)
        )
    if arguments.recompute is not None:
        costs = costs.having(Recomputation(kept_input=arguments.recompute))
    if arguments.offload is not None:
        costs = costs.having(Offload(seconds=arguments.offload))
    output = arguments.cut_output
    if output is None:
        return costs
    logits = output * (arguments.forward + arguments.backward)
    weight, lookup = output * arguments.weight, 0.0 if lookups else None
    return costs.having(Vocabulary(output=logits, weight=weight, lookup=lookup))

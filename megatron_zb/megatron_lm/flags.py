"""The command-line arguments added to a pretrain script of Megatron-LM."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_zb.errors import UsageError
from megatron_zb.job import settings
from megatron_zb.parsing import flag_of
from megatron_zb.schedules.request import Limit

_OLDER = "older zero-bubble arguments"

_IGNORED_NUMBERS = (
    "zero_bubble_pipeline_timers_start_iter",
    "zero_bubble_pipeline_timers_end_iter",
    "zero_bubble_adaptive_memory_limit_percentile",
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add both groups; Megatron-LM's own arguments stay as they are."""
    _add_schedule(parser)
    _add_older(parser)
    return parser


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "pipeline schedule (megatron_zb)",
        "Without --pipeline-schedule and --pipeline-schedule-file, Megatron's own schedule runs, "
        "untouched.",
    )
    settings.add_arguments(group, settings.MEGATRON_LM)


def _add_older(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        _OLDER, "Those of an older zero-bubble code; they are translated into the ones above."
    )
    group.add_argument("--enable-zero-bubble", action="store_true")
    group.add_argument("--zero-bubble-v-schedule", action="store_true")
    group.add_argument(
        "--zero-bubble-v-schedule-mem-setup", choices=("min", "half", "zb"), default=None
    )
    group.add_argument("--zero-bubble-max-pending-backward", metavar="N")
    group.add_argument("--allow-padding-num-layers", action="store_true")
    for name in _IGNORED_NUMBERS:
        group.add_argument(flag_of(name), type=int, help="accepted and ignored")


def choice(args: argparse.Namespace) -> str | None:
    """Return the flag that chooses a schedule, with its value; None for Megatron's own."""
    if settings.chooses_schedule(args):
        return settings.choice_of(args)
    return next((flag_of(name) for name in _CHOOSING if getattr(args, name)), None)


def choice_in(arguments: Sequence[str]) -> str | None:
    """Return :func:`choice` of a command line that Megatron-LM does not parse."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    return choice(add_arguments(parser).parse_known_args(arguments)[0])


def translate_older(args: argparse.Namespace) -> list[str]:
    """Set the new arguments that older ones stand for; return a line about each translation.

    Raises:
        UsageError: an older argument contradicts ``--pipeline-schedule``, or is no number.
    """
    given = [name for name in _IGNORED_NUMBERS if getattr(args, name) is not None]
    lines = [f"{flag_of(name)} is ignored" for name in given]
    if args.allow_padding_num_layers:
        lines.append(
            "--allow-padding-num-layers is ignored: layers that do not divide are always spread, "
            "with fewer on the ranks of the embedding and the output layer"
        )
    older = [name for name in _CHOOSING if getattr(args, name)]
    if args.zero_bubble_max_pending_backward is not None and older != ["enable_zero_bubble"]:
        lines.append(
            "--zero-bubble-max-pending-backward is ignored: it counts for --enable-zero-bubble "
            "without a V alone"
        )
    if older:
        lines.append(_translate_schedule(args, older))
    return lines


_CHOOSING = (
    "enable_zero_bubble",
    "zero_bubble_v_schedule",
    "zero_bubble_v_schedule_mem_setup",
)


def _translate_schedule(args: argparse.Namespace, older: list[str]) -> str:
    said = " ".join(map(flag_of, older))
    if settings.chooses_schedule(args):
        new = "--pipeline-schedule" if args.pipeline_schedule else "--pipeline-schedule-file"
        raise UsageError(f"{said} and {new} both choose a schedule: leave {said} out")
    if args.zero_bubble_v_schedule or args.zero_bubble_v_schedule_mem_setup:
        names = {"min": "v-min", "half": "v-half", "zb": "v-zb", None: "v-zb"}
        args.pipeline_schedule = names[args.zero_bubble_v_schedule_mem_setup]
    else:
        _translate_pending(args)
    limit = args.pipeline_memory_limit
    limited = "" if limit is None else f" --pipeline-memory-limit {limit}"
    return f"{said} is taken as --pipeline-schedule {args.pipeline_schedule}{limited}"


def _translate_pending(args: argparse.Namespace) -> None:
    """Translate the number of microbatches that may await W: p is ZB-1p, 2p and more ZB-2p."""
    p = args.pipeline_model_parallel_size
    given = args.zero_bubble_max_pending_backward or "auto"
    if given != "auto" and (not given.isdecimal() or int(given) < 1):
        raise UsageError(
            f"--zero-bubble-max-pending-backward {given}: give a number of microbatches of 1 or "
            "more, or 'auto'"
        )
    pending = p if given == "auto" else int(given)
    args.pipeline_schedule = "zb-2p" if pending > p else "zb-1p"
    if args.pipeline_memory_limit is None and pending != p and pending < 2 * p:
        args.pipeline_memory_limit = Limit(pending / p)

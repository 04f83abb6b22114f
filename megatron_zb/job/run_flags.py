"""Arguments about a run with a schedule, the same for Megatron-LM's scripts and for our own."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_zb.errors import UsageError
from megatron_zb.job.data_contents import ALLOW_OTHER_FLAG
from megatron_zb.parsing import flag_of, share_or_bytes
from megatron_zb.schedules import catalog
from megatron_zb.schedules.placement import Placement, looped, wave
from megatron_zb.schedules.schedule import Schedule

LAYOUT_FLAG = "--pipeline-layer-layout"
AUTO_LAYOUT = "auto"
STREAMS_FLAG = "--pipeline-random-streams"
RECOMPUTE_FLAG = "--pipeline-recompute"
OFFLOAD_FLAG = "--pipeline-offload"
MEMORY_LIMIT_FLAG = "--pipeline-memory-limit"
HOST_LIMIT_FLAG = "--pipeline-host-limit"
VERIFY_FLAG = "--pipeline-verify"


def asks_for_balance(layout: str | None) -> bool:
    """Return whether the value of ``--pipeline-layer-layout`` asks for a computed layout."""
    return layout is not None and (layout == AUTO_LAYOUT or Path(layout).suffix == ".yaml")


def asks_for_layer_streams(streams: str | None, keeps_places: bool) -> bool:
    """Return whether every layer draws from random streams of its own.

    Args:
        streams: the value of ``--pipeline-random-streams``, None where it was not given.
        keeps_places: every rank holds the layers that it has in Megatron without a schedule, and
            so draws what it draws there.
    """
    return streams == "layer" or (streams != "rank" and not keeps_places)


def chooses_schedule(args: argparse.Namespace) -> bool:
    """Return whether the flags choose a schedule other than Megatron's own."""
    return args.pipeline_schedule is not None or args.pipeline_schedule_file is not None


def choice_of(args: argparse.Namespace) -> str:
    """Return the flag that chooses a schedule, with its value."""
    if getattr(args, "pipeline_schedule", None) is not None:
        return f"--pipeline-schedule {args.pipeline_schedule}"
    return f"--pipeline-schedule-file {getattr(args, 'pipeline_schedule_file', None)}"


def states_asked_for(args: argparse.Namespace) -> list[str]:
    """Return the flags that let a schedule drop activations, or move them to the host."""
    names = ("pipeline_recompute", "pipeline_offload")
    return [flag_of(name) for name in names if getattr(args, name, None) == "auto"]


def states_of(args: argparse.Namespace, table: Schedule | None = None) -> list[tuple[str, str]]:
    """Return the flags of the states that passes may have, each with what asks for them.

    Args:
        args: those of the run.
        table: the schedule read from a file, which says itself what it drops and moves.
    """
    asked = [(flag, f"{flag} auto") for flag in states_asked_for(args)]
    if table is not None:
        file = f"--pipeline-schedule-file {args.pipeline_schedule_file}"
        if table.dropped:
            asked.append((RECOMPUTE_FLAG, f"{file}, which has R"))
        if table.moved:
            asked.append((OFFLOAD_FLAG, f"{file}, which has D and H"))
    return asked


def placement_of(args: argparse.Namespace) -> Placement | None:
    """Return the placement that ``auto`` is bound to, None if it is not bound.

    Raises:
        UsageError: the schedule has its own, or the number of chunks is missing or wrong.
    """
    kind = args.pipeline_placement
    if kind is None:
        return None
    family = catalog.family(args.pipeline_schedule)
    if family.placement is not None:
        raise UsageError(
            f"--pipeline-placement is for --pipeline-schedule auto: {family.name} has its own, so "
            "leave it out"
        )
    chunks = args.num_virtual_stages_per_pipeline_rank
    if chunks is None:
        raise UsageError(
            f"--pipeline-placement {kind} needs --num-virtual-stages-per-pipeline-rank, such as 2"
        )
    return (looped if kind == "loop" else wave)(args.pipeline_model_parallel_size, chunks)


def add_schedule(group: argparse._ArgumentGroup, about: str) -> None:
    """Add the arguments that choose a schedule; ``about`` follows the names of all."""
    group.add_argument(
        "--pipeline-schedule",
        metavar="NAME",
        help=f"the schedule: {', '.join(catalog.names())}{about}",
    )
    group.add_argument(
        "--pipeline-schedule-file",
        metavar="CSV",
        help="run this table instead of a named schedule: compute-only, in the format of "
        "torch.distributed.pipelining, as `megatron-zb export` writes it",
    )
    group.add_argument(
        MEMORY_LIMIT_FLAG,
        type=share_or_bytes,
        metavar="X",
        help="the most activation memory of any rank, as a share of 1F1B's, such as 0.5, or in "
        "bytes, such as 40GiB, which needs the profile of an earlier run as "
        "--pipeline-layer-layout FILE.yaml",
    )


def add_run_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the arguments for profiling, placement, replanning, random streams, timeout and data."""
    group.add_argument(
        "--pipeline-profile",
        metavar="FILE",
        help="measure passes, messages and activations in the first iterations and write this "
        "file for `megatron-zb plan --profile`",
    )
    group.add_argument(
        VERIFY_FLAG,
        action="store_true",
        help="run the first step twice, once with nothing split, and compare the gradient of every "
        "parameter: end with a sentence that names the first one that differs, or say how many are "
        "equal and train on",
    )
    group.add_argument(
        "--pipeline-placement",
        choices=("loop", "zigzag"),
        help="where auto places the chunks of a rank: in turn (loop), or there and back (zigzag, a "
        "V with two); with --num-virtual-stages-per-pipeline-rank (default: what is faster)",
    )
    group.add_argument(
        "--pipeline-schedule-cache",
        metavar="DIR",
        help="keep schedules that were searched in this folder of the first rank, and find them "
        "there again",
    )
    group.add_argument(
        "--pipeline-replan-every",
        type=int,
        metavar="N",
        help="build the schedule anew for measured costs after the first iterations and every N "
        "(default: auto once, after the first ones; others never)",
    )
    group.add_argument(
        STREAMS_FLAG,
        choices=("auto", "layer", "rank"),
        help="where layers draw random numbers from. layer: each from streams of its own, so that "
        "dropout masks, and initial weights, are those of every other schedule and pipeline size "
        "with the same seed; rank: from one stream of each pipeline rank, as in Megatron without "
        "a schedule; auto (default): rank where every rank holds the layers it has there, else "
        "layer",
    )
    add_timeout(group)
    add_other_data(group)


def add_vocabulary(group: argparse._ArgumentGroup) -> None:
    """Add the argument that cuts output layer and embedding over the pipeline ranks."""
    group.add_argument(
        "--pipeline-vocabulary",
        choices=("auto", "on", "off"),
        help="cut the output layer and the embedding along the vocabulary over all pipeline "
        "ranks, whose logits, lookups and weight gradients then are passes of the schedule (on), "
        "leave them on the first and the last stage (off, the default), or cut them where that "
        "can be done and is faster in the simulator (auto); the start-up lines say why. Losses "
        "agree with those of whole layers but for rounding, and are the same to the last bit in "
        "every schedule. Checkpoints serve both",
    )


def add_states(group: argparse._ArgumentGroup) -> None:
    """Add the arguments that let a schedule drop activations, or move them to the host."""
    for flag, what in (
        (
            RECOMPUTE_FLAG,
            "dropped after a forward, and computed again by a pass of the schedule before their "
            "backward",
        ),
        (
            OFFLOAD_FLAG,
            "moved to the host after a forward, and back before their backward, beside what is "
            "computed",
        ),
    ):
        group.add_argument(
            flag,
            choices=("auto", "off"),
            help=f"whether activations may be {what}: wherever that is faster under the memory "
            "limit (auto), or nowhere (off, the default). Losses stay the same to the last bit",
        )
    group.add_argument(
        HOST_LIMIT_FLAG,
        type=share_or_bytes,
        metavar="X",
        help="the most memory of the host that a rank's activations may take with "
        f"{OFFLOAD_FLAG} auto, in the units of {MEMORY_LIMIT_FLAG} (default: as much as is faster)",
    )


def add_other_data(group: argparse._ArgumentGroup) -> None:
    """Add the argument that lets a run resume from a checkpoint of other training data."""
    group.add_argument(
        ALLOW_OTHER_FLAG,
        action="store_true",
        help="go on from a checkpoint that was trained on other data, which is refused otherwise: "
        "a checkpoint keeps the sizes of its data sets and a digest of their contents",
    )


def add_timeout(group: argparse._ArgumentGroup) -> None:
    """Add the argument for the time without progress after which a run is ended."""
    group.add_argument(
        "--pipeline-timeout",
        type=float,
        metavar="SECONDS",
        help="after so long without progress, ask all ranks, end a job that has stopped, and say "
        "which rank holds up all others; 0 is never (default: nine tenths of "
        "--distributed-timeout-minutes)",
    )

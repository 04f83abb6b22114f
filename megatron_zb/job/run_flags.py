"""Questions about the arguments of a run with a schedule, for every command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_zb.errors import UsageError
from megatron_zb.parsing import flag_of
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
    """Return whether each layer has separate RNG states.

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

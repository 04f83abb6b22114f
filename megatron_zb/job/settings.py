"""The settings of a schedule: one dataclass that generates the flags of every command line.

Each field has its flag's argument for argparse as metadata. Megatron-LM's own arguments, such as
``seed``, are fields as well: a command line reads them, and only the trainer adds some. A pretrain
script of Megatron-LM also takes the arguments of an older zero-bubble code.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, cast

from megatron_zb.errors import UsageError
from megatron_zb.parsing import describe, flag_of, values_of_flags
from megatron_zb.schedules import catalog
from megatron_zb.schedules.catalog import Family
from megatron_zb.schedules.placement import Placement, looped, wave
from megatron_zb.schedules.request import Limit
from megatron_zb.schedules.slices import Slicing, given_slices, parse_slices

LAYOUT_FLAG = "--pipeline-layer-layout"
AUTO_LAYOUT = "auto"
STREAMS_FLAG = "--pipeline-random-streams"
OFFLOAD_FLAG = "--pipeline-offload"
MEMORY_LIMIT_FLAG = "--pipeline-memory-limit"
HOST_LIMIT_FLAG = "--pipeline-host-limit"
VERIFY_FLAG = "--pipeline-verify"

MEGATRON_LM, TRAINER, DISTILLATION = "megatron_lm", "trainer", "distillation"


def _setting(default: Any = None, *, example: str | None = "v-half", **argument: Any) -> Any:
    """Return a field with its flag.

    Args:
        example: a schedule that the flag goes with; None if it needs none.
        argument: the arguments of ``add_argument``, as a mapping where they differ by source.
    """
    return field(default=default, metadata={"example": example, **argument})


_ANY_SCHEDULE = f"the schedule: {', '.join(catalog.names())}"
_WHERE_FASTER = (
    ": wherever that is faster under the memory limit (auto or on), or nowhere (off, the default). "
    "Losses stay the same to the last bit"
)


def permission(text: str) -> str:
    """Parse whether a schedule may do something: ``on`` is ``auto``, since it need not."""
    return "auto" if text == "on" else text


PERMISSIONS = ("auto", "on", "off")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The settings of a schedule, by the names of the command line's flags.

    Raises:
        UsageError: a value is none of the choices of its flag, or no limit.
    """

    pipeline_schedule: str | None = _setting(
        example=None,
        metavar="NAME",
        help={
            TRAINER: f"{_ANY_SCHEDULE}; without it, Megatron's own 1F1B runs, untouched",
            MEGATRON_LM: f"{_ANY_SCHEDULE}. Chunks are placed in a V where the schedule asks for "
            "it; --pipeline-model-parallel-layout then names the layers of every stage in model "
            "order, and --num-virtual-stages-per-pipeline-rank the chunks of a rank where the "
            "schedule has the choice. With --overlap-moe-expert-parallel-comm, forwards and "
            "backwards run in one pass; the expert all-to-all is taken to be half of a forward "
            "then",
        },
    )
    pipeline_schedule_file: str | None = _setting(
        example=None,
        metavar="CSV",
        help="run this table instead of a named schedule: compute-only, in the format of "
        "torch.distributed.pipelining, as `megatron-zb export` writes it",
    )
    pipeline_memory_limit: Limit | float | str | None = _setting(  # noqa: RUF009
        type=Limit.parse,
        metavar="X",
        example="auto",
        help="the most activation memory of any rank, as a share of 1F1B's, such as 0.5, or in "
        "bytes, such as 40GiB, which needs the profile of an earlier run as "
        "--pipeline-layer-layout FILE.yaml",
    )
    pipeline_slices: Slicing | int | str | None = _setting(  # noqa: RUF009
        type=parse_slices,
        metavar="N",
        help="token slices: cut every microbatch along its sequence into N equal parts, into parts "
        "of unequal lengths, such as 2,1,1, or into as many as pay (auto). Stages work on one at a "
        "time, which divides the bubble and the activation memory by up to N",
    )
    num_virtual_stages_per_pipeline_rank: int | None = _setting(
        example="interleaved",
        type=int,
        metavar="N",
        help="model chunks of a rank, where the schedule has the choice: interleaved, wave, auto",
    )
    microbatch_group_size_per_vp_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None
    pipeline_profile: str | None = _setting(
        metavar="FILE",
        help="measure passes, messages and activations in the first iterations and write this "
        "file for `megatron-zb plan --profile`",
    )
    pipeline_verify: bool = _setting(
        False,
        action="store_true",
        help="run the first step twice, once with nothing split, and compare the gradient of every "
        "parameter: end with a sentence that names the first one that differs, or say how many are "
        "equal and train on",
    )
    pipeline_placement: str | None = _setting(
        choices=("loop", "zigzag"),
        example="auto",
        help="where auto places the chunks of a rank: in turn (loop), or there and back (zigzag, a "
        "V with two); with --num-virtual-stages-per-pipeline-rank (default: what is faster)",
    )
    pipeline_schedule_cache: str | None = _setting(
        metavar="DIR",
        example="auto",
        help="keep schedules that were searched in this folder of the first rank, and find them "
        "there again",
    )
    pipeline_replan_every: int | None = _setting(
        type=int,
        metavar="N",
        example="auto",
        help="build the schedule anew for measured costs after the first iterations and every N "
        "(default: auto once, after the first ones; others never)",
    )
    pipeline_random_streams: str | None = _setting(
        choices=("auto", "layer", "rank"),
        help="where layers draw random numbers from. layer: each from separate RNG states, so that "
        "dropout masks, and initial weights, are those of every other schedule and pipeline size "
        "with the same seed; rank: from one stream of each pipeline rank, as in Megatron without "
        "a schedule; auto (default): rank where every rank holds the layers it has there, else "
        "layer",
    )
    seed: int | None = None
    pipeline_timeout: float | None = _setting(
        example=None,
        type=float,
        metavar="SECONDS",
        help="after so long without progress, ask all ranks, end a job that has stopped, and say "
        "which rank holds up all others; 0 is never (default: nine tenths of "
        "--distributed-timeout-minutes)",
    )
    pipeline_allow_other_data: bool = _setting(
        False,
        example=None,
        action="store_true",
        help="go on from a checkpoint that was trained on other data, which is refused otherwise: "
        "a checkpoint keeps the sizes of its data sets and a digest of their contents",
    )
    pipeline_vocabulary: str | None = _setting(
        choices=("auto", "on", "off"),
        help="shard the output layer and the embedding along the vocabulary over all pipeline "
        "ranks, whose logits, lookups and weight gradients then are passes of the schedule (on), "
        "leave them on the first and the last stage (off, the default), or shard them where that "
        "can be done and is faster in the simulator (auto); the start-up lines say why. Losses "
        "agree with those of whole layers but for rounding, and are the same to the last bit in "
        "every schedule. Checkpoints serve both",
    )
    pipeline_recompute: str | None = _setting(
        type=permission,
        choices=PERMISSIONS,
        help="whether activations may be recomputed by a pass of the schedule before "
        f"their backward, and only their input kept{_WHERE_FASTER}",
    )
    pipeline_offload: str | None = _setting(
        type=permission,
        choices=PERMISSIONS,
        help="whether activations may be offloaded after a forward, and reloaded before their "
        f"backward, while other passes run{_WHERE_FASTER}",
    )
    pipeline_host_limit: Limit | float | str | None = _setting(  # noqa: RUF009
        type=Limit.parse,
        metavar="X",
        help="the most memory of the host that a rank's activations may take with "
        "--pipeline-offload auto, in the units of --pipeline-memory-limit (default: as much as is "
        "faster)",
    )
    pipeline_layer_layout: str | None = _setting(
        metavar={MEGATRON_LM: "auto|FILE", TRAINER: "LAYOUT"},
        help={
            MEGATRON_LM: "balance the layers of the stages: fewer where embedding and output layer "
            "are, counted from the sizes of the model (auto), or by the seconds in a file of "
            "--pipeline-profile; --pipeline-model-parallel-layout writes them out",
            TRAINER: "which layers each stage holds, as in Megatron-LM: "
            "'Ett|ttt|ttt|ttL' has four stages, embedding first, loss last; stages are written in "
            "the order in which a microbatch passes them. With a schedule also 'auto': fewer where "
            "embedding and output layer are, counted from the sizes of the model; or a file of "
            "--pipeline-profile: by the seconds measured there",
        },
    )
    enable_optimizer_post_validation: bool = _setting(
        False,
        action="store_true",
        example="v-zb",
        help="step the optimizer without waiting for the gradient norm of the whole pipeline; it "
        "is validated in the next iteration's warm-up, and a wrong step is rolled back and "
        "repeated. Losses stay the same; each line of the log comes one iteration later",
    )
    post_validation_snapshot: str = _setting(
        "device",
        example=None,
        choices=("device", "host"),
        help="where what is needed to take a step back is kept (default: device)",
    )
    nccl_communicator_config_path: str | None = None
    high_priority_stream_groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _FIELDS:
            object.__setattr__(self, name, parsed(name, getattr(self, name)))

    @classmethod
    def of(cls, args: argparse.Namespace, **changed: Any) -> ScheduleSettings:
        """Return the settings among the arguments of a run, but for those that are changed."""
        given: dict[str, Any] = {
            each.name: getattr(args, each.name, each.default) for each in fields(cls)
        }
        return cls(**given | changed)

    @property
    def family(self) -> Family:
        """The entry of the named schedule in the catalog.

        Raises:
            UsageError: there is no such schedule.
        """
        return catalog.family(str(self.pipeline_schedule))

    @property
    def slices(self) -> Slicing | str | None:
        """Token slices of every microbatch: None for whole ones, ``auto`` for a choice."""
        return cast("Slicing | str | None", self.pipeline_slices)

    @property
    def memory_limit(self) -> Limit | None:
        """The most activation memory of a rank."""
        return cast("Limit | None", self.pipeline_memory_limit)

    @property
    def host_limit(self) -> Limit | None:
        """The most memory of the host that the activations of a rank may take."""
        return cast("Limit | None", self.pipeline_host_limit)


_FIELDS = {each.name: each for each in fields(ScheduleSettings)}


def parsed(name: str, value: Any, choices: tuple[str | None, ...] | None = None) -> Any:
    """Return the value of a setting as its flag's parser returns it.

    Args:
        choices: those to take instead of the flag's.

    Raises:
        UsageError: it is none of the choices, no limit, or no slices.
    """
    argument = _FIELDS[name].metadata
    if argument.get("type") == Limit.parse:
        try:
            return None if value is None else Limit.given(value)
        except (TypeError, argparse.ArgumentTypeError):
            example = "give a fraction of 1F1B's, such as 0.5, or bytes, such as 40GiB"
            raise UsageError(f"{name} is {value!r}: {example}") from None
    if argument.get("type") == parse_slices:
        return None if value is None else given_slices(value)
    allowed: tuple[str | None, ...] = choices or (*argument.get("choices", ()), None)
    if "choices" in argument and value not in allowed:
        words = " or ".join(each for each in allowed if each is not None)
        raise UsageError(f"{name} is '{value}': give {words}")
    return permission(value) if argument.get("type") == permission else value


_RECOMPUTE_AND_OFFLOAD = ("pipeline_recompute", "pipeline_offload", "pipeline_host_limit")
_RUN_NAMES = (
    "pipeline_profile",
    "pipeline_verify",
    "pipeline_placement",
    "pipeline_schedule_cache",
    "pipeline_replan_every",
    "pipeline_random_streams",
    "pipeline_timeout",
    "pipeline_allow_other_data",
)
_CHOOSING = ("pipeline_schedule", "pipeline_schedule_file", "pipeline_memory_limit")
FLAGS: dict[str, tuple[str, ...]] = {
    MEGATRON_LM: (
        *_CHOOSING,
        "pipeline_slices",
        "pipeline_layer_layout",
        "pipeline_vocabulary",
        *_RECOMPUTE_AND_OFFLOAD,
        *_RUN_NAMES,
        "enable_optimizer_post_validation",
        "post_validation_snapshot",
    ),
    TRAINER: (
        *_CHOOSING,
        "pipeline_slices",
        "num_virtual_stages_per_pipeline_rank",
        *_RUN_NAMES,
        "pipeline_vocabulary",
        *_RECOMPUTE_AND_OFFLOAD,
        "pipeline_layer_layout",
    ),
    DISTILLATION: ("pipeline_timeout", "pipeline_allow_other_data"),
}
"""The settings that each source has as flags, in the order of its ``--help``."""

_MORE_FLAGS = {(TRAINER, "pipeline_layer_layout"): ("--pipeline-model-parallel-layout",)}


def add_arguments(group: argparse._ArgumentGroup, source: str, *names: str) -> None:
    """Add the flags of a source to a group, all of them or those of some settings."""
    for name in names or FLAGS[source]:
        setting = _FIELDS[name]
        argument = {
            key: value[source] if isinstance(value, dict) else value
            for key, value in setting.metadata.items()
            if key != "example"
        }
        group.add_argument(
            flag_of(name), *_MORE_FLAGS.get((source, name), ()), default=setting.default, **argument
        )


def check_unscheduled(args: argparse.Namespace, source: str) -> None:
    """Refuse arguments that need a schedule where none is chosen.

    Raises:
        UsageError: names the argument.
    """
    for name in FLAGS[source]:
        example, default = _FIELDS[name].metadata["example"], _FIELDS[name].default
        is_megatrons = (source, name) in _MORE_FLAGS  # and so goes without a schedule
        if example and not is_megatrons and getattr(args, name) != default:
            raise UsageError(f"{flag_of(name)} needs --pipeline-schedule, such as {example}")


# --- questions about the arguments of a run, for every command line


def asks_for_balance(layout: str | None) -> bool:
    """Return whether the value of ``--pipeline-layer-layout`` requests a computed layout."""
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


def placement_of(
    args: argparse.Namespace | ScheduleSettings, pipeline_size: int
) -> Placement | None:
    """Return the placement that ``auto`` is bound to, None if it is not bound.

    Raises:
        UsageError: the schedule has its own, or the number of chunks is missing or wrong.
    """
    kind = args.pipeline_placement
    if kind is None:
        return None
    family = catalog.family(str(args.pipeline_schedule))
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
    return (looped if kind == "loop" else wave)(pipeline_size, chunks)


# --- the arguments added to a pretrain script of Megatron-LM


_OLDER = "older zero-bubble arguments"

_IGNORED_NUMBERS = (
    "zero_bubble_pipeline_timers_start_iter",
    "zero_bubble_pipeline_timers_end_iter",
    "zero_bubble_adaptive_memory_limit_percentile",
)


def add_megatron_lm_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
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
    add_arguments(group, MEGATRON_LM)


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


def chosen_flag(args: argparse.Namespace) -> str | None:
    """Return the flag that chooses a schedule, with its value; None for Megatron's own."""
    if chooses_schedule(args):
        return choice_of(args)
    return next((flag_of(name) for name in _OLDER_CHOOSING if getattr(args, name)), None)


def chosen_flag_in(arguments: Sequence[str]) -> str | None:
    """Return :func:`chosen_flag` of a command line that Megatron-LM does not parse.

    Raises:
        UsageError: a flag of this package is mistyped.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)

    def fail(message: str) -> NoReturn:
        raise UsageError(describe(parser, message))

    parser.error = fail  # type: ignore[method-assign]
    return chosen_flag(add_megatron_lm_arguments(parser).parse_known_args(arguments)[0])


def mistake(parser: argparse.ArgumentParser, message: str) -> UsageError | None:
    """Return the error for what argparse says of a flag of this package, None for another.

    Flags that begin with ``--pipeline-`` count as those of this package, Megatron-LM's own, too.
    """
    own = values_of_flags(add_megatron_lm_arguments(argparse.ArgumentParser(add_help=False)))
    for word in re.findall(r"--[\w-]+", message.partition("(choose from")[0]):
        if word in own or word.startswith("--pipeline-"):
            return UsageError(describe(parser, message))
    return None


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
    older = [name for name in _OLDER_CHOOSING if getattr(args, name)]
    if args.zero_bubble_max_pending_backward is not None and older != ["enable_zero_bubble"]:
        lines.append(
            "--zero-bubble-max-pending-backward is ignored: it counts for --enable-zero-bubble "
            "without a V alone"
        )
    if older:
        lines.append(_translate_schedule(args, older))
    return lines


_OLDER_CHOOSING = (
    "enable_zero_bubble",
    "zero_bubble_v_schedule",
    "zero_bubble_v_schedule_mem_setup",
)


def _translate_schedule(args: argparse.Namespace, older: list[str]) -> str:
    said = " ".join(map(flag_of, older))
    if chooses_schedule(args):
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

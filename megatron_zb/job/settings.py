"""The settings of a schedule: one dataclass that generates the flags of every command line.

Each field has its flag's argument for argparse as metadata. Megatron-LM's own arguments, such as
``seed``, are fields as well: a command line reads them, and only the trainer adds some. A pretrain
script of Megatron-LM also takes the arguments of an older zero-bubble code.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, cast

from megatron_zb.errors import UsageError
from megatron_zb.parsing import describe, flag_of, values_of_flags
from megatron_zb.schedules import catalog
from megatron_zb.schedules.catalog import Family
from megatron_zb.schedules.features.slices import Slicing, given_slices, parse_slices
from megatron_zb.schedules.placement import Placement, looped, wave
from megatron_zb.schedules.request import Limit

LAYOUT_FLAG = "--pipeline-layer-layout"
AUTO_LAYOUT = "auto"
STREAMS_FLAG = "--pipeline-random-streams"
OFFLOAD_FLAG = "--pipeline-offload"
VERIFY_FLAG = "--pipeline-verify"

MEGATRON_LM, TRAINER, DISTILLATION = "megatron_lm", "trainer", "distillation"


def _setting(default: Any = None, *, example: str | None = "v-half", **argument: Any) -> Any:
    """Return a field with its flag.

    Args:
        example: a schedule that the flag goes with; None if it needs none.
        argument: the arguments of ``add_argument``, as a mapping where they differ by source.
    """
    return field(default=default, metadata={"example": example, **argument})


_ANY_SCHEDULE = f"the pipeline schedule by name: {', '.join(catalog.all_names())}"
_WHERE_FASTER = (
    "auto or on: wherever that makes the step faster within --pipeline-memory-limit. off: nowhere. "
    "Losses are equal to the last bit (default: off)"
)


def permission(text: str) -> str:
    """Parse whether a schedule may do something: ``on`` is ``auto``, since it need not."""
    return "auto" if text == "on" else text


PERMISSIONS = ("auto", "on", "off")


def parse_encoder(text: str) -> float | str | None:
    """Parse where an encoder runs: ``on``, ``off``, or the share that its forward takes.

    Raises:
        ArgumentTypeError: it is none of these.
    """
    if text in ("on", "off"):
        return text if text == "on" else None
    with suppress(ValueError):
        share = float(text)
        if 0 < share < math.inf:
            return share
    raise argparse.ArgumentTypeError(
        f"'{text}' is neither on, nor off, nor the share of a forward, such as 0.2"
    )


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
            TRAINER: f"{_ANY_SCHEDULE} (default: none, and Megatron's own 1F1B runs, untouched)",
            MEGATRON_LM: f"{_ANY_SCHEDULE}. v-half needs about half of 1F1B's activation memory, "
            "v-zb has almost no idle time in the same memory, and auto searches for the fastest "
            "order. Schedules with a V place the layers themselves; "
            "--pipeline-model-parallel-layout then lists the layers of every stage in model order. "
            "With --overlap-moe-expert-parallel-comm, a forward and a backward run as one pass; "
            "until it is measured, the expert all-to-all counts as half of a forward "
            "(default: none, and Megatron's own schedule runs, untouched)",
        },
    )
    pipeline_schedule_file: str | None = _setting(
        example=None,
        metavar="CSV",
        help="run the order of passes in this table instead of a named schedule. `megatron-zb "
        "export` writes such a table; it is compute-only, in the format of "
        "torch.distributed.pipelining (default: none)",
    )
    pipeline_memory_limit: Limit | float | str | None = _setting(  # noqa: RUF009
        type=Limit.parse,
        metavar="X",
        example="auto",
        help="the most activation memory that any rank may hold. 0.5 is half of what 1F1B needs. "
        "40GiB is a size in bytes; it needs activations that were measured: write a file with "
        "--pipeline-profile in an earlier run, and give it as --pipeline-layer-layout FILE.yaml "
        "(default: 1F1B's memory for auto, else what the schedule needs)",
    )
    pipeline_slices: Slicing | int | str | None = _setting(  # noqa: RUF009
        type=parse_slices,
        metavar="N",
        help="cut every microbatch along its sequence into N equal token slices. 2,1,1 cuts it "
        "into three parts, the first twice as long as the others; auto takes the number that is "
        "fastest. A stage works on one slice at a time, which divides the bubble and the "
        "activation memory by up to N. It is for long sequences and few microbatches (default: "
        "whole microbatches)",
    )
    num_virtual_stages_per_pipeline_rank: int | None = _setting(
        example="interleaved",
        type=int,
        metavar="N",
        help="the number of model chunks that every rank holds. It is for schedules that leave the "
        "number open: interleaved, wave and auto (default: that of the schedule)",
    )
    microbatch_group_size_per_vp_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None
    pipeline_profile: str | None = _setting(
        metavar="FILE",
        help="measure the time of passes and messages and the size of activations in the first "
        "iterations, and write them to this file. `megatron-zb plan --profile FILE` compares all "
        "schedules for it (default: none)",
    )
    pipeline_verify: bool = _setting(
        False,
        action="store_true",
        help="run the first step twice, the second time without splitting the backward, and "
        "compare the gradient of every parameter. The job trains on if all are equal; otherwise it "
        "ends and names the first parameter that differs",
    )
    pipeline_warm_up: str | None = _setting(
        choices=("auto", "on", "off"),
        help="before the first step, let every stage run each kind of its passes once, all stages "
        "at the same time, and undo what they change. Kernels then compile and tune themselves on "
        "all stages at once, and not on one after another in the first step. Losses are equal to "
        "the last bit. on: also on CPU ranks. off: nowhere. auto: on GPUs, unless something keeps "
        "state that cannot be put back (default: auto)",
    )
    pipeline_placement: str | None = _setting(
        choices=("loop", "zigzag"),
        example="auto",
        help="where auto places the chunks of the ranks. loop: from the first rank to the last, "
        "then from the first again, as Megatron's interleaved schedule does. zigzag: to the last "
        "rank and back again, which is a V with two chunks. It needs "
        "--num-virtual-stages-per-pipeline-rank (default: what is faster)",
    )
    pipeline_schedule_cache: str | None = _setting(
        metavar="DIR",
        example="auto",
        help="keep schedules that a search has found in this folder of the first rank, so that the "
        "next job with the same sizes and costs starts without a search (default: none)",
    )
    pipeline_replan_every: int | None = _setting(
        type=int,
        metavar="N",
        example="auto",
        help="measure the first iterations, build the schedule anew for what was measured, and do "
        "so again every N iterations (default: once for auto, after the first iterations, and "
        "never for other schedules)",
    )
    pipeline_random_streams: str | None = _setting(
        choices=("auto", "layer", "rank"),
        help="which random numbers dropout and the initial weights draw. layer: every layer has "
        "its RNG states, so that a seed gives the same numbers under every schedule and pipeline "
        "size. rank: every pipeline rank has one state, as in Megatron. auto: rank where every "
        "rank holds the same layers as in Megatron, else layer (default: auto)",
    )
    seed: int | None = None
    pipeline_timeout: float | None = _setting(
        example=None,
        type=float,
        metavar="SECONDS",
        help="how long a rank may wait without progress. Then a watchdog asks all ranks, ends a "
        "job that has stopped, and names the rank that holds up the others. 0 turns it off "
        "(default: nine tenths of --distributed-timeout-minutes)",
    )
    pipeline_allow_other_data: bool = _setting(
        False,
        example=None,
        action="store_true",
        help="resume from a checkpoint that was trained on other data. Without this flag such a "
        "run is refused: a checkpoint holds the sizes of its data sets and a digest of their "
        "contents",
    )
    pipeline_vocabulary: str | None = _setting(
        choices=("auto", "on", "off"),
        help="where the output layer and the embedding are. on: sharded along the vocabulary over "
        "all pipeline ranks, with logits, lookups and weight gradients as passes of the schedule. "
        "off: whole, on the last and the first stage. auto: sharded where that can be done and the "
        "simulator finds it faster; the start-up lines give the reason. Losses equal those of "
        "whole layers up to rounding, and are equal to the last bit between schedules. "
        "Checkpoints of both forms load in both (default: off)",
    )
    pipeline_recompute: str | None = _setting(
        type=permission,
        choices=PERMISSIONS,
        help="let the schedule choose forwards whose activations are not kept: the stage keeps its "
        f"input, and the forward runs again before its backward. {_WHERE_FASTER}",
    )
    pipeline_offload: str | None = _setting(
        type=permission,
        choices=PERMISSIONS,
        help="let the schedule copy activations to the host's memory after a forward, and back "
        f"before its backward, while other passes run. {_WHERE_FASTER}",
    )
    pipeline_host_limit: Limit | float | str | None = _setting(  # noqa: RUF009
        type=Limit.parse,
        metavar="X",
        help="the most memory of the host that the activations of one rank may take, in the units "
        "of --pipeline-memory-limit. It needs --pipeline-offload auto (default: as much as makes "
        "the step faster)",
    )
    pipeline_encoder: float | str | None = _setting(
        type=parse_encoder,
        metavar="on|SHARE",
        help="run the vision encoder of the model on every rank, in the idle time between the "
        "passes of the language model, and not only on the first stage. Every rank has a copy of "
        "it and encodes every p-th microbatch of p ranks. SHARE: its forward takes this share of "
        "the forward of the language model, such as 0.2; on: counted from the sizes of images and "
        "layers. Losses are equal to the last bit in the first step, and later up to the order of "
        "sums. Checkpoints have one copy (default: off, the first stage runs the encoder)",
    )
    pipeline_adapters: str | None = _setting(
        metavar="FILE",
        example="1f1b",
        help="train several LoRA adapters on the frozen model of --load, all in one pipeline. Each "
        "is trained as in a separate run, in the idle time of the others. The YAML file lists them "
        "with name, data, batch, steps, learning_rate, rank, alpha and modules; a key that is left "
        "out has the value of its flag. Each is saved in a folder of --save, from which it goes on "
        "(default: none, and the model itself is trained)",
    )
    pipeline_adapter_steps: int | None = _setting(
        type=int,
        metavar="N",
        example="1f1b",
        help="with --pipeline-adapters: keep the pipeline filled for N steps of each adapter. "
        "A stage goes on with other adapters until an adapter's last step is done there. All are "
        "saved and evaluated when it is drained, after every N-th step (default: 1)",
    )
    pipeline_layer_layout: str | None = _setting(
        metavar={MEGATRON_LM: "auto|FILE", TRAINER: "LAYOUT"},
        help={
            MEGATRON_LM: "give the stages with the embedding and the output layer fewer layers, so "
            "that all stages take as long. auto: counted from the sizes of the model. FILE: by "
            "the times in a file that --pipeline-profile has written. To write the layers of each "
            "stage yourself, use Megatron's --pipeline-model-parallel-layout (default: equal "
            "numbers of layers)",
            TRAINER: "which layers each stage holds, as in Megatron-LM: "
            "'Ett|ttt|ttt|ttL' has four stages, embedding first, loss last; stages are written in "
            "the order in which a microbatch passes them. With a schedule also 'auto': fewer where "
            "embedding and output layer are, counted from the sizes of the model; or a file of "
            "--pipeline-profile: by the seconds measured there",
        },
    )
    pipeline_update_delay: int = _setting(
        0,
        type=int,
        choices=(0, 1),
        metavar="0|1",
        help="1: apply every update of the optimizer one step late, so that the pipeline is never "
        "drained. A step computes with the weights before the last update. This changes the "
        "training: read the page on late updates before. Every rank keeps a second copy of its "
        "weights, and a third with the distributed optimizer (default: 0)",
    )
    pipeline_update_feedback: str | None = _setting(
        choices=("on", "off"),
        help="with --pipeline-update-delay 1: add the difference of the last two updates to every "
        "update, which makes up for a part of what a late update loses (default: on with Muon, off "
        "with other optimizers and with a prediction)",
    )
    pipeline_update_prediction: str | None = _setting(
        choices=("linear", "momentum"),
        help="with --pipeline-update-delay 1: compute with predicted weights, which makes up for a "
        "part of what a late update loses, most with AdamW. 'linear' goes on along the last "
        "update, with any optimizer. 'momentum' goes along the momentum of SGD, Adam or AdamW. "
        "Every rank keeps a third copy of its weights (default: no prediction)",
    )
    enable_optimizer_post_validation: bool = _setting(
        False,
        action="store_true",
        example="v-zb",
        help="step the optimizer without waiting for the gradient norm of the whole pipeline. The "
        "norm is checked in the warm-up of the next iteration, and a step that was wrong is rolled "
        "back and repeated. Losses are the same; each line of the log comes one iteration later",
    )
    post_validation_snapshot: str = _setting(
        "device",
        example=None,
        choices=("device", "host"),
        help="where --enable-optimizer-post-validation keeps the copy that a rollback needs: on "
        "the GPU, or in the host's memory (default: device)",
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
        UsageError: it is none of the choices, no limit, no slices, or no share.
    """
    argument = _FIELDS[name].metadata
    if argument.get("type") == Limit.parse:
        try:
            return None if value is None else Limit.given(value)
        except (TypeError, argparse.ArgumentTypeError):
            example = "give a fraction of 1F1B's, such as 0.5, or bytes, such as 40GiB"
            raise UsageError(f"{name} is {value!r}: {example}") from None
    if argument.get("type") == parse_encoder:
        try:
            return None if value is None else parse_encoder(str(value))
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{name}: {error}") from None
    if argument.get("type") == parse_slices:
        return None if value is None else given_slices(value)
    allowed: tuple[str | None, ...] = choices or (*argument.get("choices", ()), None)
    if "choices" in argument and value not in allowed:
        words = " or ".join(each for each in allowed if each is not None)
        raise UsageError(f"{name} is '{value}': give {words}")
    return "auto" if argument.get("type") == permission and value == "on" else value


_RECOMPUTE_AND_OFFLOAD = ("pipeline_recompute", "pipeline_offload", "pipeline_host_limit")
_RUN_NAMES = (
    "pipeline_profile",
    "pipeline_verify",
    "pipeline_warm_up",
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
        "pipeline_encoder",
        "pipeline_adapters",
        "pipeline_adapter_steps",
        *_RUN_NAMES,
        "pipeline_update_delay",
        "pipeline_update_feedback",
        "pipeline_update_prediction",
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

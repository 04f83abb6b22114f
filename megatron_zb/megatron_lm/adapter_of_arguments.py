"""The adapter that Megatron-LM's arguments request, and the model and the batch in them.

A schedule is chosen before Megatron-LM validates its arguments, since what the schedule places is
validated as well. So sizes that Megatron-LM derives from other arguments are derived here.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.job.settings import (
    AUTO_LAYOUT,
    LAYOUT_FLAG,
    asks_for_balance,
    asks_for_layer_streams,
)
from megatron_zb.measured import balance
from megatron_zb.measured.counted_layers import attention_of
from megatron_zb.megatron_core import refusals, versions
from megatron_zb.megatron_core.adapter import Chunks, PipelineAdapter, build_adapter, copy_of
from megatron_zb.megatron_core.connections import group_options
from megatron_zb.megatron_core.current_schedule import JobSizes
from megatron_zb.megatron_core.placement import placed_letters
from megatron_zb.megatron_core.profiled_steps import iterations_left
from megatron_zb.megatron_core.refusals import OVERLAP, Asked
from megatron_zb.megatron_core.sliced_documents import ENDS, MASK
from megatron_zb.megatron_core.sliced_reading import ReadingArguments
from megatron_zb.megatron_core.slices import SlicesPart
from megatron_zb.megatron_core.versions import HYBRID_PATTERNS
from megatron_zb.megatron_lm.spread_encoder import second_model_of
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import catalog, layout
from megatron_zb.schedules.catalog import Build
from megatron_zb.schedules.features.adapters import Adapters
from megatron_zb.schedules.features.second_model import SecondModel, SecondRole
from megatron_zb.schedules.features.slices import KEPT
from megatron_zb.schedules.layout import (
    Layers,
    Letters,
    main_pattern,
    pattern_kinds,
    placed_pattern,
    predicting_parts,
)
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.step_plan import AttentionWork

DIVISION = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)
"""How Megatron-LM divides layers over ranks where no layout is given; a layout takes their place.
"""

_UNEQUAL_LAYERS = "heterogeneous_layers_config_path"
_NEW_PATTERN = HYBRID_PATTERNS[0]
_SEGMENTS = f"'|' in {flag_of(_NEW_PATTERN)}"


def adapter_of(
    args: argparse.Namespace,
    build: Build = catalog.build,
    steps_done: Callable[[], int] | None = None,
    series: tuple[int, int] | None = None,
    adapters: Adapters | None = None,
) -> PipelineAdapter:
    """Create the adapter that the parsed arguments request; they choose a schedule.

    Changes the arguments so that Megatron's own checks and its own placement of layers follow it.

    Args:
        build: builds schedules, such as on one rank for all.
        steps_done: returns the steps since the start of training; None asks Megatron-LM's loop.
        series: of Megatron-LM, such as (0, 19); None is the one installed.
        adapters: trainings that share the pipeline, if any.

    Raises:
        UsageError: the arguments cannot be combined, or the schedule cannot be built.
    """
    args.mtp_num_layers = layers_of(args).multi_token or args.mtp_num_layers
    _check_pattern(args, series)
    asked = asked_of(args, series)
    refusals.check(asked)
    options = group_options(
        args.nccl_communicator_config_path, args.high_priority_stream_groups or ()
    )
    sizes, chunks = _sizes(args), _chunks(args)
    if adapters is not None:
        sizes = replace(sizes, adapters=adapters, num_microbatches=adapters.num_units)
    if args.pipeline_schedule_file is None:  # whose stages are those of the file, unsearched
        _check_placements(sizes, asked.placements)
    adapter = build_adapter(args, sizes, chunks, build, options)
    keeps_places = adapter.placed.keeps_places or not _is_placed(args)
    draws = adapters is not None or asks_for_layer_streams(
        args.pipeline_random_streams, keeps_places
    )
    refusals.check(asked.known((adapter.schedule.placement.of_trained,), draws_by_layer=draws))
    if adapter.current.slicing is not None and steps_done is None:  # the data is Megatron-LM's
        part = adapter.part(SlicesPart)
        part.arguments, part.documents = BatchArguments(), _documents(args)
        # it is one of whole sequences
        args.create_attention_mask_in_dataloader = part.documents == MASK
    if draws:
        differ = args.data_parallel_random_init
        adapter.draw_by_layer(args.seed, steps_done or _steps_done, replicas_differ=differ)
    if steps_done is None:
        adapter.count_iterations(_iterations_left)
    if _is_placed(args) and not getattr(args, "decoder_num_layers", None):
        for name in DIVISION:
            setattr(args, name, False if isinstance(getattr(args, name, None), bool) else None)
        if _pattern(args) is None:
            args.pipeline_model_parallel_layout = str(adapter.layer_layout)
        else:
            _place_in_pattern(args, adapter.layer_layout.letters)
    return adapter


def asked_of(args: argparse.Namespace, series: tuple[int, int] | None = None) -> Asked:
    """Return the run that the arguments request, as far as it is known without a search.

    Raises:
        UsageError: there is no such schedule, no such file, or nothing to schedule.
    """
    written = args.pipeline_model_parallel_layout or segments(args)
    layers = None
    if not written:
        with suppress(UsageError):  # a missing number is reported when the layers are placed
            layers = num_layers(args)
    asked = refusals.of_arguments(args, chunks=_chunks(args).number, num_layers=layers)
    draws = bool(asked.placements) and all(
        asks_for_layer_streams(args.pipeline_random_streams, _keeps_places(args, placement))
        for placement in asked.placements
    )
    return replace(asked, series=series, draws_by_layer=draws)


def _keeps_places(args: argparse.Namespace, placement: Placement) -> bool:
    """Return whether every rank may hold the layers that it has in Megatron without a schedule."""
    if placement.chunks > 1 or not _is_placed(args):
        return not _is_placed(args)
    written = args.pipeline_model_parallel_layout or segments(args)
    if written or args.pipeline_layer_layout is not None:
        return True
    try:
        layers = layers_of(args)
        spread = layout.spread(layers, placement.of_one_copy)
        letters = layout.lettered(spread, layers.multi_token)
    except UsageError:  # building will report it
        return True
    return layout.is_megatrons(letters, layers, placement)


def without_bulk_overlap(args: argparse.Namespace, adapter: PipelineAdapter) -> list[str]:
    """Leave out the overlap of B's communication with its own weight gradient, which W computes.

    Returns:
        A line that says so, if the arguments requested it.
    """
    asked = getattr(args, "tp_comm_overlap", False) and getattr(args, "tp_comm_bulk_wgrad", False)
    if not (asked and adapter.current.splits_backward):
        return []
    args.tp_comm_bulk_wgrad = False
    return [
        "--disable-tp-comm-bulk-wgrad is set: weight gradients come later than the communication "
        "that they would overlap"
    ]


def prepare_overlap(args: argparse.Namespace) -> list[str]:
    """Leave out Megatron's own delay of weight gradients, which the schedule places.

    Returns:
        A line that says so, if the arguments requested it, and one about an environment in which
        the expert all-to-all does not run beside anything.
    """
    lines = []
    if getattr(args, "delay_wgrad_compute", False):
        args.delay_wgrad_compute = False
        lines.append("--delay-wgrad-compute is left out: the schedule places weight gradients")
    if getattr(args, OVERLAP, False) and os.environ.get(_CONNECTIONS) == "1":
        lines.append(f"{flag_of(OVERLAP)} hides nothing with {_CONNECTIONS}=1: export 32")
    return lines


_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def _steps_done() -> int:
    """Return the steps that Megatron-LM's training loop has completed before the next one."""
    return int(_running_args().curr_iteration)


def _running_args() -> Any:
    from megatron.training import get_args

    return get_args()


def _iterations_left() -> int | None:
    """Return the iterations that Megatron-LM's training loop has from the current one on."""
    args = _running_args()
    return iterations_left(_steps_done(), args.train_iters, args.exit_interval)


class BatchArguments(ReadingArguments):
    """The arguments by which the ``get_batch`` of Megatron-LM's scripts receives a batch."""

    def __init__(self) -> None:
        self._usual: dict[str, Any] = {}

    @contextmanager
    def of_batch(self, tokens: int, *, receives: bool) -> Iterator[None]:
        """Let ``get_batch`` send and receive what a batch has.

        A rank that has read the batch finds its length there, as the user's code does.
        """
        args = _running_args()
        changed: dict[str, Any] = {n: False for n in (_MASKED, *_PACKED) if hasattr(args, n)}
        if receives:
            changed["seq_length"] = tokens
        self._usual = {name: getattr(args, name) for name in changed}
        vars(args).update(changed)
        try:
            yield
        finally:
            self.restore()

    @contextmanager
    def of_user(self) -> Iterator[None]:
        args = _running_args()
        changed = {name: getattr(args, name) for name in self._usual}
        vars(args).update(self._usual)
        try:
            yield
        finally:
            vars(args).update(changed)

    def restore(self) -> None:
        usual, self._usual = self._usual, {}
        vars(_running_args()).update(usual)


_PACKED = ("sft", "dataloader_inter_document_masking")
_MASKED = "create_attention_mask_in_dataloader"


def _documents(args: argparse.Namespace) -> str:
    """Return what the data has of the documents in a sample, to which attention keeps."""
    if any(getattr(args, name, False) for name in _PACKED):
        return ENDS
    return MASK if args.reset_attention_mask and args.create_attention_mask_in_dataloader else ""


# --- model and batch


def _sizes(args: argparse.Namespace) -> JobSizes:
    """Return model and batch that the arguments request.

    Raises:
        UsageError: a size is missing or wrong.
    """
    pattern, ends, derived = _pattern(args) or "", None, with_derived(args)
    attention = attention_of(derived, pattern)
    if getattr(args, _UNEQUAL_LAYERS, None) is None:
        ends = balance.ends_of(derived, pattern)
    return JobSizes(
        pipeline_size=args.pipeline_model_parallel_size,
        num_microbatches=_num_microbatches(args),
        layers=layers_of(args),
        layer_layout=_layout(args),
        ends=ends,
        overlaps_all_to_all=bool(getattr(args, OVERLAP, False)),
        copy=copy_of(args),
        attention=attention,
        sequence=args.seq_length,
        spread=args.tensor_model_parallel_size * args.context_parallel_size,
        hidden=getattr(args, "hidden_size", None),
        kept=_kept_by_slices(args),
        second_model=_second_model(args, derived, attention),
    )


def _second_model(
    args: argparse.Namespace, derived: argparse.Namespace, attention: AttentionWork
) -> SecondModel | None:
    """Return the model that is to run beside the trained one, if any.

    Raises:
        UsageError: there are two, or a size is missing.
    """
    share = getattr(args, "teacher", None)  # of a program: a command line has no such model
    if share is None:
        return second_model_of(args, derived, attention)
    if args.pipeline_encoder is not None:
        raise UsageError("pipeline_encoder and teacher are two second models: leave one out")
    return SecondModel(SecondRole.TEACHER, forward=share)


def _check_placements(sizes: JobSizes, placements: Collection[Placement]) -> None:
    """Refuse layers that no placement can have, before a search.

    Raises:
        UsageError: why the first placement cannot.
    """
    problems: list[UsageError] = []
    for placement in placements:
        try:
            placed_letters(sizes, placement.of_one_copy)
        except UsageError as error:
            problems.append(error)
        else:
            return
    if problems:
        raise problems[0]


def _kept_by_slices(args: argparse.Namespace) -> float:
    """Return the share of the activations that keys and values take, fewer heads counted."""
    heads, groups = (
        getattr(args, name, None) for name in ("num_attention_heads", "num_query_groups")
    )
    if not (heads and groups and getattr(args, "group_query_attention", False)):
        return KEPT
    return KEPT * min(1.0, groups / heads)


def _num_microbatches(args: argparse.Namespace) -> int:
    """Count microbatches per iteration and data-parallel rank, once the batch is at full size."""
    model_parallel = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    if args.micro_batch_size is None:
        raise UsageError("--micro-batch-size is missing: a schedule is built for microbatches")
    replicas = max(args.world_size // model_parallel, 1)
    batch = args.micro_batch_size * replicas
    if args.global_batch_size is None:
        return 1
    return max(args.global_batch_size // batch, 1)


# --- layers


def layers_of(args: argparse.Namespace) -> Layers:
    """Return the layers that Megatron-LM's arguments ask to be placed."""
    pattern = _pattern(args) or ""
    return Layers(
        decoder=num_layers(args),
        multi_token=len(predicting_parts(pattern)) or args.mtp_num_layers or 0,
        embedding=int(args.account_for_embedding_in_pipeline_split),
        output=int(args.account_for_loss_in_pipeline_split),
        first=args.decoder_first_pipeline_num_layers,
        last=args.decoder_last_pipeline_num_layers,
        kinds=pattern_kinds(pattern),
    )


def num_layers(args: argparse.Namespace) -> int:
    """Return the number of layers that a schedule places.

    Raises:
        UsageError: no argument gives it.
    """
    pattern = _pattern(args)
    if pattern:
        return len(pattern_kinds(pattern))
    names = ("num_layers", "decoder_num_layers", "encoder_num_layers")
    number = next((n for name in names if (n := getattr(args, name, None)) is not None), None)
    if number is None:
        raise UsageError("--num-layers is missing: a schedule places layers on stages")
    return int(number)


def with_derived(args: argparse.Namespace) -> argparse.Namespace:
    """Return a copy of the arguments with sizes that stand for one another filled in."""
    filled = copy.copy(args)
    filled.num_layers = num_layers(args)
    if getattr(args, "seq_length", None) is None:
        filled.seq_length = getattr(args, "encoder_seq_length", None)
    hidden, gated = getattr(args, "hidden_size", None), getattr(args, "swiglu", False)
    if getattr(args, "ffn_hidden_size", None) is None and hidden is not None and gated:
        filled.ffn_hidden_size = int((4 * hidden * 2 / 3) / 64) * 64
    return filled


def _chunks(args: argparse.Namespace) -> Chunks:
    """Return the number of chunks per rank that the arguments request, and the flag that does.

    Raises:
        UsageError: layers cannot be divided so.
    """
    p, each = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return Chunks(args.num_virtual_stages_per_pipeline_rank)
    if each is not None:
        flag = "--num-layers-per-virtual-pipeline-stage"
        if each < 1:
            raise UsageError(f"{flag} is {each}: it must be 1 or greater")
        per_rank, rest = divmod(num_layers(args), max(p, 1))
        chunks, uneven = divmod(per_rank, each)
        if rest or uneven:
            raise UsageError(
                f"{flag} {each} does not divide the {num_layers(args)} layers of {p} pipeline "
                "ranks: give --num-virtual-stages-per-pipeline-rank instead"
            )
        return Chunks(chunks, flag)
    count = (segments(args) or "").count("|") + 1
    if count > 1 and count % max(p, 1) == 0:
        return Chunks(count // max(p, 1), _SEGMENTS)
    return Chunks()


def _layout(args: argparse.Namespace) -> str | balance.Ends | None:
    written, asked = args.pipeline_model_parallel_layout, args.pipeline_layer_layout
    segmented = segments(args)
    if segmented is not None:
        _check_alone(args, _SEGMENTS)
        written = segmented
    elif written is not None and _pattern(args) is not None:
        raise UsageError(
            "--pipeline-model-parallel-layout cannot tell the layers of a hybrid model apart: "
            "write '|' into its pattern, or leave it out"
        )
    if asked is None:
        return None if written is None else str(written)
    _check_balance(args, asked)
    return balance.of_arguments(asked, with_derived(args), _pattern(args) or "")


def _check_balance(args: argparse.Namespace, asked: str) -> None:
    if not asks_for_balance(asked):
        raise UsageError(
            f"{LAYOUT_FLAG} is '{asked}': give {AUTO_LAYOUT} or a .yaml file of "
            "--pipeline-profile, or write the layers with --pipeline-model-parallel-layout"
        )
    if not _is_placed(args):
        raise UsageError(
            f"{LAYOUT_FLAG} {asked} cannot place the layers of this model, which Megatron-LM "
            "places itself: leave it out"
        )
    _check_alone(args, f"{LAYOUT_FLAG} {asked}")


def _check_alone(args: argparse.Namespace, asked: str) -> None:
    for name in ("pipeline_model_parallel_layout", "pipeline_layer_layout", *DIVISION[:4]):
        if getattr(args, name) and not asked.startswith(flag_of(name)):
            raise UsageError(
                f"{asked} and {flag_of(name)} both say which layers a stage has: leave one out"
            )


def _is_placed(args: argparse.Namespace) -> bool:
    """Return whether layers are placed by the schedule, not by Megatron's own rules."""
    if _pattern(args) is None:
        return getattr(args, _UNEQUAL_LAYERS, None) is None
    return _says_chunks(args)


# --- the pattern of a hybrid model


def _check_pattern(args: argparse.Namespace, series: tuple[int, int] | None) -> None:
    """Refuse a pattern that Megatron-LM would not take, before a search.

    Raises:
        UsageError: a letter is unknown, or what is wrong by Megatron's own reading.
    """
    pattern = _pattern(args)
    if pattern is None:
        return
    named = f"hybrid layer pattern '{pattern}'"
    letters = versions.hybrid_letters(series)
    unknown = [each for each in pattern if each not in {*letters, *layout.SEPARATORS}]
    if letters and unknown:
        raise UsageError(
            f"{named}: no kind of layer is written '{unknown[0]}': use {', '.join(letters)}, '|' "
            "between stages and '/' before layers of multi-token prediction"
        )
    if len(set(predicting_parts(pattern))) > 1:
        raise UsageError(f"{named}: write the same layers after each '/'")
    if "*" in pattern and set(pattern) & set("+D"):
        raise UsageError(
            f"{named}: * cannot be in a model with + or D: use one of them for all its attention"
        )
    layers, p = len(pattern_kinds(pattern)), args.pipeline_model_parallel_size
    if not _says_chunks(args) and layers % max(p, 1):
        raise UsageError(
            f"{named}: this Megatron-LM gives as many layers to each pipeline rank, and {p} ranks "
            f"do not divide its {layers}: add or remove layers"
        )


def _pattern(args: argparse.Namespace) -> str | None:
    """Return the pattern, under the name of any version."""
    return next(filter(None, (getattr(args, name, None) for name in HYBRID_PATTERNS)), None)


def _says_chunks(args: argparse.Namespace) -> bool:
    """Return whether there is a pattern that can hold the layers of every chunk."""
    return hasattr(args, _NEW_PATTERN) and _pattern(args) is not None


def segments(args: argparse.Namespace) -> str | None:
    """Return the main part of the pattern if it has the layers of each stage."""
    written = main_pattern(_pattern(args) or "")
    return written if "|" in written else None


def _place_in_pattern(args: argparse.Namespace, letters: Letters) -> None:
    """Write the layers of each stage into the pattern of the arguments."""
    written = placed_pattern(_pattern(args) or "", (stage.count("t") for stage in letters))
    for name in HYBRID_PATTERNS:
        setattr(args, name, None)
    setattr(args, _NEW_PATTERN, written)

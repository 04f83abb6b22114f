"""Conversion of the command line into a job: files, sizes and allowed choices.

After ``--``, the arguments of a training give the model and the sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron_zb.errors import UsageError
from megatron_zb.measured.config import path_of
from megatron_zb.parsing import flag_of, size_in_bytes
from megatron_zb.plan.device import DeviceConfig, read_device
from megatron_zb.plan.features.catalog import FEATURES
from megatron_zb.plan.given_run import GivenRun
from megatron_zb.plan.model import ModelConfig, read_model
from megatron_zb.plan.model_flags import written_pattern
from megatron_zb.plan.operators import RECOMPUTE_FLAG, check_recomputation
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.slices import with_slices
from megatron_zb.plan.strategy import (
    Choices,
    ScheduleCandidate,
    candidates_of,
    names_in,
)
from megatron_zb.plan.unequal import SequenceLengths
from megatron_zb.schedules.features.slices import LEAST_TOKENS, MOST_SLICES, least_tokens
from megatron_zb.schedules.layout import main_pattern

_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "micro_batch_size": "micro_batch_size",
    "slices": "pipeline_slices",
}
_OF_EXPERTS = {
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}
_OF_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_CHOICES = {"micro_batch_size": "microbatch"}
"""Names in :class:`Choices` that are not those of plan's arguments."""


class Training(NamedTuple):
    """The arguments of a training: their model, and the sizes that they give.

    ``sizes`` and the ``flags`` that give them are by the names of plan's arguments. What the
    arguments leave out is left to the plan.
    """

    args: argparse.Namespace
    model: ModelConfig
    sizes: dict[str, str]
    flags: dict[str, str]


def read_training(words: Sequence[str], *, sliced: bool = False) -> Training:
    """Read the arguments of a training.

    Raises:
        UsageError: an argument is unknown or wrong, or the planner cannot count it; with slices,
            one of them does not go with those.
    """
    from megatron_zb.cli.check import installed_series
    from megatron_zb.errors import raise_first
    from megatron_zb.job import settings
    from megatron_zb.megatron_core.refusals import Asked, refusals
    from megatron_zb.megatron_lm import argument_table
    from megatron_zb.plan.model_flags import model_of

    parser = settings.add_megatron_lm_arguments(argument_table.parser_of(installed_series()))
    args = parser.parse_args(list(words))
    if sliced or args.pipeline_slices is not None:
        asked = Asked(args=args, choice="", facts={"pipeline_slices": True})
        raise_first(refusals(asked, only=("slices",)))
    model = model_of(args)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given = parser.parse_args(list(words))  # only what the words give, also where it is a default
    sizes, flags = _sizes(given, has_experts=model.experts is not None)
    return Training(args, model, sizes, flags)


def _sizes(
    given: argparse.Namespace, *, has_experts: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the sizes that arguments give, and the flags that give them."""
    names = {**_SIZES, **(_OF_EXPERTS if has_experts else {})}
    slicing = getattr(given, "pipeline_slices", None)
    if slicing is not None and str(slicing) != str(slicing.slices):
        raise UsageError(
            f"--pipeline-slices {slicing}: slices of a plan have equal lengths: give their number"
        )
    names = {name: of for name, of in names.items() if hasattr(given, of)}
    out = {name: str(getattr(given, of)) for name, of in names.items()}
    flags = {name: flag_of(of) for name, of in names.items()}
    granularity = getattr(given, "recompute_granularity", None)
    if granularity is not None or hasattr(given, "recompute_activations"):
        modules = getattr(given, "recompute_modules", None) if granularity == "selective" else None
        out["recompute"] = "+".join(modules) if modules else granularity or "selective"
        of = "recompute_granularity" if granularity else "recompute_activations"
        flags["recompute"] = flag_of("recompute_modules" if modules else of)
    if hasattr(given, "fp8"):
        out["precision"], flags["precision"] = "fp8", "--fp8-format"
    return out, flags


_MOST_GPUS = 65_536
_USUAL_DEVICE = Path("a100_80gb_sxm")


def read(arguments: argparse.Namespace) -> tuple[PlanJob, list[ScheduleCandidate]]:
    """Read the files and check the sizes.

    Raises:
        UsageError: a file, a field or an argument is wrong.
    """
    training = _training(arguments)
    model = _model(arguments).as_transformer if training is None else _planned(training)
    flags = {} if training is None else _take_sizes(arguments, training)
    asked = _USUAL_DEVICE if arguments.device is None else arguments.device
    device = read_device(path_of("--device", "devices", asked))
    if arguments.gpu_memory is not None:
        device = device.with_memory(size_in_bytes(arguments.gpu_memory, "--gpu-memory"))
    job = PlanJob(
        model=model,
        device=device,
        gpus=_whole("--gpus", arguments.gpus, 64, _MOST_GPUS),
        memory=device.memory_bytes,
        global_batch=_whole(
            "--global-batch-size",
            model.global_batch_size
            if arguments.global_batch_size is None
            else arguments.global_batch_size,
            512,
        ),
        sequence=_whole(
            "--seq-length",
            model.sequence_length if arguments.seq_length is None else arguments.seq_length,
            4096,
        ),
        choices=_choices(arguments, model, device, flags),
        post_validation=arguments.post_validation,
        snapshot=arguments.snapshot,
        features=tuple(feature.asked(arguments, device) for feature in FEATURES),
        frozen=arguments.lora is not None,
    )
    if training is not None:
        job = _with_given(job, training)
    _whole("--tries", arguments.tries, 3)
    _whole("--top", arguments.top, 8)
    names = None if arguments.schedules is None else names_in(arguments.schedules)
    found = candidates_of(names, overlap=not arguments.no_overlap_p2p)
    return job, with_slices(found, job.choices.slices, named=names is not None)


def lengths(arguments: argparse.Namespace, job: PlanJob) -> SequenceLengths | None:
    """Return the lengths of sequences, if they are requested.

    Raises:
        UsageError: they cannot be read, or a microbatch would have several samples.
    """
    if arguments.lengths is None:
        if arguments.packing is not None:
            raise UsageError("--packing needs --lengths, such as --lengths lognormal:4096:0.9")
        return None
    if job.has_slices:
        raise UsageError(
            f"--slices {arguments.slices} cannot be combined with --lengths: slices are of samples "
            "of one length: leave one out"
        )
    if arguments.micro_batch_size not in (None, "1"):
        raise UsageError(
            f"--micro-batch-size {arguments.micro_batch_size} cannot be combined with --lengths, "
            "where a microbatch is one sequence or one pack: leave it out"
        )
    packs = arguments.packing == "first-fit"
    return SequenceLengths.read(arguments.lengths, job.sequence, packs=packs)


_OF_CONFIG = (
    "config",
    "gpus",
    "device",
    "gpu_memory",
    "global_batch_size",
    "seq_length",
    "lengths",
    "packing",
    "lora",
    "tensor",
    "pipeline",
    "micro_batch_size",
    "recompute",
    "context",
    "expert",
    "expert_tensor",
    "precision",
    "pipeline_recompute",
    "pipeline_offload",
    "slices",
    "slice_tokens",
)


def check_only_measured(arguments: argparse.Namespace) -> None:
    """Reject flags beside ``--profile`` for what the measured run has already decided.

    Raises:
        UsageError: names the flag.
    """
    if arguments.words:
        raise UsageError(
            f"the arguments of a training, {arguments.words[0]} first, cannot be combined with "
            "--profile: the run that was measured has decided them"
        )
    for name in _OF_CONFIG:
        if getattr(arguments, name) is not None:
            raise UsageError(
                f"{flag_of(name)} cannot be combined with --profile: the run that was "
                "measured has decided it"
            )
    if arguments.chart:
        raise UsageError("--chart needs --config: a profile lacks the memory of a GPU")
    _whole("--top", arguments.top, 8)


def _model(arguments: argparse.Namespace) -> ModelConfig:
    return read_model(path_of("--config", "models", arguments.config))


def _training(arguments: argparse.Namespace) -> Training | None:
    """Return the training whose arguments are given in place of a model."""
    _check_given(arguments)
    if not arguments.words:
        return None
    if arguments.config is not None:
        raise UsageError(
            f"--config and the arguments of a training, {arguments.words[0]} first, both describe "
            "a model: leave one out"
        )
    return read_training(arguments.words, sliced=arguments.slices not in (None, "1"))


def _take_sizes(arguments: argparse.Namespace, training: Training) -> dict[str, str]:
    """Let sizes of a training become those of the plan; return the flags that gave them."""
    taken = [name for name in training.sizes if getattr(arguments, name) is None]
    for name in taken:
        setattr(arguments, name, training.sizes[name])
    return {name: training.flags[name] for name in taken}


def _planned(training: Training) -> ModelConfig:
    """Return the model of a training; a pattern's transformer where no stage cuts a layer of it."""
    args, model = training.args, training.model
    segments = main_pattern(written_pattern(args) or "").split("|")
    of_stages, p = [*map(len, segments)], args.pipeline_model_parallel_size
    if len(segments) == 1:
        of_stages = [*divmod(model.layers, p)]
    else:
        _check_segments(segments, p)
    of_stages += [getattr(args, name) or 0 for name in _OF_ENDS]
    return model if any(letters % 2 for letters in of_stages) else model.as_transformer


def _check_segments(segments: Sequence[str], pipeline_size: int) -> None:
    named = f"--hybrid-layer-pattern '{'|'.join(segments)}'"
    if len(segments) % pipeline_size:
        raise UsageError(
            f"{named} has {len(segments)} stages, which --pipeline-model-parallel-size "
            f"{pipeline_size} does not divide: write as many for each rank, or leave out '|'"
        )
    if not all(segments[1:-1]):
        raise UsageError(
            f"{named}: stage {segments.index('', 1)} of 0 to {len(segments) - 1} has no layers: "
            "give it one, since only the first and the last can be empty"
        )


def _with_given(job: PlanJob, training: Training) -> PlanJob:
    """Add the run of a training's arguments to a job, or why there is none."""
    flags = {_CHOICES.get(n, n): flag_of(of) for n, of in {**_SIZES, **_OF_EXPERTS}.items()}
    choices = replace(
        job.choices,
        recompute=(training.sizes.get("recompute", "none"),),
        precision=training.sizes.get("precision", "bf16"),
        flags={**flags, **training.flags},
    )
    sizes = job.gpus, job.global_batch
    try:
        given = GivenRun.of(training.args, job.model, job.device, sizes, choices)
    except UsageError as error:
        return replace(job, why_not_given=str(error))
    return replace(job, given=given)


def _check_given(arguments: argparse.Namespace) -> None:
    for name, example in (("config", "gpt_28b"), ("gpus", "64")):
        if getattr(arguments, name) is None and not (name == "config" and arguments.words):
            raise UsageError(f"--{name} is missing: give, for example, --{name} {example}")
    for name in ("microbatches", "memory_limit"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"{flag_of(name)} needs --profile")
    if arguments.chart and arguments.format == "json":
        raise UsageError("--chart cannot be combined with --format json: leave one of them out")


def _whole(flag: str, value: int, example: int, most: int = 10_000_000) -> int:
    if not 1 <= value <= most:
        raise UsageError(
            f"{flag} {value} is not between 1 and {most}: give, for example, {flag} {example}"
        )
    return value


def _check_precision(precision: str, device: DeviceConfig, flag: str | None) -> str:
    if precision == "fp8" and device.fp8_products is None:
        instead = f"leave {flag} out" if flag else "give --precision bf16"
        raise UsageError(
            f"{flag or '--precision fp8'}: the description of {device.name} has no fp8_products: "
            f"{instead}, or give a device that has them, such as --device h100_sxm"
        )
    return precision


def _check_experts(arguments: argparse.Namespace, model: ModelConfig) -> None:
    for name in ("expert", "expert_tensor"):
        if getattr(arguments, name) is not None and model.experts is None:
            raise UsageError(
                f"{flag_of(name)} is for a mixture of experts, and {model.name} has no "
                "experts: leave it out"
            )


def _choices(
    arguments: argparse.Namespace, model: ModelConfig, device: DeviceConfig, flags: dict[str, str]
) -> Choices:
    """Return the choices; ``flags`` are the arguments of a training that gave some of them."""
    _check_experts(arguments, model)
    recompute = None
    if arguments.recompute is not None:
        recompute = tuple(part.strip() for part in arguments.recompute.split(","))
        for kind in recompute:
            check_recomputation(model, kind, flags.get("recompute", RECOMPUTE_FLAG))

    def numbers(name: str) -> tuple[int, ...] | None:
        return _numbers(flags.get(name, flag_of(name)), getattr(arguments, name))

    precision = arguments.precision or "bf16"
    return Choices(
        tensor=numbers("tensor"),
        pipeline=numbers("pipeline"),
        microbatch=numbers("micro_batch_size"),
        recompute=recompute,
        context=numbers("context"),
        expert=numbers("expert"),
        expert_tensor=numbers("expert_tensor"),
        precision=_check_precision(precision, device, flags.get("precision")),
        slices=_slices(arguments.slices),
        slice_tokens=least_tokens(model.hidden_size)
        if arguments.slice_tokens is None
        else _whole("--slice-tokens", arguments.slice_tokens, LEAST_TOKENS),
        overlap=not arguments.no_overlap_data_parallel,
        flags={_CHOICES.get(name, name): flag for name, flag in flags.items()},
    )


def _slices(text: str | None) -> tuple[int, ...]:
    if text == "auto":
        return tuple(2**power for power in range(MOST_SLICES.bit_length()))
    return _numbers("--slices", text) or (1,)


def _numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isascii() and p.isdecimal() and 0 < len(p) < 8 and int(p) > 0 for p in parts):
        raise UsageError(f"{flag} '{text}' is no list of sizes: give, for example, {flag} 2,4")
    return tuple(sorted({int(part) for part in parts}))

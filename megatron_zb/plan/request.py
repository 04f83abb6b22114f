"""Conversion of the command line into a job: files, sizes and allowed choices.

After ``--``, the arguments of a training give the model and the sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from megatron_zb.errors import UsageError
from megatron_zb.measured.config import path_of
from megatron_zb.parsing import flag_of, size_in_bytes
from megatron_zb.plan.arguments import numbers, whole_number
from megatron_zb.plan.device import DeviceConfig, read_device
from megatron_zb.plan.features.catalog import FEATURES
from megatron_zb.plan.features.feature import Described
from megatron_zb.plan.given_run import GivenRun
from megatron_zb.plan.model import ModelConfig, read_model
from megatron_zb.plan.model_flags import written_pattern
from megatron_zb.plan.operators import RECOMPUTE_FLAG, check_recomputation
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.strategy import (
    Choices,
    ScheduleCandidate,
    candidates_of,
    names_in,
)
from megatron_zb.schedules.layout import main_pattern

_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "micro_batch_size": "micro_batch_size",
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


Reader: TypeAlias = Callable[[argparse.Namespace], Mapping[str, tuple[str, str]]]
"""Returns what arguments of a training give for those of a plan, each with the training's flag."""


def read_training(
    words: Sequence[str],
    arguments: argparse.Namespace | None = None,
    readers: Sequence[Reader] = (),
) -> Training:
    """Read the arguments of a training, beside those of a plan.

    ``readers`` are for what no feature of the search reads.

    Raises:
        UsageError: an argument is unknown or wrong, the planner cannot count it, or it does not go
            with a feature.
    """
    from megatron_zb.cli.check import installed_series
    from megatron_zb.job import settings
    from megatron_zb.megatron_lm import argument_table
    from megatron_zb.plan.model_flags import model_of

    parser = settings.add_megatron_lm_arguments(argument_table.parser_of(installed_series()))
    args = parser.parse_args(list(words))
    for feature in FEATURES:
        feature.check_training(args, arguments)
    model = model_of(args)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    given = parser.parse_args(list(words))  # only what the words give, also where it is a default
    sizes, flags = _sizes(given, has_experts=model.experts is not None)
    for reader in readers:
        for name, (value, flag) in reader(args).items():
            sizes[name], flags[name] = value, flag
    return Training(args, model, sizes, flags)


def _sizes(
    given: argparse.Namespace, *, has_experts: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the sizes that arguments give, and the flags that give them."""
    names = {**_SIZES, **(_OF_EXPERTS if has_experts else {})}
    of_features = {name: of for it in FEATURES for name, of in it.read(given).items()}
    names = {name: of for name, of in names.items() if hasattr(given, of)}
    out = {name: str(getattr(given, of)) for name, of in names.items()}
    flags = {name: flag_of(of) for name, of in names.items()}
    out |= {name: value for name, (value, _) in of_features.items()}
    flags |= {name: flag for name, (_, flag) in of_features.items()}
    if hasattr(given, "fp8"):
        out["precision"], flags["precision"] = "fp8", "--fp8-format"
    return out, flags


_MOST_GPUS = 65_536
_USUAL_DEVICE = Path("a100_80gb_sxm")


def read(
    arguments: argparse.Namespace, readers: Sequence[Reader] = ()
) -> tuple[PlanJob, list[ScheduleCandidate]]:
    """Read the files and check the sizes; ``readers`` are as in :func:`read_training`.

    Raises:
        UsageError: a file, a field or an argument is wrong.
    """
    training = _training(arguments, readers)
    model = _model(arguments).as_transformer if training is None else _planned(training)
    flags = {} if training is None else _take_sizes(arguments, training)
    asked = _USUAL_DEVICE if arguments.device is None else arguments.device
    device = read_device(path_of("--device", "devices", asked))
    if arguments.gpu_memory is not None:
        device = device.with_memory(size_in_bytes(arguments.gpu_memory, "--gpu-memory"))
    job = PlanJob(
        model=model,
        device=device,
        gpus=whole_number("--gpus", arguments.gpus, 64, _MOST_GPUS),
        memory=device.memory_bytes,
        global_batch=whole_number(
            "--global-batch-size",
            model.global_batch_size
            if arguments.global_batch_size is None
            else arguments.global_batch_size,
            512,
        ),
        sequence=whole_number(
            "--seq-length",
            model.sequence_length if arguments.seq_length is None else arguments.seq_length,
            4096,
        ),
        choices=_choices(arguments, model, device, flags),
        post_validation=arguments.post_validation,
        snapshot=arguments.snapshot,
        features=tuple(it.asked(arguments, Described(model, device, flags)) for it in FEATURES),
        frozen=arguments.lora is not None,
    )
    if training is not None:
        job = _with_given(job, training)
    whole_number("--tries", arguments.tries, 3)
    whole_number("--top", arguments.top, 8)
    names = None if arguments.schedules is None else names_in(arguments.schedules)
    found = candidates_of(names, overlap=not arguments.no_overlap_p2p)
    for feature in job.features:
        found = feature.candidates(found, named=names is not None)
    return job, found


_OF_CONFIG = (
    "config",
    "gpus",
    "device",
    "gpu_memory",
    "global_batch_size",
    "seq_length",
    "lengths",
    "packing",
    "adapters",
    "late_updates",
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
    whole_number("--top", arguments.top, 8)


def _model(arguments: argparse.Namespace) -> ModelConfig:
    return read_model(path_of("--config", "models", arguments.config))


def _training(arguments: argparse.Namespace, readers: Sequence[Reader]) -> Training | None:
    """Return the training whose arguments are given in place of a model."""
    _check_given(arguments)
    if not arguments.words:
        return None
    if arguments.config is not None:
        raise UsageError(
            f"--config and the arguments of a training, {arguments.words[0]} first, both describe "
            "a model: leave one out"
        )
    return read_training(arguments.words, arguments, readers)


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

    def sizes(name: str) -> tuple[int, ...] | None:
        return numbers(flags.get(name, flag_of(name)), getattr(arguments, name))

    precision = arguments.precision or "bf16"
    return Choices(
        tensor=sizes("tensor"),
        pipeline=sizes("pipeline"),
        microbatch=sizes("micro_batch_size"),
        recompute=recompute,
        context=sizes("context"),
        expert=sizes("expert"),
        expert_tensor=sizes("expert_tensor"),
        precision=_check_precision(precision, device, flags.get("precision")),
        overlap=not arguments.no_overlap_data_parallel,
        flags={_CHOICES.get(name, name): flag for name, flag in flags.items()},
    )

"""The settings of a schedule as an object that travels to the processes of a job.

Importing this file imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields
from typing import Any

from megatron_zb.errors import UsageError
from megatron_zb.job import settings
from megatron_zb.job.settings import ScheduleSettings
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import catalog

# What a program sets in its own way, or what only a command line has.
_ELSEWHERE = (
    "enable_optimizer_post_validation",
    "pipeline_allow_other_data",
    "pipeline_schedule_cache",
    "pipeline_update_delay",
    "pipeline_update_feedback",
    "pipeline_update_prediction",
    "post_validation_snapshot",
)


@dataclass(frozen=True, kw_only=True)
class Settings(ScheduleSettings):
    """The settings of a schedule, by the names of the command line's flags.

    They can be pickled, and hold nothing of torch or Megatron. What is None is taken from the
    model's config, where that knows it.

    Args:
        num_microbatches: of a usual step; others may have more or fewer.
        pipeline_schedule: one of ``schedules.names()``.
        pipeline_schedule_file: a table of ``megatron-zb export`` instead.
        pipeline_memory_limit: the most activation memory of any rank, as a fraction of 1F1B's, or
            in bytes, such as ``40GiB``, with a file of a profile as ``pipeline_layer_layout``.
        pipeline_placement: ``loop`` or ``zigzag``, for ``auto``.
        num_virtual_stages_per_pipeline_rank: chunks, where the schedule has the choice.
        microbatch_group_size_per_vp_stage: of schedules that take a group size.
        pipeline_model_parallel_layout: layers of every stage in model order, ``Ett|tt|tt|ttL``.
        pipeline_slices: token slices of every microbatch, a number or ``auto``. The trainer's data
            are then dictionaries of tensors with the sequence as an axis. Attention keeps to the
            documents of packed samples, whose ends (``cu_seqlens``) the first stage reads.
        pipeline_layer_layout: ``auto`` or a file of ``--pipeline-profile`` balances them.
        pipeline_vocabulary: ``on`` shards output layer and embedding over the pipeline ranks of one
            model, which is then called only with labels; ``auto`` where that is faster.
        pipeline_recompute: ``auto`` may recompute activations to keep the limit.
        pipeline_offload: ``auto`` may offload activations to the host to keep the limit.
        pipeline_host_limit: the most memory of the host for the activations of any rank, alike.
        pipeline_encoder: the forward of the model's encoder as a share of the language model's; it
            then runs on every rank, and not in the first stage alone.
        teacher: the forward of a frozen model beside training, as a share of that of the trained
            model. The model is given to ``teach_with`` once it is built.
        pipeline_random_streams: ``rank``, or ``layer`` with a ``seed``.
        seed: of the streams of the layers.
        pipeline_verify: compare the first step's gradients with those of an unsplit backward.
        pipeline_warm_up: ``on`` or ``off``; None runs first passes on all stages at once on GPUs.
        pipeline_profile: measure the first steps and write this file for ``megatron-zb plan``.
            Steps planned later count what attention was measured to take.
        pipeline_replan_every: steps after which the schedule is built anew for measured costs.
        pipeline_timeout: seconds without progress in a step after which the job is ended; 0 never.
        nccl_communicator_config_path, high_priority_stream_groups: as for Megatron-LM.

    Raises:
        UsageError: something is missing, unknown, or given twice.
    """

    num_microbatches: int
    pipeline_random_streams: str | None = "rank"
    pipeline_timeout: float | None = 0.0
    teacher: float | None = None

    def __post_init__(self) -> None:
        if (self.pipeline_schedule is None) is (self.pipeline_schedule_file is None):
            raise UsageError(
                "give one of pipeline_schedule and pipeline_schedule_file: a name, such as v-half, "
                "or a table"
            )
        if self.pipeline_schedule is not None:
            catalog.family_of_one_copy(self.pipeline_schedule)
        if self.num_microbatches < 1:
            raise UsageError(f"num_microbatches is {self.num_microbatches}: it must be 1 or more")
        if self.teacher is not None and not 0 < self.teacher < math.inf:
            raise UsageError(f"teacher is {self.teacher}: give the share of a forward, such as 0.5")
        for each in fields(ScheduleSettings):
            if each.name in _ELSEWHERE and getattr(self, each.name) != each.default:
                raise UsageError(f"{each.name} is a setting of command lines: leave it out")
        settings.parsed("pipeline_random_streams", self.pipeline_random_streams, ("rank", "layer"))
        super().__post_init__()

    def as_arguments(self, model: Any, **known: Any) -> argparse.Namespace:
        """Return the arguments that Megatron-LM would have for these settings and a model.

        Args:
            model: as for :func:`megatron_zb.bridge.install`.
            known: arguments that take the place of the model's attributes.

        Raises:
            UsageError: the model does not know its sizes, or chooses a schedule itself.
        """
        given = {**vars(model), **known}
        for name in _SIZES:
            if given.get(name) is None:
                raise UsageError(f"{name} is missing in the {type(model).__name__} of the model")
        for name in ("pipeline_schedule", "pipeline_schedule_file"):
            if given.get(name) is not None:
                raise UsageError(
                    f"{flag_of(name)} {given[name]} is among the arguments, but what was planned "
                    "for it stays in the process that has checked them: leave it out, and give it "
                    "to the settings"
                )
        values = {name: getattr(self, name) for name in _NAMES}
        chosen = {name: value for name, value in values.items() if value is not None}
        args = argparse.Namespace(**{**_DEFAULTS, **_of_config(given), **given, **chosen})
        # a config has a default of its own here, which nobody has chosen
        args.microbatch_group_size_per_vp_stage = self.microbatch_group_size_per_vp_stage
        if self.pipeline_random_streams == "layer" and args.seed is None:
            raise UsageError("pipeline_random_streams is 'layer': give a seed, too")
        _set_batch(args, self.num_microbatches)
        return args

    def as_values(self) -> dict[str, Any]:
        """Return the settings by the names that messages use."""
        return {flag_of(name): getattr(self, name) for name in _NAMES}


_NAMES = tuple(each.name for each in fields(Settings) if each.name not in _ELSEWHERE)
_SIZES = ("num_layers", "pipeline_model_parallel_size")

# What Megatron-LM's arguments have where neither the settings nor the model say anything.
_DEFAULTS = {each.name: each.default for each in fields(ScheduleSettings)} | {
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "context_parallel_size": 1,
    "data_parallel_random_init": False,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "distributed_timeout_minutes": 10,
    "mtp_num_layers": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "seq_length": None,
    "tensor_model_parallel_size": 1,
}


# Arguments of Megatron-LM that Megatron's config has under other names.
_NAMES_OF_CONFIG = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "num_experts": "num_moe_experts",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "swiglu": "gated_linear_unit",
}


def _of_config(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a config has under other names."""
    found = {name: given.get(other) for name, other in _NAMES_OF_CONFIG.items()}
    return found | {"group_query_attention": given.get("num_query_groups") is not None}


def _set_batch(args: argparse.Namespace, num_microbatches: int) -> None:
    """Set a batch that makes a number of microbatches, since trainers have other words for it."""
    ranks = args.tensor_model_parallel_size * args.context_parallel_size
    ranks *= args.pipeline_model_parallel_size
    args.world_size = getattr(args, "world_size", None) or ranks
    args.micro_batch_size = 1
    args.global_batch_size = num_microbatches * max(args.world_size // ranks, 1)

"""Arguments of Megatron-LM that no schedule here, or no V, can be combined with.

Each is refused at start-up, with the two flags and what to do: none is silently wrong.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from megatron_zb.errors import Refusal, UsageError, raise_first
from megatron_zb.job import run_flags
from megatron_zb.job.run_flags import OFFLOAD_FLAG, RECOMPUTE_FLAG, STREAMS_FLAG, VERIFY_FLAG
from megatron_zb.megatron_core import graphs, versions
from megatron_zb.megatron_core.forward_backward import NOT_SERVED, WHY_NOT_SHARDED
from megatron_zb.megatron_core.model_ends import language_model, why_not_placed
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.post_validation import NOT_TAKEN_BACK
from megatron_zb.megatron_core.transformer_engine import (
    OP_FUSER_FLAG,
    WHY_NOT_OPERATIONS,
    WHY_NOT_ZERO_COPY,
    ZERO_COPY_FLAG,
)
from megatron_zb.megatron_core.vocabulary_choice import why_rows_stay
from megatron_zb.megatron_lm import flags
from megatron_zb.parsing import flag_of
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.schedule import Schedule


class Concerned(Enum):
    """The schedules that something cannot be combined with, by their placement."""

    ALL = "any schedule"
    ONE_CHUNK = "one chunk per rank"
    INNER_STAGES = "more than two stages"
    CHUNKS = "several chunks per rank"
    V = "a V"
    SPLIT = "a split backward"

    def holds(self, placement: Placement, splits: bool) -> bool:
        if self is Concerned.SPLIT:
            return splits
        if self is Concerned.V:
            return PhysicalPlacement(placement).mirrored
        if self is Concerned.INNER_STAGES:
            return placement.num_stages > 2
        if self is Concerned.ALL:
            return True
        return (placement.chunks > 1) is (self is Concerned.CHUNKS)


@dataclass(frozen=True)
class Conflict:
    """A conflict of an argument whose value ``applies`` to; absent arguments do not conflict.

    Nor does a value that is not above that of the argument ``above``, where there is one.
    Where there are arguments ``only_with``, it conflicts if one of them is given; where there is
    one ``unless``, if it is not.
    ``last`` is the last series of Megatron-LM with the conflict, if a later one has none.
    """

    argument: str
    flag: str
    why: str
    applies: Callable[[Any], bool] = bool
    concerned: Concerned = Concerned.ALL
    above: str | None = None
    only_with: tuple[str, ...] = ()
    unless: str | None = None
    last: tuple[int, int] | None = None

    def is_in(self, series: tuple[int, int] | None) -> bool:
        """Return whether a series of Megatron-LM has the conflict, None for the one installed."""
        return self.last is None or (series or versions.core_series()) <= self.last


# Those settings of Megatron's config that its command line knows.
_NOT_SERVED_FLAGS = (
    "overlap_dispatch_backward_with_experts_wgrad",
    "defer_embedding_wgrad_compute",
    "fine_grained_activation_offloading",
)


def _without_hybrid_batches(argument: str) -> Conflict:
    return Conflict(
        argument,
        flag_of(argument),
        "scripts of hybrid models read batches on inner stages only since Megatron-LM 0.18; leave "
        "it out, or use a newer one",
        concerned=Concerned.INNER_STAGES,
        only_with=versions.HYBRID_PATTERNS,
        last=versions.WITHOUT_HYBRID_BATCHES,
    )


def _not_served(setting: str) -> Conflict:
    return Conflict(setting, flag_of(setting), NOT_SERVED[setting])


OVERLAP = "overlap_moe_expert_parallel_comm"
OVERLAP_FLAG = flag_of(OVERLAP)

_DIVIDED = "with --decoder-num-layers, Megatron-LM compares a layout with the encoder's layers"
_LOGITS = "in another order, samples have not been shown to meet their own logits"
WITH_THE_STEP = "overlap_param_gather_with_optimizer_step"

CONFLICTS = (
    *map(_not_served, _NOT_SERVED_FLAGS),
    Conflict(
        OVERLAP,
        OVERLAP_FLAG,
        "overlapped passes need several chunks per rank; use a schedule such as v-half",
        concerned=Concerned.ONE_CHUNK,
    ),
    Conflict(
        "use_torch_fsdp2", "--use-torch-fsdp2", "it shards weights that the pipeline needs whole"
    ),
    Conflict(
        "use_megatron_fsdp",
        "--use-megatron-fsdp",
        "it reduces gradients in backward hooks, before W has computed them",
    ),
    Conflict("use_legacy_models", "--use-legacy-models", "only models of megatron-core are placed"),
    Conflict(
        WITH_THE_STEP,
        flag_of(WITH_THE_STEP),
        "it gathers a rank's first chunk while the optimizer steps the others; use a schedule "
        "with several chunks per rank, such as v-half",
        concerned=Concerned.ONE_CHUNK,
    ),
    Conflict(
        "tensor_parallel_num_weight_shards",
        "--tensor-parallel-num-weight-shards",
        WHY_NOT_SHARDED,
        above="tensor_model_parallel_size",
    ),
    Conflict(
        "expert_tensor_parallel_num_weight_shards",
        "--expert-tensor-parallel-num-weight-shards",
        WHY_NOT_SHARDED,
        above="expert_tensor_parallel_size",
    ),
    Conflict(
        "inprocess_restart",
        "--inprocess-restart",
        "schedule and channels keep their process groups, which a restart replaces",
    ),
    Conflict(
        "pipeline_model_parallel_comm_backend",
        "--pipeline-model-parallel-comm-backend",
        "messages between stages use the backend of the job",
        lambda value: value != "nccl",
    ),
    Conflict(
        "sft",
        "--sft",
        versions.WHY_NOT_PACKED,
        concerned=Concerned.INNER_STAGES,
        last=versions.WITHOUT_SAMPLE_ENDS,
    ),
    *map(_without_hybrid_batches, ("reset_attention_mask", "full_validation")),
    Conflict(
        "moe_use_upcycling", "--moe-use-upcycling", "it builds two models on each pipeline rank"
    ),
    Conflict("perform_rl_step", "--perform-rl-step", "it builds two models on each pipeline rank"),
    Conflict(
        "ckpt_format",
        "--ckpt-format",
        "other formats store layers by pipeline rank, so Megatron would load them in another "
        "order; use torch_dist",
        lambda value: value != "torch_dist",
        concerned=Concerned.V,
        only_with=("save", "load", "pretrained_checkpoint", "non_persistent_save_interval"),
    ),
    Conflict(
        "init_model_with_meta_device",
        "--init-model-with-meta-device",
        "both copies of the embedding must be built equal",
        concerned=Concerned.V,
    ),
    Conflict(
        "non_persistent_ckpt_type",
        "--non-persistent-ckpt-type",
        "local checkpoints do not record their placement; use global",
        lambda value: value == "local",
        concerned=Concerned.V,
    ),
    Conflict("logits_save_dir", "--logits-save-dir", _LOGITS),
    Conflict("logits_load_dir", "--logits-load-dir", _LOGITS),
    Conflict(
        "use_transformer_engine_op_fuser",
        OP_FUSER_FLAG,
        WHY_NOT_OPERATIONS,
        concerned=Concerned.SPLIT,
        unless="num_experts",
    ),
    Conflict(
        "moe_ncclep_zero_copy",
        ZERO_COPY_FLAG,
        WHY_NOT_ZERO_COPY,
        concerned=Concerned.SPLIT,
    ),
    Conflict(
        "hybrid_override_pattern",
        "--hybrid-override-pattern",
        "Megatron-LM 0.16 numbers its layers by pipeline rank; use a schedule with one chunk per "
        "rank, such as zb-h1, or a newer one",
        concerned=Concerned.CHUNKS,
        last=versions.WITHOUT_HYBRID_CHUNKS,
    ),
    Conflict(
        "pipeline_layer_layout",
        "--pipeline-layer-layout",
        f"{_DIVIDED}; leave it out",
        only_with=("decoder_num_layers",),
    ),
    Conflict(
        "decoder_num_layers",
        "--decoder-num-layers",
        f"{_DIVIDED}; use a schedule with one chunk per rank, such as zb-h1",
        concerned=Concerned.CHUNKS,
    ),
    Conflict(
        "heterogeneous_layers_config_path",
        "--heterogeneous-layers-config-path",
        "its layers are numbered by pipeline rank; use a schedule with one chunk per rank, such as "
        "zb-h1",
        concerned=Concerned.CHUNKS,
    ),
)


POST_VALIDATION = "--enable-optimizer-post-validation"


def _not_taken_back(argument: str, why: str, flag: str | None = None) -> Conflict:
    return Conflict(argument, flag or flag_of(argument), why)


def _setting_not_taken_back(
    setting: str, argument: str | None = None, flag: str | None = None
) -> Conflict:
    return _not_taken_back(argument or setting, NOT_TAKEN_BACK[setting], flag)


# Those of Megatron's settings that its command line calls by their names.
_SETTINGS_NOT_TAKEN_BACK = (
    "overlap_param_gather",
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
    "calculate_per_token_loss",
    "mtp_num_layers",
)
_READS_WEIGHTS = "it reads the weights of a step that has not been validated"
_FORWARDS = "it takes note of forwards, and those of a step that is made again run twice"

POST_VALIDATION_CONFLICTS = (
    *map(_setting_not_taken_back, _SETTINGS_NOT_TAKEN_BACK),
    _setting_not_taken_back("num_moe_experts", "num_experts"),
    _setting_not_taken_back("fp8", flag="--fp8-format"),
    _setting_not_taken_back("fp4", flag="--fp4-format"),
    Conflict(
        "optimizer",
        "--optimizer",
        "only steps of adam and sgd can be taken back",
        lambda value: value not in ("adam", "sgd"),
    ),
    Conflict(
        "grad_norm_skip_threshold",
        "--grad-norm-skip-threshold",
        "only infinite gradients make a step be skipped",
        math.isfinite,
    ),
    _not_taken_back(
        "dsa_indexer_loss_coeff", "its loss is summed over the pipeline after every iteration"
    ),
    _not_taken_back("te_rng_tracker", "its random states cannot be set back"),
    _not_taken_back("log_params_norm", _READS_WEIGHTS),
    _not_taken_back("save_params_interval", _READS_WEIGHTS),
    _not_taken_back("qk_clip", "it changes weights after a step that may be taken back"),
    _not_taken_back("log_max_attention_logit", _FORWARDS),
    _not_taken_back("save_activations_interval", _FORWARDS),
    _not_taken_back("save_tokens_per_expert_interval", _FORWARDS),
    _not_taken_back("check_for_spiky_loss", _FORWARDS),
    _not_taken_back("error_injection_rate", _FORWARDS),
    _not_taken_back("sft", _FORWARDS),
    _not_taken_back("vision_pretraining", "it updates a teacher after every step"),
    Conflict(
        "rerun_mode",
        "--rerun-mode",
        "all ranks wait for one another to decide whether an iteration runs again",
        lambda value: value not in ("disabled", "validate_results"),
    ),
)


_ONCE = "the first step runs twice, and this keeps state between the runs"
VERIFY_CONFLICTS = (
    Conflict(
        "fp8_recipe", "--fp8-recipe", _ONCE, lambda value: value == "delayed", only_with=("fp8",)
    ),
    Conflict("fp4", "--fp4-format", "its rounding is random"),
    Conflict("moe_paged_stash", "--moe-paged-stash", _ONCE),
)

_MEASURED, _ONE_COUNT = graphs.WHY_NOT_MEASURED, graphs.WHY_ONE_COUNT
GRAPH_CONFLICTS = (
    Conflict("pipeline_verify", VERIFY_FLAG, _ONCE),
    Conflict("pipeline_profile", "--pipeline-profile", _MEASURED),
    Conflict("pipeline_replan_every", "--pipeline-replan-every", _MEASURED),
    Conflict("enable_optimizer_post_validation", POST_VALIDATION, graphs.WHY_NOT_TWICE),
    Conflict("rampup_batch_size", "--rampup-batch-size", _ONE_COUNT),
    Conflict("step_batch_size_schedule", "--step-batch-size-schedule", _ONE_COUNT),
)


_RANK_STREAMS = f"add {STREAMS_FLAG} rank"
LAYER_STREAMS_CONFLICTS = (
    *(
        Conflict(
            setting,
            flag_of(setting),
            f"{graphs.WHY_NOT_LAYER_STREAMS}; {_RANK_STREAMS}",
            lambda value: value not in (False, "none"),
        )
        for setting in versions.GRAPH_SETTINGS
    ),
    Conflict(
        "te_rng_tracker",
        "--te-rng-tracker",
        f"its random states cannot be exchanged for those of a layer; {_RANK_STREAMS}",
    ),
    Conflict(
        "init_model_with_meta_device",
        "--init-model-with-meta-device",
        f"weights are not drawn where a layer is built; {_RANK_STREAMS}",
    ),
)


VOCABULARY_CONFLICTS = (
    Conflict(OVERLAP, OVERLAP_FLAG, "its passes are not in Megatron's plans"),
    Conflict(
        "mtp_num_layers",
        "--mtp-num-layers",
        "multi-token prediction runs the output layer again",
    ),
    Conflict(
        "cross_entropy_loss_fusion",
        "--cross-entropy-loss-fusion",
        "the loss is put together from parts; leave it out",
    ),
    Conflict("use_mup", "--use-mup", "it scales the logits"),
    Conflict("hybrid_layer_pattern", "--hybrid-layer-pattern", "it is tried with GPTModel alone"),
    Conflict("pipeline_schedule_file", "--pipeline-schedule-file", "a table has no passes of it"),
    Conflict(
        "enable_optimizer_post_validation",
        POST_VALIDATION,
        "the forwards that run again have no passes of it",
    ),
    *(
        Conflict(
            setting,
            flag_of(setting),
            "its passes are not captured",
            lambda value: value not in (False, "none"),
        )
        for setting in versions.GRAPH_SETTINGS
    ),
)


_TWICE = "what a forward keeps for the next step would be kept twice"
_NOT_QUANTIZED = "what it has quantized is not moved"
_NOT_WITH_STATES = (
    Conflict(OVERLAP, OVERLAP_FLAG, "its plans of a forward keep what they compute"),
    Conflict(
        "enable_optimizer_post_validation",
        POST_VALIDATION,
        "a step that is taken back would leave activations behind",
    ),
    *(
        Conflict(
            setting,
            flag_of(setting),
            "forwards that keep less than they compute are not captured",
            lambda value: value not in (False, "none"),
        )
        for setting in versions.GRAPH_SETTINGS
    ),
)
RECOMPUTATION_CONFLICTS = (
    *_NOT_WITH_STATES,
    Conflict("fp8", "--fp8-format", _TWICE),
    Conflict("fp4", "--fp4-format", _TWICE),
)
OFFLOAD_CONFLICTS = (
    *_NOT_WITH_STATES,
    Conflict("fp8", "--fp8-format", _NOT_QUANTIZED),
    Conflict("fp4", "--fp4-format", _NOT_QUANTIZED),
)


WHY_NOT_FLOAT32 = "Megatron's plans are for bf16 and fp16; add --bf16"
WHY_NO_GRAPHS_OF_LAYERS = (
    "they are captured pass by pass, and would be replayed layer by layer; use full_iteration"
)
_NOT_PLANNED = "it is not in Megatron's plans of a layer"
PAIR_CONFLICTS = (
    Conflict(
        "expert_model_parallel_size",
        "--expert-model-parallel-size",
        "experts of one rank exchange nothing; leave it out",
        lambda value: value < 2,
    ),
    Conflict(
        "moe_token_dispatcher_type",
        "--moe-token-dispatcher-type",
        "only alltoall and flex can overlap",
        lambda value: value == "allgather",
    ),
    Conflict(
        "moe_shared_expert_overlap",
        "--moe-shared-expert-overlap",
        "both overlap the same exchange; leave one out",
    ),
    Conflict(
        "recompute_granularity",
        "--recompute-granularity",
        "a layer runs in parts, and is not recomputed as a whole; use selective",
        lambda value: value == "full",
    ),
    Conflict(
        "recompute_modules",
        "--recompute-modules",
        "experts would be recomputed without what they have exchanged; leave moe out",
        lambda value: "moe" in value,
    ),
    Conflict(
        "mtp_num_layers",
        "--mtp-num-layers",
        "Megatron's plans have one layer of multi-token prediction at most",
        lambda value: value > 1,
    ),
    Conflict("sft", "--sft", "Megatron's plans do not know where samples end"),
    Conflict("fp4", "--fp4-format", f"{_NOT_PLANNED}, which would run in bf16"),
    Conflict("hybrid_layer_pattern", "--hybrid-layer-pattern", "it is tried with GPTModel alone"),
)


def check_pairs(args: argparse.Namespace) -> None:
    """Refuse arguments with which no forward and backward can run in one pass.

    Raises:
        UsageError: names both flags and the reason.
    """
    raise_first(pair_refusals(args))


def pair_refusals(args: argparse.Namespace) -> Iterator[Refusal]:
    """Yield the arguments with which no forward and backward can run in one pass."""
    if not overlaps_exchange(args):
        return
    yield from _conflicting(PAIR_CONFLICTS, args, OVERLAP_FLAG)
    if not (getattr(args, "bf16", False) or getattr(args, "fp16", False)):
        yield Refusal("float32", OVERLAP_FLAG, WHY_NOT_FLOAT32)
    kind = versions.graphs_of(args)
    if kind is versions.Graphs.TRANSFORMER_ENGINE:
        yield Refusal(f"CUDA graphs ({kind.value})", OVERLAP_FLAG, WHY_NO_GRAPHS_OF_LAYERS)


def overlaps_exchange(args: argparse.Namespace) -> bool:
    """Return whether the exchange of tokens between experts is to run beside computation."""
    return bool(getattr(args, OVERLAP, False))


def check_states(args: argparse.Namespace, table: Schedule | None = None) -> None:
    """Refuse arguments with which no schedule drops activations, or moves them to the host.

    Args:
        args: those of the run.
        table: the schedule read from a file, which says itself what it drops and moves.

    Raises:
        UsageError: names both flags and the reason.
    """
    raise_first(state_refusals(args, table))


def state_refusals(args: argparse.Namespace, table: Schedule | None = None) -> Iterator[Refusal]:
    """Yield the arguments with which no schedule drops activations, or moves them to the host."""
    yield from run_flags.state_refusals(args, table)
    known = {RECOMPUTE_FLAG: RECOMPUTATION_CONFLICTS, OFFLOAD_FLAG: OFFLOAD_CONFLICTS}
    for flag, asked in run_flags.states_of(args, table):
        yield from _conflicting(known[flag], args, asked)


def recomputes(args: argparse.Namespace) -> bool:
    """Return whether activations may be dropped, and computed again by the schedule."""
    return bool(args.pipeline_recompute == "auto")


def check_vocabulary(args: argparse.Namespace) -> None:
    """Refuse arguments with which no output layer is cut along the vocabulary.

    Raises:
        UsageError: names both flags and the reason.
    """
    raise_first(vocabulary_refusals(args))


def vocabulary_refusals(args: argparse.Namespace) -> Iterator[Refusal]:
    """Yield the arguments with which no output layer is cut along the vocabulary."""
    if cuts_vocabulary(args):
        yield from _conflicting(VOCABULARY_CONFLICTS, args, "--pipeline-vocabulary on")


def why_not_cut(args: argparse.Namespace) -> str | None:
    """Return why no output layer can be cut along the vocabulary for such arguments, if so."""
    refused = next(_conflicting(VOCABULARY_CONFLICTS, args, ""), None)
    if refused is not None:
        return f"{refused.flag}: {refused.why}"
    return why_rows_stay(args)


def cuts_vocabulary(args: argparse.Namespace) -> bool:
    """Return whether the arguments demand vocabulary parallelism."""
    return bool(args.pipeline_vocabulary == "on")


def check(args: argparse.Namespace, choice: str, placement: Placement, splits: bool = True) -> None:
    """Refuse arguments that cannot be combined with a schedule.

    Raises:
        UsageError: names both flags and the reason.
    """
    raise_first(refusals(args, choice, placement, splits))


def refusals(
    args: argparse.Namespace,
    choice: str,
    placement: Placement,
    splits: bool,
    series: tuple[int, int] | None = None,
) -> Iterator[Refusal]:
    """Yield the arguments that cannot be combined with a schedule.

    Args:
        choice: the flag that chose the schedule, with its value.
        splits: whether it splits the backward.
        series: the series of Megatron-LM, such as (0, 19); None is the one installed.
    """
    concerned = (c for c in CONFLICTS if c.concerned.holds(placement, splits) and c.is_in(series))
    yield from _conflicting(concerned, args, choice)
    if getattr(args, "pipeline_verify", False):
        yield from _conflicting(VERIFY_CONFLICTS, args, VERIFY_FLAG)
    yield from _graphs(args, choice)


def check_post_validation(args: argparse.Namespace) -> None:
    """Refuse arguments with which no optimizer step can be undone.

    Raises:
        UsageError: names both flags and the reason.
    """
    raise_first(post_validation_refusals(args))


def post_validation_refusals(args: argparse.Namespace) -> Iterator[Refusal]:
    """Yield the arguments with which no optimizer step can be undone."""
    yield from _conflicting(POST_VALIDATION_CONFLICTS, args, POST_VALIDATION)


def check_layer_streams(args: argparse.Namespace) -> None:
    """Refuse arguments with which layers cannot draw from random streams of their own.

    Raises:
        UsageError: names both flags and the reason.
    """
    raise_first(layer_streams_refusals(args))


def layer_streams_refusals(args: argparse.Namespace) -> Iterator[Refusal]:
    """Yield the arguments with which layers cannot draw from random streams of their own."""
    asked = args.pipeline_random_streams
    chosen = f"{STREAMS_FLAG} layer"
    if asked != "layer":
        chosen += f", which {flags.choice(args)} brings,"
    yield from _conflicting(LAYER_STREAMS_CONFLICTS, args, chosen)


def _conflicting(
    conflicts: Iterable[Conflict], args: argparse.Namespace, other: str
) -> Iterator[Refusal]:
    for conflict in conflicts:
        value = getattr(args, conflict.argument, None)
        if value is None or not conflict.applies(value):
            continue
        if _is_above(conflict, args, value) and _is_with(conflict, args):
            said = conflict.flag if isinstance(value, bool) else f"{conflict.flag} {value}"
            yield Refusal(said, other, conflict.why)


def _is_above(conflict: Conflict, args: argparse.Namespace, value: Any) -> bool:
    if conflict.above is None:
        return True
    size = getattr(args, conflict.above, None) or args.tensor_model_parallel_size
    return bool(value > size)


def _is_with(conflict: Conflict, args: argparse.Namespace) -> bool:
    if conflict.unless is not None and getattr(args, conflict.unless, None) is not None:
        return False
    given = (getattr(args, name, None) is not None for name in conflict.only_with)
    return not conflict.only_with or any(given)


def _graphs(args: argparse.Namespace, choice: str) -> Iterator[Refusal]:
    """Yield CUDA graphs that cannot be had, and what cannot be combined with those that can."""
    kind = versions.graphs_of(args)
    said = f"CUDA graphs ({kind.value})"
    for why in graphs.reasons_against(args, {}):
        yield Refusal(said, choice, why)
    if kind is not versions.Graphs.NONE:
        yield from _conflicting(GRAPH_CONFLICTS, args, said)


WHY_NOT_YAML = "its arguments are not checked; give them all on the command line"


def of_yaml(path: str, choice: str) -> UsageError:
    """Return the error for --yaml-cfg with a schedule: it replaces all arguments."""
    return UsageError(f"--yaml-cfg {path} cannot be combined with {choice}: {WHY_NOT_YAML}")


@dataclass(frozen=True)
class Served:
    """What has been proven for the models of a class; all run one chunk per rank."""

    in_a_v: bool = False
    draws_by_layer: bool = False
    """Whether each layer can draw its weights from random streams of its own."""
    last: tuple[int, int] | None = None
    """The last series of Megatron-LM in which neither has been proven, if there is one."""

    def is_proven(self) -> bool:
        return self.last is None or versions.core_series() > self.last


# By the names of Megatron's classes; a HybridModel was called MambaModel before 0.18. Each may have
# an encoder in front, as its `language_model`.
MODELS = {
    "GPTModel": Served(in_a_v=True, draws_by_layer=True),
    "BertModel": Served(draws_by_layer=True),
    "MambaModel": Served(in_a_v=True, draws_by_layer=True, last=versions.WITHOUT_HYBRID_CHUNKS),
    "HybridModel": Served(in_a_v=True, draws_by_layer=True),
}


def check_pairs_of_model(chunk: Any) -> None:
    """Refuse models of which Megatron's plans would compute something else, or nothing at all.

    Raises:
        UsageError: says which part of the model is in the way.
    """
    name = type(chunk).__name__
    if "GPTModel" not in (kind.__name__ for kind in type(chunk).__mro__):
        raise UsageError(f"{OVERLAP_FLAG} cannot run a {name}: it is tried with GPTModel alone")
    frozen = next((name for name, p in chunk.named_parameters() if not p.requires_grad), None)
    if frozen is not None:
        raise UsageError(
            f"{OVERLAP_FLAG} cannot run a model with frozen weights, such as {frozen}: Megatron's "
            "plans want a gradient of everything; leave the flag out"
        )
    layers = chunk.decoder.layers
    norm = getattr(chunk.decoder, "final_layernorm", None)
    if norm is not None and len(layers) and not hasattr(layers[-1].mlp, "experts"):
        raise UsageError(
            f"{OVERLAP_FLAG} cannot run a model whose last layer has no experts: Megatron's plans "
            "would leave the final norm out; change --moe-layer-freq"
        )


def check_model(chunk: Any, schedule: str, in_a_v: bool, draws_by_layer: bool) -> None:
    """Refuse models whose chunks exchange more than one tensor, or that are unproven in a V.

    Raises:
        UsageError: names the model and those that are supported.
    """
    name, staged = type(chunk).__name__, language_model(chunk)
    served = next((MODELS[c.__name__] for c in type(staged).__mro__ if c.__name__ in MODELS), None)
    refused = f"--pipeline-schedule {schedule} cannot run a {name}"
    if served is None:
        raise UsageError(
            f"{refused}: it runs {', '.join(MODELS)}, and models with one of these as their "
            "language_model on every stage and encoders on the first"
        )
    if not served.is_proven():
        served = Served()
    if staged is not chunk:
        if why := why_not_placed(chunk):
            raise UsageError(f"{refused}: {why}")
        served = replace(served, draws_by_layer=False)
    if in_a_v and not served.in_a_v:
        raise UsageError(f"{refused}: use one with one chunk per rank, such as zb-h1")
    if draws_by_layer and not served.draws_by_layer:
        raise UsageError(
            f"the layers of a {name} cannot draw their weights from random streams of their own: "
            f"{_RANK_STREAMS}"
        )
    if getattr(getattr(chunk, "config", None), OVERLAP, False):
        check_pairs_of_model(chunk)

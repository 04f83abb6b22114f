"""Differences between the supported versions of Megatron; the only file that checks versions.

:data:`SERIES` lists the supported ones; each difference is a function below. Importing this file
imports no Megatron. The requirements on Transformer-Engine are also here.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from inspect import signature, unwrap
from itertools import chain
from types import ModuleType
from typing import Any

from megatron_zb.errors import UsageError

# The first whose linear layers ask a store whether, and with what, to compute a weight gradient
# later; what they ask and hand over was the same in all versions up to 2.20, and so was the name of
# what keeps a module's quantised weights, ``_fp8_workspaces``.
OLDEST_TRANSFORMER_ENGINE = (2, 3)


@dataclass(frozen=True)
class Series:
    """A supported series of versions, and what importing Megatron-LM's training loop requires."""

    number: tuple[int, int]
    python: tuple[int, int]
    packages: tuple[tuple[str, str], ...]
    """Names of each module, and of the package that holds it, besides megatron-core's own."""

    @property
    def text(self) -> str:
        return ".".join(map(str, self.number))


_COMMON = (("packaging", "packaging"), ("setuptools", "setuptools"))
_TRITON, _YAML = ("triton", "triton"), ("yaml", "pyyaml")
_MORE = (("pydantic", "pydantic"), ("regex", "regex"), ("six", "six"))

SERIES = (
    Series((0, 16), (3, 10), (*_COMMON, _TRITON, *_MORE, _YAML)),
    Series((0, 17), (3, 12), (*_COMMON, _YAML)),
    Series((0, 18), (3, 12), (*_COMMON, _TRITON, _YAML)),
    Series((0, 19), (3, 12), (*_COMMON, _TRITON)),
)
"""All supported series, the oldest first, without a gap."""

NEWEST = SERIES[-1].text
SUPPORTED = f"{SERIES[0].text} to {NEWEST}"
""":data:`SERIES` in words."""


def warning_of(version: Sequence[int], what: str) -> str:
    """Return a warning if a (major, minor, ...) version is newer than all series, else nothing.

    Everything that depends on a version calls this module: the launcher, the hooks, the adapter and
    the doctor.

    Args:
        what: what has the version, such as ``megatron-core``.

    Raises:
        UsageError: it is older than all series.
    """
    said = f"{what} has version {'.'.join(map(str, version))}, which is"
    if tuple(version[:2]) < SERIES[0].number:
        raise UsageError(f"{said} older than all that are known here: known are {SUPPORTED}")
    if tuple(version[:2]) <= SERIES[-1].number:
        return ""
    return (
        f"{said} newer than {NEWEST}, the newest that was checked: compare losses with upstream's"
    )


def oldest_to_install() -> str:
    """Return the argument of pip install for the oldest supported series of megatron-core."""
    major, minor = SERIES[0].number
    return f"megatron-core>={major}.{minor},<{major}.{minor + 1}"


def training_loop_needs(version: Sequence[int]) -> Series:
    """Return the series of a version, with what its training loop requires; at most the newest."""
    return next((s for s in SERIES if s.number == tuple(version[:2])), SERIES[-1])


def transformer_engine_is_supported(version: str) -> bool:
    """Return whether linear layers of Transformer-Engine, e.g. ``2.9.0+70f53666``, can split."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and tuple(map(int, found.groups())) >= OLDEST_TRANSFORMER_ENGINE


def chunk_builders() -> list[tuple[ModuleType, str]]:
    """Return the functions of Megatron-LM whose first argument builds one model chunk.

    It is called with the keywords ``pre_process``, ``post_process`` and, if there are several
    chunks, ``vp_stage``. From 0.17 on, models described by a configuration have a way of their own.
    """
    from megatron.training import training

    places = [(training, "get_model")]
    with suppress(ModuleNotFoundError):
        places.append((import_module("megatron.training.models.dist_utils"), _STAGES))
    return places


_STAGES = "build_virtual_pipeline_stages"


def batch_broadcast() -> tuple[ModuleType, str]:
    """Return the function that sends a batch to the tensor-parallel ranks; in core after 0.16."""
    from megatron.core import utils as core_utils
    from megatron.training import utils as training_utils

    name = "get_batch_on_this_tp_rank"
    return (core_utils if hasattr(core_utils, name) else training_utils), name


def process_groups() -> Any:
    """Return the process groups of Megatron's schedules and its reduction of gradients.

    From 0.18 on the latter needs more than before where experts have a bias, and from 0.19 on
    Megatron's schedules have a builder of their own, which includes all that they need.
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    build = getattr(schedules, "_build_default_pg_collection", None)
    if build is not None:
        return build()
    names = ("tp", "pp", "cp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp")
    return ProcessGroupCollection.use_mpu_process_groups(list(names))


def start_paged_stash(config: Any, *, forward_only: bool) -> None:
    """Reset the pages of ``moe_paged_stash``, as Megatron's schedules do; 0.18 brings it."""
    from megatron.core.transformer.moe.paged_stash import paged_stash_reset

    paged_stash_reset(enabled=not forward_only, config=config)


def forget_order_of_paged_stash() -> None:
    """Let ``moe_paged_stash`` record the order of the next step anew, as in a first one.

    Its only manager stays the same object, which the training loop holds.
    """
    from megatron.core.transformer.moe.paged_stash import PagedStashManager

    PagedStashManager.get_instance().__init__()


RESHARDABLE = "sharded_param_state_fully_reshardable"
"""The method with which Megatron's distributed optimizer saves states that fit any placement."""


def saves_past_padding(optimizer: type) -> bool:
    """Return whether a class's :data:`RESHARDABLE` knows where each bucket of a buffer is padded.

    After 0.19 it subtracts the padding of the buckets before a weight; until then it asks only for
    the padding of the last one.
    """
    method = unwrap(getattr(optimizer, RESHARDABLE))
    return "buckets" in method.__code__.co_names


def set_streams(config: Any) -> None:
    """Make the streams on which Megatron's plans of a chunk run; 0.19 knows their priority."""
    from megatron.core.pipeline_parallel.utils import set_streams

    options = {"high_priority": getattr(config, "high_priority_a2a_comm_stream", False)}
    known = signature(set_streams).parameters
    set_streams(**{name: value for name, value in options.items() if name in known})


def product_of_another_dtype() -> Callable[..., Any]:
    """Return the matrix product of a linear layer whose output dtype differs from its input's.

    Megatron has it after 0.19. Its arguments are the input, the weight, the bias or None, and the
    output dtype.
    """
    from megatron.core.tensor_parallel import layers

    product: Callable[..., Any] = layers._linear_forward
    return product


def enabled_span_groups(groups: Iterable[str]) -> frozenset[str]:
    """Return which of Megatron-LM's span groups this job traces; Megatron has them after 0.19.

    The package nemo-lens knows it. Without that package Megatron-LM traces nothing, either.
    """
    try:
        is_enabled = import_module("nemo.lens.state").is_span_group_enabled
    except (ImportError, AttributeError):
        return frozenset()
    return frozenset(group for group in groups if is_enabled(group))


# Hyper-connections by both names that Megatron has for them: the switch, and the number of streams.
_RESIDUAL_STREAMS = {
    "enable_mhc_connections": "mhc_num_residual_streams",
    "enable_hyper_connections": "num_residual_streams",
}


def message_width(config: Any) -> int:
    """Return the width of the hidden states between two stages of a model with this config.

    With hyper-connections a layer has several residual streams, and stages exchange all of them
    side by side; their contraction is on the last stage.
    """
    streams = [of for switch, of in _RESIDUAL_STREAMS.items() if getattr(config, switch, False)]
    width: int = config.hidden_size
    return width * getattr(config, streams[0]) if streams else width


# From this series on, a script parses its arguments before the part that --inprocess-restart runs
# again, which finds none the second time.
WITHOUT_RESTARTS = (0, 18)

# In this series, --sft gives the ends of samples to the first and the last stage alone.
WITHOUT_SAMPLE_ENDS = (0, 16)


# Up to this series, the script of hybrid models cannot read a batch on stages between the first and
# the last, which a mask of documents and the size of a whole validation set need.
WITHOUT_HYBRID_BATCHES = (0, 17)


def mixing_blocks(chunk: Any) -> list[Any]:
    """Return a chunk's blocks of multi-token prediction that mix hidden states (``--mtp-hsm``).

    Megatron has them after 0.19. Each names the state of Megatron's tracker that it draws from.
    """
    name = "hidden_state_mixing_rng_tracker_name"
    return [module for module in chunk.modules() if getattr(module, name, None) is not None]


def core_series() -> tuple[int, int]:
    """Return the series of the megatron-core that is imported here, such as (0, 19)."""
    from megatron.core.package_info import MAJOR, MINOR

    return int(MAJOR), int(MINOR)


@cache
def warn_of_core() -> None:
    """Warn, once and on the first rank, if this process's megatron-core is newer than all series.

    Raises:
        UsageError: it is older than all series.
    """
    warning = warning_of(core_series(), "megatron-core")
    if warning and os.environ.get("RANK", "0") == "0":
        warnings.warn(warning, stacklevel=1)


# The argument that names the layers of a hybrid model: from 0.17 on, and before, when it could not
# say the layers of several chunks.
HYBRID_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
WITHOUT_HYBRID_CHUNKS = (0, 16)


def hybrid_letters(series: tuple[int, int] | None = None) -> list[str]:
    """Return the letters of a hybrid model's layers; none for another series than this one's.

    Args:
        series: of Megatron-LM; None is the one installed.
    """
    if series not in (None, core_series()):
        return []
    for module in ("models.hybrid", "ssm"):
        for prefix in ("", "mamba_"):
            with suppress(ModuleNotFoundError):
                found = import_module(f"megatron.core.{module}.{prefix}hybrid_layer_allocation")
                names = ("VALID_LAYERS", "VALID")  # the latter until 0.16
                return sorted(
                    next(getattr(found.Symbols, n) for n in names if hasattr(found.Symbols, n))
                )
    return []


def hybrid_models() -> list[type[Any]]:
    """Return the class of hybrid models where it can be imported; 0.18 has renamed it."""
    for module, name in (("hybrid.hybrid_model", "HybridModel"), ("mamba", "MambaModel")):
        with suppress(ImportError):
            return [getattr(import_module(f"megatron.core.models.{module}"), name)]
    return []


def hybrid_segments() -> list[tuple[ModuleType, str]]:
    """Return the function that cuts a hybrid model's pattern into stages; 0.18 has moved it.

    0.16 has none: its layers are numbered by pipeline rank.
    """
    name = "select_pipeline_segment"
    for module in ("models.hybrid.hybrid_layer_allocation", "ssm.mamba_hybrid_layer_allocation"):
        with suppress(ModuleNotFoundError):
            found = import_module(f"megatron.core.{module}")
            if hasattr(found, name):
                return [(found, name)]
    return []


def hybrid_block() -> ModuleType | None:
    """Return the module that builds the layers of hybrid models, None where it cannot be imported.

    A model's builder may import it only when it runs.
    """
    for name in ("models.hybrid.hybrid_block", "ssm.mamba_block"):
        with suppress(ImportError):
            return import_module(f"megatron.core.{name}")
    return None


class Graphs(Enum):
    """The CUDA graphs of Megatron, by the values of ``cuda_graph_impl`` in 0.19."""

    NONE = "none"
    TRANSFORMER_ENGINE = "transformer_engine"
    LOCAL = "local"
    FULL_ITERATION = "full_iteration"


# The setting that asks for them, and what it was before 0.16.
GRAPH_SETTINGS = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")


def graphs_of(settings: Any) -> Graphs:
    """Return the CUDA graphs that Megatron's config, or its arguments, request.

    In 0.16 whole iterations are a scope of local graphs, which 0.19 still accepts; older flags
    stand for two of the values.
    """
    if getattr(settings, "external_cuda_graph", False):
        return Graphs.TRANSFORMER_ENGINE
    kind = Graphs(getattr(settings, "cuda_graph_impl", None) or "none")
    if getattr(settings, "enable_cuda_graph", False):
        kind = Graphs.LOCAL
    whole = kind is Graphs.LOCAL and "full_iteration" in _graph_scopes(settings)
    return Graphs.FULL_ITERATION if whole else kind


def graphs_leave_experts_out(settings: Any) -> bool:
    """Return whether graphs of layers leave MLP and experts out; without modules they hold all.

    The modules in a graph are ``cuda_graph_scope``, since 0.19 also ``cuda_graph_modules``.
    """
    names = _graph_scopes(settings)
    return bool(names) and names.isdisjoint({"full", "mlp", "moe"})


def _graph_scopes(settings: Any) -> set[str]:
    given = (getattr(settings, f"cuda_graph_{name}", None) or () for name in ("scope", "modules"))
    scopes = chain.from_iterable(one if isinstance(one, list | tuple) else [one] for one in given)
    return {name for each in scopes for name in getattr(each, "name", str(each)).split(",")}


@contextmanager
def losses_logged_apart() -> Iterator[None]:
    """Keep what a step inside adds to the losses that layers log themselves from the log.

    Those are losses of experts, of predicted tokens and of the indexers of sparse attention. 0.18
    brings an object for those of experts; before, they are a dictionary.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    helpers: list[Any] = [MTPLossLoggingHelper]
    with suppress(ImportError):
        sparse: Any = import_module("megatron.core.transformer.experimental_attention_variant.dsa")
        helpers.append(sparse.DSAIndexerLossLoggingHelper)
    usual = [helper.tracker for helper in helpers]
    for helper in helpers:
        helper.tracker = {}
    try:
        with _expert_losses_apart():
            yield
    finally:
        for helper, tracker in zip(helpers, usual, strict=True):
            helper.tracker = tracker


@contextmanager
def no_results_validated() -> Iterator[None]:
    """Keep what a step inside computes from Megatron's validation of results.

    It counts and compares the losses of an iteration, and may rerun it.
    """
    from megatron.core.rerun_state_machine import RerunStateMachine

    usual = RerunStateMachine.validate_result
    RerunStateMachine.validate_result = lambda self, *args, **options: None
    try:
        yield
    finally:
        RerunStateMachine.validate_result = usual


def expert_metrics() -> dict[str, dict[str, Any]]:
    """Return the fields of each entry of the metrics of experts, by its name."""
    moe_logging = _moe_logging()
    if moe_logging is None:
        return {name: dict(entry) for name, entry in _dictionary_of_metrics().items()}
    metrics = moe_logging.get_moe_metrics_tracker()._metrics
    return {name: dict(vars(entry)) for name, entry in metrics.items()}


def set_expert_metric(name: str, fields: dict[str, Any]) -> None:
    """Set fields of an entry, which is made where there is none."""
    moe_logging = _moe_logging()
    if moe_logging is None:
        _dictionary_of_metrics().setdefault(name, {}).update(fields)
        return
    metrics = moe_logging.get_moe_metrics_tracker()._metrics
    if name not in metrics:
        metrics[name] = moe_logging.MetricEntry(**fields)
    vars(metrics[name]).update(fields)


def _moe_logging() -> Any:
    """Return the module of the metrics of experts, None where a dictionary has them."""
    try:
        return import_module("megatron.core.transformer.moe.moe_logging")
    except ModuleNotFoundError:
        return None


def _dictionary_of_metrics() -> dict[str, dict[str, Any]]:
    from megatron.core.transformer.moe import moe_utils

    found: dict[str, dict[str, Any]] = moe_utils.get_moe_layer_wise_logging_tracker()
    return found


@contextmanager
def _expert_losses_apart() -> Iterator[None]:
    moe_logging = _moe_logging()
    if moe_logging is None:
        tracker = _dictionary_of_metrics()
        usual = dict(tracker)
        tracker.clear()
        try:
            yield
        finally:
            tracker.clear()
            tracker.update(usual)
        return
    before = moe_logging.get_moe_metrics_tracker()
    moe_logging.set_moe_metrics_tracker(moe_logging.MoEMetricsTracker())
    try:
        yield
    finally:
        moe_logging.set_moe_metrics_tracker(before)


def skip_fused_kernels() -> None:
    """Keep the training loop of 0.16 from compiling CUDA kernels; later versions have none."""
    with suppress(ModuleNotFoundError):
        fused_kernels: Any = import_module("megatron.legacy.fused_kernels")
        fused_kernels.load = lambda *args, **keywords: None


def sums_of_lengths() -> list[tuple[ModuleType, str]]:
    """Return what sums up lengths of packed sequences for the logged throughput; 0.19 brings it."""
    from megatron.training import training

    name = "consume_seqlen_stats_in_iteration"
    return [(training, name)] if hasattr(training, name) else []


def sum_lengths_on_cpu() -> None:
    """Let those sums start on the CPU; Megatron requests a GPU by its number."""
    import torch

    for training, _ in sums_of_lengths():
        vars(training)["_seqlen_stats_in_iteration"] = torch.zeros(2, dtype=torch.float64)


def gradients_for_norm(optimizer: Any) -> list[Any]:
    """Return the gradients of one of Megatron's optimizers, each that is counted in the norm once.

    The method has another name in 0.19.
    """
    names = ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm")
    name = next(name for name in names if hasattr(optimizer, name))
    found: list[Any] = getattr(optimizer, name)()
    return found


def has_gradients_elsewhere(bucket: Any) -> bool:
    """Return whether gradients of a bucket are added up outside its buffer, which 0.19 may do."""
    return bool(getattr(bucket, "params_with_extra_main_grads", ()))


def data_parallel_group(pg_collection: Any) -> Any:
    """Return the group to count tokens over; 0.19 also widens it where weights are sharded."""
    return getattr(pg_collection, "dp_cp_gtp_remat", None) or pg_collection.dp_cp


_AUXILIARY_SCALERS = (
    ("moe.moe_utils", "MoEAuxLossAutoScaler"),
    ("multi_token_prediction", "MTPLossAutoScaler"),
    ("experimental_attention_variant.dsa", "DSAIndexerLossAutoScaler"),
)


def auxiliary_scalers() -> list[Any]:
    """Return the classes that hold how much auxiliary losses count, as far as Megatron has them."""
    found = []
    for name, owner in _AUXILIARY_SCALERS:
        with suppress(ImportError, AttributeError):
            module = import_module(f"megatron.core.transformer.{name}")
            found.append(getattr(module, owner))
    return found

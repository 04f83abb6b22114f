"""The placement of a checkpoint's layers when it was written, and the check that this run fits.

Checkpoints in the torch_dist format hold layers by their number in the model, so every placement
can load every other's. Two parts do not: the distributed optimizer's default format, which follows
the buffers of each rank, and the legacy format, which follows the pipeline ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_zb.errors import UsageError
from megatron_zb.files import read_tracker
from megatron_zb.megatron_core import checkpoints
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_lm.adapter_of_arguments import layers_of, segments
from megatron_zb.schedules import layout
from megatron_zb.schedules.placement import looped

_UPSTREAM = "Megatron's own placement"
_ATTRIBUTE = "pipeline_placement"

# Arguments that a checkpoint of another version may lack.
_ABSENT = {
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers": None,
    "encoder_num_layers": None,
    "mtp_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
}


def mark(args: argparse.Namespace, adapter: PipelineAdapter) -> None:
    """Store the placement in the arguments, which every checkpoint of the run holds."""
    setattr(args, _ATTRIBUTE, of_adapter(adapter))


def of_adapter(adapter: PipelineAdapter) -> str:
    """Return a name for the placement; equal names mean equal layers on every rank."""
    placement = adapter.physical.placement
    kind = placement.name if adapter.physical.has_other_ends else _UPSTREAM
    if adapter.current.second_model is not None:
        kind += " with a copy of the encoder on every rank"
    return _name(kind, placement.pipeline_size, adapter.chunks, str(adapter.layer_layout))


def of_upstream(args: argparse.Namespace) -> str:
    """Return such a name for a run of Megatron's own schedules."""
    full = argparse.Namespace(**{**_ABSENT, **vars(args)})
    ranks = full.pipeline_model_parallel_size
    chunks = full.virtual_pipeline_model_parallel_size or 1
    return _name(_UPSTREAM, ranks, chunks, _upstream_layout(full, ranks, chunks))


def _name(kind: str, ranks: int, chunks: int, layout: str) -> str:
    return f"{kind}, {ranks} ranks x {chunks} chunks, {layout}"


def _upstream_layout(args: argparse.Namespace, ranks: int, chunks: int) -> str:
    written = args.pipeline_model_parallel_layout or segments(args)
    try:
        layers = layers_of(args)
        if written is None:
            counts = layout.spread(layers, looped(ranks, chunks))
            return layout.text(layout.lettered(counts, layers.multi_token))
        return layout.text(layout.read(str(written), layers, ranks * chunks))
    except UsageError:
        return "other layers"


def check(loaded: Any, args: argparse.Namespace, adapter: PipelineAdapter | None) -> None:
    """Refuse a checkpoint that would be loaded into the wrong layers.

    Checkpoints of Megatron's own schedules are left to Megatron when these load them.

    Args:
        loaded: the result of Megatron-LM's ``_load_base_checkpoint``: state, name, whether it is
            a release, and the format.
        adapter: None for a run of Megatron's own schedule.

    Raises:
        UsageError: says which flag makes it possible.
    """
    state, name, _, kind = loaded[:4]
    saved_args = state.get("args") if isinstance(state, dict) else None
    if saved_args is None:
        return
    marked = getattr(saved_args, _ATTRIBUTE, None)
    if adapter is None and marked is None:
        return
    saved = marked or of_upstream(saved_args)
    placement = of_upstream(args) if adapter is None else of_adapter(adapter)
    if saved == placement:
        return
    if getattr(kind, "name", "") == "LEGACY":
        raise UsageError(
            f"the checkpoint {name} is in the legacy format and was written with {saved}, but this "
            f"run has {placement}: load it with the schedule it was written with and save it with "
            "--ckpt-format torch_dist"
        )
    if not _loads_distributed(args):
        return
    metadata = load_content_metadata(preloaded_state_dict=state) or {}
    sharding = metadata.get("distrib_optim_sharding_type")
    if sharding not in (None, *DistributedOptimizer.checkpoint_fully_reshardable_formats):
        raise UsageError(
            f"the optimizer state of the checkpoint {name} is in the format {sharding} and was "
            f"written with {saved}, but this run has {placement}: save it with "
            "--dist-ckpt-optim-fully-reshardable, or load the weights alone with --no-load-optim"
        )


def check_states(args: argparse.Namespace, path: Path) -> None:
    """Refuse a checkpoint whose optimizer's state is to be loaded and is not of its weights.

    Weights in 8 or 4 bits have been rounded, and are not compared.

    Raises:
        UsageError: says what to load instead.
    """
    rounded = any(getattr(args, name, False) for name in ("fp8_param_gather", "fp4_param"))
    if _loads_distributed(args) and not rounded and (path / ".metadata").is_file():
        checkpoints.check(path)


def other_groups(error: ValueError, path: object) -> UsageError | None:
    """Explain why Megatron cannot load an optimizer's state; None for an error of another kind.

    Without ``--use-distributed-optimizer``, Megatron stores the list of parameter groups of the
    first rank. It fails on a rank with other groups, such as that of a decoupled learning rate,
    which is where the embedding is.
    """
    if "encountered at level ('optimizer'" not in str(error):
        return None
    return UsageError(
        f"the optimizer's state in the checkpoint {path} has the parameter groups of the rank that "
        "wrote it, and this rank has others: save and load with --use-distributed-optimizer, or "
        "load the weights without the optimizer by --no-load-optim"
    )


def latest(args: argparse.Namespace) -> Path | None:
    """Return the directory of the checkpoint that a run is to load, if it is there."""
    folder = Path(args.load or "")
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not args.load or not tracker.is_file():
        return None
    step = getattr(args, "ckpt_step", None) or read_tracker(tracker)
    return folder / f"iter_{int(step):07d}" if str(step).isdecimal() else None


def _loads_distributed(args: argparse.Namespace) -> bool:
    return args.use_distributed_optimizer and not (args.finetune or args.no_load_optim)

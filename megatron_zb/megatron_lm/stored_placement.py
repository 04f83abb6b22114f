"""Where a checkpoint's layers were when it was written, and whether this run may load it.

Checkpoints in the torch_dist format hold layers by their number in the model, so every placement
can load every other's. Two parts do not: the distributed optimizer's default format, which follows
the buffers of each rank, and the legacy format, which follows the pipeline ranks.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_zb.errors import UsageError

STOCK = "Megatron's own"
_ATTRIBUTE = "pipeline_placement"


def of_run(args: Any, plan: Any) -> str:
    """A name for the placement of a run; equal names mean equal layers on every rank."""
    if plan is None or not plan.physical.mirrored:
        chunks = args.virtual_pipeline_model_parallel_size or 1
        return f"{STOCK}, {_ranks(args)} x {chunks} chunks"
    return f"{plan.schedule.placement.name}, {_ranks(args)} x {plan.chunks} chunks"


def _ranks(args: Any) -> str:
    return f"{args.pipeline_model_parallel_size} ranks"


def check(loaded: Any, args: Any, placement: str) -> None:
    """Refuse a checkpoint that would be loaded into the wrong layers.

    Args:
        loaded: what Megatron-LM's ``_load_base_checkpoint`` returned: state, name, whether it is a
            release, and the format.

    Raises:
        UsageError: says which flag makes it possible.
    """
    state, name, _, kind = loaded[:4]
    saved_args = state.get("args") if isinstance(state, dict) else None
    if saved_args is None:
        return
    saved = getattr(saved_args, _ATTRIBUTE, None) or of_run(_with_sizes(saved_args), None)
    if saved == placement or (saved.startswith(STOCK) and placement.startswith(STOCK)):
        return
    if getattr(kind, "name", "") == "LEGACY":
        raise UsageError(
            f"the checkpoint {name} is in the legacy format and was written with {saved}, but this "
            f"run has {placement}: load it with the schedule it was written with and save it with "
            "--ckpt-format torch_dist"
        )
    if not args.use_distributed_optimizer or args.finetune or args.no_load_optim:
        return
    metadata = load_content_metadata(preloaded_state_dict=state) or {}
    sharding = metadata.get("distrib_optim_sharding_type")
    if sharding not in (None, *DistributedOptimizer.checkpoint_fully_reshardable_formats):
        raise UsageError(
            f"the optimizer state of the checkpoint {name} is in the format {sharding} and was "
            f"written with {saved}, but this run has {placement}: save it with "
            "--dist-ckpt-optim-fully-reshardable, or load the weights alone with --no-load-optim"
        )


def _with_sizes(saved: Any) -> Any:
    """A checkpoint of stock Megatron says its sizes, but older ones may lack some."""
    for name in ("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size"):
        if not hasattr(saved, name):
            setattr(saved, name, 1)
    return saved

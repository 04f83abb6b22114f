"""Parameter groups without parameters, which a checkpoint must not have.

Megatron makes the same groups on all ranks, and writes what all ranks have in common from the first
one. There it takes an empty list for such a thing. In a V the first rank may have no embedding and
no output layer, for which ``--decoupled-lr`` makes a group: no rank could then load the checkpoint.
A rank without experts has an optimizer of theirs without any weights, whose state has no list when
it has been loaded.
"""

from __future__ import annotations

from typing import Any

MASTERS = "fp32_from_fp16_params"
"""Key of the weights in 32 bits, a list for each group."""


def leave_out(
    original: Any, optimizer: Any, state: Any, is_loading: bool = False, **kw: Any
) -> Any:
    """Return the state of an optimizer to be saved, without groups that are empty on this rank.

    Replaces ``Float16OptimizerWithFloat16Params.sharded_state_dict``.
    """
    found = original(optimizer, state, is_loading, **kw)
    if not is_loading and MASTERS in found:
        found[MASTERS] = [group for group in found[MASTERS] if group]
    return found


def load(original: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Load the state of an optimizer, which may have no weights on this rank.

    Replaces ``Float16OptimizerWithFloat16Params.load_state_dict``.
    """
    if not any(optimizer.fp32_from_float16_groups):
        state.setdefault(MASTERS, [])
    original(optimizer, state)

"""Drop-in pipeline schedules for Megatron-LM: less bubble or less memory, same losses."""

from __future__ import annotations

__version__ = "0.1.0"


def install() -> None:
    """Let this process's Megatron-LM take ``--pipeline-schedule``; call it before the script's own
    imports from Megatron.

    Raises:
        megatron_zb.errors.UsageError: Megatron-LM's training loop cannot be imported.
    """
    from megatron_zb.megatron_lm.hooks import install as install_hooks

    install_hooks()

"""Drop-in pipeline schedules for Megatron-LM: less bubble or less memory, same losses."""

from __future__ import annotations

__version__ = "0.1.0"


def install() -> None:
    """Enable ``--pipeline-schedule`` in this process's Megatron-LM.

    Call it before the script's own imports from Megatron. Until the arguments choose a schedule,
    nothing changes.

    Raises:
        megatron_zb.errors.UsageError: Megatron-LM is too old, or cannot be imported.
    """
    from importlib.util import find_spec

    from megatron_zb.errors import UsageError

    try:
        found = find_spec("megatron.training")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UsageError(
            "Megatron-LM's training loop, megatron.training, cannot be found: put the checkout "
            "first on PYTHONPATH, or start the script with python -m megatron_zb.launch"
        )
    from megatron_zb.megatron_core.versions import warn_of_core

    warn_of_core()  # before what follows imports from Megatron
    from megatron_zb.megatron_lm.hooks import install as install_hooks

    install_hooks()

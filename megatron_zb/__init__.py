"""Drop-in pipeline schedules for Megatron-LM: less bubble or less memory, same losses."""

from __future__ import annotations

__version__ = "0.1.0"


def install(*, cpu: bool = False) -> None:
    """Enable ``--pipeline-schedule`` in this process's Megatron-LM.

    Call it before the script's own imports from Megatron. Until the arguments choose a schedule,
    nothing changes.

    Args:
        cpu: run on CPU ranks over gloo, as ``--cpu`` of the launcher does.

    Raises:
        megatron_zb.errors.UsageError: Megatron-LM is too old, cannot be imported, or, with
            ``cpu``, has been imported already.
    """
    import sys
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

    prepare = None
    if cpu:
        if "megatron.core" in sys.modules:
            raise UsageError(
                "install(cpu=True) comes after an import from Megatron, which has looked for a GPU "
                "by then: call it before all imports from Megatron"
            )
        from megatron_zb.cpu_ranks import prepare_arguments, run_on_cpu

        run_on_cpu(training_loop=True)
        prepare = prepare_arguments
    warn_of_core()  # before what follows imports from Megatron
    from megatron_zb.megatron_lm.hooks import install as install_hooks

    install_hooks(prepare)

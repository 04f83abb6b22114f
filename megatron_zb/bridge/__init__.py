"""Schedules for programs that build their model themselves, such as Megatron-Bridge, slime, verl.

:class:`Settings` travel to the processes of a job; :func:`install` makes each of these run them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_zb.bridge.settings import Settings

if TYPE_CHECKING:
    from megatron_zb.bridge.pipeline import Pipeline

__all__ = ["Settings", "install"]


def install(settings: Settings, model: Any) -> Pipeline:
    """Make this process run a schedule; to be called before ``initialize_model_parallel``.

    Every process of the job calls it, with the same settings. From then on Megatron's
    ``get_forward_backward_func`` returns the schedule's function, also where it has been imported
    by name, until it is taken back.

    Args:
        model: what Megatron builds the model from, which is prepared: a ``TransformerConfig``, a
            provider of Megatron-Bridge, or arguments of Megatron-LM. Where there is none yet,
            anything with ``num_layers`` and ``pipeline_model_parallel_size``.

    Raises:
        megatron_zb.errors.UsageError: the schedule cannot be built for this model or combined with
            its settings, it comes too late, or another is installed.
    """
    from megatron_zb.bridge.pipeline import Pipeline

    return Pipeline(settings, model)

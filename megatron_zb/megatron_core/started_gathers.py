"""Gathers of the distributed optimizer's weights that run beside passes.

Behind its step, Megatron's distributed optimizer gathers the weights from the replicas that have
stepped them, and waits. Where passes compute with copies of older weights, nothing needs the new
ones at once. The gather is Megatron's own, bucket for bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron_zb.megatron_core.data_parallel import bucket_groups_of


class StartedGathers:
    """Gathers of weights that an optimizer has started, and nobody has waited for."""

    def __init__(self) -> None:
        self._handles = list[Any]()

    @contextmanager
    def behind(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Let optimizers step without their gathers, and start these behind all of them.

        Each of several optimizers, as for experts and other weights, would gather the weights of
        all. What is being gathered must not change.
        """
        groups = [group for chunk in chunks for group in bucket_groups_of(chunk)]
        asked = dict[int, Any]()
        for group in groups:
            group.start_param_sync = partial(_note, asked, group)
        try:
            yield
        finally:
            for group in groups:
                del group.start_param_sync
        for group in asked.values():
            self._start(group)

    def _start(self, group: Any) -> None:
        overlaps = group.ddp_config.overlap_param_gather
        group.ddp_config.overlap_param_gather = True
        try:
            group.start_param_sync()
        finally:
            group.ddp_config.overlap_param_gather = overlaps
        self._handles.append(group.param_gather_handle)
        group.param_gather_handle = None

    def wait(self) -> None:
        """Wait until the weights are there."""
        while self._handles:
            handle = self._handles.pop(0)
            if handle is not None:
                handle.wait()


def _note(asked: dict[int, Any], group: Any, *arguments: Any, **keywords: Any) -> None:
    """Take note that the weights of a bucket group are to be gathered."""
    asked.setdefault(id(group), group)
